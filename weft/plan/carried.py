"""The layouts of a placed program, given to a step of the same structure: at another batch, in other number types, with other settings.

Every node that moves nothing stands for a node of the step, found from the outputs back. It is made again with that node's attributes, on
operands held as in the placed program; communication is made again as it is. So without communication the result is the step, node for node.
"""

from __future__ import annotations

from weft.core.errors import PlanError, WeftError
from weft.core.layout import Layout
from weft.core.node import Node, Type, make
from weft.core.program import Program, new_program
from weft.ops.comm import is_comm
from weft.ops.source import input_node

LAID_OUT = ("cuts", "mesh")  # attributes that say a layout


def carried(placed: Program, step: Program) -> Program:
    """The step held as the placed program is; refused where they differ in more than sizes, types and numbers, or cannot be cut alike."""
    meant, made = _pairs(placed, step), dict[Node, Node]()
    try:
        for node in placed.nodes:
            made[node] = _made(node, meant[node], tuple(made[a] for a in node.args))
    except WeftError as e:
        raise PlanError("the step cannot be held so", needed=e.needed, found=f"{e.message}: {e.found}") from e
    inputs = [made[placed.input_names[name]] for name in step.input_names]
    outputs = {name: made[placed.output_names[name]] for name in step.output_names}
    return new_program(step.name, placed.mesh, inputs, outputs, state=step.state)


def _pairs(placed: Program, step: Program) -> dict[Node, Node]:
    """Nodes of the placed program, and what each computes of the step; communication computes what it is given."""
    _require_same_names(placed, step)
    meant: dict[Node, Node] = {}
    todo = [(placed.output_names[name], n) for name, n in step.outputs]
    todo += [(placed.input_names[name], n) for name, n in step.input_names.items()]
    while todo:
        node, own = todo.pop()
        if meant.setdefault(node, own) is not own:
            raise _differ(node, own)
        if is_comm(node) and len(node.args) == 1:
            todo.append((node.args[0], own))
        elif node.op is own.op and len(node.args) == len(own.args):
            todo += zip(node.args, own.args, strict=True)
        else:
            raise _differ(node, own)
    return meant


def _require_same_names(placed: Program, step: Program) -> None:
    for kind, here, there in (("input", placed.input_names, step.input_names), ("output", placed.output_names, step.output_names)):
        odd = sorted(here.keys() ^ there.keys())
        if odd:
            raise PlanError(f"only one of the steps has the {kind} {odd[0]}", needed=f"{len(here)} {kind}s", found=f"{len(there)}")


def _differ(node: Node, own: Node) -> PlanError:
    return PlanError("the steps are of different structure", needed=repr(node), found=repr(own))


def _made(node: Node, own: Node, args: tuple[Node, ...]) -> Node:
    if node.op.name == "input":
        made: Node = input_node(own.attr("name"), Type(own.dtype, Layout.of(node.mesh, own.shape, node.layout.placements)))
        return made
    if is_comm(node):
        return make(node.op, args, dict(node.attrs))
    return make(node.op, args, dict(own.attrs) | {k: v for k, v in node.attrs if k in LAID_OUT})
