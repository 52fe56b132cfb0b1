"""What it takes to compare a step with torch, told before it is tried: seconds of work and bytes held."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.core.node import Node
from weft.core.program import Program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.ops.registry import flops, nbytes
from weft.runtime.agree import world

SECONDS = 15.0  # of work, in torch and in the program together
SHARE = 0.5  # of the memory that is free
RUNS = 3.0  # torch, the program and, where rounding must be learnt, the program again


def has_values(t: torch.Tensor) -> bool:
    return not (t.is_meta or isinstance(t, FakeTensor))


def parts(captured: Captured, samples: int, device: torch.device, full: int = 1) -> int:
    """The least power of two into as many parts as which the example must be split to be compared in time and memory; 0 where none will do.

    A part keeps a multiple of `full` samples.
    """
    if not all(map(has_values, captured.parameters.values())):
        return 0
    count = 1
    while not fits(captured.program, device, count):
        count *= 2
        if samples % (count * full):
            return 0
    return count


def fits(program: Program, device: torch.device, count: int = 1) -> bool:
    return seconds(program, device) / count <= SECONDS and memory(program, count) <= SHARE * free(device)


def exceeds_share(program: Program, captured: Captured) -> bool:
    """Whether it holds more than a rank's share of a model without values, which no rank may hold in full."""
    if all(map(has_values, captured.parameters.values())):
        return False
    return memory(program, 1) > sum(nbytes(n.type) for n in captured.program.inputs if n.role is not Role.BATCH) / world()


def reason(captured: Captured, device: torch.device) -> str:
    if not all(map(has_values, captured.parameters.values())):
        return "its parameters are on the meta device"
    return f"the full step {cost(captured.program, device)}, and no smaller part of the example is few enough samples"


def cost(program: Program, device: torch.device) -> str:
    """In words."""
    return f"would take some {seconds(program, device):.0f} s and {memory(program, 1) / 2**30:.1f} GB"


def seconds(program: Program, device: torch.device) -> float:
    """Of both sides, by how fast a matmul runs here and how fast a tensor is written."""
    work = sum(flops(n) for n in program.nodes)
    written = sum(nbytes(t) for n in program.nodes for t in n.types)
    return 0.0 if work < 1e9 and written < 1e8 else RUNS * (work / _rate(device)[0] + written / _rate(device)[1])


def memory(program: Program, count: int) -> float:
    """Bytes: parameters and state in two copies with gradients, and the most that is alive at once on a part of the example."""
    stored = sum(nbytes(n.type) for n in program.inputs if n.role is not Role.BATCH)
    return 3.0 * stored + 1.5 * alive(program) / count


def alive(program: Program) -> int:
    """The most bytes of computed values that are alive at once, each dropped after its last reader."""
    last: dict[Node, Node] = {a: n for n in program.nodes for a in n.args}
    now = most = 0
    for n in program.nodes:
        now += sum(nbytes(t) for t in n.types) if n.args else 0
        most = max(most, now)
        now -= sum(nbytes(t) for a in set(n.args) if last[a] is n and a.args for t in a.types)
    return most


_rates: dict[str, tuple[float, float]] = {}


def _rate(device: torch.device) -> tuple[float, float]:
    """Flops a second of a matmul of middling size, and bytes a second of a new tensor."""
    if device.type not in _rates:
        x, y = torch.ones(512, 512, device=device), torch.ones(1 << 23, device=device)
        times = [_timed(lambda: x @ x), _timed(lambda: y + 1)]
        _rates[device.type] = 2 * 512**3 / times[0], 4 * y.numel() / times[1]
    return _rates[device.type]


def _timed(call: Callable[[], torch.Tensor]) -> float:
    float(call().view(-1)[0])
    start = time.perf_counter()
    float(call().view(-1)[0])
    return max(time.perf_counter() - start, 1e-5)


def free(device: torch.device) -> float:
    """Bytes of memory that nobody uses."""
    if device.type != "cpu":
        return float(getattr(torch, device.type).mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as f:
            fields = {line.split(":")[0]: line.split()[1] for line in f}
        return 1024.0 * int(fields["MemAvailable"])
    except (OSError, KeyError, IndexError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2 if hasattr(os, "sysconf") else math.inf
