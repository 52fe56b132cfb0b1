"""Record work once and replay it: on a GPU as a CUDA graph, whose kernels follow each other without the host; elsewhere by calling it."""

from __future__ import annotations

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


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until all work given to the device so far is done."""
    if not is_accelerator(device):
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory from which copies to the device need not wait."""
    return torch.empty(size, dtype=dtype, pin_memory=is_accelerator(device))
