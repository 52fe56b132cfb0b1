"""Ranks meet in shared memory, notice who is missing, and leave nothing behind."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from weft.core.errors import RuntimeFault
from weft.runtime import hosts
from weft.runtime.shm import Segment


def test_peers_see_each_others_memory_after_a_barrier(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        from weft.runtime.peers import connect

        peers = connect()
        buffer = peers.empty(4 * 100)
        for turn in range(50):
            buffer.view(0, (100,), torch.float32).fill_(rank + 10 * turn)
            peers.barrier("written")
            assert [int(buffer.view(0, (100,), torch.float32, r)[7]) for r in range(3)] == [r + 10 * turn for r in range(3)]
            peers.barrier("read")

    run_ranks(3, job, tmp_path)


def test_a_segment_is_private_and_has_no_name(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    segment = Segment.create(1 << 16)
    found = os.fstat(segment.key[1])
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert set(os.listdir("/dev/shm")) == before
    assert Segment.open(segment.key).bytes.numel() == 1 << 16
    segment.seal()
    with pytest.raises(OSError, match="No such file"):
        Segment.open(segment.key)


@pytest.mark.parametrize(
    ("how", "headline", "more"),
    [
        ("die", "rank 1 died before meet", "has ended"),
        ("late", "rank 1 did not reach meet", "is alive; the last op it entered is first"),
        ("other", "rank 1 disagrees at meet", "rank 1 is at something else"),
    ],
)
def test_a_missing_rank_is_named_by_all_others(how: str, headline: str, more: str, tmp_path: Path) -> None:
    def job(rank: int) -> str:
        from weft.runtime.peers import HostPeers

        peers = HostPeers(timeout_s=1.0)
        peers.barrier("first")
        dist.barrier()
        if rank == 1:
            if how == "die":
                os.kill(os.getpid(), 9)
            if how == "late":
                time.sleep(5)
            if how == "other":
                time.sleep(0.3)
        start = time.monotonic()
        try:
            peers.barrier("something else" if how == "other" and rank == 1 else "meet")
        except RuntimeFault as fault:
            assert time.monotonic() - start < 5
            return str(fault)
        return "met"

    said = run_ranks(4, job, tmp_path, may_die=(1,))
    for rank in (0, 2, 3):
        assert headline in said[rank], said[rank]
        assert more in said[rank]
        assert "try" in said[rank]
    assert len({said[r].splitlines()[0] for r in (0, 2, 3)}) == 1, "all ranks say the same"


def test_calls_in_another_order_are_noticed_without_waiting(tmp_path: Path) -> None:
    def job(rank: int) -> str:
        from weft.runtime.peers import HostPeers

        board = HostPeers().board
        try:
            for name in ("a", "b", "c") if rank else ("a", "c", "b"):
                board.post(name)
        except RuntimeFault as fault:
            return fault.message
        return "nothing noticed"

    said = run_ranks(2, job, tmp_path)
    assert any("ranks disagree at call 2" in text for text in said.values()), said


def test_ranks_with_other_programs_are_told_which_and_where(tmp_path: Path) -> None:
    def job(rank: int) -> str:
        from weft.runtime.agree import require_same

        require_same("plan", "the same")
        with pytest.raises(RuntimeFault, match="rank 1 has another program mlp") as e:
            require_same("program mlp", f"x = input()\n y = f32[{8 if rank == 1 else 4}]\nreturn y")
        return str(e.value)

    said = run_ranks(3, job, tmp_path)
    assert all("rank 0 has `y = f32[4]`, rank 1 has `y = f32[8]`" in text for text in said.values()), said


def test_more_ranks_than_cores_still_run(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        from weft.runtime.peers import connect

        for k in range(200):
            connect().barrier(f"turn {k % 3}")

    start = time.monotonic()
    run_ranks(8, job, tmp_path)
    assert time.monotonic() - start < 50


def test_all_ranks_of_a_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other groups too: blocks that wait for each other must all have room at once."""
    monkeypatch.setattr(hosts, "_places", [("here", "gpu 0"), ("here", "gpu 0"), ("here", "gpu 1"), ("there", "gpu 0")])
    assert [hosts.sharing(place) for place in hosts._places] == [2, 2, 1, 1]
    assert hosts.place(torch.device("cpu"))[1] == ""
