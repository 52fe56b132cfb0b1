"""What follows the last micro-batch of a step: its gradients added up, clipped and applied, and the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from weft.core.errors import PlanError
from weft.core.node import Node, remade, toposort
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.frontend.capture.micro import GIVEN
from weft.ops.pointwise import add
from weft.ops.shape import concat
from weft.ops.source import input_node
from weft.plan.split import LOSS_SUM, program_of

Home = Callable[[str], int | None]


def update(captured: Captured, sources: Mapping[str, Sequence[str]], home: Home, more: Iterable[Node] = ()) -> Program:
    """What follows the last micro-batch: gradients, given by the inputs that hold their terms, clipped and applied; the loss.

    Parameters may share a gradient, as those of two branches that are added do: then any of them gives it. `more` are inputs that
    the step keeps beside those of the captured one. `home` tells the rank of the pipeline where an input is; numbers gathered from
    several are first put together on each.
    """
    p = captured.program
    lost = [name for name in captured.gradients if not sources.get(name)]
    if lost:
        raise PlanError(f"no stage has a gradient of {lost[0]}", needed="every parameter that learns to be read by a stage", found="none")
    owner = {g: name for name, g in reversed([*captured.gradients.items()])}
    swap = {g: _sum([input_node(n, g.type) for n in sources[name]]) for g, name in owner.items()}
    loss = p.output_names["loss"]
    kept = {name: n for name, n in p.outputs if name != "loss" and not name.startswith("buffer.")}
    made = remade(kept.values(), swap)
    outputs = {"loss": input_node(LOSS_SUM, loss.type), **{name: made[n] for name, n in kept.items()}}
    outputs = _gathered_at_home(outputs, home)
    held = [n for n in p.inputs if n.role not in GIVEN]
    return program_of(f"{p.name}.update", outputs, p, {}, [*held, *more])


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
