"""Checkpoints move between plans and survive a rank that dies; what is half written or of another model is not loaded."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.core.errors import CheckpointError
from weft.frontend import zoo

PLANS = ["dp2", "dp2,zero1", "dp2,zero3", "tp2", "cp2"]
ROOT = Path(__file__).parent.parent.parent


def make(plan: str, name: str = "gpt2", **settings: Any) -> tuple[Any, Any]:
    w = zoo.small(name, dtype=torch.float64, dropout=0.0, **settings)
    return parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan=plan), w


def test_every_plan_to_every_other(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        for i, plan in enumerate(PLANS):
            step, w = make(plan)
            for s in range(2):
                step(w.example(8, seed=s))
            store = step.checkpoints(str(tmp_path / f"plan{i}"))
            store.save(wait=i % 2 == 0)
            after = [step(w.example(8, seed=s)).item() for s in range(2, 5)]
            store.finish()
            if rank == 0:
                (tmp_path / f"plan{i}.json").write_text(json.dumps(after))

    def read(rank: int) -> None:
        for plan in PLANS:
            step, w = make(plan)
            for i in range(len(PLANS)):
                assert step.checkpoints(str(tmp_path / f"plan{i}")).restore() == 2
                got = [step(w.example(8, seed=s)).item() for s in range(2, 5)]
                torch.testing.assert_close(got, json.loads((tmp_path / f"plan{i}.json").read_text()), rtol=1e-7, atol=1e-7)

    for name, job in (("write", write), ("read", read)):
        folder = tmp_path / name
        folder.mkdir()
        on_ranks(2, job, folder)
    one, w = make("dp1")
    assert one.checkpoints(str(tmp_path / "plan2")).restore() == 2
    assert one(w.example(8, seed=2)).item() == pytest.approx(json.loads((tmp_path / "plan2.json").read_text())[0], rel=1e-7)


def test_a_half_written_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    step, w = make("dp1")
    step(w.example(8))
    store = step.checkpoints(str(tmp_path))
    store.save()
    (tmp_path / "step-00000009.partial").mkdir()
    (tmp_path / "step-00000008").mkdir()
    assert store.restore() == 1
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        store.load(tmp_path / "step-00000008")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    step, _ = make("dp1")
    step.checkpoints(str(tmp_path)).save()
    other, _ = make("dp1", hidden=64)
    with pytest.raises(CheckpointError, match="is of another model") as e:
        other.checkpoints(str(tmp_path)).restore()
    assert "saved under dp1" in str(e.value)


def test_old_checkpoints_go(tmp_path: Path) -> None:
    step, w = make("dp1")
    store = step.checkpoints(str(tmp_path), keep=2)
    for i in range(4):
        step(w.example(8, seed=i))
        store.save()
    assert [d.name for d in store.complete()] == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_told_and_the_last_checkpoint_stays(wait: bool, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        step, w = make("dp2,zero1")
        step(w.example(8))
        store = step.checkpoints(str(tmp_path / "saves"))
        store.save()
        step(w.example(8))
        real = os.fsync
        if rank == 1:
            os.fsync = no_room
        with pytest.raises(CheckpointError, match="step-00000002 could not be written") as e:
            saved(store, wait)
        os.fsync = real
        assert "No space left on device" in str(e.value) and "the last complete checkpoint is step-00000001" in str(e.value)
        assert sorted(d.name for d in (tmp_path / "saves").iterdir()) == ["step-00000001"]
        assert store.restore() == 1
        step(w.example(8))
        saved(store, wait)  # room again
        assert [d.name for d in store.complete()] == ["step-00000001", "step-00000002"]

    on_ranks(2, job, tmp_path)


def saved(store: Any, wait: bool) -> None:
    store.save(wait=wait)
    store.finish()


def no_room(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A real one: a file system of 256 KiB."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        step, _ = make("dp1", hidden=64)
        with pytest.raises(CheckpointError, match="could not be written") as e:
            step.checkpoints(str(small)).save()
        assert "(0.0 MB free)" in str(e.value) and not list(small.glob("step-*"))
    finally:
        subprocess.run(["umount", str(small)], capture_output=True, check=False)


def test_skipped_steps_are_remembered(tmp_path: Path) -> None:
    step, _ = make("dp1")
    step.steps, step.losses.skipped = 5, 2
    step.checkpoints(str(tmp_path)).save()
    other, _ = make("dp1")
    assert other.checkpoints(str(tmp_path)).restore() == 5
    assert other.skipped == 2


SCRIPT = """
import sys, time, torch, torch.distributed as dist
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
dist.init_process_group("gloo")
from tests.api.test_checkpoint import make
step, w = make("dp2,zero1")
store = step.checkpoints({folder!r})
store.restore()
while step.steps < 12:
    loss = step(w.example(8, seed=step.steps)).item()
    if step.steps % 2 == 0:
        store.save()
    if dist.get_rank() == 0:
        print("step", step.steps, repr(loss), flush=True)
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.timeout(240)
def test_a_run_that_lost_a_rank_goes_on_where_it_was_and_ends_with_the_same_loss(tmp_path: Path) -> None:
    whole, w = make("dp1")
    want = [whole(w.example(8, seed=s)).item() for s in range(12)][-1]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(ROOT), folder=str(tmp_path / "store")))
    lost = launch(script, kill_after=5)
    resumed = launch(script)
    assert lost[0] == 1 and 1 < resumed[0] <= 6  # at most two steps are done again
    assert resumed[-1] == 12
    assert float(Path(tmp_path / "last").read_text()) == pytest.approx(want, rel=1e-7)


def launch(script: Path, kill_after: int | None = None) -> list[int]:
    """The steps one launch reports; one rank is killed after some of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, start_new_session=True)
    seen: list[int] = []
    assert run.stdout is not None
    try:
        for line in run.stdout:
            if line.startswith("step"):
                seen.append(int(line.split()[1]))
                (script.parent / "last").write_text(line.split()[2])
            if kill_after is not None and len(seen) == kill_after:
                os.kill(random.Random(5).choice(workers(run.pid)), signal.SIGKILL)
                kill_after = None
        run.wait(90)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    return seen


def workers(parent: int) -> list[int]:
    """The ranks that a launcher has started."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        out = subprocess.run(["ps", "--ppid", str(parent), "-o", "pid="], capture_output=True, text=True, check=False).stdout.split()
        if len(out) >= 2:
            return [int(p) for p in out]
        time.sleep(0.05)
    raise AssertionError("no ranks")
