"""Random torch modules, judged by torch itself: one step of plain eager torch against the interpreter on the captured program, the compiled
step, and the interpreter on the ranks of simulated meshes under random plans. What differs is reduced and printed as a script."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft import interp
from weft.api import pool
from weft.api.compiled import Compiled
from weft.core.errors import CaptureError, LayoutError, NotDifferentiable, PlanError, WeftError
from weft.frontend.capture import Captured, capture
from weft.plan.spec import Spec
from weft.rewrite.check import check
from weft.testing.torch_grammar import Module, random_module

PLANS = ("dp2", "dp2,zero3", "tp2", "dp4", "tp4", "dp2,tp2", "dp2,zero1", "cp2", "tp2,sp", "dp2,cp2", "dp2,tp2,sp", "dp2,tp2,zero3", "cp2,a2a", "dp3", "tp3")
OPTIMIZERS = ("SGD(params, lr=1.0)",) * 5 + (
    "SGD(params, lr=0.5, momentum=0.9, weight_decay=0.1)", "AdamW(params, lr=0.1, eps=0.01)", "Adam(params, lr=0.1, eps=0.01, weight_decay=0.1)",
    "Adagrad(params, lr=0.1, eps=0.01)",
)  # fmt: skip
REFUSALS = (CaptureError, PlanError, LayoutError, NotDifferentiable)
SLACK = 1e-7
Values = Mapping[str, Tensor]


# -- what scripts are made of ----------------------------------------------------------------------------------------------------------


def draw(shape: Sequence[int], values: str, seed: int) -> Tensor:
    """Integers from -2 to 2, with zeros and ties, or normal ones."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=gen).double() if values == "whole" else _normal(shape, gen)


def _normal(shape: Sequence[int], gen: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=gen, dtype=torch.float64)


def indices(shape: Sequence[int], most: int, seed: int) -> Tensor:
    return torch.randint(0, most, tuple(shape), generator=torch.Generator().manual_seed(seed))


def filled(layer: nn.Module, values: str, seed: int) -> nn.Module:
    """A layer of torch's with drawn parameters."""
    layer = layer.double()
    with torch.no_grad():
        for k, p in enumerate(layer.parameters()):
            p.copy_(draw(p.shape, values, seed + k) * 0.5)
    return layer


def jittered(x: Tensor) -> Tensor:
    """Moved by about the last digit where it is no short number: what only rounding decides comes out otherwise.

    What is nearly 0 is what is left of larger numbers, and moves as they do."""
    with torch.no_grad():
        short = (x * 2**20 == (x * 2**20).round()) | ~x.isfinite()
        signs = torch.randint(0, 2, x.shape) * 2 - 1
        size = x[x.isfinite()].abs().mean().nan_to_num() if x.numel() else 0.0
        move = torch.where(short, 0.0, x.abs().clamp(min=size) * signs * 8e-16)
    return x + move


# -- one step, every way ---------------------------------------------------------------------------------------------------------------


class Mismatch(Exception):
    """A way of running a step that gives another result than torch."""


@dataclass(frozen=True)
class Case:
    """A module, its optimizer and the plans it is tried under."""

    module: Module
    optimizer: str
    plans: tuple[str, ...]

    def built(self, touch: str = "{}") -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
        names: dict[str, Any] = {
            "torch": torch, "nn": nn, "F": nn.functional, "draw": draw, "indices": indices, "filled": filled, "jittered": jittered,
        }  # fmt: skip
        exec(self.module.source(touch), names)  # the text is the grammar's own
        model = names["Model"]()
        batch = {name: eval(text, names) for name, text in self.module.batch}
        return model, batch, eval(f"torch.optim.{self.optimizer}", {**names, "params": list(model.parameters())})


@dataclass(frozen=True)
class Verdict:
    """`equal`, `refused`, `wrong`, `crash`, or `unstable`: only rounding decides what torch itself gives. Under which plan, and why."""

    status: str
    plan: str = ""
    words: str = ""
    plans_refused: int = 0


def by_torch(case: Case, touch: str = "{}") -> dict[str, Tensor]:
    """Loss, parameters and buffers after one step of plain torch."""
    model, batch, optimizer = case.built(touch)
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    tensors = {**{f"param.{n}": p for n, p in model.named_parameters()}, **{f"buffer.{n}": b for n, b in model.named_buffers()}}
    return {"loss": loss.detach(), **{n: x.detach().clone() for n, x in tensors.items()}}


def check_module(case: Case) -> Verdict:
    """What is first found to be other than torch's, or equal."""
    want = by_torch(case)
    plan, refused = "capture", 0
    try:
        model, batch, optimizer = case.built()
        captured = capture(model, batch, lambda m, b: m(**b), optimizer)
        given = captured.inputs(batch)
        plan = "interpreter"
        compare(interp.run_global(captured.program, _copied(given)), want, captured)
        plan = "compiled"
        compare(_compiled(captured, given), want, captured)
        for k, plan in enumerate(case.plans):
            refused += _under(plan, captured, given, want, checked=k == 0)
    except Mismatch as e:
        return Verdict("unstable" if _unstable(case, want) else "wrong", plan, str(e))
    except REFUSALS as e:
        return Verdict("refused", plan, e.message)
    except Exception as e:
        return Verdict("crash", plan, "".join(traceback.format_exception(e)))
    return Verdict("equal", plans_refused=refused)


def _compiled(captured: Captured, given: Values) -> Values:
    program = pool.prepare(captured, Spec.parse("dp1"))
    return Compiled(program, donate=True)(_copied(given))


def _under(plan: str, captured: Captured, given: Values, want: Values, checked: bool) -> bool:
    """Runs the step on all ranks of a simulated mesh; whether the plan is refused."""
    try:
        program = pool.prepare(captured, Spec.parse(plan))
    except REFUSALS:
        return True
    compare(interp.run(program, _copied(given), tolerance=1e-6), want, captured)
    if checked:
        report = check(captured.program, program)
        if not report.equal:
            raise Mismatch(f"the check of a right plan says {report}")
    return False


def _copied(given: Values) -> dict[str, Tensor]:
    return {n: x.clone() for n, x in given.items()}


def compare(got: Values, want: Values, captured: Captured) -> None:
    """Loss and all that the step leaves; what it does not give is as it was."""
    before = {**captured.parameters, **captured.buffers}
    for name, x in want.items():
        mine = got[name] if name in got else before.get(name)
        if mine is None:
            continue
        mine = mine.detach()
        if mine.dtype != x.dtype or mine.shape != x.shape or not _close(mine, x):
            raise Mismatch(f"{name}\nneeded {x}\nfound  {mine}")


def _close(a: Tensor, b: Tensor) -> bool:
    if not b.dtype.is_floating_point:
        return torch.equal(a, b)
    finite = b[b.isfinite()].abs()
    size = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=SLACK, atol=SLACK * size, equal_nan=True)


def _unstable(case: Case, want: Values) -> bool:
    """Whether torch's own result moves when values move in their last digit."""
    for seed in range(3):
        torch.manual_seed(seed)
        moved = by_torch(case, "jittered({})")
        if any(not _close(moved[n], x) for n, x in want.items()):
            return True
    return False


# -- many of them ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a run found."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)
    scripts: list[str] = field(default_factory=list)
    plans: int = 0
    plans_refused: int = 0

    @property
    def mismatches(self) -> int:
        return self.counts["wrong"] + self.counts["crash"]

    def as_dict(self) -> dict[str, Any]:
        counts = {k: self.counts[k] for k in ("equal", "refused", "wrong", "crash", "unstable")}
        more = {"plans": self.plans, "plans_refused": self.plans_refused, "refused_by": dict(self.words.most_common(40))}
        return {"programs": sum(self.counts.values()), **counts, "seed": self.seed, **more}


def fuzz(programs: int, seed: int, *, tell: Callable[[int], None] | None = None, stop_at: int | None = None) -> Tally:
    """So many modules that torch itself runs; every wrong one and every crash becomes a script."""
    tally = Tally(seed)
    for index in range(programs):
        name = f"weft torch {seed} {index}"
        case = random_case(name)
        found = check_module(case)
        tally.counts[found.status] += 1
        tally.plans += len(case.plans) if found.status == "equal" else 0
        tally.plans_refused += found.plans_refused
        if found.status == "refused":
            tally.words[found.words.splitlines()[0][:100]] += 1
        if found.status in ("wrong", "crash"):
            tally.scripts.append(script(*shrunk(case, found), name))
        if tell is not None:
            tell(index + 1)
        if stop_at is not None and tally.mismatches >= stop_at:
            break
    return tally


def random_case(name: str) -> Case:
    """The first case drawn from the name that torch can run."""
    rng = random.Random(name)
    while True:
        case = Case(random_module(rng), rng.choice(OPTIMIZERS), tuple(rng.sample(PLANS, 3)))
        try:
            by_torch(case)
        except Exception:  # torch refuses it: no module
            continue
        return case


# -- a script for what differs ---------------------------------------------------------------------------------------------------------

TRIES = 60


def shrunk(case: Case, found: Verdict) -> tuple[Case, Verdict]:
    """A smaller case with the same fault, under the one plan that shows it."""
    plans = (found.plan,) if found.plan in case.plans else ()
    case, left = Case(case.module, case.optimizer, plans), TRIES
    smaller = True
    while smaller and left > 0:
        smaller = False
        for other in _smaller(case):
            left -= 1
            verdict = _first_difference(other)
            if verdict is not None and (verdict.status, verdict.plan) == (found.status, found.plan):
                case, found, smaller = other, verdict, True
                break
            if left <= 0:
                break
    return case, found


def _first_difference(case: Case) -> Verdict | None:
    try:
        return check_module(case)
    except Exception:  # torch refuses what is left
        return None


def _smaller(case: Case) -> list[Case]:
    """The case without one loss, without one statement, or with one value taken for another of its shape."""
    m, found = case.module, []
    if len(m.losses) > 1:
        found += [Module(m.attributes, m.batch, m.lines, (*m.losses[:k], *m.losses[k + 1 :])) for k in range(len(m.losses))]
    shapes = {line.made.name: line.made.shape for line in m.lines}
    for k in reversed(range(len(m.lines))):
        line = m.lines[k]
        name, rest = line.made.name, (*m.lines[:k], *m.lines[k + 1 :])
        if not line.text.startswith(f"{name} = "):
            found.append(Module(m.attributes, m.batch, rest, m.losses))
            continue
        others = [r for r in line.reads if shapes.get(r) == line.made.shape or _declared(m, r) == str(line.made.shape)]
        texts = [f"{name} = {other}" for other in others] + [f"{name} = draw({line.made.shape}, 'normal', 1)"]
        for text in (t for t in texts if t != line.text):
            new = type(line)(line.made, text, tuple(r for r in line.reads if r in text))
            found.append(Module(m.attributes, m.batch, (*m.lines[:k], new, *m.lines[k + 1 :]), m.losses))
    simple = "SGD(params, lr=1.0)"
    cases = [Case(other.needed(), case.optimizer, case.plans) for other in found]
    return ([Case(m, simple, case.plans)] if case.optimizer != simple else []) + cases


def _declared(m: Module, name: str) -> str:
    text = dict(m.batch).get(name) or dict(m.attributes).get(name.removeprefix("self."), "")
    inside = text.removeprefix("nn.Parameter(")
    return inside[len("draw(") : inside.index(")") + 1] if inside.startswith("draw(") else ""


def script(case: Case, found: Verdict, name: str) -> str:
    """Code that runs into the same fault."""
    lines = found.words.splitlines()
    why = "\n".join(f"# {line}" for line in (lines if len(lines) < 40 else [*lines[:15], "...", *lines[-25:]]))
    batch = ", ".join(f"{n!r}: {text}" for n, text in case.module.batch)
    return SCRIPT.format(
        name=name, status=found.status, plan=found.plan, why=why, source=case.module.source(), batch=batch, optimizer=case.optimizer, plans=case.plans
    )


def run_script(model: Callable[[], nn.Module], batch: Callable[[], dict[str, Tensor]], optimizer: str, plans: Sequence[str]) -> None:
    """What a script ends with: the judgement of one module, raised if it is not equal."""

    class Given(Case):
        def built(self, touch: str = "{}") -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
            made = model()
            return made, batch(), eval(f"torch.optim.{optimizer}", {"torch": torch, "params": list(made.parameters())})

    verdict = check_module(Given(Module(), optimizer, tuple(plans)))
    if verdict.status != "equal":
        raise WeftError(f"{verdict.status} under {verdict.plan or 'every plan'}", found=verdict.words)


SCRIPT = '''# {name}: {status} under {plan}
{why}
import torch
import torch.nn.functional as F
from torch import nn

from weft.testing.torch_modules import draw, filled, indices, run_script


{source}

run_script(Model, lambda: {{{batch}}}, {optimizer!r}, {plans!r})
'''
