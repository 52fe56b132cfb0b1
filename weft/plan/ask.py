"""`weft.plan(model, loss, optimizer, batch, cluster)`: the search of `weft plan`, asked for in Python."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.cluster.here import here
from weft.core.errors import PlanError
from weft.frontend.catalog import Workload
from weft.frontend.source import at_hand, hugging_face, named_example
from weft.plan.plan import Bound, Plan
from weft.plan.planner import Infeasible, Request, Say, make_plan
from weft.plan.space import Limits, bytes_of
from weft.plan.spec import Spec

Loss = Callable[[Any, Any], Tensor]
PINS = {"sp": "sequence_parallel", "async_tp": "overlap_tp", "gather_once": "keep_gathered", "dp": "copies", "micro": "micro_batches"}
_count = itertools.count(1)


def plan(
    model: str | nn.Module | Any,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = 0,
    cluster: str | None = None,
    *,
    seq: int = 0,
    objective: str = "time",
    noise: float = 0.0,
    memory: str | float | None = None,
    max_tp: int = 0,
    fixed: str | Spec = "",
    pins: Sequence[str] = (),
    own: Mapping[str, Any] | None = None,
    fastest: bool = False,
    imbalance: float = 1.0,
    runnable: bool | None = None,
    progress: Say = lambda _: None,
) -> Plan:
    """Find the best plan of a training step on a cluster, with what is predicted of it.

    Args:
        model: A module, on the meta device or not, a Hugging Face config, the name of a model weft knows, or "FILE.py:FUNCTION".
        loss: Of a module, as for `parallelize`.
        optimizer: Of a module, as for `parallelize`.
        batch: Of a module one global batch, as for `parallelize`; else how many samples a step has (0: weft chooses).
        cluster: As `weft plan` takes it, "8x8xH100". Default: this machine, and only plans that `parallelize` can run.
        seq: Sequence length of a model by name.
        objective: "time", "memory", "cost" or "goodput".
        noise: Gradient noise scale in samples (`step.noise.scale`), for goodput.
        memory: Memory of a device that may be used, such as "70GB".
        max_tp: Largest tensor-parallel degree to consider.
        fixed: Decisions that are made already, "tp4,zero1".
        pins: Layouts of parameters, such as "layers.*.mlp.w1=tp:S(1)".
        own: A plan for torch's `parallelize_module` to compare with.
        fastest: Take the fastest prediction even if a simpler plan is equal within the prediction error.
        imbalance: Picks of the busiest rank of ep over those of an average one, in a model with experts.
        runnable: Whether to consider only what `parallelize` can run. Default: where `cluster` is this machine.
        progress: Called with a line of text while planning goes on.

    Returns:
        The plan: print it, `.save(path)`, `.export("torchtitan")`, `.explain()`, or pass it to `parallelize`.

    Raises:
        PlanError: Nothing fits; the message says what would.
    """
    name, samples, bound = _known(model, loss, optimizer, batch, seq)
    place = cluster or _here()
    spec = fixed if isinstance(fixed, Spec) else Spec.parse(f"{fixed},?")
    limits = Limits(max_tp, bytes_of(memory) if memory else 0.0, _fixed(spec))
    limits = limits.runnable() if (cluster is None if runnable is None else runnable) else limits
    request = Request(name, place, samples, seq if isinstance(model, str) else 0, objective, limits, fastest, imbalance=imbalance)
    made = Ask((*spec.pins, *pins), own, noise).plan(request, progress)
    if isinstance(made, Infeasible):
        raise PlanError(f"no plan of {name} fits on {place}", needed="a plan that fits", found=made.reason, try_=made.change or None)
    return replace(made, bound=bound)


@dataclass(frozen=True)
class Ask:
    """What is asked next to the request: layouts of tensors, a user's own plan to compare with, a noise scale."""

    pins: Sequence[str] = ()
    own: Mapping[str, Any] | None = None
    noise: float = 0.0

    def plan(self, request: Request, progress: Say) -> Plan | Infeasible:
        made = self._alone(request, progress)
        if self.own is None or not isinstance(made, Plan):
            return made
        from weft.plan.tensors import with_baseline

        return with_baseline(made, request, "dtensor", self.own, progress)

    def _alone(self, request: Request, progress: Say) -> Plan | Infeasible:
        if request.objective == "goodput":
            from weft.plan.goodput import plan_goodput

            return plan_goodput(request, self.noise, progress)
        if self.pins:
            from weft.plan.pins import parse_pin
            from weft.plan.tensors import plan_pinned

            return plan_pinned(request, [parse_pin(p) for p in self.pins], progress)
        return make_plan(request, progress)


def _here() -> str:
    """The processes at hand."""
    from torch import distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "0"))
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return here(world or (torch.accelerator.device_count() if device.type != "cpu" else 1), device).text


def _fixed(spec: Spec) -> dict[str, str]:
    """The decisions of a spec that are not open, as limits name them."""
    from weft.plan.spec import DECIDED

    fixed = {PINS.get(name, name): getattr(spec, name) for name in DECIDED if name not in spec.open}
    usual = {"recompute": fixed.get("recompute") or "none", "virtual": max(1, fixed.get("virtual", 1)), "micro_batches": spec.micro_batches}
    return {name: str(usual.get(name, value)).lower() for name, value in fixed.items()}


def _known(model: Any, loss: Loss | None, optimizer: Any, batch: Any, seq: int) -> tuple[str, int, Bound | None]:
    """The name the planner finds the model by, the samples of a step where they are said, and what `Plan.parallelize` takes."""
    if isinstance(model, str):
        return model, _samples(batch), None
    kind = f"module:{type(model).__name__}:{next(_count)}"
    if not isinstance(model, nn.Module) or (loss is None and isinstance(batch, int)):
        if not hasattr(model, "config") and not hasattr(model, "model_type"):
            needed = "a module with loss= and batch=, a config of Hugging Face's, a name, or FILE.py:FUNCTION"
            raise PlanError("this model cannot be planned", needed=needed, found=type(model).__name__)
        return at_hand(kind, lambda **how: hugging_face(_like(model, how), **how, seq=seq or None)), _samples(batch), None
    if loss is None or isinstance(batch, int):
        raise PlanError(f"{type(model).__name__} cannot be planned", needed="loss=, a function loss(model, batch), and batch=, such a batch", found="none")
    own_loss, fields, size = named_example(loss, batch, kind)
    return (
        at_hand(kind, lambda **how: Workload(kind, {}, _like(model, how), own_loss, fields, size)),
        size,
        Bound(model, loss, optimizer, batch),
    )


def _samples(batch: Any) -> int:
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
        raise PlanError("this is not a number of samples", needed="batch=N of a model by name, or 0 for weft to choose", found=repr(type(batch).__name__))
    return batch


def _like(model: Any, how: Mapping[str, Any]) -> Any:
    """A module without its values, in another number type; what is no module stays."""
    if not isinstance(model, nn.Module):
        return model
    dtype = how.get("dtype")
    memo: dict[int, Any] = {}
    for x in (*model.parameters(), *model.buffers()):
        kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
        new = torch.empty_like(x, device="meta", dtype=kind)
        memo[id(x)] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
    return copy.deepcopy(model, memo)
