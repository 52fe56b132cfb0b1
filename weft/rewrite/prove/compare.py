"""One instance of a rule, judged: both sides on every rank, against each other and against one device, values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft import interp
from weft.autodiff import vjp
from weft.core.errors import InvalidProgram, NotDifferentiable
from weft.core.node import Node
from weft.core.program import Program
from weft.rewrite.engine import erase
from weft.rewrite.prove import ranks
from weft.rewrite.prove.domains import Domain
from weft.rewrite.prove.instances import Instance


@dataclass(frozen=True)
class Difference:
    """Where two sides part: what was compared, and the first element that differs."""

    what: str
    output: str
    index: tuple[int, ...]
    left: Any
    right: Any


def differ(instance: Instance, domain: Domain, *, gradients: bool = True) -> Difference | None:
    """The first difference in the domain, or None."""
    left, right = instance.program("left"), instance.program("right")
    found = _differ(left, right, domain, "value") or _alone(left, domain)
    if found is not None or not gradients or not any(n.dtype.is_floating_point for n in instance.inputs):
        return found
    try:
        dl, dr = vjp(left), vjp(right)
    except NotDifferentiable:
        return None
    return _differ(dl, dr, domain, "gradient")


def _differ(left: Program, right: Program, domain: Domain, what: str) -> Difference | None:
    values: dict[Node, Any] = {}
    for p in (left, right):
        values = ranks.run(domain, [n for _, n in p.outputs], values)
    for name, a in left.outputs:
        b = right.output_names[name]
        try:
            x, y = (ranks.denote(domain, values[n], n.type) for n in (a, b))
        except InvalidProgram as e:
            return Difference(f"{what}: {e.message}", name, (), e.needed, e.found)
        if not torch.equal(x, y):
            at = tuple(int(i) for i in torch.nonzero(x != y)[0])
            return Difference(what, name, at, x[at].item(), y[at].item())
    return None


def _alone(program: Program, domain: Domain) -> Difference | None:
    """The ranks together against one device."""
    values = ranks.run(domain, [n for _, n in program.outputs])
    bare = erase(program)
    alone = ranks.run_alone(domain, bare.values(), ranks.global_inputs(domain, program.inputs))
    for name, node in program.outputs:
        x, y = ranks.denote(domain, values[node], node.type), alone[bare[name]]
        if not torch.equal(x, y):
            at = tuple(int(i) for i in torch.nonzero(x != y)[0])
            return Difference("ranks against one device", name, at, x[at].item(), y[at].item())
    return None


def differ_in_numbers(
    instance: Instance, seed: int, tolerance: float = 1e-9
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor] | None:
    """Small integers in floats, where max and relu mean what they say: inputs and the two results, if they differ."""
    gen = torch.Generator().manual_seed(seed)
    given = {n.attr("name"): _small(n, gen) for n in instance.inputs}
    left, right = (interp.run(instance.program(s), given, seed=seed) for s in ("left", "right"))
    for name, x in left.items():
        if not interp.same_values(x, right[name], tolerance):
            return given, x, right[name]
    return None


def _small(node: Node, gen: torch.Generator) -> torch.Tensor:
    if not node.dtype.is_floating_point:
        return torch.randint(0, 2, node.shape, generator=gen).to(node.dtype)
    return torch.randint(-3, 4, node.shape, generator=gen).to(node.dtype)
