"""Time collectives between processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.cluster.passes import ALONE, COLD
from weft.core.errors import RuntimeFault

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(2**p for p in (12, 16, 18, 20, 22, 24))


def cores() -> int:
    """What this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# torch 2.13 renames them and warns of the old names
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Sent:
    """A collective of `size` bytes (the full tensor; one rank's part for all_to_all) over `ranks` processes."""

    kind: str
    size: int
    ranks: int
    seconds: float


def run_ranks(ranks: int, device: str, work: Callable[[int], Any], timeout: float = 240.0) -> list[Any]:
    """Run `work(rank)` in that many joined processes and return what each gave back."""
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_worker, args=(r, ranks, device, store, work, pipes[r][1]), daemon=True) for r in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            return [_receive(pipe, process, timeout) for (pipe, _), process in zip(pipes, processes, strict=True)]
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _receive(pipe: Any, process: Any, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise RuntimeFault("a rank gave no answer", needed=f"an answer within {timeout:g} s", found=f"exit code {process.exitcode}")
    answer, error = pipe.recv()
    if error:
        raise RuntimeFault("a rank failed while it was timed", needed="exit status 0 of every rank", found=error)
    return answer


def _worker(rank: int, ranks: int, device: str, store: str, work: Callable[[int], Any], pipe: Any) -> None:
    try:
        torch.set_num_threads(1)
        if device != "cpu":
            torch.cuda.set_device(rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo" if device == "cpu" else "nccl", init_method=store, rank=rank, world_size=ranks)
        pipe.send((work(rank), ""))
        dist.destroy_process_group()
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))


Calls = Callable[[str, torch.Tensor, torch.Tensor], Mapping[str, Callable[[], Any]]]  # each kind, of a full tensor and of a rank's part


def collectives(device: str, ranks: int, calls: Calls | None = None) -> list[Sent]:
    """Every kind and size between `ranks` processes."""
    return run_ranks(ranks, device, Timing(device, ranks, calls=calls or torch_calls))[0]


def torch_calls(device: str, full: torch.Tensor, part: torch.Tensor) -> Mapping[str, Callable[[], Any]]:
    """As torch makes them."""
    return {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: _GATHER(full, part),
        "reduce_scatter": lambda: _scatter(device, part, full),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(full), full),
    }


def _scatter(device: str, part: torch.Tensor, full: torch.Tensor) -> None:
    """gloo's own moves as much as its all_reduce, so there it is an all_to_all and a sum, as weft runs it."""
    if device != "cpu":
        _SCATTER(part, full)
        return
    pieces = torch.empty_like(full)
    dist.all_to_all_single(pieces, full)
    torch.sum(pieces.view(dist.get_world_size(), -1), 0, out=part)


@dataclass(frozen=True)
class Timing:
    """The work of one rank; a class, so that it can be sent to a spawned process."""

    device: str
    ranks: int
    sizes: Sequence[int] = SIZES
    calls: Calls = torch_calls

    def __call__(self, rank: int) -> list[Sent]:
        sizes = self.sizes if self.device == "cpu" else (*self.sizes, 2**27, 2**30)
        return [Sent(kind, size, self.ranks, self.one(kind, size)) for kind in KINDS for size in sizes]

    def one(self, kind: str, size: int) -> float:
        """On a processor each call has operands of its own, which lie in no cache: within a step much ran since they were made."""
        count = size // 4 // self.ranks * self.ranks
        times = 16 if size <= 2**22 else 8
        copies = min(times, COLD // size) if self.device == "cpu" else 1
        full = torch.ones(copies, count, device=self.device)
        part = torch.ones(copies, count // self.ranks, device=self.device)
        return self.usual([self.calls(self.device, w, p)[kind] for w, p in zip(full, part, strict=True)], times)

    def usual(self, calls: Sequence[Callable[[], Any]], times: int) -> float:
        """The lower quartile: others on the machine only add. On a processor no more than the ranks of a core work in turn, and a little."""
        taken, worked, kept = [], [], deque[Any](maxlen=len(calls))
        first = len(calls) + 2  # after so many the memory of results is there
        for n in range(first + times):
            dist.barrier()
            began, before = time.perf_counter(), time.thread_time()
            kept.append(calls[n % len(calls)]())
            if self.device != "cpu":
                torch.cuda.synchronize()
            if n >= first:
                taken.append(time.perf_counter() - began)
                worked.append(time.thread_time() - before)
        usual, own = (sorted(times)[len(times) // 4] for times in (taken, worked))
        return usual if self.device != "cpu" else min(usual, ALONE * own * max(1.0, self.ranks / cores()))
