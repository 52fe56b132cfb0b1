"""`weft bench train`: a GPT's training step under weft's plans against the same plan in torch, in one run on the same ranks.

dp stands beside DDP, zero1 beside DDP with torch's ZeroRedundancyOptimizer, zero3 beside FSDP2, tp (on a Llama) beside torch's tensor
parallelism. `alone` is torch's step without communication; what of DDP's exposed communication a plan takes away is `recovered`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

SIZES = {  # layers, hidden, heads, batch per rank, sequence
    "10M": (6, 352, 11, 8, 64),
    "30M": (8, 544, 17, 4, 64),
    "100M": (12, 816, 17, 2, 64),
}
LLAMAS = {"10M": (5, 384, 12, 8, 64), "30M": (7, 576, 12, 4, 64), "100M": (12, 768, 12, 2, 64)}
VOCAB = 2048
SAME = {"dp": "ddp", "zero1": "zero_redundancy", "zero2": "zero_redundancy", "zero3": "fsdp2", "tp": "tp"}  # what a plan is called in torch


def register(app: typer.Typer) -> None:
    @app.command()
    def train(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        ranks: Annotated[str, typer.Option(help="numbers of processes, joined by commas")] = "2,4",
        sizes: Annotated[str, typer.Option(help="which, joined by commas")] = "10M,30M,100M",
        rounds: Annotated[int, typer.Option(help="timed steps of each way")] = 5,
        plans: Annotated[
            str, typer.Option(help="weft's plans, joined by semicolons; {n} is the number of processes")
        ] = "dp{n};dp{n},zero1;dp{n},zero3;tp{n}",
        link: Annotated[str, typer.Option(help="two hosts with a link of this rate between them, say 1gbit; needs root")] = "",
    ) -> None:
        """Time one training step of a GPT, each implementation once per round, after asserting equal losses."""
        from bench._ranks import machine
        from weft.cli.output import console, emit

        rows: list[dict[str, Any]] = []
        for size in sizes.split(","):
            for n in map(int, ranks.split(",")):
                for some in _together([p.format(n=n) for p in plans.split(";")], size):
                    found = _measured(n, size, rounds, some, link)
                    console.print(_table(found))
                    rows += found
        if json:
            emit({"bench": "train", "machine": machine(), "link": link, "rows": rows})


def _together(plans: list[str], size: str) -> list[list[str]]:
    """Plans timed in one run: those of one model, or each by itself where a model takes much memory."""
    if size == max(SIZES, key=lambda s: int(s.removesuffix("M"))):
        return [[p] for p in plans]
    kinds = [[p for p in plans if p.startswith("tp") is cut] for cut in (False, True)]
    return [some for some in kinds if some]


def _measured(n: int, size: str, rounds: int, plans: list[str], link: str) -> list[dict[str, Any]]:
    from bench._netns import Hosts
    from bench._ranks import run_ranks

    if not link:
        return run_ranks(measure, n, size, rounds, plans)  # type: ignore[no-any-return]
    with Hosts(link) as hosts:
        return hosts.run("bench.train", "measure", size, rounds, plans, ranks_per_host=n // 2)  # type: ignore[no-any-return]


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("case", "weft ms", *rows[0]["peers_ms"], "same plan / weft", "recovered", title="one training step")
    for r in rows:
        cells = [f"{ms:.1f}" for ms in r["peers_ms"].values()]
        table.add_row(r["case"], f"{r['weft_ms']:.1f}", *cells, f"{r['ratios'][r['same']]:.2f}", f"{r.get('recovered', float('nan')):.0%}")
    return table


def workload(size: str, model: str = "gpt2") -> Any:
    """The model of a size with a fresh, equal start on every rank, and its batch per rank."""
    import weft_zoo as zoo

    layers, hidden, heads, batch, seq = (SIZES if model == "gpt2" else LLAMAS)[size]
    more = {"dropout": 0.0} if model == "gpt2" else {"kv_heads": heads, "ffn": 4 * hidden}
    return zoo.get(model, device="cpu", layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq=seq, **more), batch


def measure(rank: int, world: int, size: str, rounds: int, plans: list[str]) -> list[dict[str, Any]]:
    cut = plans[0].startswith("tp")
    w, batch = workload(size, "llama3-8b" if cut else "gpt2")
    batches = [w.example(batch * (1 if cut else world), seed=i) for i in range(3)]
    beside = {"ddp", "alone", *map(same_in_torch, plans)}
    every = {"ddp": ddp, "zero_redundancy": zero_redundancy, "fsdp2": fsdp2, "alone": alone}
    kinds: dict[str, Any] = {"tp": tensor_parallel} if cut else {name: make for name, make in every.items() if name in beside}
    ways: dict[str, Stepper] = {name: make(w, rank, world) for name, make in kinds.items()}
    ways |= {f"weft {plan}": ours_under(w, plan, batches[0]) for plan in plans}
    losses = {name: [step(b) for b in batches] for name, step in ways.items()}
    first = losses[next(iter(kinds))]
    for name, got in losses.items():
        assert name == "alone" or max(abs(a - b) for a, b in zip(got, first, strict=True)) < 2e-3, (name, got, first)
    took = time_steps(ways, batches[0], rounds)
    return [_row(f"{'llama' if cut else 'gpt'}-{size} x{world} {plan}", plan, took, list(kinds)) for plan in plans]


def same_in_torch(plan: str) -> str:
    return next(peer for word, peer in reversed(SAME.items()) if word in plan)


def _row(case: str, plan: str, took: dict[str, float], peers: list[str]) -> dict[str, Any]:
    ours, theirs = took[f"weft {plan}"], {n: took[n] for n in peers}
    same = same_in_torch(plan)
    row = {"case": case, "weft_ms": ours, "peers_ms": theirs, "same": same, "ratios": {n: ms / ours for n, ms in theirs.items()},
           "correct": f"losses of three steps equal {peers[0]}'s to 2e-3"}  # fmt: skip
    exposed = theirs["ddp"] - theirs["alone"] if "ddp" in theirs else 0.0
    return {**row, "recovered": (theirs["ddp"] - ours) / exposed} if exposed > 0 else row


Stepper = Callable[[Any], float]


def time_steps(ways: dict[str, Stepper], batch: Any, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step on its slowest rank. One round times every way once, so all see the same machine."""
    import torch.distributed as dist

    from bench._ranks import worst

    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            took[name].append(time.perf_counter() - start)
    return {name: 1e3 * worst(statistics.median(seconds)) for name, seconds in took.items()}


def _mine(batch: Any, rank: int, world: int) -> Any:
    return {k: v.chunk(world)[rank] for k, v in batch.items()}


def _loop(model: Any, loss: Any, opt: Any, rank: int, world: int) -> Stepper:
    import torch.distributed as dist

    def step(batch: Any) -> float:
        opt.zero_grad()
        value = loss(model, _mine(batch, rank, world))
        value.backward()
        opt.step()
        total = value.detach().clone() / world
        dist.all_reduce(total)
        return float(total)

    return step


def ddp(w: Any, rank: int, world: int) -> Stepper:
    """DistributedDataParallel and torch's fused AdamW."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(copy.deepcopy(w.model), gradient_as_bucket_view=True)
    return _loop(model, w.loss, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), rank, world)


def zero_redundancy(w: Any, rank: int, world: int) -> Stepper:
    """DistributedDataParallel, and every rank updates the parameters that are its own."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(copy.deepcopy(w.model), gradient_as_bucket_view=True)
    own = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3, fused=True)
    return _loop(model, w.loss, own, rank, world)


def alone(w: Any, rank: int, world: int) -> Stepper:
    """The step without communication: what DDP would take if that were free."""
    import torch

    model = copy.deepcopy(w.model)
    return _loop(model, w.loss, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), rank, world)


def tensor_parallel(w: Any, rank: int, world: int) -> Stepper:
    """torch's own: columns then rows of every attention and feed-forward."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = copy.deepcopy(w.model), init_device_mesh("cpu", (world,))
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan = {**{n: ColwiseParallel() for n in columns}, "attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    opts = [torch.optim.AdamW(cut, lr=1e-3), torch.optim.AdamW(whole, lr=1e-3, fused=True)]

    def step(batch: Any) -> float:
        for opt in opts:
            opt.zero_grad()
        value = w.loss(model, batch)
        value.backward()
        for opt in opts:
            opt.step()
        return float(value.detach())

    return step


def fsdp2(w: Any, rank: int, world: int) -> Stepper:
    """fully_shard per block and over the whole."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = copy.deepcopy(w.model), init_device_mesh("cpu", (world,))
    for blocks in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, w.loss, torch.optim.AdamW(model.parameters(), lr=1e-3), rank, world)


def ours_under(w: Any, plan: str, example: Any) -> Stepper:
    import torch

    from weft.api.parallelize import parallelize

    model = copy.deepcopy(w.model)
    step = parallelize(model, w.loss, torch.optim.AdamW(model.parameters(), lr=1e-3), example, plan=plan)
    return lambda batch: float(step(batch))
