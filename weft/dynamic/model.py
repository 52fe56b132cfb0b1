"""What a user holds: vertex functions by type, called with the graphs of a batch and their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import StructureError
from weft.dynamic import emit_cpp, emit_triton, simplify
from weft.dynamic.captured import Templates
from weft.dynamic.cell import Cell, address, compile_cell, output_homes
from weft.dynamic.engine import CellKey, Plan
from weft.dynamic.frame import Compiled
from weft.dynamic.kernel import Kernel
from weft.dynamic.layout import exact
from weft.dynamic.native import Ints
from weft.dynamic.run import Again, Once, Run
from weft.dynamic.schedule import Reads, Schedule
from weft.dynamic.structure import Structure
from weft.dynamic.trace import Function, Traced, differentiate, pretence, trace
from weft.dynamic.vertex import Source
from weft.dynamic.workspace import Pool
from weft.runtime import native, replay

Inputs = Mapping[str, Tensor]


class Model(nn.Module):
    """Vertex functions batched over graphs.

    `functions` is one function (type "vertex") or several by type; a function is anything called with a Vertex, modules
    included. `states` gives the row shape of what vertices scatter to their parents.
    """

    def __init__(
        self,
        functions: Function | Mapping[str, Function],
        states: Mapping[str, int | Sequence[int]],
        *,
        policy: str = "auto",
        fuse: bool | None = None,
        replay: bool | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__()
        named = dict(functions) if isinstance(functions, Mapping) else {"vertex": functions}
        self.functions = named
        self.cells = nn.ModuleDict({k: f for k, f in named.items() if isinstance(f, nn.Module)})
        self.states = {k: (n,) if isinstance(n, int) else tuple(n) for k, n in states.items()}
        self.policy = policy
        self.fuse, self.replay, self.target = fuse, replay, target
        self._traced: dict[Any, tuple[dict[str, Traced], dict[str, tuple[int, ...]]]] = {}
        self._plans: dict[Any, Plan] = {}
        self._pools: dict[torch.device, Pool] = {}
        self._templates: dict[tuple[int, torch.device], Templates] = {}

    def forward(
        self, graphs: Structure | Schedule, inputs: Inputs | Tensor | None = None, *, at: str | Ints = "roots"
    ) -> Any:
        """Run a batch. Returns the pushed outputs at the roots, at "all" vertices, or at the vertices given.

        One tensor if the functions push one output, else a dict by name. `inputs` is a dict by name, or one tensor "x".
        """
        given = _inputs(inputs)
        functions, _ = self._functions(given)
        schedule = graphs if isinstance(graphs, Schedule) else self.schedule(graphs, given)
        plan = self._plan(schedule, given)
        wanted = {name: _pushing(schedule.structure, functions, name, at) for name in plan.outputs}
        call = self._call(plan, schedule, given, wanted)
        results = Run.apply(call, tuple(given), wanted, *given.values(), *plan.weights)
        return results[0] if len(results) == 1 else dict(zip(plan.outputs, results, strict=True))

    def _call(self, plan: Plan, schedule: Schedule, inputs: Inputs, wanted: Mapping[str, Ints]) -> Once | Again:
        if self._replays(inputs):
            return Again(*self._templates_of(plan, inputs).take(schedule, inputs, wanted))
        device = self._device(inputs)
        return Once(plan, schedule, self._pools.setdefault(device, Pool(device)))

    def _replays(self, inputs: Inputs) -> bool:
        return replay.is_accelerator(self._device(inputs)) if self.replay is None else self.replay

    def _templates_of(self, plan: Plan, inputs: Inputs) -> Templates:
        device = self._device(inputs)
        return self._templates.setdefault((id(plan), device), Templates(plan, device))

    def schedule(self, graphs: Structure, inputs: Inputs | Tensor | None = None) -> Schedule:
        """Batches and places of the graphs, to keep or to show; `inputs` are needed before the first run only."""
        return Schedule(graphs, self.reads(_inputs(inputs) if inputs is not None else None), self.policy)

    def prepare(self, graphs: Structure, inputs: Inputs | Tensor | None = None) -> Schedule:
        """The schedule with all that can be worked out before the run, as a data loader would do ahead of time."""
        given = _inputs(inputs)
        schedule = self.schedule(graphs, given)
        plan = self._plan(schedule, given)
        if self._replays(given):
            self._templates_of(plan, given).fit(schedule, given)
        else:
            exact(schedule, plan.sent)
        return schedule

    def reads(self, inputs: Inputs | None = None) -> dict[str, Reads]:
        """What each vertex function reads of its children."""
        if inputs is None and not self._traced:
            inputs = {}
        functions, _ = self._functions(inputs) if inputs is not None else next(iter(self._traced.values()))
        return {name: f.reads for name, f in functions.items()}

    def _functions(self, inputs: Inputs) -> tuple[dict[str, Traced], dict[str, tuple[int, ...]]]:
        """The traced functions, and all states with those that tracing added."""
        dtype = self._dtype(inputs)
        pulls = {k: (tuple(v.shape[1:]), v.dtype) for k, v in inputs.items()}
        key = dtype, self._device(inputs), tuple(sorted(pulls.items(), key=lambda item: item[0]))
        if key not in self._traced:
            device, mode = self._device(inputs), pretence()
            made = {n: trace(f, n, self.states, pulls, dtype, device, mode) for n, f in self.functions.items()}
            for traced in made.values():
                simplify.clean(simplify.slices_to_splits(traced))
            states = dict(self.states)
            simplify.hoist(made, states)
            self._traced[key] = made, states
        return self._traced[key]

    def _dtype(self, inputs: Inputs) -> torch.dtype:
        """The dtype of states: that of the functions' own parameters, else of the inputs."""
        tensors = [t for f in self.functions.values() for t in _held_by(f)] + [*inputs.values()]
        return next((t.dtype for t in tensors if t.dtype.is_floating_point), torch.get_default_dtype())

    def _device(self, inputs: Inputs) -> torch.device:
        tensors = [*inputs.values(), *(t for f in self.functions.values() for t in _held_by(f))]
        return tensors[0].device if tensors else torch.device("cpu")

    def _target(self, device: torch.device) -> str:
        """What kernels are written in: "" leaves every op to torch."""
        if self.fuse is False:
            return ""
        return self.target or ("triton" if replay.is_accelerator(device) else "cpp" if native.available() else "")

    def _plan(self, schedule: Schedule, inputs: Inputs) -> Plan:
        functions, states = self._functions(inputs)
        grads = frozenset(k for k, v in inputs.items() if v.requires_grad)
        weights = list({id(w): w for f in functions.values() for w in f.weights}.values())
        needs = torch.is_grad_enabled() and (bool(grads) or any(w.requires_grad for w in weights))
        absent = frozenset(_absent(schedule, functions, inputs))
        shapes = tuple((k, tuple(v.shape[1:]), v.dtype) for k, v in inputs.items())
        target = self._target(self._device(inputs))
        key = shapes, grads, needs, absent, self._dtype(inputs), tuple(w.requires_grad for w in weights), target
        if key not in self._plans:
            dtype = self._dtype(inputs)
            self._plans[key] = _compile(functions, states, absent, grads, needs, weights, dtype, target)
        return self._plans[key]


def _held_by(function: Any) -> list[Tensor]:
    """Parameters a vertex function uses: its own, its object's, or those it closes over."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    held = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
    return [t for h in held for t in (h.parameters() if isinstance(h, nn.Module) else [h] if isinstance(h, Tensor) else [])]


def _compile(
    functions: Mapping[str, Traced], states: dict[str, tuple[int, ...]], absent: frozenset[tuple[CellKey, Source]],
    grads: frozenset[str], needs: bool, weights: list[Tensor], dtype: torch.dtype, target: str,
) -> Plan:  # fmt: skip
    """Specialise every type to its two classes, differentiate, cut into steps, and compile the kernels."""
    made: dict[CellKey, Traced] = {}
    for name, function in functions.items():
        for has_children in (False, True):
            gone = {s for k, s in absent if k == (name, has_children)}
            gone |= set() if has_children else {s for s in function.sources if s.role in ("slot", "edge")}
            one = simplify.specialise(function, gone)
            made[name, has_children] = _with_gradients(one, grads) if needs else one
    sent = _settle(made)
    outputs = output_homes(made.values())
    cells = {key: compile_cell(one, sent, outputs, bool(target)) for key, one in made.items()}
    kernels = _kernels(cells.values(), target)
    return Plan(cells, states, outputs, kernels, weights, sent, dtype, needs, tuple(grads))


def _with_gradients(one: Traced, grads: frozenset[str]) -> Traced:
    wanted = {s for s in one.sources if s.role in ("slot", "edge") or (s.role == "pull" and s.name in grads)}
    wanted |= {s for s in one.sources if s.role == "weight" and one.weights[int(s.name)].requires_grad}
    return address(simplify.clean(differentiate(one, wanted, set(one.outputs))))


def _settle(made: dict[CellKey, Traced]) -> set[tuple[str, ...]]:
    """Drop gradients of states nobody gathers, until nothing changes. Returns the messages that are sent."""
    while True:
        sent = {key for one in made.values() for key in one.messages}
        reached = {state for state, _ in sent}
        changed = False
        for key, one in made.items():
            unread = [s for s in one.sources if s.role == "d_state" and s.name not in reached]
            if unread:
                made[key], changed = simplify.specialise(one, unread), True
        if not changed:
            return sent


def _kernels(cells: Iterable[Cell], target: str) -> Compiled:
    """Compile the kernels of all classes together."""
    found = [(step, cell.stores) for cell in cells for steps in cell.steps.values() for step in steps if isinstance(step, Kernel)]
    return emit_triton.build(found) if target == "triton" else emit_cpp.build(found)


def _absent(schedule: Schedule, functions: Mapping[str, Traced], inputs: Inputs) -> list[tuple[CellKey, Source]]:
    """Optional inputs that no vertex of a class has. A class with an input that is not optional needs it everywhere."""
    out: list[tuple[CellKey, Source]] = []
    s = schedule.structure
    blocks = {(s.kinds[b.kind], b.has_children): b for b in schedule.blocks.values()}
    for name, function in functions.items():
        pulls = [source for source in function.sources if source.role == "pull"]
        for has_children in (False, True):
            block = blocks.get((name, has_children))
            if block is None:
                out += [((name, has_children), p) for p in pulls if p in function.optional]
                continue
            vertices = schedule.vertex[block.start : block.start + block.count]
            rows = s.row[vertices]
            for pull in pulls:
                _check_rows(s, vertices, rows, pull, pull in function.optional, len(inputs[pull.name]))
                if (rows < 0).all():
                    out.append(((name, has_children), pull))
    return out


def _check_rows(s: Structure, vertices: Ints, rows: Ints, pull: Source, optional: bool, size: int) -> None:
    bad = np.flatnonzero((rows >= size) | ((rows < 0) & (not optional)))
    if len(bad):
        sample, number = s.sample_of(int(vertices[bad[0]]))
        row = int(rows[bad[0]])
        raise StructureError(
            f"sample {sample}: vertex {number} has no row of input {pull.name!r}" if row < 0
            else f"sample {sample}: vertex {number} reads row {row} of input {pull.name!r}, which is not there",
            needed=f"a row between 0 and {size - 1}", found="none" if row < 0 else str(row),
            try_="pull it with optional=True, which reads zeros" if row < 0 else f"give at least {row + 1} rows",
        )  # fmt: skip


def _inputs(inputs: Inputs | Tensor | None) -> dict[str, Tensor]:
    if inputs is None:
        return {}
    return {"x": inputs} if isinstance(inputs, Tensor) else dict(inputs)


def _vertices(s: Structure, at: Any) -> Ints:
    """The vertices whose outputs are asked for."""
    if isinstance(at, str) and at in ("all", "roots"):
        return np.arange(s.vertices) if at == "all" else s.roots
    if isinstance(at, str):
        raise StructureError("unknown choice of vertices", needed='"roots", "all" or vertex numbers', found=repr(at))
    return np.asarray(at, np.int64)


def _pushing(s: Structure, functions: Mapping[str, Traced], name: str, at: Any) -> Ints:
    """Those of the vertices asked for whose type pushes the output."""
    vertices = _vertices(s, at[name] if isinstance(at, Mapping) else at)
    pushes = np.array([k in functions and name in functions[k].outputs for k in s.kinds], bool)
    return vertices if pushes.all() else vertices[pushes[s.kind[vertices]]]
