"""What it takes to compare a step with torch, told before it is tried: seconds of work and bytes held."""

from __future__ import annotations

import math
import os
import time

import torch

from weft.core.node import Node
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.ops.registry import flops, nbytes

SECONDS = 15.0  # of work, in torch and in the program together
SHARE = 0.5  # of the memory that is free
RUNS = 3.0  # torch, the program and, where rounding must be learnt, the program again


def parts(captured: Captured, samples: int, device: torch.device, whole: int = 1) -> int:
    """The least power of two into whose parts the example must be cut to be compared in time and memory; 0 where none will do.

    A part keeps a multiple of `whole` samples.
    """
    if any(x.is_meta for x in captured.parameters.values()):
        return 0
    count = 1
    while not _fits(captured.program, device, count):
        count *= 2
        if samples % (count * whole):
            return 0
    return count


def _fits(program: Program, device: torch.device, count: int) -> bool:
    return seconds(program, device) / count <= SECONDS and memory(program, count) <= SHARE * free(device)


def reason(captured: Captured, device: torch.device) -> str:
    if any(x.is_meta for x in captured.parameters.values()):
        return "its parameters have no values yet"
    work, need = seconds(captured.program, device), memory(captured.program, 1)
    return f"the whole step would take some {work:.0f} s and {need / 2**30:.1f} GB, and no smaller part of the example is few enough samples"


def seconds(program: Program, device: torch.device) -> float:
    """Of both sides, by how fast a product runs here."""
    work = sum(flops(n) for n in program.nodes)
    return 0.0 if work < 1e9 else RUNS * work / _rate(device)


def memory(program: Program, count: int) -> float:
    """Bytes: parameters and state in two copies with gradients, and the most that is alive at once on a part of the example."""
    held = sum(nbytes(n.type) for n in program.inputs if not n.attr("name").startswith("batch."))
    return 3.0 * held + 1.5 * alive(program) / count


def alive(program: Program) -> int:
    """The most bytes of computed values that are held at once, each dropped after its last reader."""
    last: dict[Node, Node] = {a: n for n in program.nodes for a in n.args}
    now = most = 0
    for n in program.nodes:
        now += sum(nbytes(t) for t in n.types) if n.args else 0
        most = max(most, now)
        now -= sum(nbytes(t) for a in set(n.args) if last[a] is n and a.args for t in a.types)
    return most


_rates: dict[str, float] = {}


def _rate(device: torch.device) -> float:
    """Flops a second of a product of middling size."""
    if device.type not in _rates:
        x = torch.ones(512, 512, device=device)
        float((x @ x)[0, 0])
        start = time.perf_counter()
        float((x @ x)[0, 0])
        _rates[device.type] = 2 * 512**3 / max(time.perf_counter() - start, 1e-5)
    return _rates[device.type]


def free(device: torch.device) -> float:
    """Bytes of memory that nobody uses."""
    if device.type != "cpu":
        return float(getattr(torch, device.type).mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as f:
            told = {line.split(":")[0]: line.split()[1] for line in f}
        return 1024.0 * int(told["MemAvailable"])
    except (OSError, KeyError, IndexError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2 if hasattr(os, "sysconf") else math.inf
