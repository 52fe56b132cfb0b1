"""Will it fit: the answer, the largest micro-batch that does, and changes that were tried and help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.cluster.spec import Cluster
from weft.core.errors import WeftError
from weft.plan.setting import RECOMPUTE, Setting
from weft.plan.simulate import Step, simulate
from weft.plan.transformer import Shape, workload


@dataclass(frozen=True)
class Change:
    """One change of a setting that makes it fit, and the step it then takes."""

    says: str
    setting: Setting
    step: Step


@dataclass(frozen=True)
class Fit:
    fits: bool
    needed: float  # bytes of the fullest device
    memory: float  # bytes it has
    largest: int  # micro-batch that fits with everything else kept; 0 if none does
    changes: tuple[Change, ...]


def fit(shape: Shape, setting: Setting, cluster: Cluster, step: Step | None = None) -> Fit:
    """Whether a setting fits the smallest memory of the cluster."""
    step = step or simulate(workload(shape, setting), setting, cluster)
    memory = min(g.profile.device.memory for g in cluster.groups)
    needed = step.peak_memory.total
    ok = needed <= memory
    changes = () if ok else tuple(sorted(_helpful(shape, setting, cluster, memory), key=lambda c: c.step.seconds))
    return Fit(ok, needed, memory, _largest(shape, setting, cluster, memory), changes)


def _try(shape: Shape, setting: Setting, cluster: Cluster) -> Step | None:
    try:
        return simulate(workload(shape, setting), setting, cluster)
    except WeftError:
        return None


def _largest(shape: Shape, setting: Setting, cluster: Cluster, memory: float) -> int:
    """By doubling, then halving the span in between; the number of micro-batches stays."""

    def fits(size: int) -> bool:
        batch = size * setting.dp * setting.micro_batches
        step = _try(shape, replace(setting, micro_batch=size, global_batch=batch), cluster)
        return step is not None and step.peak_memory.total <= memory

    if not fits(1):
        return 0
    low = 1
    while low < 2**14 and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _helpful(shape: Shape, setting: Setting, cluster: Cluster, memory: float) -> Iterator[Change]:
    for says, other in _changes(setting):
        step = _try(shape, other, cluster)
        if step is not None and step.peak_memory.total <= memory:
            yield Change(says, other, step)


def _changes(s: Setting) -> Iterator[tuple[str, Setting]]:
    """One thing at a time, then the two that go together."""
    more = RECOMPUTE[RECOMPUTE.index(s.recompute) + 1 :]
    for name in more:
        yield f"--recompute {name}", replace(s, recompute=name)
    for zero in range(s.zero + 1, 4):
        yield f"--zero {zero}", replace(s, zero=zero)
    if s.micro_batch > 1:
        yield f"--micro-batch {s.micro_batch // 2}", replace(s, micro_batch=s.micro_batch // 2)
    if s.tp > 1 and not s.sequence_parallel:
        yield "--sequence-parallel", replace(s, sequence_parallel=True)
    for axis in ("tp", "pp", "cp"):
        if s.dp % 2 == 0:
            size = 2 * getattr(s, axis)
            yield f"--{axis} {size} --dp {s.dp // 2}", replace(s, **{axis: size, "dp": s.dp // 2})
    if s.zero < 3 and s.recompute != "full":
        yield "--zero 3 --recompute full", replace(s, zero=3, recompute="full")
