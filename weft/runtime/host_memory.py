"""Copies between a GPU and the host's memory, on a stream of their own each way, overlapped with compute.

They are torch ops, so a compiled step has each as one node and a recording can hold them. A compiler may write over an operand as soon as the
op has returned, so what leaves is copied into one of a few places first, and what arrives is handed on as a copy: both cost what the device's
own memory takes, a hundredth of the link's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.runtime.custom_ops import define

PLACES = 4  # tensors that may be on their way to the host at once


@dataclass
class _Place:
    """Device memory that a copy to the host reads, and when it has been read; `epoch` is the recording in which that was."""

    memory: Tensor
    read: Any = None
    epoch: int = -1


@dataclass
class _Link:
    """The streams of a device, its places, and the host's memory that a compiled step keeps."""

    device: torch.device
    away: Any
    back: Any
    places: list[_Place] = field(default_factory=list)
    next_place: int = 0
    epoch: int = 0
    recordings: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)  # by the number of the copy in the text of its step
    fetched: dict[int, Any] = field(default_factory=dict)  # when what arrives at an address is there

    def begin(self) -> None:
        """Events of another recording, or of none, say nothing here: all before it is done when it is replayed."""
        if not torch.cuda.is_current_stream_capturing():
            self.epoch = 0
            return
        with torch.cuda.stream(self.away):
            joined = torch.cuda.is_current_stream_capturing()
        if not joined:
            self.recordings += 1
            self.epoch = self.recordings

    def place(self, nbytes: int) -> _Place:
        self.next_place = (self.next_place + 1) % PLACES
        if not self.places:
            self.places = [_Place(torch.empty(0, dtype=torch.uint8, device=self.device)) for _ in range(PLACES)]
        place = self.places[self.next_place]
        if place.read is not None and place.epoch == self.epoch:
            torch.cuda.current_stream(self.device).wait_event(place.read)
        if place.memory.nbytes < nbytes:
            place.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return place

    def host(self, x: Tensor, site: int) -> Tensor:
        if site < 0:
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        if site not in self.kept:
            self.kept[site] = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return self.kept[site]


@cache
def _link(device: torch.device) -> _Link:
    return _Link(device, torch.cuda.Stream(device), torch.cuda.Stream(device))


def _send(x: Tensor, site: int) -> Tensor:
    link, main = _link(x.device), torch.cuda.current_stream(x.device)
    link.begin()
    place, out = link.place(x.nbytes), link.host(x, site)
    staged = place.memory[: x.nbytes].view(x.dtype).view(x.shape)
    staged.copy_(x)
    link.away.wait_stream(main)
    with torch.cuda.stream(link.away):
        out.copy_(staged, non_blocking=True)
        place.read, place.epoch = torch.cuda.Event(), link.epoch
        place.read.record()
    return out


def _fetch(x: Tensor, device: torch.device) -> Tensor:
    link, main = _link(device), torch.cuda.current_stream(device)
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    link.back.wait_stream(link.away)
    link.back.wait_stream(main)  # whose memory may be what `out` is given
    with torch.cuda.stream(link.back):
        out.copy_(x, non_blocking=True)
        there = link.fetched[out.data_ptr()] = torch.cuda.Event()
        there.record()
    return out


def _land(x: Tensor) -> Tensor:
    torch.cuda.current_stream(x.device).wait_event(_link(x.device).fetched.pop(x.data_ptr()))
    return x.clone()


_ops_send = define("to_host(Tensor x, int site) -> Tensor", _send, lambda x, site: x.new_empty(x.shape, device="cpu"))
_ops_fetch = define("from_host(Tensor x, Device device) -> Tensor", _fetch, lambda x, device: x.new_empty(x.shape, device=device))
_ops_land = define("landed(Tensor x) -> Tensor", _land, lambda x: x.new_empty(x.shape))


def to_host(x: Tensor, *, site: int = -1) -> Tensor:
    """A copy in pinned memory, overlapped with what follows; by its `site`, in memory that is kept from call to call."""
    return _ops_send(x, site)  # type: ignore[no-any-return]


def from_host(x: Tensor) -> Tensor:
    """A copy on the device, begun now; `landed` waits for it."""
    return _ops_fetch(x, torch.device("cuda", torch.cuda.current_device()))  # type: ignore[no-any-return]


def landed(x: Tensor) -> Tensor:
    return _ops_land(x)  # type: ignore[no-any-return]
