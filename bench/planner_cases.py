"""`weft bench planner-cases FILE`: published optima of small planning problems, each reached under the case's own cost model.

Programs are built from the words of the case; a case with a word that is not understood is a row that says so, and is not reached.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from bench._case_plans import SCALARS, merged, mesh_of, prices_of

Row = dict[str, Any]
Case = Mapping[str, Any]


def register(app: typer.Typer) -> None:
    @app.command("planner-cases")
    def planner_cases(
        file: Path = typer.Argument(..., help="planner_cases.json"),
        json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    ) -> None:
        """Solve every case and compare: objective reached or beaten, collectives as asserted or fewer, sharding as stated."""
        from bench._ranks import machine
        from weft.cli.output import console, emit

        rows = []
        for row in run(jsonlib.loads(file.read_text()), file.parent):
            rows.append(row)
            console.print(describe(row), highlight=False)
        built = [r for r in rows if r["correct"] is not None]
        summary = {"reached": sum(bool(r["correct"]) for r in built), "of": len(rows), "not_built": len(rows) - len(built)}
        console.print(f"{summary['reached']} of {summary['of']} reached, {summary['not_built']} not built", highlight=False)
        if json:
            emit({"bench": "planner-cases", "machine": machine(), **summary, "rows": rows})


def describe(row: Row) -> str:
    if row["correct"] is None:
        return f"{row['case']}: not built, {row['why']}"
    return f"{row['case']}: {row['found']} for {row['published']}, {'reached' if row['correct'] else 'MISSED'} in {row['seconds']:.2f} s"


def run(document: Any, folder: Path | None = None) -> Iterator[Row]:
    """The rows of every case in a file: sections by name, each a table, a list or one case; or cases in a list, told apart by what they hold."""
    sections: dict[str, tuple[dict[str, Any], list[Any]]] = {}
    for name, facts, case in _cases(document):
        sections.setdefault(name, (facts, []))[1].append(case)
    for name, (facts, cases) in sections.items():
        if name in SECTIONS:
            yield from SECTIONS[name](cases, facts | {"folder": folder})
        else:
            yield from (
                _not_built(str(c.get("id", name) if isinstance(c, Mapping) else name), f"no such kind of case: {name}") for c in cases
            )


def _cases(document: Any, name: str = "", facts: Mapping[str, Any] | None = None) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Section, what is said of all of it, and a case of it."""
    facts = dict(facts or {})
    if isinstance(document, list) and name in ("", "small_ilp", "resharding_cost", "iopddl_best_known") and _is_row(document):
        yield name or _kind(document), facts, document
    elif isinstance(document, list):
        for case in document:
            yield from _cases(case, name, facts)
    elif not name and not any(k in document for k in ("model", "op", "same_as")) and any(k in SECTIONS for k in document):
        for key, body in document.items():
            if key in SECTIONS or isinstance(body, list | Mapping):
                yield from _cases(body, key, facts)
    elif (rows := next((k for k in ("rows", "cases") if k in document), None)) and not _is_case(document, name):
        body = {k: v for k, v in document.items() if k != rows}
        yield from _cases(document[rows], name, {**facts, **body})
        if name == "schedules" and "".join(_tables(body)):
            yield name, facts, {"tables": body}
    else:
        kind = document.get("kind", document.get("section", ""))
        yield name or (kind if kind in SECTIONS else _kind(document)), facts, document


def _is_row(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], str) and not isinstance(value[-1], Mapping)


def _is_case(document: Mapping[str, Any], name: str) -> bool:
    return any(k in document for k in ("model", "op", "same_as")) or name == "resharding_cost" or "values" in document


FIELDS = {  # what tells a case of each kind
    "layer_clustering": ("flops", "L"), "stage_dp": ("submesh",), "cross_mesh": ("src", "dst"), "tiny_ilp": ("nodes", "results"),
    "iopddl_example": ("nodes", "optimum"), "resharding_cost": ("tensor", "values"), "schedules": ("n", "m"), "small_ilp": ("program",),
    "iopddl_best_known": ("best_known",),
}  # fmt: skip


def _kind(case: Any) -> str:
    if isinstance(case, list):
        return "small_ilp" if len(case) == 4 and "x" in str(case[1]) else "iopddl_best_known"
    found = next((kind for kind, keys in FIELDS.items() if all(k in case for k in keys)), "")
    return found or ("shard_parallel" if any(k in case for k in ("model", "op", "same_as")) else "unknown")


def _row(case: str, published: Any, solve: Callable[[], tuple[Any, bool]]) -> Row:
    from weft.core.errors import WeftError

    begun = time.perf_counter()
    try:
        found, correct = solve()
    except WeftError as reason:
        found, correct = reason.message, False
    return {
        "case": case,
        "found": found,
        "published": published,
        "correct": bool(correct),
        "seconds": round(time.perf_counter() - begun, 3),
    }


def _not_built(case: str, why: str) -> Row:
    return {"case": case, "found": None, "published": None, "correct": None, "seconds": 0.0, "why": why}


# --- whole programs


def _shard_parallel(cases: Sequence[Case], facts: Case) -> Iterator[Row]:
    from bench import _case_plans

    by_id = {c.get("id"): c for c in cases}
    for case in cases:
        words = dict(case)
        while "same_as" in words:
            like = by_id.get(words.pop("same_as"), {})
            other = {
                f"like_{k}": v for k, v in like.items() if k in ("counts", "specs")
            }  # of another plan: how it may be made, not what it has
            words = {**other, **{k: v for k, v in like.items() if k not in ("counts", "specs", "formula", "status", "rs")}, **words}
        if "op" in words:
            yield _one_op(words)
        elif "model" in words:
            yield from _case_plans.rows(case, words, _row, _not_built)
        else:
            yield _not_built(str(case.get("id")), "no model")


def _one_op(words: Case) -> Row:
    """Single ops: how they are sharded, and that nothing travels where nothing must."""
    from weft.core.layout import S
    from weft.frontend.trace import f32, trace
    from weft.ops.linalg import einsum
    from weft.ops.shape import reshape
    from weft.plan.place import place

    mesh, name, op = mesh_of([words.get("devices", 4)]), str(words["id"]), str(words["op"])
    lone = mesh_of([1])
    if m := re.match(r"(?:reshape )?\((\d+),\) ?-> ?\((\d+), ?(\d+)\)", op):
        n, a, b = (int(x) for x in m.groups())
        program = trace(lambda v: {"y": reshape(v, (a, b))}, lone, v=f32(n))

        def moved() -> tuple[Any, bool]:
            found = merged(place(program, mesh, {"v": {"x": S(0)}}, outputs={"y": {"x": S(0)}}))
            return found, not found

        return _row(name, words.get("objective"), moved)
    if m := re.match(r"\((\d+),\) ?@ ?\(\1, ?(\d+)\)", op):
        k, n = int(m[1]), int(m[2])
        program = trace(lambda v, w: {"y": einsum("k,kn->n", v, w)}, lone, v=f32(k), w=f32(k, n))
        return _row(name, words.get("specs"), lambda: _local(program, mesh, words))
    if m := re.match(r"x ?\+ ?1, x \((\d+), ?(\d+)\) donated", op):
        shape = int(m[1]), int(m[2])
        program = trace(lambda x: {"x": x + 1.0}, lone, x=f32(*shape))
        return _row(name, words.get("specs"), lambda: _sliced(program, mesh, 4 * math.prod(shape)))
    if m := re.match(r"argmax(?: ?\(| of )? ?\(?(\d+), ?(\d+)\)?,? ?(?:axis|dim)[ =]?(\d)\)?", op):
        shape, dim = (int(m[1]), int(m[2])), int(m[3])
        return _row(name, {k: words[k] for k in ("objective", "specs") if k in words}, lambda: _argmax(shape, dim, mesh, words))
    return _not_built(name, f"words not understood: {op}")


def _local(program: Any, mesh: Any, words: Case) -> tuple[Any, bool]:
    """Whether a product reads its matrix in the local shape stated, and the plan has the objective."""
    from weft.plan.layouts import choose

    chosen = choose(program, mesh, prices_of(mesh, [1], [1]), gap=1e-9)
    found = list(chosen.program.find("einsum").args[1].layout.largest_local)
    told = re.search(r"\[(\d+(?:, ?\d+)*)\]", str(words.get("specs", "")))
    shaped = told is None or found == [int(x) for x in told[1].split(",")]
    return {"local": found, "objective": chosen.cost}, shaped and ("objective" not in words or not merged(chosen.program))


def _argmax(shape: tuple[int, int], dim: int, mesh: Any, words: Case) -> tuple[Any, bool]:
    """The largest along a dim, its result left as it comes: nothing travels, and the input is split along the other dim."""
    from weft.core.layout import S
    from weft.frontend.trace import f32, trace
    from weft.ops.order import argmax
    from weft.plan.place import place

    program = trace(lambda v: {"y": argmax(v, dim)}, mesh_of([1]), v=f32(*shape))
    placed = place(program, mesh, {"v": {"x": S(1 - dim)}}, outputs={"y": {"x": S(0)}})
    found = list(placed.input_names["v"].layout.largest_local)
    told = re.search(r"\[(\d+(?:, ?\d+)*)\]", str(words.get("specs", "")))
    return {"local": found, "counts": merged(placed)}, not merged(placed) and (
        told is None or found == [int(x) for x in told[1].split(",")]
    )


def _sliced(program: Any, mesh: Any, size: int) -> tuple[Any, bool]:
    """Whether state is sharded, at no cost, where a device has room for no more than its shard before and after."""
    from weft.plan.layouts import choose

    count = math.prod(mesh.sizes.values())
    chosen = choose(program, mesh, prices_of(mesh, [1], [1]), gap=1e-9, memory=2 * size // count)
    layout = chosen.program.output_names["x"].layout
    cuts = [d for d, (whole, part) in enumerate(zip(layout.shape, layout.largest_local, strict=True)) if part * count == whole]
    return str(layout), len(cuts) == 1 and merged(chosen.program) == {}


# --- small programs with known optima


def _small(cases: Sequence[Any], facts: Case) -> Iterator[Row]:
    for case in cases:
        words, meshes, *values = (
            case if isinstance(case, list) else (case["program"], case["mesh"], case.get("objective", case.get("value")))
        )
        shapes = meshes if isinstance(meshes, list) else str(meshes).split("|")
        for sizes in [shapes] if shapes and isinstance(shapes[0], int) else shapes:
            shape = [int(x) for x in sizes.split("x")] if isinstance(sizes, str) else list(sizes)
            yield _small_row(str(words), shape, float(values[-1]))


def _small_row(words: str, shape: list[int], objective: float) -> Row:
    from bench._case_programs import small

    name, beta = f"{words} {'x'.join(map(str, shape))}", [1.0, 1.0]
    allow = None
    if m := re.fullmatch(r"mlp(\d+)_(bias_)?(dp|mp|2d|force_dp)(?: B(\d+))?(?: h(\d+))?(?: b\[([\d.]+), ?([\d.]+)\])?", words):
        wide = m[3] in ("mp", "force_dp")
        batch, width = int(m[4] or (128 if wide else 1024)), int(m[5] or (1024 if wide else 128))
        rows = _even(batch, shape)
        name += f", {rows} rows for {batch}" if rows != batch else ""
        beta = [float(m[6]), float(m[7])] if m[6] else [1, 0.01] if m[3] == "2d" else beta
        program, allow = _small_mlp(int(m[1]), width, rows, bool(m[2]), shape, m[3] == "force_dp")
    elif (program := small(words)) is None:
        return _not_built(name, "words not understood")

    def solve() -> tuple[Any, bool]:
        from weft.plan.layouts import choose

        mesh = mesh_of(shape)
        chosen = choose(program, mesh, prices_of(mesh, [1, 1], beta), gap=1e-9, allow=allow)
        return round(chosen.cost, 2), chosen.cost <= objective * (1 + 1e-3) + SCALARS

    return _row(name, objective, solve)


def _small_mlp(layers: int, width: int, rows: int, bias: bool, shape: list[int], forced: bool) -> tuple[Any, Any]:
    import torch

    from bench._case_plans import Plan
    from bench._case_programs import mlp
    from weft.frontend.capture import capture

    module, batch, loss = mlp(layers, width, rows, bias)
    captured = capture(module, batch, loss, torch.optim.SGD(module.parameters(), lr=0.1))
    asked = {"force_batch_dim_to_mesh_dim": 0, "allow_mixed_mesh_shape": True}
    return captured.program, Plan(captured, shape, [1, 1], [1, 1], asked, 1)._allow() if forced else None


def _even(rows: int, shape: Sequence[int]) -> int:
    """The least number of rows, no fewer than these, that every axis of the mesh can cut evenly: what is added is paid for."""
    step = math.lcm(*shape)
    return rows if all(rows % n == 0 for n in shape) else -(-rows // step) * step


def _resharding(cases: Sequence[Any], facts: Case) -> Iterator[Row]:
    for case in cases:
        if isinstance(case, Mapping) and "rows" in case:
            yield from _resharding(case["rows"], {**facts, **case})
            continue
        source, target, price = case if isinstance(case, list) else (case["src"], case["dst"], case["cost"])
        yield _rerouted(str(source), str(target), price, facts)


def _rerouted(source: str, target: str, price: Any, facts: Case) -> Row:
    from weft.core.layout import R, S
    from weft.plan.layouts.moves import route

    mesh = mesh_of(facts["mesh"])
    prices = prices_of(mesh, facts["alpha"], facts["beta"])
    size = float(math.prod(facts["tensor"]) * 4)
    axes = [int(a) for a in re.findall(r"axis(\d)", str(price))]
    want = float(price) if not axes else sum(facts["values"][f"AG_axis{a}"] for a in axes)

    def read(text: str) -> tuple[Any, ...]:
        cuts = {int(m[2]): S(int(m[1])) for m in re.finditer(r"S(\d)@(\d)", text)}
        return tuple(cuts.get(i, R) for i in range(len(mesh.axes)))

    def solve() -> tuple[Any, bool]:
        moves = route(mesh, read(source), read(source if target == "same" else target), size)
        found = sum(prices.move(m) for m in moves or ())
        return round(found, 3), moves is not None and found <= want * (1 + 1e-6) + 1e-3

    return _row(f"{source} to {target}", want, solve)


# --- assignment problems


def _tiny(cases: Sequence[Case], facts: Case) -> Iterator[Row]:
    for case in cases:
        for result in case["results"]:
            name, want = result["case"], result["obj"]
            solve = {"overbudget": _over_budget, "evaluate": _evaluated, "minimum": _least_limit}.get(name.split()[0])
            if solve is None and _changed(case, name) is None:
                yield _not_built(f"tiny: {name}", "words not understood")
            else:
                yield _row(f"tiny: {name}", want, lambda: (solve or _optimum)(case, name, want))  # noqa: B023  (called at once)


def _optimum(case: Case, name: str, want: float) -> tuple[Any, bool]:
    return _exact(_tiny_problem(case, name), want)


def _evaluated(case: Case, name: str, want: float) -> tuple[Any, bool]:
    found = _tiny_problem(case, "default").cost(jsonlib.loads(name.removeprefix("evaluate ")))
    return found, found == want


def _over_budget(case: Case, name: str, want: float) -> tuple[Any, bool]:
    """Bytes beyond the limit cost so much each: the best over every limit that could be the peak."""
    from bench._assignment import solve

    each, limit = (float(x) for x in re.findall(r"\d+", name))
    found = []
    for peak in _peaks(case):
        answer = solve(_tiny_problem({**case, "limit": peak}, "default"))
        found += [answer.cost + each * max(0.0, peak - limit)] if answer.feasible else []
    return min(found), min(found) <= want + 1e-6


def _least_limit(case: Case, name: str, want: float) -> tuple[Any, bool]:
    """The smallest limit under which there is a choice."""
    from bench._assignment import solve

    found = min(peak for peak in _peaks(case) if solve(_tiny_problem({**case, "limit": peak}, "default")).feasible)
    return found, found <= want


def _peaks(case: Case) -> list[float]:
    """Every amount of memory that can be in use at once."""
    nodes = [n for n in case["nodes"] if n["interval"][0] < n["interval"][1]]
    sums = {0.0}
    for n in nodes:
        sums |= {s + m for s in sums for m in n["mem"]}
    return sorted(sums)


def _changed(case: Case, change: str) -> tuple[list[Any], list[Any], float] | None:
    """Costs, edges and limit of a tiny problem with the change that its name states; None where that is not understood."""
    import numpy as np

    costs = [np.array(n["cost"], float) for n in case["nodes"]]
    edges = [(*e["pair"], _formula(e["cost"], *(len(costs[v]) for v in e["pair"]))) for e in case["edges"]]
    limit = float(case["limit"])
    if m := re.fullmatch(r"node ?(\d+) strateg(?:y|ies) (\d+)(?:-(\d+))? infinite", change):
        costs[int(m[1])][int(m[2]) : int(m[3] or m[2]) + 1] = np.inf
    elif m := re.fullmatch(r"edge ?\((\d+), ?(\d+)\) ?\[(\d+), ?(\d+)\] infinite", change):
        u, v, a, b = (int(x) for x in m.groups())
        next(t for i, j, t in edges if (i, j) == (u, v))[a, b] = np.inf
    elif m := re.fullmatch(r"extra edge \((\d+), ?(\d+)\) same cost as \((\d+), ?(\d+)\)", change):
        u, v, *like = (int(x) for x in m.groups())
        edges.append((u, v, next(t for i, j, t in edges if [i, j] == like).copy()))
    elif m := re.fullmatch(r"extra edge \((\d+), ?(\d+)\) costs \[(.*)\]", change):  # the first cost, then rows of a hundred more each
        u, v = int(m[1]), int(m[2])
        first, *rows = (int(x) for x in re.findall(r"\d+", m[3].replace("..", " ")))
        table = np.array([[row + 100 * j for j in range(len(costs[v]))] for row in (rows[0] - 100, *rows[2::2])], float)
        table[0, 0] = first
        edges.append((u, v, table))
    elif m := re.fullmatch(r"(no|without a?) ?(memory )?limit|limit (\d+)", change):
        limit = float(m[3]) if m[3] else math.inf
    elif change != "default":
        return None
    return costs, edges, limit


def _formula(text: str, rows: int, columns: int) -> Any:
    """`1000+1000a+100b`: a table by the numbers of both strategies."""
    import numpy as np

    base, row, column = (float(x) for x in re.fullmatch(r"(\d+)\+(\d+)a\+(\d+)b", text).groups())  # type: ignore[union-attr]
    return base + row * np.arange(rows)[:, None] + column * np.arange(columns)[None]


def _tiny_problem(case: Case, change: str) -> Any:
    """What must be equal is an edge that forbids all else."""
    import numpy as np

    from weft.plan.assignment.problem import assemble

    costs, edges, limit = _changed(case, change)  # type: ignore[misc]
    sizes = [len(c) for c in costs]
    edges += [(u, v, np.where(np.eye(sizes[u], sizes[v]) > 0, 0.0, np.inf)) for u, v, _ in case["aliases"]]
    claims = [(i, *n["interval"], np.array(n["mem"], float)) for i, n in enumerate(case["nodes"]) if n["interval"][0] < n["interval"][1]]
    return assemble(costs, edges, claims, limit, "tiny")


def _exact(problem: Any, want: float) -> tuple[Any, bool]:
    from bench._assignment import solve

    answer = solve(problem)
    return round(answer.cost, 6), answer.optimal and answer.cost <= want + 1e-6


def _example(cases: Sequence[Case], facts: Case) -> Iterator[Row]:
    import numpy as np

    from weft.plan.assignment.problem import assemble

    case = cases[0]
    nodes = case["nodes"]
    costs = [np.array([s[0] for s in strategies], float) for _, strategies in nodes]
    edges = [(u, v, np.array(table, float).reshape(len(costs[u]), len(costs[v]))) for u, v, table in case["edges"]]
    claims = [(i, *interval, np.array([s[1] for s in strategies], float)) for i, (interval, strategies) in enumerate(nodes)]
    for name, limit, (want, _) in (("", case["limit"], case["optimum"]), (" without a limit", math.inf, case["optimum_no_limit"])):
        problem = assemble(costs, edges, claims, float(limit), "example")
        yield _row(f"iopddl example{name}", want, lambda problem=problem, want=want: _exact(problem, want))  # type: ignore[misc]


# --- pipeline orders


def _schedules(cases: Sequence[Case], facts: Case) -> Iterator[Row]:
    from weft.plan.schedules import SCHEDULES

    for row in cases:
        if "tables" in row:
            yield from _order_tables(row["tables"])
            continue
        n, m = row["n"], row["m"]
        if "clocks" in row:
            yield _row(f"1F1B of {n} stages, {m} micro-batches", row["clocks"], lambda: _clocks(n, m, row["clocks"]))  # noqa: B023
        for key, schedule in (("inflight_1f1b", "1f1b"), ("inflight_gpipe", "gpipe"), ("inflight_overlap", "1f1b-eager")):
            if key in row:
                found = list(SCHEDULES[schedule].in_flight(n, m))
                yield _row(f"{schedule} of {n} stages, {m} micro-batches in flight", row[key], lambda: (found, found == row[key]))  # noqa: B023


def _clocks(n: int, m: int, most: int) -> tuple[Any, bool]:
    ticks = len(_ticks(n, m)) + 1  # and the update
    return ticks, ticks <= most


def _ticks(n: int, m: int) -> list[list[Any]]:
    """1F1B clock by clock: what each stage does, as (micro-batch, number of the pass), when every pass takes one tick."""
    from weft.cost.timeline import Task, run
    from weft.plan.schedules import SCHEDULES

    plan = SCHEDULES["1f1b"].orders(n, m)
    flat = [(s, a) for s, order in enumerate(plan) for a in order]
    index = {(a.kind, s, a.micro): i for i, (s, a) in enumerate(flat)}
    line = run([Task(a.kind, str(s), 1.0, _before(index, a.kind, s, a.micro, n)) for s, a in flat])
    table: list[list[Any]] = [[None] * n for _ in range(round(line.seconds))]
    for i, (s, a) in enumerate(flat):
        table[round(line.end[i]) - 1][s] = [a.micro, s if a.kind == "forward" else 2 * n - 1 - s]
    return table


def _tables(body: Case) -> list[str]:
    return [k for k, v in body.items() if isinstance(v, list) and v and isinstance(v[0], list)]


def _order_tables(body: Case) -> Iterator[Row]:
    """Whole tables of an order, their stages and micro-batches in the name: `table_1f1b_n3_m4`."""
    named = re.search(r"n(\d+)_m(\d+)", " ".join(body))
    for key in _tables(body):
        if named is None:
            yield _not_built(f"schedule {key}", "no number of stages and micro-batches")
            continue
        n, m, told = int(named[1]), int(named[2]), body[key]
        update = [[[m - 1, 2 * n + s] for s in range(n)]]
        yield _row(f"1F1B clock by clock, {n} stages, {m} micro-batches", told, lambda: (found := _ticks(n, m) + update, found == told))  # noqa: B023


def _before(index: dict[tuple[str, int, int], int], kind: str, stage: int, micro: int, stages: int) -> tuple[int, ...]:
    if kind == "forward":
        return (index["forward", stage - 1, micro],) if stage else ()
    later = (index["backward", stage + 1, micro],) if stage + 1 < stages else ()
    return (*later, index["forward", stage, micro])


def _cross_mesh(cases: Sequence[Case], facts: Case) -> Iterator[Row]:
    """A tensor between stages sharded differently: bytes over the busiest host's link, against the published lower bound."""
    shapes = {m[0]: tuple(map(int, m[1].split("x"))) for m in re.findall(r"(tensor|case\d+:) (\d+(?:x\d+)+)", str(facts.get("note", "")))}
    for row in cases:
        shape = tuple(row.get("tensor", row.get("shape", ()))) or shapes.get(f"case{row['case']}:", shapes.get("tensor", (1024, 1024, 512)))
        source, target = (_held_on(row[k], shape) for k in ("src", "dst"))
        if source is None or target is None:
            yield _not_built(f"cross mesh {row['case']}", f"words not understood: {row['src']} to {row['dst']}")
            continue

        def sent(source: Any = source, target: Any = target, row: Case = row) -> tuple[Any, bool]:
            from bench._crossing import crossing, naive

            found, plain = crossing(source, target, "x", 4).busiest, naive(source, target, 4)
            return [found, plain], found <= row["host_lb"] and plain == row.get("naive", plain)

        yield _row(f"cross mesh {row['case']}", [row["host_lb"], row.get("naive")], sent)


def _held_on(words: str, shape: tuple[int, ...]) -> Any:
    """`[2,4] S^0 R R`: the mesh, hosts by devices, and for each dim the axes that cut it."""
    from weft.core.layout import Layout, S

    m = re.match(r"[\[(](\d+), ?(\d+)[\])] ((?:S\^\d+|R)(?: (?:S\^\d+|R))*)", words)
    if m is None or len(m[3].split()) != len(shape):
        return None
    mesh = mesh_of([int(m[1]), int(m[2])])
    cuts = {mesh.axes[int(a)]: S(d) for d, how in enumerate(m[3].split()) if how.startswith("S^") for a in how[2:]}
    return Layout.of(mesh, shape, cuts)


def _clustered(cases: Sequence[Case], facts: Case) -> Iterator[Row]:
    """Ops of a chain in groups of at most (1 + eps) times the mean work, the most bytes over a cut least; of equals the least sum, then the most even."""
    for row in cases:
        yield _row(f"layer clustering {row['id']}", [row["groups"], row["cost"]], lambda: _grouped(row))  # noqa: B023


def _grouped(row: Case) -> tuple[Any, bool]:
    from weft.plan.partition import partition

    flops, out, count = row["flops"], row["out"], len(row["flops"])
    edges = [*((i, i + 1) for i in range(count - 1)), *map(tuple, row.get("extra", []))]
    bound = (1 + row["eps"]) * sum(flops) / row["L"]

    def entering(i: int, a: int, b: int) -> float | None:
        return None if sum(flops[a:b]) > bound else float(sum(out[u] for u in {u for u, v in edges if u < a <= v < b}))

    def tie(before: Any, cost: float, end: int) -> Any:
        total, squares, start = before or (0.0, 0.0, 0)
        return total + cost, squares + (end - start) ** 2, end

    ends = partition(count, row["L"], entering, tie=tie) or ()
    groups = [b - a for a, b in itertools.pairwise((0, *ends))]
    costs = [entering(0, a, b) or 0.0 for a, b in itertools.pairwise((0, *ends))]
    worst = max(costs, default=math.inf)
    return [groups, worst], worst < row["cost"] or (worst == row["cost"] and groups == row["groups"])


def _staged(cases: Sequence[Case], facts: Case) -> Iterator[Row]:
    from bench import _stage_dp

    for row in cases:
        name = f"stages of {row['layers']} layers on {row['hosts']}x{row['dev']}, {row['B']} micro-batches"
        problem = _stage_dp.read(row)
        if isinstance(problem, str):
            yield _not_built(name, f"words not understood: {problem}")
            continue
        published = {k: row[k] for k in ("training_cost", "solution", "inference_cost") if k in row}
        yield _row(name, published, lambda: problem.check(row))  # noqa: B023


def _best_known(cases: Sequence[Any], facts: Case) -> Iterator[Row]:
    """Assignment problems whose files lie beside the cases: the best known cost, within a minute each."""
    for case in cases:
        name, best = (case[0], case[1]) if isinstance(case, list) else (case["id"], case["best_known"])
        file = next((p for p in (facts["folder"] or Path()).glob(f"**/{name}.json*")), None)
        if file is None:
            yield _not_built(f"iopddl {name}", f"no file {name}.json.gz beside the cases")
        else:
            yield _row(f"iopddl {name}", int(best), lambda: _contest(file, int(best)))  # noqa: B023


def _contest(file: Path, best: int) -> tuple[Any, bool]:
    """Within growing limits, so that what is found soon need not be waited for."""
    from bench.iopddl import run as solved

    for limit in (8.0, 20.0, 60.0):
        row = solved(file, limit, 2)
        if row["cost"] is not None and row["cost"] <= best:
            break
    return row["cost"], bool(row["feasible"]) and row["cost"] <= best


SECTIONS: dict[str, Callable[[Sequence[Any], Case], Iterator[Row]]] = {
    "shard_parallel": _shard_parallel, "small_ilp": _small, "resharding_cost": _resharding, "tiny_ilp": _tiny, "iopddl_example": _example,
    "schedules": _schedules, "layer_clustering": _clustered, "cross_mesh": _cross_mesh, "stage_dp": _staged, "iopddl_best_known": _best_known,
}  # fmt: skip
