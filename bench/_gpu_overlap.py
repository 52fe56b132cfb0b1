"""How much of the moving of rows is hidden by the products of an all_gather: by a trace, and by what the same products take without it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from bench._gpu_rank import Rank, rounded

Spans = list[tuple[float, float]]
KINDS = {"gemm": ("gemm", "nvjet", "cutlass", "xmma"), "move": ("move", "memcpy"), "carry": ("multiply_carrying",)}


def trace(me: Rank, x: Tensor, w: Tensor, way: Any) -> None:
    """Kernels of rank 0 that multiply, that move and that do both; where OUT names a folder, the profile itself goes there."""
    from torch.profiler import ProfilerActivity, profile

    from weft.nn import over_peers

    replay = me.recorded(lambda: over_peers.gather_matmul(x, w, None, way, False))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        me.sync()
        for _ in range(5):
            replay()
        me.finish()
    spans = device_spans(seen)
    moved = sum(b - a for a, b in spans["move"])
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans["move"] for c, d in joined(spans["gemm"]))
    me.say(case="trace of gather_matmul", way=str(way), moves=len(spans["move"]), gemms=len(spans["gemm"]), moved_us=round(moved),
           while_a_product_ran_us=round(both), hidden=round(both / moved, 3) if moved else None,
           products_that_carry_us=[round(b - a) for a, b in spans["carry"]])  # fmt: skip
    if me.rank == 0 and os.environ.get("OUT"):
        seen.export_chrome_trace(os.path.join(os.environ["OUT"], f"overlap_trace_{me.world}.json"))
    me.sync()


def device_spans(seen: Any) -> dict[str, Spans]:
    """Start and end, in microseconds, of kernels by kind."""
    spans: dict[str, Spans] = {kind: [] for kind in KINDS}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us() > 2:
            for kind, signs in KINDS.items():
                if any(sign in event.name.lower() for sign in signs):
                    spans[kind].append((event.time_range.start, event.time_range.end))
    return spans


def joined(spans: Spans) -> Spans:
    """The same stretches of time, none within another."""
    found: Spans = []
    for a, b in sorted(spans):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], b))
        else:
            found.append((a, b))
    return found


def cost_of_carrying(me: Rank, x: Tensor, w: Tensor, way: Any) -> None:
    """What the moving adds to the same products when they carry it, beside what it takes alone."""
    from weft.nn import over_peers
    from weft.runtime import gemm_copy

    multiply, space = gemm_copy.multiply, over_peers.space_of(None, me.device)
    line = torch.zeros(2, gemm_copy.WIDTH, dtype=x.dtype, device=x.device)
    shards, gathered = space.rows(*x.shape, x.dtype), torch.empty(me.world, *x.shape, dtype=x.dtype, device=x.device)

    def carrying() -> None:
        over_peers.gather_matmul(x, w, None, way, False)

    def bare() -> None:
        gemm_copy.multiply = lambda a, b, out, source, target, blocks: multiply(a, b, out, line[0], line[1], blocks)
        try:
            carrying()
        finally:
            gemm_copy.multiply = multiply

    def moving() -> None:
        space.meet()
        for turn in range(1, me.world):
            gathered[(me.rank + turn) % me.world].copy_(shards[(me.rank + turn) % me.world])
        space.meet()

    ms = me.time_graphs({"carrying": carrying, "bare": bare, "moving": moving})
    hidden = 1 - (ms["carrying"] - ms["bare"]) / ms["moving"]
    me.say(case="cost of carrying", way=str(way), ms=rounded(ms), hidden=round(hidden, 3))
