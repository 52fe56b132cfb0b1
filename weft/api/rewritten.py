"""Steps rewritten by proved rules, for `plan="auto"`: found best first, each priced by what the layout solver makes of it on one mesh.

The work is bounded: the steps that are priced have so many nodes together, and a step that is larger is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.cluster.spec import Cluster
from weft.core.layout import Mesh
from weft.frontend.capture import Captured
from weft.plan.rewritten import Move

NODES = 2000  # of all steps that are priced together: about two seconds
FEWEST = 3  # steps that must be priced for a search to be worth it
SPELLED = "matmul_as_einsum"


def promising(captured: Captured, mesh: Mesh, where: Cluster) -> Iterator[tuple[Move, ...]]:
    """Moves after which the step may cost less: none, where matmuls are only written as such, and the best found."""
    from weft.plan.rewritten import as_products
    from weft.plan.substitute import best_path, on_mesh, value_rules

    most = NODES // len(captured.program.nodes)
    if most < FEWEST:
        return
    yield ()
    path = best_path(as_products(captured), on_mesh(mesh, where, 1), value_rules(), 1, most - 1)
    yield from [path] if path else []
