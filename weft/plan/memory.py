"""Peak memory of a stage's device: what it holds all the time, and what is alive at the worst moment of its order.

Activations are followed through the order of the pipeline: a forward adds what its backward will need, that backward frees
it. What the host keeps of layers is none of it, but for the last layer of a chunk, whose backward comes at once. On top come the largest
temporaries, communication buffers, and a safety margin for fragmentation and for what the driver and library hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from weft.cluster.kernels import WIDTH, kept_width
from weft.cost.memory import needed
from weft.cost.pipeline import waiting
from weft.plan.phase import LayerRun
from weft.plan.schedules import Order
from weft.plan.setting import Setting
from weft.plan.workload import Block


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by what they are for."""

    params: float
    grads: float
    optimizer: float
    activations: float
    temporaries: float
    buffers: float

    @property
    def allocated(self) -> float:
        """What the allocator counts."""
        return self.params + self.grads + self.optimizer + self.activations + self.temporaries + self.buffers

    @property
    def total(self) -> float:
        """What the device must have."""
        return needed(self.allocated)

    def parts(self) -> dict[str, float]:
        """Every part by name; they sum to `total`."""
        return {**asdict(self), "safety margin": self.total - self.allocated}


def stage_memory(setting: Setting, chunks: Sequence[Sequence[LayerRun]], order: Order) -> Memory:
    """Of one device of a stage that holds `chunks` of layers and works in `order`."""
    parts = [part for chunk in chunks for part in chunk]
    state = _State.of(setting, parts)
    return Memory(
        params=state.params, grads=state.grads, optimizer=state.optimizer,
        activations=_peak_activations(setting, chunks, order),
        temporaries=max(_passing(setting, part.block) for part in parts),
        buffers=_buffers(setting, parts),
    )  # fmt: skip


@dataclass(frozen=True)
class _State:
    params: float
    grads: float
    optimizer: float

    @staticmethod
    def of(setting: Setting, parts: Sequence[LayerRun]) -> _State:
        dense, expert = (sum(p.block.held[i] * p.count for p in parts) for i in (0, 1))
        trained, learnt = (sum(p.block.learnt[i] * p.count for p in parts) for i in (0, 1))
        width = kept_width(setting.dtype)

        def over(sharded: bool, dense: float, expert: float) -> float:
            return dense / (setting.size("data") if sharded else 1) + expert / (setting.size("edp") if sharded else 1)

        copy = 4 if setting.master and width < 4 else 0
        full = setting.gather_once
        state = max((p.block.state for p in parts), default=8.0)
        grads = over(setting.zero >= 2 and not full, trained, learnt) * WIDTH[setting.grad_dtype]
        params = over(setting.zero == 3 and not full, dense, expert)
        return _State(params * width, grads, over(setting.zero >= 1, trained, learnt) * (state + copy))


def saved(setting: Setting, block: Block) -> float:
    """Bytes of one layer that wait for its backward on the device."""
    if block.hosted(setting.again):
        return 0.0
    if block.recomputes(setting.again) == "full" and block.kept:
        return block.kept
    return block.saved - block.not_kept(setting.again)


def stays(setting: Setting, blocks: Sequence[Block]) -> float:
    """Of the last layer of a chunk, what the host would keep of another."""
    return next((b.hosted(setting.again) for b in reversed(blocks) if b.kept), 0.0)


def kept(setting: Setting, chunk: Sequence[LayerRun]) -> float:
    """Bytes of a chunk that a forward leaves on the device until its backward."""
    return sum(saved(setting, p.block) * p.count for p in chunk) + stays(setting, [p.block for p in chunk if p.count])


def _peak_activations(setting: Setting, chunks: Sequence[Sequence[LayerRun]], order: Order) -> float:
    return max(waiting(order, [kept(setting, chunk) for chunk in chunks]), default=0.0)


def _passing(setting: Setting, block: Block) -> float:
    """The layer at work: what it recomputed, what the host sent back for it and the next, and its largest buffer with that buffer's gradient."""
    if hosted := block.hosted(setting.again):
        return 2 * hosted + (block.saved if block.rerun(setting.again) else 0.0) + 2 * block.work
    again = block.saved if block.recomputes(setting.again) == "full" and block.kept else block.not_kept(setting.again)
    return again + 2 * block.work


def _buffers(setting: Setting, parts: Sequence[LayerRun]) -> float:
    """Parameters gathered for two layers at a time, and gradients on their way to their shards."""
    if setting.size("data") == 1:
        return 0.0
    largest = max(p.block.params + p.block.expert_params for p in parts)
    gathered = 2 * largest * kept_width(setting.dtype) if setting.zero == 3 else 0.0
    trained = any(p.block.trained is None for p in parts)
    leaving = largest * WIDTH[setting.grad_dtype] if setting.zero >= 2 and trained else 0.0
    return gathered + leaving
