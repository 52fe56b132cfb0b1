"""`weft bench cpu-accuracy`: step times of weft's plans on the ranks at hand, predicted from a calibrated profile and measured.

Five plans are compared in order, one for each thing a plan can cut: samples alone, parameters too, features, features and tokens, tokens.
They are the same for every size and number of ranks. Others are timed beside them and predicted, but lie too near to these to have an order.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bench.orders import KINDS

BESIDE = ("dp{n},zero1", "dp{n},zero1,recompute")
NEAR = 0.03  # plans measured within this of one another are told as such


def register(app: typer.Typer) -> None:
    @app.command("cpu-accuracy")
    def cpu_accuracy(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        ranks: Annotated[str, typer.Option(help="numbers of processes, joined by commas")] = "2,4",
        sizes: Annotated[str, typer.Option(help="which, joined by commas")] = "10M,30M",
        rounds: Annotated[int, typer.Option(help="timed steps of each plan")] = 7,
        profile: Annotated[str, typer.Option(help="a calibrated profile; measured first if not given")] = "",
    ) -> None:
        """Predict one training step under several plans, time it, and compare errors and the order of five."""
        from bench._ranks import machine
        from bench.accuracy import summary
        from weft.cli.output import console, emit

        rows: list[dict[str, Any]] = []
        order: dict[str, Any] = {}
        for n in map(int, ranks.split(",")):
            where = profile or _calibrate(n)
            for size in sizes.split(","):
                found, order[f"{size} x{n}"] = group(n, size, rounds, where)
                console.print(_table(found))
                console.print(_said(f"{size} x{n}", order[f"{size} x{n}"]))
                rows += found
        if json:
            figures = summary({"cpu": rows})
            emit({"bench": "cpu-accuracy", "machine": machine(), "rows": rows, "order": order, **figures["cpu"]})


def group(ranks: int, size: str, rounds: int, where: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one size on so many ranks, and the order of the five."""
    from bench._ranks import run_ranks
    from bench.orders import order

    five = [p.format(n=ranks) for p in KINDS.values()]
    rows = run_ranks(measure, ranks, size, rounds, [*five, *(p.format(n=ranks) for p in BESIDE)], f"{ranks}x{where}")
    return rows, order(size, [r for r in rows if r["case"].split()[-1] in five], five)


def _said(name: str, found: dict[str, Any]) -> str:
    """The order in words: pairs the wrong way round, and how far apart they were measured."""
    wrong = [f"{pair} ({by:.1%} apart{', a near tie' if by < NEAR else ''})" for pair, by in found["wrong"].items()]
    near = [f"{pair} {n['apart']:.1%} ({n['spread']:.1%}{', a tie within the spread' if n['tie'] else ''})" for pair, n in found["neighbours"].items()]
    order = "the same order" if found["same"] else "the wrong way round: " + "; ".join(wrong)
    return f"{name}: {order}\n  measured apart (spread of rounds): " + "; ".join(near)


def _calibrate(ranks: int) -> str:
    """Measure this machine into a file of its own."""
    import json
    import tempfile

    from weft.api.local_calls import local_calls
    from weft.cluster.calibrate import calibrate
    from weft.cluster.profile import dump
    from weft.runtime import memory

    memory.keep()  # as `weft calibrate` does
    path = f"{tempfile.mkdtemp()}/here.json"
    with open(path, "w") as file:
        json.dump(dump(calibrate("cpu", ranks=(ranks,), calls=local_calls)), file)
    return path


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("case", "measured ms", "predicted ms", "error", title="one training step")
    for r in rows:
        if r["error"] is None:
            table.add_row(r["case"], "-", "-", r["reason"])
        else:
            table.add_row(r["case"], f"{r['measured']:.1f}", f"{r['predicted']:.1f}", f"{r['error']:+.1%}")
    return table


def measure(rank: int, world: int, size: str, rounds: int, plans: list[str], place: str) -> list[dict[str, Any]]:
    """Every plan that can be made, predicted and timed in turn with the others; what was measured is the lower quartile of its rounds."""
    from bench.train import workload
    from weft.cluster.spec import cluster
    from weft.cost.simulate import predict

    work, batch = workload(size)
    example = work.example(batch * world, seed=0)
    steps, rows = {}, []
    for plan in plans:
        try:
            steps[plan] = _step(work, plan, example)
        except Exception as error:  # a plan that is not there yet must not lose the others
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"case": f"gpt-{size} x{world} {plan}", "group": f"{size} x{world}", "error": None, "reason": reason})
    took = _time({p: (lambda s=s: s(example)) for p, s in steps.items()}, rounds)
    for plan, step in steps.items():
        seen = predict(step.program, cluster(place))
        predicted, measured = seen.step_ms, sorted(took[plan])[rounds // 4]
        rows.append(
            {
                "case": f"gpt-{size} x{world} {plan}", "group": f"{size} x{world}", "measured": measured, "predicted": predicted,
                "error": predicted / measured - 1, "causes_ms": dict(seen.causes_ms), "rounds_ms": took[plan],
            }
        )  # fmt: skip
    return rows


def _time(calls: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call on its slowest rank, in rounds in which every call is timed once."""
    import time

    import torch
    import torch.distributed as dist

    taken: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            spent = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if n:  # the first round makes and loads kernels
                taken[name].append(spent.item() * 1e3)
    return taken


def _step(work: Any, plan: str, example: Any) -> Any:
    import copy

    import torch

    from weft.api.parallelize import parallelize

    model = copy.deepcopy(work.model)
    return parallelize(model, work.loss, torch.optim.AdamW(model.parameters(), lr=1e-3), example, plan=plan)
