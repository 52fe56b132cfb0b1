"""Messages between pipeline stages: sent at once, and received in the order they were sent.

Two ranks agree on the order of the messages from one to the other beforehand, since both know both schedules. What goes to higher
ranks has a group of its own, and what goes to lower ones: a message never waits for one that goes the other way, whatever the backend.
Some backends join two ranks only when both speak to each other for the first time, and wait for it; so all pairs are joined when the
groups are made, in one order that every rank keeps to. A backend that takes no tensors of the device is given copies on the host.

NCCL's messages are kernels that wait on the device, and CUDA loads a kernel that runs for the first time only when none is running.
So there a receive is asked for when it is needed and not before, and a `Rehearsal` loads all kernels before the first message.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.core.errors import RuntimeFault
from weft.runtime.comm import reach

Spec = tuple[tuple[int, ...], torch.dtype]  # of one tensor of a message
Order = Mapping[int, Sequence[tuple[Hashable, Sequence[Spec]]]]  # what comes from each rank, in the order it is sent
AHEAD = 1  # messages on the host asked for before they are needed


_joined: dict[Any, tuple[Any, Any]] = {}  # by the world's group and the lines; once made they stay, for every step over the same lines


def joined(lines: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Any, Any]:
    """This rank's groups to higher ranks of its line and to lower ones, all of whose pairs have spoken."""
    key = dist.group.WORLD, tuple(lines), device.type
    if key not in _joined:
        groups = [dist.new_subgroups_by_enumeration([list(line) for line in lines])[0] for _ in range(2)]
        line = next(line for line in lines if dist.get_rank() in line)
        for group, upwards in zip(groups, (True, False), strict=True):
            _join(group, upwards, line, reach(group, device))
        _joined[key] = groups[0], groups[1]
    return _joined[key]


def _join(group: Any, upwards: bool, line: Sequence[int], place: torch.device) -> None:
    """Say a word to every other rank of the line. Pairs in ascending order: the least one not yet joined waits for nobody."""
    rank, word = dist.get_rank(), torch.zeros(1, device=place)
    for low, high in itertools.combinations(sorted(line), 2):
        if rank in (low, high):
            pass_on = dist.send if rank == (low if upwards else high) else dist.recv
            pass_on(word, high if rank == low else low, group=group)


class Messages:
    """The messages of one rank. A message is a key and tensors; both ends know the tensors' shapes."""

    def __init__(self, lines: Sequence[Sequence[int]], device: torch.device) -> None:
        """`lines` are the ranks of every pipeline there is; all ranks must make theirs together."""
        self.rank, self.device = dist.get_rank(), device
        self._up, self._down = joined([tuple(line) for line in lines], device)
        self._place = reach(self._up, device)
        self.on_device = self._place.type == "cuda"
        self._ahead = 0 if self.on_device else AHEAD
        self._side = torch.cuda.Stream(device) if self.on_device else None  # receives do not wait there for what is being computed
        self._expected: dict[int, list[tuple[Hashable, Sequence[Spec]]]] = {}
        self._asked: dict[Hashable, list[tuple[Any, torch.Tensor]]] = {}
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def expect(self, order: Order) -> None:
        """What will come."""
        self._expected = {source: list(messages) for source, messages in order.items()}
        for source in self._expected:
            self._ask(source, self._ahead)

    def send(self, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending; the tensors are kept until they are gone."""
        group = self._up if to > self.rank else self._down
        self._sent = [(w, x) for w, x in self._sent if not w.is_completed()]
        self._sent += [(dist.isend(x, to, group=group), x) for x in (t.contiguous().to(self._place) for t in tensors)]

    def receive(self, source: int, key: Hashable) -> list[torch.Tensor]:
        """The tensors of a message, once they are here."""
        while key not in self._asked:
            if not self._expected[source]:
                raise RuntimeFault(
                    f"no message {key} will come from rank {source}", needed="a message both ranks know of", found="none left"
                )
            self._ask(source, 1)
        tensors = []
        for work, x in self._asked.pop(key):
            work.wait()
            if self._side is not None:
                x.record_stream(torch.cuda.current_stream(self.device))
            tensors.append(x.to(self.device))
        self._ask(source, self._ahead)
        return tensors

    def _ask(self, source: int, count: int) -> None:
        waiting, self._expected[source] = self._expected[source][:count], self._expected[source][count:]
        for key, specs in waiting:
            group = self._up if source < self.rank else self._down
            with torch.cuda.stream(self._side) if self._side is not None else contextlib.nullcontext():
                buffers = [torch.empty(shape, dtype=dtype, device=self._place) for shape, dtype in specs]
                self._asked[key] = [(dist.irecv(x, source, group=group), x) for x in buffers]

    def finish(self) -> None:
        """Wait until all that was sent is gone."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []


class Rehearsal:
    """In the place of messages: nothing is sent, and zeros come."""

    on_device = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._coming: dict[Hashable, Sequence[Spec]] = {}

    def expect(self, order: Order) -> None:
        self._coming = {key: specs for messages in order.values() for key, specs in messages}

    def send(self, to: int, tensors: Sequence[torch.Tensor]) -> None:
        for x in tensors:
            x.contiguous()

    def receive(self, source: int, key: Hashable) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in self._coming[key]]

    def finish(self) -> None:
        """Nothing is under way."""
