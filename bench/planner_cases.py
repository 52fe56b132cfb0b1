"""`weft bench planner-cases FILE`: published optima of small planning problems, each reached under the case's own cost model.

Programs are built from the words of the case; a case whose words are not understood is a row that says so.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import math
import re
import time
from collections import Counter
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
    yield from _example(cases["iopddl_example"])
    yield from _schedules(cases["schedules"]["rows"])
    yield from _clustered(cases["layer_clustering"]["rows"])
    yield from _cross_mesh(cases["cross_mesh"])


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

SHARDED = ("Zero2Parallel", "prefer_reduce_scatter")  # ask for optimizer state in slices
FORCED = ("force_data_parallel", "force_batch_dim_to_mesh_dim=0")
ALWAYS = ("allow_mixed_mesh_shape",)  # one dim may be cut by both axes here, whatever is asked


def _shard_parallel(cases: list[dict[str, Any]]) -> Iterator[Row]:
    from bench._case_programs import build

    by_id = {c["id"]: c for c in cases}
    for case in cases:
        words = {**by_id.get(case.get("same_as", ""), {}), **case}
        known = build(str(words.get("model", "")))
        asked = str(case.get("option") or case.get("method") or "")
        optimizer = str(case.get("optimizer", ""))
        if "op" in words:
            yield _one_op(words)
        elif known is None or (optimizer and not optimizer.startswith("adafactor")) or asked not in ("", *SHARDED, *FORCED, *ALWAYS):
            why = optimizer or asked or words.get("status")
            yield _not_built(case["id"], f"asks for {why}" if why else f"no program for {words.get('model')!r}")
        else:
            for one in words.get("cases") or [{"mesh": m} for m in words.get("meshes", [words.get("mesh", [4, 1])])]:
                yield _program(case["id"], known, {**words, **one}, asked)


def _program(name: str, known: Callable[..., Any], words: dict[str, Any], asked: str) -> Row:
    """Reached if it costs no more than published; where only counts are published, or slices were asked for, by those."""
    from bench._case_programs import with_adafactor

    batch, seq = (words["x"][:2]) if "x" in words else (words["batch"], words.get("seq", 0))
    captured = known(batch, seq, words.get("image", 0))
    captured = with_adafactor(captured, words["optimizer"]) if "optimizer" in words else captured
    sizes = [math.prod(words["mesh"])] if asked == "force_data_parallel" else words["mesh"]  # one axis of all devices
    mesh, objective = _mesh(sizes), words.get("objective")
    published = objective if objective is not None and asked not in SHARDED else words["counts"]

    def solve() -> tuple[Any, bool]:
        prices = _prices(mesh, words.get("alpha", [1, 1]), words.get("beta", [1, 1]))
        chosen = _chosen(captured, mesh, prices, _pins(captured, mesh, asked))
        if published is objective:
            return round(chosen.cost, 2), chosen.cost <= published * (1 + words.get("tolerance", 0.01)) + SCALARS
        found = merged(chosen.program)
        return found, _as_counted(found, published)

    return _row(f"{name} {'x'.join(map(str, words['mesh']))}", published, solve)


def _pins(captured: Any, mesh: Any, asked: str) -> dict[str, list[dict[str, Any]]]:
    """What an option fixes: the batch along the first axis, parameters whole, or optimizer state in slices."""
    from weft.core.layout import S

    inputs, cut = captured.program.input_names, {a: S(0) for a, n in mesh.sizes.items() if n > 1}
    pins: dict[str, list[dict[str, Any]]] = {}
    if asked in FORCED:
        first = {a: p for a, p in cut.items() if a == mesh.axes[0]}
        pins |= {name: [first] for name in inputs if name.startswith("batch.")}
    if asked == "force_data_parallel" or asked in SHARDED and captured.states and _copies(captured):
        pins |= {name: [{}] for name in inputs if name.startswith("param.")}
    if asked in SHARDED and _copies(captured):
        pins |= {
            name: [cut] for name in captured.states if inputs[name].ndim and inputs[name].shape[0] % math.prod(mesh.sizes.values()) == 0
        }
    return pins


def _copies(captured: Any) -> bool:
    """Whether the batch is larger than a parameter is wide: then the published plan holds copies of all parameters."""
    rows = [math.prod(n.shape[:-1]) for name, n in captured.program.input_names.items() if name.startswith("batch.")]
    widest = max(max(n.shape) for name, n in captured.program.input_names.items() if name.startswith("param."))
    return max(rows) > widest


def merged(program: Any) -> dict[str, int]:
    """How many collectives of each kind are left when those that do not wait for one another go as one; sums of single numbers aside."""
    from weft.ops.comm import is_comm

    deep: dict[Any, Counter[str]] = {}
    total: Counter[str] = Counter()
    for node in program.nodes:
        here = Counter[str]()
        for a in node.args:
            here |= deep[a]
        if is_comm(node) and node.op.name not in ("slice", "turn") and math.prod(node.type.shape) > 1:
            here = here + Counter([node.op.name])
        deep[node] = here
        total |= here
    return dict(sorted(total.items()))


def _as_counted(found: dict[str, int], published: Any) -> bool:
    """Whether counts are those published, or fewer; a reduce_scatter and an all_gather move what one all_reduce does."""
    at = Counter(found)
    if isinstance(published, str):  # "all_reduce+reduce_scatter==5; reduce_scatter==all_gather"
        return at["all_reduce"] + at["reduce_scatter"] <= 5 and at["reduce_scatter"] == at["all_gather"]
    asked = {kind: int(str(n).removeprefix("<=")) for kind, n in published.items() if not str(n).startswith(">")}
    total, pairs = asked.pop("total", None), min(at["reduce_scatter"], at["all_gather"])
    more = all(at[kind] > int(n[1:]) for kind, n in published.items() if str(n).startswith(">"))
    return more and all(at[kind] <= n for kind, n in asked.items()) and (total is None or sum(found.values()) - pairs <= total)


def _one_op(words: dict[str, Any]) -> Row:
    """Single ops: how they are held, and that nothing travels where nothing must."""
    from weft.core.layout import S
    from weft.frontend.trace import f32, trace
    from weft.ops.linalg import einsum
    from weft.ops.shape import reshape
    from weft.plan.place import place

    mesh, name, op = _mesh([words["devices"]]), words["id"], words["op"]
    lone = _mesh([1])
    if m := re.match(r"\((\d+),\)->\((\d+),(\d+)\)", op):
        n, a, b = (int(x) for x in m.groups())
        program = trace(lambda v: {"y": reshape(v, (a, b))}, lone, v=f32(n))

        def moved() -> tuple[Any, bool]:
            found = merged(place(program, mesh, {"v": {"x": S(0)}}, outputs={"y": {"x": S(0)}}))
            return found, not found

        return _row(name, words["objective"], moved)
    if m := re.match(r"\((\d+),\)@\(\1,(\d+)\)", op):
        k, n = int(m[1]), int(m[2])
        program = trace(lambda v, w: {"y": einsum("k,kn->n", v, w)}, lone, v=f32(k), w=f32(k, n))

        def held() -> tuple[Any, bool]:
            from weft.plan.layouts import choose

            layout = choose(program, mesh, _prices(mesh, [1], [1]), gap=1e-9).program.find("einsum").args[1].layout
            return str(list(layout.largest_local)), list(layout.largest_local) == [k, n // words["devices"]]

        return _row(name, words["specs"], held)
    if m := re.match(r"x\+1, x \((\d+),(\d+)\) donated", op):
        shape = int(m[1]), int(m[2])
        program = trace(lambda x: {"x": x + 1.0}, lone, x=f32(*shape))
        return _row(name, words["specs"], lambda: _sliced(program, mesh, 4 * math.prod(shape)))
    return _not_built(name, f"no program for {op!r}")


def _sliced(program: Any, mesh: Any, size: int) -> tuple[Any, bool]:
    """Whether state is held in slices, at no cost, where a device has room for no more than its slice before and after."""
    from weft.plan.layouts import choose

    count = math.prod(mesh.sizes.values())
    chosen = choose(program, mesh, _prices(mesh, [1], [1]), gap=1e-9, memory=2 * size // count)
    layout = chosen.program.output_names["x"].layout
    cuts = [d for d, (whole, part) in enumerate(zip(layout.shape, layout.largest_local, strict=True)) if part * count == whole]
    return str(layout), len(cuts) == 1 and merged(chosen.program) == {}


def _mesh(sizes: list[int]) -> Any:
    from weft.core.layout import Mesh

    return Mesh(**dict(zip(("x", "y"), sizes, strict=False)))


def _prices(mesh: Any, alpha: list[float], beta: list[float]) -> Any:
    from bench._alpha_beta import AlphaBeta

    return AlphaBeta(mesh, dict(zip(mesh.axes, alpha, strict=False)), dict(zip(mesh.axes, beta, strict=False)))


def _chosen(captured: Any, mesh: Any, prices: Any, pins: Any = None) -> Any:
    from weft.plan.layouts import choose

    return choose(captured.program, mesh, prices, gap=1e-9, pins=pins)


# --- small programs with known optima


def _small(published: list[list[Any]]) -> Iterator[Row]:
    from bench._case_programs import mlp, small

    for words, meshes, _, objective in published:
        m = re.match(r"mlp(\d+)_(bias_)?(dp|2d)", words)
        for sizes in meshes.split("|"):
            mesh = _mesh([int(x) for x in sizes.split("x")])
            rows = _even(1024, mesh)
            program = mlp(int(m[1]), 128, rows, bias=bool(m[2]), adam=False).program if m else small(words)
            padded = f", {rows} rows for 1024" if m and rows != 1024 else ""
            if program is None:
                yield _not_built(words, "no program for these words")
                break
            yield _small_row(f"{words} {sizes}{padded}", program, mesh, [1, 0.01] if m and m[3] == "2d" else [1, 1], objective)


def _even(rows: int, mesh: Any) -> int:
    """The least number of rows, no fewer than these, that every axis of the mesh can cut evenly: what is added is paid for."""
    step = math.lcm(*mesh.sizes.values())
    return rows if all(rows % n == 0 for n in mesh.sizes.values()) else -(-rows // step) * step


def _small_row(name: str, program: Any, mesh: Any, beta: list[float], objective: float) -> Row:
    from weft.plan.layouts import choose

    def solve() -> tuple[Any, bool]:
        chosen = choose(program, mesh, _prices(mesh, [1, 1], beta), gap=1e-9)
        return round(chosen.cost, 2), chosen.cost <= objective + SCALARS

    return _row(name, objective, solve)


def _resharding(case: dict[str, Any]) -> Iterator[Row]:
    from bench._alpha_beta import AlphaBeta
    from weft.core.layout import R, S
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
        name, want = result["case"], result["obj"]
        solve = {"overbudget": _over_budget, "evaluate": _evaluated, "minimum": _least_limit}.get(name.split()[0])
        made = (lambda solve=solve, name=name, want=want: solve(case, name, want)) if solve else None  # type: ignore[misc]
        yield _row(f"tiny: {name}", want, made or (lambda name=name, want=want: _exact(_tiny_problem(case, name), want)))  # type: ignore[misc]


def _evaluated(case: dict[str, Any], name: str, want: float) -> tuple[Any, bool]:
    found = _tiny_problem(case, "default").cost(jsonlib.loads(name.removeprefix("evaluate ")))
    return found, found == want


def _over_budget(case: dict[str, Any], name: str, want: float) -> tuple[Any, bool]:
    """Bytes beyond the limit cost so much each: the best over every limit that could be the peak."""
    from weft.plan.assignment import solve

    each, limit = (float(x) for x in re.findall(r"\d+", name))
    found = []
    for peak in _peaks(case):
        answer = solve(_tiny_problem({**case, "limit": peak}, "default"))
        found += [answer.cost + each * max(0.0, peak - limit)] if answer.feasible else []
    return min(found), min(found) <= want + 1e-6


def _least_limit(case: dict[str, Any], name: str, want: float) -> tuple[Any, bool]:
    """The smallest limit under which there is a choice."""
    from weft.plan.assignment import solve

    found = min(peak for peak in _peaks(case) if solve(_tiny_problem({**case, "limit": peak}, "default")).feasible)
    return found, found <= want


def _peaks(case: dict[str, Any]) -> list[float]:
    """Every amount of memory that can be in use at once."""
    nodes = [n for n in case["nodes"] if n["interval"][0] < n["interval"][1]]
    sums = {0.0}
    for n in nodes:
        sums |= {s + m for s in sums for m in n["mem"]}
    return sorted(sums)


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
    if change.startswith("extra edge (2,3)"):  # the first cost, then rows of a hundred more each
        first, *rows = (int(x) for x in re.findall(r"\d{4,}", change.replace("..", " ")))
        table = np.array([[row + 100 * j for j in range(sizes[3])] for row in (rows[0] - 100, *rows[2::2])], float)
        table[0, 0] = first
        edges.append((2, 3, table))
    for u, v, _ in case["aliases"]:
        edges.append((u, v, np.where(np.eye(sizes[u], sizes[v]) > 0, 0.0, np.inf)))
    claims = [(i, *n["interval"], np.array(n["mem"], float)) for i, n in enumerate(case["nodes"]) if n["interval"][0] < n["interval"][1]]
    return assemble(costs, edges, claims, float(case["limit"]), "tiny")


def _exact(problem: Any, want: float) -> tuple[Any, bool]:
    from weft.plan.assignment import solve

    answer = solve(problem)
    return round(answer.cost, 6), answer.optimal and answer.cost <= want + 1e-6


def _example(case: dict[str, Any]) -> Iterator[Row]:
    import numpy as np

    from weft.plan.assignment.problem import assemble

    nodes = case["nodes"]
    costs = [np.array([s[0] for s in strategies], float) for _, strategies in nodes]
    edges = [(u, v, np.array(table, float).reshape(len(costs[u]), len(costs[v]))) for u, v, table in case["edges"]]
    claims = [(i, *interval, np.array([s[1] for s in strategies], float)) for i, (interval, strategies) in enumerate(nodes)]
    for name, limit, (want, _) in (("", case["limit"], case["optimum"]), (" without a limit", math.inf, case["optimum_no_limit"])):
        problem = assemble(costs, edges, claims, float(limit), "example")
        yield _row(f"iopddl example{name}", want, lambda problem=problem, want=want: _exact(problem, want))  # type: ignore[misc]


# --- pipeline orders


def _schedules(rows: list[dict[str, Any]]) -> Iterator[Row]:
    from weft.cost.timeline import Task, run
    from weft.plan.schedules import SCHEDULES

    for row in rows:
        n, m = row["n"], row["m"]

        def clocks(n: int = n, m: int = m, row: dict[str, Any] = row) -> tuple[Any, bool]:
            plan = SCHEDULES["1f1b"].orders(n, m)
            index = {(a.kind, s, a.micro): i for i, (s, a) in enumerate((s, a) for s, order in enumerate(plan) for a in order)}
            tasks = [Task(a.kind, str(s), 1.0, _before(index, a.kind, s, a.micro, n)) for s, order in enumerate(plan) for a in order]
            ticks = round(run(tasks).seconds) + 1  # and the update
            alive = list(SCHEDULES["1f1b"].in_flight(n, m))
            return [ticks, alive], ticks <= row["clocks"] and alive == row["inflight_1f1b"]

        yield _row(f"1F1B of {n} stages, {m} micro-batches", [row["clocks"], row["inflight_1f1b"]], clocks)
        for schedule, told in (("gpipe", row["inflight_gpipe"]), ("1f1b-eager", row["inflight_overlap"])):

            def kept(schedule: str = schedule, told: list[int] = told, n: int = n, m: int = m) -> tuple[Any, bool]:
                found = list(SCHEDULES[schedule].in_flight(n, m))
                return found, found == told

            yield _row(f"{schedule} of {n} stages, {m} micro-batches", told, kept)


def _before(index: dict[tuple[str, int, int], int], kind: str, stage: int, micro: int, stages: int) -> tuple[int, ...]:
    if kind == "forward":
        return (index["forward", stage - 1, micro],) if stage else ()
    later = (index["backward", stage + 1, micro],) if stage + 1 < stages else ()
    return (*later, index["forward", stage, micro])


def _cross_mesh(case: dict[str, Any]) -> Iterator[Row]:
    """A tensor between stages held differently: bytes over the busiest host's link, against the published lower bound."""
    shapes = {m[0]: tuple(map(int, m[1].split("x"))) for m in re.findall(r"(tensor|case\d+:) (\d+(?:x\d+)+)", case["note"])}
    for row in case["rows"]:
        shape = shapes.get(f"case{row['case']}:", shapes["tensor"])
        source, target = (_held_on(words, shape) for words in (row["src"], row["dst"]))

        def sent(source: Any = source, target: Any = target, row: dict[str, Any] = row) -> tuple[Any, bool]:
            from bench._crossing import crossing, naive

            found = crossing(source, target, "x", 4).busiest
            return [found, naive(source, target, 4)], found <= row["host_lb"] and naive(source, target, 4) == row["naive"]

        yield _row(f"cross mesh {row['case']}", [row["host_lb"], row["naive"]], sent)


def _held_on(words: str, shape: tuple[int, ...]) -> Any:
    """`[2,4] S^0 R R`: the mesh, hosts by devices, and for each dim the axes that cut it."""
    from weft.core.layout import Layout, S

    m = re.match(r"\[(\d+),(\d+)\] (\S+) (\S+) (\S+)", words)
    assert m is not None, words
    mesh = _mesh([int(m[1]), int(m[2])])
    cuts = {mesh.axes[int(a)]: S(d) for d, how in enumerate(m.groups()[2:]) if how.startswith("S^") for a in how[2:]}
    return Layout.of(mesh, shape, cuts)


def _clustered(rows: list[dict[str, Any]]) -> Iterator[Row]:
    """Ops of a chain in groups of equal work, and the bytes over the worst cut."""
    from weft.plan.split import balanced

    for row in rows:
        count = len(row["flops"])
        edges = [*((i, i + 1) for i in range(count - 1)), *map(tuple, row.get("extra", []))]

        def grouped(row: dict[str, Any] = row, edges: list[tuple[int, int]] = edges, count: int = count) -> tuple[Any, bool]:
            cuts = balanced(row["flops"], row["L"])
            ends = [0, *(c + 1 for c in cuts), count]
            groups = [b - a for a, b in itertools.pairwise(ends)]
            cost = max(sum(row["out"][u] for u, v in edges if u <= c < v) for c in cuts)
            return [groups, cost], groups == row["groups"] and cost <= row["cost"]

        yield _row(f"layer clustering {row['id']}", [row["groups"], row["cost"]], grouped)
