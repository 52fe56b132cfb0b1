"""Random programs x layouts x schedules, judged by the interpreter. What differs is reduced to the first wrong step and
printed as a script that repeats it."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft import interp
from weft.autodiff import vjp
from weft.core.errors import NotDifferentiable, WeftError
from weft.core.program import Program
from weft.testing.groups import check_groups
from weft.testing.programs import Sample, random_program
from weft.testing.same import MeaningChanged, check_statically, check_values, close
from weft.testing.schedules import Step, propose

Tensors = dict[str, torch.Tensor]
STEPS = 10  # verb calls tried per program
EVERY_GRADIENT = 4  # one program in so many is differentiated too
EVERY_FIELD = 2


@dataclass(frozen=True)
class Focus:
    """What a run looks at more closely; nothing means everything."""

    ops: Sequence[str] = ()
    verbs: Sequence[str] | None = None
    motifs: Sequence[str] | None = None
    gradients: int = EVERY_GRADIENT


EVERYTHING = Focus()


@dataclass
class Tally:
    """What a run did and found."""

    tried: int = 0
    programs: int = 0
    applied: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    gradients: int = 0
    exact: int = 0
    scripts: list[str] = field(default_factory=list)

    @property
    def mismatches(self) -> int:
        return len(self.scripts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "programs": self.programs,
            "applied": dict(sorted(self.applied.items())),
            "refused": sum(self.refused.values()),
            "mismatches": self.mismatches,
            "gradients": self.gradients,
            "exact": self.exact,
            "refused_by": dict(sorted(self.refused.items())),
            "ops": dict(sorted(self.ops.items())),
        }


@dataclass(frozen=True)
class Trail:
    """A program, the calls that went through, and the program after each."""

    sample: Sample
    steps: tuple[Step, ...] = ()
    programs: tuple[Program, ...] = ()

    @property
    def last(self) -> Program:
        return self.programs[-1] if self.programs else self.sample.program

    def then(self, step: Step, p: Program) -> Trail:
        return Trail(self.sample, (*self.steps, step), (*self.programs, p))


class StepFailed(Exception):
    """A verb neither gave a program nor refused."""

    def __init__(self, trail: Trail, step: Step) -> None:
        super().__init__(f"{step} fails after {len(trail.steps)} steps")
        self.step = step


def fuzz(
    programs: int, seed: int, focus: Focus = EVERYTHING, *, tell: Callable[[int], None] | None = None, stop_at: int | None = None
) -> Tally:
    """Runs so many programs; every failure becomes a script in the tally."""
    tally = Tally()
    for index in range(programs):
        tally.tried += 1
        one_program(tally, seed, index, focus)
        if tell is not None:
            tell(index + 1)
        if stop_at is not None and tally.mismatches >= stop_at:
            break
    return tally


def one_program(tally: Tally, seed: int, index: int, focus: Focus = EVERYTHING) -> None:
    name = f"weft {seed} {index}"
    rng = random.Random(name)
    trail: Trail | None = None
    try:
        trail = Trail(random_program(rng, focus.ops, focus.motifs))
        for _ in range(STEPS):
            trail = _one_step(trail, rng, focus, tally)
        tally.programs += 1
        tally.ops.update({n.op.name for p in (trail.sample.program, trail.last) for n in p.nodes})
        check_trail(trail, index, focus, tally)
    except Exception as e:  # whatever it is, it is a finding
        tally.scripts.append(script(trail, e, name))


def _one_step(trail: Trail, rng: random.Random, focus: Focus, tally: Tally) -> Trail:
    """The trail with one more call, if one is found, is not refused and changes something."""
    step = propose(trail.last, rng, focus.verbs)
    if step is None:
        return trail
    try:
        after = step.apply(trail.last)
    except WeftError:
        tally.refused[step.verb] += 1
        return trail
    except Exception as e:
        raise StepFailed(trail, step) from e
    if after.text == trail.last.text:
        return trail
    tally.applied[step.verb] += 1
    return trail.then(step, after)


# -- the judgement -----------------------------------------------------------------------------------------------------------------


def check_trail(trail: Trail, index: int, focus: Focus, tally: Tally) -> None:
    before, after, inputs = trail.sample.program, trail.last, trail.sample.inputs()
    check_statically(before, after)
    check_values(interp.run_global(before, inputs), after, inputs)
    check_groups(after, inputs)
    if index % EVERY_FIELD == 0:
        tally.exact += check_exact(before, after)
    if focus.gradients and index % focus.gradients == 0:
        tally.gradients += check_gradient(before, after, inputs)


def check_exact(before: Program, after: Program) -> bool:
    """Over a prime field, where nothing is rounded; False where some op is no polynomial."""
    if not all(_is_polynomial(p) for p in (before, after)):
        return False
    gen = torch.Generator().manual_seed(1)
    inputs = {name: torch.randint(0, interp.PRIME, n.shape, generator=gen) for name, n in before.input_names.items()}
    expected, got = interp.run_global(before, inputs, prime=interp.PRIME), interp.run(after, inputs, prime=interp.PRIME)
    for name, value in got.items():
        if not torch.equal(value, expected[name]):
            raise MeaningChanged(f"output {name} differs over the field")
    return True


def _is_polynomial(p: Program) -> bool:
    def fits(n: Any) -> bool:
        floats = all(t.dtype == torch.float64 and all(getattr(place, "op", "sum") == "sum" for _, place in t.layout.partials) for t in n.types)
        return floats and (n.op.is_input or n.op.is_item or n.op.field is not None)

    return all(fits(n) for n in p.nodes)


def check_gradient(before: Program, after: Program, inputs: Tensors) -> bool:
    """The vjp of the scheduled program, rank by rank, against torch's gradient of the unscheduled one; False where there is none: torch
    has none of some of its own backward ops, which weft differentiates as they are written in other ops."""
    if any(n.op.vjp is None and n.op.written is not None for n in before.nodes):
        return False
    wrt = [n for n, node in after.input_names.items() if node.dtype.is_floating_point]
    outs = [(name, n) for name, n in after.outputs if n.dtype.is_floating_point]
    if not wrt or not outs:
        return False
    try:
        back = vjp(after, wrt)
    except NotDifferentiable:
        return False
    gen = torch.Generator().manual_seed(2)
    cts = {name: torch.randn(n.shape, generator=gen, dtype=torch.float64) for name, n in outs}
    wanted = torch_gradient(before, inputs, wrt, cts)
    got = interp.run(back, {**inputs, **{f"ct.{k}": v for k, v in cts.items()}}, tolerance=1e-7)
    for name in wrt:
        if not close(got[f"d.{name}"], wanted[name], 1e-7):
            raise MeaningChanged(f"the gradient of {name} differs\nneeded {wanted[name]}\nfound  {got[f'd.{name}']}\n{back}")
    return True


def torch_gradient(p: Program, inputs: Tensors, wrt: Sequence[str], cts: Tensors) -> Tensors:
    leaves = {k: v.clone().requires_grad_(k in wrt) for k, v in inputs.items()}
    outs = interp.run_global(p, leaves)
    pairs = [(outs[k], ct) for k, ct in cts.items() if outs[k].requires_grad]
    if not pairs:
        return {k: torch.zeros_like(inputs[k]) for k in wrt}
    grads = torch.autograd.grad([y for y, _ in pairs], [leaves[k] for k in wrt], [ct for _, ct in pairs], allow_unused=True)
    return {k: torch.zeros_like(inputs[k]) if g is None else g for k, g in zip(wrt, grads, strict=True)}


# -- a script for what differs -----------------------------------------------------------------------------------------------------


def check_all(before: Program, after: Program, inputs: Tensors) -> None:
    """Everything a run may check of two programs."""
    check_statically(before, after)
    check_values(interp.run_global(before, inputs), after, inputs)
    check_groups(after, inputs)
    check_exact(before, after)
    check_gradient(before, after, inputs)


def first_wrong(trail: Trail) -> Trail:
    """The trail up to the first program that is wrong."""
    inputs = trail.sample.inputs()
    for k, p in enumerate((trail.sample.program, *trail.programs)):
        try:
            check_all(trail.sample.program, p, inputs)
        except Exception:
            return Trail(trail.sample, trail.steps[:k], trail.programs[:k])
    return trail


def script(trail: Trail | None, error: Exception, name: str) -> str:
    """Code that runs into the same error; `name` is what the program was drawn from."""
    if trail is None:
        return NO_PROGRAM.format(name=name, why=_comment(error))
    steps = [*first_wrong(trail).steps, *([error.step] if isinstance(error, StepFailed) else [])]
    text, calls = trail.sample.program.text, "\n".join(map(str, steps))
    return SCRIPT.format(name=name, why=_comment(error), text=text, seed=trail.sample.seed, kinds=trail.sample.kinds, steps=calls)


def _comment(error: Exception) -> str:
    text = str(error) if isinstance(error, MeaningChanged) else "".join(traceback.format_exception(error))
    lines = text.splitlines()
    shown = lines if len(lines) < 40 else [*lines[:20], "...", *lines[-20:]]
    return "\n".join(f"# {line}" for line in shown)


SCRIPT = '''# {name}
{why}
from weft.core.text import parse
from weft.schedule import *  # noqa: F403
from weft.testing.fuzz import check_all
from weft.testing.values import draw_inputs

p = before = parse("""
{text}
""")
inputs = draw_inputs(p, seed={seed}, kinds={kinds!r})
{steps}
print(p)
check_all(before, p, inputs)
'''

NO_PROGRAM = """# {name}: no program came of it
{why}
import random

from weft.testing.programs import random_program

print(random_program(random.Random({name!r})).program)
"""
