"""`weft bench inference`: a Llama block under tensor parallelism, prefill and decode, against torch's, on the same ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

SIZES = {"small": (512, 8, 1376), "medium": (1024, 16, 2816), "large": (2048, 16, 5632)}  # hidden, heads, feed-forward
SHAPES = {"decode": (1, 1), "decode x8": (8, 1), "prefill": (1, 256)}  # batch, new tokens


def register(app: typer.Typer) -> None:
    @app.command()
    def inference(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        ranks: Annotated[str, typer.Option(help="numbers of processes, joined by commas")] = "2,4",
        sizes: Annotated[str, typer.Option(help="which, joined by commas")] = "small,medium,large",
        rounds: Annotated[int, typer.Option(help="timed calls of each way")] = 15,
    ) -> None:
        """Time the forward pass of a Llama of one block, each implementation once per round, after asserting equal results."""
        from bench._ranks import machine, run_ranks
        from weft.cli.output import console, emit

        rows = [row for n in map(int, ranks.split(",")) for size in sizes.split(",") for row in run_ranks(measure, n, size, rounds)]
        console.print(_table(rows))
        if json:
            emit({"bench": "inference", "machine": machine(), "rows": rows})


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("case", "weft ms", "torch ms", "torch / weft", title="one Llama block")
    for r in rows:
        table.add_row(r["case"], f"{r['weft_ms']:.3f}", f"{r['peers_ms']['torch tp']:.3f}", f"{r['ratios']['torch tp']:.2f}")
    return table


def measure(rank: int, world: int, size: str, rounds: int) -> list[dict[str, Any]]:
    import torch

    rows = []
    for case, (batch, tokens) in SHAPES.items():
        model = block(size)
        gen = torch.Generator().manual_seed(1)
        x = torch.randint(0, VOCAB, (batch, tokens), generator=gen)
        ways = {"weft": ours(model, world, x), "torch tp": theirs(model, world)}
        results = {name: way(x) for name, way in ways.items()}
        apart = float((results["weft"] - results["torch tp"]).abs().max() / results["torch tp"].abs().max())
        assert apart < 1e-4, (case, apart)
        took = time_calls(ways, x, rounds)
        row = {"case": f"{size} tp{world} {case}", "weft_ms": took["weft"], "peers_ms": {"torch tp": took["torch tp"]},
               "ratios": {"torch tp": took["torch tp"] / took["weft"]}, "correct": f"results equal to {apart:.1e}"}  # fmt: skip
        rows.append(row)
    return rows


VOCAB = 256


def block(size: str) -> Any:
    """A Llama of one block, the same on every rank."""
    import weft_zoo as zoo

    hidden, heads, ffn = SIZES[size]
    w = zoo.get("llama3-8b", device="cpu", layers=1, hidden=hidden, heads=heads, kv_heads=max(4, heads // 4), ffn=ffn, vocab=VOCAB, seq=512)
    return w.model.eval()


def ours(model: Any, world: int, example: Any) -> Callable[[Any], Any]:
    from weft.api.compile import compile as weft_compile

    run = weft_compile(copy.deepcopy(model), f"tp{world}", example)
    return lambda x: next(iter(run(x).values()))


def theirs(model: Any, world: int) -> Callable[[Any], Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = copy.deepcopy(model), init_device_mesh("cpu", (world,))
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan = {**{n: ColwiseParallel() for n in columns}, "attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    parallelize_module(model.blocks[0], mesh, plan)

    def run(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    return run


def time_calls(ways: dict[str, Callable[[Any], Any]], x: Any, rounds: int) -> dict[str, float]:
    """Milliseconds of a call on its slowest rank, the lower quartile; a round takes every way in turn, three calls each."""
    import torch.distributed as dist

    from bench._ranks import quarter, worst

    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way(x)
            dist.barrier()
            for _ in range(3):
                start = time.perf_counter()
                way(x)
                took[name].append(time.perf_counter() - start)
    return {name: 1e3 * worst(quarter(seconds)) for name, seconds in took.items()}
