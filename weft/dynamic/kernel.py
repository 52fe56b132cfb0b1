"""Fused kernels: all that happens to the rows of a round between two matmuls, in one pass over them.

A kernel runs over vertices; for each it may loop over the edges to its children. Values are rows of `lanes` numbers and column j
of every value depends only on column j of others, so a row is worked on column by column. What a kernel reads from memory is
described by Access: which buffer, which row of it (its own, a child's, ...), and which column belongs to column j.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from weft.dynamic import ops
from weft.dynamic.lower import aten, shape_of
from weft.dynamic.phases import base, domain, is_view
from weft.dynamic.pointwise import expression
from weft.dynamic.sizes import EDGES, ROWS

FLOATS = (torch.float32, torch.float64)
SEGMENT = {ops.segment_sum: "sum", ops.segment_max: "max"}


@dataclass(frozen=True)
class Access:
    """Column j of a value lies at column offset + sum over dims of (j / after % size) * stride of a row of `source`."""

    source: fx.Node
    offset: int
    dims: tuple[tuple[int, int, int], ...]  # (after, size, stride), slowest first
    has_rows: bool


@dataclass
class Kernel:
    """A fused group: its ops in order, what it loads and what it keeps."""

    lanes: int
    nodes: list[fx.Node] = field(default_factory=list)
    stored: list[fx.Node] = field(default_factory=list)  # values read outside the kernel
    loads: dict[fx.Node, Access] = field(default_factory=dict)  # operand as written in an op -> where it lies

    def level(self) -> dict[fx.Node, int]:
        """How many passes over the edges each op must wait for."""
        out: dict[fx.Node, int] = {}
        for node in self.nodes:
            below = max((out[a] for a in operands(node) if a in out), default=0)
            out[node] = below + (node.target in SEGMENT)
        return out


def lane_shape(node: fx.Node) -> tuple[int, ...]:
    return shape_of(node)[1:]


def lanes_of(node: fx.Node) -> int:
    """Columns of the kernel an op belongs in: a cat writes its parts, each as wide as one part."""
    parts = cat_parts(node)
    return prod(lane_shape(parts[0] if parts else node))


def cat_parts(node: fx.Node) -> list[fx.Node]:
    """The parts of a cat that lays equally wide parts after each other in every row; else nothing."""
    if node.op != "call_function" or node.target is not aten.cat.default:
        return []
    parts, dim = node.args[0], (node.args[1] if len(node.args) > 1 else 0)
    rank = len(shape_of(node))
    same = len({lane_shape(p) for p in parts}) == 1
    return list(parts) if dim % rank == 1 and same else []


def operands(node: fx.Node) -> list[fx.Node]:
    """Values an op reads column by column (not the index that says which vertex an edge belongs to)."""
    if node.target in SEGMENT or node.target is ops.spread:
        return [node.args[0]]
    return node.all_input_nodes


def fusible(node: fx.Node) -> bool:
    """Whether the op can be part of a kernel."""
    if is_view(node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    shape, dtype = shape_of(node), node.meta["val"].dtype
    if len(shape) == 0 or shape[0] not in (ROWS, EDGES) or dtype not in (*FLOATS, torch.bool):
        return False
    if prod(shape[1:]) == 0 or not all(_readable(a) for a in operands(node)):
        return False
    if node.target in SEGMENT or node.target is ops.spread:
        return shape_of(node.args[0])[0] in (ROWS, EDGES)
    if cat_parts(node):
        return True
    return node.target is not aten.cat.default and expression(node) is not None and _one_domain(node)


def _readable(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype in (*FLOATS, torch.bool) and 0 not in value.shape


def _one_domain(node: fx.Node) -> bool:
    """All operands with rows have the op's rows, first."""
    for operand in node.all_input_nodes:
        where = domain(operand)
        if where and (where != domain(node) or shape_of(operand)[0] not in (1, shape_of(node)[0])):
            return False
        if not where and len(shape_of(operand)) >= len(shape_of(node)) and shape_of(operand)[0] != 1:
            return False
    return True


def access(operand: fx.Node, shape: tuple[int, ...]) -> Access | None:
    """How a kernel reads an operand from the buffer of what it looks at, broadcast to the columns `shape`."""
    source = base(operand)
    rows = domain(source)
    whole = torch.empty(shape_of(source), device="meta")
    seen = _look(operand, source, whole)
    if seen is None:
        return None
    if len(seen.shape) > len(shape) + 1:
        return None
    wide = seen.reshape(*[1] * (len(shape) + 1 - seen.dim()), *seen.shape)
    row_stride = wide.stride(0) if wide.shape[0] != 1 else 0
    unit = ROWS if rows == "row" else EDGES
    if rows and (shape_of(source)[0] % unit or wide.shape[0] != unit or row_stride != whole.numel() // unit):
        return None
    if not rows and row_stride:
        return None
    dims, after = [], prod(shape)
    for size, own, stride in zip(shape, wide.shape[1:], wide.stride()[1:], strict=True):
        after //= size
        if own not in (1, size):
            return None
        dims.append((after, size, stride if own == size else 0))
    return Access(source, wide.storage_offset(), _merge(dims), bool(rows))


def _look(node: fx.Node, source: fx.Node, whole: torch.Tensor) -> torch.Tensor | None:
    """Run a chain of views on a fake tensor, to learn its strides."""
    if node is source:
        return whole
    inner = _look(node.args[0], source, whole)
    if inner is None:
        return None
    try:
        return node.target(inner, *node.args[1:], **node.kwargs)
    except RuntimeError:  # a view that the stored layout does not allow
        return None


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


def group(nodes: list[fx.Node], inside: set[fx.Node]) -> Iterator[Kernel | fx.Node]:
    """The ops of a phase as kernels (of those `inside`) and single ops, in an order that works.

    Single ops (matmuls above all) are barriers. A fusible op goes into the last kernel that is early enough, so that little is
    computed before a matmul that does not need it.
    """
    level = _barriers(nodes, inside)
    for at in range(max(level.values(), default=0) + 1):
        yield from _kernels([n for n in nodes if n in inside and level[n] == at])
        yield from (n for n in nodes if n not in inside and level[n] == at)


def _barriers(nodes: list[fx.Node], inside: set[fx.Node]) -> dict[fx.Node, int]:
    """level: kernels of level i run before the single ops of level i, those before kernels of level i + 1."""
    known, level = set(nodes), dict[fx.Node, int]()
    for node in nodes:
        level[node] = max((level[a] + (a not in inside) for a in _inputs(node, known)), default=0)
    users: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for node in nodes:
        for a in _inputs(node, known):
            users[a].append(node)
    for node in reversed(nodes):
        if node in inside and users[node]:
            level[node] = max(level[node], min(level[u] for u in users[node]))
    return level


def _inputs(node: fx.Node, known: set[fx.Node]) -> set[fx.Node]:
    return {base(a) for a in node.all_input_nodes} & known


def _kernels(nodes: list[fx.Node]) -> Iterator[Kernel]:
    """Ops of one level, by columns; an op joins the kernel of its width unless a later one feeds it."""
    out: list[Kernel] = []
    home: dict[fx.Node, int] = {}
    for node in nodes:
        lanes = lanes_of(node)
        after = max((_later(home, a, node, lanes) for a in _inputs(node, set(home))), default=0)
        at = next((i for i in range(len(out) - 1, after - 1, -1) if out[i].lanes == lanes), None)
        if at is None or any(_through_view(a, out[at], home, at) for a in operands(node)):
            at = len(out)
            out.append(Kernel(lanes))
        out[at].nodes.append(node)
        home[node] = at
    yield from out


def _later(home: dict[fx.Node, int], operand: fx.Node, node: fx.Node, lanes: int) -> int:
    """The first kernel that may read `operand`: its own, or the one after if it must go through memory."""
    direct = operand in operands(node) and lanes_of(operand) == lanes and not cat_parts(operand)
    return home[operand] + (not direct)


def _through_view(operand: fx.Node, kernel: Kernel, home: dict[fx.Node, int], at: int) -> bool:
    """Whether an operand looks, through a view, at a value the same kernel makes."""
    return operand is not base(operand) and home.get(base(operand)) == at


def finish(kernel: Kernel, read_elsewhere: Iterable[fx.Node]) -> Kernel | None:
    """Fill in loads and stores; None if some operand lies so that a kernel cannot read it."""
    own = set(kernel.nodes)
    for node in kernel.nodes:
        shape = lane_shape(cat_parts(node)[0]) if cat_parts(node) else lane_shape(node)
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


def statement(node: fx.Node) -> Any:
    """What a kernel computes for an op: an expression over operands; spread reads its vertex's value."""
    return node.args[0] if node.target is ops.spread else expression(node)
