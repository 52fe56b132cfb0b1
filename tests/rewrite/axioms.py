"""The axioms of rung 3, checked by rungs 1 and 2: under every layout an op accepts, its ranks together compute its global value.

For each op three meanings are compared, rank by rank against one device: its own on small whole numbers, its polynomial or a random table
mod a prime, and its polynomial or an unknown function in unknowns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from weft import interp
from weft.core.node import Node
from weft.rewrite.pattern import Call, Hole
from weft.rewrite.prove.compare import differ
from weft.rewrite.prove.domains import Field, Symbolic, Unsuitable
from weft.rewrite.prove.instances import Instance, sample
from weft.rewrite.schema import Form, Schema


def axiom(form: Form) -> Schema:
    """f(x, ...) == f(x, ...): its instances are the layouts the op accepts."""
    expr: Call = form.call(*(Hole("xyz"[k]) for k in range(form.arity)))
    return Schema(f"layouts_of_{form.op.name}", (expr,), (expr,))


def faults(form: Form, per_site: int = 8, seed: int = 0) -> list[str]:
    """Layouts under which an op's ranks do not compute its global value; none if the entry is right."""
    found = []
    for instance in sample(axiom(form), (), random.Random(seed), per_site):
        wrong = _fault(instance, seed)
        if wrong:
            found.append(f"{form.name} on {', '.join(str(n.type) for n in instance.inputs)}: {wrong}")
    return found


def _fault(instance: Instance, seed: int) -> str:
    for domain in (Field(seed), Symbolic()):
        try:
            wrong = differ(instance, domain)
        except Unsuitable:
            continue
        if wrong is not None:
            return f"{wrong.what} in {type(domain).__name__}"
    return "" if _same_numbers(instance, seed) else "its own meaning"


def _same_numbers(instance: Instance, seed: int) -> bool:
    gen = torch.Generator().manual_seed(seed)
    program = instance.program("left")
    given = {n.attr("name"): _small(n, gen) for n in instance.inputs}
    whole, together = interp.run_global(program, given), interp.run(program, given, seed=seed)
    return all(interp.same_values(whole[k], together[k], 1e-9) for k in whole)


def _small(node: Node, gen: torch.Generator) -> torch.Tensor:
    """Whole numbers, not zero, so that nothing is divided by it; indices below two."""
    low, high = (1, 5) if node.dtype.is_floating_point else (0, 2)
    return torch.randint(low, high, node.shape, generator=gen).to(node.dtype)


def check_axioms(forms: Sequence[Form], per_site: int = 8, seed: int = 0) -> list[str]:
    return [f for form in forms for f in faults(form, per_site, seed)]
