"""What a measured time depends on besides the program: the processor, and how much of it there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.core import cache


def describe(device: torch.device) -> str:
    """A short name for the hardware of one rank; equal names, comparable times."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else [os.uname().machine]
    kind = "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
    return f"cpu {cache.digest(kind)[:8]}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"
