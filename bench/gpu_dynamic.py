"""Tree-LSTM on one GPU: hidden 512, 256 SST-like trees, forward and backward, against the level-batched torch version.

    python -m bench.gpu_dynamic [--seconds 95] [--json]

Every timed batch is new; steps follow each other as in training (`weft_alone_ms`: with a wait for the device after each). Beside the
times: the launch floor (as many kernels that do nothing, one after the other, in a graph) and the GEMM limit (the products alone, each in
one call). Every way is compared with float64. weft tries all ways on its first batches, then on one of them in turn, and keeps the
fastest; a profile by kernel and by round says where the time goes.
"""

from __future__ import annotations

import json as text
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import typer

from bench import _gpu
from bench import _gpu_dynamic_inside as inside
from bench._gpu_time import in_a_row, kernels_of, milliseconds
from bench._trees import Levels, level_by_level, recursion, sst_like_batch
from examples.dynamic.tree_lstm import ChildSum, model
from weft import dynamic

DEVICE = torch.device("cuda")
HIDDEN, TREES = 512, 256
CLOSE = 2e-5  # relative, of values and gradients, to the recursion in float64


def register(app: typer.Typer) -> None:
    app.command("gpu-dynamic")(tree_lstm)


def tree_lstm(seconds: float = typer.Option(95.0, help="After so many no further part begins."), json: bool = _gpu.JSON) -> None:
    """A Tree-LSTM's training step on a GPU against the level-batched version and its limits."""
    _gpu.need_gpu()
    run = Run(seconds)
    worst = run.attempt("check", check)
    cases = {precision: Case(precision) for precision in ("highest", "high")}
    shares = {"highest": 0.75 * seconds, "high": seconds - 5}
    rows = [run.attempt(p, lambda p=p: time_case(run, cases[p].begin(), shares[p])) for p in cases]
    for case in cases.values():
        run.attempt("products", lambda case=case: run.say(products_us=inside.products_us(), precision=case.begin().precision), seconds - 5)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    done = {"stage": "", "ranks": 1, "status": "ok" if worst is not None and all(rows) else "failed", "error_of_small_trees": worst}
    _gpu.report("gpu-dynamic", [{**done, "rows": [{"machine": machine}, *(row for row in rows if row)]}], json)


class Run:
    """Parts that are tried until the time is over; each is told as soon as it is known."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    def say(self, **facts: Any) -> None:
        print(text.dumps({"at_s": round(self.now, 1), **facts}), file=sys.stderr, flush=True)

    def attempt(self, name: str, work: Callable[[], Any], until: float | None = None) -> Any:
        """The result, or None where it failed or the time is over: the rest goes on."""
        if self.now > (until or self.seconds):
            self.say(part=name, skipped="no time left")
            return None
        try:
            return work()
        except Exception as error:
            self.say(part=name, failed=f"{type(error).__name__}: {error}"[:600], where=traceback.format_exc()[-700:])
            return None


def check(hidden: int = 64) -> float:
    """weft on the GPU against the recursion in float64 on the CPU: values and gradients, over several batches and templates."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    worst, rng = 0.0, random.Random(7)
    cell, exact = ChildSum(hidden, hidden).to(DEVICE), ChildSum(hidden, hidden).double()
    exact.load_state_dict({k: v.double().cpu() for k, v in cell.state_dict().items()})
    net = model(cell, hidden)
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
    assert worst < CLOSE, f"weft differs from the recursion by {worst:.1e}"
    return worst


class Case:
    """One precision: a cell, and batches that no run has seen."""

    def __init__(self, precision: str) -> None:
        torch.manual_seed(0)
        self.precision, self.rng = precision, random.Random(1)
        self.cell = ChildSum(HIDDEN, HIDDEN).to(DEVICE)
        self.x = torch.randn(TREES * 52, HIDDEN, device=DEVICE)
        self.judge = sst_like_batch(TREES, random.Random(2))
        self.exact: Any = None

    def begin(self) -> Case:
        torch.set_float32_matmul_precision(self.precision)
        return self

    def fresh(self, count: int) -> list[dynamic.Structure]:
        return [dynamic.trees(sst_like_batch(TREES, self.rng)) for _ in range(count)]

    def step(self, out: torch.Tensor) -> None:
        out.sum().backward()
        for p in self.cell.parameters():
            p.grad = None

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        """Largest differences from the level-batched version in float64: of values, and of gradients relative to the largest."""
        if self.exact is None:
            cell = ChildSum(HIDDEN, HIDDEN).to(DEVICE).double()
            cell.load_state_dict({k: v.double() for k, v in self.cell.state_dict().items()})
            value = level_by_level(cell, Levels(dynamic.trees(self.judge), DEVICE), self.x.double())
            self.exact = value.detach(), torch.autograd.grad(value.sum(), list(cell.parameters()))
        value, grads = self.exact
        mine = torch.autograd.grad(out.sum(), list(self.cell.parameters()))
        worst = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(mine, grads, strict=True))
        return float((out.detach().double() - value).abs().max()), worst

    def net(self, split_matmuls: bool | None = None) -> dynamic.Model:
        out = model(self.cell, HIDDEN)
        out.split_matmuls = split_matmuls
        return out

    def warm(self, net: dynamic.Model, batches: int, deadline: float) -> Any:
        """Run until the template has grown to its size, so many batches at most."""
        for s in self.fresh(batches):
            self.step(net(s, self.x))
            if time.monotonic() > deadline:
                break
        (templates,) = net._made.templates.values()
        return templates

    def run(self, net: dynamic.Model, warm: int, count: int, deadline: float = float("inf")) -> dict[str, Any]:
        """A model timed as it is used: a batch after the other, all different."""
        start = time.perf_counter()
        templates = self.warm(net, warm, deadline)
        warmed = time.perf_counter() - start
        errors = self.errors(net(dynamic.trees(self.judge), self.x))
        batches = [sst_like_batch(TREES, self.rng) for _ in range(count)]
        start = time.perf_counter()
        self.prepared = [net.prepare(dynamic.trees(b), self.x) for b in batches]
        construction = (time.perf_counter() - start) / count * 1e3
        few, rest = self.prepared[: count // 4], self.prepared[count // 4 :]
        alone = statistics.median(milliseconds(lambda s=s: self.step(net(s, self.x))) for s in few)  # type: ignore[misc]
        ms = in_a_row(lambda i: self.step(net(rest[i], self.x)), len(rest))
        return {
            "ms": round(ms, 3), "alone_ms": round(alone, 3), "errors": [f"{e:.1e}" for e in errors], "construction_ms": round(construction, 3),
            "warm_s": round(warmed, 1), "templates": len(templates.kept),
        }  # fmt: skip

    def level_ms(self) -> float:
        """The level-batched version, whose levels are made beforehand."""
        levels = [Levels(s, DEVICE) for s in self.fresh(8)]
        for one in levels[:2]:
            self.step(level_by_level(self.cell, one, self.x))
        return in_a_row(lambda i: self.step(level_by_level(self.cell, levels[i], self.x)), 8, 2)


def time_case(run: Run, case: Case, until: float) -> dict[str, Any]:
    """Steps as they come and with torch's products; the peer, and what bounds them all."""
    nets = {"as it comes": case.net(), "torch's products": case.net(split_matmuls=False)}
    found: dict[str, dict[str, Any]] = {}
    kernels: dict[str, int] = {}
    for name, warm, count in (("as it comes", 24, 64), ("torch's products", 13, 32)):
        limits = warm, count, run.start + until - 4
        found[name] = run.attempt(name, lambda n=name, limits=limits: case.run(nets[n], *limits), until) or {}
        run.say(name=name, precision=case.precision, **found[name])
        if found[name]:
            kernels[name] = profile(run, case, name, nets[name])
    run.say(products=inside.chosen_products())
    floors = {name: round(inside.launch_floor(count), 3) for name, count in kernels.items()}
    level, limit = case.level_ms(), inside.gemm_limit(case.fresh(1)[0], HIDDEN)
    best, plain = found["as it comes"], found["torch's products"]
    bound = max(limit, floors["as it comes"])
    return {
        "case": f"tree-lstm h{HIDDEN} b{TREES} sst-like, fp32 {case.precision}", "weft_ms": best["ms"], "weft_alone_ms": best["alone_ms"],
        "peers_ms": {"level-batched torch": round(level, 3)}, "ratios": {"level-batched torch": round(level / best["ms"], 2)},
        "limit_ms": round(bound, 3), "times_limit": round(best["ms"] / bound, 2), "gemm_limit_ms": round(limit, 3), "launch_floor_ms": floors,
        "kernels": kernels, "construction_ms": best["construction_ms"],
        "correct": f"from float64: outputs {best['errors'][0]}, gradients {best['errors'][1]}",
        "with_torchs_products_ms": plain.get("ms"), "with_torchs_products_errors": plain.get("errors"),
    }  # fmt: skip


def profile(run: Run, case: Case, name: str, net: dynamic.Model) -> int:
    """Kernels of one step, by time. Returns how many there are."""
    found = kernels_of(lambda: case.step(net(case.prepared[0], case.x)))
    count, busy = sum(k[1] for k in found), sum(k[2] for k in found)
    run.say(profile=name, precision=case.precision, kernels=count, busy_us=round(busy), top=found[:18])
    return count


if __name__ == "__main__":
    typer.run(tree_lstm)
