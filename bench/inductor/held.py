"""What the kernels of a compiled graph hold, as Inductor has them: in the order of least memory, results over what is read no more.

Buffers live from the kernel that makes them to the last that reads them. Of the order given and the one that takes the kernel that holds
least next, that with the smaller peak runs. A result may be written over an input that its kernel is the last to read and reads for it alone;
else a buffer of the same kind freed before is taken, which then was not free in between, so only where

    size + peak between <= peak of all
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Buffer:
    """So many bytes, read by some kernels. `kept` to the end, or not ours to free; `kind` says what may take its place."""

    size: int
    readers: frozenset[int]
    kept: bool = False
    kind: object = None


@dataclass(frozen=True)
class Kernel:
    """What a kernel makes. One whose `library` allocates takes nothing that was freed."""

    makes: tuple[Buffer, ...]
    over: Mapping[Buffer, Sequence[Buffer]] = field(default_factory=dict)  # inputs each may be written over, if read for the last time
    library: bool = False
    passing: int = 0  # bytes the library holds while it runs, which the compiler does not know of

    @property
    def size(self) -> int:
        return sum(b.size for b in self.makes)


@dataclass
class Plan:
    """Kernels, and `given`: buffers that are there already and die with their last reader."""

    kernels: Sequence[Kernel]
    given: Sequence[Buffer] = ()

    @cached_property
    def reads(self) -> list[list[Buffer]]:
        """The buffers each kernel reads."""
        found: list[list[Buffer]] = [[] for _ in self.kernels]
        for buffer in (*self.given, *(b for k in self.kernels for b in k.makes)):
            for reader in buffer.readers:
                found[reader].append(buffer)
        return found

    @cached_property
    def order(self) -> list[int]:
        given, least = list(range(len(self.kernels))), self.least_first()
        if len(least) < len(given):  # kernels that wait for one another, as a cut rougher than the compiler's may have
            return given
        return min((given, least), key=lambda order: max(self.peaks(order), default=0))

    def last_readers(self, order: Sequence[int]) -> dict[int, list[Buffer]]:
        """What dies with each kernel: what it reads last, or makes for none."""
        at = {kernel: i for i, kernel in enumerate(order)}
        dies: dict[int, list[Buffer]] = defaultdict(list)
        for maker, buffers in ((None, self.given), *((n, k.makes) for n, k in enumerate(self.kernels))):
            for buffer in buffers:
                if not buffer.kept and (buffer.readers or maker is not None):
                    dies[max(buffer.readers, key=at.__getitem__) if buffer.readers else maker].append(buffer)  # type: ignore[index]
        return dies

    def peaks(self, order: Sequence[int]) -> list[int]:
        """The most held while each kernel runs, nothing written over anything else."""
        dies, now, found = self.last_readers(order), 0, []
        for n in order:
            now += self.kernels[n].size
            found.append(now)
            now -= sum(b.size for b in dies[n])
        return found

    def least_first(self) -> list[int]:
        """Take what fits under the peak so far and leaves least; where nothing does, what needs least."""
        return list(_LeastFirst(self).run())

    @cached_property
    def peak(self) -> int:
        """The most held at any time beyond what is held at first."""
        return max(_Reuse(self).run(), default=0)


@dataclass
class _LeastFirst:
    plan: Plan
    left: dict[Buffer, int] = field(default_factory=dict)  # kernels that have yet to read it; one more where it is kept
    done: set[int] = field(default_factory=set)

    def run(self) -> Iterator[int]:
        plan = self.plan
        self.left = {b: len(b.readers) + b.kept for b in (*plan.given, *(b for k in plan.kernels for b in k.makes))}
        after: list[set[int]] = [{r for b in k.makes for r in b.readers} for k in plan.kernels]
        before = [0] * len(plan.kernels)
        for those in after:
            for n in those:
                before[n] += 1
        frees = [sum(b.size for b in plan.reads[n] if self.left[b] == 1) + sum(b.size for b in k.makes if not self.left[b])
                 for n, k in enumerate(plan.kernels)]  # fmt: skip
        ready = {n for n, count in enumerate(before) if not count}
        live = sum(b.size for b in plan.given)
        most = max(live, sum(b.size for k in plan.kernels for b in k.makes if b.kept))
        while ready:
            gap = most - live
            best = min(ready, key=lambda n: (self._over(n, gap), plan.kernels[n].size - frees[n], n))
            ready.remove(best)
            yield best
            live += plan.kernels[best].size
            most = max(most, live)
            live -= frees[best]
            self._read(best, frees)
            for n in after[best]:
                before[n] -= 1
                if not before[n]:
                    ready.add(n)

    def _over(self, n: int, gap: int) -> int:
        return size if (size := self.plan.kernels[n].size) > gap else 0

    def _read(self, n: int, frees: list[int]) -> None:
        """A buffer that only one other kernel has yet to read is freed by that one."""
        self.done.add(n)
        for buffer in self.plan.reads[n]:
            self.left[buffer] -= 1
            if self.left[buffer] == 1 and not buffer.kept:
                for reader in buffer.readers - self.done:
                    frees[reader] += buffer.size


@dataclass
class _Reuse:
    """Walks the kernels in order and keeps what was freed for those who can take it."""

    plan: Plan
    pool: dict[object, list[tuple[int, Buffer]]] = field(default_factory=lambda: defaultdict(list))
    frees: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # bytes given back after each place
    takes: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # bytes newly taken at each place
    peaks: list[int] = field(default_factory=list)  # while each place runs, with what waits
    most: int = 0

    def run(self) -> Iterator[int]:
        order = self.plan.order
        dies, self.peaks = self.plan.last_readers(order), self.plan.peaks(order)
        self.most = max(self.peaks, default=0)
        given = set(self.plan.given)
        for at, n in enumerate(order):
            gone = list(dies[n])
            for buffer in self.plan.kernels[n].makes:
                self._place(at, self.plan.kernels[n], buffer, gone)
            for buffer in gone:
                if buffer not in given:
                    self.pool[buffer.kind].append((at, buffer))
                self.frees[at] += buffer.size
        now = 0
        for at, n in enumerate(order):
            now += self.takes[at]
            yield now + self.plan.kernels[n].passing
            now -= self.frees[at]

    def _place(self, at: int, kernel: Kernel, buffer: Buffer, gone: list[Buffer]) -> None:
        """Over an input, in a buffer freed before, or anew."""
        written = next((b for b in kernel.over.get(buffer, ()) if b in gone and b.size >= buffer.size), None)
        if written is not None:
            gone.remove(written)
            return
        free = self.pool[buffer.kind]
        if free and not kernel.library and self._may_wait(at, free[-1][0], buffer.size):
            since, _ = free.pop()
            self.frees[since] -= buffer.size
            for i in range(since + 1, at):
                self.peaks[i] += buffer.size
            return
        self.takes[at] += buffer.size

    def _may_wait(self, at: int, since: int, size: int) -> bool:
        return since + 1 == at or size + max(self.peaks[since + 1 : at], default=0) <= self.most
