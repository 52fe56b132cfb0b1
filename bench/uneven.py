"""`weft bench uneven`: two processes, the second on a core it shares with another's work; the batch dealt by their speed, or evenly.

A busy loop on the second core takes about half of it. Speeds are measured, the pieces of the batch follow from them, and both
deals must give the losses of one process before they are timed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH, SEQ, LAYERS, HIDDEN = 24, 128, 6, 256
STEPS = 3  # whose losses are compared


def register(app: typer.Typer) -> None:
    @app.command()
    def uneven(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        rounds: Annotated[int, typer.Option(help="timed steps of each deal")] = 9,
        plans: Annotated[str, typer.Option(help="what is said of sharding, joined to dp2")] = "",
    ) -> None:
        """Time a training step on two processes of unequal speed, the batch split by speed and evenly."""
        from bench._ranks import machine, run_ranks
        from weft.cli.output import console, emit

        with busy(core(1)):
            found = run_ranks(measure, 2, rounds, plans)
        console.print(f"speeds {found['speeds']}; {found['plan']}: {found['weft_ms']:.1f} ms, even: {found['even_ms']:.1f} ms a step")
        row = {
            "case": f"gpt, one process slowed, {found['plan']}", "weft_ms": found["weft_ms"], "peers_ms": {"even": found["even_ms"]},
            "ratios": {"even": found["even_ms"] / found["weft_ms"]},
            "correct": f"losses of {STEPS} steps equal one process by torch to {found['apart']:.1e}",
        }  # fmt: skip
        if json:
            emit({"bench": "uneven", "machine": machine(), "ranks": 2, "rows": [row], "speeds": found["speeds"], "shares": found["shares"]})


def core(rank: int) -> int:
    """The core of a rank, where there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


@contextmanager
def busy(where: int) -> Iterator[None]:
    """Someone else's work on one core."""
    process = multiprocessing.get_context("fork").Process(target=_spin, args=(where,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin(where: int) -> None:
    os.sched_setaffinity(0, {where})
    while True:
        sum(range(10_000))


def measure(rank: int, world: int, rounds: int, plans: str) -> dict[str, Any]:
    from bench._shares import pieces_by
    from bench.train import time_steps

    os.sched_setaffinity(0, {core(rank)})
    speeds = speed(rank, world)
    pieces = pieces_by(speeds, BATCH)
    more = f",{plans}" if plans else ""
    deals = {"even": f"dp2{more}", "uneven": f"dp2,pieces{pieces}{more}"}
    steps = {name: ours(plan) for name, plan in deals.items()}
    want = one_process()
    apart = max(abs(a - b) for step in steps.values() for a, b in zip([float(step(b)) for b in batches()], want, strict=True))
    assert apart < 1e-3, apart
    took = time_steps({name: lambda b, s=step: float(s(b)) for name, step in steps.items()}, batches()[0], rounds)
    held = next(n.layout for name, n in steps["uneven"].program.input_names.items() if name.startswith("batch."))
    shares = [held.local_shape({"dp": r})[0] for r in range(world)]
    return {"plan": deals["uneven"], "weft_ms": took["uneven"], "even_ms": took["even"], "apart": apart, "speeds": speeds, "shares": shares}


def model() -> Any:
    import weft_zoo as zoo

    return zoo.get("gpt2", device="cpu", layers=LAYERS, hidden=HIDDEN, heads=8, vocab=1024, seq=SEQ, dropout=0.0)


def batches() -> list[Any]:
    w = model()
    return [w.example(BATCH, seed=i) for i in range(STEPS)]


def ours(plan: str) -> Any:
    import torch

    from weft.api.parallelize import parallelize

    w = model()
    return parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-3), w.example(BATCH), plan=plan)


def one_process() -> list[float]:
    """Plain torch on the whole batch."""
    import torch

    w = model()
    opt, losses = torch.optim.AdamW(w.model.parameters(), lr=1e-3), []
    for batch in batches():
        opt.zero_grad()
        loss = w.loss(w.model, batch)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def speed(rank: int, world: int) -> list[float]:
    """Samples a second of every rank, all at work at once, none waiting for another."""
    import torch.distributed as dist

    w, taken = model(), []
    batch = w.example(BATCH // world)
    dist.barrier()
    for _ in range(6):
        began = time.perf_counter()
        w.loss(w.model, batch).backward()
        taken.append(time.perf_counter() - began)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, BATCH / world / sorted(taken)[len(taken) // 2])
    return told
