"""A value with a gradient of the user's own, as an autograd function has it: what its backward made of a cotangent, over inputs that stand for it
and for what it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.node import Node, make, remade, toposort
from weft.ops.registry import Kind, define
from weft.ops.source import input_node


@dataclass(frozen=True)
class _Rule:
    """Gradients of the operands, None where there is none, over `ct` and `slots`."""

    ct: Node
    slots: tuple[Node, ...]
    gradients: tuple[Node | None, ...]


_rules: dict[tuple[str, _Rule], str] = {}
_by_name: dict[str, _Rule] = {}


def with_gradient(
    name: str, value: Node, operands: Sequence[Node], ct: Node, gradients: Sequence[Node | None], call: int, complete: bool = False
) -> Node:
    """The value, the gradients of whose operands are these, made over `ct`; what else they read is kept for them.

    No two calls are one node, since what is made of a sum of cotangents need not be the sum. `complete` says that all that reads the value reads it here.
    """
    moving = [g for g in gradients if g is not None]
    after: set[Node] = set()
    for n in toposort(moving):
        if n is ct or any(a in after for a in n.args):
            after.add(n)
    read = dict.fromkeys(a for n in toposort(moving) if n in after for a in n.args if a not in after and (a.args or a.op.is_input))
    read |= dict.fromkeys(g for g in moving if g not in after)
    stands = {ct: input_node("own.ct", ct.type)} | {a: input_node(f"own.{k}", a.type) for k, a in enumerate(read) if len(a.types) == 1}
    made = remade(moving, stands)
    rule = _Rule(stands[ct], tuple(stands[a] for a in read), tuple(None if g is None else made[g] for g in gradients))
    known = _rules.setdefault((name, rule), f"{name}.{len(_rules)}")
    _by_name[known] = rule
    return make(own_gradient, (value, *operands, *read), {"rule": known, "operands": len(operands), "call": call, "complete": complete})


def rule_of(n: Node) -> _Rule:
    """The gradients of such a node's operands, over what stands for its cotangent and for what they read."""
    return _by_name[n.attr("rule")]


def _vjp(n: Node, ct: Node) -> tuple[Node | None, ...]:
    rule, many = rule_of(n), n.attr("operands")
    saved = n.args[1 + many :]
    made = remade([g for g in rule.gradients if g is not None], {rule.ct: ct, **dict(zip(rule.slots, saved, strict=True))})
    return (None, *(None if g is None else made[g] for g in rule.gradients), *(None for _ in saved))


own_gradient = define(
    "own_gradient",
    kind=Kind.VIEW,
    infer=lambda types, attrs: types[0],
    run=lambda value, *_, **__: value,
    field=lambda p, value, *_, **__: value,
    vjp=_vjp,
    doc="a value whose gradient is an autograd function's own",
)

__all__: list[Any] = ["own_gradient", "rule_of", "with_gradient"]
