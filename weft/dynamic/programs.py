"""Vertex functions as weft programs: written out, rewritten, placed on a mesh, and run as vertex functions.

    p = dynamic.program(model, x)                       # p.program prints, and takes every rule and verb of weft
    model = dynamic.Model(p.with_program(better), states)
    local = dynamic.shard(p, Mesh(tp=2), {"h": S(0), "c": S(0)}, {"below.weight": S(0, within=hidden)}, rank)

The program is captured with as many rows as a trace has, so it stands for any number of vertices. A sharded function keeps its share
of the weights and of the states; what it lacks it gathers inside each round. Its gradient is the program's own, collectives included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from weft.autodiff import vjp
from weft.core.errors import StructureError
from weft.core.layout import Layout, Mesh, Placement, R, S
from weft.core.node import Node
from weft.core.program import Program
from weft.dynamic import collective, ops
from weft.dynamic.model import Model
from weft.dynamic.trace import DECOMPOSED, Traced, lift_weights, like, name_results, placeholders
from weft.dynamic.vertex import Source, Vertex
from weft.ops.comm import reshard
from weft.ops.registry import Kind, Local
from weft.plan.place import place


@dataclass(frozen=True)
class VertexProgram:
    """A vertex function as a program, and what its inputs and outputs stand for."""

    program: Program
    sources: Mapping[str, Source]  # input -> what it reads
    weights: Mapping[str, Tensor]  # input -> the model's tensor
    states: Mapping[str, str]  # output -> state
    outputs: Mapping[str, str]  # output -> what is pushed
    after: int | None
    optional: frozenset[Source] = field(default_factory=frozenset)

    def with_program(self, program: Program) -> VertexProgram:
        """The same function computed by another program with these inputs and outputs."""
        missing = set(self.states) | set(self.outputs) - set(program.output_names)
        missing -= set(program.output_names)
        strange = set(program.input_names) - set(self.sources) - set(self.weights)
        if missing or strange:
            raise StructureError(
                "this program is not one of the same vertex function", needed=f"outputs {', '.join([*self.states, *self.outputs])}",
                found=f"{'no ' + ', '.join(missing) if missing else 'new inputs ' + ', '.join(strange)}",
            )  # fmt: skip
        return replace(self, program=program)

    def held(self) -> list[Tensor]:
        return list(self.weights.values())

    def __call__(self, v: Vertex) -> None:
        """Run the program on the rows of a vertex."""
        given = {n: self._read(v, s) for n, s in self.sources.items() if n in self.program.input_names} | dict(self.weights)
        values = evaluate(self.program, given)
        v.scatter(**{state: values[name] for name, state in self.states.items()})
        v.push(**{output: values[name] for name, output in self.outputs.items()})

    def _read(self, v: Vertex, source: Source) -> Tensor:
        optional = source in self.optional
        if source.role == "pull":
            return v.pull(source.name, optional=optional)
        if source.role == "at":
            return v.edge_rows
        if source.role == "slot":
            return v.gather(source.name, source.slot, optional=optional)
        return v.gather(source.name, after=self.after or 0)


def program(model: Model, inputs: Any = None, kind: str = "vertex") -> VertexProgram:
    """The vertex function of a type, for inputs like these, as a program."""
    from weft.frontend.capture import capture

    _teach()
    from weft.dynamic.model import _inputs

    traced = model._variant(_inputs(inputs, None), None).written[kind]
    names = _weight_names(model, traced)
    batch = {str(s): n.meta["val"] for s, n in traced.sources.items() if s.role != "weight"}
    meta = {k: torch.empty(v.shape, dtype=v.dtype, device="meta") for k, v in batch.items()}
    captured = capture(_Module(traced, names), meta, name=kind)
    sources = {f"batch.{s}": s for s in traced.sources if s.role != "weight"}
    weights = {f"param.{names[int(s.name)]}": traced.weights[int(s.name)] for s in traced.sources if s.role == "weight"}
    known = captured.program.input_names
    return VertexProgram(
        captured.program, {k: s for k, s in sources.items() if k in known}, {k: w for k, w in weights.items() if k in known},
        {f"out.state_{s}": s for s in traced.states}, {f"out.push_{o}": o for o in traced.outputs},
        traced.reads.slots if traced.reads.rest else None, frozenset(traced.optional),
    )  # fmt: skip


class _Module(nn.Module):
    """A traced function as a module, for capture."""

    def __init__(self, traced: Traced, names: Sequence[str]) -> None:
        super().__init__()
        self.traced = traced
        for name, weight in zip(names, traced.weights, strict=True):
            holder: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(holder, part):
                    setattr(holder, part, nn.Module())
                holder = getattr(holder, part)
            setattr(holder, last, weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.detach(), weight.is_floating_point()))
        self.names = names

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        traced = self.traced
        module = fx.GraphModule(nn.Module(), traced.graph)
        weights = [attrgetter(name)(self) for name in self.names]  # capture puts others in their place
        args = [weights[int(s.name)] if s.role == "weight" else given[str(s)] for s in traced.sources]
        results = fx.Interpreter(module).run(*args)
        named = [*(f"state_{s}" for s in traced.states), *(f"push_{o}" for o in traced.outputs)]
        return dict(zip(named, results, strict=True))


def _weight_names(model: Model, traced: Traced) -> list[str]:
    """The names weights have in the functions' modules, or numbers."""
    owners = [getattr(f, "__self__", f) for f in model.functions.values()]
    known = {id(p): n for m in (model, *owners) if isinstance(m, nn.Module) for n, p in m.named_parameters()}
    return [known.get(id(w), f"weight{i}") for i, w in enumerate(traced.weights)]


_TAUGHT: list[bool] = []


def _teach() -> None:
    """Capture knows spread and segment_sum as a lookup and its transpose."""
    if _TAUGHT:
        return
    from weft.frontend.capture.modes import teach
    from weft.ops.embed import put, take
    from weft.ops.fill import arange

    teach(ops.spread)(lambda x, at: take(x, at, 0))
    teach(ops.segment_sum)(lambda x, at, rows: put(x, at, arange(rows, x.mesh), 0))
    _TAUGHT.append(True)


def evaluate(program: Program, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs for global values: a program placed nowhere."""
    values: dict[Node, Any] = {}
    for node in program.nodes:
        if node.op.name == "input":
            values[node] = given[node.attr("name")]
        else:
            values[node] = _compute(node, [values[a] for a in node.args], None)
    return {name: values[node] for name, node in program.outputs}


def _compute(node: Node, args: list[Any], at: Mapping[str, int] | None) -> Any:
    """One node, on one rank or in one piece. A lookup by edge is a spread, its transpose a sum over edges."""
    if _by_edge(node, args):
        return ops.spread(args[0], args[1]) if node.op.name == "take" else ops.segment_sum(args[0], args[1], node.shape[0])
    attrs = dict(node.attrs)
    if at is not None and node.op.local is not None:
        return node.op.local(Local(node, at), *args, **attrs)
    return node.op.run(*args, **attrs)


def _by_edge(node: Node, args: list[Any]) -> bool:
    return node.op.name in ("take", "put") and node.attr("dim") == 0 and node.args[1].op.name == "input" and args[1].dim() == 1


# --- on a mesh


class Sharded:
    """A vertex function on one rank of a mesh: its weights are the rank's shares, its states too."""

    def __init__(self, whole: VertexProgram, placed: Program, at: Mapping[str, int], groups: collective.Groups) -> None:
        self.whole, self.placed, self.at, self.groups = whole, placed, dict(at), groups
        inputs = placed.input_names
        self.weights = {n: nn.Parameter(_share(w.detach(), inputs[n].layout, at), w.requires_grad) for n, w in whole.weights.items()}

    def held(self) -> list[Tensor]:
        return list(self.weights.values())

    def __call__(self, v: Vertex) -> None:
        given = {n: self.whole._read(v, s) for n, s in self.whole.sources.items()} | dict(self.weights)
        values = self._run([node for _, node in self.placed.outputs], given)
        found = {name: values[node] for name, node in self.placed.outputs}
        v.scatter(**{state: found[name] for name, state in self.whole.states.items()})
        v.push(**{output: found[name] for name, output in self.whole.outputs.items()})

    def _run(self, wanted: Sequence[Node], given: Mapping[str, Tensor]) -> dict[Node, Any]:
        """Nodes on this rank, collectives as ops of their own."""
        from weft.core.node import toposort

        values: dict[Node, Any] = {}
        for node in toposort(wanted):
            args = [values[a] for a in node.args]
            if node.op.name == "input":
                values[node] = given[node.attr("name")]
            elif node.op.kind is Kind.COMM:
                values[node] = collective.exchange(args[0], collective.key(node, self.at, self.groups))
            else:
                values[node] = _compute(node, args, self.at)
        return values

    def joint(self, traced: Traced, wanted: set[Source], pushed: set[str]) -> Traced:
        """The traced function with gradients, from the program's own vjp."""
        names = {s: n for n, s in self.whole.sources.items()}
        names |= {Source("weight", str(i)): n for i, w in enumerate(traced.weights) for n, mine in self.weights.items() if mine is w}
        back = vjp(self.placed, [names[s] for s in traced.sources if s in wanted])
        outs = {**{("state", s): n for n, s in self.whole.states.items()}, **{("push", o): n for n, o in self.whole.outputs.items()}}
        given = [*((("state", s)) for s in traced.states), *((("push", o)) for o in traced.outputs if o in pushed)]
        cotangents = [Source("d_state" if kind == "state" else "d_push", name) for kind, name in given]
        asked = [s for s in traced.sources if s in wanted]
        grads = [reshard(back.output_names[f"d.{names[s]}"], self.placed.input_names[names[s]].layout) for s in asked]
        forward = [self.placed.output_names[outs["state", s]] for s in traced.states]
        forward += [self.placed.output_names[outs["push", o]] for o in traced.outputs]

        def run(*values: Tensor) -> list[Tensor]:
            known = {names[s]: x for s, x in zip(traced.sources, values, strict=False)}
            known |= {f"ct.{n}": torch.zeros_like(_like_local(self, n)) for n in outs.values()}
            known |= {f"ct.{outs[g]}": x for g, x in zip(given, values[len(traced.sources) :], strict=True)}
            found = self._run([*forward, *grads], known)
            return [found[n] for n in [*forward, *grads]]

        return _joint(traced, run, cotangents, given, asked)


def _like_local(sharded: Sharded, output: str) -> Tensor:
    node = sharded.placed.output_names[output]
    return torch.empty(node.layout.local_shape(sharded.at), dtype=node.dtype)


def _joint(traced: Traced, run: Any, cotangents: list[Source], given: list[tuple[str, str]], asked: list[Source]) -> Traced:
    ends = [(traced.states if kind == "state" else traced.outputs)[name] for kind, name in given]
    args = [like(n, False) for n in traced.sources.values()] + [like(n, False) for n in ends]
    with torch.no_grad():
        made = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True, decomposition_table=DECOMPOSED)(*args)
    both = replace(traced, graph=made.graph, weights=list(traced.weights), sources={}, states={}, outputs={}, grads={}, messages={})
    both.sources = dict(zip([*traced.sources, *cotangents], placeholders(made.graph), strict=True))
    lift_weights(both, made)  # constants of the program
    name_results(both, [*traced.states], [*traced.outputs], asked)
    return both


def shard(
    whole: VertexProgram, mesh: Mesh, states: Mapping[str, Placement], weights: Mapping[str, Placement], rank: int,
    groups: collective.Groups | None = None, axis: str = "tp",
) -> tuple[Sharded, dict[str, tuple[int, ...]]]:  # fmt: skip
    """This rank's vertex function, and the shapes of its states.

    Placements of states count dims without the rows; weights go by the names they have in the program, without `param.`.
    """
    unknown = [w for w in weights if f"param.{w}" not in whole.weights]
    if unknown:
        raise StructureError(
            f"no weight is called {unknown[0]!r}", needed=", ".join(n.removeprefix("param.") for n in whole.weights), found=unknown[0]
        )
    rows = {name: _with_rows(p) for name, p in states.items()}
    inputs = {n: {axis: rows[s.name]} for n, s in whole.sources.items() if s.role in ("slot", "edge") and s.name in rows}
    inputs |= {f"param.{w}": {axis: p} for w, p in weights.items()}
    placed = place(whole.program, mesh, inputs)
    want = {n: Layout.of(mesh, placed.output_names[n].shape, {axis: rows[s]} if s in rows else {}) for n, s in whole.states.items()}
    want |= {n: Layout.of(mesh, placed.output_names[n].shape) for n in whole.outputs}
    placed = placed.with_outputs([(n, _held_as(node, want[n])) for n, node in placed.outputs], "as the states are laid out")
    at = mesh.coords(rank)
    local = {s: placed.output_names[n].layout.local_shape(at)[1:] for n, s in whole.states.items()}
    return Sharded(whole, placed, at, groups or {}), local


def _held_as(node: Node, want: Layout) -> Node:
    """The value in a layout; a gather that is undone at once is left out."""
    before = node.args[0] if node.op.name == "all_gather" else node
    return before if before.layout == want else reshard(node, want)


def _with_rows(p: Placement) -> Placement:
    return S(p.dim + 1, p.within) if isinstance(p, S) else R


def _share(weight: Tensor, layout: Layout, at: Mapping[str, int]) -> Tensor:
    for d in range(layout.rank):
        weight = weight.index_select(d, layout.positions(d, at).to(weight.device))
    return weight.clone()
