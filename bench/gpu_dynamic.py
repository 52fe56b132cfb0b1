"""Tree-LSTM on one GPU: hidden 512, 256 SST-like trees, forward and backward, against the level-batched torch version.

    python bench/gpu_dynamic.py [--seconds 95]      (prints one JSON object on the last line; each part also when it is done)

Every timed batch is new; steps follow each other as in training (`weft_alone_ms`: with a wait for the device after each). Beside the
times: the launch floor (as many kernels that do nothing, one after the other, in a graph) and the GEMM limit (the products alone, each in
one call). Every way is compared with float64. weft tries all ways on its first batches and takes the fastest; a profile by kernel and
by round says where the time goes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench._trees import Levels, level_by_level, products, recursion, sst_like_batch
from examples.dynamic.tree_lstm import ChildSum, model
from weft import dynamic
from weft.dynamic import choice, product
from weft.dynamic.choice import Way
from weft.dynamic.emit_rounds import Tiles

DEVICE = torch.device("cuda")
HIDDEN, TREES = 512, 256
STARTED = time.monotonic()


def say(**facts: Any) -> None:
    """One part, as soon as it is known."""
    print(json.dumps({"at_s": round(time.monotonic() - STARTED, 1), **facts}), file=sys.stderr, flush=True)


def attempt(name: str, work: Callable[[], Any], until: float) -> Any:
    """The result, or None where it failed or the time is over: the rest goes on."""
    if time.monotonic() - STARTED > until:
        say(part=name, skipped="no time left")
        return None
    try:
        return work()
    except Exception as error:
        say(part=name, failed=f"{type(error).__name__}: {error}"[:600], where=traceback.format_exc()[-700:])
        return None


def check(resident: bool | Way, hidden: int = 64) -> float:
    """weft on the GPU against the recursion in float64 on the CPU: values and gradients, over several batches and templates."""
    torch.manual_seed(0)
    worst, rng = 0.0, random.Random(7)
    cell, exact = ChildSum(hidden, hidden).to(DEVICE), ChildSum(hidden, hidden).double()
    exact.load_state_dict({k: v.double().cpu() for k, v in cell.state_dict().items()})
    net = model(cell, hidden)
    net.resident = resident
    for count in (12, 5, 12, 16):
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


def in_a_row(work: Callable[[int], object], count: int, parts: int = 3) -> float:
    """Milliseconds per call when calls follow each other as steps of training do, the host ahead of the device; median of parts."""
    out = []
    for part in range(parts):
        mine = range(part * count // parts, (part + 1) * count // parts)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in mine:
            work(i)
        torch.cuda.synchronize()
        out.append((time.perf_counter() - start) * 1e3 / max(len(mine), 1))
    return statistics.median(out)


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


def in_graph(work: Callable[[], object]) -> Callable[[], None]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def kernels_of(work: Callable[[], object]) -> list[tuple[str, int, float]]:
    """(name, runs, microseconds) of all kernels and copies of one call, longest first."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    found = [e for e in seen.key_averages() if "cuda" in str(getattr(e, "device_type", "")).lower()]
    return sorted(((e.key[:90], e.count, round(float(e.self_device_time_total), 1)) for e in found), key=lambda k: -k[2])


def launch_floor(kernels: int) -> float:
    """As many dependent kernels as weft runs, each adding one to one number, replayed as one graph."""
    x = torch.zeros(1, device=DEVICE)
    return device_time(in_graph(lambda: [x.add_(1) for _ in range(kernels)]))


def gemm_limit(s: dynamic.Structure) -> float:
    leaves = int((s.arity == 0).sum())
    calls = products(leaves, s.vertices - leaves, HIDDEN, DEVICE)
    return device_time(in_graph(lambda: [call() for call in calls]))


class Case:
    """One precision: a cell, and batches that no run has seen."""

    def __init__(self, precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.manual_seed(0)
        self.precision, self.rng = precision, random.Random(1)
        self.cell = ChildSum(HIDDEN, HIDDEN).to(DEVICE)
        self.x = torch.randn(TREES * 52, HIDDEN, device=DEVICE)
        self.judge = sst_like_batch(TREES, random.Random(2))

    def fresh(self, count: int) -> list[dynamic.Structure]:
        return [dynamic.trees(sst_like_batch(TREES, self.rng)) for _ in range(count)]

    def step(self, out: torch.Tensor) -> None:
        out.sum().backward()
        for p in self.cell.parameters():
            p.grad = None

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        """Largest differences from the level-batched version in float64: of values, and of gradients relative to the largest."""
        if not hasattr(self, "exact"):
            cell = ChildSum(HIDDEN, HIDDEN).to(DEVICE).double()
            cell.load_state_dict({k: v.double() for k, v in self.cell.state_dict().items()})
            value = level_by_level(cell, Levels(dynamic.trees(self.judge), DEVICE), self.x.double())
            self.exact = value.detach(), torch.autograd.grad(value.sum(), list(cell.parameters()))
        value, grads = self.exact
        mine = torch.autograd.grad(out.sum(), list(self.cell.parameters()))
        worst = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(mine, grads, strict=True))
        return float((out.detach().double() - value).abs().max()), worst

    def net(self, resident: bool | Way | None) -> dynamic.Model:
        out = model(self.cell, HIDDEN)
        out.resident = resident
        return out

    def run(self, name: str, net: dynamic.Model, warm: int, count: int, until: float = 1e9) -> dict[str, Any]:
        """Time a model as it is used: a batch after the other, all different. `warm` batches at most until it has chosen its way."""
        start = time.perf_counter()
        for i in range(warm):
            self.step(net(self.fresh(1)[0], self.x))
            templates = next(iter(net._templates.values()))
            if i >= min(warm - 1, 12) and all(c.decided for c in templates._choices.values()) or time.monotonic() - STARTED > until:
                break
        for known in templates._choices.values():
            known.settle()
        for s in self.fresh(6):  # the template of the chosen way grows to its size
            self.step(net(s, self.x))
        warmed = time.perf_counter() - start
        errors = self.errors(net(dynamic.trees(self.judge), self.x))
        batches = [sst_like_batch(TREES, self.rng) for _ in range(count)]
        start = time.perf_counter()
        prepared = [net.prepare(dynamic.trees(b), self.x) for b in batches]
        construction = (time.perf_counter() - start) / count * 1e3
        alone = timed(lambda i: self.step(net(prepared[i], self.x)), count // 4)
        rest = prepared[count // 4 :]
        ms = in_a_row(lambda i: self.step(net(rest[i], self.x)), len(rest))
        (templates,) = net._templates.values()
        seen = templates.choice(prepared[0])
        clocks = [c.clocks() for c in templates.kept if c.way == seen.now()][-1]
        out = {
            "name": name, "precision": self.precision, "ms": round(ms, 3),
            "alone_ms": round(statistics.median(alone), 3), "forward_back_ms": [t and round(t, 3) for t in clocks], "errors": [f"{e:.1e}" for e in errors],
            "construction_ms": round(construction, 3), "warm_s": round(warmed, 1), "templates": len(templates.kept),
            "ways": {str(w): round(statistics.median(t), 3) for w, t in seen.times.items() if t},
            "chosen": str(seen.now()), "refused": {str(w): why[:300] for w, why in seen.refused.items()},
        }  # fmt: skip
        say(**out)
        self.prepared = prepared
        return out

    def profile(self, name: str, net: dynamic.Model) -> int:
        """Kernels of one step, by time. Returns how many there are."""
        found = kernels_of(lambda: self.step(net(self.prepared[0], self.x)))
        count, busy = sum(k[1] for k in found), sum(k[2] for k in found)
        say(profile=name, precision=self.precision, kernels=count, busy_us=round(busy), top=found[:18])
        return count

    def by_round(self, name: str, net: dynamic.Model) -> None:
        """Microseconds until each round is done, in the kernel that runs them all."""
        (templates,) = net._templates.values()
        batch = [c for c in templates.kept if c.way.tiles is not None][-1].batch
        table = batch.index["round"]
        rounds = int(table[0])
        spans = table[1 : 1 + 5 * rounds].view(rounds, 5)
        sizes = (spans[:, 2] - spans[:, 1]).tolist()
        for phase, kernel in batch._resident.items():
            until, replay = [], in_graph(kernel.launch)
            for n in range(1, rounds + 1):  # the table is read on the device
                table[0] = n
                until.append(round(device_time(replay, 4) * 1e3, 1))
            say(by_round=name, phase=phase, rows=sizes, us=until)
        table[0] = rounds


def meeting_time() -> None:
    """Microseconds of one meeting of all programs."""
    import triton

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
    per = (device_time(lambda: run(1000), 5) - device_time(lambda: run(1), 5)) / 999
    say(meeting_us=round(per * 1e3, 2), triton=triton.__version__)


def product_times(precision: str) -> None:
    """Microseconds of products of the sizes that levels have, in a graph."""
    torch.set_float32_matmul_precision(precision)
    out = {}
    for k, n in ((512, 1536), (512, 512), (1536, 512)):
        w = torch.randn(n, k, device=DEVICE)
        for m in (8, 64, 200, 600, 1200):
            a, o = torch.randn(m, k, device=DEVICE), torch.empty(m, n, device=DEVICE)
            twenty = in_graph(lambda a=a, o=o, w=w: [torch.mm(a, w.t(), out=o) for _ in range(20)])
            out[f"{m}x{k}x{n}"] = round(device_time(twenty, 3) / 20 * 1e3, 2)
    say(products_us=out, precision=precision)


SIZES = [  # tiles to choose from here: more than weft tries by itself
    Tiles(rows=32, lanes=16, inner=64, warps=4, per_processor=2), Tiles(rows=64, lanes=16, inner=32, warps=4),
    Tiles(rows=32, lanes=16, inner=64, warps=4), Tiles(rows=16, lanes=32, inner=64, warps=4),
]  # fmt: skip


def widely(precision: str) -> list[Way]:
    """All rounds in one kernel, or those after the first large ones, with several sizes of tiles."""
    tiles = [replace(t, precision="tf32x3" if precision == "highest" else "tf32") for t in SIZES]
    some = [Way(tiles[3], 160), Way(tiles[3], 60), Way(tiles[0], 60)]
    return some if precision == "highest" else [*some, *(Way(t, 160) for t in tiles[:3]), Way(tiles[1])]


def row(case: Case, until: float) -> dict[str, Any]:
    """The old way by itself, weft as it comes, which has chosen between the ways by then, the peer, and what bounds them all."""
    old = case.net(False)
    launched = attempt("launched", lambda: case.run("launched", old, 24, 32), until) or {}
    launched["kernels"] = attempt("profile", lambda: case.profile("launched", old), until) or 1
    attempt("products", chosen_products, until)
    plain = case.net(False)
    plain.split_products = False
    torchs = attempt("torch's products", lambda: case.run("torch's products", plain, 13, 32), until) or {}
    levels = [Levels(s, DEVICE) for s in case.fresh(8)]
    for one in levels[:2]:
        case.step(level_by_level(case.cell, one, case.x))
    level = in_a_row(lambda i: case.step(level_by_level(case.cell, levels[i], case.x)), 8, 2)
    limit = gemm_limit(case.fresh(1)[0])
    say(level_ms=round(level, 3), gemm_limit_ms=round(limit, 3), floor_of_launched_ms=round(launch_floor(launched["kernels"]), 3))
    net = case.net(None)
    best = attempt("as it comes", lambda: case.run("as it comes", net, 60, 64, until - 4), until) or launched
    kernels = attempt("profile", lambda: case.profile("as it comes", net), until) or launched["kernels"]
    floors = {"as it comes": round(launch_floor(kernels), 3), "launched": round(launch_floor(launched["kernels"]), 3)}
    bound = max(floors["as it comes"], limit)
    found = {
        "case": f"tree-lstm h{HIDDEN} b{TREES} sst-like, fp32 {case.precision}", "weft_ms": best["ms"], "weft_alone_ms": best["alone_ms"],
        "chosen": best["chosen"], "peers_ms": {"level-batched torch": round(level, 3)},
        "ratios": {"level-batched torch": round(level / best["ms"], 2)}, "launch_floor_ms": floors, "kernels": kernels,
        "gemm_limit_ms": round(limit, 3), "limit_ms": round(bound, 3), "times_limit": round(best["ms"] / bound, 2),
        "construction_ms": best["construction_ms"], "errors": best["errors"], "launched_ms": launched.get("ms"),
        "with_torchs_products_ms": torchs.get("ms"), "with_torchs_products_errors": torchs.get("errors"),
        "launched_errors": launched.get("errors"), "device_ms_by_way": best["ways"],
    }  # fmt: skip
    say(row=found)
    return found


def chosen_products() -> None:
    """Which products run in parts and how, by rows and sizes."""
    out: dict[str, str] = {}
    for (kind, size, *sizes, _), plan in product._chosen.items():
        way = "torch" if plan is None else f"{plan.tile.BM}x{plan.tile.BN}x{plan.tile.BK} by {plan.shares}"
        out[f"{kind}: {2 ** (size / 4):.0f} {sizes}"] = way
    say(products=out)


def look_inside(case: Case, until: float) -> None:
    """Where a resident kernel spends its time."""
    for way in dict.fromkeys(Way(w.tiles) for w in widely(case.precision)[:4]):
        forced, name = case.net(way), str(way)
        if attempt(name, lambda n=forced, name=name: case.run(name, n, 5, 8), until):
            attempt("by round", lambda n=forced, name=name: case.by_round(name, n), until)
            attempt("profile", lambda n=forced, name=name: case.profile(name, n), until)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=95.0)
    seconds = options.parse_args().seconds
    say(machine=torch.cuda.get_device_name())
    choice.to_try = widely
    cases = {p: Case(p) for p in ("highest", "high")}

    def on(precision: str) -> Case:
        torch.set_float32_matmul_precision(precision)
        return cases[precision]

    shares = {"highest": 0.75 * seconds, "high": seconds - 5}
    rows = [attempt(p, lambda p=p: row(on(p), shares[p]), seconds) for p in cases]
    for precision in cases:
        attempt("inside", lambda p=precision: look_inside(on(p), seconds - 4), seconds - 4)
    attempt("meetings", meeting_time, seconds - 5)
    for precision in cases:
        attempt("products", lambda p=precision: product_times(p), seconds - 5)
    torch.set_float32_matmul_precision("highest")
    ways: dict[str, bool | Way] = {"launched": False, "resident": widely("highest")[0]}
    worst = {name: attempt(f"check {name}", lambda r=r: check(r), seconds - 12) for name, r in ways.items()}
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"bench": "gpu-dynamic", "machine": machine, "recursion in float64": worst, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
