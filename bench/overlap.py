"""A product and the sum of its result over the ranks: one after the other, in chunks at once, and what the tuner chooses.

On a slow link between two namespaces most of the smaller of the two can be hidden; on loopback, where moving data is work
for the same two cores, there is nothing to hide and the tuner leaves the pair alone.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import typer

from bench import _netns
from bench._ranks import machine, run_ranks, worst

SIZE = 2048
CUTS = ((8, 0.8), (12, 1.0))  # chunks, and rows of each for a row of the last


def register(app: typer.Typer) -> None:
    app.command("overlap")(overlap)


def overlap(
    json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    rounds: int = typer.Option(5, help="Repetitions; the median counts."),
    size: int = typer.Option(SIZE, help="Rows, columns and depth of the matmul."),
    rates: str = typer.Option("loopback,500mbit,1gbit", help="Links, joined by commas."),
) -> None:
    """GEMM + all_reduce over loopback and over links of 0.5 and 1 Gbit/s."""
    from weft.cli.output import console, emit

    def tell(row: dict[str, Any]) -> dict[str, Any]:
        hidden = f"hidden {row['hidden']:.0%} ({row['hidden_of_torch']:.0%} beside torch's product)"
        console.print(f"{row['case']}: {row['weft_ms']:.1f} ms, plain {row['peers_ms']['plain']:.1f}, gemm {row['gemm_ms']:.1f}, "
                      f"all_reduce {row['all_reduce_ms']:.1f}, {hidden}, chosen: {row['chosen']}")  # fmt: skip
        return row

    links = rates.split(",")
    rows = [tell(run_ranks(measure, 2, "loopback", size, rounds))] if "loopback" in links else []
    why = _netns.possible()
    if why:
        console.print(f"slow links left out: {why}")
    for rate in () if why else (r for r in links if r != "loopback"):
        with _netns.Hosts(rate) as hosts:
            rows.append(tell(hosts.run("bench.overlap", "measure", rate, size, rounds)))
    if json:
        emit({"bench": "overlap", "machine": machine(), "rows": rows})


def measure(rank: int, world: int, link: str, size: int, rounds: int) -> dict[str, Any]:
    """The parts alone, the plain pair, every way of chunks, and the tuner's choice, in one run."""
    import torch
    import torch.distributed as dist

    from weft.nn.functional import matmul_all_reduce
    from weft.nn.over_group import packed_matmul
    from weft.nn.strategies import Strategy
    from weft.tune import tune_matmul

    torch.manual_seed(rank)
    x, w = torch.randn(size, size) / size**0.5, torch.randn(size, size)
    y = torch.empty(size, size)
    ways = [Strategy(), *(Strategy("group", c, taper=t, packed=packed) for c, t in CUTS for packed in (False, True))]
    error = check(x, w, ways)
    calls = {
        "gemm": lambda: torch.mm(x, w.T, out=y),
        "packed gemm": lambda: packed_matmul(w, size)(x, y),
        "all_reduce": lambda: dist.all_reduce(y),
    }
    calls |= {str(way): (lambda way=way: matmul_all_reduce(x, w, None, way)) for way in ways}
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - start)
    ms = {name: 1e3 * worst(statistics.median(seconds)) for name, seconds in took.items()}
    chosen, tuned = tune_matmul(lambda way: matmul_all_reduce(x, w, None, way), ways, ["bench", link, str(size)], again=True)
    torchs, packed, reduce_, plain = ms.pop("gemm"), ms.pop("packed gemm"), ms.pop("all_reduce"), ms[str(Strategy())]
    picked, gemm = ms[str(chosen)], min(torchs, packed)  # what is hidden is told beside the faster product, whichever the choice uses
    return {
        "case": f"gemm+all_reduce {size} {link}", "weft_ms": picked, "peers_ms": {"plain": plain}, "ratios": {"plain": plain / picked},
        "limit_ms": max(gemm, reduce_), "gemm_ms": gemm, "torch_gemm_ms": torchs, "all_reduce_ms": reduce_,
        "hidden": (gemm + reduce_ - picked) / min(gemm, reduce_), "hidden_of_torch": (torchs + reduce_ - picked) / min(torchs, reduce_),
        "chosen": str(chosen), "tuned_ms": tuned.times, "all_ms": ms, "correct": f"largest relative difference from plain {error:.1e}",
    }  # fmt: skip


def check(x: Any, w: Any, ways: list[Any]) -> float:
    """Every way gives what the plain one gives."""
    from weft.nn.functional import matmul_all_reduce

    plain = matmul_all_reduce(x, w, None, ways[0])
    error = max(((matmul_all_reduce(x, w, None, way) - plain).abs().max() / plain.abs().max()).item() for way in ways[1:])
    error = worst(error)
    assert error < 1e-5, f"ways differ by {error}"
    return error
