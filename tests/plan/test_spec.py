"""One value for what a plan decides: words parse into it and print from it, and so does plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import PlanError
from weft.plan.rewritten import Move
from weft.plan.schedules import SCHEDULES
from weft.plan.setting import Setting
from weft.plan.spec import AGAIN, DECIDED, Spec
from weft.rewrite.search import Use

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}(\.[a-z0-9_*]{1,5}){0,2}", fullmatch=True)
PIECES = st.tuples(st.sampled_from(["first", "layer", "attention", "ffn", "last", "unit3"]), st.sampled_from(["none", *AGAIN.values()]), st.integers(1, 40))
PINS = st.builds(lambda n, d, more: f"{n}=tp:S({d})" + ",dp:R" * more, NAMES, st.integers(0, 3), st.booleans())
SHARES = st.tuples(st.sampled_from(["H100", "A100-40GB"]), *[st.integers(1, 9)] * 3)
MOVES = st.builds(Move, st.builds(Use, NAMES, NAMES, *[st.integers(0, 5)] * 3), st.booleans())


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    pp = draw(st.integers(1, 4))
    schedule = draw(st.sampled_from(list(SCHEDULES))) if pp > 1 else "1f1b"
    how = SCHEDULES[schedule]
    virtual = draw(st.integers(2, 2 if how.folded else 4)) if how.takes_chunks else 0
    chunks, micro = pp * max(1, virtual), [0, 2 * pp, *([pp] if how.may_take(pp, pp) else [])]
    degrees: Any = {a: draw(st.integers(1, 8)) for a in ("dp", "cp", "ep", "tp")}
    return Spec(
        **degrees, pp=pp, schedule=schedule, virtual=virtual, micro=draw(st.sampled_from(micro)), zero=draw(st.integers(0, 3)),
        shards=draw(st.sampled_from([0, 3])), recompute=draw(st.sampled_from(["", "mixed", *AGAIN.values()])),
        **{f: draw(st.booleans()) for f in ("sp", "ring", "a2a", "gather_once", "async_tp")},
        groups=tuple(draw(st.lists(st.tuples(NAMES, st.integers(0, 3)), max_size=2))),
        stages=draw(st.one_of(st.just(()), st.tuples(*[st.lists(PIECES, min_size=1, max_size=3).map(tuple)] * chunks))),
        splits=draw(st.one_of(st.just(()), st.tuples(*[NAMES] * (chunks - 1)))), pins=tuple(draw(st.lists(PINS, max_size=2))),
        shares=tuple(draw(st.lists(SHARES, max_size=2))),
    )  # fmt: skip


@given(specs())
@settings(max_examples=300, deadline=None)
def test_words_and_data_lead_back(spec: Spec) -> None:
    assert Spec.parse(str(spec)) == spec
    assert Spec.of_data(json.loads(json.dumps(spec.data()))) == spec


@given(st.lists(MOVES, max_size=3).map(tuple))
@settings(max_examples=30, deadline=None)
def test_moves_are_data(moves: tuple[Move, ...]) -> None:
    spec = Spec(dp=2, moves=moves)
    assert Spec.of_data(json.loads(json.dumps(spec.data()))) == spec and str(spec) == "dp2"


@given(st.sets(st.sampled_from(DECIDED)), st.integers(1, 8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_is_open_is_told(names: set[str], degree: int, flag: bool) -> None:
    said = {"tp": degree, "sp": flag, "zero": 1}
    spec = Spec(**{k: v for k, v in said.items() if k not in names}, open=frozenset(names | {"pp", "schedule", "micro", "virtual"}))
    assert Spec.parse(str(spec)) == spec and str(spec).endswith("?")
    other = Spec(**{**{f: getattr(spec, f) for f in said}, "pp": 4, "schedule": "gpipe"})
    assert spec.allows(other) and (("tp" in names) == spec.allows(Spec(**{**said, "tp": degree + 1, **{k: getattr(spec, k) for k in ("sp", "zero")}})))


def test_a_setting_is_counted_as_other_systems_count() -> None:
    s = Setting.counted(global_batch=64, micro_batch=2, dp=8, ep=4, tp=2, pp=2, zero=1, recompute="full", schedule="zero-bubble", overlap_tp=True)
    spec = s.spec
    assert str(spec) == "dp2,ep4,tp2,pp2,zero-bubble,zero1,micro4,async-tp,recompute"
    assert Setting.of(spec, global_batch=64) == s and (s.replicas, s.micro_batch) == (8, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dp2,sideways", "joined by commas"), ("dp0", "degrees of 1 or more"), ("zero4", "zero0 to zero3"), ("gpipe", "pp2 or more for gpipe"),
        ("pp2,interleaved,micro3", "rounds of 2"), ("pp2,virtual2", "needed  interleaved"), ("pp4,split:layers.2", "3 words with split:"),
        ("pp2,stage:layer", "2 words with stage:"), ("pin:w1=tp", "PATTERN=AXIS"), ("stage:a/b/c", "joined by commas"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(words: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Spec.parse(words)


def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="a multiple of dp x micro-batches = 6"):
        Setting.of(Spec.parse("dp2,micro3"), global_batch=8)
