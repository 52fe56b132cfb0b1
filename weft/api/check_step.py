"""Torch as the judge of a captured step: before the first one, its loss, gradients and update against those of the user's own module.

The forward and backward pass are compared on the example. The update is given torch's gradients, since an optimizer such as Adam turns
the rounding of a gradient that is all but zero into a full step. What rounding alone may do is learnt by running the program again
from inputs moved in their last digit. What would take too long is compared on fewer samples; what is left out is reported.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.api import check_cost, eager
from weft.api.check_blocks import by_blocks, filled
from weft.api.deviation import Deviation, Values, allowed, compared, moved, refusal, run, scaled
from weft.api.eager import How, Loss, Moment
from weft.core.errors import CaptureError, PlanError
from weft.core.names import original
from weft.core.node import Node, constant, user_level
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.batches import changed
from weft.frontend.capture.joint import substituted
from weft.frontend.capture.micro import batch_dims_of, micro_batch
from weft.ops.source import input_node


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
        where = self.tensor.removesuffix(", run by itself,")
        text = f"{self.compared} tensors equal torch's on {self.samples}; largest difference {self.worst:.1e} in {where}; took {self.seconds:.1f} s"
        return "; ".join([text, *self.left])


@dataclass(frozen=True)
class Case:
    """The user's step: module, loss and optimizer, what else it does, and the random numbers it was captured at."""

    model: nn.Module
    loss: Loss
    optimizer: Any
    how: How
    device: torch.device
    moment: Moment = field(default_factory=Moment.now)
    word: ClassVar[str] = "step"
    learns: ClassVar[bool] = True

    def capture(self, example: Any) -> Captured:
        """The step on another example."""
        how = self.how
        deviations = {"accumulate": how.parts, "allow_micro_mean": True} if how.parts > 1 else {}
        return capture(self.model, example, self.loss, self.optimizer, clip=how.clip, precision=how.precision, **deviations)

    def stepped(self, captured: Captured, pair: eager.Pair, batch: Any) -> dict[str, Tensor | None]:
        """What plain torch makes of the batch with the module and optimizer given, by the names of the program."""
        return eager.stepped(captured, self.model, pair, self.loss, batch, self.how, self.device)

    # -- its forward and backward pass by themselves ------------------------------------------------------------------------------

    def batch(self, captured: Captured, example: Any) -> Any:
        """What the program takes for an example."""
        return example

    def results(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """What torch computes, by the names that the program has for it."""
        return {"loss": self.loss(model, batch)}

    def cotangents(self, captured: Captured) -> dict[str, str]:
        """The results, and the inputs that say which gradients they begin with; none is a number's own, 1."""
        return {"loss": ""}

    def seeds(self, captured: Captured) -> list[tuple[Node, Node]]:
        """The same as nodes."""
        loss = captured.program.output_names["loss"]
        return [(loss, constant(1.0, loss.dtype, loss.mesh))]

    def gradients(self, captured: Captured) -> Mapping[str, Node] | None:
        """Of parameters, as the program has them; None where Python ran in the backward pass."""
        return None if captured.joint else captured.gradients

    def updates(self, captured: Captured) -> dict[str, Deviation]:
        """How far some updates are from torch's."""
        from weft.api.check_updates import updates

        return updates(captured, self)


def check_against_torch(captured: Captured, case: Case, example: Any) -> Verdict:
    """Compare on as many samples of the example as time and memory allow; another value than torch's is refused."""
    start = time.perf_counter()
    example = filled(example, case.device)
    samples = _samples(example)
    parts = check_cost.parts(captured, samples, case.device, case.how.parts)
    if parts == 0:
        return _by_blocks(captured, case, example, samples, start)
    if parts == 1:
        return _check_samples(captured, case, example, "the example", start)
    fewer = micro_batch(example, 0, parts)
    return _check_samples(case.capture(fewer), case, fewer, _fewer(samples, parts), start)


def _samples(example: Any) -> int:
    """How many samples an example has; 1 where that cannot be told, so that it is not sharded."""
    try:
        return batch_dims_of(example)[0]
    except PlanError:
        return 1


def _fewer(samples: int, parts: int) -> str:
    return "the example" if parts == 1 else f"{samples // parts} of the example's {samples} samples"


def _by_blocks(captured: Captured, case: Case, example: Any, samples: int, start: float) -> Verdict:
    """Block by block, where the full step cannot be run; a warning says what was compared and what was not."""
    full = replace(case, how=replace(case.how, parts=1))
    found = by_blocks(captured if case.how.parts == 1 else full.capture(example), full, example, samples)
    deviations = found.apart | {describe_tensor(n): x for n, x in case.updates(captured).items()}
    worst = max(deviations, key=lambda n: deviations[n], default="")
    if worst and deviations[worst].allowed > 1:
        raise refusal(case, f"{worst} {deviations[worst].words}")
    farthest = max(deviations, key=lambda n: deviations[n].relative, default="")
    blocks = f"{found.kinds} of {found.blocks} modules, which the others repeat, on {_fewer(samples, found.parts)}"
    blocks = blocks if found.apart else "updates alone"
    clip = ("gradient clipping was not compared",) if case.how.clip else ()
    left = (f"module by module because {check_cost.reason(captured, case.device)}", *found.left, *clip)
    by = deviations[farthest].relative if farthest else 0.0
    verdict = Verdict(len(deviations), blocks, by, farthest, time.perf_counter() - start, left)
    warnings.warn(f"{type(case.model).__name__} was compared with torch in parts: {verdict}", stacklevel=user_level())
    return verdict


def check_current_state(captured: Captured, case: Case, batch: Any, given: Values) -> Verdict:
    """Compare a step from a state reached meanwhile: parameters, buffers and the optimizer's tensors, in full, by name."""
    return _check_samples(captured, case, batch, "the batch", time.perf_counter(), given)


def _check_samples(captured: Captured, case: Case, example: Any, samples: str, start: float, given: Values | None = None) -> Verdict:
    sides = Sides(captured, case, case.batch(captured, example), given)
    first = None
    for whose in (eager.copied, eager.itself):
        want = sides.torch(whose)
        if want is None:
            continue
        deviations = sides.deviations(want)
        if max(deviations.values()).allowed > 1 and (again := sides.torch(whose, sides.allowed.digit)) is not None:
            deviations = sides.deviations(want, again)
        name = max(deviations, key=lambda n: deviations[n])
        if deviations[name].allowed <= 1:
            farthest = max(deviations, key=lambda n: deviations[n].relative)
            return Verdict(len(deviations), samples, deviations[farthest].relative, farthest, time.perf_counter() - start)
        first = first or (name, deviations[name])
    if first is None:
        raise CaptureError(
            f"torch itself cannot run this {case.word}", needed=f"a {case.word} that plain torch runs on the example", found=sides.trouble,
            try_="run the model and the loss, backward() and optimizer.step() by themselves; check=False leaves the comparison out",
        )  # fmt: skip
    raise refusal(case, f"{describe_tensor(first[0])} {first[1].words}{_place(sides)}")


class Sides:
    """A step in torch and the same in the captured program."""

    def __init__(self, captured: Captured, case: Case, example: Any, given: Values | None = None) -> None:
        self.captured, self.case, self.example = captured, case, example
        self.given = given or {}  # state of another moment than the module's and the optimizer's
        self.device = case.device
        self.trouble = ""
        self.allowed = allowed(captured.program)

    # -- torch -----------------------------------------------------------------------------------------------------------------

    def torch(self, whose: Any, digit: float = 0.0) -> dict[str, Tensor | None] | None:
        """The step in plain torch, from parameters and a batch moved by a digit where one is given; None where it does not run, and `trouble` says why."""
        case, given, example = self.case, self.given, self.example
        if digit:
            given = {**given, **{n: moved(x, digit, n) for n, x in self.inputs().items() if n in self.captured.parameters}}
            example = changed(example, lambda n, x: moved(x.detach(), digit, n) if isinstance(x, Tensor) else x)
        try:
            with eager.unnoticed(case.moment, self.device), whose(case.model, case.optimizer, self.device) as pair:
                eager.load(self.captured, case.model, pair, given)
                return case.stepped(self.captured, pair, example)
        except Exception as e:  # whatever the user's own code raises
            self.trouble = f"{type(e).__name__}: {e}"
            return None

    # -- the program -------------------------------------------------------------------------------------------------------------

    def inputs(self) -> dict[str, Tensor]:
        """What the program starts from: the module, the optimizer as it is now, the example."""
        values = self.captured.inputs(self.example)
        values |= {n: x for n, x in {**self.given, "seed": torch.tensor(0)}.items() if n in values}
        return {n: x.detach().to(self.device) for n, x in values.items()}

    def deviations(self, want: Mapping[str, Tensor | None], again: Mapping[str, Tensor | None] | None = None) -> dict[str, Deviation]:
        """By name, how far the program is from torch; `again` is torch's answer to inputs moved by a digit."""
        given = self.inputs()
        out: dict[str, Deviation] = {}
        for program, more in self._programs(want):
            tolerance = self.allowed.update if more else self.allowed.tolerance
            out |= compared(program, {**given, **more}, want, self.device, tolerance, self.allowed.digit, {} if more else again or {})
        return out | self._untouched(want, given)

    def values(self) -> list[Tensor]:
        """Every float the program computes in its forward and backward pass."""
        program = self._programs({})[0][0] if not self.captured.gradients else _program(self.captured.program, self._first())
        nodes = [n for n in program.nodes if n.args and len(n.types) == 1 and n.dtype.is_floating_point and n.ndim]
        every = program.with_outputs([(f"v{i}", n) for i, n in enumerate(nodes)], "", state=())
        given = self.inputs()
        return list(run(every, {n: given[n] for n in every.input_names}, self.device).values())

    def _first(self) -> dict[str, Node]:
        """Outputs of the forward and backward pass."""
        p = self.captured.program
        own = {n: x for n, x in p.outputs if n == "loss" or n.startswith(("buffer.", "d."))}
        return own | {f"d.{n}": g for n, g in self.captured.gradients.items()}

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
        like = self.captured.parameters
        given = {f"d.{n}": torch.zeros_like(like[n], device=self.device) if (g := want[f"d.{n}"]) is None else g for n in free}
        return [(_program(p, first), {}), *([(_program(p, made), given)] if made else [])]

    def _untouched(self, want: Mapping[str, Tensor | None], given: Values) -> dict[str, Deviation]:
        """What the program leaves as it is, torch must too; and torch may have no gradient that it lacks."""
        names = eager.names_of(self.captured, self.case.model)
        resized = self.captured.reads.resized(self.case.model) if self.captured.reads is not None else {}
        tensors = (*self.case.model.parameters(), *self.case.model.buffers())
        written = self.captured.program.output_names
        same = {n: scaled(given.get(n, x.detach()).to(self.device), w, self.allowed.tolerance) for n, x in zip(names, tensors, strict=True)
                if n not in written and (w := want[n]) is not None and original(n.removeprefix("buffer.")) not in resized}  # fmt: skip
        known = {f"d.{n}" for n in self.captured.gradients} or {n.replace("out.grads.", "d.") for n in written if n.startswith("out.grads.")}
        grads = {n: g for n, g in want.items() if n.startswith(("d.", "out.grads."))}
        lost = {n: Deviation(math.inf, math.inf) for n, g in grads.items() if known and n.replace("out.grads.", "d.") not in known and _moves(g)}
        return same | lost


def _program(like: Program, outputs: Mapping[str, Node]) -> Program:
    from weft.plan.split import program_of

    return eager.stood_in(program_of(like.name, outputs, new_program(like.name, like.mesh, like.inputs, dict(like.outputs)), {}))


def _moves(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.count_nonzero())


# -- the words -----------------------------------------------------------------------------------------------------------------------------


def describe_tensor(name: str) -> str:
    """A tensor in words."""
    kind, _, rest = name.partition(".")
    if name.startswith(("d.param.", "out.grads.")):
        return f"the gradient of {original(name.removeprefix('d.param.').removeprefix('out.grads.'))}"
    words = {"loss": "the loss", "grad_norm": "the norm of the gradient", "step": "the count of steps", "out": "the result"}
    kinds = {"param": f"{rest} after the update", "buffer": f"the buffer {rest}", "out": f"the result {rest}"}
    return words.get(name) or kinds.get(kind, f"{kind} of {rest}")


def _place(sides: Sides) -> str:
    from weft.api.first_divergence import first_divergence

    where = first_divergence(sides)
    return f"; {where}" if where else ""
