"""Which mesh: every way to arrange the ranks in axes is tried briefly, and the most promising are then laid out with care."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weft.core.errors import PlanError
from weft.core.layout import Mesh
from weft.core.program import Program
from weft.plan.layouts.choose import Chosen, choose
from weft.plan.layouts.moves import Prices

BRIEF = 1e8  # work for a first look at a mesh
FINALISTS = 2


def shapes(ranks: int, axes: Sequence[str]) -> Iterator[Mesh]:
    """All ways to write the number of ranks as a product, one factor per axis; axes of one rank are left out."""
    for sizes in _factors(ranks, len(axes)):
        yield Mesh(**{axis: n for axis, n in zip(axes, sizes, strict=True) if n > 1 or ranks == 1})


def _factors(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (n,)
        return
    for first in (d for d in range(1, n + 1) if n % d == 0):
        yield from ((first, *rest) for rest in _factors(n // first, parts - 1))


def best_mesh(
    program: Program, ranks: int, prices: Callable[[Mesh], Prices], *, axes: Sequence[str] = ("dp", "tp"), **options: Any
) -> tuple[Chosen, dict[Mesh, float]]:
    """The cheapest layouts over all meshes of so many ranks, and what each mesh came to. `options` are those of `choose`."""
    costs: dict[Mesh, float] = {}
    reasons: list[PlanError] = []
    for mesh in dict.fromkeys(shapes(ranks, axes)):
        try:
            costs[mesh] = choose(program, mesh, prices(mesh), **options | {"work": BRIEF}).cost
        except PlanError as reason:
            reasons.append(reason)
    if not costs:
        raise reasons[0]
    finalists = sorted(costs, key=lambda mesh: costs[mesh])[:FINALISTS]
    chosen = {mesh: choose(program, mesh, prices(mesh), **options) for mesh in finalists}
    costs |= {mesh: found.cost for mesh, found in chosen.items()}
    return min(chosen.values(), key=lambda found: found.cost), costs
