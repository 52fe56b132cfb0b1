"""Counterexamples a person can read: the rule as filled, the layouts, small tensors, and the two results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft import interp
from weft.core.errors import WeftError
from weft.core.layout import Mesh
from weft.rewrite.prove.compare import Difference, differ_in_numbers
from weft.rewrite.prove.instances import Instance, choices_on, settings, shaped_sides, typed
from weft.rewrite.schema import Form, Schema, make_node


def explain(schema: Schema, instance: Instance, wrong: Difference, seed: int) -> str:
    """The smallest numbers at hand that show it; else the residues."""
    lines = [f"  {instance.title}", f"  on {instance.mesh}"]
    numbers = _numbers(instance, seed)
    if numbers is None:
        lines += [f"  {n.attr('name')}: {n.type}" for n in instance.inputs]
        lines += [f"  {wrong.what} of {wrong.output} at {list(wrong.index)}: left {wrong.left}, right {wrong.right} (mod 2^31 - 1)"]
        return "\n".join(lines)
    given, left, right = numbers
    for n in instance.inputs:
        name = n.attr("name")
        lines.append(f"  {name} = {_show(given[name])}   {n.type}" + _terms(instance, name, given, seed))
    return "\n".join([*lines, f"  left   {_show(left)}", f"  right  {_show(right)}"])


def _numbers(instance: Instance, seed: int) -> Any:
    for k in range(8):
        try:
            found = differ_in_numbers(instance, seed + k)
        except WeftError:
            return None
        if found is not None:
            return found
    return None


def _terms(instance: Instance, name: str, given: dict[str, torch.Tensor], seed: int) -> str:
    """What the ranks hold of a partial value."""
    at = [n.attr("name") for n in instance.inputs].index(name)
    node = instance.inputs[at]
    if not node.layout.partials or given[name].numel() > 6:
        return ""
    values = interp.distribute(given[name], node.type, seed + at)
    return "   ranks hold " + " ".join("-" if x is None else _show(x) for x in values)


def _show(x: torch.Tensor) -> str:
    """Rows in brackets, integers without a point."""
    return _number(x.item()) if x.ndim == 0 else "[" + " ".join(_show(row) for row in x) + "]"


def _number(v: float) -> str:
    return str(int(v)) if math.isfinite(v) and v == int(v) else f"{v:.3g}"


def explain_types(schema: Schema, forms: Sequence[Form]) -> str:
    """Why no mesh, shape and layout gives both sides one type: a place where the left side types, and what the right side is there."""
    mesh, lines = Mesh(m=2), [f"  {schema}", "  no small mesh, shape and layout gives both sides one type"]
    for setting in settings(schema, (2, 3), forms, mesh.axes):
        for bound, nodes in typed(setting.left, choices_on(setting, mesh)):
            title = f"  {', '.join(map(str, setting.left))}  ==  {', '.join(map(str, setting.right))}"
            values = [f"  {h}: {n.type}" for h, n in bound.items()]
            return "\n".join(
                [*lines, title, f"  on {mesh}", *values, f"  left   {nodes[0].type}", f"  right  {_type_or_reason(setting.right[0], bound)}"]
            )
    for left, right in shaped_sides(schema, (2, 3), forms, mesh.axes):
        return "\n".join([*lines, f"  on one device the left is {left}", f"  and the right is {right}"])
    return "\n".join([*lines, "  the left side itself never types"])


def _type_or_reason(expr: Any, bound: Any) -> str:
    try:
        return str(make_node(expr, bound).type)
    except WeftError as e:
        return f"{e.message}: needed {e.needed}, found {e.found}"
    except (KeyError, IndexError):
        return "no value at all"
