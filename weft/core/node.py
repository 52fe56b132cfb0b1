"""The one node: an op applied to earlier nodes, interned and immutable, its type derived when it is made."""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, TypeAlias

import torch

from weft.core.errors import NoSuchMethod, TypeMismatch, UnknownName, WeftError
from weft.core.layout import Layout, Mesh, Placement
from weft.core.role import Role

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "f8": torch.float8_e4m3fn, "i64": torch.int64, "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {d: n for n, d in DTYPES.items()}


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    if isinstance(name, torch.dtype) and name in DTYPE_NAMES:
        return name
    if name not in DTYPES:
        raise UnknownName(f"no dtype {name!r}", needed=f"one of {', '.join(DTYPES)}", found=repr(name))
    return DTYPES[name]


@dataclass(frozen=True)
class Type:
    """What is known of a value before it is computed: its dtype, its shape, and how the ranks hold it."""

    dtype: torch.dtype
    layout: Layout

    def __hash__(self) -> int:
        return hash(self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def on(self, axis: str) -> Placement:
        return self.layout.placement(axis)

    def with_layout(self, layout: Layout) -> Type:
        return Type(self.dtype, layout)

    def __str__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]}{self.layout}"


Attrs: TypeAlias = dict[str, Any]
Infer: TypeAlias = "Callable[[tuple[Type, ...], Attrs], Type | tuple[Type, ...]]"


def _as_is(attrs: Attrs) -> Attrs:
    return attrs


class Linear(enum.Enum):
    """In which operands an op is linear, the others held fixed."""

    NONE = "in none"
    EACH = "in each operand alone"
    JOINTLY = "in all operands together"
    FIRST = "in the first operand"


class Kind(enum.Enum):
    """What sort of thing an op is; the verbs ask for it."""

    SOURCE = "makes a value from nothing"
    POINTWISE = "is elementwise"
    REDUCE = "reduces dims of one operand"
    CONTRACT = "multiplies and sums"
    VIEW = "only renames elements"
    COMPOSITE = "a larger computation kept in one piece"
    COMM = "changes the layout, never the value"


Function: TypeAlias = Any  # a function, or None where the entry has none


@dataclass(frozen=True, eq=False)
class Op:
    """One kind of node, and all that is known of it. `ops.registry.define` makes one, and refuses an entry that lacks or misspells a facet."""

    name: str
    infer: Infer
    kind: Kind
    run: Function  # its meaning
    equation: Function = None  # (types, attrs) -> labels of operands and results; None where it infers its types itself
    arity: int | None = None  # of an equation that takes any number
    linear: Linear | tuple[frozenset[int], ...] = Linear.NONE
    monotone: Any = ()  # operand sets through which a partial max or min passes
    local: Function = None  # what a rank does where it must know which slice it holds
    by_dim: bool = False  # of a local form of samples: whether the place of the slice matters to it along `dim` alone
    vjp: Function = None  # cotangents of the operands, in weft ops
    written: Function = None  # it in other ops, by which it is differentiated where it has no vjp
    across: Function = None  # it in other ops, collectives among them, where a dim that it keeps in one piece is sharded
    sparse_cotangents: bool = False  # whether its vjp takes None for results nobody read
    field: Function = None  # its meaning over integers mod a prime
    normal: Callable[[Attrs], Attrs] = _as_is  # attributes as they are kept
    choices: Mapping[str, Any] | None = None  # values of attributes that rules about it are tried with
    flops: Function = None  # of the busiest rank
    matmuls: Function = None  # of an op made of matmuls: (m, n, k, how often) of each, on the busiest rank
    attends: int | None = None  # of attention and its backward: the operand that is the query, which the key follows
    traffic: Function = None  # bytes the busiest rank moves, where it does not read every operand in full
    extra_kernels: int = 0  # small kernels before the one that moves most
    early: bool = False  # whether it is done as soon as its operand is there, however late its result is read
    code: tuple[str, str, str] | None = None  # of a pointwise op: one element of it in numpy, C++ and Triton
    streams: frozenset[str] = frozenset()  # labels along which it can be computed chunk by chunk
    exchange: Function = None  # of a collective: what every rank of a group has afterwards
    wire: Function = None  # of a collective: the share of the bytes that each rank sends
    unfold: Function = None  # of an optimizer's update: it in pointwise ops
    update: Op | None = None  # of an update by rows: the update of the full table
    defined: Function = None  # of an update by rows: it by its definition
    parts: Function = None  # of an update by rows: the nodes it stands for
    erased: Function = None  # what it is to one device, in other ops, where ranks or the order of sums are all that it adds
    pieces: Function = None  # of another op done piece by piece: that op's node, the pieces of every label, and bytes moved to cut and join them
    transcendental: bool = False  # whether elements go through exp, a logarithm and the like, or are drawn: more than they take to be moved
    approximated: bool = False  # whether libraries approximate it, so that its last bits depend on where an element stands in a vector
    adds_nothing: bool = False  # of an op of a tensor taken as one: no sum in it has an order
    is_input: bool = False  # a value given from outside, by `name`
    is_number: bool = False  # one number, `value`
    is_item: bool = False  # one of the values of its operand, by `index`
    is_tuple: bool = False  # its operands as one tuple
    is_cast: bool = False  # its operand in another dtype
    doc: str = ""

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        return apply(self, args, attrs)

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __reduce__(self) -> Any:
        return op_named, (self.name,)


OPS: dict[str, Op] = {}


def op_named(name: str) -> Op:
    if name not in OPS:
        raise UnknownName(
            f"no op {name!r}", needed=f"one of {', '.join(sorted(OPS))}", found=repr(name), try_="define it with weft.lang.define(...)"
        )
    return OPS[name]


@dataclass(frozen=True, eq=False)  # interned below, so identity is equality
class Node:
    """One op applied to earlier nodes. All else about it is derived."""

    op: Op
    args: tuple[Node, ...]
    attrs: tuple[tuple[str, Any], ...]
    types: tuple[Type, ...]

    def __reduce__(self) -> Any:
        raise TypeError("a node is not pickled: print its program and parse it back")

    @property
    def type(self) -> Type:
        if len(self.types) != 1:
            raise TypeMismatch(
                f"{self.op.name} gives {len(self.types)} values", needed="one of them", found="the tuple", try_="unpack it: a, b = ..."
            )
        return self.types[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def layout(self) -> Layout:
        return self.type.layout

    @property
    def mesh(self) -> Mesh:
        return self.types[0].mesh

    @property
    def role(self) -> Role | None:
        """What an input is for, where that is known."""
        role: Role | None = self.attr("role")
        return role

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def attr(self, name: str, default: Any = None) -> Any:
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def __iter__(self) -> Iterator[Node]:
        """A node of several values unpacks into its items."""
        if len(self.types) == 1:
            raise TypeMismatch(
                f"{self.op.name} gives one value and cannot be unpacked", needed="an op of several values", found=self.op.name
            )
        return iter([make(op_named("item"), (self,), {"index": i}) for i in range(len(self.types))])

    def __repr__(self) -> str:
        shown = ", ".join(str(t) for t in self.types)
        return f"<{self.op.name}: {shown}>"

    # Ordinary operators are ops by name; the entries themselves live in weft.ops.

    def __add__(self, other: Any) -> Any:
        return op_named("add")(self, other)

    def __radd__(self, other: Any) -> Any:
        return op_named("add")(other, self)

    def __sub__(self, other: Any) -> Any:
        return op_named("sub")(self, other)

    def __rsub__(self, other: Any) -> Any:
        return op_named("sub")(other, self)

    def __mul__(self, other: Any) -> Any:
        return op_named("mul")(self, other)

    def __rmul__(self, other: Any) -> Any:
        return op_named("mul")(other, self)

    def __truediv__(self, other: Any) -> Any:
        return op_named("div")(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return op_named("div")(other, self)

    def __pow__(self, other: Any) -> Any:
        return op_named("pow")(self, other)

    def __rpow__(self, other: Any) -> Any:
        return op_named("pow")(other, self)

    def __matmul__(self, other: Any) -> Any:
        return op_named("matmul")(self, other)

    def __gt__(self, other: Any) -> Any:
        return op_named("gt")(self, other)

    def __ge__(self, other: Any) -> Any:
        return op_named("ge")(self, other)

    def __lt__(self, other: Any) -> Any:
        return op_named("lt")(self, other)

    def __le__(self, other: Any) -> Any:
        return op_named("le")(self, other)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NoSuchMethod(
            f"a value has no {name!r}", needed="a function of weft", found=f"x.{name}", try_=f"weft.lang.{name}(x)" if name in OPS else None,
            where=user_line(),
        )  # fmt: skip

    def __getitem__(self, index: Any) -> Any:
        raise TypeMismatch(
            "a value is not indexed", needed="an op", found=f"x[{index!r}]", try_=["weft.lang.narrow(x, dim, start, stop)", "weft.lang.embedding(x, i)"],
            where=user_line(),
        )  # fmt: skip

    def __float__(self) -> float:
        raise TypeMismatch(
            "a value is not known while the program is written", needed="an op on it", found="float(x)", try_="return it as an output",
            where=user_line(),
        )  # fmt: skip

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func)).strip("_")
        raise TypeMismatch(
            f"torch's {name} was given a value of a program", needed="weft's ops, and numbers", found=f"torch.{name}",
            try_=f"weft.lang.{name}" if name in OPS else "weft.capture(model, example) reads torch code", where=user_line(),
        )  # fmt: skip

    def __neg__(self) -> Any:
        return op_named("neg")(self)

    def __abs__(self) -> Any:
        return op_named("abs")(self)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Whether it is the same node; a number it can never be."""
        if isinstance(other, (int, float)):
            raise TypeMismatch(
                "== on a value asks whether it is the same node", needed="an op that compares elements", found=f"== {other!r}",
                try_=f"weft.lang.eq(x, {other!r}), or weft.lang.ne", where=user_line(),
            )  # fmt: skip
        return self is other

    def __bool__(self) -> bool:
        """True, as of any object; but whoever writes a program, outside weft, has no elements to decide by."""
        if _listeners and not sys._getframe(1).f_globals.get("__name__", "").startswith("weft."):
            raise TypeMismatch(
                "a value is not known while the program is written", needed="the same program whatever the value",
                found=f"{self.op.name} where Python asks for true or false", try_="weft.lang.where(condition, a, b)", where=user_line(),
            )  # fmt: skip
        return True


_built: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
_listeners: list[Callable[[Node], None]] = []


def make(op: Op, args: tuple[Node, ...], attrs: Attrs) -> Node:
    """The only maker of nodes: the same request gives the same node, and a bad one fails here, on the line that wrote it."""
    given = tuple(sorted(attrs.items()))
    key = (op, args, given, tuple(repr(v) for _, v in given if isinstance(v, float)))  # 0.0 == -0.0, but 1 / 0.0 != 1 / -0.0
    node = _built.get(key)
    if node is None:
        try:
            node = Node(op, args, given, inferred(op, args, given))
        except WeftError as e:
            raise e.at(user_line()) from None
        _built[key] = node
    for listener in _listeners:
        listener(node)
    return node


def inferred(op: Op, args: tuple[Node, ...], given: tuple[tuple[str, Any], ...]) -> tuple[Type, ...]:
    """The types of an op's values, worked out once for operands of the same types: the blocks of a model are the same."""
    if op.is_item:
        return (args[0].types[dict(given)["index"]],)
    return _inferred(op, tuple(_one(a, op) for a in args), given)


@lru_cache(maxsize=1 << 16)
def _inferred(op: Op, types: tuple[Type, ...], given: tuple[tuple[str, Any], ...]) -> tuple[Type, ...]:
    found = op.infer(types, dict(given))
    return found if isinstance(found, tuple) else (found,)


def _one(node: Node, op: Op) -> Type:
    if len(node.types) == 1:
        return node.types[0]
    raise TypeMismatch(
        f"{op.name} was given all {len(node.types)} values of {node.op.name}",
        needed="one value",
        found=f"a tuple of {len(node.types)}",
        try_="unpack it: a, b = ...",
    )


def derived(node: Node, known: dict[Node, bool], of: Callable[[Node], bool]) -> bool:
    """A fact about a node that follows, by `of`, from that of its operands; `known` keeps it. Chains may be longer than Python recurses."""
    stack = [node]
    while stack:
        n = stack[-1]
        waiting = [a for a in n.args if a not in known] if n not in known else []
        if waiting:
            stack.extend(waiting)
            continue
        if n not in known:
            known[n] = of(n)
        stack.pop()
    return known[node]


class Symbol:
    """What stands for a node in the two sides of a rewrite rule. An op applied to one gives a `rewrite.pattern` expression."""

    def symbol_apply(self, op: Op, args: tuple[Any, ...], attrs: Attrs) -> Any:
        raise NotImplementedError  # every subclass answers


def apply(op: Op, args: tuple[Any, ...], attrs: Attrs) -> Any:
    """An op on nodes, numbers or symbols; numbers become constants of the dtype of the operands next to them."""
    flat = tuple(x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,)))
    symbol = next((a for a in flat if isinstance(a, Symbol)), None)
    if symbol is not None:
        return symbol.symbol_apply(op, flat, attrs)
    named = next((k for k, v in attrs.items() if isinstance(v, Node)), None)
    if named is not None:
        raise TypeMismatch(
            f"{op.name} was given {named}= as an attribute", needed="program values by position", found=f"{named}={attrs[named]!r}"
        )
    nodes = [a for a in flat if isinstance(a, Node)]
    return make(op, tuple(_as_node(a, nodes, op) for a in flat), op.normal(attrs))


def _as_node(value: Any, others: list[Node], op: Op) -> Node:
    if isinstance(value, Node):
        return value
    if isinstance(value, (bool, int, float)) and others:
        return constant(value, _number_dtype(value, others), others[0].mesh)
    raise TypeMismatch(
        f"{op.name} cannot take {type(value).__name__}", needed="program values, or numbers with at least one", found=repr(value)
    )


def _number_dtype(value: float, others: list[Node]) -> torch.dtype:
    floats = [n.type.dtype for n in others if n.type.dtype.is_floating_point]
    if floats:
        return floats[0]
    if isinstance(value, float):
        return torch.float32
    return others[0].type.dtype


def constant(value: float, dtype: torch.dtype, mesh: Mesh) -> Node:
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    return make(op_named("const"), (), {"value": kind(value), "dtype": DTYPE_NAMES[dtype], "mesh": mesh.key})


@contextmanager
def listening(listener: Callable[[Node], None]) -> Iterator[None]:
    """Tell `listener` of every node that is made meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def toposort(roots: Iterable[Node]) -> list[Node]:
    """Every node the roots need, arguments first; the order depends on the roots alone."""
    order: dict[Node, None] = {}
    stack = [(r, False) for r in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if node in order:
            continue
        if ready:
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
    return list(order)


def with_operands(node: Node, args: tuple[Node, ...]) -> Node:
    """The same op on other operands; the node itself where they are its own."""
    return node if args == node.args else make(node.op, args, dict(node.attrs))


def remade(roots: Iterable[Node], swap: Mapping[Node, Node]) -> dict[Node, Node]:
    """What becomes of the roots and all they need when some nodes are replaced."""
    made = dict(swap)
    for n in toposort(roots):
        if n not in made:
            made[n] = with_operands(n, tuple(made[a] for a in n.args))
    return made


def user_line() -> str | None:
    """File and line of the innermost caller outside weft."""
    found = _user_frame()
    return found and f"{found[0].f_code.co_filename.rsplit('/', 1)[-1]}, line {found[0].f_lineno}"


def user_level() -> int:
    """The `stacklevel` with which a warning of the caller shows the user's line."""
    found = _user_frame()
    return found[1] if found else 2


def _user_frame() -> tuple[FrameType, int] | None:
    """The innermost caller outside weft, and how far up it stands from who asks."""
    frame, level = sys._getframe(2), 1
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("weft.", "torch.")) and name not in ("contextlib", "functools"):
            return frame, level
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return None
