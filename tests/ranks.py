"""Real processes over gloo for tests: forked, joined by a file store, with a deadline, none left behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    world: int, job: Callable[[int], None], folder: Path, *, seconds: float = 100, may_die: tuple[int, ...] = ()
) -> dict[int, str]:
    """Runs `job(rank)` on every rank. Returns what each rank left by `say`; raises the first failure but those of `may_die`."""

    def child(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
            said = job(rank)
            (folder / f"said{rank}").write_text(str(said))
            os._exit(0)
        except BaseException:
            (folder / f"error{rank}").write_text(traceback.format_exc())
            os._exit(1)

    importlib.import_module("torch._dynamo")  # torch loads it with the first optimizer: once here, not on every rank
    context = mp.get_context("fork")
    ranks = [context.Process(target=child, args=(r,), daemon=True) for r in range(world)]
    for process in ranks:
        process.start()
    end = time.monotonic() + seconds
    while any(p.is_alive() for p in ranks) and time.monotonic() < end:
        if any(p.exitcode for r, p in enumerate(ranks) if r not in may_die):
            time.sleep(0.3)
            break
        time.sleep(0.01)
    hanging = [r for r, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    errors = {r: (folder / f"error{r}").read_text() for r in range(world) if (folder / f"error{r}").exists()}
    wrong = {r: text for r, text in errors.items() if r not in may_die}
    assert not wrong, "\n".join(f"rank {r}: {text}" for r, text in wrong.items())
    assert not hanging, f"ranks {hanging} hang"
    dead = {r: process.exitcode for r, process in enumerate(ranks) if process.exitcode and r not in may_die}
    assert not dead, f"ranks ended with {dead}"
    return {r: (folder / f"said{r}").read_text() for r in range(world) if (folder / f"said{r}").exists()} | errors


ROOT = Path(__file__).parents[1]


def interpreted(script: str, *args: str, seconds: float = 200, **env: str) -> str:
    """What a script prints in a process of its own, where Triton's kernels are interpreted; it must end well."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, "-c", script, *args], env=env, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_interpreted_ranks(world: int, job: Callable[[int], None], folder: Path, *, seconds: float) -> None:
    """`run_ranks` with interpreted kernels; the job is a function of a test module."""
    script = (
        f"import sys; from pathlib import Path; from {job.__module__} import {job.__name__} as job; from tests.ranks import run_ranks; "
    )
    interpreted(
        f"{script}run_ranks({world}, job, Path(sys.argv[1]), seconds={seconds})", str(folder), seconds=seconds + 30, WEFT_TARGET="triton"
    )
