"""What the busiest rank of a program computes, touches and sends, as neutral records: matmuls, attention, memory-bound passes, collectives.

Sizes come from the layouts of the nodes. Nodes fused into one kernel touch only what enters and leaves it. Bytes and flops are counted,
never timed: `cost.price` prices them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from weft.cluster.kernels import WIDTH
from weft.core.layout import Layout
from weft.core.node import DTYPE_NAMES, Node
from weft.core.program import Group, Program
from weft.ops.comm import all_gather, all_reduce, all_to_all, broadcast, reduce_, reduce_scatter
from weft.ops.experts import left_out, picks_of
from weft.ops.host import COPIES
from weft.ops.pointwise import add
from weft.ops.registry import ONE, Kind, equation_of, flops, memory_traffic, nbytes
from weft.ops.shape import concat_op, pad_op

DTYPES = {"f64": "fp64", "f32": "fp32", "bf16": "bf16", "f16": "fp16", "f8": "fp8"}
SENT = (all_reduce, reduce_scatter, all_gather, all_to_all, reduce_, broadcast)


@dataclass(frozen=True)
class Gemm:
    """[m, k] x [k, n], `batch` times over."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"
    name: str = "matmul"
    weight: bool = True  # the second operand is a parameter; its gradient may be put off
    launches: int = 1
    reads: int = 0  # a number of the operand that is no parameter, where matmuls of one are to be found
    grouped: bool = False  # rows of each of the batch are known on the device only, as of experts
    loose: str = "m"  # sizes that no tensor of it is contiguous along, as rows of activations: they may be odd

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def aligned(self) -> tuple[int, ...]:
        """Sizes its tensors are contiguous along."""
        return tuple(size for letter, size in (("m", self.m), ("n", self.n), ("k", self.k)) if letter not in self.loose)

    @property
    def bytes(self) -> float:
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * WIDTH[self.dtype]


@dataclass(frozen=True)
class Attention:
    """Attention in one kernel: scores never reach memory."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = True
    dtype: str = "bf16"
    name: str = "attention"
    back: bool = False
    launches: int = 1

    @property
    def flops(self) -> float:
        """What must be computed: half of the scores under a causal mask. The backward has five matmuls for two."""
        pairs = self.queries * self.keys * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * self.heads * pairs * self.head_dim * (2.5 if self.back else 1.0)

    @property
    def bytes(self) -> float:
        q = self.batch * self.queries * self.heads * self.head_dim
        kv = 2 * self.batch * self.keys * self.kv_heads * self.head_dim
        return (2 * q + kv) * WIDTH[self.dtype] * (2 if self.back else 1)


@dataclass(frozen=True)
class MemoryBound:
    """Passes over memory: `bytes` read and written."""

    name: str
    bytes: float
    launches: int = 1
    flops: float = 0.0  # where they may outweigh the bytes, as in a larger op kept in one piece
    dtype: str = "fp32"
    share: str = "gemm.efficiency"  # the constant that says which share of the peak such flops reach
    math: float = 0.0  # elements put through exp, tanh and the like
    walk: str = ""  # the constant that says which share of the bandwidth such a pass reaches, where it is not all of it
    kind: str = ""  # the op, where devices may have a rate of their own for it: of so many `elements`, or flops over so many `keys`
    elements: float = 0.0
    keys: int = 0


@dataclass(frozen=True)
class Collective:
    """A collective over one mesh axis. `bytes` is the full tensor, or one rank's part for all_to_all and send."""

    kind: str
    bytes: float
    axis: str
    name: str = ""
    launches: int = 1
    hidden: bool = False  # runs overlapped with the compute that does not need it
    concurrent: bool = False  # hidden by the compute of another micro-batch: nothing of its own waits for it before the pass ends
    copies: int = 1  # of each row of an all_to_all, for as many ranks
    peer: bool = False  # inside a kernel that reads and writes the memory of its peers, where they can be reached


Op: TypeAlias = Gemm | Attention | MemoryBound | Collective


# --- of a program


def records(program: Program, chained: bool = False) -> list[Op]:
    """Every node or fused group as records, in order."""
    return [op for _, ops in by_place(program, chained) for op in ops]


def by_place(program: Program, chained: bool = False) -> Iterator[tuple[Node | Group, list[Op]]]:
    """The records of each node, or of each fused group at the place of its last node."""
    place = {node: i for i, node in enumerate(program.nodes)}
    groups = [group for group in program.groups if group.kind == "fuse"]
    inside = {node for group in groups for node in group.nodes}
    last = {max(group.nodes, key=place.__getitem__): group for group in groups}
    work = Work(program, chained)
    for node in program.nodes:
        if node in last:
            yield last[node], list(of_group(program, last[node].nodes))
        elif node not in inside:
            yield node, work.of(node)


@dataclass(frozen=True, eq=False)
class Work:
    """Records of the nodes of a program, each in its place: what its neighbours do for it is no pass of its own.

    `chained`: pointwise ops in a row are compiled into one kernel, which touches only what enters and leaves it.
    """

    program: Program
    chained: bool = False

    def of(self, node: Node, placed: Node | None = None) -> list[Op]:
        """What a node is; `placed` is the same node on a mesh, where the program is on none."""
        at = placed or node
        if node in self.left_out:
            return []
        if self.is_done_by_matmul(node) or (node.op in (add, pad_op) and self._is_padded_part(node)):
            return []
        if _side_by_side(node) or (node.op is concat_op and not self._is_sent(node)):
            return [MemoryBound("concat", 2.0 * nbytes(at.type))]
        if node.op is pad_op:
            return [MemoryBound("pad", float(nbytes(at.type) + 2 * nbytes(at.args[0].type)), 2)]
        return list(of_node(at, *self.edges(node)))

    @cached_property
    def left_out(self) -> frozenset[Node]:
        """What is not run."""
        return left_out(self.program)

    def context(self, node: Node) -> object:
        """What of its neighbours a node's records depend on."""
        joins = node.op in (add, pad_op, concat_op)
        return self.edges(node), joins and (self.is_done_by_matmul(node), _side_by_side(node), self._is_padded_part(node), self._is_sent(node))

    def edges(self, node: Node) -> tuple[tuple[bool, ...], bool]:
        """Which operands enter a kernel at this node, and whether its result leaves it."""
        if not self._is_chained(node):
            return (True,) * len(node.args), True
        users = self.program.users[node]
        leaves = not users or bool(self.program.outputs_of(node)) or not all(map(self._is_chained, users))
        return tuple(not self._is_chained(a) for a in node.args), leaves

    def _is_chained(self, node: Node) -> bool:
        return self.chained and node.op.kind is Kind.POINTWISE and bool(node.args) and not self.is_done_by_matmul(node)

    def is_done_by_matmul(self, node: Node) -> bool:
        """A bias is added by the matmul it follows."""
        if node.op is not add:
            return False
        for one, other in (node.args, node.args[::-1]):
            alone = list(self.program.users[one]) == [node] and not self.program.outputs_of(one)
            if one.op.kind is Kind.CONTRACT and alone and other.shape == one.shape[-1:]:
                return True
        return False

    def _is_padded_part(self, node: Node) -> bool:
        """Whether it is a padded piece, or a sum of some, that is laid side by side with others in one pass."""
        return any(_side_by_side(u) or self._is_padded_part(u) for u in self.program.users[node] if u.op is add)

    def _is_sent(self, node: Node) -> bool:
        """Whether what it joins is only sent together, each from where it lies."""
        users = self.program.users[node]
        return bool(users) and all(u.op.kind is Kind.COMM for u in users)


def _side_by_side(node: Node) -> bool:
    """Whether it sums only padded pieces, and these fill it."""
    pads = _pads(node)
    if not pads or len({x.attr("dim") for x in pads}) > 1:
        return False
    dim = int(pads[0].attr("dim"))
    return sum(x.args[0].shape[dim] for x in pads) == node.shape[dim]


def _pads(node: Node) -> list[Node]:
    """The padded pieces that a sum adds up; none where it adds anything else."""
    if node.op is not add or any(a.op not in (add, pad_op) for a in node.args):
        return []
    each = [[a] if a.op is pad_op else _pads(a) for a in node.args]
    return [x for pads in each for x in pads] if all(each) else []


_known: dict[object, tuple[Op, ...]] = {}
MOST_KNOWN = 1 << 16


def of_node(node: Node, enters: Sequence[bool] = (), leaves: bool = True) -> tuple[Op, ...]:
    """What one node is, nothing for inputs and views; of one inside a larger kernel, which operands enter there and whether its result leaves.

    Worked out once for operands and results of the same types: the blocks of a model are the same, and so are most nodes of two plans."""
    loose = _loose(node) if node.op.kind is Kind.CONTRACT else ""  # goes by what its operands are made of
    key = node.op, node.attrs, tuple(a.types for a in node.args), node.types, tuple(enters), leaves, loose
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        found = _known[key] = tuple(_worked_out(node, enters, leaves))
    return found


def _worked_out(node: Node, enters: Sequence[bool], leaves: bool) -> Iterator[Op]:
    kind, name = node.op.kind, node.op.name
    if kind in (Kind.VIEW, Kind.SOURCE) or not node.args or node.op in COPIES:
        return
    if kind is Kind.COMM:
        yield from _sent(node)
    elif kind is Kind.CONTRACT:
        m, n, k, batch = matmul_sizes(node)
        yield Gemm(m, n, k, batch, dtype_of(node.args[0]), name, loose=_loose(node))
    elif node.op.pieces is not None:
        yield from _in_pieces(node)
    elif node.op.attends is not None and not _in_one_kernel(node):
        yield from _with_scores(node)
    elif node.op.matmuls is not None:
        yield from _experts(node)
    else:
        share = "gemm.efficiency"
        if node.op.attends is not None:
            share = "attention.backward" if node.op.attends else "attention.forward"
        edge = node if all(enters) and leaves else _outside(node, enters, leaves)
        yield MemoryBound(
            name, float(memory_traffic(edge)), leaves + node.op.extra_kernels, flops=flops(node) if kind is Kind.COMPOSITE else 0.0,
            dtype=dtype_of(node), share=share, math=_elements(node) if node.op.transcendental else 0.0,
            kind=f"{name}.tanh" if node.attr("tanh") else name, elements=_widest(node), keys=keys_of(node),
        )  # fmt: skip


def through_experts(
    rows: int, hidden: int, inner: int, count: int, dtype: str, gated: bool, brought: float, wide: float, swap: Sequence[Op] = ()
) -> tuple[Op, ...]:
    """A layer of experts of a rank, as weft's op and systems whose steps were published run it: tokens are brought to `count` experts, `rows` to each,
    sent by `swap` where others have them, and come back. `brought` are bytes of all rows as tokens, `wide` as an expert has them inside."""
    return (
        MemoryBound("dispatch", 2 * brought, 4, walk="memory.experts"), *swap,
        Gemm(rows, inner * (2 if gated else 1), hidden, count, dtype, "experts up", grouped=True),
        MemoryBound("expert activation", 3 * wide, walk="memory.experts"),
        Gemm(rows, hidden, inner, count, dtype, "experts down", grouped=True), *swap,
        MemoryBound("combine", 3 * brought, 3, walk="memory.experts"),
    )  # fmt: skip


def _experts(node: Node) -> Iterator[Op]:
    """Experts, or their backward, which keeps no more than the tokens: it brings them and what comes back to the experts, and is through the first
    matmul once more."""
    assert node.op.matmuls is not None
    matmuls, dtype, axis = node.op.matmuls(node), dtype_of(node), node.attr("sent")
    (rows, twice, hidden, count), back = matmuls[0], len(matmuls) > 2
    inner = matmuls[1][1] if back else matmuls[1][2]
    brought, wide = (float(rows * count * size * WIDTH[dtype]) for size in (hidden, inner))
    swap = [Collective("all_to_all", brought, axis, "tokens to experts", copies=picks_of(node))] if axis else []
    forward = through_experts(rows, hidden, inner, count, dtype, twice > inner, brought, wide, swap)
    if not back:
        yield from forward
        return
    dispatch, up, combine = forward[0], forward[1 + len(swap)], forward[-1]
    yield from (dispatch, dispatch, *swap, *swap, up)
    yield from (Gemm(m, n, k, often, dtype, node.op.name, grouped=True) for m, n, k, often in matmuls[1:])
    yield MemoryBound("expert activation", 6 * wide, walk="memory.experts")
    yield from (*swap, combine)


def inside(node: Node) -> float:
    """Bytes that an op of experts has of its rows at once, half of what its backward has: as tokens on both sides, and as the experts have them."""
    if node.op.matmuls is None:
        return 0.0
    rows, twice, hidden, count = node.op.matmuls(node)[0]
    return float(rows * count * (2 * hidden + 1.5 * twice) * WIDTH[dtype_of(node)])


def _in_pieces(node: Node) -> Iterator[Op]:
    """The op that a node does piece by piece: as much work in as many more and smaller calls, and copies to split operands and join results."""
    full, counts, moved = node.op.pieces(node)
    many = math.prod(counts.values())
    for op in of_node(full):
        if isinstance(op, Gemm):
            m, n, k, batch = matmul_sizes(full, counts)
            op = replace(op, m=m, n=n, k=k, batch=batch * many)
        yield replace(op, launches=op.launches * many)
    yield MemoryBound(f"leaves of {full.op.name}", float(moved), 2 * many)


def _outside(node: Node, enters: Sequence[bool], leaves: bool) -> Node:
    """The node with only those operands and results that pass the edge of its kernel."""
    args = tuple(a for a, out in zip(node.args, enters, strict=True) if out)
    return Node(node.op, args, node.attrs, node.types if leaves else ())


def of_group(program: Program, nodes: Sequence[Node]) -> Iterator[Op]:
    """One kernel: its bytes are those of values that come from outside or are read there, and what it sends."""
    inside = set(nodes)
    read = {a for n in nodes for a in n.args if a not in inside}
    outputs = {n for _, n in program.outputs}
    kept = [n for n in nodes if n in outputs or any(u not in inside for u in program.users[n])]
    for node in nodes:
        if node.op.kind is Kind.CONTRACT:
            yield from of_node(node)
    for node in nodes:
        if node.op.kind is Kind.COMM:
            yield from _sent(node, peer=True)
    moved = sum(_read_here(program, a, inside) for a in read) + sum(_written_here(n) for n in kept)
    hard = sum(_elements(n) for n in nodes if n.op.transcendental)
    over = {program.output_names[o] for o, _ in program.state}
    walk = "memory.in_place" if kept and all(n in over for n in kept) else ""
    yield MemoryBound("fused " + " ".join(dict.fromkeys(n.op.name for n in nodes)), float(moved), math=hard, walk=walk)


def _read_here(program: Program, value: Node, inside: Collection[Node]) -> int:
    """Bytes a kernel reads of a value in its rank's own memory: of one it only scatters, its slice; its peers' slices are sent."""
    readers = [u for u in program.users[value] if u in inside]
    if all(u.op is reduce_scatter for u in readers):
        return max(nbytes(u.types[u.args.index(value)]) for u in readers)
    return sum(nbytes(t) for t in value.types)


def _written_here(node: Node) -> int:
    """Bytes a kernel writes of a value in its rank's own memory: of one it gathers, its slice; its peers write theirs."""
    of, picked = (node.args[0], slice(node.attr("index"), node.attr("index") + 1)) if node.op.is_item else (node, slice(None))
    types = [a.type for a in of.args] if of.op is all_gather else of.types
    return sum(nbytes(t) for t in types[picked])


def _sent(node: Node, peer: bool = False) -> Iterator[Op]:
    """A collective of all its tensors in one call; a slice sends nothing and costs a copy."""
    name, axis = node.op.name, str(node.attr("axis"))
    given = float(sum(nbytes(a.type) for a in node.args))
    taken = float(sum(nbytes(t) for t in node.types))
    if node.op in SENT:
        full = max(given, taken)
        yield Collective(name, full if node.op is all_gather else given, axis, name, peer=peer)
        if not peer and _strided(node):
            yield MemoryBound(f"{name} laid out", 2 * full)
        if not peer and _uneven(node):
            padded = {all_gather: taken if _strided(node) else 0.0, reduce_scatter: given}.get(node.op, given + taken)
            yield MemoryBound(f"{name} of uneven pieces", 2 * padded)
    elif taken < given and not peer and _strided(node):
        yield MemoryBound(name, 2 * taken)


def _sharded_dims(node: Node) -> Iterator[tuple[Layout, int, int]]:
    """Of what a collective takes and gives, the layouts that its axis shards: in which dim, and at which atom of it."""
    for layout in (t.layout for t in (*(a.type for a in node.args), *node.types)):
        if (at := layout.where_sharded(str(node.attr("axis")))) is not None:
            yield layout, *at


def _strided(node: Node) -> bool:
    """Whether the ranks' pieces do not lie end to end, so that they are copied to where they belong."""
    return any(math.prod(y.largest_local[:d]) * math.prod(atom.size for atom in y.dims[d][:k]) > 1 for y, d, k in _sharded_dims(node))


def _uneven(node: Node) -> bool:
    """Whether some ranks' pieces are shorter, so that they are padded to be sent and trimmed afterwards."""
    return any(y.dims[d][k].size % math.prod(y.mesh.sizes[a] for a in y.dims[d][k].axes) for y, d, k in _sharded_dims(node))


def matmul_sizes(node: Node, pieces: Mapping[str, int] = MappingProxyType({})) -> tuple[int, int, int, int]:
    """A contraction as [m, k] x [k, n], so many times over, on the busiest rank; of one of the `pieces` that some labels are split into."""
    eq = equation_of(node)
    assert eq is not None
    local = [(x, n) for labels, a in zip(eq.ins, node.args, strict=True) for x, n in zip(labels, a.type.layout.largest_local, strict=True)]
    size = {x: n // pieces.get(x, 1) for x, n in local}
    left, out = set(eq.ins[0]), set(eq.outs[0])
    right = set(next((labels for labels in eq.ins[1:] if (left - out) & set(labels)), eq.ins[-1]))  # scales of what is multiplied come after it
    parts = (left & out - right, right & out - left, left & right - out, left & right & out)
    m, n, k, batch = (math.prod(size[x] for x in part if x != ONE) for part in parts)
    return m, n, k, batch


def _loose(node: Node) -> str:
    """Of m, n and k those that neither an operand nor the result is contiguous along."""
    eq = equation_of(node)
    assert eq is not None
    left, right, out = set(eq.ins[0]), set(eq.ins[-1]), set(eq.outs[0])
    inner = {labels[_innermost(a)] for a, labels in zip(node.args, eq.ins, strict=True) if labels} | set(eq.outs[0][-1:])
    parts = {"m": left & out - right, "n": right & out - left, "k": left & right - out}
    return "".join(letter for letter, part in parts.items() if not part & inner)


def _innermost(node: Node) -> int:
    """The dim a value is contiguous along, seen through transpositions."""
    eq = equation_of(node) if node.op.kind is Kind.VIEW else None
    if eq is None or sorted(eq.ins[0]) != sorted(eq.outs[0]):
        return max(0, node.ndim - 1)
    return eq.outs[0].index(eq.ins[0][_innermost(node.args[0])])


def query_and_key(node: Node) -> tuple[Node, Node]:
    """Of attention, or of its backward."""
    at = node.op.attends or 0
    return node.args[at], node.args[at + 1]


def attention_of(node: Node) -> Attention:
    """Attention as the one kernel of a library, whatever it masks."""
    q, k = query_and_key(node)
    *lead, rows, width = q.type.layout.largest_local
    batch, *groups, keys, _ = k.type.layout.largest_local
    heads, back = math.prod(lead) // max(1, batch), bool(node.op.attends)
    causal, kind = bool(node.attr("causal")), dtype_of(node)
    return Attention(batch, heads, math.prod(groups), rows, keys, width, causal, kind, node.op.name, back=back, launches=2 if back else 1)


def keys_of(node: Node) -> int:
    """Keys attention is over; 0 of any other op."""
    return int(query_and_key(node)[1].type.layout.largest_local[-2]) if node.op.attends is not None else 0


def _in_one_kernel(node: Node) -> bool:
    """Whether a library's kernel does it: one that drops nothing, and that finds all rows and keys where a mask is causal."""
    q, k = query_and_key(node)
    if node.attr("window") or node.attr("offset") or node.attr("p") or k.ndim != 4 or (node.op.attends or 0) > 1:
        return False
    return not node.attr("causal") or q.shape[3] == k.shape[2] and not any(a.axes for a in q.type.layout.dims[3])


def _with_scores(node: Node) -> Iterator[Op]:
    """Attention as it is defined: matmuls, and passes over scores that reach memory (scaled, masked, their sums, exponentials)."""
    q, k = query_and_key(node)
    *heads, rows, width = q.type.layout.largest_local
    keys = math.prod(k.type.layout.largest_local[2:-1])
    back = bool(node.op.attends)
    for _ in range(5 if back else 2):
        yield Gemm(rows, keys, width, math.prod(heads), dtype_of(node), node.op.name)
    scores = float(math.prod(heads) * rows * keys)
    moved, launches, hard = (17, 10, 1) if back else (11, 8, 2)
    size = moved * scores * WIDTH[dtype_of(node)]
    yield MemoryBound(f"scores of {node.op.name}", size, launches, kind=f"scores.{node.op.name}", elements=scores)
    yield MemoryBound(f"exponentials of {node.op.name}", 0.0, 0, math=hard * scores, kind="exp", elements=hard * scores)


def _widest(node: Node) -> float:
    """Elements of the largest tensor it reads or writes."""
    return max(float(math.prod(t.layout.largest_local)) for t in (*node.types, *(t for a in node.args for t in a.types)))


def _elements(node: Node) -> float:
    return float(math.prod(node.types[0].layout.largest_local))


def dtype_of(node: Node) -> str:
    return DTYPES.get(DTYPE_NAMES[node.types[0].dtype], "fp32")
