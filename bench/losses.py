"""`weft bench losses`: training under every kind of plan, over real processes, against one process.

Without dropout the losses of fifty steps in float64 must equal those of plain torch within 1e-8; with dropout, which torch draws in
another order, those of weft on one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

LIMIT = 1e-8
BATCH = 8
EVERY = {
    2: ["dp2", "dp2,zero1", "dp2,zero2", "dp2,zero3", "tp2"],
    4: ["dp4", "dp4,zero1", "dp4,zero3", "tp4", "dp2,tp2", "dp2,tp2,zero1", "dp2,tp2,zero3"],
}
SEQUENCE = {2: ["tp2,sp", "cp2,ring", "cp2,a2a"], 4: ["dp2,tp2,sp", "dp2,cp2,ring", "dp2,cp2,a2a,zero1", "cp2,tp2"]}
LINES = {
    2: ["pp2", "pp2,gpipe", "pp2,interleaved", "pp2,zero-bubble", "dp2,recompute"],
    4: ["dp2,pp2", "dp2,pp2,zero1,recompute", "tp2,pp2,interleaved", "pp4,zero-bubble,micro8"],
}
WHOLE = {2: ["pp2,micro1"], 4: ["dp2,pp2,micro1"]}  # a loss that is no mean over samples: batch norm, balancing of experts
SHORT = {2: ["pp2", "pp2,gpipe", "pp2,zero-bubble"], 4: ["dp2,pp2"]}
IMAGE = {2: ["tp2,sp"], 4: ["dp2,tp2,sp"]}
EXPERTS = {2: ["ep2"], 4: ["ep4", "dp2,ep2", "ep2,tp2", "dp2,ep2,zero1"]}
MODELS: dict[str, list[dict[int, list[str]]]] = {
    "gpt2": [EVERY, SEQUENCE, LINES], "bert-large": [EVERY, SEQUENCE, LINES], "vit": [EVERY, IMAGE, LINES],
    "mixtral-8x7b": [EVERY, SEQUENCE, EXPERTS, WHOLE], "dlrm": [EVERY, SHORT], "resnext50": [EVERY, WHOLE],
}  # fmt: skip
DEEP = {"gpt2": 4, "bert-large": 4, "vit": 4}  # layers, so that there are four stages
DROPS = ("gpt2", "bert-large", "vit")
AGAINST = ("torch", "one-process weft")  # without dropout and with it


def register(app: typer.Typer) -> None:
    @app.command()
    def losses(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        models: Annotated[str, typer.Option(help="which, joined by commas")] = ",".join(MODELS),
        steps: Annotated[int, typer.Option(help="of training")] = 50,
        part: Annotated[str, typer.Option(help="2/5: the second of five parts of every model's plans")] = "1/1",
    ) -> None:
        """Train six models under every plan that applies, and compare all losses with one process."""
        from bench._ranks import machine
        from weft.cli.output import console, emit

        rows = []
        for name in models.split(","):
            for row in rows_of(name, steps, part):
                rows.append(row)
                told = f"{row['worst']:.1e}" if row["worst"] is not None else row["failed"]
                console.print(f"{row['model']:14} {row['plan']:20} {row['against']:14} {told}", markup=False, soft_wrap=True)
        wrong = [r for r in rows if not r["equal"]]
        worst = max((r["worst"] for r in rows if r["worst"] is not None), default=None)
        console.print(f"{len(rows) - len(wrong)} of {len(rows)} equal within {LIMIT:g}; the worst differs by {worst}", markup=False)
        if json:
            emit(
                {"bench": "losses", "machine": machine(), "steps": steps, "limit": LIMIT, "worst": worst, "wrong": len(wrong), "rows": rows}
            )
        if wrong:
            raise typer.Exit(1)


def plans_of(name: str) -> dict[int, list[str]]:
    """The plans that apply to a model, by number of processes."""
    return {world: [plan for kinds in MODELS[name] for plan in kinds.get(world, [])] for world in (2, 4)}


def cases_of(name: str, part: str) -> list[tuple[float, int, str]]:
    """Dropout, processes and plan of every row: all plans without dropout and, where a model has any, every second one with it."""
    k, n = map(int, part.split("/"))
    rates = (0.0, 0.1) if name in DROPS else (0.0,)
    every = [(rate, world, plan) for rate in rates for world, plans in plans_of(name).items() for plan in plans[:: 2 if rate else 1]]
    return every[k - 1 :: n]


def rows_of(name: str, steps: int, part: str = "1/1") -> Iterator[dict[str, Any]]:
    """One row per case."""
    import weft.api.parallelize  # once here rather than on every rank
    import weft.rewrite.check  # noqa: F401
    from bench._ranks import run_ranks

    wanted: dict[float, list[float]] = {}
    for rate, world, plan in cases_of(name, part):
        start = time.monotonic()
        if rate not in wanted:
            wanted[rate] = run_ranks(alone, 1, name, steps, rate)
        row = {"model": name, "plan": plan, "ranks": world, "against": AGAINST[rate > 0], "dropout": rate, "worst": None}
        try:
            got = run_ranks(trained, world, name, plan, steps, rate)
            row["worst"] = max(abs(a - b) for a, b in zip(got, wanted[rate], strict=True))
        except Exception as e:  # the row says so; the rest is still tried
            row["failed"] = str(e)[-600:]
        yield {**row, "equal": row["worst"] is not None and row["worst"] <= LIMIT, "seconds": round(time.monotonic() - start, 1)}


def workload(name: str, dropout: float = 0.0) -> Any:
    """A model at test size in float64, and its optimizer; every caller gets the same start."""
    import torch

    import weft_zoo as zoo

    settings: dict[str, Any] = {"dropout": dropout} if name in DROPS else {}
    settings |= {"layers": DEEP[name]} if name in DEEP else {}
    w = zoo.small(name, dtype=torch.float64, **settings)
    return w, torch.optim.AdamW(w.model.parameters(), lr=1e-3)


def alone(rank: int, world: int, name: str, steps: int, dropout: float) -> list[float]:
    """What must come out: plain torch, or weft on one process where dropout draws."""
    if dropout:
        return trained(rank, world, name, "dp1", steps, dropout)
    w, optimizer = workload(name)
    out = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = w.loss(w.model, w.example(BATCH, seed=i))
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def trained(rank: int, world: int, name: str, plan: str, steps: int, dropout: float) -> list[float]:
    from weft.api.parallelize import parallelize

    w, optimizer = workload(name, dropout)
    step = parallelize(w.model, w.loss, optimizer, w.example(BATCH), plan=plan)
    return [step(w.example(BATCH, seed=i)).item() for i in range(steps)]
