"""Fused kernels: all that happens to the rows of a round between two matmuls, in one pass over them.

A kernel runs over vertices; for each it may loop over the edges to its children. Values are rows of `lanes` numbers and column j
of every value depends only on column j of others, so a row is worked on column by column. What a kernel reads from memory is
described by Access: which buffer, which row of it (its own, a child's, ...), and which column belongs to column j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch

from weft.codegen import expr
from weft.codegen.expr import Slot, Value
from weft.codegen.formula import formula
from weft.codegen.rows import NotFusable
from weft.codegen.segments import Messages, RowGroup, RowSlot, segment
from weft.core.node import DTYPE_NAMES, Kind, Node
from weft.dynamic.lower import is_segment, is_spread, reads
from weft.dynamic.phases import base, domain, is_view, seen
from weft.dynamic.sizes import EDGES, ROWS
from weft.dynamic.store import Pointer, Stores

FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Access:
    """Column j of a value lies at column offset + sum over dims of (j / after % size) * stride of a row of `source`."""

    source: Node
    offset: int
    dims: tuple[tuple[int, int, int], ...]  # (after, size, stride), slowest first


@dataclass
class Kernel:
    """A fused group: its ops in order, what it loads and what it keeps."""

    lanes: int
    nodes: list[Node] = field(default_factory=list)
    stored: list[Node] = field(default_factory=list)  # values read outside the kernel
    loads: dict[Node, Access] = field(default_factory=dict)  # operand as written in an op -> where it lies

    @property
    def real(self) -> torch.dtype | None:
        """The type its arithmetic is done in."""
        return next((r for r in map(real_of, self.nodes) if r is not None), None)

    def takes(self, real: torch.dtype | None) -> bool:
        return real is None or self.real in (None, real)


def lane_shape(node: Node) -> tuple[int, ...]:
    return node.shape[1:]


def lanes_of(node: Node) -> int:
    """Columns of the kernel an op belongs in: a concat writes its parts, each as wide as one part."""
    parts = concat_parts(node)
    return prod(lane_shape(parts[0] if parts else node))


def concat_parts(node: Node) -> list[Node]:
    """The parts of a concat that lays equally wide parts after each other in every row; else nothing."""
    if node.op.name != "concat" or node.attr("dim") != 1 or len({lane_shape(a) for a in node.args}) > 1:
        return []
    return list(node.args)


def operands(node: Node) -> list[Node]:
    """Values an op reads column by column (not the index that says which vertex an edge belongs to)."""
    return [node.args[0]] if is_segment(node) or is_spread(node) else reads(node)


def real_of(node: Node) -> torch.dtype | None:
    """The type an op's arithmetic is done in; none: of bools alone."""
    return next((n.dtype for n in (node, *operands(node)) if n.dtype.is_floating_point), None)


def fusible(node: Node) -> bool:
    """Whether the op can be part of a kernel."""
    if is_view(node) or len(node.types) > 1 or node.op.is_item:
        return False
    shape, dtype = node.shape, node.dtype
    if len(shape) == 0 or shape[0] not in (ROWS, EDGES) or dtype not in (*FLOATS, torch.bool):
        return False
    if prod(shape[1:]) == 0 or not all(_readable(a) for a in operands(node)) or not _one_type(node):
        return False
    if is_segment(node) or is_spread(node):
        return node.args[0].shape[0] in (ROWS, EDGES)
    return bool(concat_parts(node)) or (_one_domain(node) and statement(node, anything) is not None)


def anything(node: Node) -> Value:
    """What stands for an operand where only the op matters."""
    return expr.load(Slot("x", DTYPE_NAMES[node.dtype]))


def _one_type(node: Node) -> bool:
    return len({n.dtype for n in (node, *operands(node)) if n.dtype.is_floating_point}) <= 1


def _readable(node: Node) -> bool:
    return node.dtype in (*FLOATS, torch.bool) and 0 not in node.shape


def _one_domain(node: Node) -> bool:
    """All operands with rows have the op's rows, first."""
    for operand in reads(node):
        where = domain(operand)
        if where and (where != domain(node) or operand.shape[:1] not in ((1,), node.shape[:1])):
            return False
        if not where and operand.ndim >= node.ndim and operand.shape[0] != 1:
            return False
    return True


def access(operand: Node, shape: tuple[int, ...]) -> Access | None:
    """How a kernel reads an operand from the buffer of what it looks at, broadcast to the columns `shape`."""
    source = base(operand)
    rows = domain(source)
    view = seen(operand)
    if view is None:
        return None
    if view.dim() > len(shape) + 1:
        return None
    wide = view.reshape(*[1] * (len(shape) + 1 - view.dim()), *view.shape)
    row_stride = wide.stride(0) if wide.shape[0] != 1 else 0
    unit = ROWS if rows == "row" else EDGES
    if rows and (source.shape[0] % unit or wide.shape[0] != unit or row_stride != prod(source.shape) // unit):
        return None
    if not rows and row_stride:
        return None
    dims, after = [], prod(shape)
    for size, own, stride in zip(shape, wide.shape[1:], wide.stride()[1:], strict=True):
        after //= size
        if own not in (1, size):
            return None
        dims.append((after, size, stride if own == size else 0))
    return Access(source, wide.storage_offset(), _merge(dims))


def _merge(dims: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Join dims that are walked as one; drop those of size 1."""
    out: list[tuple[int, int, int]] = []
    for after, size, stride in dims:
        if size == 1:
            continue
        if out and out[-1][2] == stride * size:
            out[-1] = (after, out[-1][1] * size, stride)
        else:
            out.append((after, size, stride))
    return tuple(out)


def group(nodes: list[Node], inside: set[Node]) -> Iterator[Kernel | Node]:
    """The ops of a phase as kernels (of those `inside`) and single ops, in an order that works.

    Single ops (matmuls above all) are barriers. A fusible op goes into the last kernel that is early enough, so that little is
    computed before a matmul that does not need it.
    """
    level = _barriers(nodes, inside)
    for at in range(max(level.values(), default=0) + 1):
        yield from _kernels([n for n in nodes if n in inside and level[n] == at])
        yield from (n for n in nodes if n not in inside and level[n] == at)


def _barriers(nodes: list[Node], inside: set[Node]) -> dict[Node, int]:
    """level: kernels of level i run before the single ops of level i, those before kernels of level i + 1."""
    known, level = set(nodes), dict[Node, int]()
    for node in nodes:
        level[node] = max((level[a] + (a not in inside) for a in _inputs(node, known)), default=0)
    users: dict[Node, list[Node]] = {n: [] for n in nodes}
    for node in nodes:
        for a in _inputs(node, known):
            users[a].append(node)
    for node in reversed(nodes):
        if node in inside and users[node]:
            level[node] = max(level[node], min(level[u] for u in users[node]))
    return level


def _inputs(node: Node, known: set[Node]) -> set[Node]:
    return {base(a) for a in reads(node)} & known


def _kernels(nodes: list[Node]) -> Iterator[Kernel]:
    """Ops of one level, by columns; an op joins the kernel of its width unless a later one feeds it."""
    out: list[Kernel] = []
    home: dict[Node, int] = {}
    for node in nodes:
        lanes = lanes_of(node)
        after = max((_later(home, a, node, lanes) for a in _inputs(node, set(home))), default=0)
        real = real_of(node)
        at = next((i for i in range(len(out) - 1, after - 1, -1) if out[i].lanes == lanes and out[i].takes(real)), None)
        if at is None or any(_through_view(a, out[at], home, at) for a in operands(node)):
            at = len(out)
            out.append(Kernel(lanes))
        out[at].nodes.append(node)
        home[node] = at
    yield from out


def _later(home: dict[Node, int], operand: Node, node: Node, lanes: int) -> int:
    """The first kernel that may read `operand`: its own, or the one after if it must go through memory."""
    direct = operand in operands(node) and lanes_of(operand) == lanes and not concat_parts(operand)
    return home[operand] + (not direct)


def _through_view(operand: Node, kernel: Kernel, home: dict[Node, int], at: int) -> bool:
    """Whether an operand looks, through a view, at a value the same kernel makes."""
    return operand is not base(operand) and home.get(base(operand)) == at


def finish(kernel: Kernel, read_elsewhere: Iterable[Node]) -> Kernel | None:
    """Fill in loads and stores; None if some operand lies so that a kernel cannot read it."""
    own = set(kernel.nodes)
    for node in kernel.nodes:
        shape = lane_shape(concat_parts(node)[0]) if concat_parts(node) else lane_shape(node)
        for operand in operands(node):
            if operand in own:
                if lane_shape(operand) != shape:
                    return None
                continue
            found = access(operand, shape)
            if found is None or (operand in kernel.loads and kernel.loads[operand] != found):
                return None
            kernel.loads[operand] = found
    elsewhere = set(read_elsewhere)
    kernel.stored = [n for n in kernel.nodes if n in elsewhere]
    return kernel


def statement(node: Node, leaf: Callable[[Node], Value]) -> Value | None:
    """What a kernel computes for an op, over values of its operands; a spread reads its vertex's value. None: the op is not pointwise."""

    def value(n: Node) -> Value:
        return expr.const(n.attr("value")) if n.op.is_number else leaf(n)

    if is_spread(node) or node.op.name == "stop_gradient":
        return value(node.args[0])
    if node.op.name == "full":
        return expr.const(node.attr("value"))
    try:
        return formula(node, value) if node.op.kind is Kind.POINTWISE else None
    except NotFusable:
        return None


def row_group(kernel: Kernel, stores: Stores) -> RowGroup:
    """A kernel in codegen's words."""
    made: dict[Node, Value] = {}

    def value(n: Node) -> Value:
        if n not in made:
            made[n] = expr.const(n.attr("value")) if n.op.is_number else _loaded(kernel, stores, n)
        return made[n]

    for node in kernel.nodes:
        if is_segment(node):
            made[node] = segment(value(node.args[0]), "sum" if node.op.name == "put" else "max")
        elif not concat_parts(node):
            found = statement(node, value)
            assert found is not None, "no kernel has such an op"
            made[node] = found
    stored = []
    for node in kernel.stored:
        for i, part in enumerate(concat_parts(node) or [node]):
            stored.append((_slot(stores, node, i * kernel.lanes, ((1, kernel.lanes, 1),)), value(part)))
    return RowGroup(kernel.lanes, DTYPE_NAMES[kernel.real or torch.float32], Pointer("edge_first"), tuple(stored))


def _loaded(kernel: Kernel, stores: Stores, operand: Node) -> Value:
    at = kernel.loads[operand]
    if at.source not in stores.gradients:
        return expr.load(_slot(stores, at.source, at.offset, at.dims))
    paths = tuple((Pointer(via.home), Pointer(via.first), Pointer(via.index)) for via in stores.gradients[at.source])
    return expr.load(Messages(stores.names[at.source], DTYPE_NAMES[operand.dtype], paths=paths))


def _slot(stores: Stores, node: Node, offset: int, dims: tuple[tuple[int, int, int], ...]) -> RowSlot:
    """Some columns of the buffer of a value."""
    pointer, row = stores.where(node)
    return RowSlot(
        stores.names[node], DTYPE_NAMES[node.dtype], pointer=pointer, of=row.of, via=Pointer(row.index) if row.index else None,
        columns=stores.columns(node) if domain(node) else 0, offset=offset, dims=dims,
    )  # fmt: skip
