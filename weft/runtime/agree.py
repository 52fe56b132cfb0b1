"""What ranks are there, what does each say, and do all run the same thing?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.core import cache
from weft.core.errors import RuntimeFault
from weft.runtime.board import doing


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world(group: dist.ProcessGroup | None = None) -> int:
    """How many processes there are, or how many of a group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank gives, by rank; all must ask."""
    if world(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(value: Any, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Any:
    """What the first rank gives, on every rank; all must ask."""
    box = [value]
    if world(group) > 1:
        dist.broadcast_object_list(box, group_src=0, group=group, device=device)
    return box[0]


def require_same(what: str, text: str, group: dist.ProcessGroup | None = None) -> None:
    """Fail on every rank, naming those that differ and the first line that does, unless all give the same text."""
    if world(group) == 1:
        return
    with doing(f"the agreement on {what}"):
        if len(set(from_all(cache.digest(text), group))) == 1:
            return
        texts = from_all(text, group)
    usual = max(texts, key=texts.count)
    odd = [r for r, t in enumerate(texts) if t != usual]
    tied = 2 * len(odd) >= len(texts)
    raise RuntimeFault(
        f"ranks disagree about {what}" if tied else f"rank {', '.join(map(str, odd))} has another {what}",
        needed="the same program, with the same shapes, on every rank",
        found=_first_difference(usual, texts[odd[0]], texts.index(usual), odd[0]),
        try_="compare what these ranks build: a size that depends on the rank, or other code",
    )


def _first_difference(a: str, b: str, rank_a: int, rank_b: int) -> str:
    for x, y in zip(a.splitlines(), b.splitlines(), strict=False):
        if x != y:
            return f"rank {rank_a} has `{x.strip()}`, rank {rank_b} has `{y.strip()}`"
    return f"rank {rank_a} has {len(a.splitlines())} lines, rank {rank_b} has {len(b.splitlines())}"
