"""CoCoNet's pipeline boundary: two hosts of `tp` ranks each; what one host's ranks sum goes to the other host.

plain    all_reduce inside the host, bias and residual, every rank sends the whole value, redundantly
sliced   reduce_scatter, the same on slices, each rank sends its slice, all_gather on the far side: 1/tp of the bytes
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import typer

from bench import _netns
from bench._ranks import machine, worst

SHAPE = (2, 1024, 2048)  # batch, sequence, hidden


def register(app: typer.Typer) -> None:
    app.command("boundary")(boundary)


def boundary(
    json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    rate: str = typer.Option("1gbit", help="Of the link between the hosts."),
    tp: int = typer.Option(2, help="Ranks on each host."),
    rounds: int = typer.Option(5, help="Repetitions; the median counts."),
) -> None:
    """reduce_scatter | send of a shard | all_gather against all_reduce + send over a slow link."""
    from weft.cli.output import console, emit
    from weft.core.errors import RuntimeFault

    why = _netns.possible()
    if why:
        raise RuntimeFault("cannot make two hosts here", needed="root, ip and tc", found=why, try_="sudo weft bench boundary")
    rows, sent = [], {}
    with _netns.Hosts(rate) as hosts:
        times = hosts.run("bench.boundary", "measure", tp, rounds, ranks_per_host=tp)
        for name in ("plain", "sliced", "pipelined"):
            before = hosts.sent(0)
            hosts.run("bench.boundary", "send_only", tp, name, 0, ranks_per_host=tp)
            start_up = hosts.sent(0) - before
            before = hosts.sent(0)
            hosts.run("bench.boundary", "send_only", tp, name, COUNTED, ranks_per_host=tp)
            sent[name] = (hosts.sent(0) - before - start_up) / COUNTED
    best = min(("sliced", "pipelined"), key=lambda n: times["ms"][n])
    row = {
        "case": f"boundary tp {tp} {rate}", "weft_ms": times["ms"][best], "peers_ms": {"plain": times["ms"]["plain"]},
        "ratios": {"plain": times["ms"]["plain"] / times["ms"][best]}, "limit_ms": 1e3 * 8 * times["bytes"] / _bits(rate),
        "all_ms": times["ms"], "chosen": best, "bytes_on_link": sent, "bytes_ratio": sent[best] / sent["plain"],
        "correct": times["correct"],
    }  # fmt: skip
    rows.append(row)
    console.print(f"{row['case']}: {row['weft_ms']:.1f} ms ({best}), plain {times['ms']['plain']:.1f} ms, "
                  f"{row['ratios']['plain']:.2f}x; bytes on the link {row['bytes_ratio']:.4f} of plain (1/tp is {1 / tp:.4f})")  # fmt: skip
    if json:
        emit({"bench": "boundary", "machine": machine(), "rows": rows})


COUNTED = 8


def _bits(rate: str) -> float:
    units = {"gbit": 1e9, "mbit": 1e6}
    unit = next(u for u in units if rate.endswith(u))
    return float(rate.removesuffix(unit)) * units[unit]


def programs(tp: int) -> dict[str, Any]:
    """The boundary as written, in slices, and in slices that overlap."""
    from weft.core.layout import Mesh
    from weft.programs import blocks
    from weft.programs.catalog import BOUNDARY

    plain = blocks.boundary(Mesh(pp=2, tp=tp), *SHAPE)
    return {"plain": plain, "sliced": BOUNDARY["RS-C-P2P-AG"](plain), "pipelined": BOUNDARY["overlap(RS,P2P,AG)"](plain)}


def prepare(tp: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Callables and inputs by name, the same global values for each."""
    import torch

    from weft import interp
    from weft.api.compiled import Compiled

    made, inputs = {}, {}
    for name, program in programs(tp).items():
        made[name] = Compiled(program)
        spread = {}
        for k, (key, node) in enumerate(program.input_names.items()):
            gen = torch.Generator().manual_seed(k)
            whole = torch.randn(node.shape, generator=gen) if node.dtype.is_floating_point else torch.tensor(7, dtype=node.dtype)
            spread[key] = interp.distribute(whole.to(node.dtype), node.type, k)[rank]
        inputs[name] = {key: x for key, x in spread.items() if x is not None}
    return made, inputs


def measure(rank: int, world: int, tp: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of each way, from a common start until the far side has the value."""
    import torch
    import torch.distributed as dist

    made, inputs = prepare(tp, rank)
    results = {name: call(inputs[name]) for name, call in made.items()}
    error = 0.0
    for name in results:
        for key, x in results[name].items():
            error = max(error, (x - results["plain"][key]).abs().max().item())
    error = worst(error)
    assert error < 1e-4, f"the ways differ by {error}"
    took: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, call in made.items():
            dist.barrier()
            start = time.perf_counter()
            call(inputs[name])
            took[name].append(time.perf_counter() - start)
    ms = {name: 1e3 * worst(statistics.median(seconds)) for name, seconds in took.items()}
    bytes_ = 4 * torch.Size(SHAPE).numel()
    return {"ms": ms, "bytes": bytes_, "correct": f"largest difference from plain {error:.1e}"}


def send_only(rank: int, world: int, tp: int, name: str, times: int) -> int:
    """One way, a number of times, for its bytes to be counted from outside."""
    made, inputs = prepare(tp, rank)
    for _ in range(times):
        made[name](inputs[name])
    return times
