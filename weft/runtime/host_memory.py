"""Copies between a GPU and the host's memory, on a stream of their own each way, beside what computes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def _stream(device: torch.device, way: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_host(x: Tensor) -> Tensor:
    """A copy in pinned memory, made beside what follows."""
    away = _stream(x.device, "away")
    away.wait_stream(torch.cuda.current_stream(x.device))
    out = torch.empty_like(x, device="cpu", pin_memory=True)
    with torch.cuda.stream(away):
        out.copy_(x, non_blocking=True)
    x.record_stream(away)
    return out


def from_host(x: Tensor) -> Tensor:
    """A copy on the device, begun now; `landed` waits for it."""
    device = torch.device("cuda", torch.cuda.current_device())
    out = torch.empty_like(x, device=device)
    back = _stream(device, "back")
    back.wait_stream(_stream(device, "away"))
    back.wait_stream(torch.cuda.current_stream(device))  # whose memory may be what `out` is given
    with torch.cuda.stream(back):
        out.copy_(x, non_blocking=True)
    out.record_stream(back)
    return out


def landed(x: Tensor) -> Tensor:
    torch.cuda.current_stream(x.device).wait_stream(_stream(x.device, "back"))
    return x
