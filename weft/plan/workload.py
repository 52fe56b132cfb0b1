"""What one device has to do for one micro-batch of a stack, in the records of `cost.work`.

A block is one distinct layer with the number of times it occurs. Sizes are those of one device, after every sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.cluster.kernels import WIDTH
from weft.cost.work import Collective, Gemm, MemoryBound, Op
from weft.plan.spec import OFFLOAD, OFFLOADED

ROUND = 128  # a size padded to a multiple of it is aligned for any device, on up to 16 of them


@dataclass(frozen=True)
class Block:
    """A layer. `params` of one device, `saved` for its backward, `kept` when the layer is recomputed (its input), `work` the largest passing buffer."""

    name: str
    forward: tuple[Op, ...]
    params: float = 0
    expert_params: float = 0
    kept: float = 0
    work: float = 0
    back: tuple[Op, ...] = ()
    saved: float = 0
    parts: tuple[tuple[str, tuple[Op, ...], float], ...] = ()  # that may be recomputed, by name, and what each frees
    again: str = ""  # what this layer recomputes, where layers of one setting differ
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

    def recomputes(self, setting: str) -> str:
        """What this layer recomputes under a setting; a block that was not told keeps everything under `mixed`."""
        return self.again or (setting if setting != "mixed" else "none")

    def not_kept(self, recompute: str) -> float:
        """Bytes that recompute does not keep."""
        return {name: frees for name, _, frees in self.parts}.get(self.recomputes(recompute), 0.0)

    def hosted(self, recompute: str) -> float:
        """Bytes that the host keeps for the backward."""
        mode = self.recomputes(recompute)
        return (self.saved if mode == OFFLOAD else self.kept) if mode in OFFLOADED else 0.0

    def rerun(self, recompute: str) -> tuple[Op, ...]:
        """Ops recomputed before the backward."""
        return {"full": self.forward, f"full-{OFFLOAD}": self.forward, **{name: ops for name, ops, _ in self.parts}}.get(self.recomputes(recompute), ())

    def backward(self, recompute: str = "none") -> tuple[Op, ...]:
        """Ops of the backward, with what is recomputed before it."""
        return self.rerun(recompute) + self.back


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

    first, last = (replace(b, forward=grow(b.forward), back=grow(b.back)) for b in (work.first, work.last))
    return replace(work, first=first, last=last)


def rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def odd_of(sizes: Iterable[int]) -> int:
    """The largest size that matmuls would rather have padded; 0 where there is none. Small ones are not worth it."""
    return max((size for size in sizes if size % ROUND and size > 8 * ROUND), default=0)


def split_weight(ops: Iterable[Op]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The backward split into two: what the previous stage waits for, and weight gradients that may be deferred."""
    early, late = list[Op](), list[Op]()
    for op in ops:
        (late if isinstance(op, Gemm) and op.weight and op.name.endswith("weight gradient") else early).append(op)
    return tuple(early), tuple(late)


def overlapped_with_matmuls(ops: tuple[Op, ...]) -> Iterator[Op]:
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
            each = (2 if WIDTH[op.dtype] >= 1 else 4) + 2 * WIDTH[op.dtype]  # 4 bits: their scales have one of their own, the largest element first
            yield MemoryBound("quantise", op.batch * op.m * op.k * each)
        yield op
