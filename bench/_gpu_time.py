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
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    found = [event for event in seen.key_averages() if event.self_device_time_total]
    return sorted(((e.key[:100], e.count, round(float(e.self_device_time_total), 1)) for e in found), key=lambda k: -k[2])
