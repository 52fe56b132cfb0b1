"""Vertex functions as programs of a user's: written out, rewritten, placed on a mesh, and run as vertex functions.

    p = dynamic.program(model, x)                       # p.program prints, and takes every rule and verb of weft
    model = dynamic.Model(p.with_program(better), states)
    local = dynamic.shard(p, Mesh(tp=2), {"h": S(0), "c": S(0)}, {"below.weight": S(0, within=hidden)}, rank)

The program is captured with as many rows as a trace has, so it stands for any number of vertices. A sharded function keeps its share
of the weights and of the states; what it lacks it gathers inside each round. Its gradient is the program's own, collectives included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from weft.core.errors import StructureError
from weft.core.layout import Layout, Mesh, Placement, R, S
from weft.core.node import Node
from weft.dynamic import collective
from weft.dynamic.model import Model, _inputs
from weft.dynamic.trace import VertexProgram
from weft.interp import take_local
from weft.ops.comm import all_gather, reshard
from weft.plan.place import place


def program(model: Model, inputs: Any = None, kind: str = "vertex") -> VertexProgram:
    """The vertex function of a type, for inputs like these, as a program."""
    return model._variant(_inputs(inputs, None), None).written[kind]


def shard(
    full: VertexProgram, mesh: Mesh, states: Mapping[str, Placement], weights: Mapping[str, Placement], rank: int,
    groups: collective.Groups | None = None, axis: str = "tp",
) -> tuple[VertexProgram, dict[str, tuple[int, ...]]]:  # fmt: skip
    """This rank's vertex function, and the shapes of its states.

    Placements of states count dims without the rows; weights go by the names they have in the program, without `param.`.
    """
    unknown = [w for w in weights if f"param.{w}" not in full.weights]
    if unknown:
        raise StructureError(
            f"no weight is called {unknown[0]!r}", needed=", ".join(n.removeprefix("param.") for n in full.weights), found=unknown[0]
        )
    rows = {name: _with_rows(p) for name, p in states.items()}
    inputs = {n: {axis: rows[s.name]} for n, s in full.sources.items() if s.role in ("slot", "edge") and s.name in rows}
    inputs |= {f"param.{w}": {axis: p} for w, p in weights.items()}
    placed = place(full.program, mesh, inputs)
    want = {n: Layout.of(mesh, placed.output_names[n].shape, {axis: rows[s]} if s in rows else {}) for n, s in full.states.items()}
    want |= {n: Layout.of(mesh, placed.output_names[n].shape) for n in full.outputs}
    placed = placed.with_outputs([(n, _in_layout(node, want[n])) for n, node in placed.outputs], "as the states are laid out")
    at = mesh.coords(rank)
    local = {s: placed.output_names[n].layout.local_shape(at)[1:] for n, s in full.states.items()}
    inputs_of = placed.input_names
    shares = {n: nn.Parameter(take_local(w.detach(), inputs_of[n].layout, at).clone(), w.requires_grad) for n, w in full.weights.items()}
    return replace(full, program=placed, weights=shares, at=dict(at), groups=groups or {}), local


def _in_layout(node: Node, want: Layout) -> Node:
    """The value in a layout; a gather that is undone at once is left out."""
    before = node.args[0] if node.op is all_gather else node
    return before if before.layout == want else reshard(node, want)


def _with_rows(p: Placement) -> Placement:
    return S(p.dim + 1, p.within) if isinstance(p, S) else R
