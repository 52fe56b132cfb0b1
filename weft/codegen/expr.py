"""The small language of a fused group: what happens to one element of each tensor of a list.

A value lives at one of three levels: once per CALL (a hyper-parameter), once per ROW (a tensor's norm), or per ELEMENT.
A slot is a tensor argument. A spread slot has a copy on every rank: `reduce` reads all copies, a store writes all.
So reduce_scatter + compute + all_gather is a reduce, pointwise values, and a store to a spread slot.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from weft.core.errors import KernelError
from weft.core.node import OPS


class Level(enum.IntEnum):
    CALL = 0
    ROW = 1
    ELEMENT = 2


BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
ARITY = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "maximum": 2, "minimum": 2, "pow": 2,
    "gt": 2, "ge": 2, "lt": 2, "le": 2, "eq": 2, "ne": 2, "where": 3,
    "neg": 1, "abs": 1,
    "reciprocal": 1, "uniform": 3, "low24": 1, "high24": 1, "sign": 1, "floor": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """A tensor argument, one per row."""

    name: str
    dtype: str
    spread: bool = False  # a copy on every rank, in peer memory
    disposable: bool = False  # this rank's own slice of it may be overwritten once it has been reduced
    inside: str = ""  # the spread slot whose own copy this one is
    once: bool = False  # one element for the full row
    index: bool = False  # no memory: the number of each element in the full tensor

    @property
    def nbytes(self) -> int:
        return 0 if self.index else BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Value:
    """One value of the group, interned by `make`. `fn` is load, reduce, scalar, const, cast, total, or in ARITY."""

    fn: str
    args: tuple[Value, ...]
    slot: Slot | None
    name: str  # of a scalar; op of a reduce or total (sum, max, min); dtype of a cast; site of a uniform
    const: float
    level: Level

    def __add__(self, other: Value | float) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: float) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: float) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: float) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return apply("div", other, self)

    def __neg__(self) -> Value:
        return apply("neg", self)


@dataclass(frozen=True)
class Group:
    """A fused group: values stored into slots, and numbers handed back. Its rows are filled in when it is bound to tensors."""

    name: str
    stores: tuple[tuple[Slot, Value], ...]
    numbers: tuple[Value, ...] = ()  # below element level: what is known of totals when all is done
    slots: tuple[Slot, ...] = field(init=False)
    scalars: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        values = list(ordered(self.roots))
        read = [v.slot for v in values if v.slot]
        object.__setattr__(self, "slots", tuple(dict.fromkeys([*read, *(slot for slot, _ in self.stores)])))
        object.__setattr__(self, "scalars", tuple(dict.fromkeys(v.name for v in values if v.fn == "scalar")))
        self._check()

    @property
    def roots(self) -> tuple[Value, ...]:
        """All that is wanted of the group."""
        return (*(value for _, value in self.stores), *self.numbers)

    @property
    def compute(self) -> str:
        """The type arithmetic is done in."""
        return "f64" if any(slot.dtype == "f64" for slot in self.slots) else "f32"

    def _check(self) -> None:
        names = [slot.name for slot in self.slots]
        if len(set(names)) != len(names) or len({slot for slot, _ in self.stores}) != len(self.stores):
            raise KernelError("a fused group names a slot twice", needed="one name per slot, one store per slot",
                              found=", ".join(names))  # fmt: skip
        if not any(v.level == Level.ELEMENT for _, v in self.stores):
            raise KernelError("a fused group stores no tensor", needed="at least one store of per-element values",
                              found=f"stores to {[s.name for s, _ in self.stores]}")  # fmt: skip


_made: WeakValueDictionary[tuple[object, ...], Value] = WeakValueDictionary()


def make(fn: str, args: tuple[Value, ...] = (), *, slot: Slot | None = None, name: str = "", const: float = 0.0,
         level: Level = Level.ELEMENT) -> Value:  # fmt: skip
    """The only maker of values: the same request gives the same value."""
    key = (fn, args, slot, name, const, level)
    value = _made.get(key)
    if value is None:
        value = _made[key] = Value(*key)
    return value


def load(slot: Slot) -> Value:
    """This rank's slice of a slot, from its own memory."""
    return make("load", slot=slot)


def reduce(slot: Slot, op: str = "sum") -> Value:
    """The slice of a spread slot combined over every rank's copy, in rank order, in at least float32."""
    if not slot.spread:
        raise KernelError(f"cannot reduce {slot.name}", needed="a spread slot", found="a slot only this rank holds")
    return make("reduce", slot=slot, name=op)


def scalar(name: str) -> Value:
    """A number given with each call, for each row."""
    return make("scalar", name=name, level=Level.CALL)


def const(number: float) -> Value:
    return make("const", const=float(number), level=Level.CALL)


def uniform(index: Slot, seed: Value, site: int) -> Value:
    """A number in [0, 1) for each element, drawn from its place in the full tensor, so that every way to shard gives the same."""
    return make("uniform", (load(index), apply("low24", seed), apply("high24", seed)), name=str(int(site)))


def cast(value: Value, dtype: str) -> Value:
    return make("cast", (value,), name=dtype, level=value.level)


def total(value: Value, op: str = "sum", *, over_rows: bool = False) -> Value:
    """`value` combined over all elements of the row on all ranks; with `over_rows`, over all rows too."""
    return make("total", (value,), name=op, level=Level.CALL if over_rows else Level.ROW)


def arities() -> dict[str, int | None]:
    """How many values each op of a group takes, those that are written by their entries among them."""
    return {**{name: op.arity for name, op in OPS.items() if op.code is not None}, **ARITY}


def apply(fn: str, *args: Value | float) -> Value:
    """A pointwise op; numbers become constants and lower levels spread over higher ones."""
    if (ARITY.get(fn) or arities().get(fn)) != len(args):
        raise KernelError(f"a fused group cannot apply {fn} to {len(args)} values",
                          needed=f"one of {', '.join(sorted(arities()))}", found=fn)  # fmt: skip
    values = tuple(a if isinstance(a, Value) else const(a) for a in args)
    return make(fn, values, level=max(v.level for v in values))


def sqrt(value: Value) -> Value:
    return apply("sqrt", value)


def ordered(roots: Iterable[Value]) -> Iterator[Value]:
    """Every value under `roots`, arguments first, each once."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        value, ready = stack.pop()
        if ready:
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack.append((value, True))
            stack.extend((arg, False) for arg in reversed(value.args))
