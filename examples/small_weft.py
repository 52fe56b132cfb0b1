"""weft from nothing: the whole idea in one file, to be read from top to bottom.

Every value of a program is one global tensor. A layout says how the ranks of a mesh hold it. Computation changes values;
communication changes layouts and never a value. From these three sentences follow types for parallel programs, a check that
no schedule can get wrong, ZeRO as three short functions, and a planner that has never heard of Megatron yet finds it.

Left out for brevity, and found in weft: cuts that are uneven or nested, pending maxima, gradients, kernels, real prices.

    python examples/small_weft.py
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

# -- 1. Layouts ----------------------------------------------------------------------------------------------------------------
#
# Along each axis of the mesh a value is held in one of three ways.


@dataclass(frozen=True)
class Placement:
    """What the ranks along one axis hold of a value."""

    kind: str
    dim: int | None = None

    def __repr__(self) -> str:
        return self.kind if self.dim is None else f"S({self.dim})"


R = Placement("R")  # each rank holds all of it
P = Placement("P")  # each rank holds a term; the value is their sum


def S(dim: int) -> Placement:
    """Each rank holds its slice of one dim."""
    return Placement("S", dim)


class Refused(Exception):
    """A program that would not mean what it says."""


@dataclass(frozen=True)
class Mesh:
    """Named axes over ranks, the last one varying fastest."""

    axes: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        return math.prod(n for _, n in self.axes)

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]


def mesh(**axes: int) -> Mesh:
    return Mesh(tuple(axes.items()))


@dataclass(frozen=True)
class Type:
    """A shape and, for each axis of the mesh, a placement."""

    mesh: Mesh
    shape: tuple[int, ...]
    held: tuple[tuple[str, Placement], ...]  # every axis, in mesh order

    def __post_init__(self) -> None:
        cut = [(a, p.dim) for a, p in self.held if p.dim is not None]
        if len({d for _, d in cut}) < len(cut) or any(d >= len(self.shape) or self.shape[d] % self.mesh.size(a) for a, d in cut):
            raise Refused(f"{self}: each cut needs a dim of its own that divides evenly")

    def on(self, axis: str) -> Placement:
        return dict(self.held)[axis]

    def place(self, axis: str, placement: Placement) -> Type:
        return Type(self.mesh, self.shape, tuple((a, placement if a == axis else p) for a, p in self.held))

    def dim(self, d: int) -> tuple[int, str | None]:
        """The size of a dim and the axis that cuts it: two dims are held alike exactly if these are equal."""
        return self.shape[d], next((a for a, p in self.held if p == S(d)), None)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        return tuple(n // (self.mesh.size(axis) if axis else 1) for n, axis in map(self.dim, range(len(self.shape))))

    def __str__(self) -> str:
        return f"{list(self.shape)} " + " ".join(f"{a}:{p}" for a, p in self.held)


def tensor(mesh: Mesh, *shape: int, **placements: Placement) -> Type:
    """`tensor(m, 8, 6, dp=S(0))`: whole along every axis that is not named."""
    return Type(mesh, shape, tuple((axis, placements.get(axis, R)) for axis, _ in mesh.axes))


# What a placement means, in both directions. All else in this file rests on these two functions.


def pieces(placement: Placement, value: Tensor, n: int) -> Sequence[Tensor]:
    """What each of n ranks holds. The terms of a Partial are arbitrary as long as they add up, so they are drawn at random."""
    if placement.dim is not None:
        return value.chunk(n, placement.dim)
    if placement is R:
        return [value] * n
    terms = [torch.randn_like(value) for _ in range(n - 1)]
    return [*terms, value - sum(terms)]


def together(placement: Placement, parts: Sequence[Tensor]) -> Tensor:
    """The value that n ranks hold between them."""
    if placement.dim is not None:
        return torch.cat(list(parts), placement.dim)
    if placement is P:
        return reduce(torch.add, parts)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0])  # whole means: the same on every rank
    return parts[0]


def deal(value: Tensor, type_: Type) -> list[Tensor]:
    """What every rank of the mesh holds of a global value, in rank order."""
    parts = [value]
    for axis, n in type_.mesh.axes:
        parts = [piece for part in parts for piece in pieces(type_.on(axis), part, n)]
    return parts


def collect(parts: Sequence[Tensor], type_: Type) -> Tensor:
    """The global value, from what every rank holds."""
    for axis, n in reversed(type_.mesh.axes):
        parts = [together(type_.on(axis), parts[i : i + n]) for i in range(0, len(parts), n)]
    return parts[0]


# -- 2. Nodes ------------------------------------------------------------------------------------------------------------------
#
# A program is a graph of nodes. A node is never changed and made only once: asking for the same op on the same operands gives
# the same node, so equal expressions are one object. Its type is worked out as it is made, so a wrong program fails at once.


@dataclass(frozen=True, eq=False)
class Op:
    """`infer(types, *attrs)` gives the type of the result; `run(*tensors, *attrs)` is what one rank does."""

    name: str
    infer: Callable[..., Type]
    run: Callable[..., Any] | None = None
    labels: Callable[[Sequence[Type]], tuple[list[list[str]], list[str]]] | None = None
    moves: tuple[Callable[..., Placement], Callable[..., Placement]] | None = None  # communication: from, to

    def __call__(self, *args: Any) -> Node:
        """Values first, then attributes."""
        nodes = tuple(a for a in args if isinstance(a, Node))
        return make(self, nodes, args[len(nodes) :])


@dataclass(frozen=True, eq=False)
class Node:
    op: Op
    args: tuple[Node, ...]
    attrs: tuple[Any, ...]
    type: Type


@cache
def make(op: Op, args: tuple[Node, ...], attrs: tuple[Any, ...]) -> Node:
    return Node(op, args, attrs, op.infer([a.type for a in args], *attrs))


def needed(roots: Iterable[Node]) -> list[Node]:
    """The roots and all they are made from, operands before their readers."""
    seen: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in seen:
            for a in node.args:
                visit(a)
            seen[node] = None

    for node in roots:
        visit(node)
    return list(seen)


INPUT = Op("input", infer=lambda types, name, type_: type_)


@dataclass(frozen=True)
class Program:
    """Named outputs. An output that has the name of an input is what that input becomes for the next step."""

    outputs: Mapping[str, Node]

    @property
    def nodes(self) -> list[Node]:
        return needed(self.outputs.values())

    @property
    def inputs(self) -> dict[str, Node]:
        return {n.attrs[0]: n for n in self.nodes if n.op is INPUT}

    def readers(self, node: Node) -> list[Node]:
        return [n for n in self.nodes if node in n.args]

    def __str__(self) -> str:
        names = {n: f"%{n.attrs[0]}" if n.op is INPUT else f"%{i}" for i, n in enumerate(self.nodes)}
        lines = []
        for n in self.nodes:
            said = [names[a] for a in n.args] + [repr(a) for a in n.attrs if n.op is not INPUT]
            lines.append(f"  {names[n]} = {n.op.name}({', '.join(said)})".ljust(40) + str(n.type))
        return "\n".join([*lines, f"  return {', '.join(f'{k}={names[n]}' for k, n in self.outputs.items())}"])


def trace(fn: Callable[..., Mapping[str, Node]], **inputs: Type) -> Program:
    return Program(fn(**{name: INPUT(name, t) for name, t in inputs.items()}))


# -- 3. Ops from index equations -----------------------------------------------------------------------------------------------
#
# `i k, k j -> i j` says what a matrix product does to sizes. It also says all there is to know about running it in parallel:
# cut i, and the result is cut along i; cut k, which the result lacks, and each rank has a term of it. One fact is added,
# in which operands the op is linear: there a sum that is still pending may pass through.


def define(name: str, equation: str, run: Callable[..., Tensor], linear: Sequence[set[int]] = ()) -> Op:
    """`*` in an equation stands for all dims of its operands. `linear` lists sets of operands, the others held fixed."""
    left, right = (side.strip() for side in equation.split("->"))

    def labels(types: Sequence[Type]) -> tuple[list[list[str]], list[str]]:
        every = " ".join(f"d{i}" for i in range(len(types[0].shape)))
        ins = [part.replace("*", every).split() for part in left.split(",")]
        return ins, right.replace("*", every).split()

    def infer(types: Sequence[Type], *attrs: Any) -> Type:
        ins, out = labels(types)
        dims = bind(name, ins, types)
        held = []
        for axis, _ in types[0].mesh.axes:
            cut = [label for label, (_, by) in dims.items() if by == axis]
            pending = {k for k, t in enumerate(types) if t.on(axis) == P}
            if len(cut) > 1:
                raise Refused(f"{name} needs {axis} to cut one label, found {cut}: a rank would see only a diagonal block")
            if cut and pending:
                raise Refused(f"{name} needs whole operands beside what {axis} cuts, found a pending sum")
            if pending and pending not in linear:
                raise Refused(f"{name} is not linear in what is pending along {axis}: all_reduce it first")
            held.append((axis, S(out.index(cut[0])) if cut and cut[0] in out else P if cut or pending else R))
        return Type(types[0].mesh, tuple(dims[x][0] for x in out), tuple(held))

    return Op(name, infer, run, labels)


def bind(name: str, ins: list[list[str]], types: Sequence[Type]) -> dict[str, tuple[int, str | None]]:
    """Each label with its size and the axis that cuts it; all operands must agree."""
    dims: dict[str, tuple[int, str | None]] = {}
    for names, t in zip(ins, types, strict=True):
        if len(names) != len(t.shape):
            raise Refused(f"{name} needs {len(names)} dims, found {t}")
        for d, label in enumerate(names):
            if dims.setdefault(label, t.dim(d)) != t.dim(d):
                raise Refused(f"{name} needs {label} held alike, found {' and '.join(map(str, types))}")
    return dims


def product(equation: str, name: str) -> Op:
    return define(name, equation, lambda *xs: torch.einsum(equation.replace(" ", ""), *xs), linear=[{0}, {1}])


mm = product("i k, k j -> i j", "mm")
mm_t = product("i k, j k -> i j", "mm_t")  # x @ y.T
t_mm = product("k i, k j -> i j", "t_mm")  # x.T @ y
add = define("add", "*, * -> *", torch.add, linear=[{0, 1}])
sub = define("sub", "*, * -> *", torch.sub, linear=[{0, 1}])
mul = define("mul", "*, * -> *", torch.mul, linear=[{0}, {1}])
div = define("div", "*, * -> *", torch.div, linear=[{0}])
scale = define("scale", "* -> *", torch.mul, linear=[{0}])
above = define("above", "* -> *", lambda x, c: x.clamp(min=c))
sqrt = define("sqrt", "* -> *", torch.sqrt)
relu = define("relu", "* -> *", torch.relu)
step = define("step", "* -> *", lambda x: (x > 0).to(x.dtype))

# -- 4. Communication ----------------------------------------------------------------------------------------------------------
#
# A collective is a change of placement along one axis. That is its type, and it is also its meaning.


def communication(name: str, before: Callable[..., Placement], after: Callable[..., Placement]) -> Op:
    def infer(types: Sequence[Type], axis: str, *dim: int) -> Type:
        (t,) = types
        if t.on(axis) != before(*dim):
            raise Refused(f"{name} along {axis} needs {before(*dim)}, found {t}")
        return t.place(axis, after(*dim))

    return Op(name, infer, moves=(before, after))


all_reduce = communication("all_reduce", lambda: P, lambda: R)
reduce_scatter = communication("reduce_scatter", lambda d: P, S)
all_gather = communication("all_gather", S, lambda d: R)
slice_ = communication("slice", lambda d: R, S)


def bring(x: Node, axis: str, want: Placement) -> Node:
    """The value held as wanted along the axis, by explicit communication. Nothing makes a value pending again."""
    here = x.type.on(axis)
    if here == want:
        return x
    if here == P:
        return all_reduce(x, axis) if want == R else reduce_scatter(x, axis, want.dim)
    if here != R:
        x = all_gather(x, axis, here.dim)
    return x if want == R else slice_(x, axis, want.dim)


# -- 5. Meaning ----------------------------------------------------------------------------------------------------------------
#
# A program is walked in three ways that differ only in what `compute` and `communicate` do: on one device, where communication
# is nothing at all; on pretended ranks in this process; and, in section 9, as one of many real processes.


def walk(p: Program, values: Mapping[str, Any], compute: Callable[..., Any], communicate: Callable[[Node, Any], Any]) -> dict[str, Any]:
    have: dict[Node, Any] = {}
    for node in p.nodes:
        if node.op is INPUT:
            have[node] = values[node.attrs[0]]
        elif node.op.moves:
            have[node] = communicate(node, have[node.args[0]])
        else:
            have[node] = compute(node, *(have[a] for a in node.args))
    return {name: have[node] for name, node in p.outputs.items()}


def compute(node: Node, *xs: Tensor) -> Tensor:
    assert node.op.run is not None
    return node.op.run(*xs, *node.attrs)


def on_one_device(p: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the program means."""
    return walk(p, values, compute, lambda node, x: x)


def on_pretended_ranks(p: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What all ranks together compute, each seeing only what it holds."""
    held = {name: deal(values[name], node.type) for name, node in p.inputs.items()}
    parts = walk(p, held, lambda node, *lists: [compute(node, *xs) for xs in zip(*lists, strict=True)], exchange)
    return {name: collect(parts[name], node.type) for name, node in p.outputs.items()}


def exchange(node: Node, parts: list[Tensor]) -> list[Tensor]:
    """In each group of ranks along the axis: put the value together as it was held, deal it out as it will be."""
    axis, *dim = node.attrs
    before, after = node.op.moves  # type: ignore[misc]
    out = list(parts)
    for group in groups(node.type.mesh, axis):
        value = together(before(*dim), [parts[r] for r in group])
        for r, piece in zip(group, pieces(after(*dim), value, len(group)), strict=True):
            out[r] = piece
    return out


def groups(m: Mesh, axis: str) -> Iterator[list[int]]:
    """The ranks that differ along one axis only."""
    inner = math.prod(n for _, n in m.axes[[a for a, _ in m.axes].index(axis) + 1 :])
    n = m.size(axis)
    for start in range(m.ranks):
        if start // inner % n == 0:
            yield [start + i * inner for i in range(n)]


# -- 6. Erasure ----------------------------------------------------------------------------------------------------------------
#
# Take out all communication and all layouts: what is left is the program for one device. Each op, in every layout its type
# accepts, computes its global value; communication changes no value. So two programs that type and leave the same behind
# mean the same, whatever was done to them. Nodes are made once, so "the same" is one comparison of objects.


@cache
def erase(node: Node) -> Node:
    if node.op is INPUT:
        name, t = node.attrs
        return INPUT(name, tensor(t.mesh, *t.shape))
    if node.op.moves:
        return erase(node.args[0])
    return make(node.op, tuple(erase(a) for a in node.args), node.attrs)


def same_meaning(p: Program, q: Program) -> bool:
    return {k: erase(n) for k, n in p.outputs.items()} == {k: erase(n) for k, n in q.outputs.items()}


# -- 7. Verbs ------------------------------------------------------------------------------------------------------------------
#
# A verb rebuilds a program from the inputs up. It needs no conditions of its own: where its idea does not hold, the types refuse.


def rebuild(p: Program, change: Callable[[Node, tuple[Node, ...]], Node]) -> Program:
    """The program with every node replaced by `change(node, its new operands)`; checked to mean the same."""
    new: dict[Node, Node] = {}
    for node in p.nodes:
        new[node] = change(node, tuple(new[a] for a in node.args))
    q = Program({name: new[node] for name, node in p.outputs.items()})
    assert same_meaning(p, q)
    return q


def again(node: Node, args: tuple[Node, ...]) -> Node:
    return make(node.op, args, node.attrs)


def split(p: Program, dim: int) -> Program:
    """all_reduce -> reduce_scatter ; all_gather"""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is not all_reduce:
            return again(node, args)
        (axis,) = node.attrs
        return all_gather(reduce_scatter(args[0], axis, dim), axis, dim)

    return rebuild(p, change)


def sink(p: Program) -> Program:
    """all_gather ; f -> f ; all_gather, as far down as types allow"""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        for k, arg in enumerate(args):
            if arg.op is all_gather and node.op.labels:
                axis, dim = arg.attrs
                label = node.op.labels([a.type for a in args])[0][k][dim]
                try:
                    return bring(on_slices(node.op, args, node.attrs, axis, label), axis, R)
                except Refused:
                    pass
        return again(node, args)

    return rebuild(p, change)


def on_slices(op: Op, args: tuple[Node, ...], attrs: tuple[Any, ...], axis: str, label: str) -> Node:
    """The op with every operand that has the label in slices of it."""
    ins, _ = op.labels([a.type for a in args])  # type: ignore[misc]
    return make(op, tuple(taken(a, axis, n.index(label)) if label in n else a for a, n in zip(args, ins, strict=True)), attrs)


def taken(x: Node, axis: str, dim: int) -> Node:
    """The slice of a whole value, cut as early as can be: before its gather, before the op that made it, or here."""
    if x.op is all_gather and x.attrs == (axis, dim):
        return x.args[0]
    if x.op.labels:
        label = x.op.labels([a.type for a in x.args])[1][dim]
        return on_slices(x.op, x.args, x.attrs, axis, label)
    return slice_(x, axis, dim)


def shard_state(p: Program, *names: str) -> Program:
    """Inputs that are only ever read in slices are stored in slices, and what they become stays in slices."""
    readers = {name: {(r.op, r.attrs) for r in p.readers(p.inputs[name])} for name in names}
    for name, found in readers.items():
        if len(found) != 1 or next(iter(found))[0] is not slice_:
            raise Refused(f"{name} must be read in equal slices only, found {', '.join(op.name for op, _ in found)}")

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is INPUT and node.attrs[0] in names:
            ((_, (axis, dim)),) = readers[node.attrs[0]]
            return INPUT(node.attrs[0], node.type.place(axis, S(dim)))
        stored = node.op is slice_ and args[0].op is INPUT and args[0].attrs[0] in names
        return args[0] if stored else again(node, args)

    q = rebuild(p, change)
    return Program({k: n.args[0] if k in names and n.op is all_gather else n for k, n in q.outputs.items()})


# -- 8. A planner --------------------------------------------------------------------------------------------------------------
#
# Choose how each input is held. For each op try every label on every axis, bring the operands there by explicit communication,
# and keep what costs least. The planner knows equations and prices; it does not know the name of any kind of parallelism.


@dataclass(frozen=True)
class Machine:
    """One rank: flop/s, bytes/s to its peers, seconds to start a transfer, bytes."""

    flops: float = 1e11
    bandwidth: float = 1e10
    latency: float = 1e-6
    memory: float = 1e10


def seconds(node: Node, machine: Machine) -> float:
    """Time of one node: work over rate, or bytes over links."""
    if node.op.moves:
        n = node.type.mesh.size(node.attrs[0])
        size = 4 * max(math.prod(node.type.local), math.prod(node.args[0].type.local))
        rounds = {all_reduce: 2.0, reduce_scatter: 1.0, all_gather: 1.0, slice_: 0.0}[node.op]
        return rounds * ((n - 1) / n * size / machine.bandwidth + machine.latency)
    if not node.op.labels:
        return 0.0
    ins, _ = node.op.labels([a.type for a in node.args])
    sizes = {x: n for names, a in zip(ins, node.args, strict=True) for x, n in zip(names, a.type.local, strict=True)}
    return 2 * math.prod(sizes.values()) / machine.flops


def cost(p: Program, machine: Machine) -> float:
    return sum(seconds(n, machine) for n in p.nodes)


def stored(p: Program) -> int:
    """Bytes of the inputs on each rank."""
    return 4 * sum(math.prod(n.type.local) for n in p.inputs.values())


def place(p: Program, layouts: Mapping[str, Type], machine: Machine) -> Program:
    """A program for one device, with its inputs held as told; what goes back into an input is held as that input is."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is INPUT:
            return INPUT(node.attrs[0], layouts[node.attrs[0]])
        known = set(needed(args))
        return min(ways(node, args), key=lambda new: price(new, known, machine))

    q = rebuild(p, change)
    return Program({k: settle(n, layouts[k] if k in layouts else tensor(n.type.mesh, *n.type.shape)) for k, n in q.outputs.items()})


def settle(x: Node, want: Type) -> Node:
    for axis, placement in want.held:
        x = bring(x, axis, placement)
    return x


def ways(node: Node, args: tuple[Node, ...]) -> Iterator[Node]:
    """Every way to run the op: along each axis the operands as they are, or whole, or cut along one label."""
    ins, _ = node.op.labels([a.type for a in args])  # type: ignore[misc]
    axes = [a for a, _ in node.type.mesh.axes]
    options = [None, R, *dict.fromkeys(itertools.chain.from_iterable(ins))]
    for choice in itertools.product(options, repeat=len(axes)):
        try:
            yield make(node.op, tuple(moved(a, ins[k], axes, choice) for k, a in enumerate(args)), node.attrs)
        except Refused:
            continue


def moved(x: Node, names: list[str], axes: list[str], choice: Iterable[Any]) -> Node:
    for axis, option in zip(axes, choice, strict=True):
        if option is not None:
            x = bring(x, axis, S(names.index(option)) if option in names else R)
    return x


def price(node: Node, known: set[Node], machine: Machine) -> float:
    """Of the op and all that was done to its operands; a sum left pending will have to be paid by somebody."""
    owed = sum(seconds(all_reduce(node, axis), machine) for axis, p in node.type.held if p == P)
    return sum(seconds(n, machine) for n in needed([node]) if n not in known) + owed


def plan(p: Program, machine: Machine) -> Program:
    """The cheapest placement of the inputs whose stored parts fit, at equal cost the smallest; to leave the program alone is always a candidate."""
    options = {name: list(placements(node.type)) for name, node in p.inputs.items()}
    placed = (place(p, dict(zip(options, choice, strict=True)), machine) for choice in itertools.product(*options.values()))
    fitting = [q for q in itertools.chain([p], placed) if stored(q) <= machine.memory]
    if not fitting:
        raise Refused(f"no placement fits {machine.memory:g} bytes")
    return min(fitting, key=lambda q: (round(cost(q, machine), 9), stored(q)))


def placements(t: Type) -> Iterator[Type]:
    """Every way to hold an input: along each axis whole, or cut along a dim that divides."""
    for choice in itertools.product([R, *map(S, range(len(t.shape)))], repeat=len(t.mesh.axes)):
        try:
            yield Type(t.mesh, t.shape, tuple((a, c) for (a, _), c in zip(t.mesh.axes, choice, strict=True)))
        except Refused:
            continue


# -- 9. Real processes ---------------------------------------------------------------------------------------------------------
#
# One rank of many: the same walk, with torch.distributed as `communicate`.


def on_real_ranks(p: Program, values: Mapping[str, Tensor], steps: int = 1) -> dict[str, Tensor]:
    """Each rank is a process that is given its own part, runs some steps, and hands its part of the outputs back."""
    held = {name: deal(values[name], node.type) for name, node in p.inputs.items()}
    context = mp.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_main, args=(r, p, held, steps, folder, answers), daemon=True) for r in range(mesh_of(p).ranks)]
        for process in ranks:
            process.start()
        said = dict(answers.get(timeout=100) for _ in ranks)
        for process in ranks:
            process.join()
    return {name: collect([torch.from_numpy(said[r][name]) for r in range(len(ranks))], node.type) for name, node in p.outputs.items()}


def mesh_of(p: Program) -> Mesh:
    return next(iter(p.outputs.values())).type.mesh


def rank_main(rank: int, p: Program, held: Mapping[str, list[Tensor]], steps: int, folder: str, answers: Any) -> None:
    torch.set_num_threads(1)  # the parent's threads were not forked with it
    m = mesh_of(p)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=m.ranks)
    along = {axis: [(g, dist.new_group(g)) for g in groups(m, axis)] for axis, _ in m.axes}
    mine = {axis: next((g.index(rank), group) for g, group in found if rank in g) for axis, found in along.items()}
    values = {name: parts[rank] for name, parts in held.items()}
    for _ in range(steps):
        out = walk(p, values, compute, lambda node, x: collective(node, x, *mine[node.attrs[0]]))
        values |= {name: x for name, x in out.items() if name in values}
    answers.put((rank, {name: x.numpy() for name, x in out.items()}))
    dist.barrier()
    dist.destroy_process_group()


def collective(node: Node, x: Tensor, index: int, group: Any) -> Tensor:
    """What `exchange` says, between processes."""
    axis, *dim = node.attrs
    n = node.type.mesh.size(axis)
    if node.op is slice_:
        return x.chunk(n, *dim)[index].contiguous()
    if node.op is all_gather:
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, *dim)
    if node.op is reduce_scatter:
        terms = [c.contiguous() for c in x.chunk(n, *dim)]
        dist.reduce_scatter(out := torch.empty_like(terms[0]), terms, group=group)
        return out
    dist.all_reduce(out := x.clone(), group=group)
    return out


# -- 10. Two programs ----------------------------------------------------------------------------------------------------------


def adam(g: Node, x: Node, m: Node, v: Node) -> dict[str, Node]:
    """g is a term of the gradient on each rank. No bias correction, to keep the text short."""
    g = scale(all_reduce(g, "dp"), 0.5)
    m = add(scale(m, 0.9), scale(g, 0.1))
    v = add(scale(v, 0.999), scale(mul(g, g), 0.001))
    return {"x": sub(x, scale(div(m, above(sqrt(v), 1e-4)), 0.01)), "m": m, "v": v}


def zero1(p: Program) -> Program:
    return shard_state(sink(split(p, dim=0)), "m", "v")


def mlp(x: Node, y: Node, w1: Node, w2: Node) -> dict[str, Node]:
    """A step of gradient descent on |relu(x w1) w2 - y|^2 / 2, forward and backward written out."""
    a = mm(x, w1)
    h = relu(a)
    error = sub(mm(h, w2), y)
    g2 = t_mm(h, error)
    g1 = t_mm(x, mul(mm_t(error, w2), step(a)))
    return {"w1": sub(w1, scale(g1, 1e-3)), "w2": sub(w2, scale(g2, 1e-3))}


def mlp_of(m: Mesh, batch: int, width: int) -> Program:
    x = tensor(m, batch, width)
    return trace(mlp, x=x, y=x, w1=tensor(m, width, 4 * width), w2=tensor(m, 4 * width, width))


def random_inputs(p: Program) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.rand(node.type.shape) for name, node in p.inputs.items()}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4)


def show(title: str, p: Program) -> None:
    """Prints a program after checking it: pretended ranks against one device."""
    values = random_inputs(p)
    assert_same(on_pretended_ranks(p, values), on_one_device(p, values))
    print(f"{title}\n{p}\n")


def main() -> None:
    m = mesh(dp=2)
    vector = tensor(m, 8)
    p = trace(adam, g=tensor(m, 8, dp=P), x=vector, m=vector, v=vector)
    show("Adam as written", p)
    show("ZeRO-1: split, sink, shard_state", zero1(p))

    m = mesh(gpu=2)
    for title, program, machine in (
        ("Many samples, narrow", mlp_of(m, 4096, 16), Machine()),
        ("Few samples, wide", mlp_of(m, 8, 128), Machine()),
    ):
        best = plan(program, machine)
        show(f"{title}: {1e6 * cost(best, machine):.0f} us, {1e6 * cost(program, machine):.0f} without a plan", best)

    best = plan(mlp_of(m, 8, 128), Machine())
    values = random_inputs(best)
    assert_same(on_real_ranks(best, values), on_one_device(best, values))
    print(f"{mesh_of(best).ranks} processes over gloo agree with one device")


if __name__ == "__main__":
    sys.exit(main())
