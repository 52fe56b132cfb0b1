"""Slots, dispatch, combine and the dot products between them, against loops over tokens; and a whole layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ops.harness import Input, case, index, normal
from weft.core.node import op_named
from weft.ops import moe

E, C = 3, 2


def slots_by_hand(choice: torch.Tensor, experts: int = E, capacity: int = C) -> torch.Tensor:
    """Token after token, first choices before second ones; who comes to a full expert is dropped."""
    out = torch.full_like(choice, -1)
    for g in range(choice.shape[0]):
        used = [0] * experts
        for k in range(choice.shape[2]):
            for t in range(choice.shape[1]):
                e = int(choice[g, t, k])
                if used[e] < capacity:
                    out[g, t, k] = e * capacity + used[e]
                used[e] += 1
    return out


def hot(slots: torch.Tensor, experts: int = E, capacity: int = C) -> torch.Tensor:
    """[g, t, k, e, c]: 1 where the choice has that slot."""
    return F.one_hot(slots + 1, experts * capacity + 1)[..., 1:].unflatten(-1, (experts, capacity)).double()


def taken(tokens: int, k: int = 2) -> Input:
    """Slots as a router gives them, some choices dropped."""
    return Input((2, tokens, k), lambda g, s: slots_by_hand(torch.rand(2, tokens, E, generator=g).argsort(-1)[..., :k]))


CASES = [
    case("expert slots", lambda i: moe.expert_slots(i, E, C), slots_by_hand, index(E, 5, 4, 2), smooth=False),
    case(
        "dispatch",
        lambda x, s: moe.dispatch(x, s, E, C),
        lambda x, s: torch.einsum("gtd,gtkec->gecd", x, hot(s)),
        normal(2, 5, 3),
        taken(5),
    ),
    case(
        "dispatch gated",
        lambda x, s, w: moe.dispatch(x, s, E, C, w),
        lambda x, s, w: torch.einsum("gtd,gtkec,gtk->gecd", x, hot(s), w),
        normal(2, 4, 3),
        taken(4),
        normal(2, 4, 2),
        inner=False,
    ),
    case(
        "combine",
        moe.combine,
        lambda y, s, w: torch.einsum("gecd,gtkec,gtk->gtd", y, hot(s), w),
        normal(2, E, C, 3),
        taken(4),
        normal(2, 4, 2),
        local=True,
        inner=False,
    ),
    case(
        "slot dots",
        op_named("slot_dots"),
        lambda y, s, x: torch.einsum("gecd,gtkec,gtd->gtk", y, hot(s), x),
        normal(2, E, C, 3),
        taken(4),
        normal(2, 4, 3),
        local=True,
        inner=False,
    ),
]
