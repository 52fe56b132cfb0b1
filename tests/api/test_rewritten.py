"""Plans whose step proved rules rewrote: parallelize makes the same moves on the user's step, and training equals one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from bench._graph.planner import record
from bench._graph.search import ALL, Candidate
from bench._graph.task import CapturedTask
from bench._graph.timing import PlacedProgram
from tests.api.ranks import on_ranks
from weft.api import planfile, pool
from weft.api.parallelize import parallelize
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.layout import Mesh, Placement, S
from weft.core.program import Program
from weft.frontend.capture import capture
from weft.plan import substitute
from weft.plan.layouts import OnCluster, choose
from weft.plan.plan import Plan
from weft.plan.rewritten import PRODUCTS, Move, as_products
from weft.plan.space import Limits
from weft.plan.substitute import value_rules
from weft.rewrite.engine import same_erased

STEPS, BATCH = 3, 8


@dataclass(frozen=True)
class Case:
    """A model, a rule, and how some inputs are held; none is a step whose products are written as such and no more."""

    model: str
    changes: Mapping[str, Any]
    rule: str
    mesh: Mesh
    held: Mapping[str, Mapping[str, Placement]]

    def task(self) -> CapturedTask:
        return CapturedTask(self.model, cluster(f"{self.mesh.ranks}xx86-2"), BATCH, "fp32", "adam", tuple(self.changes.items()))

    def plan(self) -> Plan:
        """The rule used where it first can be, and layouts chosen for that step."""
        task = self.task()
        step, moves = as_products(task.captured()), tuple[Move, ...]()
        if self.rule:
            move, step = next(found for found in step.neighbours(value_rules(), 40) if str(found[0]) == self.rule)
            moves = (move,)
        pins = {n: [places] for n in step.program.input_names for word, places in self.held.items() if n.startswith(word)}
        made = choose(step.program, self.mesh, OnCluster(task.cluster, self.mesh), pins=pins, work=1e7)
        placed = PlacedProgram(made.program, task.cluster, made.again)
        rules = (self.rule,) if moves else ("matmul_as_einsum",)
        way = Candidate("weft", placed, ALL, 1, 1e-3, 1e6, None, rules, {}, moves)
        return record(task, Limits(), way, {}, {}, "time")

    def work(self) -> Any:
        torch.manual_seed(0)
        made = zoo.load(self.model, device="cpu", **self.changes)
        made.model.double()
        return made

    def batch(self, seed: int, size: int = BATCH) -> dict[str, torch.Tensor]:
        return self.work().example(size, seed=seed)


TABLES = {"tables": (200, 200, 200, 200), "width": 4, "bag": 3}
XDL = Case(
    "xdl", TABLES | {"top": (8, 2)}, "stack_columns", Mesh(dp=2, tp=2),
    {"param.tables": {"tp": S(1)}, "exp_avg.tables": {"tp": S(1)}, "exp_avg_sq.tables": {"tp": S(1)}, "batch.clicked": {"dp": S(0)}},
)  # fmt: skip
DLRM = Case("dlrm", TABLES | {"dense": 13, "bottom": (8, 4), "top": (16, 1)}, "", Mesh(dp=2), {"batch.dense": {"dp": S(0)}})
UNO = Case(
    "candle-uno", {"encoder": (16, 16), "head": (16, 16), "cell": 9, "descriptors": 13, "fingerprints": 11}, "sum_of_concat~ x2", Mesh(dp=2),
    {"batch.cell": {"dp": S(0)}, "batch.growth": {"dp": S(0)}},
)  # fmt: skip
INSIDE = {"tp": S(1, within=8)}  # of the joint layer's weight, the share of every part that is joined
FUSION = Case(
    "fusion", {"encoders": 3, "inputs": 6, "hidden": (8,), "joint": 4, "classes": 3}, "stack_columns", Mesh(dp=2, tp=2),
    {f"{kind}.joint.weight": INSIDE for kind in ("param", "exp_avg", "exp_avg_sq")} | {"batch.labels": {"dp": S(0)}},
)  # fmt: skip
CASES = [XDL, DLRM, UNO, FUSION, replace(FUSION, model="mixture")]


def was_rewritten(program: Program, case: Case) -> bool:
    """Whether the program has what the rule of the case makes."""
    if case.model == DLRM.model:
        return not any(n.attr("equation") in PRODUCTS for n in program.find_all("einsum"))
    return any(n.ndim == 3 or case.model == UNO.model and n.attr("dim") == 0 for n in program.find_all("concat"))


def torch_losses(case: Case, **settings: Any) -> list[float]:
    work, out = case.work(), []
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-3, **settings)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = work.loss(work.model, case.batch(i))
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def made(case: Case, plan: str, settings: Mapping[str, Any] = {}, **more: Any) -> Any:
    work = case.work()
    return parallelize(work.model, work.loss, torch.optim.AdamW(work.model.parameters(), lr=1e-3, **settings), case.batch(0), plan, **more)


def losses(step: Any, case: Case) -> list[float]:
    return [step(case.batch(i)).item() for i in range(STEPS)]


@pytest.mark.parametrize("case", CASES, ids=[c.model for c in CASES])
def test_the_moves_are_made_on_the_users_step_and_training_equals_torch(case: Case, tmp_path: Path) -> None:
    case.plan().save(tmp_path / "plan.json")
    want, inputs = torch_losses(case), planfile.load(tmp_path / "plan.json").layouts["inputs"]

    def job(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            step = made(case, str(tmp_path / "plan.json"))
        torch.testing.assert_close(losses(step, case), want, rtol=1e-8, atol=1e-8)
        assert was_rewritten(step.program, case) and not was_rewritten(step.captured.program, case)
        names = [m.split(" ")[0] for m in step.moves]
        assert names == ["matmul_as_einsum", *[case.rule.partition("~")[0]] * bool(case.rule)]
        assert step.record(None, progress=False).run().rules == names
        assert rank or step.report.derived == step.report.outputs, "all of it by proof"
        held = {n: {a: str(p) for a, p in x.layout.placements.items() if str(p) != "R"} for n, x in step.program.input_names.items()}
        assert {n: places for n, places in held.items() if places} == inputs
        assert step.check(case.batch(9)) < 1e-8, "against the model's own step"

    on_ranks(case.mesh.ranks, job, tmp_path)


def saved(plan: Plan, path: Path, **layouts: Any) -> str:
    """The plan with some of its layouts changed; None takes one away."""
    kept = {k: v for k, v in {**plan.layouts, **layouts}.items() if v is not None}
    replace(plan, layouts=kept).save(path)
    return str(path)


def test_state_is_the_models_and_moves_between_plans(tmp_path: Path) -> None:
    DLRM.plan().save(tmp_path / "plan.json")
    want = torch_losses(DLRM)

    def job(rank: int) -> None:
        step, plain = made(DLRM, str(tmp_path / "plan.json")), made(DLRM, "dp2")
        assert set(step.state_names) == set(plain.state_names)
        first = step(DLRM.batch(0)).item()
        store = step.checkpoints(str(tmp_path / "kept"))
        store.save()
        plain.checkpoints(str(tmp_path / "kept")).restore()
        got = [first, *(plain(DLRM.batch(i)).item() for i in range(1, STEPS))]
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)

    on_ranks(2, job, tmp_path)


def test_a_move_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    plan, work = UNO.plan(), UNO.work()
    odd = [*plan.layouts["moves"], {"rule": "stack_columns", "op": "concat", "at": 40, "way": 0, "places": 1, "forward": False}]
    captured = capture(work.model, UNO.batch(0), work.loss, torch.optim.AdamW(work.model.parameters()))
    said = r"(?s)the rules of the plan .*odd.json cannot be used: move 2 of 2 cannot be made: stack_columns cannot be used.*concat 40 of Uno"
    with pytest.raises(PlanError, match=said):
        planfile.follow(saved(plan, tmp_path / "odd.json", moves=odd)).step(captured)
    with pytest.raises(PlanError, match=r"(?s)does not say where rules rewrote its step.*sum_of_concat~ x2.*plan again"):
        planfile.follow(saved(plan, tmp_path / "old.json", moves=None))


def test_a_step_of_another_batch_and_optimizer_is_rewritten_too(tmp_path: Path) -> None:
    XDL.plan().save(tmp_path / "plan.json")
    work = XDL.work()
    found = planfile.follow(str(tmp_path / "plan.json"))
    weights = list(work.model.parameters())
    for size, optimizer in ((16, torch.optim.AdamW(weights, betas=(0.5, 0.6))), (8, torch.optim.SGD(weights))):
        captured = capture(work.model, XDL.batch(0, size), work.loss, optimizer)
        step, moves = found.step(captured)
        assert was_rewritten(step.program, XDL) and moves[1].startswith("stack_columns at concat 0 of the forward pass")
        placed = found.placed(step, ())
        assert placed is not None and was_rewritten(placed, XDL)
        assert same_erased(step.program, placed)


def test_steps_whose_loss_is_no_number_are_skipped(tmp_path: Path) -> None:
    UNO.plan().save(tmp_path / "plan.json")
    odd = {k: x / 0 if k == "cell" else x for k, x in UNO.batch(0).items()}
    want = torch_losses(UNO)

    def job(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            step = made(UNO, str(tmp_path / "plan.json"), on_nan="skip")
        step(odd)
        assert step.skipped == 1 and was_rewritten(step.program, UNO)
        torch.testing.assert_close(losses(step, UNO), want, rtol=1e-8, atol=1e-8)

    on_ranks(2, job, tmp_path)


LINES = [(XDL, "tp", {"pp": 2, "micro": 2}, "stack_columns"), (DLRM, "dp", {"micro": 2}, "matmul_as_einsum")]


@pytest.mark.parametrize(("case", "axis", "setting", "rule"), LINES, ids=["stages", "micro-batches"])
def test_micro_batches_are_rewritten_too(case: Case, axis: str, setting: dict[str, int], rule: str, tmp_path: Path) -> None:
    case = replace(case, mesh=Mesh(**{axis: 2}), held={n: p for n, p in case.held.items() if axis in p})
    plan = case.plan()
    replace(plan, setting=replace(plan.setting, **setting)).save(tmp_path / "plan.json")
    want = torch_losses(case)

    def job(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*which values end its units")
            step = made(case, str(tmp_path / "plan.json"))
        torch.testing.assert_close(losses(step, case), want, rtol=1e-8, atol=1e-8)
        assert step.plan.micro_batches == 2 and step.moves[-1].startswith(rule)
        changed = [was_rewritten(p, case) for s in step.micro_batches.pipeline.stages for p in s.phases]
        assert all(changed) if case.model == DLRM.model else any(changed)
        assert step.check(case.batch(9)) < 1e-8 and step.record(None, progress=False).run().rules[-1] == rule

    on_ranks(2 * plan.setting.dp * plan.setting.tp if setting.get("pp") else case.mesh.ranks, job, tmp_path)


def test_auto_offers_rewritten_steps_and_runs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = pool.Pool.fitting.fget  # type: ignore[attr-defined]
    rewritten_first = property(
        lambda own: sorted(fitting(own), key=lambda o: (o.plan not in own.moves, not o.plan.startswith(pool.SOLVER)))
    )
    monkeypatch.setattr(pool.Pool, "fitting", rewritten_first)
    want = torch_losses(DLRM)

    def job(rank: int) -> None:
        step = made(DLRM, "auto")
        torch.testing.assert_close(losses(step, DLRM), want, rtol=1e-8, atol=1e-8)
        assert step.decision.plan.endswith("by matmul_as_einsum") and step.decision.moves == []
        assert step.moves[0].startswith("matmul_as_einsum") and was_rewritten(step.program, DLRM)

    on_ranks(2, job, tmp_path)


def test_auto_leaves_large_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = DLRM.task().captured()
    assert len(list(substitute.promising(captured, Mesh(dp=2), cluster("2xx86-2")))) >= 1
    monkeypatch.setattr(substitute, "NODES", 2 * len(captured.program.nodes))
    assert not list(substitute.promising(captured, Mesh(dp=2), cluster("2xx86-2")))
