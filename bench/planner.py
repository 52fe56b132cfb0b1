"""`weft bench planner`: plans against the best baseline at pairs of model and cluster. `weft bench unity`: the seven models of Unity's paper on its
cluster, with the gain over data parallel, over experts and over substitutions chosen before layouts. `weft bench unequal`: two kinds of devices."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import typer

MODULES = {  # functions of bench/_planner_modules.py, and where they are planned
    "llama": "1x8xH100", "gpt2": "1x8xA100", "qwen3": "2x8xH100", "bert": "1x8xA100", "vit": "1x8xH100", "opt": "2x8xA100", "convnext": "1x4xA100",
    "resnet50": "1x4xA100", "vgg16": "1x4xV100", "mixer": "1x8xA100", "efficientnet": "1x4xA100", "vit_b16": "1x8xH100",
}  # fmt: skip
HERE = Path(__file__).parent / "_planner_modules.py"
MODELS = ("gpt-39b", "llama3-8b", "llama3-70b", "mixtral-8x7b", "wide-resnet", "dlrm")
CLUSTERS = ("8xp3.16xlarge", "16x8xH100")
SEVEN = ("dlrm", "mlp", "xdl", "candle-uno", "inception-v3", "bert-large", "resnext50")
UNITY = {"dlrm": 3.6, "mlp": 2.0, "xdl": 1.9, "candle-uno": 1.6, "inception-v3": 1.3, "bert-large": 1.0, "resnext50": 1.0}
SUMMIT = "32x6xV100-Summit"
# as in the paper, for the models that it has; the zoo's own example where it is the same
PER_DEVICE = {"bert-large": 4, "inception-v3": 64, "resnext50": 64, "fusion": 128, "mixture": 128}
EXPERTS = ("data parallel", "megatron", "tables apart")
Row = dict[str, Any]


def register(app: typer.Typer) -> None:
    @app.command()
    def planner(
        model: list[str] = typer.Option(list(MODELS), "--model", help="Models by name."),
        cluster: list[str] = typer.Option(list(CLUSTERS), "--cluster", help="Clusters."),
        modules: bool = typer.Option(True, "--modules/--no-modules", help="And twelve modules as a user brings them."),
        json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    ) -> None:
        """Plan every pair, and modules of Hugging Face, torchvision and timm, and compare the fastest plan with the best baseline that fits."""
        rows = [pair(m, c) for m in model for c in cluster]
        if modules:
            from bench._planner_modules import library

            rows += [pair(f"{HERE}:{m}", c) | {"library": library(m)} for m, c in MODULES.items()]
        gains = [r["gain"] for r in rows if r["gain"] is not None]
        _finish("planner", rows, json, median_gain=statistics.median(gains) if gains else None, worst_gain=min(gains, default=None))

    @app.command()
    def unity(
        model: list[str] = typer.Option(list(SEVEN), "--model", help="Models by name."),
        cluster: str = typer.Option(SUMMIT, "--cluster", help="The cluster."),
        json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    ) -> None:
        """Unity's seven models, with the gains its paper reports."""
        _finish("unity", [of_unity(m, cluster) for m in model], json)

    @app.command()
    def unequal(
        model: str = typer.Option("llama3-8b", "--model"),
        json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    ) -> None:
        """Four nodes of A100 and four of H100: the plan against equal shares, the H100s alone, and the sum of both rates."""
        _finish("unequal", [mixed(model, "4x8xA100", "4x8xH100")], json)


def _finish(name: str, rows: list[Row], json: bool, **facts: Any) -> None:
    from bench._ranks import machine
    from weft.cli.output import emit

    if json:
        emit({"bench": name, "machine": machine(), **facts, "rows": rows})


def pair(model: str, cluster: str) -> Row:
    from weft.cli.output import console
    from weft.plan.plan import Plan
    from weft.plan.planner import Request, make_plan

    begun, used = time.perf_counter(), time.process_time()
    made = make_plan(Request(model, cluster, fastest=True))
    seconds = round(time.perf_counter() - begun, 1)
    cost = {"seconds": seconds, "cpu_seconds": round(time.process_time() - used, 1), "peak_gb": round(getrusage(RUSAGE_SELF).ru_maxrss / 1e6, 2)}
    case = f"{model.rsplit(':', 1)[-1]} on {cluster}"
    if not isinstance(made, Plan):
        console.print(f"{case}: nothing fits ({made.reason})", highlight=False)
        return {"case": case, "weft_ms": None, "peers_ms": {}, "ratios": {}, "limit_ms": None, "correct": True, "gain": None,
                **cost, "infeasible": dict(made.infeasible)}  # fmt: skip
    peers = dict(made.baselines_ms)
    ratios = {name: ms / made.step_ms for name, ms in peers.items()}
    best = min(peers, key=lambda name: peers[name]) if peers else ""
    gain = ratios[best] if best else None
    console.print(f"{case}: {made.step_ms:,.1f} ms, {gain or 0:.3f}x over {best}, planned in {cost['cpu_seconds']} CPU s", highlight=False)
    return {"case": case, "weft_ms": made.step_ms, "peers_ms": peers, "ratios": ratios, "limit_ms": None,
            "correct": all(r >= 1 - 1e-9 for r in ratios.values()), "gain": gain, "best": best, **cost,
            "infeasible": dict(made.infeasible)}  # fmt: skip


def of_unity(model: str, cluster: str) -> Row:
    """In fp32, with plain SGD (Adam for BERT), as the paper has it."""
    import weft_zoo as zoo
    from bench._graph.search import Candidate, GraphSearch
    from bench._graph.task import CapturedTask
    from bench._sequential import joint_and_sequential
    from weft.cli.output import console
    from weft.cluster.spec import cluster as read

    begun = time.perf_counter()
    place = read(cluster)
    batch = PER_DEVICE.get(model, zoo.entry(model).batch) * place.devices
    search = GraphSearch(CapturedTask(model, place, batch, "fp32", "adam" if model.startswith("bert") else "sgd"), place.device.memory)
    found = {**search.baselines(), **search.free(lambda _: None)}
    ways = {k: w for k, w in found.items() if isinstance(w, Candidate)}
    planned = round(time.perf_counter() - begun, 1)
    both = joint_and_sequential(search)
    best = min(ways["weft"].seconds, both.joint.seconds)
    peers = {k: w.seconds * 1e3 for k, w in ways.items() if k != "weft"} | {"sequential": both.sequential.seconds * 1e3}
    if both.unity is not None and "unity-like" in peers:
        peers["unity-like"] = min(peers["unity-like"], both.unity.seconds * 1e3)
    expert = min(peers[k] for k in EXPERTS if k in peers)
    row = {
        "case": f"{model} on {cluster}", "weft_ms": best * 1e3, "peers_ms": peers, "ratios": {k: v / best / 1e3 for k, v in peers.items()},
        "limit_ms": None, "correct": all(v >= best * 1e3 * (1 - 1e-9) for v in peers.values()), "over_data_parallel": peers["data parallel"] / best / 1e3
        if "data parallel" in peers else None, "over_expert": expert / best / 1e3, "over_sequential": both.sequential.seconds / best,
        "rules": list(both.joint.rules), "sequential_rules": list(both.sequential.rules), "unity": UNITY.get(model),
        "plan": min(ways["weft"], both.joint, key=lambda w: w.seconds).describe(), "seconds": planned,
        "seconds_with_substitutions": round(time.perf_counter() - begun, 1),
        "infeasible": {k: v for k, v in found.items() if isinstance(v, str)},
    }  # fmt: skip
    console.print(
        f"{row['case']}: {best * 1e3:,.2f} ms; over data parallel {row['over_data_parallel'] or 0:.2f}x, expert {row['over_expert']:.2f}x, "
        f"sequential {row['over_sequential']:.2f}x ({', '.join(both.joint.rules) or 'no rule'}); Unity {UNITY.get(model)}x; {planned} s", highlight=False,
    )  # fmt: skip
    return row


def mixed(model: str, slow: str, fast: str) -> Row:
    from weft.cli.output import console
    from weft.plan.baselines import EVERYTHING
    from weft.plan.plan import Plan
    from weft.plan.planner import Request, make_plan
    from weft.plan.search import Found, Search

    both = Request(model, f"{slow}+{fast}")
    batch = both.problem().batch
    made = make_plan(both)
    assert isinstance(made, Plan)
    even = Search(both.problem()).best(EVERYTHING)
    alone = {c: make_plan(Request(model, c, batch)) for c in (slow, fast)}
    rates = {c: batch / p.step_ms for c, p in alone.items() if isinstance(p, Plan)}
    share = batch / made.step_ms / sum(rates.values())
    equal_ms = even.seconds * 1e3 if isinstance(even, Found) else None
    fast_ms = alone[fast].step_ms  # type: ignore[union-attr]
    console.print(
        f"{both.cluster}: {made.step_ms:,.1f} ms, {share:.1%} of the summed rates; equal split {equal_ms or 0:,.1f}, {fast} alone {fast_ms:,.1f}"
    )
    peers = {"equal split": equal_ms, f"{fast} alone": fast_ms}
    return {
        "case": f"{model} on {both.cluster}", "weft_ms": made.step_ms, "peers_ms": peers,
        "ratios": {k: v / made.step_ms for k, v in peers.items() if v}, "limit_ms": batch / sum(rates.values()),
        "share_of_summed_rates": share, "correct": share >= 0.85 and all(v > made.step_ms for v in peers.values() if v),
    }  # fmt: skip
