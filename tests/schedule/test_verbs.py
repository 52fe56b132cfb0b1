"""Every verb: the text before and after it, its refusals word for word, and what they advise, done."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import weft.schedule as schedule
from tests.schedule.scenes import PROGRAMS, REFUSALS, SCENES, Scene, run
from weft.core.errors import WeftError
from weft.core.layout import Mesh, P
from weft.core.node import Node
from weft.frontend.trace import f64, trace
from weft.ops.comm import all_reduce
from weft.testing.groups import check_groups
from weft.testing.same import assert_same_meaning
from weft.testing.values import draw_inputs

Golden = Callable[[str, str], None]


def file_of(s: Scene) -> str:
    return f"schedule/{s.name.replace(' ', '_').replace(',', '')}.txt"


@pytest.mark.parametrize("s", SCENES, ids=str)
def test_before_and_after(s: Scene, golden: Golden) -> None:
    p = s.start()
    q = run(s.call, p)
    golden(file_of(s), f"{p}\n\n{s.call}\n\n{q}")
    inputs = draw_inputs(p)
    assert_same_meaning(PROGRAMS[s.program](), q, inputs)
    check_groups(q, inputs)


@pytest.mark.parametrize("s", SCENES, ids=str)
def test_a_verb_is_a_step_that_can_be_taken_back(s: Scene) -> None:
    p = s.start()
    q = run(s.call, p)
    if not s.call.startswith("undo"):
        assert q.parent is p
        assert schedule.undo(q) is p
        assert q.history[: len(p.history)] == p.history


@pytest.mark.parametrize("s", SCENES, ids=str)
def test_handles_survive(s: Scene) -> None:
    """A place named before the step still names the place of the same value after it."""
    p = s.start()
    q = run(s.call, p)
    for name, node in p.outputs:
        if name in q.output_names and q.output_names[name].type == node.type and q.parent is p:
            assert q.at(node) is q.output_names[name]


@pytest.mark.parametrize("s", REFUSALS, ids=str)
def test_refusal(s: Scene, golden: Golden) -> None:
    p = s.start()
    with pytest.raises(WeftError) as e:
        run(s.call, p)
    shown = re.sub(r"scenes.py, line \d+", "scenes.py, line ...", str(e.value))
    golden(f"schedule/refused/{s.name.replace(' ', '_')}.txt", f"{p}\n\n{s.call}\n\n{type(e.value).__name__}: {shown}")


@pytest.mark.parametrize("s", REFUSALS, ids=str)
def test_what_a_refusal_advises_works(s: Scene) -> None:
    p = s.start()
    with pytest.raises(WeftError) as e:
        run(s.call, p)
    for advice in e.value.repairs:
        if re.match(r"\w+\(.*p\b", advice) and "..." not in advice:
            assert_same_meaning(p, run(advice, p))


def test_a_refusal_shows_the_line_that_wrote_the_node() -> None:
    def step(g: Node) -> Node:
        y = all_reduce(g, axis="dp")
        return y + 1.0

    p = trace(step, Mesh(dp=2), g=f64(4, dp=P()))
    with pytest.raises(WeftError) as e:
        schedule.delay(p, "all_reduce")
    assert e.value.where == f"test_verbs.py, line {step.__code__.co_firstlineno + 2}"


def test_every_verb_has_a_scene_and_a_refusal() -> None:
    for scenes in (SCENES, REFUSALS):
        shown = {s.call.split("(")[0] for s in scenes}
        assert set(schedule.__all__) - shown == set()
