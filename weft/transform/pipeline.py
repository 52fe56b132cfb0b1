"""Pipeline stages placed on a mesh with an axis `pp`: stage g is at rank g mod pp, its values at O(g mod pp).

Between two stages a value goes rank to rank, in slices: along every axis that holds it replicated or as a partial sum it is sharded for
the way, and gathered on the far side, so each byte is sent once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.errors import LayoutError, PlanError
from weft.core.layout import Layout, O, P, Placement, S
from weft.core.names import bare
from weft.core.node import Node, Type, remade, toposort
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.frontend.capture.micro import GIVEN
from weft.ops.comm import send
from weft.ops.pointwise import add
from weft.ops.registry import Kind
from weft.ops.shape import concat, concat_op
from weft.ops.source import input_node
from weft.plan.place import Placements, PlacingOptions, place
from weft.plan.sent_alone import sent_alone
from weft.plan.spec import Spec
from weft.plan.split import LOSS_SUM, Stage, program_of
from weft.transform.phases import split_phases

Held = Mapping[str, Placements]
Home = Callable[[str], int | None]


@dataclass(frozen=True)
class PlacedStage:
    """A stage on the mesh: its programs in turn (forward, backward and, where that is split, weights), and where its values go."""

    number: int
    rank: int
    phases: tuple[Program, ...]
    types: Mapping[str, Type]  # of what passes its borders, either way
    unsplit: tuple[Program, Program]  # all turns as one program, as it was for one device and as it is placed

    def gives(self, turn: int, kind: str) -> list[str]:
        return [n for n in self.phases[turn].output_names if n.startswith(kind)]

    def inputs(self) -> set[str]:
        return {n for p in self.phases for n in p.input_names if not n.startswith("kept.")}


@dataclass(frozen=True)
class PlacedPipeline:
    """All stages of a training step, what follows the last micro-batch, and where every input is at home."""

    named: Spec
    stages: tuple[PlacedStage, ...]
    update: Program
    homes: Mapping[str, int | None]
    single: Program  # the update as it was for one device

    @property
    def text(self) -> str:
        return "\n".join([p.text for s in self.stages for p in s.phases] + [self.update.text])


def place_pipeline(
    captured: Captured,
    stages: Sequence[Stage],
    named: Spec,
    placements: Held,
    options: PlacingOptions,
    guard: Callable[[Captured], Captured] | None = None,
    first: Program | None = None,
) -> PlacedPipeline:
    """Every stage placed, and the update, guarded if told how, with the state at the ranks that read it, or at all where `first` does."""
    more = {} if first is None else {n: x for n, x in first.input_names.items() if x.role not in GIVEN}
    homes = {**homes_of(captured, stages, named), **dict.fromkeys(more)}
    shapes = {n: x.shape for n, x in captured.program.input_names.items()}
    same_shape = [(s, p) for s, p in captured.states.items() if s in placements and shapes[s] == shapes[p]]
    slices = {f"d.{param}": placements[state] for state, param in same_shape if named.zero_of(bare(param)) >= 2}
    placements = {**placements, **slices}  # gradients as the state they go into
    placed, borders = list[PlacedStage](), dict[str, _Border]()
    for stage in stages:
        placed.append(place_stage(stage, named, placements, options, borders))
    placed.sort(key=lambda s: s.number)
    sources, given = _terms(placed, named)
    where = {name: placed[int(name.rsplit(".", 1)[1])].rank for name in given if name.startswith("d.")}
    layouts = {n: {**placements.get(n, {}), **at(named, homes[n])} for n in homes}
    program = update(captured, sources, lambda name: where.get(name, homes.get(name)), more.values())
    program = guard(replace(captured, program=program)).program if guard is not None else program
    inputs = {n: p for n, p in {**layouts, **given}.items() if n in program.input_names}
    return PlacedPipeline(named, tuple(placed), place(program, named.mesh, inputs, options), homes, program)


def at(named: Spec, rank: int | None) -> dict[str, Placement]:
    return {"pp": O(rank)} if named.pp > 1 and rank is not None else {}


def homes_of(captured: Captured, stages: Sequence[Stage], named: Spec) -> dict[str, int | None]:
    """The rank of the pipeline that holds an input: the first that reads a parameter; of other things, None where several do."""
    readers: dict[str, list[int]] = {}
    for stage in stages:
        for name in (*stage.forward.input_names, *stage.gives("buffer.")):
            readers.setdefault(name, []).append(stage.number % named.pp)
    homes: dict[str, int | None] = {}
    for name, node in captured.program.input_names.items():
        ranks = dict.fromkeys(readers.get(name, ()))
        alone = next(iter(ranks)) if len(ranks) == 1 else None
        homes[name] = next(iter(ranks), 0) if node.role is Role.PARAMETER else alone
        if node.role is Role.BUFFER and len(ranks) > 1 and name in captured.program.output_names:
            raise PlanError(
                f"{name} is changed in the forward pass and used by several stages",
                needed="state that one stage has to itself",
                found=f"ranks {', '.join(map(str, ranks))} of the pipeline",
                try_="a plan without pp, or a module of its own for every place that keeps state",
            )
    return {**homes, **{state: homes[param] for state, param in captured.states.items()}}


# -- one stage -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Border:
    """How a value that passes a border is laid out where it is made, and on its way."""

    home: Layout
    way: Layout


def place_stage(stage: Stage, named: Spec, placements: Held, options: PlacingOptions, borders: dict[str, _Border]) -> PlacedStage:
    """The stage on the mesh. `borders` are those before it; those after are added."""
    rank = stage.number % named.pp
    here = at(named, rank)
    inputs = {n: {**placements.get(n, {}), **here} for n in stage.step.input_names if not _passes(n)}
    inputs |= {n: {**borders[n].way.placements, **here} for n in stage.reads("act.")}
    arrive = {n: {**borders[n].home.placements, **here} for n in stage.reads("act.")}
    first = place(stage.forward, named.mesh, _only(inputs, stage.forward), options, outputs=_open(stage.forward, here), arrivals=arrive)
    borders |= {n: border(first.output_names[n].type, here) for n in stage.gives("act.")}
    for n in stage.reads("d.act."):
        inputs[n], arrive[n] = {**borders[_act(n)].way.placements, **here}, {**borders[_act(n)].home.placements, **here}
    wants: dict[str, Placements] = _open(stage.step, here)
    wants |= {n: {**borders[_act(n)].way.placements, **here} for n in stage.step.output_names if _passes(n)}
    wants |= {n: {**placements[n], **here} for n in stage.gives("d.param.") if n in placements}
    program = place(stage.step, named.mesh, inputs, options, outputs=wants, arrivals=arrive)
    program = sent_alone(program, "ep") if named.ragged_ep else program
    _require_no_pp_collective(program, stage, named)
    passing = [(n, node.type) for n, node in (*program.input_names.items(), *program.outputs) if _passes(n)]
    phases = tuple(split_phases(program, _groups(stage, named), (Role.PARAMETER, Role.CONSTANT)))
    return PlacedStage(stage.number, rank, phases, dict(passing), (stage.step, program))


def _require_no_pp_collective(program: Program, stage: Stage, named: Spec) -> None:
    """A stage is run by its own rank of the pipeline alone, at a time of its own: a collective along `pp` inside it would wait for ever."""
    meets = [n for n in program.nodes if n.op.kind is Kind.COMM and n.attr("axis") == "pp" and n.op.wire(named.pp)]
    if meets:
        raise PlanError(
            f"stage {stage.number} of {named} cannot be run by one rank of the pipeline",
            needed="ops whose operands are all at that rank",
            found=f"{meets[0].op.name} along pp, for {', '.join(dict.fromkeys(u.op.name for u in program.users[meets[0]]))}",
            try_="a plan without pp",
            where=program.lines.get(meets[0]),
        )


def _passes(name: str) -> bool:
    return name.startswith(("act.", "d.act."))


def _act(name: str) -> str:
    """The border value a name is about."""
    return name if name.startswith("act.") else name.removeprefix("d.").rsplit(".", 1)[0]


def _only(inputs: Held, program: Program) -> dict[str, Placements]:
    return {n: p for n, p in inputs.items() if n in program.input_names}


def _open(program: Program, here: Placements) -> dict[str, Placements]:
    """Outputs left as they are, at the stage's rank; state as it was."""
    state = {o for o, _ in program.state}
    return {n: here for n in program.output_names if n not in state}


def _groups(stage: Stage, named: Spec) -> list[list[str]]:
    """Outputs by turn: forward; then gradients, those that other stages wait for apart where the schedule says so."""
    forward = list(stage.forward.output_names)
    if stage.step is stage.forward:
        return [forward]
    border, weights = stage.gives("d.act."), stage.gives("d.param.")
    phases = [forward, border, weights] if named.pipeline.defers_weights else [forward, weights + border]
    return [group for group in phases if group]


def border(type_: Type, here: Placements) -> _Border:
    """Partial sums done and, for the way, sharded by every axis that does not shard it yet, where some dim divides evenly."""
    home = type_.layout
    for axis, pending in type_.layout.partials:
        home = home.release(axis) if isinstance(pending, P) else home
    layout_there = home
    for axis in home.mesh.axes:
        if axis not in here and home.mesh.size(axis) > 1 and not isinstance(home.placement(axis), S):
            layout_there = _shards_evenly(layout_there, axis)
    return _Border(home, layout_there)


def _shards_evenly(layout: Layout, axis: str) -> Layout:
    dims = sorted(range(layout.rank), key=lambda d: (any(a.axes for a in layout.dims[d]), d != layout.rank - 2, d))
    for d in dims:
        try:
            sharded = layout.shard(axis, d)
        except LayoutError:
            continue
        if sharded.is_even:
            return sharded
    return layout


# -- gradients -----------------------------------------------------------------------------------------------------------------


def _terms(placed: Sequence[PlacedStage], named: Spec) -> tuple[dict[str, list[str]], dict[str, Placements]]:
    """The inputs of the update that hold terms of each gradient, one per stage that has any, and how they and the loss are laid out."""
    sources: dict[str, list[str]] = {}
    given: dict[str, Placements] = {}
    for stage in placed:
        for p in stage.phases:
            for name, node in p.outputs:
                if name.startswith("d.param."):
                    sources.setdefault(name.removeprefix("d."), []).append(f"{name}.{stage.number}")
                    given[f"{name}.{stage.number}"] = node.layout.placements
                elif name == "loss":
                    given[LOSS_SUM] = node.layout.placements
    return sources, given


def spread(line: PlacedPipeline, stages: Sequence[PlacedStage], like: Program) -> Program | None:
    """State brought to the ranks of the pipeline that read it but are not its home: `NAME.RANK` for each; None where there is none."""
    wanted = {(n, s.rank): None for s in stages for n in s.inputs() if line.homes.get(n) not in (None, s.rank)}
    names = dict.fromkeys(n for n, _ in wanted)
    if not names:
        return None
    nodes = {n: like.input_names[n] for n in names}
    outputs = {f"{n}.{r}": send(nodes[n], axis="pp", to=r) for n, r in wanted}
    return new_program("spread", like.mesh, list(nodes.values()), outputs)


# -- the update ------------------------------------------------------------------------------------------------------------------


def update(captured: Captured, sources: Mapping[str, Sequence[str]], home: Home, more: Iterable[Node] = ()) -> Program:
    """What follows the last micro-batch: gradients, given by the inputs that hold their terms, clipped and applied; the loss.

    Parameters may share a gradient, as those of two branches that are added do: then any of them gives it. `more` are inputs that
    the step keeps besides those of the captured one. `home` tells the rank of the pipeline where an input is; numbers gathered from
    several are first put together on each.
    """
    p = captured.program
    lost = [name for name in captured.gradients if not sources.get(name)]
    if lost:
        raise PlanError(f"no stage has a gradient of {lost[0]}", needed="every parameter that learns to be read by a stage", found="none")
    owner = {g: name for name, g in reversed([*captured.gradients.items()])}
    swap = {g: _sum([input_node(n, g.type) for n in sources[name]]) for g, name in owner.items()}
    loss = p.output_names["loss"]
    kept = {name: n for name, n in p.outputs if name != "loss" and not name.startswith("buffer.")}
    made = remade(kept.values(), swap)
    outputs = {"loss": input_node(LOSS_SUM, loss.type), **{name: made[n] for name, n in kept.items()}}
    outputs = _gathered_at_home(outputs, home)
    placements = [n for n in p.inputs if n.role not in GIVEN]
    return program_of(f"{p.name}.update", outputs, p, {}, [*placements, *more])


def _sum(terms: Sequence[Node]) -> Node:
    total = terms[0]
    for t in terms[1:]:
        total = add(total, t)
    return total


def _gathered_at_home(outputs: Mapping[str, Node], home: Home) -> dict[str, Node]:
    """Concats of values from several ranks of the pipeline, as concats of what each rank puts together."""
    at: dict[Node, frozenset[int]] = {}
    swap: dict[Node, Node] = {}
    for n in toposort(outputs.values()):
        here = home(n.attr("name")) if n.op.is_input else None
        at[n] = frozenset({here} if here is not None else ()).union(*(at[a] for a in n.args))
        if n.op is concat_op and len(at[n]) > 1:
            runs = [list(run) for _, run in itertools.groupby(n.args, key=at.__getitem__)]
            if len(runs) < len(n.args):
                swap[n] = concat([concat(r, n.attr("dim")) if len(r) > 1 else r[0] for r in runs], n.attr("dim"))
    made = remade(outputs.values(), swap)
    return {name: made[n] for name, n in outputs.items()}
