"""The moves that a plan file names, made again on a captured step. Each is the use of a proved rule, so the step means what it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.core.errors import InvalidTransform, PlanError
from weft.frontend.capture import Captured
from weft.plan.rewritten import Move, as_products
from weft.rewrite.certificate import proved_rules
from weft.rewrite.search import Use, both_directions

SPELLED = "matmul_as_einsum backwards at every matmul, gradients derived anew"


def moves_of(layouts: Mapping[str, Any]) -> tuple[Move, ...] | None:
    """The moves in the layouts of a plan; None where it has none, not even that matmuls are written as such."""
    told = layouts.get("moves")
    return None if told is None else tuple(Move(Use(**{k: v for k, v in m.items() if k != "forward"}), m["forward"]) for m in told)


def rewritten(captured: Captured, moves: Sequence[Move] | None) -> tuple[Captured, tuple[str, ...]]:
    """The step after the moves, and the words for them; as it is where there are none."""
    return (captured, ()) if moves is None else (replayed(captured, moves), tuple(words(moves)))


def replayed(captured: Captured, moves: Sequence[Move]) -> Captured:
    """The step after the moves; refused with the first that cannot be made here. What was known of its repeated blocks is not kept."""
    step, rules = as_products(captured), both_directions(proved_rules())
    for k, move in enumerate(moves, 1):
        which = f"move {k} of {len(moves)} cannot be made"
        if move.forward and not step.gradients:
            raise PlanError(f"{which}: {move} is for the forward pass", needed="gradients that follow from it", found="others")
        try:
            step = step.moved(move, rules)
        except InvalidTransform as e:
            raise PlanError(f"{which}: {e.message}", needed=e.needed, found=e.found) from e
    return replace(captured, program=step.program, gradients=step.gradients, blocks=())


def words(moves: Sequence[Move]) -> Iterator[str]:
    """What is done to a step, its rule first."""
    yield SPELLED
    for move in moves:
        use = move.use
        turned = " backwards" if use.rule.endswith("~") else ""
        where = f"{use.op} {use.at}" + (f" and {use.places - 1} alike" if use.places > 1 else "")
        yield f"{use.rule.rstrip('~')}{turned} at {where}" + (" of the forward pass, gradients derived anew" if move.forward else "")
