"""Tree-LSTM on one GPU: hidden 512, 256 SST-like trees, forward and backward, against the level-batched torch version.

    python bench/gpu_dynamic.py            (about two minutes; prints one JSON object on the last line)

Every timed batch is new. Beside the two times: the launch floor (as many kernels that do nothing, one after the other, in a graph)
and the GEMM limit (the products alone, each in one call). Correctness is asserted before anything is timed.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench._trees import Levels, level_by_level, products, recursion, sst_like_batch
from examples.dynamic.tree_lstm import ChildSum, model
from weft import dynamic

DEVICE = torch.device("cuda")
HIDDEN, TREES, BATCHES, WARM = 512, 256, 40, 25


def check(hidden: int = 64) -> float:
    """weft on the GPU against the recursion in float64 on the CPU: values and gradients, over several batches and templates."""
    torch.manual_seed(0)
    worst, rng = 0.0, random.Random(7)
    cell, exact = ChildSum(hidden, hidden).to(DEVICE), ChildSum(hidden, hidden).double()
    exact.load_state_dict({k: v.double().cpu() for k, v in cell.state_dict().items()})
    net = model(cell, hidden)
    for count in (12, 5, 12, 9, 16):
        trees = sst_like_batch(count, rng)
        x = torch.randn(1000, hidden, dtype=torch.float64, requires_grad=True)
        xd = x.detach().float().to(DEVICE).requires_grad_()
        ours, theirs = net(dynamic.trees(trees), xd), recursion(exact, trees, x)
        weight = torch.randn_like(theirs)
        mine = torch.autograd.grad(ours, [xd, *cell.parameters()], weight.float().to(DEVICE))
        judge = torch.autograd.grad(theirs, [x, *exact.parameters()], weight)
        for a, b in [(ours, theirs), *zip(mine, judge, strict=True)]:
            worst = max(worst, float((a.detach().cpu().double() - b.detach()).abs().max() / (1 + b.detach().abs().max())))
    assert worst < 2e-5, f"weft differs from the recursion by {worst:.1e}"
    return worst


def timed(work: Callable[[int], object], count: int) -> list[float]:
    """Milliseconds of each call, host and device together."""
    out = []
    for i in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(i)
        torch.cuda.synchronize()
        out.append((time.perf_counter() - start) * 1e3)
    return out


def device_time(work: Callable[[], object], count: int = 20) -> float:
    """Best milliseconds on the device between two events."""
    best = float("inf")
    for _ in range(count):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        work()
        b.record()
        torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b))
    return best


def kernels_in(work: Callable[[], object]) -> int:
    """Kernels and copies one call runs on the device."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if "cuda" in str(getattr(e, "device_type", "")).lower())


def launch_floor(kernels: int) -> float:
    """As many dependent kernels as weft runs, each adding one to one number, replayed as one graph."""
    x = torch.zeros(1, device=DEVICE)
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x.add_(1)
    return device_time(graph.replay)


def gemm_limit(s: dynamic.Structure) -> float:
    leaves = int((s.arity == 0).sum())
    calls = products(leaves, s.vertices - leaves, HIDDEN, DEVICE)
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return device_time(graph.replay)


def row(precision: str) -> dict[str, object]:
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    rng = random.Random(1)
    cell = ChildSum(HIDDEN, HIDDEN).to(DEVICE)
    net = model(cell, HIDDEN)
    x = torch.randn(TREES * 52, HIDDEN, device=DEVICE)
    batches = [sst_like_batch(TREES, rng) for _ in range(WARM + BATCHES)]
    structures = [dynamic.trees(b) for b in batches]

    def step(out: torch.Tensor) -> None:
        out.sum().backward()
        for p in cell.parameters():
            p.grad = None

    for s in structures[:WARM]:  # templates grow until all batches fit
        step(net(s, x))
    start = time.perf_counter()
    prepared = [net.prepare(dynamic.trees(b), x) for b in batches[WARM:]]
    construction = (time.perf_counter() - start) / BATCHES * 1e3
    levels = [Levels(s, DEVICE) for s in structures[WARM:]]
    theirs = level_by_level(cell, levels[0], x).detach()
    ours = net(prepared[0], x).detach()
    error = float((ours - theirs).abs().max())
    assert error < (2e-5 if precision == "highest" else 5e-3), f"weft and the level-batched version differ by {error:.1e}"
    for i in range(3):
        step(level_by_level(cell, levels[i], x))
    weft = timed(lambda i: step(net(prepared[i], x)), BATCHES)
    level = timed(lambda i: step(level_by_level(cell, levels[i], x)), BATCHES)
    kernels = kernels_in(lambda: step(net(prepared[0], x)))
    floor, limit = launch_floor(kernels), gemm_limit(structures[WARM])
    median, bound = statistics.median(weft), max(floor, limit)
    return {
        "case": f"tree-lstm h{HIDDEN} b{TREES} sst-like, fp32 {precision}", "weft_ms": round(median, 3),
        "weft_best_ms": round(min(weft), 3), "peers_ms": {"level-batched torch": round(statistics.median(level), 3)},
        "ratios": {"level-batched torch": round(statistics.median(level) / median, 2)}, "launch_floor_ms": round(floor, 3),
        "kernels": kernels, "gemm_limit_ms": round(limit, 3), "limit_ms": round(bound, 3), "times_limit": round(median / bound, 2),
        "construction_ms": round(construction, 3), "error": error, "levels": len(prepared[0].rounds),
        "templates": sum(len(t.kept) for t in net._templates.values()),
    }  # fmt: skip


def main() -> None:
    torch.set_float32_matmul_precision("highest")
    worst = check()
    print(f"correct: largest relative error {worst:.1e}", file=sys.stderr)
    rows = [row("highest"), row("high")]
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"bench": "gpu-dynamic", "machine": machine, "correct": f"recursion in float64, {worst:.1e}", "rows": rows}))


if __name__ == "__main__":
    main()
