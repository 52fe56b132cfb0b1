"""Real processes over gloo for tests: forked, joined by a file store, none left behind."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, job: Callable[[int], None], folder: Path, seconds: float = 60) -> None:
    """Runs a job in forked processes joined over gloo, for so long; the first failure is raised here."""

    def child(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
            job(rank)
            dist.barrier()
            dist.destroy_process_group()
            os._exit(0)
        except BaseException:
            (folder / f"error{rank}").write_text(traceback.format_exc())
            os._exit(1)

    ctx = mp.get_context("fork")
    ranks = [ctx.Process(target=child, args=(r,), daemon=True) for r in range(world)]
    for r in ranks:
        r.start()
    end = time.monotonic() + seconds
    while any(r.is_alive() for r in ranks) and not any(r.exitcode for r in ranks) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2 if any(r.exitcode for r in ranks) else 0)
    alive = [r for r in ranks if r.is_alive()]
    for r in alive:
        r.kill()
    errors = [f.read_text() for f in sorted(folder.glob("error*"))]
    assert not errors, "\n".join(errors)
    assert not alive, "a rank hangs"
