"""What plain torch makes of a case, and whether another run made the same: the judge of `weft bench wild`.

A case is trained by torch alone, in float64 where the model allows it, and a run must equal it within 1e-9. Where the model itself rounds to
less, or its values hang on rounding, the bound is what torch's own values do when its parameters are moved by one rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 5
LIMIT = 1e-9  # relative, in float64
FLOOR = 1e-3  # a smaller loss is compared as if it were this
SIZE = 0.1  # and a tensor of smaller values: Adam makes 1e-11 of a gradient that is zero but for rounding
MOVED = 3  # runs of torch with moved parameters
MARGIN = 10.0  # times what they differ by
ULPS = 4.0  # roundings of a value itself
SEED = 1234


@dataclasses.dataclass
class Case:
    """One training, fresh from its maker."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: list[Any]
    optimizer: torch.optim.Optimizer
    after: Callable[[int, torch.optim.Optimizer, nn.Module], Any] | None = None


@dataclasses.dataclass
class Run:
    """What came of a training: every loss, and the model's tensors after it."""

    losses: list[float]
    state: dict[str, Tensor]


@dataclasses.dataclass
class Truth:
    """Torch's own run, in which precision it was made, and how far rounding alone moves it."""

    make: Callable[[], Any]
    run: Run
    double: bool
    rounding: float
    updates: float = 0.0  # of the optimizer, where it rounds to less than the model
    random: bool = False  # torch draws numbers on which the values depend
    note: str = ""
    _spread: Run | None = None

    def spread(self) -> Run:
        """By how much each value of torch's own run moves when the parameters are moved by one rounding."""
        if self._spread is None:
            self._spread = _spread(self)
        return self._spread

    def bound(self, spread: float, size: float) -> float:
        """What rounding explains of a difference in values of this size: some roundings of the value itself, and what comes from earlier ones."""
        return MARGIN * spread + ULPS * self.rounding * size


def seed(number: int) -> None:
    """The same numbers from torch, Python and numpy."""
    import numpy

    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


# -- a case -------------------------------------------------------------------------------------------------------------------------


def build(make: Callable[[], Any], double: bool) -> Case:
    """A fresh case. With `double`, its parameters, buffers and the numbers of its batches are in float64."""
    seed(SEED)
    model, loss, batches, *rest = make()
    batches = [batches] if isinstance(batches, (Mapping, Tensor)) else list(islice(batches, STEPS))
    if double:
        model, batches = model.double(), [in_double(b) for b in batches]
    optimizer, after = _optimizer(model, *rest)
    return Case(model, loss, batches, optimizer, after)


def _optimizer(model: nn.Module, given: Any = None, after: Any = None) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW unless given: an optimizer, or what makes one of the model or of its parameters; `after` is a hook or a scheduler."""
    if given is not None and not isinstance(given, (torch.optim.Optimizer, tuple)):
        given = _made(given, model)
    if isinstance(given, tuple):
        given, after = given
    if given is None:
        given = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    if hasattr(after, "step"):
        return given, lambda i, optimizer, model, scheduler=after: scheduler.step()
    return given, after


def _made(factory: Any, model: nn.Module) -> Any:
    if isinstance(factory, type):
        return factory(model.parameters())
    try:
        return factory(model)
    except (TypeError, AttributeError):
        return factory(model.parameters())


def in_double(value: Any) -> Any:
    """A batch with its floating tensors in float64: nested dicts, lists, tuples, dataclasses and what else is like them."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(in_double, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_double, value))
    if isinstance(value, (dict, UserDict)):
        out = copy.copy(value)
        for key in list(value):
            out[key] = in_double(value[key])
        return out
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(out, field.name, in_double(getattr(value, field.name)))
        return out
    return value


def train(case: Case, step: Callable[[Any], Any], losses: list[float]) -> None:
    """Five steps, a batch each; the losses are told as they come. Draws of Python and torch begin anew at every step."""
    for i in range(STEPS):
        seed(SEED + 1 + i)
        losses.append(float(step(case.batches[i % len(case.batches)])))
        if case.after is not None:
            case.after(i, case.optimizer, case.model)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    params = {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    return params | {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}


# -- torch's own run ----------------------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes in what precision values are made, and whether numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.draws = False
        self.coarse: list[float] = []  # roundings below float32
        self.updates = 0.0  # what the optimizer's step rounds below float32, all of it adding up as chance has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.dtypes.add(x.dtype)
                self.coarse += [torch.finfo(x.dtype).eps] if x.dtype.itemsize < 4 else []
        return out


def judged(make: Callable[[], Any]) -> Truth:
    """Torch's own run of a case. What torch raises is raised."""
    seen, note = _seen(make, double=False), ""
    double = not seen.dtypes & {torch.bfloat16, torch.float16}
    if double:
        try:
            seen = _seen(make, double=True)
            run = torch_run(make, double=True)
        except Exception as e:  # the model names float32 somewhere
            double, note = False, f"in float32: torch in float64 says {type(e).__name__}: {str(e).splitlines()[0][:100] if str(e) else ''}"
    else:
        note = "in the model's own precision, which is below float32"
    if not double:
        seen, run = _seen(make, double=False), torch_run(make, double=False)
    rounding = max((torch.finfo(d).eps for d in seen.dtypes), default=torch.finfo(torch.float64).eps)
    if double and rounding > LIMIT:
        note = f"the model rounds to {rounding:.0e} itself"
    truth = Truth(make, run, double, rounding, seen.updates, note=note)
    truth.random = seen.draws and not _same(run, torch_run(make, double, draw=77))
    return truth


def _seen(make: Callable[[], Any], double: bool) -> Seen:
    """One loss and its gradient, looked at; where a model cannot be looked at, it is taken to round as float32 does and to draw."""
    case, seen = build(make, double), Seen()
    try:
        seed(SEED)
        with seen:
            case.loss(case.model, case.batches[0]).backward()
        with Seen() as updates:
            case.optimizer.step()
        seen.updates = math.hypot(*updates.coarse)
    except Exception:
        case = build(make, double)
        case.loss(case.model, case.batches[0]).backward()
        seen.dtypes |= {torch.float32}
        seen.draws = True
    return seen


def torch_run(make: Callable[[], Any], double: bool, move: Callable[[nn.Module], None] | None = None, draw: int = 0, updates: float = 0.0) -> Run:
    """The user's own loss, backward and `optimizer.step`; what the latter adds to parameters moved by so much of it, if told."""
    case, losses, signs = build(make, double), [], torch.Generator().manual_seed(0)
    if move is not None:
        move(case.model)

    def step(batch: Any) -> Tensor:
        if draw:
            torch.manual_seed(draw)
        case.optimizer.zero_grad()
        loss = case.loss(case.model, batch)
        loss.backward()
        before = [p.detach().clone() for p in case.model.parameters()] if updates else []
        case.optimizer.step()
        with torch.no_grad():
            for p, old in zip(case.model.parameters(), before, strict=False):
                p.add_((p - old) * updates * (torch.randint(0, 2, p.shape, generator=signs) * 2 - 1))
        return loss.detach()

    train(case, step, losses)
    return Run(losses, state_of(case.model))


def _same(a: Run, b: Run) -> bool:
    """Equal to the last bit, NaN with NaN."""
    losses = torch.equal(torch.tensor(a.losses).nan_to_num(), torch.tensor(b.losses).nan_to_num())
    return losses and all(torch.equal(x.nan_to_num(), b.state[n].nan_to_num()) for n, x in a.state.items())


def _spread(truth: Truth) -> Run:
    losses, state = [0.0] * STEPS, {n: torch.zeros(()) for n in truth.run.state}
    for k in range(MOVED):
        run = torch_run(truth.make, truth.double, lambda model, k=k: _move(model, truth.rounding, k), updates=truth.updates)
        losses = [max(s, _apart(a, b)) for s, a, b in zip(losses, truth.run.losses, run.losses, strict=True)]
        state = {n: torch.maximum(s, _largest(truth.run.state[n], run.state[n])) for n, s in state.items()}
    return Run(losses, state)


def _move(model: nn.Module, by: float, k: int) -> None:
    draw = torch.Generator().manual_seed(k)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.mul_(1 + by * (torch.randint(0, 2, p.shape, generator=draw) * 2 - 1).to(p.dtype))


# -- the verdict --------------------------------------------------------------------------------------------------------------------


def miss(truth: Truth, run: Run) -> str | None:
    """What differs from torch's own run, in words, or None. A run that was refused midway has fewer losses and no state."""
    if truth.random:
        return None
    return next(_misses(truth, run), None)


def _misses(truth: Truth, run: Run) -> Iterable[str]:
    for i, (want, got) in enumerate(zip(truth.run.losses, run.losses, strict=False)):
        apart, size = _apart(want, got), max(abs(want), FLOOR)
        if apart > LIMIT * size and not apart <= truth.bound(truth.spread().losses[i], size):
            yield f"loss of step {i}: torch {want:.12g}, weft {got:.12g}"
    for name in truth.run.state if run.state else ():
        want, got = truth.run.state[name], run.state.get(name)
        if got is None or got.shape != want.shape or got.dtype != want.dtype:
            yield f"{name}: torch {list(want.shape)} {want.dtype}, weft {None if got is None else (list(got.shape), got.dtype)}"
            continue
        apart = _largest(want, got).item()
        size = max(_largest(want, torch.zeros_like(want)).nan_to_num(posinf=0).item(), SIZE)
        if apart > LIMIT * size and not apart <= (bound := truth.bound(truth.spread().state[name].item(), size)):
            yield f"{name}: differs by {apart:.3g}, where rounding explains {bound:.1g}"


def told_nothing(truth: Truth) -> str:
    """Why nothing could be compared, if so: torch draws numbers, or rounding alone moves its losses."""
    if truth.random:
        return "not compared: torch draws random numbers"
    if truth._spread is not None:
        off = max(s / max(abs(w), FLOOR) for s, w in zip(truth._spread.losses, truth.run.losses, strict=True))
        if off > max(1e-4, 10 * truth.rounding, truth.updates):
            return f"not compared: torch's own losses move by {off:.1g} under rounding"
    return ""


def _apart(a: float, b: float) -> float:
    """The difference; equal infinities and two NaN are equal, anything else with one of them is infinitely far."""
    if a == b or (a != a and b != b):
        return 0.0
    return abs(a - b) if abs(a - b) < float("inf") else float("inf")


def _largest(want: Tensor, got: Tensor) -> Tensor:
    """The largest difference of two tensors, as `_apart` has it."""
    if not want.numel():
        return torch.zeros((), dtype=torch.float64)
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = want.to(wide), got.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=float("inf"))).max()
