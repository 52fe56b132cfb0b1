"""A `fuse` group of a program as a fused group of expressions, and which memory each of its slots is.

Every rank works on its slice: a reduction collective reads all ranks' terms of it, a gather writes it to all ranks.
Parts of the group that are the same (the same formulas for each of many parameters) become rows of one body.
"""

from __future__ import annotations

import keyword
import math
from dataclasses import dataclass
from typing import Any

from weft.codegen import expr
from weft.codegen.expr import Slot, Value
from weft.codegen.formula import formula
from weft.codegen.rows import NotFusable, Rows
from weft.core.layout import Layout, Replicated, S
from weft.core.node import DTYPE_NAMES, Node
from weft.core.program import Group, Program
from weft.ops.pointwise import dropout_op
from weft.ops.registry import Kind
from weft.ops.shape import reshape_op

REDUCES = {"sum": "sum", "amax": "max", "amin": "min"}
JOINS = {"add": "sum", "maximum": "max", "minimum": "min"}


@dataclass(frozen=True)
class Place:
    """Where a slot of one row group lives: a value of the program, and the first element of each of its rows."""

    node: Node
    role: str  # terms, full, own, out, gathered: how the ranks hold it
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One tensor's share of the group: its rows, and the places of its slots."""

    lengths: tuple[int, ...]  # of its rows on this rank
    span: int  # the longest a row of it is on any rank
    places: dict[str, Place]
    scalars: dict[str, Node]


@dataclass(frozen=True)
class Fused:
    """A group ready for code: the body, and the parts that fill its rows on one rank."""

    body: expr.Group
    axis: str | None
    parts: tuple[Part, ...]
    reused: dict[Node, Node]  # results that overwrite an input, and that input
    numbers: dict[Node, tuple[int, int]]  # scalars that leave: the part, and which of the body's numbers


def fuse_group(program: Program, group: Group, rank: int, *, donate: bool = False, spend: frozenset[str] = frozenset()) -> list[Fused]:
    """What `group` does on `rank`, one body for each kind of tensor in it.

    With `donate`, the next value of a state overwrites the last one; inputs named in `spend` may be overwritten once read.
    """
    return _Lowering(program, group, rank, donate, spend).lower()


class _Lowering:
    def __init__(self, program: Program, group: Group, rank: int, donate: bool, spend: frozenset[str]) -> None:
        self.program, self.group, self.donate, self.spend = program, group, donate, spend
        items = [u for n in group.nodes for u in program.users[n] if u.op.is_item]
        self.nodes = list(dict.fromkeys([*group.nodes, *items]))
        self.members = set(self.nodes)
        self.shares_totals = False  # whether some total is over several parts
        self.coords = program.mesh.coords(rank)
        self.axis = self._axis()
        self.outputs = [n for n in self.nodes if len(n.types) == 1 and self._leaves(n)]
        self.kept = {program.input_names[i] for _, i in program.state}
        self._joined: dict[Node, dict[int, Node] | None] = {}

    def lower(self) -> list[Fused]:
        for n in self.nodes:
            if n.op.name in REDUCES and not is_scalar(n):
                raise NotFusable(f"{n.op.name} over some dims inside a fused group", needed="a sum over all elements", found=str(n.type))
        components = self._components()
        self.home = {n: k for k, (nodes, _) in enumerate(components) for n in nodes}
        self.numbers = self._numbers(len(components))
        lost = [n for n in self.outputs if is_scalar(n) and not any(n in own for own in self.numbers)]
        if lost:
            raise NotFusable(
                f"group {self.group.name} gives a number made of tensors it stores nothing of",
                needed="totals of what is stored",
                found=lost[0].op.name,
            )
        self.sums = self._sums_of_totals()
        kinds: dict[Any, list[tuple[list[Node], list[Node]]]] = {}
        for nodes, outputs in components:
            kinds.setdefault(_Component(self, nodes, outputs).lower().signature, []).append((nodes, outputs))
        if len(kinds) > 1 and self.shares_totals:
            raise NotFusable(
                f"group {self.group.name} mixes formulas that share one total",
                needed="one total over tensors with the same formulas and dtypes",
                found=f"{len(kinds)} kinds of tensor",
            )
        suffixes = [""] if len(kinds) == 1 else [f"_{k}" for k in range(len(kinds))]
        return [self._one_body(suffix, members) for suffix, members in zip(suffixes, kinds.values(), strict=True)]

    def _one_body(self, suffix: str, members: list[tuple[list[Node], list[Node]]]) -> Fused:
        names = _readable([node for node, _ in _Component(self, *members[0]).lower().slots], self.program)
        lowered = [_Component(self, nodes, outputs, names).lower() for nodes, outputs in members]
        numbers = tuple(v for _, v in lowered[0].numbers)
        body = expr.Group(self.group.name + suffix, tuple(lowered[0].stores), numbers)
        reused = {n: old for c in lowered for n, old in c.reused.items()}
        handed = {n: (k, j) for k, c in reversed(list(enumerate(lowered))) for j, (n, _) in enumerate(c.numbers)}
        return Fused(body, self.axis, tuple(c.part() for c in lowered), reused, handed)

    def _axis(self) -> str | None:
        axes = {n.attr("axis") for n in self.group.nodes if n.op.kind is Kind.COMM}
        if len(axes) > 1:
            raise NotFusable(
                f"group {self.group.name} communicates along several axes", needed="one mesh axis", found=", ".join(sorted(axes))
            )
        return axes.pop() if axes else None

    def _leaves(self, n: Node) -> bool:
        return bool(self.program.outputs_of(n)) or any(u not in self.members for u in self.program.users[n])

    def _components(self) -> list[tuple[list[Node], list[Node]]]:
        """Nodes that share tensors belong together; scalars join nothing."""
        adjacent = {n: [n, *operands(n)] for n in self.nodes if len(n.types) == 1 and not is_scalar(n)}
        adjacent |= {n: list(operands(n)) for n in self.nodes if n.op.name in REDUCES}
        parent = {x: x for xs in adjacent.values() for x in xs if len(x.types) == 1 and not is_scalar(x)}

        def find(n: Node) -> Node:
            while parent[n] is not n:
                parent[n] = n = parent[parent[n]]
            return n

        for xs in adjacent.values():
            tensors = [x for x in xs if x in parent]
            for x in tensors[1:]:
                parent[find(x)] = find(tensors[0])
        found: dict[Node, list[Node]] = {}
        for n in parent:
            found.setdefault(find(n), []).append(n)
        stored: dict[Node, list[Node]] = {root: [] for root in found}
        for n in self.outputs:
            if n in parent:
                stored[find(n)].append(n)
        parts = [(nodes, stored[root]) for root, nodes in found.items()]
        return [(nodes, outputs) for nodes, outputs in parts if outputs] or parts

    def _numbers(self, components: int) -> list[list[Node]]:
        """By component, the scalars that leave and are a matter of its tensors; what is a matter of none is of each."""
        about: dict[Node, int] = {}  # of each member, the components whose totals it is made from, as bits
        for n in (n for n in self.program.nodes if n in self.members):
            total = n.op.name in REDUCES and not is_scalar(operands(n)[0])
            bits = 1 << self.home.get(operands(n)[0], components) if total else 0
            for more in (about.get(a, 0) for a in n.args):
                bits = bits if more in (0, bits) else bits | more
            about[n] = bits
        found: list[list[Node]] = [[] for _ in range(components)]
        for n in (n for n in self.outputs if is_scalar(n)):
            for k in range(components):
                if not about[n] or about[n] >> k & 1:
                    found[k].append(n)
        return found

    def joined(self, n: Node) -> dict[int, Node] | None:
        """If a scalar is the sum (max, min) of one total of each component: by component, what its total is of."""
        if n not in self._joined:
            self._joined[n] = self._totals_of_all(n) if n in self.sums else None
        return self._joined[n]

    def _sums_of_totals(self) -> set[Node]:
        """Scalars that are a sum (max, min) of totals and of nothing else."""
        found: set[Node] = set()
        for n in (n for n in self.program.nodes if n in self.members and n.op.name in JOINS and is_scalar(n)):
            under = [operands(a)[0] if a in self.members and collective(a) == "all_reduce" else a for a in n.args]
            if all(x in self.members and (REDUCES.get(x.op.name) == JOINS[n.op.name] or x in found and x.op is n.op) for x in under):
                found.add(n)
        return found

    def _totals_of_all(self, n: Node) -> dict[int, Node] | None:
        tree = _flat(n, n.op.name, self.members)
        leaves = [operands(x)[0] if collective(x) == "all_reduce" else x for x in tree]
        homes = [self.home.get(x.args[0]) for x in leaves]
        if len(set(homes)) == 1:
            return None
        if sorted(h for h in homes if h is not None) != list(range(1 + max(self.home.values()))):
            raise NotFusable(
                "a total over some parts of the group", needed="one total of each part, over all of them", found=f"parts {homes}"
            )
        return {h: x.args[0] for h, x in zip(homes, leaves, strict=True) if h is not None}


class _Component:
    """One tensor's formulas as expressions over slots named in order of use."""

    def __init__(self, lowering: _Lowering, nodes: list[Node], outputs: list[Node], names: list[str] | None = None) -> None:
        self.lowering, self.nodes, self.outputs, self.names = lowering, set(nodes), outputs, names
        self.number = lowering.home[nodes[0]]
        self.values: dict[Node, Value] = {}
        self.slots: dict[tuple[Node, str], Slot] = {}
        self.scalars: dict[str, Node] = {}
        self.stores: list[tuple[Slot, Value]] = []
        self.reused: dict[Node, Node] = {}
        self.numbers: list[tuple[Node, Value]] = []

    def lower(self) -> _Component:
        self.domain = self._domain()
        self.rows = Rows(self.domain, self.lowering.axis, self.lowering.coords)
        for n in self.outputs:
            self.stores.append(self._store(n))
        self.numbers = [(n, self.value(n)) for n in self.lowering.numbers[self.number]]
        self.signature = (tuple(self.stores), tuple(v for _, v in self.numbers))
        return self

    # -- which elements --------------------------------------------------------------------------------------------

    def _domain(self) -> Layout:
        """The layout all per-element values share: that of what is stored."""
        layouts = {self._stored(n).type.layout for n in self.outputs}
        if len(layouts) != 1:
            raise NotFusable(
                f"group {self.lowering.group.name} works on tensors of several layouts", needed="one layout", found=", ".join(map(str, layouts))
            )
        return layouts.pop()

    def _stored(self, n: Node) -> Node:
        return operands(n)[0] if collective(n) == "all_gather" else n

    def _store(self, n: Node) -> tuple[Slot, Value]:
        value = self.value(self._stored(n))
        if collective(n) == "all_gather":
            reused = self._donated(n, "full")
            slot = reused or self.slot(n, "gathered", spread=True)
            return (slot, value)
        return (self._donated(n, "own") or self.slot(n, "out"), value)

    def _donated(self, n: Node, role: str) -> Slot | None:
        """The slot of the input whose next value this is, if it may be overwritten."""
        program = self.lowering.program
        becomes = next((program.next_of[o] for o in program.outputs_of(n) if o in program.next_of), None)
        if becomes is None or not self.lowering.donate:
            return None
        old = self.reused[n] = program.input_names[becomes]
        return self.slot(old, role, spread=role == "full")

    def slot(self, node: Node, role: str, *, spread: bool = False) -> Slot:
        key = (node, role)
        if key not in self.slots:
            terms, spent = role == "terms", node.attr("name") in self.lowering.spend
            once = self.rows.is_once(node, role)
            name = self.names[len(self.slots)] if self.names else f"x{len(self.slots)}"
            numbers = role == "index"
            if DTYPE_NAMES[node.dtype] not in expr.BYTES and not numbers:
                raise NotFusable("a tensor that is not of floats", needed=", ".join(expr.BYTES), found=str(node.type))
            self.slots[key] = Slot(name, DTYPE_NAMES[node.dtype], spread or terms, terms and spent, "", once, numbers)
        return self.slots[key]

    # -- what is computed ------------------------------------------------------------------------------------------

    def value(self, n: Node) -> Value:
        stack = [n]  # a chain of ops may be longer than Python's own stack
        while stack:
            reads = stack[-1].args if self._is_plain(stack[-1]) else ()
            first = next((a for a in reads if a not in self.values), None)
            if first is not None:
                stack.append(first)
                continue
            done = stack.pop()
            if done not in self.values:
                self.values[done] = self._lower(done)
        return self.values[n]

    def _is_plain(self, n: Node) -> bool:
        """Whether a member is made from all its operands, each element by itself."""
        return n in self.lowering.members and n.op.kind is Kind.POINTWISE and n.op is not dropout_op and self._joined_totals(n) is None

    def _lower(self, n: Node) -> Value:
        if n.op.is_number:
            return expr.const(n.attr("value"))
        if n not in self.lowering.members:
            return self._outside(n)
        if collective(n):
            return self._communicated(n)
        if n.op.name in REDUCES:
            return self._total(n)
        if (terms := self._joined_totals(n)) is not None:
            return self._joined(terms, JOINS[n.op.name])
        if n.op is dropout_op:
            return self._dropout(n)
        if n.op.kind is Kind.POINTWISE:
            return formula(n, self.value)
        if n.op is reshape_op and is_scalar(n):
            return self.value(n.args[0])
        raise NotFusable(
            f"{n.op.name} cannot be part of a fused group",
            needed="pointwise ops, full sums, and collectives along one axis",
            found=n.op.name,
        )

    def _outside(self, n: Node) -> Value:
        if is_scalar(n):
            name = _identifier(n, self.scalars)
            self.scalars[name] = n
            return expr.scalar(name)
        if n.type.layout != self.domain and n.shape == self.domain.shape:
            return self._slice_of(n)
        return expr.load(self.slot(n, "own"))

    def _slice_of(self, n: Node) -> Value:
        """This rank's slice of a value that it holds in full."""
        if self.lowering.axis is None or not isinstance(n.type.on(self.lowering.axis), Replicated):
            raise NotFusable("a tensor held in another way than the rest of its group", needed=str(self.domain), found=str(n.type))
        return expr.load(self.slot(n, "full", spread=self.lowering.donate and n in self.lowering.kept))

    def _communicated(self, n: Node) -> Value:
        (x,), name = operands(n), collective(n)
        if is_scalar(n):
            if name == "all_reduce":
                return self.value(x)  # a total is already over all ranks
            raise NotFusable(f"{name} of a scalar inside a fused group", needed="all_reduce of a sum", found=str(x.type))
        if name in ("reduce_scatter", "all_reduce"):
            op = x.type.on(self.lowering.axis or "").op
            x = _skip_widening(x, self.lowering.members)
            if x in self.lowering.members:
                raise NotFusable(
                    f"{name} of a value made in the same group", needed="its terms in memory before the group starts", found=x.op.name
                )
            return expr.reduce(self.slot(x, "terms"), op)
        if name == "slice":
            if x in self.lowering.members:
                raise NotFusable(
                    "slice of a value made in the same group", needed="the full value in memory before the group starts", found=x.op.name
                )
            return self._slice_of(x)
        raise NotFusable(
            f"{name} in the middle of a fused group", needed="reduce_scatter or all_reduce first, all_gather last", found=str(name)
        )

    def _dropout(self, n: Node) -> Value:
        """The mask is drawn from the element's number in the full tensor, as everywhere."""
        x, seed, *part = n.args
        if part:
            raise NotFusable(
                "dropout in a part of the batch", needed="a mask by the element's number in the tensor", found="in the full batch"
            )
        if n.shape != self.domain.shape:
            raise NotFusable("dropout of another shape than its group", needed=str(list(self.domain.shape)), found=str(list(n.shape)))
        numbers = self.slot(self._stored(self.outputs[0]), "index")
        drawn = expr.uniform(numbers, self.value(seed), n.attr("site"))
        p, given = n.attr("p"), self.value(x)
        return expr.apply("where", expr.apply("ge", drawn, p), given * (1.0 / (1.0 - p)) if p < 1 else given * 0.0, given * 0.0)

    def _total(self, n: Node) -> Value:
        x = n.args[0]
        if is_scalar(x):
            return self.value(x)
        if x not in self.nodes and x in self.lowering.members:
            raise NotFusable("a total of another tensor's values", needed="totals of this tensor, or one total over all", found=n.op.name)
        return self._once(expr.total(self.value(x), REDUCES[n.op.name]))

    def _once(self, total: Value) -> Value:
        """A total over all ranks' slices; of what every rank holds in full, a sum has counted it once for each rank."""
        axis = self.lowering.axis
        if axis is None or isinstance(self.domain.placement(axis), S) or total.name != "sum":
            return total
        return total * (1.0 / self.domain.mesh.size(axis))

    def _joined_totals(self, n: Node) -> dict[int, Node] | None:
        return self.lowering.joined(n) if n.op.name in JOINS and is_scalar(n) else None

    def _joined(self, of: dict[int, Node], op: str) -> Value:
        """A sum of every part's total is one total over all rows."""
        self.lowering.shares_totals = True
        return self._once(expr.total(self.value(of[self.number]), op, over_rows=True))

    # -- where it lives --------------------------------------------------------------------------------------------

    def part(self) -> Part:
        for node, role in self.slots:
            self.rows.add(node, role)
        places = {slot.name: Place(node, role, self.rows.offsets(node, role)) for (node, role), slot in self.slots.items()}
        return Part(self.rows.lengths(), self.rows.span, places, dict(self.scalars))


def _flat(n: Node, op: str, members: set[Node]) -> list[Node]:
    """The operands of a tree of one op; a reduction over ranks in between changes nothing."""
    found, stack = list[Node](), [n]
    while stack:
        n = stack.pop()
        if n in members and n.op.name == op:
            stack.extend(reversed(n.args))
        elif n in members and collective(n) == "all_reduce" and operands(n)[0].op.name == op:
            stack.append(operands(n)[0])
        else:
            found.append(n)
    return found


def collective(n: Node) -> str | None:
    """The collective this is one result of, whether it moves one tensor or several."""
    call = n.args[0] if n.op.is_item else n
    return call.op.name if call.op.kind is Kind.COMM else None


def operands(n: Node) -> tuple[Node, ...]:
    """What this value is made from; of a collective over several tensors, the one it is."""
    return (n.args[0].args[n.attr("index")],) if n.op.is_item and collective(n) else n.args


def is_scalar(n: Node) -> bool:
    return len(n.types) == 1 and math.prod(n.shape) == 1


def _skip_widening(x: Node, members: set[Node]) -> Node:
    """Terms are widened as they are read, so a cast to a wider float before a reduction costs nothing."""
    while x in members and x.op.is_cast and x.dtype.is_floating_point and x.dtype.itemsize >= x.args[0].dtype.itemsize:
        x = x.args[0]
    return x


# what generated code calls things of its own: a slot of such a name gets another
TAKEN = {
    "all", "at", "block", "count", "even", "first", "i", "inside", "j", "k", "lane", "last", "meet", "more", "n", "new", "op", "own", "pads",
    "part", "piece", "pieces", "r", "rank", "real", "row", "rows", "run", "s", "scalars", "start", "stop", "sum", "sums", "sums_of", "t",
    "table", "theirs", "tile", "tl", "total", "totals", "triton", "uniform", "weft", "which", "whole", "work", "world",
}  # fmt: skip


def _readable(nodes: list[Node], program: Program) -> list[str]:
    """A name for each slot after the input or output it is, without the numbers that tell parts apart."""
    names: list[str] = []
    for k, n in enumerate(nodes):
        given = n.attr("name") if n.op.is_input else next(iter(program.outputs_of(n)), "x")
        base = "".join(c if c.isalnum() else "_" for c in str(given)).strip("_0123456789") or "x"
        usable = base.isidentifier() and not keyword.iskeyword(base) and base not in TAKEN | set(names)
        names.append(base if usable else f"{base}{k}_" if base in TAKEN or keyword.iskeyword(base) else f"{base}{k}")
    return names


def _identifier(n: Node, taken: dict[str, Node]) -> str:
    """A name for a scalar argument: its own where that is a free name in Python, else a number."""
    name = str(n.attr("name") or "").replace(".", "_")
    usable = name.isidentifier() and not keyword.iskeyword(name) and name not in ("math", "totals")
    while not usable or taken.get(name, n) is not n:
        name, usable = f"scalar{len(taken)}{'_' * (name in taken)}", True
    return name
