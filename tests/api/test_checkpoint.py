"""Checkpoints move between plans and survive a rank that dies; what is half written or of another model is not loaded."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.core.errors import CheckpointError

PLANS = ["dp2", "dp2,zero1", "dp2,zero3", "tp2", "cp2,zero3"]
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


@pytest.fixture(scope="module")
def plain() -> Any:
    """A step whose state nobody changes."""
    return make("dp1")[0]


def two_saves(folder: Path) -> tuple[Any, dict[int, dict[str, torch.Tensor]]]:
    """A step that saved after its first and its second step, and what it held then."""
    step, w = make("dp1")
    store, held = step.checkpoints(str(folder)), {}
    for _ in range(2):
        step(w.example(8))
        store.save()
        held[step.steps] = {n: x.clone() for n, x in step.state.items()}
    return step, held


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in b)


def test_a_checkpoint_is_bytes_and_json(tmp_path: Path) -> None:
    """Nothing in it is a pickle; the tensors are as the safetensors library reads them."""
    safetensors = pytest.importorskip("safetensors.torch")
    _, held = two_saves(tmp_path)
    newest = tmp_path / "step-00000002"
    assert sorted(f.name for f in newest.iterdir()) == ["index.json", "rank-00000.safetensors", "weft.json"]
    saved = safetensors.load_file(newest / "rank-00000.safetensors")
    want = {n: x for n, x in held[2].items() if not n.startswith("constant.")}
    assert sorted(saved) == sorted(want) and equal(saved, want)


def test_a_flipped_bit_is_never_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In every file of the newest checkpoint: the one before is taken, or what was changed means nothing and all is as it was."""
    step, held = two_saves(tmp_path)
    store, draw = step.checkpoints(str(tmp_path)), random.Random(7)
    taken = []
    for file in sorted((tmp_path / "step-00000002").iterdir()):
        whole = file.read_bytes()
        for _ in range(12):
            at = draw.randrange(len(whole))
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
            taken.append(store.restore())
            assert equal(step.state, held[taken[-1]]), (file.name, at)
            told = capfd.readouterr().err.splitlines()
            assert len(told) == (1 if taken[-1] == 1 else 0), told
        file.write_bytes(whole)
    assert taken.count(1) > 20


DAMAGES = {
    "no weft.json": lambda d: (d / "weft.json").unlink(),
    "weft.json cut": lambda d: (d / "weft.json").write_text((d / "weft.json").read_text()[:40]),
    "weft.json empty": lambda d: (d / "weft.json").write_text(""),
    "no index": lambda d: (d / "index.json").unlink(),
    "index cut": lambda d: (d / "index.json").write_bytes((d / "index.json").read_bytes()[:-9]),
    "no tensors": lambda d: (d / "rank-00000.safetensors").unlink(),
    "tensors cut": lambda d: (d / "rank-00000.safetensors").write_bytes((d / "rank-00000.safetensors").read_bytes()[:-3]),
    "a folder for a file": lambda d: ((d / "index.json").unlink(), (d / "index.json").mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_one_line(damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step, held = two_saves(tmp_path)
    store = step.checkpoints(str(tmp_path), keep=1)
    DAMAGES[damage](tmp_path / "step-00000002")
    assert store.restore() == 1
    assert equal(step.state, held[1])
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("weft: step-00000001 is restored, the last good checkpoint in ") and "step-00000002: " in told
    assert store.save() == tmp_path / "step-00000001" and store.restore() == 1  # still the last good one, whatever `keep` counts
    DAMAGES[damage](tmp_path / "step-00000001")
    before = {n: x.clone() for n, x in step.state.items()}
    with pytest.raises(CheckpointError, match="has no complete checkpoint") as e:
        store.restore()
    assert "step-00000001: " in str(e.value) and "step-00000002: " in str(e.value)
    assert equal(step.state, before)  # nothing was loaded in part


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("steps", -5, "has steps = -5"), ("steps", 1e300, "has steps = 1e+300"), ("steps", "2", "has steps = '2'"), ("steps", None, "has steps = None"),
        ("steps", True, "has steps = True"), ("skipped", [], "has skipped = []"), ("model", 3, "has model = 3"), ("order", -1, "has order = -1"),
        ("missed", {"param.a": -1}, "has missed = {'param.a': -1}"), ("missed", 3, "has missed = 3"),
        ("version", 9, "of version 9, not 2"), ("plan", "tp2", "was changed"), ("steps", 3, "was changed"), ("index", "0" * 64, "was changed"),
    ],
)  # fmt: skip
def test_odd_values_in_weft_json_are_refused(name: str, value: Any, words: str, tmp_path: Path, plain: Any) -> None:
    path = plain.checkpoints(str(tmp_path)).save()
    meta = json.loads((path / "weft.json").read_text())
    (path / "weft.json").write_text(json.dumps(meta | {name: value}))
    with pytest.raises(CheckpointError, match="no complete checkpoint") as e:
        plain.checkpoints(str(tmp_path)).restore()
    assert words in str(e.value)


@pytest.mark.parametrize("text", ["[]", "3", "[" * 100000, '{"a": ' + "9" * 6000 + "}", '{"steps": NaN}', '{"a": 1, "a": 1}', "", "{"])
def test_what_is_no_weft_json_is_refused(text: str, tmp_path: Path, plain: Any) -> None:
    path = plain.checkpoints(str(tmp_path)).save()
    (path / "weft.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        plain.checkpoints(str(tmp_path)).restore()


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, plain: Any) -> None:
    """Even one whose sums are right."""
    from weft.api.checkpoint import read_meta, sealed
    from weft.api.storage import digest

    path = plain.checkpoints(str(tmp_path / "saves")).save()
    (path / "rank-00000.safetensors").rename(tmp_path / "elsewhere")
    index = (path / "index.json").read_text().replace("rank-00000.safetensors", "../../elsewhere")
    (path / "index.json").write_text(index)
    (path / "weft.json").write_text(sealed(read_meta(path) | {"index": digest(index)}))
    with pytest.raises(CheckpointError, match="no complete checkpoint") as e:
        plain.checkpoints(str(tmp_path / "saves")).restore()
    assert "parts that do not make up a tensor" in str(e.value)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("meta", [{"version": 1, "model": "x", "plan": "dp1", "steps": 3}, None])
def test_a_checkpoint_of_weft_01_is_refused_and_runs_nothing(meta: Any, tmp_path: Path, plain: Any) -> None:
    old = tmp_path / "saves" / "step-00000000"
    old.mkdir(parents=True)
    (old / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "touched")))
    if meta is not None:
        (old / "weft.json").write_text(json.dumps(meta))
    store = plain.checkpoints(str(tmp_path / "saves"))
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: weft 0.1 wrote it") as e:
        store.restore()
    assert "whose index is a pickle and could run anything" in str(e.value) and "step.sync_model()" in str(e.value)
    with pytest.raises(CheckpointError, match=r"step-00000000 is no complete checkpoint: weft 0.1 wrote it"):
        store.load(old)
    assert not (tmp_path / "touched").exists()
    assert store.save() == tmp_path / "saves" / "step-00000000.2" and old.exists()
    assert store.restore() == 0


@pytest.mark.parametrize("keep", [-1, 0, True, 1.5, "2", None])
def test_keep_is_a_number_of_checkpoints(keep: Any, tmp_path: Path, plain: Any) -> None:
    with pytest.raises(CheckpointError, match="is no number of checkpoints") as e:
        plain.checkpoints(str(tmp_path), keep=keep)
    assert f"keep={keep!r}" in str(e.value)


def test_a_run_begun_again_deletes_neither_its_own_nor_the_other_runs_saves(tmp_path: Path) -> None:
    first, w = make("dp1")
    for i in range(4):
        first(w.example(8, seed=i))
        first.checkpoints(str(tmp_path)).save()
    assert [d.name for d in first.checkpoints(str(tmp_path)).complete()] == ["step-00000003", "step-00000004"]
    second, _ = make("dp1")
    store, saved = second.checkpoints(str(tmp_path)), []
    for i in range(4):
        second(w.example(8, seed=i))
        saved.append(store.save())
        assert saved[-1].exists()
        assert store.restore() == second.steps == i + 1
    others = ["step-00000003", "step-00000004"]
    assert [d.name for d in store.complete()] == [*others, "step-00000003.2", "step-00000004.2"]
    third, _ = make("dp1")
    assert third.checkpoints(str(tmp_path)).restore() == 4  # and goes on with the second run
    third(w.example(8))
    third.checkpoints(str(tmp_path)).save()
    assert [d.name for d in store.complete()] == [*others, "step-00000004.2", "step-00000005"]


def test_a_kill_between_two_names_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, held = two_saves(tmp_path)
    store, real = step.checkpoints(str(tmp_path), keep=1), os.replace

    class Killed(BaseException):
        pass

    def killed(a: Path, b: Path) -> None:
        if str(a).endswith(".partial"):
            raise Killed
        real(a, b)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(Killed):
        store.save()
    monkeypatch.setattr(os, "replace", real)
    assert not (tmp_path / "step-00000002").exists()
    assert step.checkpoints(str(tmp_path)).restore() == 2
    assert equal(step.state, held[2])


def test_damage_that_one_rank_finds_is_damage_to_all(tmp_path: Path) -> None:
    """And what was saved as shares on two ranks is taken from the checkpoint before, under another plan too."""

    one, w = make("dp1")
    want = [one(w.example(8, seed=s)).item() for s in range(2)][-1]

    def job(rank: int) -> None:
        step, w = make("dp2,zero1")
        store = step.checkpoints(str(tmp_path / "saves"))
        for s in range(2):
            step(w.example(8, seed=s))
            store.save(wait=s == 0)
        store.finish()
        dist.barrier()
        if rank == 0:
            file = tmp_path / "saves/step-00000002/rank-00001.safetensors"
            raw = bytearray(file.read_bytes())
            raw[-5] ^= 4
            file.write_bytes(raw)
        dist.barrier()
        other, _ = make("tp2")
        assert other.checkpoints(str(tmp_path / "saves")).restore() == 1
        assert step.checkpoints(str(tmp_path / "saves")).restore() == 1
        assert other(w.example(8, seed=1)).item() == pytest.approx(want, rel=1e-7)

    on_ranks(2, job, tmp_path)


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


@pytest.mark.root
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


class Growing(torch.nn.Module):
    """A part that is trained from the third step on."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.late, self.grown = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), False
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.late(x) if self.grown else 0)


@pytest.mark.parametrize("saved", [2, 4])
def test_parameters_count_their_own_updates_after_a_restart_too(saved: int, tmp_path: Path) -> None:
    """Adam divides by what a parameter's own count says. What was not trained yet is in the checkpoint as well, whatever the new run began with."""

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05)

    many = [torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(7)]

    def torchs() -> tuple[list[torch.Tensor], torch.nn.Module, torch.optim.Optimizer]:
        model, losses = Growing(0), []
        optimizer = adam(model)
        for i, x in enumerate(many):
            model.grown = i >= 2
            optimizer.zero_grad()
            losses.append(loss(model, x))
            losses[-1].backward()
            optimizer.step()
        return losses, model, optimizer

    def job(rank: int) -> None:
        want, theirs, their_optimizer = torchs()
        for seed, plan, steps in ((0, "dp2,zero1", range(saved)), (9, "dp2", range(saved, 7))):
            model = Growing(seed)
            model.grown = seed == 9 and saved == 2
            step = parallelize(model, loss, adam(model), many[0], plan, check=False)
            store = step.checkpoints(str(tmp_path / "saves"))
            assert store.restore() == (None if seed == 0 else saved)
            for i in steps:
                model.grown = i >= 2
                torch.testing.assert_close(step(many[i]), want[i].detach(), rtol=1e-10, atol=1e-12)
            store.save()
        for got, p in zip(step.sync_model().parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(got, p, rtol=1e-10, atol=1e-12)
        ours = step.sync_optimizer()
        for got, p in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.state[got], their_optimizer.state[p], rtol=1e-10, atol=1e-12)

    on_ranks(2, job, tmp_path)


SCRIPT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
dist.init_process_group("gloo")
from tests.api.test_checkpoint import train_on
train_on({folder!r}, lambda step, loss: print("step", step, flush=True))
dist.destroy_process_group()
"""


def train_on(folder: str, tell: Callable[[int, float], object]) -> None:
    """From where the last run was to step 12, which rank 0 tells of."""
    step, w = make("dp2,zero1")
    store = step.checkpoints(folder)
    store.restore()
    while step.steps < 12:
        loss = step(w.example(8, seed=step.steps)).item()
        if step.steps % 2 == 0:
            store.save()
        if dist.get_rank() == 0:
            tell(step.steps, loss)
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_a_run_that_lost_a_rank_goes_on_where_it_was_and_ends_with_the_same_loss(tmp_path: Path) -> None:
    whole, w = make("dp1")
    want = [whole(w.example(8, seed=s)).item() for s in range(12)][-1]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(ROOT), folder=str(tmp_path / "saved")))
    lost, told = launch(script, kill_after=5), tmp_path / "told"

    def tell(step: int, loss: float) -> None:
        with told.open("a") as file:
            file.write(f"{step} {loss!r}\n")

    on_ranks(2, lambda rank: train_on(str(tmp_path / "saved"), tell), tmp_path)
    resumed = [line.split() for line in told.read_text().splitlines()]
    assert lost[0] == 1 and 1 < int(resumed[0][0]) <= 6  # at most two steps are done again
    assert int(resumed[-1][0]) == 12
    assert float(resumed[-1][1]) == pytest.approx(want, rel=1e-7)


def launch(script: Path, kill_after: int) -> list[int]:
    """The steps that a launch of torchrun reports; one rank is killed after some of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, start_new_session=True)
    seen: list[int] = []
    assert run.stdout is not None
    try:
        for line in run.stdout:
            if line.startswith("step"):
                seen.append(int(line.split()[1]))
                if len(seen) == kill_after:
                    os.kill(random.Random(5).choice(workers(run.pid)), signal.SIGKILL)
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
