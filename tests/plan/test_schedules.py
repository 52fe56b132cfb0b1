"""Orders of pipeline stages, and timelines of tasks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.cost.timeline import Task, Timeline, run
from weft.plan.planner import sized_stack
from weft.plan.schedules import SCHEDULES, Order, Schedule
from weft.plan.setting import Setting
from weft.plan.simulate import simulate
from weft.plan.sizes import Shape

ALL = [(name, 1) for name, s in SCHEDULES.items() if s.folded is None]
ALL += [(name, v) for name, s in SCHEDULES.items() if s.takes_chunks for v in ((2,) if s.folded else (2, 3))]


@pytest.mark.parametrize(("schedule", "virtual"), ALL)
@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 2), (4, 8), (4, 3), (3, 7)])
def test_every_pass_happens_once(schedule: str, virtual: int, stages: int, micro: int) -> None:
    kinds = ("forward", "backward", "weight") if SCHEDULES[schedule].defers_weights else ("forward", "backward")
    if SCHEDULES[schedule].rounds * stages > micro:
        pytest.skip("fewer micro-batches than it takes")
    wanted = sorted((k, c, j) for k in kinds for c in range(virtual) for j in range(micro))
    for order in SCHEDULES[schedule].orders(stages, micro, virtual):
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


def test_zero_bubble_is_shorter_and_holds_one_more_at_most() -> None:
    assert length("zero-bubble", 4, 8) < length("1f1b", 4, 8)
    for early, late in zip(SCHEDULES["1f1b"].in_flight(4, 8), SCHEDULES["zero-bubble"].in_flight(4, 8), strict=True):
        assert early <= late <= early + 1


@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 8), (4, 24), (8, 16)])
def test_a_v_leaves_less_idle_than_zero_bubble_in_the_memory_of_1f1b(stages: int, micro: int) -> None:
    """ZB-V holds what 1F1B's first stage does, on every stage, and is idle for as long as filling the pipeline takes and no longer."""
    busy = 3 * micro
    v, dual, flat = (length(name, stages, micro, chunks) for name, chunks in (("zero-bubble-v", 2), ("dual-pipe-v", 2), ("zero-bubble", 1)))
    assert v == pytest.approx(busy + (stages - 1) / 2) and v < flat and dual < flat
    assert SCHEDULES["zero-bubble-v"].in_flight(stages, micro, 2) == (2 * stages,) * stages  # of half a stage's layers each


@pytest.mark.parametrize(("schedule", "virtual"), ALL)
@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 8), (4, 4), (4, 24), (3, 6)])
def test_forwards_in_flight_are_those_of_the_order(schedule: str, virtual: int, stages: int, micro: int) -> None:
    made = SCHEDULES[schedule]
    if made.rounds * stages > micro:
        pytest.skip("fewer micro-batches than it takes")
    frees = "weight" if made.defers_weights else "backward"
    for order, told in zip(made.orders(stages, micro, virtual), made.in_flight(stages, micro, virtual), strict=True):
        assert told == max(sum((a.kind == "forward") - (a.kind == frees) for a in order[:k]) for k in range(len(order) + 1))


def test_known_numbers_in_flight() -> None:
    assert SCHEDULES["1f1b"].in_flight(4, 8) == (4, 3, 2, 1)
    assert SCHEDULES["gpipe"].in_flight(4, 8) == (8, 8, 8, 8)
    assert SCHEDULES["1f1b-eager"].in_flight(4, 8) == (7, 5, 3, 1)
    assert SCHEDULES["interleaved"].in_flight(4, 8, 2)[0] == 11


def test_a_schedule_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins with one forward more than 1F1B is run by the simulator like any other."""
    monkeypatch.setitem(SCHEDULES, "own", Schedule("own", lambda later, stages, micro, chunks: later + 1))
    assert SCHEDULES["own"].in_flight(4, 8) == (5, 4, 3, 2)
    shape = Shape(layers=4, hidden=256, heads=4, vocab=1000, seq=128)
    setting = Setting.counted(global_batch=16, pp=4, schedule="own")
    own, plain = (simulate(sized_stack(shape, s.dtype).work(s), s, cluster("4xA100")) for s in (setting, replace(setting, schedule="1f1b")))
    assert own.seconds >= plain.seconds * 0.99 and own.memory[-1].activations == 2 * plain.memory[-1].activations


def length(schedule: str, stages: int, micro: int, virtual: int = 1) -> float:
    """Span with a forward of 1 and a backward of 2 per stage, chunks and weight gradients being parts of these."""
    how = SCHEDULES[schedule]
    return walked(how.orders(stages, micro, virtual), how.places(stages, virtual), virtual, split=how.defers_weights).seconds


def walked(made: tuple[Order, ...], places: tuple[int, ...], virtual: int, split: bool) -> Timeline:
    stages, at = len(made), {g: k for k, g in enumerate(places)}
    keys = [(a.kind, a.chunk * stages + s, a.micro) for s, order in enumerate(made) for a in order]
    index = {key: i for i, key in enumerate(keys)}
    seconds = {"forward": 1 / virtual, "backward": (1 if split else 2) / virtual, "weight": 1 / virtual}
    tasks = []
    for s, order in enumerate(made):
        for kind, chunk, j in order:
            g = chunk * stages + s
            before, behind = ((places[k] if 0 <= k < len(places) else -1) for k in (at[g] - 1, at[g] + 1))
            after = {"forward": [("forward", before, j)], "backward": [("backward", behind, j), ("forward", g, j)]}
            wanted = after.get(kind, [("backward", g, j)])
            tasks.append(Task(kind, str(s), seconds[kind], tuple(index[k] for k in wanted if k in index)))
    return run(tasks)


def test_a_stream_runs_one_task_at_a_time() -> None:
    line = run([Task("a", "x", 2), Task("b", "x", 1), Task("c", "y", 1, after=(0,)), Task("d", "x", 1, after=(2,))])
    assert line.start == (0, 2, 2, 3)
    assert line.seconds == 4
    assert line.busy("x") == 4


def test_a_circle_is_refused() -> None:
    with pytest.raises(PlanError, match="the tasks of the step form a cycle") as caught:
        run([Task("first", "x", 1, after=(1,)), Task("second", "y", 1, after=(0,))])
    assert "first, second" in str(caught.value)


def test_the_trace_opens_in_a_viewer() -> None:
    made = json.loads(json.dumps(run([Task("a", "x", 2e-3, cause="forward"), Task("b", "y", 1e-3, (0,))]).chrome()))
    spans = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [("a", 0, 2000), ("b", 2000, 1000)]
    assert {e["args"]["name"] for e in made["traceEvents"] if e["ph"] == "M"} == {"step", "x", "y"}
