"""Ranks for a benchmark: forked processes over gloo that end together, whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.core.errors import RuntimeFault


def run_ranks(work: Callable[..., Any], world: int, *args: Any, timeout: float = 900.0) -> Any:
    """`work(rank, world, *args)` in `world` processes with a gloo group; what rank 0 returns."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        ranks = [context.Process(target=_rank, args=(work, r, world, folder, answers, args), daemon=True) for r in range(world)]
        for process in ranks:
            process.start()
        try:
            return _wait(ranks, answers, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(work: Callable[..., Any], rank: int, world: int, folder: str, answers: Any, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = work(rank, world, *args)
        dist.barrier()
        answers.put((rank, "done", result if rank == 0 else None))
    except BaseException:
        answers.put((rank, "failed", traceback.format_exc()))


def _wait(ranks: list[Any], answers: Any, deadline: float) -> Any:
    result, left = None, len(ranks)
    while left:
        try:
            rank, how, what = answers.get(timeout=1.0)
        except Exception as error:
            dead = [k for k, process in enumerate(ranks) if process.exitcode not in (None, 0)]
            if dead or time.monotonic() > deadline:
                reason = f"rank {dead[0]} ended with {ranks[dead[0]].exitcode}" if dead else "the time ran out"
                raise RuntimeFault(f"the benchmark's ranks stopped: {reason}") from error
            continue
        if how == "failed":
            raise RuntimeFault(f"rank {rank} of the benchmark failed", found=what)
        left -= 1
        result = what if rank == 0 else result
    return result


def worst(value: float) -> float:
    """The largest over all ranks."""
    import torch
    import torch.distributed as dist

    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return number.item()


TIMED = 3  # calls of one kind timed in a row


def time_rounds(calls: dict[str, Callable[[], None]], before: dict[str, Callable[[], None]], peers: Any, rounds: int) -> dict[str, float]:
    """Milliseconds of each call on its slowest rank, the 25th percentile over all rounds.

    A round takes every call in turn, so all see the same machine: once to come to a steady state, then timed. Ranks start
    together: none sleeps at the line.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for turn in range(1 + TIMED):
                before[name]()
                start_line(peers)
                start = time.perf_counter()
                call()
                if turn:
                    took[name].append(time.perf_counter() - start)
    return {name: 1e3 * worst(quarter(seconds)) for name, seconds in took.items()}


def start_line(peers: Any) -> None:
    """A barrier that only spins, so that every rank is running when it ends."""
    spins, peers.state.spins = peers.state.spins, 1 << 30
    peers.barrier("start")
    peers.state.spins = spins


def quarter(seconds: list[float]) -> float:
    """The 25th percentile: what the machine does when others leave it alone."""
    return sorted(seconds)[len(seconds) // 4]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2), "torch": torch.__version__}
