"""A hang ends within a bounded time, with the rank that is missing and the op that waits for it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.api.compiled import Compiled
from weft.api.watch import Place, Watchdog, verdict, watch
from weft.core.errors import RuntimeFault
from weft.frontend.capture import capture
from weft.runtime import faults
from weft.runtime.messages import Messages

WAITS = Place("GPT", "v3 = comm.all_reduce(v2, on.dp).wait()", 100.0)


SOURCE = "def step(x):\n    dist.all_reduce(x)  # of the gradients\n"


def begin(rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
    os.environ["WEFT_TIMEOUT"] = "4"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def train(rank: int, folder: Path) -> None:
    """Three steps of a small program; then rank 1 goes to sleep in the user's code, and rank 0 waits for it."""
    begin(rank, folder)
    names = {"dist": dist, "__source__": SOURCE}
    exec(compile(SOURCE, "<weft GPT>", "exec"), names)
    watch()
    for i in range(4):
        if i == 3 and rank == 1:
            time.sleep(600)
        names["step"](torch.ones(8))  # type: ignore[operator]


def receive(rank: int, folder: Path) -> None:
    """Two messages come; the third is never sent, and its sender is in a native call of its own."""
    begin(rank, folder)
    messages = Messages([[0, 1]], torch.device("cpu"))
    watch()
    messages.expect({0: [(("forward", k), [((4,), torch.float32)]) for k in range(3)]} if rank else {})
    for k in range(3):
        if rank:
            messages.receive(0, ("forward", k))
        elif k < 2:
            messages.send(1, [torch.ones(4)])
        else:
            dist.recv(torch.empty(4), 1)  # which nobody sends


def end_of(job: Callable[[int, Path], None], folder: Path) -> str:
    """What ranks that hang say in the end; both end, the one that waited as those do that have lost another."""
    ctx = mp.get_context("fork")
    ranks = [ctx.Process(target=job, args=(r, folder), daemon=True) for r in range(2)]
    for r in ranks:
        r.start()
    for r in ranks:
        r.join(150)
    left = [r for r in ranks if r.is_alive()]
    for r in left:
        r.kill()
    said = "".join((folder / f"stderr{r}").read_text() for r in range(2))
    assert not left, said
    assert all(r.exitcode for r in ranks) and faults.LOST_A_PEER in [r.exitcode for r in ranks], said
    return said


@pytest.mark.timeout(200)
def test_a_hang_is_ended_and_named(tmp_path: Path) -> None:
    said = end_of(train, tmp_path)
    assert said.count("weft: rank 1 did not reach `dist.all_reduce(x)  # of the gradients` of GPT") == 1, said
    assert "rank 1 is at test_watch.py, line" in said and "in train" in said and "WEFT_TIMEOUT" in said


@pytest.mark.timeout(200)
def test_a_message_that_never_comes_is_named(tmp_path: Path) -> None:
    said = end_of(receive, tmp_path)
    assert said.count("weft: rank 0 did not reach `receive: source 0, key ('forward', 2)` of the pipeline") == 1, said
    assert "rank 0 is at test_watch.py, line" in said and "in receive" in said, said


def test_a_device_that_is_never_done_with_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    done = {1: False, 3: False}
    marks = iter(done)
    monkeypatch.setattr("weft.api.watch.reached", lambda device: functools.partial(done.__getitem__, next(marks)))
    dog = Watchdog(SimpleNamespace(check=lambda keys: False), 0, 2, 1000.0)
    device = torch.device("cuda", 0)
    dog.launched("step 1 of GPT", device)
    assert (dog.where().inside, dog.where().line) == ("the device", "step 1 of GPT")
    dog.launched("step 2 of GPT", device)  # the oldest is watched
    assert dog.where().line == "step 1 of GPT"
    done[1] = True
    assert dog.where().inside == ""
    dog._longest = 0.0
    dog.launched("step 3 of GPT", device)
    assert str(verdict({0: replace(dog.where(), idle=900.0), 1: Place("the device", "step 3 of GPT", 950.0)}, 2, 1000.0)).startswith(
        "no rank goes on from `step 3 of GPT` of the device"
    )
    dog.stop()


def test_a_program_called_again_goes_on_though_it_is_found_at_the_same_line() -> None:
    dog = Watchdog(SimpleNamespace(check=lambda keys: False), 0, 2, 1000.0)
    text = "def step(inputs):\n    return look()  # most of the time goes here\n"
    names = {"look": lambda: {"place": dog.where()}, "__source__": text}
    exec(compile(text, "<weft GPT>", "exec"), names)
    program = Compiled(capture(torch.nn.Linear(2, 2), torch.ones(1, 2)).program)
    program._step = names["step"]
    held = {n: torch.ones(x.shape) for n, x in program.program.input_names.items()}
    for again in (False, True):
        dog._since -= 500.0
        place = (program(held) if again else names["step"]({}))["place"]
        assert (place.inside, place.line) == ("GPT", "return look()  # most of the time goes here")
        assert place.idle < 1.0
    dog._since -= 500.0
    assert names["step"]({})["place"].idle > 499.0  # it was not called since
    dog.stop()


def test_a_connection_that_another_rank_leaves_is_told_as_such() -> None:
    with pytest.raises(RuntimeFault, match="another rank has ended in step 3 of GPT") as caught, faults.lost_connections("step 3 of GPT"):
        raise RuntimeError("[pair.cc:537] Read error [127.0.0.1]:13749: Connection reset by peer. Check the logs\nof the remote worker")
    for words in ("every rank to go on", "Connection reset by peer", "it was killed, ran out of memory, or raised"):
        assert words in str(caught.value)
    with pytest.raises(RuntimeError, match="shape"), faults.lost_connections("step 3 of GPT"):
        raise RuntimeError("shape '[2]' is invalid")


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
