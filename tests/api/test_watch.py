"""A hang ends within a bounded time, with the rank that is missing and the op that waits for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.api.watch import Place, verdict, watch
from weft.runtime import faults

WAITS = Place("GPT", "v3 = comm.all_reduce(v2, on.dp).wait()", 100.0)


SOURCE = "def step(x):\n    dist.all_reduce(x)  # of the gradients\n"


def train(rank: int, folder: Path) -> None:
    """Three steps of a small program; then rank 1 goes to sleep in the user's code, and rank 0 waits for it."""
    os.dup2(os.open(folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
    os.environ["WEFT_TIMEOUT"] = "4"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    names = {"dist": dist, "__source__": SOURCE}
    exec(compile(SOURCE, "<weft GPT>", "exec"), names)
    watch()
    for i in range(4):
        if i == 3 and rank == 1:
            time.sleep(600)
        names["step"](torch.ones(8))  # type: ignore[operator]


@pytest.mark.timeout(200)
def test_a_hang_is_ended_and_named(tmp_path: Path) -> None:
    ctx = mp.get_context("fork")
    ranks = [ctx.Process(target=train, args=(r, tmp_path), daemon=True) for r in range(2)]
    for r in ranks:
        r.start()
    for r in ranks:
        r.join(150)
    left = [r for r in ranks if r.is_alive()]
    for r in left:
        r.kill()
    said = "".join((tmp_path / f"stderr{r}").read_text() for r in range(2))
    assert not left, said
    assert [r.exitcode for r in ranks] == [faults.LOST_A_PEER] * 2, said
    assert said.count("weft: rank 1 did not reach `dist.all_reduce(x)  # of the gradients` of GPT") == 1, said
    assert "rank 1 is at test_watch.py, line" in said and "in train" in said and "WEFT_TIMEOUT" in said


def test_one_process_is_not_watched() -> None:
    assert watch() is None


def test_who_is_missing() -> None:
    outside, moving = Place("", "train.py, line 3, in main", 500.0), Place("GPT", "v9 = torch.add(v8, v7)", 0.1)
    elsewhere = Place("GPT", "v1 = comm.broadcast(v0, on.tp).wait()", 100.0)
    assert verdict({0: WAITS, 1: moving}, 2, 10.0) is None
    assert "rank 1 did not reach `v3 = comm.all_reduce" in str(verdict({0: WAITS, 1: outside}, 2, 10.0))
    assert "rank 1 does not answer" in str(verdict({0: WAITS, 2: WAITS}, 3, 10.0))
    assert "rank 2 did not reach" in str(verdict({0: WAITS, 1: WAITS, 2: elsewhere}, 3, 10.0))
    assert "the network" in str(verdict({0: WAITS, 1: WAITS}, 2, 10.0))
