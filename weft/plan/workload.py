"""What one device has to do for one micro-batch of a model known by name, in the records of `cost.work`.

A block is one distinct layer with the number of times it occurs. Its backward is derived from its forward, op by op.
Sizes are those of one device, after every sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.cluster.kernels import WIDTH
from weft.cost.work import Attention, Collective, Gemm, Op, Touch

ROUND = 128  # a size padded to a multiple of it is aligned for any device, on up to 16 of them


@dataclass(frozen=True)
class Block:
    """A layer. `params` of one device, `kept` when the layer is recomputed (its input), `work` the largest passing buffer."""

    name: str
    forward: tuple[Op, ...]
    params: float = 0
    expert_params: float = 0
    kept: float = 0
    work: float = 0
    redo: tuple[Op, ...] = ()  # ops recomputed before the backward under selective recompute
    redo_frees: float = 0  # bytes that need not be kept then
    parts: tuple[tuple[str, tuple[Op, ...], float], ...] = ()  # other parts that may be recomputed by name, and what each frees
    again: str = ""  # what this layer recomputes, where layers of one setting differ
    back: tuple[Op, ...] | None = None  # of the backward, where it is not derived from the forward
    waiting: float | None = None  # bytes kept for it, likewise
    trained: float | None = None  # parameters that are, where not all: next to `params`, which then have no gradients and no state
    state: float = 8.0  # bytes of the optimizer for each of them, next to the copy in fp32

    @property
    def held(self) -> tuple[float, float]:
        """Parameters, and those of experts."""
        return self.params + (self.trained or 0.0), self.expert_params

    @property
    def learnt(self) -> tuple[float, float]:
        """Of these, the ones that are trained."""
        return (self.params, self.expert_params) if self.trained is None else (self.trained, 0.0)

    @property
    def saved(self) -> float:
        return sum(op.saved for op in self.forward) if self.waiting is None else self.waiting

    def recomputes(self, setting: str) -> str:
        """What this layer recomputes under a setting; a block that was not told keeps everything under `mixed`."""
        return self.again or (setting if setting != "mixed" else "none")

    def not_kept(self, recompute: str) -> float:
        """Bytes that recompute does not keep."""
        how = self.recomputes(recompute)
        if how == "per-op" and self.back is None:
            return _freed(self.forward, tuple(per_op(self.forward)))
        return {"selective": self.redo_frees, **{name: frees for name, _, frees in self.parts}}.get(how, 0.0)

    def rerun(self, recompute: str) -> tuple[Op, ...]:
        """Ops recomputed before the backward."""
        how = self.recomputes(recompute)
        if how == "per-op" and self.back is None:
            return tuple(per_op(self.forward))
        return {"selective": self.redo, "full": self.forward, **{name: ops for name, ops, _ in self.parts}}.get(how, ())

    def backward(self, recompute: str = "none") -> tuple[Op, ...]:
        """Ops of the backward, with what is recomputed before it."""
        own = tuple(b for op in reversed(self.forward) for b in backward(op)) if self.back is None else self.back
        return self.rerun(recompute) + own


@dataclass(frozen=True)
class Workload:
    """One device's work for a micro-batch: `depth` layers between `first` and `last`."""

    name: str
    first: Block
    layer: Block
    depth: int
    last: Block
    tokens: int  # of one micro-batch, over all devices that share it
    model_flops: float  # per token, forward and backward, as MFU counts them
    total_params: float
    boundary: float  # bytes one device hands to the next stage
    shared: float = 0  # parameters that first and last stage both hold
    halves: tuple[Block, ...] = ()  # of a layer, where it may be split into two
    stages: tuple[tuple[tuple[Block, int], ...], ...] = ()  # blocks of each stage in order, where stages are not runs of equal layers
    others: tuple[tuple[Block, int], ...] = ()  # layers of other kinds that come before, as an encoder's, and how many of `depth` they are

    @property
    def kinds(self) -> tuple[tuple[Block, int], ...]:
        """Layers of each kind, in order."""
        return (*self.others, (self.layer, self.depth - sum(n for _, n in self.others)))

    def layers(self, start: int, count: int) -> Iterator[tuple[Block, int]]:
        """Some layers in order, equal ones together."""
        for block, n in self.kinds:
            own = min(count, max(0, n - start))
            if own:
                yield block, own
            start, count = max(0, start - n), count - own


def padded(work: Workload, odd: int, shared_by: int) -> Workload:
    """The work with a table of so many rows or columns padded, which `shared_by` devices share: its matmuls then load full vectors."""
    size, to = -(-odd // shared_by), -(-rounded(odd) // shared_by)

    def grow(ops: Iterable[Op]) -> tuple[Op, ...]:
        fit = {size: to}
        return tuple(replace(op, m=fit.get(op.m, op.m), n=fit.get(op.n, op.n), k=fit.get(op.k, op.k)) if isinstance(op, Gemm) else op for op in ops)

    first, last = (replace(b, forward=grow(b.forward), back=None if b.back is None else grow(b.back)) for b in (work.first, work.last))
    return replace(work, first=first, last=last)


def rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def odd_of(sizes: Iterable[int]) -> int:
    """The largest size that matmuls would rather have padded; 0 where there is none. Small ones are not worth it."""
    return max((size for size in sizes if size % ROUND and size > 8 * ROUND), default=0)


def per_op(ops: Iterable[Op]) -> Iterator[Op]:
    """What is recomputed when attention, sums over ranks and every second matmul are kept, and nothing else."""
    products = 0
    for op in ops:
        products += isinstance(op, Gemm)
        kept = isinstance(op, Attention) or (isinstance(op, Collective) and op.kind != "all_gather")
        if not kept and not (isinstance(op, Gemm) and products % 2):
            yield op


def _freed(ops: Iterable[Op], again: tuple[Op, ...]) -> float:
    """What need not be kept: inputs of ops after one that is recomputed from an input of its own that is kept."""
    freed, remade = 0.0, False
    for op in ops:
        if not isinstance(op, Collective):
            freed += op.saved if remade else 0.0
            remade = op in again and op.saved > 0
    return freed


def backward(op: Op) -> Iterator[Op]:
    """What the backward of one op does."""
    if isinstance(op, Gemm):
        yield from _of_gemm(op)
    elif isinstance(op, Attention):
        yield replace(op, back=True, saved=0, name=f"{op.name} backward", launches=2)
    elif isinstance(op, Touch):
        if op.back:
            yield Touch(f"{op.name} backward", op.back, 0, op.back_launches, walk=op.walk)
    else:
        yield replace(op, kind=_ADJOINT.get(op.kind, op.kind))


_ADJOINT = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def _of_gemm(op: Gemm) -> Iterator[Op]:
    yield replace(op, n=op.k, k=op.n, saved=0, weight=False, bias=False, name=f"{op.name} input gradient")
    yield replace(op, m=op.k, k=op.m, saved=0, bias=False, loose="k", name=f"{op.name} weight gradient")
    if op.bias:
        size = op.m * op.n * WIDTH[op.dtype]
        yield Touch(f"{op.name} bias gradient", size, 0)


def split_weight(ops: Iterable[Op]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The backward split into two: what the previous stage waits for, and weight gradients that may be put off."""
    early, late = list[Op](), list[Op]()
    for op in ops:
        (late if isinstance(op, Gemm) and op.weight and op.name.endswith("weight gradient") else early).append(op)
    return tuple(early), tuple(late)


def flops(ops: Iterable[Op]) -> float:
    return sum(op.flops for op in ops)


def beside_products(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Each collective of tp hidden behind the matmul next to it: a gather behind the one after, a sum behind the one before."""
    waiting: Op | None = None
    for op in ops:
        if isinstance(op, Collective) and op.axis == "tp":
            op = replace(op, hidden=True)
            if isinstance(waiting, Gemm):
                yield op
                continue
        if waiting is not None:
            yield waiting
        waiting = op
    if waiting is not None:
        yield waiting


def quantised(ops: Sequence[Op], back: bool = False) -> Iterator[Op]:
    """With a pass before each matmul in fewer than 16 bits that makes its narrow operand, by rows for this matmul and by columns for the
    gradient of its weight. Matmuls of one operand share it; `back` are ops of a backward pass, where `weight` are those gradients."""
    made: set[int] = set()
    for op in ops:
        if isinstance(op, Gemm) and WIDTH[op.dtype] < 2 and not (back and op.weight) and (not op.reads or op.reads not in made):
            made.add(op.reads)
            each = 2 + 2 * WIDTH[op.dtype]
            yield Touch("quantise", op.batch * op.m * op.k * each, op.batch * op.m * op.n * each)
        yield op
