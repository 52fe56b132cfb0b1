"""`weft bench planner-cases FILE`: published optima of small planning problems, each reached under the case's own cost model.

Programs are built from the words of the case; a case whose words are not understood is a row that says so.
"""

from __future__ import annotations

import json as jsonlib
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

SCALARS = 40.0  # sums of the loss and other single numbers, which the published objectives leave out
Row = dict[str, Any]


def register(app: typer.Typer) -> None:
    @app.command("planner-cases")
    def planner_cases(
        file: Path = typer.Argument(..., help="planner_cases.json"),
        json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    ) -> None:
        """Solve every case and compare: objective reached or beaten, collectives as asserted or fewer."""
        from bench._ranks import machine
        from weft.cli.output import console, emit

        rows = []
        for row in run(jsonlib.loads(file.read_text())):
            rows.append(row)
            console.print(describe(row), highlight=False)
        if json:
            counted = [r for r in rows if r["correct"] is not None]
            summary = {"reached": sum(bool(r["correct"]) for r in counted), "of": len(counted), "not_built": len(rows) - len(counted)}
            emit({"bench": "planner-cases", "machine": machine(), **summary, "rows": rows})


def describe(row: Row) -> str:
    if row["correct"] is None:
        return f"{row['case']}: not built, {row['why']}"
    return f"{row['case']}: {row['found']} for {row['published']}, {'reached' if row['correct'] else 'MISSED'} in {row['seconds']:.2f} s"


def run(cases: dict[str, Any]) -> Iterator[Row]:
    yield from _shard_parallel(cases["shard_parallel"]["cases"])
    yield from _small(cases["small_ilp"]["rows"])
    yield from _resharding(cases["resharding_cost"])
    yield from _tiny(cases["tiny_ilp"])
    yield _example(cases["iopddl_example"])
    yield from _schedules(cases["schedules"]["rows"])


def _row(case: str, published: Any, solve: Callable[[], tuple[Any, bool]]) -> Row:
    from weft.core.errors import PlanError

    begun = time.perf_counter()
    try:
        found, correct = solve()
    except PlanError as reason:  # cuts are even here: a mesh of three does not divide 128
        found, correct = reason.message, False
    return {"case": case, "found": found, "published": published, "correct": correct, "seconds": round(time.perf_counter() - begun, 3)}


def _not_built(case: str, why: str) -> Row:
    return {"case": case, "found": None, "published": None, "correct": None, "seconds": 0.0, "why": why}


# --- whole programs


def _shard_parallel(cases: list[dict[str, Any]]) -> Iterator[Row]:
    by_id = {c["id"]: c for c in cases}
    for case in cases:
        words = {**by_id.get(case.get("same_as", ""), {}), **case}
        known = build(str(words.get("model", "")))
        if known is None or "option" in case or "method" in case or "optimizer" in case:
            asked = case.get("option") or case.get("method") or case.get("optimizer")
            yield _not_built(case["id"], f"asks for {asked}" if asked else f"no program for {words.get('model') or words.get('op')!r}")
            continue
        for one in words.get("cases", []):
            yield _program(case["id"], known, {**words, **one})


def _program(name: str, known: Callable[..., Any], words: dict[str, Any]) -> Row:
    captured = known(words["batch"], words.get("seq", 0), words.get("image", 0))
    mesh = _mesh(words["mesh"])
    objective, slack = words["objective"], words.get("tolerance", 0.01)

    def solve() -> tuple[Any, bool]:
        chosen = _chosen(captured, mesh, words.get("alpha", [1, 1]), words.get("beta", [1, 1]))
        return round(chosen.cost, 2), chosen.cost <= objective * (1 + slack) + SCALARS

    return _row(f"{name} {'x'.join(map(str, words['mesh']))}", objective, solve)


def _mesh(sizes: list[int]) -> Any:
    from weft.core.layout import Mesh

    return Mesh(**dict(zip(("x", "y"), sizes, strict=False)))


def _chosen(captured: Any, mesh: Any, alpha: list[float], beta: list[float]) -> Any:
    from weft.plan.layouts import AlphaBeta, choose

    prices = AlphaBeta(mesh, dict(zip(mesh.axes, alpha, strict=False)), dict(zip(mesh.axes, beta, strict=False)))
    return choose(captured.program, mesh, prices, gap=1e-9)


def build(words: str) -> Callable[[int, int, int], Any] | None:
    """A captured step from the words of a case; None where they say what is not built here."""
    if m := re.match(r"MLP (\d+)xDense\((\d+)\)\+bias", words):
        return lambda batch, seq, image: _mlp(int(m[1]), int(m[2]), batch, bias=True, adam="Adam" in words)
    if m := re.match(r"(\d+) BERT layers h(\d+) heads(\d+)", words):
        return lambda batch, seq, image: _bert(int(m[1]), int(m[2]), int(m[3]), batch, seq)
    if (m := re.match(r"(\d+)x\[conv3x3 s2 no-bias, BN\(train\), relu, maxpool2 SAME\], channels (\d+)", words)) is not None:
        return lambda batch, seq, image: _conv(int(m[1]), int(m[2]), batch, image)
    return None


def _capture(model: Any, example: Any, adam: bool) -> Any:
    import torch

    from weft.frontend.capture import capture

    made = torch.optim.Adam(model.parameters()) if adam else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return capture(model, example, lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), made)


def _mlp(layers: int, width: int, batch: int, bias: bool, adam: bool) -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        parts: list[nn.Module] = []
        for i in range(layers):
            parts += [nn.ReLU()] * (i > 0) + [nn.Linear(width, width, bias=bias)]
        example = tuple(torch.empty(batch, width) for _ in range(2))
        return _capture(nn.Sequential(*parts), example, adam)


def _bert(layers: int, hidden: int, heads: int, batch: int, seq: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

        def heads(self, x: Tensor) -> Tensor:
            return x.view(batch, seq, heads, hidden // heads).transpose(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = F.scaled_dot_product_attention(self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x)))
            y = self.out(y.transpose(1, 2).reshape(batch, seq, hidden))
            x = self.norm1(x + F.dropout(y, 0.1))
            return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))

    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
        return _capture(model, tuple(torch.empty(batch, seq, hidden) for _ in range(2)), adam=True)


def _conv(blocks: int, channels: int, batch: int, image: int) -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        parts: list[nn.Module] = []
        for i in range(blocks):
            parts += [nn.Conv2d(3 if i == 0 else channels, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
            parts += [nn.MaxPool2d(2, 2, ceil_mode=True)]
        model = nn.Sequential(*parts)
        x = torch.empty(batch, 3, image, image)
        return _capture(model, (x, torch.empty_like(model(x))), adam=False)


# --- small programs with known optima


def _small(rows: list[list[Any]]) -> Iterator[Row]:
    for words, meshes, _, objective in rows:
        m = re.match(r"mlp(\d+)_(bias_)?(dp|2d)", words)
        if m is None:
            yield _not_built(words, "no program for these words")
            continue
        beta = [1, 0.01] if m[3] == "2d" else [1, 1]
        captured = _mlp(int(m[1]), 128, 1024, bias=bool(m[2]), adam=False)
        for sizes in meshes.split("|"):
            mesh = _mesh([int(x) for x in sizes.split("x")])
            yield _small_row(f"{words} {sizes}", captured, mesh, beta, objective)


def _small_row(name: str, captured: Any, mesh: Any, beta: list[float], objective: float) -> Row:
    def solve() -> tuple[Any, bool]:
        chosen = _chosen(captured, mesh, [1, 1], beta)
        return round(chosen.cost, 2), chosen.cost <= objective + SCALARS

    return _row(name, objective, solve)


def _resharding(case: dict[str, Any]) -> Iterator[Row]:
    from weft.core.layout import R, S
    from weft.plan.layouts import AlphaBeta
    from weft.plan.layouts.moves import route

    mesh = _mesh(case["mesh"])
    prices = AlphaBeta(mesh, dict(zip(mesh.axes, case["alpha"], strict=True)), dict(zip(mesh.axes, case["beta"], strict=True)))
    size = float(math.prod(case["tensor"]) * 4)
    values = case["values"]

    def read(text: str) -> tuple[Any, ...]:
        cuts = {int(m[2]): S(int(m[1])) for m in re.finditer(r"S(\d)@(\d)", text)}
        return tuple(cuts.get(i, R) for i in range(len(mesh.axes)))

    for source, target, price in case["rows"]:
        there = read(source if target == "same" else target)
        axes = [int(a) for a in re.findall(r"axis(\d)", str(price))]
        want = float(price) if not axes else sum(values[f"AG_axis{a}"] for a in axes)

        def solve(source: str = source, there: tuple[Any, ...] = there, want: float = want) -> tuple[Any, bool]:
            moves = route(mesh, read(source), there, size)
            found = sum(prices.move(m) for m in moves or ())
            return round(found, 3), moves is not None and found <= want * (1 + 1e-6) + 1e-3

        yield _row(f"{source} to {target}", want, solve)


# --- assignment problems


def _tiny(case: dict[str, Any]) -> Iterator[Row]:
    for result in case["results"]:
        name = result["case"]
        if name not in ("default", "node0 strategies 0-2 infinite", "edge(0,2)[0,0] infinite", "extra edge (1,3) same cost as (1,2)"):
            yield _not_built(f"tiny: {name}", "asks for something else than an optimum")
            continue
        yield _row(f"tiny: {name}", result["obj"], lambda name=name, want=result["obj"]: _exact(_tiny_problem(case, name), want))  # type: ignore[misc]


def _tiny_problem(case: dict[str, Any], change: str) -> Any:
    """Its nodes, edges by formula, and what must be equal as edges that forbid all else."""
    import numpy as np

    from weft.plan.assignment.problem import assemble

    costs = [np.array(n["cost"], float) for n in case["nodes"]]
    sizes = [len(c) for c in costs]
    if change.startswith("node0"):
        costs[0][:3] = np.inf
    edges = []
    for edge in [*case["edges"], *([{"pair": [1, 3], "cost": "5000+1000a+100b"}] if change.startswith("extra edge (1,3)") else [])]:
        base, row, column = (float(x) for x in re.fullmatch(r"(\d+)\+(\d+)a\+(\d+)b", edge["cost"]).groups())  # type: ignore[union-attr]
        u, v = edge["pair"]
        table = base + row * np.arange(sizes[u])[:, None] + column * np.arange(sizes[v])[None]
        if change.startswith("edge(0,2)") and (u, v) == (0, 2):
            table[0, 0] = np.inf
        edges.append((u, v, table))
    for u, v, _ in case["aliases"]:
        edges.append((u, v, np.where(np.eye(sizes[u], sizes[v]) > 0, 0.0, np.inf)))
    claims = [(i, *n["interval"], np.array(n["mem"], float)) for i, n in enumerate(case["nodes"]) if n["interval"][0] < n["interval"][1]]
    return assemble(costs, edges, claims, float(case["limit"]), "tiny")


def _exact(problem: Any, want: float) -> tuple[Any, bool]:
    from weft.plan.assignment import solve

    answer = solve(problem)
    return round(answer.cost, 6), answer.optimal and answer.cost <= want + 1e-6


def _example(case: dict[str, Any]) -> Row:
    import numpy as np

    from weft.plan.assignment.problem import assemble

    nodes = case["nodes"]
    costs = [np.array([s[0] for s in strategies], float) for _, strategies in nodes]
    edges = [(u, v, np.array(table, float).reshape(len(costs[u]), len(costs[v]))) for u, v, table in case["edges"]]
    claims = [(i, *interval, np.array([s[1] for s in strategies], float)) for i, (interval, strategies) in enumerate(nodes)]
    problem = assemble(costs, edges, claims, float(case["limit"]), "example")
    return _row("iopddl example", case["optimum"][0], lambda: _exact(problem, case["optimum"][0]))


# --- pipeline orders


def _schedules(rows: list[dict[str, Any]]) -> Iterator[Row]:
    from weft.plan.pipeline import in_flight, orders
    from weft.plan.timeline import Task, run

    for row in rows:
        n, m = row["n"], row["m"]

        def clocks(n: int = n, m: int = m, row: dict[str, Any] = row) -> tuple[Any, bool]:
            plan = orders("1f1b", n, m)
            index = {(a.kind, s, a.micro): i for i, (s, a) in enumerate((s, a) for s, order in enumerate(plan) for a in order)}
            tasks = [Task(a.kind, str(s), 1.0, _before(index, a.kind, s, a.micro, n)) for s, order in enumerate(plan) for a in order]
            ticks = round(run(tasks).seconds) + 1  # and the update
            alive = [in_flight(order) for order in plan]
            return [ticks, alive], ticks <= row["clocks"] and alive == row["inflight_1f1b"]

        yield _row(f"1F1B of {n} stages, {m} micro-batches", [row["clocks"], row["inflight_1f1b"]], clocks)


def _before(index: dict[tuple[str, int, int], int], kind: str, stage: int, micro: int, stages: int) -> tuple[int, ...]:
    if kind == "forward":
        return (index["forward", stage - 1, micro],) if stage else ()
    later = (index["backward", stage + 1, micro],) if stage + 1 < stages else ()
    return (*later, index["forward", stage, micro])
