"""The fuzzer itself: its programs, its schedules, its scripts, its tally."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

import weft.ops
import weft.schedule as schedule
from tests.testing.plant import Facet, plant
from weft.cli import app
from weft.core.layout import Mesh, P, S
from weft.core.node import OPS
from weft.core.spec import validate
from weft.core.text import parse
from weft.frontend.trace import f64, trace
from weft.ops import BUILT_IN, comm
from weft.ops.pointwise import tanh
from weft.ops.registry import Linear
from weft.testing import same
from weft.testing.comm_makers import MAKERS
from weft.testing.fuzz import Focus, fuzz
from weft.testing.programs import MESHES, random_program
from weft.testing.same import MeaningChanged, assert_same_meaning
from weft.testing.schedules import PROPOSALS, Step, propose
from weft.testing.values import draw_inputs


def test_every_op_has_a_maker() -> None:
    """Those that only a captured step has apart, which tests/ops/cases_capture.py, cases_by_rows.py and cases_rounds.py try under every layout."""
    captured = {"bincount", "each", "each_backward", "each_slope", "normal", "rope", "uniform"}
    captured |= {"opaque", "opaque_grad", "opaque_grad_again", "own_gradient", "rounds", "rounds_backward", "update"}
    # made by passes, tried by cases_pointwise.py and cases_linalg.py
    captured |= {"block_einsum", "by_leaves", "from_host", "landed", "low_einsum", "to_host", "tree_sum"}
    captured |= {name for name, op in OPS.items() if op.unfold is not None or op.update is not None}  # updates of optimizers
    assert BUILT_IN - set(MAKERS) == captured, "give the new op a maker in weft/testing"


def test_every_verb_is_proposed() -> None:
    assert set(PROPOSALS) == set(schedule.__all__)


def test_programs_are_valid_and_the_same_for_the_same_seed() -> None:
    for k in range(20):
        one, two = (random_program(random.Random(f"same {k}")) for _ in range(2))
        validate(one.program)
        assert one.program.text == two.program.text
        assert all(torch.equal(v, two.inputs()[name]) for name, v in one.inputs().items())


def test_programs_are_of_many_kinds() -> None:
    seen: Counter[str] = Counter()
    for k in range(300):
        p = random_program(random.Random(f"kinds {k}")).program
        seen["two axes"] += len(p.mesh.axes) > 1
        seen["state"] += bool(p.state)
        for n in p.nodes:
            for t in n.types:
                seen["uneven"] += not t.layout.is_even
                seen.update({type(t.on(a)).__name__ for a in p.mesh.axes})
                seen["inner cut"] += any(isinstance(t.on(a), S) and t.on(a).within is not None for a in p.mesh.axes)
                seen["max"] += any(t.on(a) == P("max") for a in p.mesh.axes)
    wanted = ("two axes", "state", "uneven", "Replicated", "S", "P", "O", "inner cut", "max")
    assert [kind for kind in wanted if seen[kind] < 5] == []
    assert {len(m.axes) for m in MESHES} == {1, 2, 3}


def test_a_run_finds_nothing_wrong() -> None:
    tally = fuzz(40, 11)
    assert tally.scripts == []
    assert tally.programs == 40
    assert sum(tally.applied.values()) > 80
    assert tally.gradients > 3
    assert sum(tally.refused.values()) > 40


def test_a_run_can_be_repeated() -> None:
    assert fuzz(8, 3).as_dict() == fuzz(8, 3).as_dict()


def test_a_step_prints_as_the_code_that_repeats_it() -> None:
    p = random_program(random.Random("steps")).program
    rng = random.Random(1)
    for _ in range(30):
        step = propose(p, rng)
        if step is None or step.verb == "undo":
            continue
        try:
            after = step.apply(p)
        except weft.WeftError:
            continue
        scope = {**{v: getattr(schedule, v) for v in schedule.__all__}, "p": parse(p.text)}
        exec(str(step), scope)
        assert scope["p"].text == after.text
        p = after


def test_a_mismatch_comes_as_a_script_that_repeats_it() -> None:
    wrong = Facet("tanh", "linear", Linear.FIRST)
    with plant(wrong):
        tally = fuzz(50, 4, Focus(ops=("tanh",), verbs=("split", "sink"), motifs=(), gradients=0), stop_at=1)
        script = tally.scripts[0]
        assert script.startswith("# weft 4 ")
        with pytest.raises(MeaningChanged):
            exec(script, {})
    with pytest.raises(weft.core.errors.ParseError):  # without the fault the program is none
        exec(script, {})


def test_a_wrong_gradient_comes_as_a_script_too() -> None:
    with plant(Facet("tanh", "vjp", lambda n, ct: (ct,))):
        script = fuzz(50, 4, Focus(ops=("tanh",), verbs=("split",), motifs=(), gradients=1), stop_at=1).scripts[0]
        with pytest.raises(MeaningChanged, match="the gradient of"):
            exec(script, {})
    exec(script, {})  # without the fault it is content


def test_a_program_that_cannot_be_made_comes_as_a_script_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(m: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setitem(MAKERS, "add", fails)
    script = fuzz(50, 4, Focus(ops=("add",)), stop_at=1).scripts[0]
    assert "no program came of it" in script.splitlines()[0]
    assert "on purpose" in script


def test_the_command_prints_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["fuzz", "--programs", "6", "--seed", "7", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert (found["programs"], found["mismatches"]) == (6, 0)
    assert isinstance(found["refused"], int)
    assert sum(found["applied"].values()) > 0
    assert found["ops"]["input"] >= 5


# -- assert_same_meaning ---------------------------------------------------------------------------------------------------------


def test_the_same_program_means_the_same() -> None:
    p = trace(lambda g: tanh(comm.all_reduce(g, axis="a")), Mesh(a=3), g=f64(4, a=P()))
    assert_same_meaning(p, schedule.split(p, "all_reduce", dim=0))


def test_another_value_is_told() -> None:
    p, q = (trace(lambda x, c=c: x * c, Mesh(a=2), x=f64(4)) for c in (2.0, 3.0))
    with pytest.raises(MeaningChanged, match="computes something else"):
        assert_same_meaning(p, q)
    with pytest.raises(MeaningChanged, match="output out differs"):
        same.check_values({"out": draw_inputs(p)["x"] * 2.0}, q, draw_inputs(p))


def test_another_layout_is_told() -> None:
    p, q = (trace(lambda x: x * 1.0, Mesh(a=2), x=f64(4, **places)) for places in ({}, {"a": S(0)}))
    with pytest.raises(MeaningChanged, match=r"output out was f64\[4\] a:R and is f64\[4\] a:S\(0\)"):
        assert_same_meaning(p, q)


def test_another_output_is_told() -> None:
    p, q = (trace(lambda x, k=k: {k: x * 1.0}, Mesh(a=2), x=f64(4)) for k in ("a", "b"))
    with pytest.raises(MeaningChanged, match="output b is new"):
        assert_same_meaning(p, q)


def test_a_call_may_be_written_by_hand() -> None:
    p = trace(lambda g: comm.all_reduce(g, axis="a"), Mesh(a=2), g=f64(4, a=P()))
    step = Step("split", ("%0",), (("dim", 0),))
    assert str(step) == "p = split(p, '%0', dim=0)"
    assert step.apply(p).find("reduce_scatter").attr("dim") == 0
