"""Do all ranks run the same thing? Asked once, before anything could hang."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from weft.core import cache
from weft.core.errors import RuntimeFault
from weft.runtime.board import doing


def require_same(what: str, text: str, group: dist.ProcessGroup | None = None) -> None:
    """Fail on every rank, naming those that differ and the first line that does, unless all give the same text."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    digests: list[Any] = [None] * dist.get_world_size(group)
    with doing(f"the agreement on {what}"):
        dist.all_gather_object(digests, cache.digest(text), group=group)
        if len(set(digests)) == 1:
            return
        texts: list[Any] = [None] * len(digests)
        dist.all_gather_object(texts, text, group=group)
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
