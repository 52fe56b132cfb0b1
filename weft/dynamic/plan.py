"""From vertex functions to something that runs: programs, hoisted, specialised by class and differentiated, then split into phases and compiled."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.node import Node
from weft.dynamic.cell import collected, compile_cell, output_homes
from weft.dynamic.compiled import compile_kernels
from weft.dynamic.engine import CellKey, Plan
from weft.dynamic.kernel import Kernel
from weft.dynamic.lower import Graph, lowered
from weft.dynamic.simplify import clean, hoist, specialise
from weft.dynamic.trace import Function, VertexProgram, by_itself, differentiate, trace
from weft.dynamic.verify import check_rows
from weft.dynamic.vertex import Source
from weft.frontend.capture.guards import Reads
from weft.ops.pointwise import add


class Variant:
    """The functions of a model as programs for one kind of inputs, and the plans made of them."""

    @by_itself()
    def __init__(
        self, functions: Mapping[str, Function], states: Mapping[str, tuple[int, ...]], inputs: Mapping[str, Tensor],
        tensors: list[Tensor], model: nn.Module | None = None, reads: Reads | None = None,
    ) -> None:  # fmt: skip
        """`reads` notes what the functions read of Python."""
        every = [*tensors, *inputs.values()]
        self.dtype = next((t.dtype for t in every if t.dtype.is_floating_point), torch.get_default_dtype())
        self.device = next((t.device for t in [*inputs.values(), *tensors]), torch.device("cpu"))
        pulls = {k: (tuple(v.shape[1:]), v.dtype) for k, v in inputs.items()}
        names = _weight_names(functions, model)
        self.python = reads
        with reads.listening() if reads is not None else nullcontext(), torch.autocast(self.device.type, enabled=False):
            self.written = {n: trace(f, n, states, pulls, self.dtype, self.device, names) for n, f in functions.items()}
        if reads is not None:
            reads.finish([])
        self.reads = {name: f.reads for name, f in self.written.items()}
        self.states = dict(states)
        for f in self.written.values():
            check_rows(f)
        self.functions = hoist(self.written, self.states)
        self.weights = list({id(w): w for f in self.functions.values() for w in f.weights.values()}.values())
        self.plans: dict[Any, Plan] = {}
        self._kinds = [(w, w.dtype, w.device) for w in self.weights]

    def holds(self) -> bool:
        """Whether the functions would be written the same now: weights where and what they were, and nothing else in Python that they read."""
        same = all(w.dtype == dtype and w.device == device for w, dtype, device in self._kinds)
        return same and (self.python is None or self.python.hold())


def _weight_names(functions: Mapping[str, Function], model: nn.Module | None) -> dict[int, str]:
    """The names that weights have in the functions' modules, by identity."""
    owners = [getattr(f, "__self__", f) for f in functions.values()]
    return {id(p): n for m in (model, *owners) if isinstance(m, nn.Module) for n, p in (*m.named_buffers(), *m.named_parameters())}


def reads_of(functions: Mapping[str, Function]) -> Reads:
    """What vertex functions may read of Python: modules, closures, settings; in which precision they run is their own."""
    owners = [getattr(f, "__self__", f) for f in functions.values()]
    return Reads(nn.ModuleList([m for m in owners if isinstance(m, nn.Module)]), list(functions.values())).in_any_grad_mode().in_any_precision()


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
    tensors = [cell.cell_contents for cell in function.__closure__ or ()]
    return [t for h in tensors for t in held_by(h)]


@by_itself()
def compile_plan(
    variant: Variant, absent: frozenset[tuple[CellKey, Source]], grads: frozenset[str], needs: bool, target: str, in_parts: bool,
) -> Plan:  # fmt: skip
    """All classes for one kind of call: which inputs are absent where, what needs a gradient, what kernels are written in."""
    made: dict[CellKey, VertexProgram] = {}
    for name, function in variant.functions.items():
        for has_children in (False, True):
            gone = {s for k, s in absent if k == (name, has_children)}
            gone |= set() if has_children else {s for s in function.inputs if s.role in ("slot", "edge")}
            one = specialise(function, gone)
            made[name, has_children] = _with_gradients(one, grads) if needs else one
    sent = _drop_unused(made)
    graphs = {key: Graph(collected(lowered(clean(one)))) for key, one in made.items()}
    outputs = output_homes(graphs.values())
    cells = {key: compile_cell(one, sent, outputs, bool(target)) for key, one in graphs.items()}
    kernels = [(step, cell.stores) for cell in cells.values() for steps in cell.steps.values() for step in steps if isinstance(step, Kernel)]
    return Plan(cells, variant.states, outputs, compile_kernels(kernels, target), variant.weights, sent, variant.dtype, needs, in_parts)


def _with_gradients(f: VertexProgram, grads: frozenset[str]) -> VertexProgram:
    """The function with the gradients of gathered states, of inputs that want them and of weights that are trained."""
    wanted = [n for n, s in f.sources.items() if s.role in ("slot", "edge") or (s.role == "pull" and s.name in grads)]
    wanted += [n for n, w in f.weights.items() if w.requires_grad]
    return _addressed(differentiate(f, wanted, {o for o, n in f.pushed.items() if n.dtype.is_floating_point}))


def _addressed(f: VertexProgram) -> VertexProgram:
    """Say how the gradients of gathered states are sent to the children: (state, how) -> value.

    Through a slot they are sent by place of the parent. To the rest of the children they are sent by edge, unless every child
    of a vertex gets the same, as under a sum: then by place of the parent too, and nothing is stored per edge.
    """
    grads = {n: s for n, s in f.grads.items() if not (isinstance(s, Source) and s.role in ("slot", "edge"))}
    sent: dict[tuple[str, ...], Node] = {}
    for n, s in f.grads.items():
        if n not in grads:
            assert isinstance(s, Source)
            node = f.program.output_names[n]
            sent |= {(s.name, f"slot{s.slot}"): node} if s.role == "slot" else _terms(f, s.name, node)
    messages = {f"message.{i}": key for i, key in enumerate(sent)}
    outputs = [(n, x) for n, x in f.program.outputs if n not in f.grads or n in grads]
    outputs += [(n, sent[key]) for n, key in messages.items()]
    return f.with_outputs(outputs, "addressed", grads=grads, messages=messages)


def _terms(f: VertexProgram, state: str, node: Node) -> dict[tuple[str, ...], Node]:
    """A sum of what every child of a vertex gets, and of what each edge sends alone."""
    at = f.inputs.get(Source("at"))
    terms, same, other = [node], list[Node](), list[Node]()
    while terms:
        n = terms.pop()
        if n.op.name == "add" and n.args[0].shape == n.args[1].shape:
            terms += n.args
        else:
            (same if n.op.name == "take" and n.args[1] is at and n.attr("dim") == 0 else other).append(n)
    if not same:
        return {(state, "edge"): node}
    full = functools.reduce(add, [n.args[0] for n in reversed(same)])
    return {(state, "vertex"): full, **({(state, "edge"): functools.reduce(add, reversed(other))} if other else {})}


def _drop_unused(made: dict[CellKey, VertexProgram]) -> set[tuple[str, ...]]:
    """Drop gradients of states nobody gathers, until nothing changes. Returns the messages that are sent."""
    while True:
        sent = {key for one in made.values() for key in one.messages.values()}
        reached = {state for state, _ in sent}
        unread = {k: [s for s in one.inputs if s.role == "d_state" and s.name not in reached] for k, one in made.items()}
        if not any(unread.values()):
            return sent
        for key, sources in unread.items():
            made[key] = _without_zeros(specialise(made[key], sources)) if sources else made[key]


def _without_zeros(f: VertexProgram) -> VertexProgram:
    """Without the messages that are zero."""
    gone = {n for n in f.messages if f.program.output_names[n].op.name == "full"}
    keep = [(n, x) for n, x in f.program.outputs if n not in gone]
    return f.with_outputs(keep, "without zeros", messages={n: k for n, k in f.messages.items() if n not in gone}) if gone else f
