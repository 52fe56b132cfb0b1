"""Torch as the judge of updates where not all can be run: of every group of the optimizer and every dtype in it, the smallest parameter's."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.api import check_cost, eager
from weft.api.check_blocks import random_of, valued
from weft.api.deviation import Deviation, allowed, compared
from weft.api.module_blocks import program_of, split_at
from weft.core.node import Node, toposort
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.frontend.capture.optimizers import kept_state
from weft.ops.registry import nbytes
from weft.ops.source import input_node

GRADIENT = "batch.gradient"

if TYPE_CHECKING:
    from weft.api.check_step import Case


def updates(captured: Captured, case: Case) -> dict[str, Deviation]:
    """How far the updates of some parameters from random gradients are from torch's."""
    out: dict[str, Deviation] = {}
    names = {id(p): n for n, p in captured.parameters.items()}
    for group in case.optimizer.param_groups:
        made = {n: _gradient(captured, n) for n in (names[id(p)] for p in group["params"] if id(p) in names) if n in captured.updates}
        made = {n: x for n, x in made.items() if x is not None}
        smallest = {captured.parameters[n].dtype: n for n in sorted(made, key=lambda n: -captured.parameters[n].numel())}
        for name in smallest.values():
            if 8 * nbytes(captured.program.input_names[name].type) <= check_cost.SHARE * check_cost.free(case.device):
                out |= _compared(captured, case, group, name, made[name])
    return out


def _gradient(captured: Captured, name: str) -> Node | None:
    """The gradient that a parameter's update reads; None where that reads others too."""
    homes = {name, *(s for s, p in captured.states.items() if p == name)}
    result = captured.program.output_names[name]
    whose = [n for n in toposort([result]) if n.op.unfold is not None and n.args[0].attr("name") in homes]
    if len(whose) != 1:
        return None
    found = split_at([result], {whose[0].args[1]: _stand_in(whose[0].args[1])})[result]
    others = [n for n in toposort([found]) if n.role in (Role.BATCH, Role.PARAMETER) and n.attr("name") not in (name, GRADIENT)]
    return None if others else whose[0].args[1]


def _stand_in(gradient: Node) -> Node:
    return input_node(GRADIENT, gradient.type, Role.BATCH)


def _compared(captured: Captured, case: Case, group: dict[str, Any], name: str, given: Node) -> dict[str, Deviation]:
    random = torch.Generator().manual_seed(0)
    states = {n: p for n, p in captured.states.items() if p == name and not n.startswith("group_")}
    outputs = {n: captured.program.output_names[n] for n in (name, *states) if n in captured.program.output_names}
    made = split_at(outputs.values(), {given: _stand_in(given)})
    program = program_of({n: made[x] for n, x in outputs.items()}, name)
    p = valued(captured.parameters[name], case.device, random)
    gradient = random_of(p.shape, p.dtype, case.device, random)
    begun = {n: x for n, x in captured.begun.items() if n in states}
    alone = replace(captured, program=program, parameters={name: p.detach().clone()}, buffers={}, constants={}, states=states, begun=begun)
    values = {n: x.to(case.device) for n, x in alone.inputs({"gradient": gradient}).items()}
    limit = allowed(program)
    want = {n: x for n, x in _torchs(captured, case, group, name, p, gradient, states).items() if n in outputs}
    return compared(program, values, want, case.device, limit.update, limit.digit)


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
    kept = kept_state(optimizer, p)
    return {name: p.detach(), **{n: x if isinstance(x := kept.get(n.removesuffix(name.removeprefix("param"))), Tensor) else None for n in states}}
