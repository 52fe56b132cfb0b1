"""A training step whose global batch follows the gradient noise scale: small while gradients are plain, larger as they drown.

    step = Adaptive(lambda batch: parallelize(model, loss, optimizer, example(batch), plan="dp2", noise=True), (16, 32, 64, 128))
    for _ in range(steps):
        loss = step(draw(step.batch))

Each batch is timed by its first steps, which train as any; every `every` steps the batch of most progress per second is taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.api.step import Step
from weft.core.errors import PlanError
from weft.plan.goodput import efficiency
from weft.transform.noise import Noise

TRIES = 3  # steps at a batch before it counts as timed; the first of them, which loads kernels, is left out
RECENT = 20  # steps whose median is the time of a batch


def pick(seconds: Mapping[int, float], noise: float) -> int:
    """Of batches with known times the one of most progress per second; the smaller of equals."""
    return max(sorted(seconds), key=lambda b: efficiency(b, noise) * b / seconds[b])


def listen(step: Any, noise: Noise) -> None:
    """Let a step tell its noise to one that other steps tell theirs too."""
    if step._probe is None:
        raise PlanError("the step does not measure noise", needed="parallelize(..., noise=True)", found=str(step.plan))
    step.noise = step._probe.noise = noise


class Adaptive:
    """Steps of several batches over one state. `rate(batch, noise)`, if given, is the learning rate of every group."""

    def __init__(
        self,
        make: Callable[[int], Step],
        batches: Sequence[int],
        *,
        every: int = 25,
        rate: Callable[[int, float], float] | None = None,
        noise: Noise | None = None,
    ) -> None:
        if not batches:
            raise PlanError("no batch to choose from", needed="one or more sizes of a global batch", found="none")
        self.make, self.batches, self.every, self.rate = make, tuple(sorted(batches)), every, rate
        self.noise = noise or Noise()
        self.batch = self.batches[0]
        self.steps = 0
        self.chosen: list[tuple[int, int, float]] = []  # step, batch and noise of every change
        self._made: dict[int, Step] = {}
        self._seconds: dict[int, list[float]] = {b: [] for b in self.batches}
        self._now: Step | None = None

    def __call__(self, batch: Any) -> Tensor:
        """One step on `self.batch` samples."""
        step = self._enter(self.batch)
        self._set_rate(step)
        began = time.perf_counter()
        loss = step(batch)
        if loss.device.type != "cpu":
            torch.accelerator.synchronize()
        self._seconds[self.batch].append(time.perf_counter() - began)
        self.steps += 1
        self._choose()
        return loss

    @property
    def step(self) -> Step:
        """The step of the batch now taken: its state, its checkpoints, its evaluation."""
        return self._enter(self.batch)

    def seconds(self, batch: int) -> float:
        """Of one step at a batch that was timed."""
        return statistics.median(self._seconds[batch][1:][-RECENT:])

    def prepare(self) -> None:
        """Make the steps of all batches now, not when each is first taken."""
        for batch in self.batches:
            self._enter(batch)
        self._enter(self.batch)

    def _enter(self, batch: int) -> Step:
        """The step of a batch, with the state as the last one left it."""
        if batch not in self._made:
            self._made[batch] = self.make(batch)
            listen(self._made[batch], self.noise)
        new, old = self._made[batch], self._now
        if old is not None and new is not old:
            new.take_state(old)
        self._now = new
        return new

    def _set_rate(self, step: Step) -> None:
        noise = self.noise.scale
        if self.rate is not None and not math.isnan(noise):
            for group in step.optimizer.param_groups:
                group["lr"] = self.rate(self.batch, noise)

    def _choose(self) -> None:
        """Batches not yet timed first, then the best, as rank 0 sees it."""
        untimed = [b for b in self.batches if len(self._seconds[b]) < TRIES]
        if untimed:
            self._take(untimed[0])
        elif self.steps % self.every == 0:
            best = pick({b: self.seconds(b) for b in self.batches}, self.noise.scale)
            told: list[Any] = [best]
            if dist.is_initialized():
                dist.broadcast_object_list(told, src=0)
            self._take(int(told[0]))

    def _take(self, batch: int) -> None:
        if batch != self.batch:
            self.batch = batch
            self.chosen.append((self.steps, batch, self.noise.scale))
