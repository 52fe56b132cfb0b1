"""Messages between hosts over several groups: the same values, the same groups on every rank, and as many as were fastest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft_zoo as zoo
from tests.ranks import run_ranks
from weft.api import channels
from weft.core.errors import RuntimeFault
from weft.runtime.parallel_groups import ParallelGroups


def losses(plan: str) -> tuple[list[float], str]:
    from weft.api.parallelize import parallelize

    w = zoo.small("gpt2", dropout=0.0)
    step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan=plan)
    return [float(step(w.example(8, seed=i))) for i in range(3)], step.compiled.how


def test_a_message_goes_where_least_was_sent() -> None:
    some = ParallelGroups(["a", "b", "c"])
    assert [some.take(n) for n in (10, 4, 5, 1, 1, 7)] == ["a", "b", "c", "b", "b", "c"]
    some.restart()
    assert some.take(1) == "a" and some.group == "a"


def test_channels_that_are_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CHANNELS", "many")
    with pytest.raises(RuntimeFault, match="WEFT_CHANNELS does not name a number of groups") as e:
        channels._requested()
    assert "1 or more" in str(e.value) and "many" in str(e.value)
    monkeypatch.setenv("WEFT_CHANNELS", "3")
    assert channels._requested() == 3


def over_channels(rank: int) -> None:
    """Two hosts of two ranks: the same losses over 1, 2 and 3 groups, sums, slices or parameters sent."""
    os.environ["NCCL_HOSTID"] = f"host {rank // 2}"
    os.environ["WEFT_CHANNELS"] = "1"
    want, how = losses("dp4")
    assert how == "node by node"
    for plan, count in {"dp4,zero1": 3, "dp2,tp2,zero3": 2}.items():
        os.environ["WEFT_CHANNELS"] = str(count)
        got, how = losses(plan)
        assert f"messages along dp over {count} groups" in how, how
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


@pytest.mark.timeout(300)
def test_losses_do_not_depend_on_channels(tmp_path: Path) -> None:
    run_ranks(4, over_channels, tmp_path, seconds=250)


def measured(rank: int) -> str:
    """Asked for, groups are timed where ranks are on several hosts, and what was found is kept."""
    os.environ["WEFT_CHANNELS"] = "measure"
    channels.MUCH, channels.MESSAGE, took = 0, 1 << 12, channels._measured
    told: list[tuple[str, ...]] = []

    def scripted(kinds: tuple[str, ...], group: object, device: torch.device) -> dict[str, float]:
        told.append(tuple(kinds))
        assert set(took(kinds, group, device)) == {"1", "2", "4"}  # the true measurement runs, and its answer is set aside
        return {"1": 10.0, "2": 7.0, "4": 9.0}

    channels._measured = scripted  # type: ignore[assignment]
    assert channels._quickest(("all_reduce",), dist.group.WORLD, torch.device("cpu"), True) == 1 and not told  # both on this host
    os.environ["NCCL_HOSTID"] = f"host {rank}"
    want, _ = losses("dp2")
    got, how = losses("dp2,zero1")
    assert how.endswith("messages along dp over 2 groups"), how
    again, how = losses("dp2,zero1")
    assert how.endswith("over 2 groups") and again == got
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    dist.barrier()
    return json.dumps(told)


@pytest.mark.timeout(300)
def test_the_number_of_groups_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    said = run_ranks(2, measured, tmp_path, seconds=250)
    assert said[0] == said[1] == json.dumps([["all_reduce"], ["all_reduce", "reduce_scatter", "all_gather"]])


def test_one_group_wins_ties() -> None:
    assert channels.decide({"1": 10.0, "2": 9.7, "4": 9.6}, "1", channels.MARGIN) == "1"
    assert channels.decide({"1": 10.0, "2": 7.0, "4": 6.9}, "1", channels.MARGIN) == "4"
