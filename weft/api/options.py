"""What `parallelize` may be told besides the plan: one object, or the same names as keyword arguments; and the device and mesh it finds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.core.errors import PlanError
from weft.plan.plan import Plan
from weft.plan.spec import NUMBERS, Spec
from weft.runtime.agree import world
from weft.runtime.hosts import own_accelerator
from weft.transform.low import LOW

ANY_PLAN = "any plan"
AnyPlan = str | Path | Spec | Plan | DeviceMesh
OnNan = Literal["raise", "skip", "ignore"]
DATA = {"dp": 0, "dp_replicate": 0, "dp_shard": 3, "fsdp": 3}  # names of data-parallel mesh dims, and the ZeRO stage they stand for


class Settings(TypedDict, total=False):
    """The fields of `Options`, as keyword arguments of `parallelize`."""

    clip: float | None
    accumulate: int
    precision: torch.dtype | str | None
    seed: int
    pins: Sequence[str]
    others: Mapping[str, Mapping[str, Any]] | None
    memory: str | float | None
    noise: bool
    weights: str | Path | None
    record: str | None
    progress: bool | None
    check: bool
    on_nan: OnNan
    deterministic: bool | Literal["any plan"]
    allow_micro_mean: bool


@dataclass(frozen=True)
class Options:
    """Settings of a training step that are no part of its plan.

    Args:
        clip: Largest global norm of the gradients.
        accumulate: Number of micro-batches whose gradients are accumulated.
        precision: Dtype of the compute; parameters keep theirs. "fp8" computes matmuls in 8-bit floats and all else in bfloat16, "fp8-block"
            with a scale for every 128 elements, "fp8-tensor" with one for every tensor.
        seed: Of dropout and of initialisation.
        pins: Layouts of parameters, such as "layers.*.mlp.w1=tp:S(1)".
        others: For `plan="auto"`: plans for torch's `parallelize_module` to compare with, by name.
        memory: For `plan="auto"`: memory that a rank may use, such as "8GB".
        noise: Measure the gradient noise scale, `step.noise.scale`.
        weights: Hugging Face folder or safetensors file for a model on the meta device.
        record: Folder to write a run to, for `weft report`.
        progress: Print tokens/s, MFU and the prediction while training. Default: while recording.
        check: Compare the captured step with torch, and the plan's program with it, before the first step.
        on_nan: If the loss is NaN or Inf: "raise", "skip" the step (`step.skipped` counts), or "ignore" it.
        deterministic: True gives the same bits on every run; "any plan" also under every plan of dp, tp and ZeRO.
        allow_micro_mean: Average over micro-batches where the loss of the full batch is not their mean (batch norm, contrastive losses).
    """

    clip: float | None = None
    accumulate: int = 1
    precision: torch.dtype | str | None = None
    seed: int = 0
    pins: Sequence[str] = ()
    others: Mapping[str, Mapping[str, Any]] | None = None
    memory: str | float | None = None
    noise: bool = False
    weights: str | Path | None = None
    record: str | None = None
    progress: bool | None = None
    check: bool = True
    on_nan: OnNan = "raise"
    deterministic: bool | Literal["any plan"] = False
    allow_micro_mean: bool = False

    @staticmethod
    def of(options: Options | None, settings: Mapping[str, Any]) -> Options:
        known = [f.name for f in fields(Options)]
        for name in settings:
            if name not in known:
                raise PlanError(f"parallelize has no option {name}", needed=", ".join(["device", *known]), found=name, try_=_instead(name, known))
        asked = replace(options or Options(), **settings)
        if isinstance(asked.precision, str) and asked.precision not in LOW:
            needed = f"{', '.join(map(repr, LOW))}, or a dtype such as torch.bfloat16".replace("'", '"')
            raise PlanError(f"no precision {asked.precision!r}", needed=needed, found=asked.precision, try_='precision="fp8"')
        if not isinstance(asked.deterministic, bool) and asked.deterministic != ANY_PLAN:
            raise PlanError(
                f"deterministic={asked.deterministic!r} is no option", needed=f'True, the same bits on every run of one plan, "{ANY_PLAN}" or False',
                found=repr(asked.deterministic), try_=f'deterministic="{ANY_PLAN}"',
            )  # fmt: skip
        if asked.deterministic == ANY_PLAN and (asked.noise or asked.accumulate > 1 or asked.precision not in (None, torch.float32, torch.float64)):
            raise PlanError(
                f'deterministic="{ANY_PLAN}"', needed="float32 or float64, noise=False and accumulate=1",
                found=f"precision={asked.precision}, noise={asked.noise}, accumulate={asked.accumulate}",
                try_="deterministic=True gives the same bits on every run of one plan",
            )  # fmt: skip
        return asked

    @property
    def low(self) -> str:
        """How matmuls are made in 8-bit floats."""
        return self.precision if isinstance(self.precision, str) else ""

    @property
    def guard(self) -> bool:
        """Whether steps are left out whose loss is NaN or Inf."""
        return self.on_nan == "skip"

    @property
    def how(self) -> dict[str, Any]:
        """What is captured with the step: the norm that gradients are clipped to, and the dtype of the compute."""
        return {"clip": self.clip, "precision": torch.bfloat16 if self.low else self.precision}


def _instead(name: str, known: list[str]) -> list[str]:
    """An option of nearly this name, or the plan's word for it."""
    return ['plan="dp2,zero1"'] if name in NUMBERS else [f"{close}=" for close in get_close_matches(name, known, n=2)]


def device_for(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """The device asked for; else that of the model's parameters; a model on the CPU or on `meta` goes to this rank's
    accelerator where the process group has a backend for it."""
    if device is not None:
        return _usable(torch.device(device))
    device_of = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
    if device_of is not None or not dist.is_initialized():
        return device_of or torch.device("cpu")
    return own_accelerator() or torch.device("cpu")


def _usable(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "meta") and not torch.get_device_module(device).is_available():
        raise PlanError(
            f"device={str(device)!r} is not on this machine", needed="a device that PyTorch finds", found=f"{device.type} is not available",
            try_="leave device= out: a GPU is used where there is one",
        )  # fmt: skip
    return device


def spec_of(mesh: Any) -> Spec:
    """The plan that a DeviceMesh stands for, by the names of its dims."""
    names, sizes = mesh.mesh_dim_names or (), tuple(mesh.mesh.shape)
    needed = "a DeviceMesh of dims named pp, dp (or fsdp), cp, ep, tp, in this order"
    values: dict[str, int] = {}
    if not names:
        raise PlanError(
            "this DeviceMesh names no plan", needed=needed, found="dims without names", try_="init_device_mesh(..., mesh_dim_names=...)"
        )
    for name, size in zip(names, sizes, strict=True):
        if name not in (*DATA, "pp", "cp", "ep", "tp") or (values.get("dp", 1) > 1 and name in DATA and size > 1):
            raise PlanError("this DeviceMesh names no plan", needed=needed, found=", ".join(names), try_='plan="dp2,tp2"')
        axis = "dp" if name in DATA else name
        values[axis] = values.get(axis, 1) * size
        if size > 1 and DATA.get(name):
            values["zero"] = DATA[name]
    spec = Spec(**{k: v for k, v in values.items() if v > 1 or k == "zero"})
    wanted = [(axis, n) for axis, n in spec.mesh.sizes.items() if n > 1]
    given = [("dp" if name in DATA else name, n) for name, n in zip(names, sizes, strict=True) if n > 1]
    if wanted != given or mesh.mesh.flatten().tolist() != list(range(mesh.mesh.numel())):
        raise PlanError(
            "this DeviceMesh names no plan", needed=f"{needed}, ranks in row-major order", found=str(mesh), try_=f'plan="{spec}"'
        )
    return spec


def require_ranks(plan: Spec, call: str) -> None:
    """Refuse a plan that is for another number of processes."""
    n = plan.mesh.ranks
    if n == world():
        return
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not dist.is_initialized():
        raise PlanError(
            f"plan '{plan}' needs a process group",
            needed=f"torch.distributed.init_process_group() before {call}",
            found=f"{launched} processes without a process group",
            try_="torch.distributed.init_process_group()",
        )
    raise PlanError(
        f"plan '{plan}' is for {n} process{'' if n == 1 else 'es'}",
        needed=f"degrees of dp, cp, ep, tp and pp that multiply to the number of processes, which is {world()}",
        found=str(plan),
        try_=f"weft run -n {n} SCRIPT" if n > 1 else f'plan="{replace(plan, dp=world())}"',
    )
