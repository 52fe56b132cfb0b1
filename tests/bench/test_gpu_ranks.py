"""What benchmarks on a GPU share, tried on ranks of a CPU: rows come back as they are said, and a stage ends whatever happens."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from bench import _gpu
from bench._gpu_rank import Rank, timed_row
from weft.core.errors import RuntimeFault, UnknownName

HERE = "tests.bench.test_gpu_ranks"


def agree(me: Rank, base: int) -> None:
    """Each rank's number is seen by all, a failure of one by all, and times are those of the slowest."""
    assert me.all(base + me.rank) == [base, base + 1] and me.worst(float(me.rank)) == 1.0
    assert me.worst(float("nan") if me.rank == 0 else 1.0) != 1.0
    assert me.tried("a", lambda: me.rank) == me.rank
    assert me.tried("b", lambda: 1 // me.rank) is None
    ms = me.time_calls({"weft": lambda: None, "peer": lambda: None}, rounds=2)
    me.say(**timed_row("timed", ms, limit_ms=None))


def fail(me: Rank) -> None:
    me.say(case="said before")
    if me.rank == 1:
        raise SystemExit(3)
    me.sync()


def test_ranks_agree_and_their_rows_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    result = _gpu.run(HERE, _gpu.Stage("agree", limit=100, settings={"base": 4}), 2, "cpu")
    assert result["status"] == "ok", result
    failed, timed = (row for row in result["rows"] if "case" in row)
    assert failed["case"] == "b" and "ZeroDivisionError" in failed["failed"]
    assert timed["case"] == "timed" and set(timed["peers_ms"]) == set(timed["ratios"]) == {"peer"}
    with pytest.raises(typer.Exit):
        _gpu.report("some", [result], json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["bench"] == "some" and told["machine"]["ranks"] == 2 and [row["case"] for row in told["rows"]] == ["b", "timed"]
    assert told["stages"][0]["status"] == "ok"


def test_what_was_said_before_a_failure_is_kept() -> None:
    result = _gpu.run(HERE, _gpu.Stage("fail", limit=100), 2, "cpu")
    assert result["status"] == "rank 1 ended with 3" and len(result["logs"]) == 2
    assert [row["case"] for row in result["rows"] if "case" in row] == ["said before"]


def test_processes_end_at_the_limit(tmp_path: Path) -> None:
    processes = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
    assert _gpu._watch(processes, time.monotonic(), tmp_path / "rows") == "stopped at its limit"
    assert all(p.poll() is not None for p in processes)


def test_a_stage_that_is_not_there_is_refused() -> None:
    stages: dict[str, Any] = {"gather": _gpu.Stage("gather", 1), "sums": _gpu.Stage("sums", 1)}
    with pytest.raises(UnknownName, match=r"needed  some of gather, sums, joined by commas\n  found   hosts"):
        _gpu.run_stages(HERE, stages, "gather,hosts", 4)


def test_a_machine_without_a_gpu_is_told_what_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(
        RuntimeFault, match=r"needed  one that torch can use\n  found   none .*\n  try     a machine with an NVIDIA GPU; `weft bench optim"
    ):
        _gpu.need_gpu()
    with pytest.raises(RuntimeFault, match="needed  nvidia-cuda-mps-control"):
        _gpu.run(HERE, _gpu.Stage("agree", limit=1), 2)


def test_a_benchmark_runs_on_a_cpu_to_see_that_it_runs() -> None:
    from bench.gpu_inference import CALLS

    result = _gpu.run("bench.gpu_inference", _gpu.Stage("measure", limit=110), 2, "cpu", compiled=False)
    timed = [row for row in result["rows"] if "weft_ms" in row]
    assert result["status"] == "ok" and not any("failed" in row for row in result["rows"]), result
    assert [row["case"] for row in timed] == [f"llama block {call}, {kind}" for call in CALLS for kind in ("graph", "call")]
    assert all(row["ratios"].keys() == {"torch tp"} and row["correct"].startswith("results equal") for row in timed)
