"""Mixture of experts by capacity: tokens are put into the slots of the experts they chose, and read back from them.

Labels: g groups, t tokens of a group, k choices of a token, e experts, c slots of an expert, d features. A group is routed
alone, so g may be sharded; after `dispatch` an all_to_all turns the sharding from g to e, and another turns it back before `combine`.
A slot is numbered expert * capacity + place; a choice that found its expert full has none (-1) and is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from weft.core.node import Attrs, Node
from weft.ops.embed import find, need_index, out_elements
from weft.ops.linalg import einsum
from weft.ops.norm import softmax, wide
from weft.ops.order import topk
from weft.ops.pointwise import silu
from weft.ops.reduce import sum_
from weft.ops.registry import Equation, Kind, Local, Types, define

TOKENS, CHOICES, SLOTS = ("g", "t", "d"), ("g", "t", "k"), ("g", "e", "c", "d")
EACH_BUT_SLOTS = (frozenset({0}), frozenset({2}))


# -- slots ---------------------------------------------------------------------------------------------------------------------


def _slots_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("expert_slots", types, 0)
    return Equation((CHOICES,), (CHOICES,), unsharded=frozenset("tk"))


def _slots_run(choice: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """Places are given to all first choices in token order, then to all second ones, and so on."""
    g, t, k = choice.shape
    queue = choice.transpose(1, 2).reshape(g, k * t)
    hot = torch.nn.functional.one_hot(queue.long(), experts)
    place = (hot.cumsum(1) - 1).gather(-1, queue.long().unsqueeze(-1)).squeeze(-1)
    slot = torch.where(place < capacity, queue * capacity + place, -1)
    return slot.reshape(g, k, t).transpose(1, 2).to(choice.dtype)


_expert_slots = define(
    "expert_slots", kind=Kind.COMPOSITE, equation=_slots_equation, run=_slots_run, flops=lambda n: n.attr("experts") * out_elements(n),
    adds_nothing=True,
)


def expert_slots(choice: Any, experts: int, capacity: int) -> Any:
    """choice [g, t, k] of experts -> the slot of every choice, -1 where its expert is full."""
    return _expert_slots(choice, experts=experts, capacity=capacity)


# -- dispatch, combine, and the dot products that are the gradient of the gates: closed under differentiation ---------------------


def _dispatch_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("dispatch", types, 1)
    ins = (TOKENS, CHOICES, CHOICES)[: max(2, len(types))]
    return Equation(ins, (SLOTS,), sizes={"e": attrs["experts"], "c": attrs["capacity"]})


def _dispatch_run(x: torch.Tensor, slots: torch.Tensor, *gates: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    g, t, d = x.shape
    k = slots.shape[2]
    rows = wide(x)[:, :, None, :] * (wide(gates[0])[..., None] if gates else 1)
    at = torch.where(slots < 0, experts * capacity, slots).long().reshape(g, t * k, 1)
    out = rows.new_zeros(g, experts * capacity + 1, d)
    out = out.scatter_add(1, at.expand(-1, -1, d), rows.expand(g, t, k, d).reshape(g, t * k, d))
    return out[:, :-1].reshape(g, experts, capacity, d).to(x.dtype)


def _combine_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("combine", types, 1)
    return Equation((SLOTS, CHOICES, CHOICES)[: max(2, len(types))], (TOKENS,))


def _rows_at(y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The row of every slot, [g, t, k, d], zero for those not held."""
    g, e, c, d = y.shape
    t, k = slots.shape[1:]
    flat = torch.cat([y.reshape(g, e * c, d), y.new_zeros(g, 1, d)], 1)
    at = torch.where(slots < 0, e * c, slots).long().reshape(g, t * k, 1)
    return wide(flat.gather(1, at.expand(-1, -1, d)).reshape(g, t, k, d))


def _combine_run(y: torch.Tensor, slots: torch.Tensor, *gates: torch.Tensor) -> torch.Tensor:
    rows = _rows_at(y, slots)
    return (rows * wide(gates[0])[..., None] if gates else rows).sum(2).to(y.dtype)


def _dots_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("slot_dots", types, 1)
    return Equation((SLOTS, CHOICES, TOKENS), (CHOICES,))


def _dots_run(y: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (_rows_at(y, slots) * wide(x)[:, :, None, :]).sum(-1).to(y.dtype)


def _local_slots(ctx: Local, slots: torch.Tensor) -> torch.Tensor:
    """Slots as numbered within the experts and places this rank holds of operand 0, -1 for the others."""
    capacity = ctx.node.args[0].shape[2]
    experts, places = ctx.positions(0, 1), ctx.positions(0, 2)
    e, e_hit = find(torch.where(slots < 0, -1, slots // capacity), experts)
    c, c_hit = find(slots % capacity, places)
    return torch.where(e_hit & c_hit, e * len(places) + c, -1)


def _reads_slots(name: str, equation: Any, run: Any, vjp: Any) -> Any:
    """An op that looks up slots: what is sharded along experts or places reads its own and leaves a partial sum."""
    return define(
        name,
        kind=Kind.COMPOSITE,
        equation=equation,
        run=run,
        local=lambda ctx, y, slots, *more: run(y, _local_slots(ctx, slots), *more),
        by_dim=True,
        dtype=lambda types, attrs: types[0].dtype,
        linear=EACH_BUT_SLOTS,
        vjp=vjp,
        flops=lambda n: 2.0 * math.prod(n.args[1].type.layout.largest_local) * n.args[0].type.layout.largest_local[-1],
    )


def _to_slots(x: Any, n: Node, like: Node, *gates: Any) -> Any:
    return dispatch(x, n.args[1], like.shape[1], like.shape[2], *gates)


def _dispatch_vjp(n: Node, ct: Node) -> Any:
    x, slots, *gates = n.args
    return _combine(ct, slots, *gates), None, *(_slot_dots(ct, slots, x) for _ in gates)


def _combine_vjp(n: Node, ct: Node) -> Any:
    y, slots, *gates = n.args
    return _to_slots(ct, n, y, *gates), None, *(_slot_dots(y, slots, ct) for _ in gates)


def _dots_vjp(n: Node, ct: Node) -> Any:
    y, slots, x = n.args
    return _to_slots(x, n, y, ct), None, _combine(y, slots, ct)


_dispatch = define(
    "dispatch",
    kind=Kind.COMPOSITE,
    equation=_dispatch_equation,
    run=_dispatch_run,
    dtype=lambda types, attrs: types[0].dtype,
    linear=EACH_BUT_SLOTS,
    vjp=_dispatch_vjp,
    flops=lambda n: 2.0 * math.prod(n.args[1].type.layout.largest_local) * n.args[0].type.layout.largest_local[-1],
    adds_nothing=True,
)
_combine = _reads_slots("combine", _combine_equation, _combine_run, _combine_vjp)
_slot_dots = _reads_slots("slot_dots", _dots_equation, _dots_run, _dots_vjp)


def dispatch(x: Any, slots: Any, experts: int, capacity: int, *gates: Any) -> Any:
    """x [g, t, d], slots [g, t, k] -> [g, e, c, d], zeros in free slots; times gates [g, t, k] if given."""
    return _dispatch(x, slots, *gates, experts=experts, capacity=capacity)


def combine(y: Any, slots: Any, gates: Any) -> Any:
    """y [g, e, c, d] read back at slots [g, t, k] and summed with gates [g, t, k] -> [g, t, d]; a dropped choice adds 0."""
    return _combine(y, slots, gates)


# -- routing and the full layer ---------------------------------------------------------------------------------------------------


def capacity_of(tokens: int, experts: int, k: int, factor: float) -> int:
    """Slots per expert: the even share of a group's choices times a factor, at least one."""
    return max(1, math.ceil(tokens * k * factor / experts))


def top_k_gates(logits: Any, k: int) -> tuple[Any, Any, Any]:
    """logits [g, t, e] -> gates and experts [g, t, k], and all probabilities; gates of a token sum to 1."""
    probs = softmax(logits, -1)
    gates, choice = topk(probs, k, -1)
    return gates / sum_(gates, dims=-1, keepdim=True), choice, probs


def experts_of(y: Any, up: Any, down: Any, gate: Any = None, act: Callable[[Any], Any] = silu) -> Any:
    """Every expert's feed-forward on its slots: y [g, e, c, d], up (and gate) [e, d, f], down [e, f, d]."""
    h = act(einsum("gecd,edf->gecf", y, up if gate is None else gate))
    h = h if gate is None else h * einsum("gecd,edf->gecf", y, up)
    return einsum("gecf,efd->gecd", h, down)


__all__ = ["capacity_of", "combine", "dispatch", "expert_slots", "experts_of", "top_k_gates"]
