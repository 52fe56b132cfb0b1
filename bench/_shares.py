"""Shares of a batch for ranks of unequal speed, as pieces that torch.chunk's rule deals out: `dp2,shards3` is two thirds and one.

With k pieces over n ranks each takes ceil(k / n) of them but the last, which takes what is left: so ranks stand from the fastest
to the slowest, and shares of the kind c : c : ... : r can be said. A step is done when its slowest rank is, and the best number of
pieces is the one that makes max over ranks of share / speed least.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors import PlanError
from weft.plan.plan import dealt


def slowest(pieces: int, speeds: Sequence[float]) -> float:
    """When the last rank is done with its share, if the full batch took one rank of speed 1 one second."""
    return max(n / pieces / v for n, v in zip(dealt(pieces, len(speeds)), speeds, strict=True))


def pieces_by(speeds: Sequence[float], batch: int) -> int:
    """The number of pieces, of those the batch divides into, at which the slowest rank is soonest done; the fewest of equals."""
    if not speeds or min(speeds) <= 0:
        raise PlanError("no shares by speed", needed="a speed above 0 for every rank", found=str(list(speeds)))
    divides = [k for k in range(len(speeds), batch + 1) if batch % k == 0]
    if not divides:
        raise PlanError("no shares by speed", needed=f"a sample for each of {len(speeds)} ranks", found=f"a batch of {batch}")
    return min(divides, key=lambda k: (round(slowest(k, speeds), 9), k))
