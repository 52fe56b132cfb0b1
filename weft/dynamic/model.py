"""What a user holds: vertex functions by type, called with the graphs of a batch and their inputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core import native
from weft.core.errors import StructureError, WeftError
from weft.dynamic.captured import Templates
from weft.dynamic.engine import CellKey, Plan
from weft.dynamic.layout import exact
from weft.dynamic.native import Ints
from weft.dynamic.packed import Packed
from weft.dynamic.plan import Variant, compile_plan, held_by, reads_of
from weft.dynamic.run import Once, Ready, Replay, Run
from weft.dynamic.schedule import Block, Reads, Schedule
from weft.dynamic.structure import Structure
from weft.dynamic.trace import Function, VertexProgram
from weft.dynamic.vertex import Source
from weft.dynamic.workspace import Pool
from weft.runtime import replay

if TYPE_CHECKING:
    from weft.dynamic.grow import Growing

Inputs = Mapping[str, Tensor]
VARIANTS = 4  # kept of one kind of inputs: in training, in evaluation, with some weights frozen


class Made:
    """What a model has made so far, none of which a copy of it needs."""

    def __init__(self) -> None:
        self.variants: dict[Any, list[Variant]] = {}  # the last that was used comes first
        self.pools: dict[torch.device, Pool] = {}
        self.templates: dict[Any, Templates] = {}

    def __deepcopy__(self, _: Any) -> Made:
        return Made()

    def __reduce__(self) -> Any:
        return Made, ()


class Model(nn.Module):
    """Vertex functions batched over graphs.

    `functions` is one function (type "vertex") or several by type; a function is anything called with a Vertex, modules
    included. `states` gives the row shape of what vertices scatter to their parents.
    `split_matmuls` says whether float32 matmuls run on tensor cores, as several of fewer bits with the error of float32; None: on a GPU.
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
        split_matmuls: bool | None = None,
    ) -> None:
        super().__init__()
        named = dict(functions) if isinstance(functions, Mapping) else {"vertex": functions}
        self.functions = named
        self.cells = nn.ModuleDict()
        for k, f in named.items():
            if isinstance(f, nn.Module):
                self.cells[_submodule_name(k, self.cells)] = f
        self.states = {k: (n,) if isinstance(n, int) else tuple(n) for k, n in states.items()}
        self.policy = policy
        self.fuse, self.replay, self.target, self.split_matmuls = fuse, replay, target, split_matmuls
        self.ready: Ready = None
        self._made = Made()

    def forward(self, graphs: Structure | Schedule | Packed, inputs: Any = None, *, at: Any = "roots") -> Any:
        """Run a batch. Returns the pushed outputs at the roots, at "all" vertices, or at the vertices given.

        One tensor if the functions push one output, else a dict by name. `inputs` is a dict by name, or just "x"; an input is one
        tensor whose rows the graphs name, or a list with one tensor per sample.
        `at` may also be a dict of such choices by output.
        """
        if isinstance(graphs, Packed):
            from weft.dynamic.part import of_packed

            return of_packed(self, graphs, _inputs(inputs, None), at)
        structure = graphs.structure if isinstance(graphs, Schedule) else graphs
        given = _inputs(inputs, structure)
        variant = self._variant(given, structure)
        schedule = graphs if isinstance(graphs, Schedule) else Schedule(graphs, variant.reads, self.policy)
        plan = self._plan(variant, schedule, given)
        if isinstance(at, Mapping) and at.keys() != plan.outputs.keys():
            raise StructureError(
                "vertices are chosen by other outputs than the functions push", needed=", ".join(plan.outputs), found=", ".join(map(str, at)) or "none"
            )
        wanted = {name: _pushing(schedule.structure, variant.functions, name, at) for name in plan.outputs}
        call = self.call_for(variant, plan, schedule, given, wanted)
        results = Run.apply(call, tuple(given), wanted, self.ready, *given.values(), *plan.weights)
        return results[0] if len(results) == 1 else dict(zip(plan.outputs, results, strict=True))

    def grow(self) -> Growing:
        """Graphs to which vertices are added while they run."""
        from weft.dynamic.grow import Growing

        return Growing(self)

    def reduce_over(self, group: Any = None) -> Model:
        """Sum weight gradients over the ranks of a process group, each while the next one is still being worked out.

        Ranks may hold different numbers of samples: divide the loss by the number of samples of all ranks.
        """
        import torch.distributed as dist

        self.ready = lambda grad: dist.all_reduce(grad, group=group, async_op=True)
        return self

    def schedule(self, graphs: Structure, inputs: Any = None) -> Schedule:
        """Batches and places of the graphs, to keep or to show; `inputs` are needed before the first run only."""
        return Schedule(graphs, self.reads(inputs), self.policy)

    def prepare(self, graphs: Structure, inputs: Any = None) -> Schedule:
        """The schedule with all that can be worked out before the run, as a data loader would do ahead of time."""
        given = _inputs(inputs, graphs)
        variant = self._variant(given, graphs)
        schedule = Schedule(graphs, variant.reads, self.policy)
        plan = self._plan(variant, schedule, given)
        if self._replays(variant):
            self._templates_of(variant, plan, schedule).fit(schedule)
            graphs.roots  # noqa: B018 - worked out now, ahead of the run
        else:
            exact(schedule, plan.sent)
        return schedule

    def reads(self, inputs: Any = None) -> dict[str, Reads]:
        """What each vertex function reads of its children."""
        if inputs is None and self._made.variants:
            return next(iter(self._made.variants.values()))[0].reads
        return self._variant(_inputs(inputs, None), None).reads

    def held(self) -> list[Tensor]:
        """The tensors that the functions use."""
        return [t for f in self.functions.values() for t in held_by(f)]

    def _variant(self, inputs: Inputs, structure: Structure | None) -> Variant:
        """The functions traced for inputs of these shapes, dtypes and device."""
        key = tuple((name, x.shape[1:], x.dtype, x.device) for name, x in inputs.items())
        known = self._made.variants.get(key, [])
        at = next((i for i, v in enumerate(known) if v.holds()), None)
        if at is None:
            tensors = self.held()
            try:
                made = Variant(self.functions, self.states, inputs, tensors, self, reads_of(self.functions))
            except (RuntimeError, WeftError) as error:
                raise _mixed_dtypes(inputs, tensors, structure) or error from error
            known = self._made.variants[key] = [made, *known[: VARIANTS - 1]]
        elif at:
            known.insert(0, known.pop(at))
        return known[0]

    def _plan(self, variant: Variant, schedule: Schedule, inputs: Inputs) -> Plan:
        grads = frozenset(k for k, v in inputs.items() if v.requires_grad)
        needs = torch.is_grad_enabled() and (bool(grads) or any(w.requires_grad for w in variant.weights))
        return self.plan_for(variant, schedule, inputs, grads, needs)

    def plan_for(self, variant: Variant, schedule: Schedule, inputs: Inputs, grads: frozenset[str], needs: bool) -> Plan:
        """What the batch runs by, where these inputs get gradients, and the weights that want them."""
        trained = tuple(w.requires_grad for w in variant.weights)
        absent = schedule.keep(("absent", variant), lambda: frozenset(_absent(schedule, variant.functions, inputs)))
        target = self._target(variant.device)
        in_parts = target == "triton" and (replay.is_accelerator(variant.device) if self.split_matmuls is None else self.split_matmuls)
        key = grads, needs, absent, trained, target, in_parts
        if key not in variant.plans:
            with torch.enable_grad():  # a step runs without, and asks for gradients all the same
                variant.plans[key] = compile_plan(variant, absent, grads, needs, target, in_parts)
        return variant.plans[key]

    def _target(self, device: torch.device) -> str:
        """What kernels are written in: "" leaves every op to torch."""
        if self.fuse is False:
            return ""
        return self.target or ("triton" if replay.is_accelerator(device) else "cpp" if _compiler() else "")

    def call_for(
        self, variant: Variant, plan: Plan, schedule: Schedule, inputs: Inputs, wanted: Mapping[str, Ints], weights: list[Tensor] | None = None
    ) -> Once | Replay:
        """The batch, ready to run; by weights given to it in place of the model's own."""
        if self._replays(variant):
            return Replay(self._templates_of(variant, plan, schedule), schedule, inputs, wanted, weights)
        return Once(plan, schedule, self._made.pools.setdefault(variant.device, Pool(variant.device)))

    def _replays(self, variant: Variant) -> bool:
        return replay.is_accelerator(variant.device) if self.replay is None else self.replay

    def _templates_of(self, variant: Variant, plan: Plan, schedule: Schedule) -> Templates:
        """Of one order of types, by whose numbers templates go, and of one precision: a recording multiplies as it did when it was made."""
        key = id(plan), schedule.structure.kinds, torch.get_float32_matmul_precision()
        if key not in self._made.templates:
            self._made.templates[key] = Templates(plan, variant.device)
        return self._made.templates[key]


def _submodule_name(kind: str, taken: nn.ModuleDict) -> str:
    """The name of a type, where modules may have one: without dots, and other than what they have already (`update`, `keys`, ...)."""
    name = kind.replace(".", "_") or "_"
    while hasattr(taken, name):
        name += "_"
    return name


@functools.cache
def _compiler() -> bool:
    return native.available()


def _absent(schedule: Schedule, functions: Mapping[str, VertexProgram], inputs: Inputs) -> list[tuple[CellKey, Source]]:
    """Optional inputs that no vertex of a class has. A class with an input that is not optional needs it everywhere."""
    out: list[tuple[CellKey, Source]] = []
    s = schedule.structure
    blocks = {(s.kinds[b.kind], b.has_children): b for b in schedule.blocks.values()}
    for name, function in functions.items():
        pulls = [source for source in function.sources.values() if source.role == "pull"]
        for key in ((name, False), (name, True)):
            block = blocks.get(key)
            low, high = (-1, -1) if block is None else schedule.row_range[2 * block.kind + block.has_children]
            for pull in pulls:
                if block is not None and (high >= len(inputs[pull.name]) or (low < 0 and pull not in function.optional)):
                    _refuse_row(schedule, block, pull, pull in function.optional, len(inputs[pull.name]))
                if high < 0:
                    out.append((key, pull))
    return out


def _refuse_row(schedule: Schedule, block: Block, pull: Source, optional: bool, size: int) -> None:
    rows = schedule.rows[block.start : block.start + block.count]
    at = int(np.argmax((rows >= size) | ((rows < 0) & (not optional))))
    sample, number = schedule.structure.sample_of(int(schedule.vertex[block.start + at]))
    row = int(rows[at])
    raise StructureError(
        f"sample {sample}: vertex {number} has no row of input {pull.name!r}" if row < 0
        else f"sample {sample}: vertex {number} reads row {row} of input {pull.name!r}, which is not there",
        needed=f"a row between 0 and {size - 1}", found="none" if row < 0 else str(row),
        try_="pull it with optional=True, which reads zeros" if row < 0 else f"give at least {row + 1} rows",
    )  # fmt: skip


def _inputs(inputs: Any, s: Structure | None) -> dict[str, Tensor]:
    """Inputs by name. One that is given per sample, as a list, becomes one tensor."""
    named = {} if inputs is None else dict(inputs) if isinstance(inputs, Mapping) else {"x": inputs}
    return {name: x if isinstance(x, Tensor) else _join(name, x, s) for name, x in named.items()}


def _join(name: str, parts: Sequence[Tensor], s: Structure | None) -> Tensor:
    """Rows of all samples after each other, of one shape and dtype."""
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, Tensor) for p in parts):
        raise StructureError(f"input {name!r} is no tensor", needed="a tensor, or a list with one per sample", found=type(parts).__name__)
    first = parts[0] if len(parts) else torch.empty(0)
    for i, part in enumerate(parts):
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            vertex = "" if s is None else f": vertex {_first_reader(s, i)}"
            raise StructureError(
                f"sample {i}{vertex} reads {name!r} in another dtype or shape than sample 0",
                needed=f"{first.dtype}, rows of {list(first.shape[1:])}", found=f"{part.dtype}, rows of {list(part.shape[1:])}",
            )  # fmt: skip
    return torch.cat(list(parts)) if len(parts) else first


def _first_reader(s: Structure, sample: int) -> int:
    """The first vertex of a sample that reads an input."""
    rows = s.row[s.sample[sample] : s.sample[sample + 1]]
    return int(np.argmax(rows >= 0)) if len(rows) else 0


def _mixed_dtypes(inputs: Inputs, tensors: list[Tensor], s: Structure | None) -> StructureError | None:
    """The error for a function that failed because an input has another dtype than its parameters."""
    ours = next((t.dtype for t in tensors if t.dtype.is_floating_point), None)
    for name, x in inputs.items():
        if ours is not None and x.dtype.is_floating_point and x.dtype != ours:
            sample, vertex = (0, 0) if s is None or not len(s) else s.sample_of(int(np.argmax(s.row >= 0)))
            return StructureError(
                f"sample {sample}: vertex {vertex} reads {name!r} in another dtype than the model's parameters have",
                needed=str(ours), found=str(x.dtype), try_=f"{name}.to({ours}), or model.to({x.dtype})",
            )  # fmt: skip
    return None


def _vertices(s: Structure, at: Any) -> Ints:
    """The vertices whose outputs are asked for."""
    if isinstance(at, str) and at in ("all", "roots"):
        return np.arange(s.vertices) if at == "all" else s.roots
    if isinstance(at, str):
        raise StructureError("unknown choice of vertices", needed='"roots", "all" or vertex numbers', found=repr(at))
    found = np.asarray(at)
    if found.size and found.dtype.kind not in "iu":
        raise StructureError("this names no vertices", needed='"roots", "all" or vertex numbers', found=f"{found.dtype.name}s: {found.tolist()!r}"[:80])
    if found.size and not (0 <= found.min() and found.max() < s.vertices):
        wrong = found[(found < 0) | (found >= s.vertices)].flat[0]
        raise StructureError("a vertex is asked for that is not there", needed=f"numbers between 0 and {s.vertices - 1}", found=str(wrong))
    return found.astype(np.int64).reshape(-1)


def _pushing(s: Structure, functions: Mapping[str, VertexProgram], name: str, at: Any) -> Ints:
    """Those of the vertices asked for whose type pushes the output."""
    vertices = _vertices(s, at[name] if isinstance(at, Mapping) else at)
    pushes = np.array([k in functions and name in functions[k].pushed for k in s.kinds], bool)
    return vertices if pushes.all() else vertices[pushes[s.kind[vertices]]]
