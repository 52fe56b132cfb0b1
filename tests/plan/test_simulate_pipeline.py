"""Orders of pipeline stages, and timelines of tasks."""

from __future__ import annotations

import json

import pytest

from weft.core.errors import PlanError
from weft.plan.pipeline import Order, in_flight, orders
from weft.plan.timeline import Task, Timeline, run

ALL = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]


@pytest.mark.parametrize(("schedule", "virtual"), ALL)
@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 2), (4, 8), (4, 3), (3, 7)])
def test_every_pass_happens_once(schedule: str, virtual: int, stages: int, micro: int) -> None:
    kinds = ("forward", "backward", "weight") if schedule == "zero-bubble" else ("forward", "backward")
    wanted = sorted((k, c, j) for k in kinds for c in range(virtual) for j in range(micro))
    for order in orders(schedule, stages, micro, virtual):
        assert sorted(order) == wanted


@pytest.mark.parametrize(("schedule", "virtual"), ALL)
def test_every_order_can_be_followed(schedule: str, virtual: int) -> None:
    assert length(schedule, 4, 8, virtual) > 0


def test_1f1b_takes_as_long_as_the_formula_says() -> None:
    for stages, micro in [(1, 4), (4, 4), (4, 16), (8, 8)]:
        assert length("1f1b", stages, micro) == pytest.approx((micro + stages - 1) * 3)
        assert length("gpipe", stages, micro) == pytest.approx((micro + stages - 1) * 3)


def test_interleaving_shrinks_the_bubble() -> None:
    plain, twice = length("1f1b", 4, 8), length("interleaved", 4, 8, 2)
    assert twice - 24 == pytest.approx((plain - 24) / 2)


def test_zero_bubble_is_shorter_and_holds_no_more() -> None:
    assert length("zero-bubble", 4, 8) < length("1f1b", 4, 8)
    for early, late in zip(orders("1f1b", 4, 8), orders("zero-bubble", 4, 8), strict=True):
        assert in_flight(late) <= in_flight(early)


def test_forwards_in_flight() -> None:
    assert [in_flight(o) for o in orders("1f1b", 4, 8)] == [4, 3, 2, 1]
    assert [in_flight(o) for o in orders("gpipe", 4, 8)] == [8, 8, 8, 8]
    assert in_flight(orders("interleaved", 4, 8, 2)[0]) > 4


def length(schedule: str, stages: int, micro: int, virtual: int = 1) -> float:
    """Span with a forward of 1 and a backward of 2 per stage, chunks and weight gradients being parts of these."""
    made = orders(schedule, stages, micro, virtual)
    return simulate(made, stages, virtual, split=schedule == "zero-bubble").seconds


def simulate(made: tuple[Order, ...], stages: int, virtual: int, split: bool) -> Timeline:
    keys = [(a.kind, a.chunk * stages + s, a.micro) for s, order in enumerate(made) for a in order]
    index = {key: i for i, key in enumerate(keys)}
    seconds = {"forward": 1 / virtual, "backward": (1 if split else 2) / virtual, "weight": 1 / virtual}
    tasks = []
    for s, order in enumerate(made):
        for kind, chunk, j in order:
            g = chunk * stages + s
            after = {"forward": [("forward", g - 1, j)], "backward": [("backward", g + 1, j), ("forward", g, j)]}
            wanted = after.get(kind, [("backward", g, j)])
            tasks.append(Task(kind, str(s), seconds[kind], tuple(index[k] for k in wanted if k in index)))
    return run(tasks)


def test_a_stream_runs_one_task_at_a_time() -> None:
    line = run([Task("a", "x", 2), Task("b", "x", 1), Task("c", "y", 1, after=(0,)), Task("d", "x", 1, after=(2,))])
    assert line.start == (0, 2, 2, 3)
    assert line.seconds == 4
    assert line.busy("x") == 4


def test_a_circle_is_refused() -> None:
    with pytest.raises(PlanError, match="wait for one another in a circle") as caught:
        run([Task("first", "x", 1, after=(1,)), Task("second", "y", 1, after=(0,))])
    assert "first, second" in str(caught.value)


def test_the_trace_opens_in_a_viewer() -> None:
    made = json.loads(json.dumps(run([Task("a", "x", 2e-3, cause="forward"), Task("b", "y", 1e-3, (0,))]).chrome()))
    spans = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [("a", 0, 2000), ("b", 2000, 1000)]
    assert {e["args"]["name"] for e in made["traceEvents"] if e["ph"] == "M"} == {"step", "x", "y"}
