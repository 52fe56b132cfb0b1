"""What follows the last micro-batch of a step: its gradients added up, clipped and applied, and the mean loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from weft.core.errors import PlanError
from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.ops.pointwise import add, mul
from weft.ops.shape import concat
from weft.ops.source import input_node
from weft.plan.split import LOSS_SUM, program_of, remade

Home = Callable[[str], int | None]


def update(captured: Captured, sources: Mapping[str, Sequence[str]], micro: int, home: Home) -> Program:
    """What follows the last micro-batch: gradients, given by the inputs that hold their terms, clipped and applied; the mean loss.

    `home` tells the rank of the pipeline where an input is; numbers gathered from several are first put together on each.
    """
    p = captured.program
    lost = [name for name in captured.gradients if not sources.get(name)]
    if lost:
        raise PlanError(f"no stage has a gradient of {lost[0]}", needed="every parameter that learns to be read by a stage", found="none")
    swap = {g: _sum([input_node(n, g.type) for n in sources[name]]) for name, g in captured.gradients.items()}
    loss = p.output_names["loss"]
    kept = {name: n for name, n in p.outputs if name != "loss" and not name.startswith("buffer.")}
    made = remade(kept.values(), swap)
    mean = mul(input_node(LOSS_SUM, loss.type), 1.0 / micro)
    outputs = {"loss": mean, **{name: made[n] for name, n in kept.items()}}
    outputs = _gathered_at_home(outputs, home)
    held = [n for name, n in p.input_names.items() if not name.startswith("batch.") and name != "seed"]
    return program_of(f"{p.name}.update", outputs, p, {}, held)


def _sum(terms: Sequence[Node]) -> Node:
    total = terms[0]
    for t in terms[1:]:
        total = add(total, t)
    return total


def _gathered_at_home(outputs: Mapping[str, Node], home: Home) -> dict[str, Node]:
    """Concats of values from several ranks of the pipeline, as concats of what each rank puts together."""
    at: dict[Node, frozenset[int]] = {}
    swap: dict[Node, Node] = {}
    for n in toposort(outputs.values()):
        here = home(n.attr("name")) if n.op.name == "input" else None
        at[n] = frozenset({here} if here is not None else ()).union(*(at[a] for a in n.args))
        if n.op.name == "concat" and len(at[n]) > 1:
            runs = [list(run) for _, run in itertools.groupby(n.args, key=at.__getitem__)]
            if len(runs) < len(n.args):
                swap[n] = concat([concat(r, n.attr("dim")) if len(r) > 1 else r[0] for r in runs], n.attr("dim"))
    made = remade(outputs.values(), swap)
    return {name: made[n] for name, n in outputs.items()}
