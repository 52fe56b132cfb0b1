"""Choices are measured on real ranks, agreed on, remembered; leaving things alone wins ties."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

import weft
from tests.ranks import run_ranks
from weft.api.compiled import Compiled
from weft.cluster.here import here
from weft.core.layout import Mesh, P
from weft.cost.simulate import predict
from weft.programs.catalog import EXAMPLES
from weft.programs.optimizers import optimizer
from weft.tune.measure import confirm, decide, measure
from weft.tune.programs import AS_IS, candidates, prune, tune_program
from weft.tune.store import Store


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("WEFT_CACHE", str(place))
    return place


def test_the_baseline_wins_ties() -> None:
    assert decide({"plain": 1.0, "fast": 0.98}, "plain") == "plain"
    assert decide({"plain": 1.0, "fast": 0.90}, "plain") == "fast"
    assert decide({"plain": 1.0, "slow": 1.5}, "plain") == "plain"


def test_a_lucky_time_is_not_believed() -> None:
    assert confirm([1.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, 1.1]) == 0.9
    assert confirm([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 1.1, 1.1]) == 1.0


def test_the_best_few_meet_again_and_the_winner_of_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"plain": 10.0, "lucky": 7.0, "good": 8.0, "fair": 8.5, "slow": 9.0, "bad": 20.0}
    again = {"plain": 10.0, "lucky": 9.9, "good": 8.2, "fair": 8.4, "slow": 9.0}
    met: list[list[str]] = []

    def rounds(calls: dict[str, object], count: int, group: object, device: object) -> torch.Tensor:
        met.append(list(calls))
        return torch.tensor([[(first if len(met) == 1 else again)[name] / 1e3] * count for name in calls])

    monkeypatch.setattr(sys.modules[measure.__module__], "_rounds", rounds)
    found = measure({name: lambda: None for name in first}, "plain")
    assert met == [["plain", "lucky", "good", "fair", "slow", "bad"], ["plain", "lucky", "good", "fair"]]
    assert found.choice == "good"
    assert found.gain == pytest.approx(10 / 8.2, rel=1e-5)


def test_only_what_is_not_known_is_timed() -> None:
    calls: list[str] = []

    def call(name: str, seconds: float = 0.001) -> None:
        calls.append(name)
        time.sleep(seconds)

    heard: list[str] = []
    found = measure(
        {"plain": lambda: call("plain", 0.004), "a": lambda: call("a"), "b": lambda: call("b")},
        "plain", rounds=3, known={"plain": 4.0, "a": 1.0}, on_result=lambda name, ms: heard.append(name),
    )  # fmt: skip
    assert set(heard) <= {"plain", "b"}
    assert "a" not in calls
    assert found.choice in ("a", "b")
    assert found.gain > 1.5


def test_measurements_outlive_a_search_that_was_stopped(own_cache: Path) -> None:
    first = Store("program", "text")
    first.put("one kernel", 1.25)
    assert Store("program", "text").times == {"one kernel": 1.25}
    assert Store("program", "another text").times == {}
    Store("program", "text").forget()
    assert Store("program", "text").times == {}


def test_candidates_are_valid_schedules_and_the_hopeless_are_left_out() -> None:
    program = optimizer("adamw", Mesh(dp=2), [(1024, 256), (256,)])
    found = candidates(program)
    assert next(iter(found)) == AS_IS
    assert "one kernel, state in slices dp dim 0" in found
    assert len({p.text for p in found.values()}) == len(found)
    machine = here(2, torch.device("cpu"))
    kept = prune(found, machine, 3)
    assert next(iter(kept)) == AS_IS
    assert len(kept) <= 4
    assert predict(found["one kernel, state in slices dp dim 0"], machine).step_ms < predict(program, machine).step_ms
    overlaps = [name for name in candidates(EXAMPLES["mlp"].make()) if "overlap" in name]
    assert any("8 chunks" in name for name in overlaps)


def test_a_program_is_tuned_on_its_ranks_and_all_choose_alike(own_cache: Path, tmp_path: Path) -> None:
    program = optimizer("sgd", Mesh(dp=2), [(64, 32), (7,)])

    def job(rank: int) -> str:
        from weft.cli.tune_worker import random_inputs

        best, found = tune_program(program, compile_=Compiled, inputs=random_inputs, limit=2)
        again, told = tune_program(program, compile_=Compiled, inputs=random_inputs, limit=2)
        assert told.times == found.times
        assert again.text == best.text
        assert found.times[found.choice] <= found.times[AS_IS]
        return found.choice

    said = run_ranks(2, job, tmp_path)
    assert said[0] == said[1]


def test_a_product_is_tuned_and_ways_that_cannot_work_are_left_out(own_cache: Path, tmp_path: Path) -> None:
    def job(rank: int) -> str:
        from weft.core.errors import RuntimeFault
        from weft.nn.functional import matmul_all_reduce
        from weft.nn.strategies import Strategy
        from weft.tune import tune_matmul

        x, w = torch.randn(32, 16), torch.randn(8, 16)

        def run(way: Strategy) -> object:
            if way.over == "nowhere":
                raise RuntimeFault("no such memory")
            return matmul_all_reduce(x, w, None, way)

        ways = [Strategy(), Strategy("group", 2), Strategy("nowhere")]
        way, found = tune_matmul(run, ways, ["test"])
        assert str(Strategy("nowhere")) not in found.times
        assert str(Strategy()) in found.times
        return str(way)

    said = run_ranks(2, job, tmp_path)
    assert said[0] == said[1]


def test_a_rank_with_another_program_is_refused_before_it_can_hang(tmp_path: Path) -> None:
    def job(rank: int) -> str:
        size = 8 if rank == 1 else 4
        p = weft.trace(lambda g: weft.all_reduce(g, "tp"), Mesh(tp=3), name="step", g=weft.f32(size, tp=P()))
        try:
            Compiled(p)
        except weft.WeftError as error:
            return str(error)
        return "compiled"

    said = run_ranks(3, job, tmp_path)
    assert all("rank 1 has another program step" in text for text in said.values()), said
    assert all("f32[4]" in text and "f32[8]" in text for text in said.values())
