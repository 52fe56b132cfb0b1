"""Dynamic models: weft against a loop, a version batched by hand, and other batchers, on one CPU thread.

Times are CPU time of the process for forward + backward on graphs not seen before; what comes before (from Python trees to index arrays)
is `construction_ms`. `limit_ms` is the products alone, each in one call over all vertices. Ways take turns on every batch, and a
figure is the median over batches; a ratio is the median of the ratios.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import typer

Row = dict[str, Any]
HIDDEN, TREES = 256, 64


def register(app: typer.Typer) -> None:
    app.command("dynamic")(dynamic)


def dynamic(
    json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    only: str = typer.Option("", help="Run only cases whose name contains this."),
    batches: int = typer.Option(12, help="Batches of new graphs per case."),
    equal: bool = typer.Option(False, "--equal", help="Compare 500 structures of each kind with one vertex at a time, in float64, and time nothing."),
) -> None:
    """Tree-LSTM, sequences, DAGs, mixed types, construction and balance, against what a user would otherwise run."""
    import torch

    from bench._ranks import machine
    from weft.cli.output import emit

    torch.set_num_threads(1)
    rows = [_equal(kind) for kind in _kinds() if only in kind] if equal else [case(batches) for name, case in CASES.items() if only in name]
    if not equal:
        show(rows)
    if json:
        emit({"bench": "dynamic", "machine": {**machine(), "clock": "process CPU time, 1 thread"}, "rows": rows})


def _kinds() -> list[str]:
    from tests.dynamic.test_models import KINDS

    return list(KINDS)


def _equal(kind: str) -> Row:
    """500 graphs by kernels, and as many by torch's ops; another value or gradient than the recursion's raises."""
    from tests.dynamic.test_models import equals
    from weft.cli.output import console

    counts = (1, 2, 7, 40, 100, 150, 200)
    for fuse in (True, False):
        equals(kind, fuse, counts)
    console.print(f"{kind}: {sum(counts)} structures, values and gradients within 1e-9", highlight=False)
    return {"case": kind, "weft_ms": None, "peers_ms": {}, "ratios": {}, "limit_ms": None, "structures": sum(counts), "correct": "within 1e-9 in float64"}


def tree_uniform(batches: int) -> Row:
    from bench._trees import uniform_batch

    return trees("tree-uniform", lambda rng: uniform_batch(TREES, rng), batches)


def tree_sst(batches: int) -> Row:
    from bench._trees import sst_like_batch

    return trees("tree-sst", lambda rng: sst_like_batch(TREES, rng), batches)


def trees(case: str, make: Callable[[random.Random], list[Any]], batches: int) -> Row:
    """Binary child-sum Tree-LSTM, words at the leaves."""
    import torch

    from bench._dynamic_peers import available
    from bench._trees import products
    from examples.dynamic.tree_lstm import ChildSum
    from weft.cli.output import console
    from weft.dynamic import trees as read

    torch.manual_seed(0)
    rng = random.Random(0)
    cell, x = ChildSum(HIDDEN, HIDDEN), torch.randn(TREES * 52, HIDDEN)
    ways, missing = available(cell, x)
    for name, why in missing.items():
        console.print(f"{case}: {name} left out ({why})")
    error = _agree(ways, make(rng))
    taken: dict[str, list[tuple[float, float]]] = {w.name: [] for w in ways}
    limits = []
    for i in range(batches):
        batch = make(rng)
        s = read(batch)
        leaves = int((s.arity == 0).sum())
        alone = products(leaves, s.vertices - leaves, HIDDEN)
        limits.append(min(clock(lambda a=alone: [product() for product in a])[0] for _ in range(4)))
        for way in ways:
            if way.name != "naive loop" or i < 4:
                build, built = clock(lambda w=way, b=batch: w.construct(b))
                taken[way.name].append((build, clock(lambda w=way, b=built: w.run(b))[0]))
    run = {name: [t for _, t in times] for name, times in taken.items()}
    ours = run.pop("weft")
    return {
        "case": case, "weft_ms": _median(ours), "peers_ms": {n: _median(t) for n, t in run.items()},
        "ratios": {n: _median([b / a for a, b in zip(ours, t, strict=False)]) for n, t in run.items()}, "limit_ms": _median(limits),
        "times_limit": _median([a / b for a, b in zip(ours, limits, strict=True)]),
        "construction_ms": {n: _median([b for b, _ in t]) for n, t in taken.items()},
        "correct": f"roots and gradient of the recurrent weights agree between all ways to {error:.1e}",
    }  # fmt: skip


def _agree(ways: list[Any], batch: list[Any]) -> float:
    """Every way gives the same roots and the same gradient as the naive loop."""
    results = {w.name: w.run(w.construct(batch)) for w in ways}
    total, judge = results["naive loop"]
    scale = float(judge.abs().max())
    worst = max(float((grad - judge).abs().max()) / scale for _, grad in results.values())
    worst = max(worst, *(abs(value - total) / TREES for value, _ in results.values()))
    assert worst < 1e-4, f"ways differ by {worst:.1e}"
    return worst


def var_lstm(batches: int) -> Row:
    """LSTM over 64 sequences of 5 to 83 steps, against torch's own on packed sequences."""
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

    from examples.dynamic import sequence
    from weft import dynamic as wd

    torch.manual_seed(0)
    rng = random.Random(0)
    cell, theirs = sequence.LSTM(HIDDEN, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
    with torch.no_grad():
        for ours, name in ((cell.word, "ih"), (cell.before, "hh")):
            getattr(theirs, f"weight_{name}_l0").copy_(ours.weight)
            getattr(theirs, f"bias_{name}_l0").copy_(ours.bias)
    net = sequence.lstm(cell)

    def run_weft(lengths: list[int], x: torch.Tensor) -> torch.Tensor:
        return net(wd.chains(lengths), x, at="all")

    def run_packed(lengths: list[int], x: torch.Tensor) -> torch.Tensor:
        out, _ = theirs(pack_sequence(x.split(lengths), enforce_sorted=False))
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return torch.cat([p[:n] for p, n in zip(padded, lengths, strict=True)])

    def batch() -> tuple[list[int], torch.Tensor]:
        lengths = [min(83, max(5, round(rng.gammavariate(2.6, 8.5)))) for _ in range(TREES)]
        return lengths, torch.randn(sum(lengths), HIDDEN)

    def limit(lengths: list[int], x: torch.Tensor) -> list[tuple[int, int, int]]:
        n, later, g = len(x), len(x) - len(lengths), 4 * HIDDEN
        return [(n, HIDDEN, g), (later, HIDDEN, g), (later, g, HIDDEN), (HIDDEN, n, g), (HIDDEN, later, g)]

    return compare("var-lstm", {"weft": run_weft, "nn.LSTM packed": run_packed}, batch, limit, [cell, theirs], batches)


def tree_fc(batches: int) -> Row:
    """Tree-FC over 64 balanced trees of 48 to 80 leaves, against a loop and a version batched by hand."""
    import torch

    from examples.dynamic import tree_fc as fc
    from weft import dynamic as wd

    torch.manual_seed(0)
    rng = random.Random(0)
    cell, x = fc.TreeFC(HIDDEN), torch.randn(80 * TREES, HIDDEN)
    net = fc.model(cell, HIDDEN)

    def run_weft(trees: list[Any], s: Any) -> torch.Tensor:
        return net(wd.trees(trees, leaf="leaf", inner="inner"), x)

    def run_naive(trees: list[Any], s: Any) -> torch.Tensor:
        def walk(t: Any) -> torch.Tensor:
            return x[t : t + 1] if isinstance(t, int) else torch.relu(cell.join(torch.cat([walk(t[0]), walk(t[1])], 1)))

        return torch.cat([walk(t) for t in trees])

    def run_levels(trees: list[Any], s: Any) -> torch.Tensor:
        from bench._trees import Levels

        levels = Levels(wd.trees(trees))
        h = x[levels.rows]
        for left, right in levels.children:
            h = torch.cat([h, torch.relu(cell.join(torch.cat([h[left], h[right]], 1)))])
        return h[levels.roots]

    def batch() -> tuple[list[Any], Any]:
        trees, start = [], 0
        for _ in range(TREES):
            leaves = rng.randint(48, 80)
            trees.append(fc.complete(leaves, start))
            start += leaves
        return trees, wd.trees(trees)

    def limit(trees: list[Any], s: Any) -> list[tuple[int, int, int]]:
        n = int((s.arity > 0).sum())
        return [(n, 2 * HIDDEN, HIDDEN), (n, HIDDEN, 2 * HIDDEN), (2 * HIDDEN, n, HIDDEN)]

    ways = {"weft": run_weft, "naive loop": run_naive, "level-batched torch": run_levels}
    return compare("tree-fc", ways, batch, limit, [cell], batches, slow=("naive loop",))


def dag_rnn(batches: int) -> Row:
    """DAG-RNN: 32 graphs of 60 vertices with 1 to 3 children each, against a loop and a version batched by hand."""
    import torch

    from examples.dynamic import dag_rnn as dag
    from weft import dynamic as wd

    torch.manual_seed(0)
    rng = random.Random(0)
    cell = dag.DagRNN(HIDDEN, HIDDEN)
    net = dag.model(cell)

    def run_weft(s: Any, x: torch.Tensor) -> torch.Tensor:
        return net(s, x, at="all")

    def run_naive(s: Any, x: torch.Tensor) -> torch.Tensor:
        out: list[torch.Tensor] = []
        for v in range(s.vertices):  # children come before their parents here
            out.append(cell.alone(x[v], [out[c] for c in s.child[s.first[v] : s.first[v + 1]]]))
        return torch.stack(out)

    def batch() -> tuple[Any, torch.Tensor]:
        graphs = []
        for _ in range(32):
            pairs = [(c, v) for v in range(1, 60) for c in rng.sample(range(max(0, v - 6), v), min(v, rng.randint(1, 3)))]
            graphs.append((60, pairs))
        s = wd.edges(graphs)
        return s, torch.randn(s.vertices, HIDDEN)

    def limit(s: Any, x: torch.Tensor) -> list[tuple[int, int, int]]:
        n, inner = s.vertices, int((s.arity > 0).sum())
        return [(n, HIDDEN, HIDDEN), (HIDDEN, n, HIDDEN)] + [(inner, HIDDEN, HIDDEN)] * 4 + [(HIDDEN, inner, HIDDEN)] * 2

    return compare("dag-rnn", {"weft": run_weft, "naive loop": run_naive}, batch, limit, [cell], batches, slow=("naive loop",))


def compare(
    case: str, ways: dict[str, Callable[..., Any]], batch: Callable[[], tuple[Any, Any]],
    limit: Callable[..., list[tuple[int, int, int]]], cells: list[Any], batches: int, slow: tuple[str, ...] = (), learns: bool = True,
) -> Row:  # fmt: skip
    """Time ways of one model on new batches, after asserting that they agree. Construction is inside every way's time here."""
    import torch

    def step(way: Callable[..., Any], args: tuple[Any, Any]) -> Any:
        for cell in cells:
            cell.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(learns):
            out = way(*args)
        if learns:
            out.sum().backward()
        return out

    first = batch()
    results = {name: step(way, first).detach() for name, way in ways.items()}
    error = max(float((r - results["weft"]).abs().max()) for r in results.values())
    assert error < 1e-4, f"ways differ by {error:.1e}"
    taken: dict[str, list[float]] = {name: [] for name in ways}
    limits = []
    for i in range(batches):
        args = batch()
        pairs = [(torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)) for m, k, n in limit(*args)]
        limits.append(min(clock(lambda p=pairs: [torch.mm(a, b, out=c) for a, b, c in p])[0] for _ in range(4)))
        for name, way in ways.items():
            if name not in slow or i < 4:
                taken[name].append(clock(lambda w=way, a=args: step(w, a))[0])
    ours = taken.pop("weft")
    return {
        "case": case, "weft_ms": _median(ours), "peers_ms": {n: _median(t) for n, t in taken.items()},
        "ratios": {n: _median([b / a for a, b in zip(ours, t, strict=False)]) for n, t in taken.items()},
        "limit_ms": _median(limits), "times_limit": _median([a / b for a, b in zip(ours, limits, strict=True)]),
        "correct": f"outputs agree to {error:.1e}",
    }  # fmt: skip


def construction(batches: int) -> Row:
    """From Python trees to index arrays: milliseconds for 64 trees, and microseconds per vertex as batches grow."""
    from bench._trees import uniform_batch
    from weft import dynamic as wd
    from weft.dynamic.layout import exact

    rng = random.Random(0)
    reads = {"vertex": wd.Reads(0, True)}

    def make(trees: list[Any]) -> int:
        s = wd.trees(trees)
        exact(wd.Schedule(s, reads), {("h", "edge"), ("h", "vertex")})
        return s.vertices

    make(uniform_batch(2, rng))
    per_vertex = {}
    for count in (26, 256, 2564):
        trees = uniform_batch(count, rng)
        per_vertex[str(count * 39)] = round(min(clock(lambda t=trees: make(t))[0] for _ in range(3)) * 1e3 / (count * 39), 4)
    ours = [clock(lambda t=t: make(t))[0] for t in (uniform_batch(TREES, rng) for _ in range(batches))]
    return {
        "case": "construction", "weft_ms": _median(ours), "peers_ms": {}, "ratios": {}, "limit_ms": None,
        "us_per_vertex": per_vertex, "correct": "the arrays are those the other cases ran with",
    }  # fmt: skip


def policies(batches: int) -> Row:
    """Graphs of four types of vertex: how many batches each policy needs, and the fewest any could."""
    from weft import dynamic as wd
    from weft.dynamic.policy import POLICIES, automatic
    from weft.dynamic.policy import batches as count

    rng = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in (*POLICIES, "lower bound")}
    taken = []
    for _ in range(batches):
        s = mixed_graphs(rng)
        klass = s.kind * 2 + (s.arity > 0)
        for name, policy in POLICIES.items():
            found[name].append(count(policy(s, klass)))
        found["lower bound"].append(wd.lower_bound(s, klass))
        fresh = mixed_graphs(rng)
        taken.append(clock(lambda s=fresh: automatic(s, s.kind * 2 + (s.arity > 0)))[0])
    return {
        "case": "mixed-types", "weft_ms": _median(taken), "peers_ms": {}, "ratios": {}, "limit_ms": None,
        "batches": {name: round(statistics.mean(n), 1) for name, n in found.items()},
        "correct": "every policy runs each vertex once, after its children",
    }  # fmt: skip


def mixed_graphs(rng: random.Random, samples: int = 64) -> Any:
    """Chains that branch: runs of one type, joined by vertices of others."""
    from weft import dynamic as wd

    build = wd.Builder()
    for _ in range(samples):
        build.sample()
        ends = [build.add(kind="leaf", row=0) for _ in range(rng.randint(3, 10))]
        while len(ends) > 1:
            at = rng.randrange(len(ends))
            for _ in range(rng.choice((0, 0, 1, 2, 4))):
                ends[at] = build.add([ends[at]], kind="unary")
            other = rng.randrange(len(ends))
            if other != at:
                joined = build.add([ends[at], ends[other]], kind=rng.choice(("binary", "attention")))
                ends = [e for i, e in enumerate(ends) if i not in (at, other)] + [joined]
    return build.done()


def balance(batches: int) -> Row:
    """Two processes, data parallel, skewed trees of long-tailed sizes: samples dealt out by predicted time against at random."""
    from bench._ranks import run_ranks

    return run_ranks(balance_on_ranks, 2, batches)


def balance_on_ranks(rank: int, world: int, batches: int, hidden: int = 128, per_rank: int = 16) -> Row:
    """Every step is as long as its slowest rank; both ways of dealing out the same samples take turns."""
    import torch
    import torch.distributed as dist

    from bench._trees import long_tailed_batch
    from examples.dynamic.tree_lstm import ChildSum, model
    from weft import dynamic as wd
    from weft.dynamic.balance import Sizes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    graphs = wd.trees(long_tailed_batch(world * per_rank * max(12, batches), random.Random(0)))
    sizes, x = Sizes.of(graphs), torch.randn(int(graphs.row.max()) + 1, hidden)
    cell = ChildSum(hidden, hidden)
    net = model(cell, hidden)

    def run(samples: Any) -> float:
        part = graphs.take(samples)
        return clock(lambda: net(net.schedule(part, x), x).sum().backward())[0]

    order = list(range(len(graphs)))
    run(order)  # memory grows to its final size before anything is timed, as it has after the first epoch
    picks = [random.Random(i).sample(order, random.Random(i).randint(4, 3 * per_rank)) for i in range(16)]
    fitted = wd.Cost.fit([(int(sizes.levels[p].max()), int(sizes.vertices[p].sum()), run(p)) for p in picks])
    costs: list[Any] = [fitted] * world
    dist.broadcast_object_list(costs, src=0)
    ways = {"random": at_random(len(graphs), world, per_rank), "weft": wd.assign(graphs, world, per_rank, cost=costs[0])}
    times = torch.zeros(len(ways), len(ways["weft"]), world, dtype=torch.float64)
    for step in range(times.shape[1]):
        for way, steps in enumerate(ways.values()):
            times[way, step, rank] = run(steps[step][rank])
    dist.all_reduce(times)
    slowest = times.amax(2).sum(1).tolist()
    return {
        "case": "balance", "weft_ms": round(slowest[1], 2), "peers_ms": {"random": round(slowest[0], 2)},
        "ratios": {"random": round(slowest[0] / slowest[1], 3)}, "limit_ms": round(float(times[1].sum()) / world, 2),
        "predicted_ms": {n: round(predicted(sizes, steps, costs[0]), 2) for n, steps in ways.items()},
        "correct": "both ways run every sample once" if _same_samples(ways) else "samples differ",
    }  # fmt: skip


def at_random(total: int, ranks: int, per_rank: int, seed: int = 0) -> list[list[Any]]:
    """The same number of samples for every rank, as a shuffling sampler gives: step -> rank -> samples."""
    import numpy as np

    order, per_step = np.random.default_rng(seed).permutation(total), ranks * per_rank
    return [np.array_split(order[i : i + per_step], ranks) for i in range(0, total, per_step)]


def predicted(sizes: Any, steps: Any, cost: Any) -> float:
    """The predicted time of all steps, each as long as its slowest rank."""
    return sum(max(cost.of(sizes, samples) for samples in step) for step in steps)


def _same_samples(ways: dict[str, Any]) -> bool:
    everyone = [sorted(int(s) for step in steps for hand in step for s in hand) for steps in ways.values()]
    assert everyone[0] == everyone[1], "samples differ"
    return True


CASES: dict[str, Callable[[int], Row]] = {
    "tree-uniform": tree_uniform,
    "tree-sst": tree_sst,
    "var-lstm": var_lstm,
    "tree-fc": tree_fc,
    "dag-rnn": dag_rnn,
    "construction": construction,
    "mixed-types": policies,
    "balance": balance,
}


def clock(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of CPU time, and what the work gave."""
    start = time.process_time()
    result = work()
    return (time.process_time() - start) * 1e3, result


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def show(rows: list[Row]) -> None:
    from rich.table import Table

    from weft.cli.output import console

    names = list(dict.fromkeys(name for row in rows for name in row["peers_ms"]))
    table = Table(title="milliseconds forward + backward, and how many times weft is faster")
    for column in ("case", "weft", "limit", "x limit", *names):
        table.add_column(column, justify="right" if column != "case" else "left")
    for row in rows:
        cells = [f"{row['peers_ms'][n]:.1f} ({row['ratios'][n]:.1f}x)" if n in row["peers_ms"] else "" for n in names]
        limit = "" if row["limit_ms"] is None else f"{row['limit_ms']:.1f}"
        table.add_row(row["case"], f"{row['weft_ms']:.2f}", limit, str(row.get("times_limit", "")), *cells)
    console.print(table)
    for row in rows:
        for key in ("construction_ms", "us_per_vertex", "batches"):
            if key in row:
                console.print(f"{row['case']} {key}: {row[key]}")
