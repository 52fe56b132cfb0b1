"""A plan file may come from anywhere: it is read, told, drawn and run, or refused in words; nothing else, and never for long."""

from __future__ import annotations

import json
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.plan.mutations import mutations
from weft.api.planfile import follow
from weft.core.errors import ClusterError, PlanError, WeftError
from weft.cost.timeline import Seen, Task, Timeline
from weft.plan.plan import Plan, load, parse
from weft.plan.planner import Request, make_plan
from weft.plan.setting import Setting
from weft.plan.space import Limits
from weft.plan.summaries import differences, rows
from weft.record.run import Run
from weft.report import facts_of, html
from weft.report.facts import perfetto
from weft.report.page import page

PROGRAM = """program step(dp=2)
  %param.w = input()        f32[4, 4] dp:R
  %batch.x = input()        f32[8, 4] dp:S(0)
  %0 = matmul(%batch.x, %param.w)   f32[8, 4] dp:S(0)
  return out=%0
"""
LAYOUTS = {
    "mesh": {"dp": 2}, "inputs": {"batch.x": {"dp": "S(0)"}}, "again": [], "rules": [], "moves": None, "micro_batches": 1, "beside": ["dp"],
    "program": PROGRAM, "units": [2],
}  # fmt: skip


def planned() -> Plan:
    limits = Limits(0, 0.0, {"pp": "2", "schedule": "1f1b"})
    made = make_plan(Request("gpt2", "1x4xA100", 16, 128, "time", limits))
    assert isinstance(made, Plan)
    return made


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    """A plan made from sizes, in stages."""
    return planned().data()


@pytest.fixture(scope="module")
def captured(stack: dict[str, Any]) -> dict[str, Any]:
    """A plan of a captured program."""
    given = stack["given"] | {"global_batch": 8}
    return stack | {"model": "own.py:make", "cluster": "1x2xA100", "seq": 0, "spec": {"dp": 2}, "given": given, "layouts": LAYOUTS}


@pytest.fixture(scope="module")
def shared(stack: dict[str, Any]) -> dict[str, Any]:
    """A plan of unequal shares."""
    kinds = (("A100", 1, 14), ("V100", 2, 5))
    shares = [[kind, n, much, 1] for kind, n, much in kinds]
    return stack | {"cluster": "1x1xA100+1x2xV100", "spec": {"dp": 3, "shares": shares}, "given": stack["given"] | {"global_batch": 24}}


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """No verdict on speed: only that it comes to an end."""

    def late(*_: Any) -> None:
        raise AssertionError("no answer")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def told(path: Path) -> None:
    plan = load(path)
    assert list(rows(plan)) and html(plan)
    assert parse(plan.text()) == plan
    list(differences(plan, parse(planned_text())))


def planned_text() -> str:
    if not _text:
        _text.append(planned().text())
    return _text[0]


_text: list[str] = []
USES: dict[str, Callable[[Path], Any]] = {"told": told, "run": lambda path: follow(str(path))}


@pytest.mark.parametrize("kind", ["stack", "captured", "shared"])
def test_a_changed_plan_is_taken_or_refused_in_words(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    data, path = request.getfixturevalue(kind), tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    told(path)
    taken = {"yes": 0, "no": 0}
    for what, text in mutations(data, 11, 250):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        for name, use in USES.items():
            with within(20), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    use(path)
                    taken["yes"] += 1
                except WeftError as error:
                    taken["no"] += len(str(error)) < 20_000
                except Exception as error:
                    raise AssertionError(f"{name} after {what}: {type(error).__name__}: {error}") from error
    assert taken["no"] > 200 and taken["yes"] > 5, taken


ODD = {
    "shares of a thousand million copies": ("shared", {"spec": {"dp": 3, "shares": [["A100", 10**9, 1, 1]]}}, "shares"),
    "shares of nothing": ("shared", {"spec": {"shares": [{}]}}, r"shares\[0\]"), "shares of a number": ("shared", {"spec": {"shares": [5]}}, r"shares\[0\]"),
    "shares of other samples": ("shared", {"spec": {"dp": 3, "shares": [["A", 2, 1, 1]]}}, "do not go with"),
    "pins that are numbers": ("stack", {"limits": {"max_tp": 0, "memory_gb": 0.0, "pins": {"tp": 4}}}, "limits.pins.tp"),
    "pins of nothing known": ("stack", {"limits": {"max_tp": 0, "memory_gb": 0.0, "pins": {"no": "4"}}}, "cannot pin"),
    "layouts that are numbers": ("stack", {"limits": {"max_tp": 0, "memory_gb": 0.0, "pins": {}, "layouts": [5]}}, r"limits.layouts\[0\]"),
    "baselines in words": ("stack", {"baselines_ms": {"zero1": "fast"}}, "baselines_ms.zero1"), "a sequence too long": ("stack", {"seq": 2**63}, "seq"),
    "again, a number": ("captured", {"layouts": LAYOUTS | {"again": 5}}, "layouts.again"),
    "rules, numbers": ("captured", {"layouts": LAYOUTS | {"rules": [5]}}, r"layouts.rules\[0\]"),
    "beside, null": ("captured", {"layouts": LAYOUTS | {"beside": None}}, "layouts.beside"),
    "an axis that is a pattern": ("captured", {"layouts": LAYOUTS | {"mesh": {"(a+)+": 2}}}, "a name in layouts.mesh"),
    "a program alone": ("captured", {"layouts": {"program": PROGRAM}}, "layouts of plan cannot be read"),
    "stages of nothing": ("stack", {"spec": {"pp": 2, "stages": [[], []]}}, "a stage of nothing"),
    "layers of other stages": ("stack", {"spec": {"pp": 2, "stages": [[["layer", "none", 4]]] * 3}}, "2 words with stage:"),
    "a step of no time": ("stack", {"predicted": {"step_ms": 0, "tokens_per_s": 1, "mfu": 0, "memory_gb": 1, "gap": 0}}, "predicted.step_ms"),
    "causes in words": ("stack", {"predicted": {"step_ms": 1, "tokens_per_s": 1, "mfu": 0, "memory_gb": 1, "gap": 0, "causes_ms": []}}, "predicted.causes_ms"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_named(name: str, request: pytest.FixtureRequest) -> None:
    kind, change, says = ODD[name]
    with within(20), pytest.raises(PlanError, match=says):
        parse(json.dumps(request.getfixturevalue(kind) | change))


NOPE = {"dp": 2, "pp": 2, "micro": 2, "stages": [[["nope", "none", 3]], [["nope", "none", 3]]]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seq": 0}, "not one of gpt2"), ({"spec": NOPE}, "no part named 'nope'"),
        ({"cluster": "1x1xA100"}, "does not fill the cluster"), ({"cluster": "9999999x8xH100"}, "no cluster is that large"), ({"model": "nope"}, "nope"),
        ({"cluster": "a" * 3000}, "this is no cluster"), ({"layouts": LAYOUTS}, "does not go with"),
    ],
)  # fmt: skip
def test_a_page_of_a_plan_that_cannot_be_is_refused(stack: dict[str, Any], change: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(stack | change))
    with within(60), pytest.raises(WeftError, match=says):
        page(facts_of(tmp_path / "plan.json", explained=False))


def test_a_page_of_sizes_beyond_this_machine_is_drawn(stack: dict[str, Any], tmp_path: Path) -> None:
    """What is drawn is a program, which needs no batch in memory."""
    (tmp_path / "plan.json").write_text(json.dumps(stack | {"seq": 2**31}))
    with within(60):
        assert facts_of(tmp_path / "plan.json", explained=False).tensors


def test_a_captured_plan_on_another_cluster_is_refused(captured: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for change in ({"cluster": "1x1xV100"}, {"layouts": LAYOUTS | {"mesh": {"tp": 2}}}):
        path.write_text(json.dumps(captured | change))
        with pytest.raises(PlanError, match="does not go with its cluster"):
            facts_of(path, explained=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pp": 99999999999}, "pp of at most 4,096"), ({"dp": 10**30}, "dp of at most 1,048,576"), ({"micro_batch": 10**20}, "micro batch of at most"),
        ({"global_batch": 10**12}, "global batch of at most"), ({"dp": 2**20, "tp": 2, "global_batch": 2**20}, "1,048,576 devices"),
        ({"pp": 4096, "virtual": 2, "schedule": "interleaved"}, "4,096 chunks"), ({"dp": 0}, "dp of 1 or more"),
    ],
)  # fmt: skip
def test_numbers_that_no_cluster_has_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Setting.counted(**given).check()


def test_a_step_of_too_many_passes_is_not_walked() -> None:
    from weft.cluster.spec import cluster
    from weft.plan.planner import captured_stack
    from weft.plan.simulate import simulate

    setting = Setting.counted(global_batch=1 << 31)
    with within(20), pytest.raises(PlanError, match="too many passes to be walked one by one") as e:
        simulate(captured_stack("gpt2", "bf16")[0].work(setting), setting, cluster("1x1xA100"))
    assert "--micro-batch 2 or more" in str(e.value)


@pytest.mark.parametrize("text", ["9" * 1000 + "xA100", "99999999x99999999xH100", "1x8xA100+" * 300 + "1x8xA100"])
def test_clusters_beyond_all_bounds_are_refused(text: str) -> None:
    from weft.cluster.spec import cluster

    with within(20), pytest.raises(ClusterError):
        cluster(text)


def recorded() -> dict[str, Any]:
    """A run as training writes it."""
    line = Timeline((Task("matmul", "compute", 1e-3, (), "compute"), Task("all_reduce", "dp", 1e-3, (), "dp")), (0.0, 1e-3), (1e-3, 2e-3))
    seen = Seen(2.0, 0.5, {"compute": 1.0, "dp": 1.0}, line, [(0.0, 1e6), (1e-3, 2e6)])
    rounds = [["leaf", 4, 0], ["node", 3, 6]]
    return Run(
        name="net", kind="training", plan="dp2,zero1", program="ab12", machine="cpu", cluster="1x2xA100", mesh={"dp": 2}, unit="tokens", per_step=64.0,
        flops=1e9, peak_flops=1e12, steps={"ms": [3.0, 2.0, 2.0, 2.0], "wait_ms": [0.0] * 4, "loss": [1.0, 0.9, 0.8, 0.7]}, predicted=seen, measured=seen,
        tensors=[{"name": "w", "role": "param", "shape": [4, 4], "local": [2, 4], "dtype": "f32", "places": {"dp": "S(0)"}}],
        communication=[{"kind": "all_reduce", "axis": "dp", "count": 1, "bytes": 64}], verbs=[{"step": "place on dp 2", "same": True}],
        alternatives=[{"plan": "tp2", "step_ms": 3.0, "memory_gb": 0.5, "causes_ms": {"tp": 1.0}, "reason": ""}], says=["as predicted"],
        schedule={"samples": 2, "vertices": 7, "edges": 6, "batches": 2, "least": 2, "policy": "depth", "rounds": rounds},
    ).data()  # fmt: skip


def test_a_changed_run_is_drawn_or_refused_in_words(tmp_path: Path) -> None:
    data, path = recorded(), tmp_path / "run.json"
    path.write_text(json.dumps(data))
    assert page(facts_of(path))
    taken = {"yes": 0, "no": 0}
    for what, text in mutations(data, 5, 300):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with within(20):
            try:
                facts = facts_of(path)
                page(facts), perfetto(facts)
                taken["yes"] += 1
            except WeftError:
                taken["no"] += 1
            except Exception as error:
                raise AssertionError(f"after {what}: {type(error).__name__}: {error}") from error
    assert taken["no"] > 150 and taken["yes"] > 20, taken
