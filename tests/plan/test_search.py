"""The search against brute force, and its bounds against the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.plan.baselines import BASELINES, EVERYTHING
from weft.plan.plan import Plan
from weft.plan.planner import Infeasible, Request, make_plan, sized_stack
from weft.plan.search import CLOSE, Found, Nothing, Search
from weft.plan.sizes import Shape
from weft.plan.space import Limits, PlanProblem, candidates, parse_pins, shardings
from weft.plan.stages import as_if, shared, split_batch, uneven

SMALL = Shape(layers=8, hidden=1024, heads=16, vocab=32000, seq=1024, rotary=True, gated=True, bias=False, tied=False, name="small")


def problem(text: str = "2x4xA100", batch: int = 32, shape: Shape = SMALL) -> PlanProblem:
    return PlanProblem(sized_stack(shape, "bf16"), cluster(text), batch, "bf16")


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(problem())


def everything(search: Search, name: str) -> list:
    space = BASELINES[name]
    return [s for c in candidates(search.problem, space, search.limits) for s in shardings(space, search.limits, c)]


@pytest.mark.parametrize("name", ["data parallel", "zero1", "zero3", "alpa-like", "unity-like"])
def test_search_equals_a_full_sweep(search: Search, name: str) -> None:
    swept = [search.price(s) for s in everything(search, name)]
    best = min(f.seconds for f in swept if f is not None and f.memory <= search.memory)
    found = search.best(BASELINES[name])
    assert isinstance(found, Found)
    assert best <= found.seconds <= best / (1 - CLOSE)


def test_bounds_hold(search: Search) -> None:
    for name in ("zero2", "alpa-like", "megatron 3D"):
        for s in everything(search, name)[::7]:
            made = search.price(s)
            if made is not None:
                seconds, memory = search.bound(s)
                assert seconds <= made.seconds * (1 + 1e-9), s
                assert memory <= made.memory * (1 + 1e-9), s


def test_never_worse_than_a_baseline(search: Search) -> None:
    whole = search.best(EVERYTHING)
    assert isinstance(whole, Found)
    for name, space in BASELINES.items():
        found = search.best(space)
        assert isinstance(found, Nothing) or whole.seconds <= found.seconds / (1 - CLOSE), name


def test_few_rounds_foretell_many() -> None:
    search = Search(problem(batch=256))
    found = search.best(BASELINES["alpa-like"], "memory")
    assert isinstance(found, Found)
    for pp, schedule in ((2, "1f1b"), (4, "zero-bubble")):
        s = replace(found.setting, dp=1, tp=8 // pp, pp=pp, schedule=schedule, zero=0).of_samples(2)
        made = search.price(s)
        assert made is not None and made.seconds == pytest.approx(search.step(s).seconds, rel=2e-3)


def test_memory_objective_needs_least_memory(search: Search) -> None:
    lean, fast = search.best(BASELINES["zero3"], "memory"), search.best(BASELINES["zero3"])
    assert isinstance(lean, Found) and isinstance(fast, Found)
    assert lean.memory <= fast.memory and lean.seconds >= fast.seconds


def test_limits_are_kept() -> None:
    found = Search(problem(), Limits(max_tp=2, pins={"pp": "2", "recompute": "full"})).best(EVERYTHING)
    assert isinstance(found, Found)
    assert (found.setting.pp, found.setting.recompute) == (2, "full") and found.setting.tp <= 2


def test_too_little_memory_is_told() -> None:
    found = Search(problem(), Limits(memory=1.6e9)).best(EVERYTHING)
    assert isinstance(found, Nothing) and found.least > 1.6e9 and "needs at least" in found.reason


def test_what_a_pin_rules_out_is_not_told_as_too_little_memory(search: Search) -> None:
    pinned = Search(search.problem, Limits(pins={"zero": "3"}))
    found = pinned.best(BASELINES["megatron 3D"])
    assert isinstance(found, Nothing) and found.reason.startswith("no setting meets zero=3; without it ")
    free = pinned.best(BASELINES["zero3"])
    assert isinstance(free, Found) and free.setting.zero == 3


def test_tensor_parallelism_beside_experts_is_there_for_who_asks() -> None:
    """It leaves the weights of experts whole, so it is not looked at unasked; pinned, it is no reason to say that nothing fits."""
    mixed = problem("1x4xA100", 8, replace(SMALL, layers=2, experts=4, chosen=2))
    found = [{s.tp for s in candidates(mixed, EVERYTHING, Limits(pins=pins))} for pins in ({}, {"tp": "2"})]
    assert found == [{1}, {2}]


def test_many_ranks_of_few_picks_are_sent_their_tokens_alone() -> None:
    """Where all tokens are gathered on each of 32 ranks, they send and keep more: with that alone the best step is slower."""
    mixed = Search(problem("4x8xH100", 128, replace(SMALL, layers=4, ffn=2048, experts=32, chosen=2)))
    found = mixed.best(EVERYTHING)
    assert isinstance(found, Found) and found.setting.ragged_ep and str(found.setting.spec).endswith("ragged-ep")
    gathered = mixed.narrowed(Limits(pins=parse_pins(["ragged_ep=false"]))).best(EVERYTHING)
    assert isinstance(gathered, Found) and gathered.seconds > found.seconds
    same = replace(found.setting, ragged_ep=False)
    sent, whole = (mixed.step(s) for s in (found.setting, same))
    assert whole.peak_memory.total > sent.peak_memory.total


def test_pins_are_read_strictly() -> None:
    assert parse_pins(["tp=4", "sequence-parallel=True"]) == {"tp": "4", "sequence_parallel": "true"}
    with pytest.raises(PlanError, match="cannot pin 'layers"):
        parse_pins(["layers.*.mlp.w1=tp:S(1)"])
    with pytest.raises(PlanError, match="a number"):
        parse_pins(["tp=four"])
    with pytest.raises(PlanError, match="no recompute named"):
        parse_pins(["recompute=some"])


def test_uneven_layers_beat_even_ones_where_the_head_is_heavy() -> None:
    search = Search(problem(batch=64, shape=replace(SMALL, vocab=256_000, layers=16)))
    base = next(c for c in candidates(search.problem, EVERYTHING, Limits(pins={"pp": "4", "schedule": "1f1b", "dp": "2", "tp": "1"})))
    even, made = search.price(base), uneven(search, base)
    assert even is not None and made is not None
    assert made.seconds < even.seconds and made.setting.layers[-1] < 4


def test_deal_gives_fast_copies_more() -> None:
    taken = split_batch(24, (4, 4), lambda kind, n: n * (1.0, 2.0)[kind])
    assert taken == (4, 2)
    assert split_batch(13, (4, 4), lambda kind, n: float(n)) is None


def test_unequal_devices_share_by_speed() -> None:
    text = "1x8xA100+1x8xH100"
    search = Search(PlanProblem(sized_stack(SMALL, "bf16"), cluster(text), 512, "bf16"))
    base = next(c for c in candidates(search.problem, BASELINES["zero1"], Limits(pins={"micro_batch": "1"})))
    even, made = search.price(replace(base, zero=1)), shared(search, replace(base, zero=1))
    assert even is not None and made is not None
    assert made.seconds < even.seconds and sum(copies * micro * rounds for _, copies, micro, rounds in made.setting.shares) == 512
    assert {kind for kind, *_ in made.setting.shares} == {"A100", "H100"}
    assert as_if(search.cluster, search.cluster.groups[1]).device.name == "H100"


def test_infeasible_names_the_nearest_change() -> None:
    made = make_plan(Request("gpt2", "1xA100", batch=8, limits=Limits(memory=2e9)))
    assert isinstance(made, Infeasible)
    assert "needs at least" in made.reason and made.change.startswith("--memory 4.4GB: ")


def test_cost_takes_the_nodes_that_serve_a_token_cheapest() -> None:
    whole, cheap = (make_plan(Request("gpt2", "2x2xA100@10", batch=8, objective=o)) for o in ("time", "cost"))
    assert isinstance(whole, Plan) and isinstance(cheap, Plan)
    assert cheap.step_ms * cluster(cheap.cluster).devices <= whole.step_ms * 4 and cheap.cluster == "1x2xA100@10"


def test_an_instance_is_a_node() -> None:
    assert cluster("8xp3.16xlarge").devices == 64 and cluster("p3.16xlarge").devices == 8


def test_embedding_and_head_may_be_chunks_alone() -> None:
    """126 layers go into 16 x 8 chunks, of which the first and the last hold none; not into 127."""
    problem = Request("llama3-405b", "2048x8xH100").problem()
    assert [problem.chunk(n) for n in (126, 127, 128, 129)] == [1, 0, 1, 0]
    search = Search(problem, Limits(pins={"tp": "8", "pp": "16", "schedule": "interleaved", "recompute": "none", "zero": "1"}))
    found = search.best(EVERYTHING)
    assert isinstance(found, Found) and found.setting.virtual == 8
