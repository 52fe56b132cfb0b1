"""Stages cut to measure: what is mixed, what fits, and that nothing fixed is better."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from weft.cluster.spec import cluster
from weft.cost.price import Costs
from weft.plan.planner import Request
from weft.plan.search import Found, Search
from weft.plan.setting import Setting
from weft.plan.spec import OFFLOAD, OFFLOADED, RECOMPUTE
from weft.plan.stage_partitioner import WAYS, Measure, Point, Times, blocks_of, least_more, spread


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(Request("gpt-2.6b", "2x8xV100", batch=128).problem())


def setting(search: Search, **changes: object) -> Setting:
    base = Setting.counted(
        global_batch=search.problem.batch, micro_batch=2, dp=2, tp=2, pp=4, zero=1, recompute="mixed", overlap_sends=True, dtype="fp16"
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def cut(search: Search, s: Setting, measure: Measure | None = None) -> Found:
    found = search.tailored(s, measure or Measure())
    assert found is not None
    return found


def test_stages_hold_every_half_layer_once(search: Search) -> None:
    found = cut(search, setting(search))
    names = [(name, n) for stage in found.setting.stages for name, _, n in stage]
    halves = [sum(n for name, n in names if name == half) for half in ("attention", "ffn")]
    assert halves[0] == halves[1]
    assert sum(n for name, n in names if name == "layer") + halves[0] == search.problem.depth
    assert (names[0][0], names[-1][0]) == ("first", "last")


def test_little_memory_is_met_by_running_more_again() -> None:
    problem = Request("gpt-2.6b", "2x8xV100", batch=128).problem()
    plenty = Search(problem)
    tight = Search(problem)
    s = setting(plenty)
    free = cut(plenty, s)
    tight.__dict__["memory"] = free.memory * 0.8
    found = cut(tight, s)
    assert found.memory <= tight.memory < free.memory
    assert found.seconds > free.seconds


def ways(found: Found) -> set[str]:
    return {way for stage in found.setting.stages for _, way, _ in stage}


def test_the_host_keeps_layers_where_that_is_faster(search: Search) -> None:
    """On the joint front: no slower than recompute alone, and only as much as its link has time for."""
    s, tight = setting(search), Search(search.problem)
    tight.__dict__["memory"] = cut(search, s).memory * 0.7
    both, alone = cut(tight, s), cut(tight, s, Measure(host=False))
    assert OFFLOAD in ways(both) and not ways(alone) & {*OFFLOADED}
    assert both.seconds < alone.seconds and both.memory <= tight.memory
    step = tight.step(both.setting)
    assert step.hidden["host"] > 0 and step.causes.get("host", 0.0) < 0.02 * step.seconds


def test_a_host_without_room_or_link_keeps_nothing(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    s, tight = setting(search), Search(search.problem)
    tight.__dict__["memory"] = cut(search, s).memory * 0.8
    monkeypatch.setattr("weft.plan.stage_partitioner.HOST_MEMORY", 1e6)
    assert not ways(cut(tight, s)) & {*OFFLOADED}
    costs = Costs(cluster("1x1xx86-2"), cluster("1x1xx86-2").device, s.place)
    layer = search.work(setting(search)).layer
    assert Times(search.work(s), costs).free(layer) == 0.0 < Times(search.work(s), Costs(search.cluster, search.cluster.device, s.place)).free(layer)


@pytest.mark.parametrize(
    ("hosted", "rest"), [(0, (("full", 2), ("none", 3))), (3, (("full", 1), ("none", 4))), (2, ()), (5, (("none", 1),)), (1, (("none", 7),))]
)
def test_layers_of_the_host_stand_evenly_among_the_others(hosted: int, rest: tuple[tuple[str, int], ...]) -> None:
    mix = ((OFFLOAD, hosted), *rest)
    made = [way for way, n in spread(mix) for _ in range(n)]
    assert Counter(made) == Counter({way: n for way, n in mix if n})
    assert [way for way in made if way != OFFLOAD] == [way for way, n in rest for _ in range(n)]
    if rest and hosted:
        gaps = [len(list(group)) for way, group in itertools.groupby(made) if way != OFFLOAD]
        assert made[-1] != OFFLOAD and max(gaps) <= -(-len(made) // hosted)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_no_fixed_recompute_is_better(search: Search, recompute: str, schedule: str) -> None:
    fixed = search.price(setting(search, recompute=recompute, schedule=schedule))
    assert fixed is not None
    if fixed.memory <= search.memory:
        assert cut(search, setting(search, schedule=schedule)).seconds <= fixed.seconds * 1.02


def test_a_number_of_whole_layers_is_the_same_on_every_stage(search: Search) -> None:
    tight = Search(search.problem)
    tight.__dict__["memory"] = cut(search, setting(search)).memory * 0.85
    found = cut(tight, setting(search), Measure(("none", "full"), free=False))
    again = {sum(n for name, way, n in stage if name == "layer" and way == "full") for stage in found.setting.stages}
    assert len(again) == 1 and again != {0}


def test_interleaved_stages_are_mixed_too(search: Search) -> None:
    tight = Search(search.problem)
    s = setting(search, schedule="interleaved", virtual=2)
    tight.__dict__["memory"] = cut(search, s).memory * 0.85
    found = cut(tight, s)
    assert len(found.setting.stages) == 8
    assert found.memory <= tight.memory


def test_the_least_that_must_be_run_again_is_on_the_hull() -> None:
    front = [Point(0.0, 10.0, "none"), Point(1.0, 6.0, "activation"), Point(4.0, 2.0, "full")]
    assert [least_more(front, kept) for kept in (12.0, 10.0, 8.0, 6.0, 4.0, 1.0)] == [0.0, 0.0, 0.5, 1.0, 2.5, 4.0]


def test_every_way_frees_what_it_says(search: Search) -> None:
    layer = search.work(setting(search)).layer
    for way in WAYS:
        told = replace(layer, again=way)
        assert 0 <= told.not_kept("none") <= layer.saved
        assert (way == "none") == (not told.rerun("none"))


def test_pieces_name_known_blocks(search: Search) -> None:
    work = search.work(setting(search))
    made = blocks_of(work, [[("first", "none", 1), ("layer", "full", 2), ("attention", "none", 1)]])
    assert [(b.name, b.again, n) for b, n in made.stages[0]] == [("first", "none", 1), ("layer", "full", 2), ("attention", "none", 1)]
