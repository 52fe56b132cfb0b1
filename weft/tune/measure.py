"""Time candidates fairly: in rounds, each round every candidate once, the slowest rank counting, all ranks agreeing.

The baseline wins ties: another candidate is chosen only where it is faster than the baseline by more than `margin`, and again
so when the best few and the baseline meet once more, in most rounds. The best of many noisy times is often luck.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

MARGIN = 0.03
TOGETHER = 6  # candidates timed in the same rounds, next to the baseline
BEST = 3  # that meet again
Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Milliseconds of each candidate, which one is the baseline, and which was chosen."""

    times: dict[str, float]
    baseline: str
    choice: str

    @property
    def gain(self) -> float:
        """How many times faster than the baseline the choice is."""
        return self.times[self.baseline] / self.times[self.choice]


def measure(
    candidates: Mapping[str, Call],
    baseline: str,
    *,
    group: dist.ProcessGroup | None = None,
    rounds: int = 7,
    known: Mapping[str, float] | None = None,
    on_result: Callable[[str, float], None] = lambda name, ms: None,
    device: torch.device | None = None,
) -> Measured:
    """Time what is not `known` yet; `on_result` is called each time. All ranks call it with the same candidates."""
    device = device or torch.device("cpu")
    times = {name: ms for name, ms in (known or {}).items() if name in candidates}
    fresh = {name: call for name, call in candidates.items() if name not in times or baseline not in times}
    if fresh and baseline not in fresh:
        fresh = {baseline: candidates[baseline], **fresh}  # compared within one run, never across runs
    for some in batched(fresh, TOGETHER):
        now = _time({baseline: candidates[baseline], **{n: fresh[n] for n in some}}, rounds, group, device)
        for name in some:
            times[name] = now[name] * times.get(baseline, now[baseline]) / now[baseline]  # as on the machine the baseline saw
            on_result(name, times[name])
    while (choice := decide(times, baseline)) in fresh and choice != baseline:
        close = [n for n in sorted(fresh, key=times.__getitem__) if n != baseline and times[n] * (1 + MARGIN) < times[baseline]][:BEST]
        first, *others = _rounds({n: candidates[n] for n in (baseline, *close)}, 2 * rounds, group, device).tolist()
        for name, took in zip(close, others, strict=True):
            times[name] = times[baseline] * confirm(first, took)
            on_result(name, times[name])
            del fresh[name]
    return Measured(times, baseline, choice)


def batched(names: Iterable[str], count: int) -> Iterator[list[str]]:
    rest = iter(list(names))
    while some := list(islice(rest, count)):
        yield some


def confirm(before: Sequence[float], after: Sequence[float]) -> float:
    """The second time as a part of the first, in the median; all of it unless it was less in three rounds of four."""
    wins = sum(b < a for a, b in zip(before, after, strict=True))
    ratio = statistics.median(after) / statistics.median(before)
    return ratio if 4 * wins >= 3 * len(before) else max(1.0, ratio)


def decide(times: Mapping[str, float], baseline: str, margin: float = MARGIN) -> str:
    """The fastest, if it beats the baseline by more than the margin; else the baseline."""
    best = min(times, key=lambda name: times[name])
    return best if times[best] * (1 + margin) < times[baseline] else baseline


def _time(calls: Mapping[str, Call], rounds: int, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    middle = _rounds(calls, rounds, group, device).median(dim=1).values
    return {name: 1e3 * t for name, t in zip(calls, middle.tolist(), strict=True)}


def _rounds(calls: Mapping[str, Call], rounds: int, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Seconds of each call in each round, on the slowest rank."""
    took = torch.zeros(len(calls), rounds, dtype=torch.float64)
    for call in calls.values():
        call()
    for turn in range(rounds):
        for k, call in enumerate(calls.values()):
            _synchronize(device)
            if dist.is_initialized():
                dist.barrier(group)
            start = time.perf_counter()
            call()
            _synchronize(device)
            took[k, turn] = time.perf_counter() - start
    if dist.is_initialized():
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return took


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
