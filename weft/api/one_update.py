"""Torch as the judge of updates where not all can be run: of every group of the optimizer and every dtype in it, the smallest parameter's."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.api import afford, eager
from weft.api.apart import Apart, allowed, compared
from weft.api.blockwise import random_of, valued
from weft.api.cut_blocks import cut_at, program_of
from weft.core.node import Node
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.ops.registry import nbytes
from weft.ops.source import input_node

if TYPE_CHECKING:
    from weft.api.judge import Case


def updates(captured: Captured, case: Case) -> dict[str, Apart]:
    """How far the updates of some parameters from random gradients are from torch's."""
    out: dict[str, Apart] = {}
    names = {id(p): n for n, p in captured.parameters.items()}
    for group, rule in zip(case.optimizer.param_groups, captured.rules, strict=True):
        made = {n: _made_by(captured, n) for n in (names[id(p)] for p in group["params"] if id(p) in names)}
        made = {n: x for n, x in made.items() if x is not None and x.op is rule.op}
        smallest = {captured.parameters[n].dtype: n for n in sorted(made, key=lambda n: -captured.parameters[n].numel())}
        for name in smallest.values():
            if 8 * nbytes(made[name].types[0]) <= afford.SHARE * afford.free(case.device):
                out |= _compared(captured, case, group, name, made[name])
    return out


def _made_by(captured: Captured, name: str) -> Node | None:
    """What makes a parameter's next value."""
    node = captured.program.output_names.get(name)
    return node.args[0] if node is not None and node.op.name == "item" else node


def _compared(captured: Captured, case: Case, group: dict[str, Any], name: str, update: Node) -> dict[str, Apart]:
    random, given = torch.Generator().manual_seed(0), update.args[1]
    states = {n: p for n, p in captured.states.items() if p == name}
    outputs = {n: captured.program.output_names[n] for n in (name, *states)}
    made = cut_at(outputs.values(), {given: input_node("batch.gradient", given.type, Role.BATCH)})
    program = program_of({n: made[x] for n, x in outputs.items()}, name)
    p = valued(captured.parameters[name], case.device, random)
    gradient = random_of(p.shape, p.dtype, case.device, random)
    begun = {n: x for n, x in captured.begun.items() if n in states}
    alone = replace(captured, program=program, parameters={name: p.detach().clone()}, buffers={}, constants={}, states=states, begun=begun)
    values = {n: x.to(case.device) for n, x in alone.inputs({"gradient": gradient}).items()}
    limit = allowed(program)
    return compared(program, values, _torchs(captured, case, group, name, p, gradient, states), case.device, limit.update, limit.digit)


def _torchs(
    captured: Captured, case: Case, group: dict[str, Any], name: str, p: Tensor, gradient: Tensor, states: dict[str, str]
) -> dict[str, Tensor | None]:
    """The parameter, and the optimizer's state for it, after torch's own step."""
    p.grad = gradient.clone()
    optimizer = object.__new__(type(case.optimizer))
    optimizer.__dict__.update(case.optimizer.__dict__)
    optimizer.param_groups = [{**group, "params": [p]}]
    before = case.optimizer.state.get(captured.parameters[name], {})
    optimizer.state = defaultdict(dict, {p: {k: x.to(case.device) if isinstance(x, Tensor) and x.ndim else x for k, x in copy.deepcopy(before).items()}})
    with eager.unnoticed(case.moment, case.device):
        type(optimizer).step(optimizer)
    return {name: p.detach(), **{n: optimizer.state[p].get(n.partition(".")[0]) for n in states}}
