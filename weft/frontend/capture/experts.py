"""Experts over tokens, as one op or, with a capacity, as dispatch, matmuls over slots and combine, whose tokens are sent by all_to_all."""

from __future__ import annotations

from weft.core.node import Node
from weft.frontend.capture.precision import lowered
from weft.frontend.capture.recorder import Recorder
from weft.ops import moe
from weft.ops.experts import ACTIVATIONS, experts
from weft.ops.norm import to_dtype
from weft.ops.shape import permute, reshape


def apply(r: Recorder, x: Node, picks: Node, weights: Node, up: Node, down: Node, gate: Node | None, act: str) -> Node:
    """Experts over tokens [t, d]: one op, or slots by capacity where capture was asked for it."""
    x, up, down, gate = lowered(r, x, up, down, gate)
    weights = to_dtype(weights, x.dtype)
    if r.capacity is None:
        return experts(x, picks, weights, up, down, *([] if gate is None else [gate]), act=act)
    count = up.shape[0]
    slots = moe.capacity_of(x.shape[0], count, picks.shape[1], r.capacity)
    r.assume(f"experts take {slots} choices each (capacity {r.capacity}); what is over is dropped")
    places = moe.expert_slots(reshape(picks, (1, *picks.shape)), count, slots)
    y = moe.dispatch(reshape(x, (1, *x.shape)), places, count, slots)
    transposed = [None if v is None else permute(v, (0, 2, 1)) for v in (up, down, gate)]
    y = moe.experts_of(y, *transposed, act=ACTIVATIONS[act][1])
    return reshape(moe.combine(y, places, reshape(weights, (1, *weights.shape))), x.shape)
