"""From vertex functions to something that runs: trace, simplify, specialise by class, differentiate, split, compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from weft.dynamic import emit_cpp, emit_triton, simplify
from weft.dynamic.cell import Cell, address, compile_cell, output_homes
from weft.dynamic.engine import CellKey, Plan
from weft.dynamic.frame import Compiled
from weft.dynamic.kernel import Kernel
from weft.dynamic.trace import Function, Traced, differentiate, pretence, trace
from weft.dynamic.verify import check_rows
from weft.dynamic.vertex import Source

Joint = Callable[[Traced, set[Source], set[str]], Traced]


class Variant:
    """The functions of a model traced for one kind of inputs, and the plans made of them."""

    def __init__(
        self, functions: Mapping[str, Function], states: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Tensor],
        held: list[Tensor], kind: Any,
    ) -> None:  # fmt: skip
        self.held, self.kind = held, kind
        every = [*held, *inputs.values()]
        self.dtype = next((t.dtype for t in every if t.dtype.is_floating_point), torch.get_default_dtype())
        self.device = next((t.device for t in [*inputs.values(), *held]), torch.device("cpu"))
        pulls = {k: (tuple(v.shape[1:]), v.dtype) for k, v in inputs.items()}
        mode = pretence()
        self.functions = {n: trace(f, n, states, pulls, self.dtype, self.device, mode) for n, f in functions.items()}
        self.reads = {name: f.reads for name, f in self.functions.items()}
        self.states = dict(states)
        for traced in self.functions.values():
            simplify.clean(simplify.slices_to_splits(traced))
            check_rows(traced)
        self.written = {name: simplify.copy(f) for name, f in self.functions.items()}
        self.joints = {name: f.joint for name, f in functions.items() if hasattr(f, "joint")}
        simplify.hoist(self.functions, self.states)
        self.weights = list({id(w): w for f in self.functions.values() for w in f.weights}.values())
        self.plans: dict[Any, Plan] = {}


def held_by(function: Any) -> list[Tensor]:
    """Parameters a vertex function uses: its own, its object's, or those it closes over."""
    if hasattr(function, "held"):
        return list(function.held())
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    if isinstance(owner, Tensor):
        return [owner]
    if not isinstance(function, FunctionType):
        return []
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return [t for h in held for t in held_by(h)]


def compile_plan(
    variant: Variant, absent: frozenset[tuple[CellKey, Source]], grads: frozenset[str], needs: bool, target: str, in_parts: bool,
) -> Plan:  # fmt: skip
    """All classes for one kind of call: which inputs are absent where, what needs a gradient, what kernels are written in."""
    made: dict[CellKey, Traced] = {}
    for name, function in variant.functions.items():
        for has_children in (False, True):
            gone = {s for k, s in absent if k == (name, has_children)}
            gone |= set() if has_children else {s for s in function.sources if s.role in ("slot", "edge")}
            joint = variant.joints.get(name, differentiate)
            made[name, has_children] = _with_gradients(function, gone, grads, joint) if needs else simplify.specialise(function, gone)
    sent = _settle(made)
    outputs = output_homes(made.values())
    cells = {key: compile_cell(one, sent, outputs, bool(target)) for key, one in made.items()}
    kernels = _kernels(cells.values(), target)
    return Plan(cells, variant.states, outputs, kernels, variant.weights, sent, variant.dtype, needs, target == "triton", in_parts)


def _with_gradients(function: Traced, gone: set[Source], grads: frozenset[str], joint: Joint) -> Traced:
    """Specialise and differentiate. A gradient the function brings with it is that of the full function, specialised afterwards."""
    one = simplify.specialise(function, gone)
    wanted = {s for s in one.sources if s.role in ("slot", "edge") or (s.role == "pull" and s.name in grads)}
    wanted |= {s for s in one.sources if s.role == "weight" and one.weights[int(s.name)].requires_grad}
    pushed = {name for name, node in one.outputs.items() if node.meta["val"].dtype.is_floating_point}
    both = differentiate(one, wanted, pushed) if joint is differentiate else simplify.specialise(joint(function, wanted, pushed), gone)
    return address(simplify.clean(both))


def _settle(made: dict[CellKey, Traced]) -> set[tuple[str, ...]]:
    """Drop gradients of states nobody gathers, until nothing changes. Returns the messages that are sent."""
    while True:
        sent = {key for one in made.values() for key in one.messages}
        reached = {state for state, _ in sent}
        unread = {k: [s for s in one.sources if s.role == "d_state" and s.name not in reached] for k, one in made.items()}
        if not any(unread.values()):
            return sent
        for key, sources in unread.items():
            made[key] = simplify.specialise(made[key], sources) if sources else made[key]


def _kernels(cells: Iterable[Cell], target: str) -> Compiled:
    """Compile the kernels of all classes together."""
    found = [(step, cell.stores) for cell in cells for steps in cell.steps.values() for step in steps if isinstance(step, Kernel)]
    return emit_triton.build(found) if target == "triton" else emit_cpp.build(found)
