"""`weft bench train`: a GPT's training step under weft's plans against DDP and FSDP2, in the same run on the same ranks."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

SIZES = {  # layers, hidden, heads, batch, sequence
    "10M": (6, 320, 5, 8, 128),
    "25M": (8, 480, 8, 8, 128),
    "85M": (12, 768, 12, 4, 128),
}
VOCAB = 2048


def register(app: typer.Typer) -> None:
    @app.command()
    def train(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        ranks: Annotated[int, typer.Option(help="processes")] = 2,
        sizes: Annotated[str, typer.Option(help="which, joined by commas")] = "10M,25M",
        rounds: Annotated[int, typer.Option(help="timed steps of each way")] = 7,
        plans: Annotated[
            str, typer.Option(help="weft's plans, joined by semicolons; {n} is the number of processes")
        ] = "dp{n};dp{n},zero1",
    ) -> None:
        """Time one training step of a GPT, each way once per round, after asserting equal losses."""
        from bench._ranks import machine, run_ranks
        from weft.cli.output import console, emit

        chosen = [p.format(n=ranks) for p in plans.split(";")]
        rows = [row for size in sizes.split(",") for row in run_ranks(measure, ranks, size, rounds, chosen)]
        console.print(_table(rows))
        if json:
            emit({"bench": "train", "machine": machine(), "ranks": ranks, "rows": rows})


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("case", "weft ms", *rows[0]["peers_ms"], "best peer / weft", title="one training step")
    for r in rows:
        table.add_row(r["case"], f"{r['weft_ms']:.1f}", *(f"{ms:.1f}" for ms in r["peers_ms"].values()), f"{min(r['ratios'].values()):.2f}")
    return table


def workload(size: str) -> Any:
    """The GPT of a size with a fresh, equal start on every rank."""
    from weft.frontend import zoo

    layers, hidden, heads, batch, seq = SIZES[size]
    w = zoo.get("gpt2", device="cpu", layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq=seq, dropout=0.0)
    return w, batch


def measure(rank: int, world: int, size: str, rounds: int, plans: list[str]) -> list[dict[str, Any]]:
    w, batch = workload(size)
    batches = [w.example(batch * world, seed=i) for i in range(3)]
    peers = {"ddp": ddp(w, rank, world), "fsdp2": fsdp2(w, rank, world)}
    ours = {f"weft {plan}": ours_under(w, plan, batches[0]) for plan in plans}
    ways = {**peers, **ours}
    losses = {name: [step(b) for b in batches] for name, step in ways.items()}
    for name, got in losses.items():
        assert max(abs(a - b) for a, b in zip(got, losses["ddp"], strict=True)) < 2e-3, (name, got, losses["ddp"])
    took = time_steps(ways, batches[0], rounds)
    theirs = {n: took[n] for n in peers}
    return [
        {
            "case": f"gpt-{size} {name.removeprefix('weft ')}", "weft_ms": took[name], "peers_ms": theirs,
            "ratios": {n: ms / took[name] for n, ms in theirs.items()}, "correct": "losses of three steps equal DDP's to 2e-3",
        }
        for name in ours
    ]  # fmt: skip


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
