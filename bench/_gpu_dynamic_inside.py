"""Where a step of the Tree-LSTM of `bench.gpu_dynamic` spends its time: floors below any way."""

from __future__ import annotations

import torch

from bench._gpu_time import in_graph, on_device
from bench._trees import products
from weft import dynamic
from weft.runtime import split_matmul

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
    for (kind, size, *sizes, _), plan in split_matmul._chosen.items():
        way = "torch" if plan is None else f"{plan.tile.BM}x{plan.tile.BN}x{plan.tile.BK} by {plan.shares}"
        out[f"{kind}: {2 ** (size / 4):.0f} {sizes}"] = way
    return out
