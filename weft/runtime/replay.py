"""Record work once and replay it: on a GPU as a CUDA graph, whose kernels follow each other without the host; elsewhere by calling it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def is_accelerator(device: torch.device) -> bool:
    """Whether work on the device is launched, and so worth recording."""
    return device.type == "cuda"


def record(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that does `work` again, with the same addresses. All shapes and buffers must stay as they are."""
    if not is_accelerator(device):
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # once outside of the graph: kernels compile, libraries make their workspaces
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_recorded(work: Callable[[], object], device: torch.device, times: int = 8) -> float:
    """Milliseconds of one call among several that were recorded together: what the device takes, without the host."""
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
        side.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(times):
            work()
        graph.capture_end()
        best = min(_elapsed(graph.replay) for _ in range(4))
    torch.cuda.current_stream(device).wait_stream(side)
    return best / times


def _elapsed(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def is_recording(device: torch.device) -> bool:
    """Whether what is launched now is recorded, not run."""
    return is_accelerator(device) and torch.cuda.is_current_stream_capturing()


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until all work given to the device so far is done."""
    if not is_accelerator(device):
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def reached(device: torch.device) -> Callable[[], bool]:
    """A function that says, without waiting, whether all work given to the device so far is done."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory from which copies to the device need not wait."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=is_accelerator(device))  # wherever a step makes its tensors


def processors(device: torch.device) -> int:
    """How many programs of a kernel run at once, one on each processor of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if is_accelerator(device) else 1


class Clock:
    """Milliseconds that work took on the device; asking for them never waits."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = is_accelerator(device)
        self.ends: list[torch.cuda.Event] = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.on_device else []
        self.times: list[float] = []

    def time(self, work: Callable[[], None]) -> None:
        self._tick(0)
        work()
        self._tick(1)

    def read(self) -> float | None:
        """The time, or None while the work is not done."""
        if not self.on_device:
            return (self.times[-1] - self.times[-2]) * 1e3 if len(self.times) > 1 else None
        return self.ends[0].elapsed_time(self.ends[1]) if self.times and self.ends[1].query() else None

    def _tick(self, end: int) -> None:
        self.times = [*self.times[-1:], time.perf_counter()]
        if self.on_device:
            self.ends[end].record()
