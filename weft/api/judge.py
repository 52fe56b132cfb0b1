"""Torch as the judge of a captured step: before the first one, its loss, gradients and update against those of the user's own module.

The forward and backward pass are compared on the example. The update is given torch's gradients, since an optimizer such as Adam turns
the rounding of a gradient that is all but zero into a whole step. What rounding alone may do is learnt by running the program again
from inputs moved in their last digit. What would take too long is compared on fewer samples; what is left out is told.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft import interp
from weft.api import afford, eager
from weft.api.eager import How, Loss, Moment
from weft.core.errors import CaptureError, PlanError, WeftError
from weft.core.node import Node
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured
from weft.frontend.capture.joint import substituted
from weft.frontend.capture.micro import cut_of, micro_batch
from weft.ops.source import input_node

TOLERANCE = {8: 1e-9, 4: 2e-5, 2: 2e-2}  # of a tensor's largest value, by the bytes of the least exact float of the program
UPDATE = {8: 1e-11, 4: 1e-6, 2: 1e-2}  # the same of an update from equal gradients, which treats each element alone
ROUNDING = 32  # times what moving the last digit of the inputs does

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """How many tensors were compared with torch's, on how many samples, and the largest difference in parts of a tensor's largest value."""

    compared: int
    samples: str
    worst: float
    tensor: str
    seconds: float
    left: tuple[str, ...] = ()  # what was not compared

    def __str__(self) -> str:
        if not self.compared:
            return f"not compared with torch: {'; '.join(self.left)}"
        told = f"{self.compared} tensors equal torch's on {self.samples}, the farthest ({self.tensor}) to {self.worst:.1e}, {self.seconds:.1f} s"
        return "; ".join([told, *self.left])


@dataclass(frozen=True)
class Case:
    """The user's step: module, loss and optimizer, what else it does, and the random numbers it was captured at."""

    model: nn.Module
    loss: Loss
    optimizer: Any
    how: How
    device: torch.device
    moment: Moment = field(default_factory=Moment.now)

    @property
    def bare(self) -> nn.Module:
        found: nn.Module = getattr(self.model, "_orig_mod", self.model)
        return found


def judge(captured: Captured, case: Case, example: Any, capture: Callable[[Any], Captured]) -> Verdict:
    """Compare on as many samples of the example as time and memory allow; another value than torch's is refused."""
    start = time.perf_counter()
    samples = _samples(example)
    parts = afford.parts(captured, samples, case.device, case.how.parts)
    if parts == 0:
        return _not(captured, case, start)
    if parts == 1:
        return _judged(captured, case, example, "the example", start)
    fewer = micro_batch(example, 0, parts)
    return _judged(capture(fewer), case, fewer, f"{samples // parts} of the example's {samples} samples", start)


def _samples(example: Any) -> int:
    """How many samples an example has; 1 where that cannot be told, so that it is not cut."""
    try:
        return cut_of(example)[0]
    except PlanError:
        return 1


def _not(captured: Captured, case: Case, start: float) -> Verdict:
    verdict = Verdict(0, "", 0.0, "", time.perf_counter() - start, (afford.reason(captured, case.device),))
    warnings.warn(f"{type(case.bare).__name__} is {verdict}", stacklevel=2)
    return verdict


def judge_now(captured: Captured, case: Case, batch: Any, given: Values) -> Verdict:
    """Compare a step from a state reached meanwhile: parameters, buffers and the optimizer's tensors, whole, by name."""
    return _judged(captured, case, batch, "the batch", time.perf_counter(), given)


def _judged(captured: Captured, case: Case, example: Any, told: str, start: float, given: Values | None = None) -> Verdict:
    sides = Sides(captured, case, example, given)
    first = None
    for whose in (eager.copied, eager.itself):
        want = sides.torch(whose)
        if want is None:
            continue
        apart = sides.apart(want)
        name = max(apart, key=lambda n: apart[n])
        if apart[name].allowed <= 1:
            farthest = max(apart, key=lambda n: apart[n].relative)
            return Verdict(len(apart), told, apart[farthest].relative, farthest, time.perf_counter() - start)
        first = first or (name, apart[name].relative)
    if first is None:
        raise CaptureError(
            "torch itself cannot run this step", needed="a step that plain torch runs on the example", found=sides.trouble,
            try_="run loss(model, example).backward() and optimizer.step() by themselves; check=False leaves the comparison out",
        )  # fmt: skip
    raise _refusal(case, *first, sides)


class Apart(NamedTuple):
    """A difference in parts of what is allowed; and, beyond rounding, in parts of the tensor's largest value."""

    allowed: float
    relative: float


class Sides:
    """A step in torch and the same in the captured program."""

    def __init__(self, captured: Captured, case: Case, example: Any, given: Values | None = None) -> None:
        self.captured, self.case, self.example = captured, case, example
        self.given = given or {}  # state of another moment than the module's and the optimizer's
        self.device = case.device
        self.trouble = ""
        floats = _floats(captured.program)
        exact = min((d.itemsize for d in floats), default=8)
        self.digit = max((torch.finfo(d).eps for d in floats), default=0.0)
        self.tolerance, self.update = TOLERANCE[exact], UPDATE[exact]

    # -- torch -----------------------------------------------------------------------------------------------------------------

    def torch(self, whose: Any) -> dict[str, Tensor | None] | None:
        """The step in plain torch; None where it does not run, and `trouble` says why."""
        case = self.case
        try:
            with eager.unnoticed(case.moment, self.device), whose(case.bare, case.optimizer, self.device) as pair:
                eager.load(self.captured, case.bare, pair, self.given)
                return eager.stepped(self.captured, case.bare, pair, case.loss, self.example, case.how, self.device)
        except Exception as e:  # whatever the user's own code raises
            self.trouble = f"{type(e).__name__}: {e}"
            return None

    # -- the program -------------------------------------------------------------------------------------------------------------

    def inputs(self) -> dict[str, Tensor]:
        """What the program starts from: the module, the optimizer as it is now, the example."""
        values = self.captured.inputs(self.example)
        values |= {n: x for n, x in {**self.given, "seed": torch.tensor(0)}.items() if n in values}
        return {n: x.detach().to(self.device) for n, x in values.items()}

    def apart(self, want: Mapping[str, Tensor | None]) -> dict[str, Apart]:
        """By name, how far the program is from torch."""
        given = self.inputs()
        out: dict[str, Apart] = {}
        for program, more in self._programs(want):
            allowed = self.update if more else self.tolerance
            both = {**given, **more}
            start = {n: both[n] for n in program.input_names}
            found = self._run(program, start)
            expected = {n: _wanted(want, n, found[n]) for n in found if n in want}
            base = {n: _scaled(found[n], x, allowed) for n, x in expected.items()}
            if not all(x.allowed <= 1 for x in base.values()):
                moved_ = self._run(program, {n: moved(x, self.digit) for n, x in start.items()})
                base = {n: _scaled(found[n], x, allowed, distance(moved_[n], found[n])) for n, x in expected.items()}
            out |= base
        return out | self._untouched(want, given)

    def values(self) -> list[Tensor]:
        """Every float the program computes in its forward and backward pass."""
        program = self._programs({})[0][0] if not self.captured.gradients else _program(self.captured.program, self._first())
        nodes = [n for n in program.nodes if n.args and len(n.types) == 1 and n.dtype.is_floating_point and n.ndim]
        every = program.with_outputs([(f"v{i}", n) for i, n in enumerate(nodes)], "", state=())
        given = self.inputs()
        return list(self._run(every, {n: given[n] for n in every.input_names}).values())

    def _first(self) -> dict[str, Node]:
        """Outputs of the forward and backward pass."""
        p = self.captured.program
        own = {n: x for n, x in p.outputs if n == "loss" or n.startswith(("buffer.", "d."))}
        return own | {f"d.{n}": g for n, g in self.captured.gradients.items()}

    def _run(self, program: Program, given: Values) -> dict[str, Tensor]:
        with torch.no_grad(), torch.device(self.device):
            return interp.run_global(program, given)

    def _programs(self, want: Mapping[str, Tensor | None]) -> list[tuple[Program, Values]]:
        """Forward and backward, then the update from torch's gradients; one program of it all where no gradient is known."""
        p, grads = self.captured.program, self.captured.gradients
        free = {n: g for n, g in grads.items() if g.args}
        if not free:
            return [(eager.stood_in(p), {})]
        first = self._first()
        last = {n: x for n, x in p.outputs if n not in first}
        swap = {g: input_node(f"d.{n}", g.type) for n, g in reversed(free.items())}
        made = dict(zip(last, substituted(list(last.values()), swap), strict=True)) if last else {}  # type: ignore[arg-type]
        given = {f"d.{n}": _wanted(want, f"d.{n}", None, self.captured.parameters[n].to(self.device)) for n in free}
        return [(_program(p, first), {}), *([(_program(p, made), given)] if made else [])]

    def _untouched(self, want: Mapping[str, Tensor | None], given: Values) -> dict[str, Apart]:
        """What the program leaves as it is, torch must too; and torch may have no gradient that it lacks."""
        names = eager.names_of(self.captured, self.case.bare)
        tensors = (*self.case.bare.parameters(), *self.case.bare.buffers())
        written = self.captured.program.output_names
        same = {n: _scaled(given.get(n, x.detach()).to(self.device), w, self.tolerance) for n, x in zip(names, tensors, strict=True)
                if n not in written and (w := want[n]) is not None}  # fmt: skip
        known = self.captured.gradients
        lost = {n: Apart(math.inf, math.inf) for n, g in want.items() if known and n.startswith("d.") and n[2:] not in known and _moves(g)}
        return same | lost


def _program(like: Program, outputs: Mapping[str, Node]) -> Program:
    from weft.plan.split import program_of

    return eager.stood_in(program_of(like.name, outputs, new_program(like.name, like.mesh, like.inputs, dict(like.outputs)), {}))


def _floats(program: Program) -> set[torch.dtype]:
    return {t.dtype for n in program.nodes for t in n.types if t.dtype.is_floating_point}


def _wanted(want: Mapping[str, Tensor | None], name: str, found: Tensor | None, like: Tensor | None = None) -> Tensor:
    """Torch's tensor; zeros where it has none, as of a parameter that no gradient reaches."""
    value = want[name]
    return torch.zeros_like(found if found is not None else like) if value is None else value  # type: ignore[arg-type]


def _moves(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.count_nonzero())


# -- how far ---------------------------------------------------------------------------------------------------------------------------


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; equal infinities and NaNs are no difference, other ones are infinite."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    if not a.is_floating_point() and not b.is_floating_point():
        return 0.0 if torch.equal(a.to(b.dtype), b) else math.inf
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(wide), b.to(wide)
    by = size(a - b, 0.0)
    if math.isfinite(by):
        return by
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(apart.nan_to_num(math.inf, math.inf).max())


def size(x: Tensor, least: float = 1e-30) -> float:
    """The largest value, by its absolute value; of those that are finite, where the tensor is to be measured by it."""
    if not x.numel():
        return 1.0
    low, high = torch.aminmax(x)
    most = max(-float(low), float(high), key=lambda v: (v != v, v))
    if least and not math.isfinite(most):
        most = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return most if not least else max(most, least)


def _scaled(found: Tensor, want: Tensor, tolerance: float, rounding: float = 0.0) -> Apart:
    """How far, where as much is allowed besides as rounding does."""
    by, whole = distance(found, want), size(want)
    slack = ROUNDING * rounding
    return Apart(by / (tolerance * whole + slack), max(by - slack, 0.0) / whole) if by else Apart(0.0, 0.0)


def moved(x: Tensor, digit: float = 0.0) -> Tensor:
    """The tensor with each element moved by about its last digit, or by that of a coarser float, the same way on every rank."""
    if not x.is_floating_point() or not x.ndim:
        return x
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1
    return x * (1 + signs.to(x.device, x.dtype) * max(digit, torch.finfo(x.dtype).eps))


# -- the words -----------------------------------------------------------------------------------------------------------------------------


def _refusal(case: Case, name: str, by: float, sides: Sides) -> WeftError:
    how_far = "is torch's in no digit" if by == math.inf else f"differs by {by:.2g} of its largest value"
    return CaptureError(
        f"the captured step of {type(case.bare).__name__} does not compute what torch does",
        needed="torch's own loss, gradients and update, but for rounding",
        found=f"{told(name)} {how_far}{_place(sides)}",
        try_="report this model: weft must refuse it or be right; check=False trains it as it was captured",
    )


def told(name: str) -> str:
    """A tensor in words."""
    kind, _, rest = name.partition(".")
    if name.startswith("d.param."):
        return f"the gradient of {name.removeprefix('d.param.')}"
    words = {"loss": "the loss", "grad_norm": "the norm of the gradient", "step": "the count of steps"}
    return words.get(name) or {"param": f"{rest} after the update", "buffer": f"the buffer {rest}"}.get(kind, f"{kind} of {rest}")


def _place(sides: Sides) -> str:
    from weft.api.stray import first_stray

    where = first_stray(sides)
    return f"; {where}" if where else ""
