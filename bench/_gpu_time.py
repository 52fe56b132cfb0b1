"""Clocks for one process on a GPU: of calls one by one, of calls in a row as in training, on the device alone, and kernel by kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]


def milliseconds(work: Call) -> float:
    """Host and device together, from an idle device until it is idle again."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def in_turn(ways: Mapping[str, Call], rounds: int, calls: int = 3) -> dict[str, float]:
    """Median milliseconds of each; a round takes all in turn, so that all see the same machine."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            took[name] += [milliseconds(way) for _ in range(calls)]
    return {name: round(statistics.median(ms), 4) for name, ms in took.items()}


def in_a_row(work: Callable[[int], Any], count: int, parts: int = 3) -> float:
    """Milliseconds per call when calls follow each other as steps of training do, the host ahead of the device; median of parts."""
    out = []
    for part in range(parts):
        mine = range(part * count // parts, (part + 1) * count // parts)
        out.append(milliseconds(lambda mine=mine: [work(i) for i in mine]) / max(len(mine), 1))  # type: ignore[misc]
    return statistics.median(out)


def on_device(work: Call, count: int = 20) -> float:
    """Best milliseconds between two events."""
    best = float("inf")
    for _ in range(count):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


def in_graph(work: Call) -> Call:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def kernels_of(work: Call) -> list[tuple[str, int, float]]:
    """(name, runs, microseconds) of all kernels and copies of one call, longest first."""
    return timeline(work)["most"]  # type: ignore[no-any-return]


def timeline(work: Call) -> dict[str, Any]:
    """One call on the device, in microseconds: from a first mark to its first kernel, from there to its last one's end, how much of that any was at
    work; how many were launched; and (name, runs, microseconds) of each, longest first."""
    from torch.profiler import ProfilerActivity, profile

    work()
    mark = torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        mark.fill_(1)
        work()
        torch.cuda.synchronize()
    events = sorted((e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    first, events = events[0].time_range.end, events[1:]
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    busy, end = 0.0, spans[0][0]
    for a, b in spans:
        busy, end = busy + max(0.0, b - max(a, end)), max(end, b)
    found: dict[str, list[float]] = {}
    for e in events:
        one = found.setdefault(e.name[:100], [0, 0.0])
        one[0], one[1] = one[0] + 1, one[1] + e.time_range.elapsed_us()
    most = sorted(((name, int(n), round(us, 1)) for name, (n, us) in found.items()), key=lambda k: -k[2])
    told = {"lead_us": spans[0][0] - first, "span_us": end - spans[0][0], "busy_us": busy}
    return {**{k: round(v, 1) for k, v in told.items()}, "launches": len(events), "most": most}
