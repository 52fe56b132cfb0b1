"""Bands above the ops of a timeline: the phase a step is in (forward, backward, optimizer), and the layer it works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.core.node import Node
from weft.core.program import Group, Program
from weft.core.role import Role
from weft.cost.simulate import name_of
from weft.cost.timeline import Task
from weft.ops.registry import Kind
from weft.plan.roles import Roles

Span = tuple[Node | Group | None, float, float]  # what ran, from when, until when


def bands(program: Program, spans: Iterable[Span]) -> list[tuple[Task, float]]:
    """The bands over what ran, in order, with their starts."""
    roles, params = Roles(program), params_of(program)
    phases, layers = list[tuple[str, float, float]](), list[tuple[str, float, float]]()
    for unit, began, ended in spans:
        phase = _phase(unit, roles)
        afresh_phase = bool(phases) and phase not in ("", phases[-1][0])
        _extend(phases, phase, began, ended)
        sends = isinstance(unit, Node) and unit.op.kind is Kind.COMM
        if phases and phases[-1][0] != "optimizer" and not sends:
            _extend(layers, layer_of(module_of(unit, params)), began, ended, afresh=afresh_phase)
    found = [(name, "phase", name, began, ended) for name, began, ended in _smoothed(phases)]
    found += [(name, "layer", "layer", began, ended) for name, began, ended in layers if name]
    return [(Task(name, stream, ended - began, (), cause), began) for name, stream, cause, began, ended in found]


def params_of(program: Program) -> dict[Node, str]:
    return {n: name for name, n in program.inputs_for(Role.PARAMETER).items()}


def labelled(unit: Node | Group, params: Mapping[Node, str]) -> str:
    """The op, and the module whose parameter it reads."""
    return f"{name_of(unit)} {module_of(unit, params)}".strip()


def module_of(unit: Node | Group | None, params: Mapping[Node, str]) -> str:
    """The module whose parameter it reads, if any, also where that is first gathered or cast."""
    return next((m for n in _nodes(unit) for a in (n, *n.args) if (m := _module(a, params))), "")


def layer_of(module: str) -> str:
    """`model.layers.3.mlp.up` as model.layers.3; a module outside of numbered layers as itself."""
    path = module.split(".")
    numbered = next((i for i, word in enumerate(path) if word.isdigit()), len(path) - 1)
    return ".".join(path[: numbered + 1])


def _nodes(unit: Node | Group | None) -> tuple[Node, ...]:
    return () if unit is None else tuple(unit.nodes) if isinstance(unit, Group) else (unit,)


def _module(n: Node, params: Mapping[Node, str]) -> str:
    while n not in params and len(n.args) == 1:
        n = n.args[0]
    return params.get(n, "").partition(".")[2].rpartition(".")[0]


def _phase(unit: Node | Group | None, roles: Roles) -> str:
    """Forward, backward or optimizer; empty where nothing says it."""
    nodes = _nodes(unit)
    if any(n in roles.after for n in nodes):
        return "optimizer"
    return "" if not nodes else "forward" if all(n in roles.forward for n in nodes) else "backward"


def _smoothed(found: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Without what is too short to be seen between two bands of one name, such as a constant that only the backward pass reads."""
    out: list[tuple[str, float, float]] = []
    short = 0.01 * (found[-1][2] - found[0][1]) if found else 0.0
    for name, began, ended in found:
        if len(out) > 1 and name == out[-2][0] and out[-1][2] - out[-1][1] < short:
            out.pop()
        if out and out[-1][0] == name:
            out[-1] = (name, out[-1][1], ended)
        else:
            out.append((name, began, ended))
    return out


def _extend(found: list[tuple[str, float, float]], name: str, began: float, ended: float, afresh: bool = False) -> None:
    """The last band goes on, or another begins."""
    if found and not afresh and name in ("", found[-1][0]):
        found[-1] = (found[-1][0], found[-1][1], ended)
    elif name:
        found.append((name, began, ended))
