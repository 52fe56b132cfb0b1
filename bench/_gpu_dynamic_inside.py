"""Where a step of the Tree-LSTM of `bench.gpu_dynamic` spends its time: floors below any way, and each round of a resident kernel."""

from __future__ import annotations

from typing import Any

import torch

from bench._gpu_time import in_graph, on_device
from bench._trees import products
from weft import dynamic
from weft.dynamic import product

DEVICE = torch.device("cuda")


def launch_floor(kernels: int) -> float:
    """As many dependent kernels as weft runs, each adding one to one number, replayed as one graph."""
    x = torch.zeros(1, device=DEVICE)
    return on_device(in_graph(lambda: [x.add_(1) for _ in range(kernels)]))


def gemm_limit(s: dynamic.Structure, hidden: int) -> float:
    """The products of a step alone, each in one call."""
    leaves = int((s.arity == 0).sum())
    calls = products(leaves, s.vertices - leaves, hidden, DEVICE)
    return on_device(in_graph(lambda: [call() for call in calls]))


def by_round(net: dynamic.Model) -> dict[str, Any]:
    """Microseconds until each round is done, in the kernel that runs them all, forward and back."""
    (templates,) = net._templates.values()
    batch = [c for c in templates.kept if c.way.tiles is not None][-1].batch
    table = batch.index["round"]
    rounds = int(table[0])
    spans = table[1 : 1 + 5 * rounds].view(rounds, 5)
    found: dict[str, Any] = {"rows": (spans[:, 2] - spans[:, 1]).tolist()}
    for phase, kernel in batch._resident.items():
        until, replay = [], in_graph(kernel.launch)
        for n in range(1, rounds + 1):  # the table is read on the device
            table[0] = n
            until.append(round(on_device(replay, 4) * 1e3, 1))
        found[phase] = until
    table[0] = rounds
    return found


def meeting_us() -> float:
    """Microseconds of one meeting of all programs."""
    from weft.dynamic.emit_rounds import MEET
    from weft.runtime import modules, replay

    text = f"""import triton
import triton.language as tl


{MEET}

@triton.jit
def meets(count, N):
    for i in range(0, N):
        w_meet(count, (i + 1) * tl.num_programs(0))
"""
    kernel, programs = modules.load(text).meets, replay.processors(DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def run(n: int) -> None:
        count.zero_()
        kernel[(programs,)](count, n, num_warps=8, launch_cooperative_grid=True)

    run(10)
    per = (on_device(lambda: run(1000), 5) - on_device(lambda: run(1), 5)) / 999
    return round(per * 1e3, 2)


def products_us() -> dict[str, float]:
    """Microseconds of torch's products of the sizes that levels have, in a graph."""
    out = {}
    for k, n in ((512, 1536), (512, 512), (1536, 512)):
        w = torch.randn(n, k, device=DEVICE)
        for m in (8, 64, 200, 600, 1200):
            a, o = torch.randn(m, k, device=DEVICE), torch.empty(m, n, device=DEVICE)
            twenty = in_graph(lambda a=a, o=o, w=w: [torch.mm(a, w.t(), out=o) for _ in range(20)])  # type: ignore[misc]
            out[f"{m}x{k}x{n}"] = round(on_device(twenty, 3) / 20 * 1e3, 2)
    return out


def chosen_products() -> dict[str, str]:
    """Which products run in parts and how, by rows and sizes."""
    out: dict[str, str] = {}
    for (kind, size, *sizes, _), plan in product._chosen.items():
        way = "torch" if plan is None else f"{plan.tile.BM}x{plan.tile.BN}x{plan.tile.BK} by {plan.shares}"
        out[f"{kind}: {2 ** (size / 4):.0f} {sizes}"] = way
    return out
