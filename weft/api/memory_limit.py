"""Whether a step fits into the memory of its device, asked before anything is compiled; where it does not, what would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from weft.api.check_cost import free
from weft.core.errors import PlanError, WeftError
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.memory import least_bytes, needed, room
from weft.frontend.capture.micro import batch_dims_of
from weft.ops.registry import nbytes
from weft.plan.spec import AGAIN, Spec
from weft.runtime.agree import from_all
from weft.runtime.replay import is_accelerator


def require_memory(program: Program, named: Spec, example: Any, device: torch.device, made: Callable[[Spec], Program]) -> None:
    """Refuse a program of which more must be in memory than any rank's device has free; `made` gives that of another plan."""
    if not is_accelerator(device):
        return
    least, have = least_bytes(program), _least_free(device)
    if needed(least) <= have:
        return
    lasting = _lasting(program)
    raise PlanError(
        "the step does not fit into the memory of a device",
        needed=f"{_gb(needed(least))} at the least: {_gb(lasting)} of parameters and state, {_gb(least - lasting)} for the batch",
        found=f"{_gb(have)} free",
        try_=tuple(_offers(program, named, example, have, made)) or "more devices",
    )


def _least_free(device: torch.device) -> float:
    """Of all ranks: all must come to the same answer."""
    return float(min(from_all(free(device))))


def _lasting(program: Program) -> int:
    return sum(nbytes(n.type) for n in program.inputs if n.role is not Role.BATCH)


def _offers(program: Program, named: Spec, example: Any, have: float, made: Callable[[Spec], Program]) -> Iterator[str]:
    """What fits: a smaller batch, the same batch in parts, and plans that hold less."""
    lasting, least = _lasting(program), least_bytes(program)
    for spec in _others(named):
        try:
            if needed(least_bytes(made(spec))) <= have:
                yield f'plan="{spec}"'
                break
        except WeftError:
            continue
    try:
        samples, _ = batch_dims_of(example)
    except PlanError:
        return
    copies = named.dp * named.ep
    most = int(samples * (room(have) - lasting) / (least - lasting)) // copies * copies
    if most > 0:
        yield f"a batch of {most} samples instead of {samples}"
    gradients = sum(nbytes(n.type) for n in program.inputs_for(Role.PARAMETER).values())
    parts = [
        n
        for n in range(2, samples // copies + 1)
        if samples % (n * copies) == 0 and needed(lasting + gradients + (least - lasting) / n) <= have
    ]
    if parts:
        yield f'plan="{replace(named, micro=parts[0])}", in micro-batches'


def _others(named: Spec) -> Iterator[Spec]:
    """The same degrees with less held, what costs least first."""
    zeros = [z for z in (named.zero, 1, 3) if z >= named.zero] if named.dp > 1 else [named.zero]
    for again in dict.fromkeys([named.recompute, named.recompute or AGAIN["recompute"]]):
        for zero in dict.fromkeys(zeros):
            spec = replace(named, zero=zero, recompute=again)
            if spec != named:
                yield spec


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
