"""The layouts of a placed program, given to a step of the same model: at another batch, in other number types, with other settings.

Nodes that move nothing are paired with those of the step from the inputs on: the same op on paired operands, of several the one with the same
attributes, else the next. A pair is made again as the step's node, on operands laid out as in the placed program; communication is made again as it
is. So without communication the result is the step, node for node. What has no pair, as clipping where the plan had none, is placed around the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.core.errors import LayoutError, WeftError
from weft.core.layout import Layout, Placement, R
from weft.core.node import Node, Op, make
from weft.core.program import Program, new_program
from weft.ops.comm import is_comm
from weft.ops.source import input_in_layout
from weft.plan.place import PlacingOptions, place
from weft.rewrite.engine import erase_nodes

LAID_OUT = ("shards", "mesh")  # attributes that say a layout
Groups = dict[tuple[Op, tuple[Node, ...]], list[Node]]


@dataclass(frozen=True)
class Relaid:
    """A step as it is laid out, those of its nodes that had no pair, and those inputs and nodes of the plan's forward pass that had none."""

    program: Program
    alone: tuple[Node, ...]
    lost: tuple[Node, ...] = ()


def with_same_layouts(placed: Program, step: Program, options: PlacingOptions | None = None) -> Relaid:
    """The step laid out as the placed program is, and placed around that where the program has no such nodes."""
    meant = _meant(placed, step)
    made = _remade(placed, meant)
    placements = {n.attr("name"): _places(made[n]) for n in placed.inputs if n in made}
    seeds = {meant[n]: new for n, new in made.items() if not n.op.is_input and not meant[n].op.is_input}
    around = place(step, placed.mesh, placements, options, made=seeds)
    ends = {name: made.get(n) for name, n in placed.outputs if meant.get(n) is step.output_names.get(name)}
    outputs = {name: ends.get(name) or n for name, n in around.outputs}
    program = new_program(step.name, placed.mesh, around.inputs, outputs, state=step.state, lines=around.lines)
    ahead = placed.needs(placed.output_names["loss"]) if "loss" in placed.output_names else set[Node]()
    lost = [n for n in placed.nodes if n not in made and (n in ahead or n.attr("name") in step.input_names)]
    return Relaid(program, tuple(n for n in step.nodes if n.args and n not in seeds), tuple(lost))


def _places(node: Node) -> dict[str, Placement]:
    return {axis: p for axis, p in node.layout.placements.items() if p != R}


# -- pairs -----------------------------------------------------------------------------------------------------------------------------


def _meant(placed: Program, step: Program) -> dict[Node, Node]:
    """Nodes of the placed program, and which of the step's each computes; communication computes what it is given."""
    gone = erase_nodes(placed)
    theirs, own = _groups(dict.fromkeys(gone[n] for n in placed.nodes)), _groups(step.nodes)
    known = {e: step.input_names[e.attr("name")] for e in gone.values() if e.op.is_input and e.attr("name") in step.input_names}
    for node in placed.nodes:
        e = gone[node]
        if e not in known and not e.op.is_input and all(a in known for a in e.args):
            known |= _matched(theirs[e.op, e.args], own.get((e.op, tuple(known[a] for a in e.args)), ()))
    return {n: known[gone[n]] for n in placed.nodes if gone[n] in known}


def _groups(nodes: Iterable[Node]) -> Groups:
    """Nodes of the same op on the same operands."""
    found: Groups = {}
    for n in nodes:
        found.setdefault((n.op, n.args), []).append(n)
    return found


def _matched(theirs: Sequence[Node], own: Sequence[Node]) -> dict[Node, Node]:
    """One of the step's nodes for each: of the same attributes, number type aside, else the next."""
    found: dict[Node, Node] = {}
    for same in (_attrs, lambda n: _attrs(n, "dtype"), lambda n: ()):
        free: dict[object, list[Node]] = {}
        for n in own:
            if n not in found.values():
                free.setdefault(same(n), []).append(n)
        for e in theirs:
            if e not in found and free.get(same(e)):
                found[e] = free[same(e)].pop(0)
    return found


def _attrs(n: Node, *aside: str) -> tuple[tuple[str, object], ...]:
    return tuple((k, v) for k, v in n.attrs if k not in (*aside, *LAID_OUT))


# -- nodes made again ------------------------------------------------------------------------------------------------------------------


def _remade(placed: Program, meant: Mapping[Node, Node]) -> dict[Node, Node]:
    """Nodes with a pair, as far as the step's sizes can be sharded so."""
    made: dict[Node, Node] = {}
    for n in placed.nodes:
        if n in meant and all(a in made for a in n.args):
            try:
                made[n] = _made(n, meant[n], tuple(made[a] for a in n.args))
            except WeftError:
                continue
    return made


def _made(node: Node, own: Node, args: tuple[Node, ...]) -> Node:
    if node.op.is_input:
        layout = Layout.of(node.mesh, own.shape, node.layout.placements)
        if not layout.is_even:
            raise LayoutError("parts that differ in size", needed="equal parts", found=str(layout))
        return input_in_layout(own, layout)  # type: ignore[no-any-return]
    if is_comm(node) or node.op is not own.op:  # items of what several tensors sent at once give
        return make(node.op, args, dict(node.attrs))
    return make(node.op, args, dict(own.attrs) | {k: v for k, v in node.attrs if k in LAID_OUT})
