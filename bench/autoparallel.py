"""`weft bench autoparallel`: AutoParallel's placements of a Llama on an 8 x 8 mesh, priced by weft next to weft's own plan.

A matmul's placement is said by what each axis of the mesh shards: batch, seq, in or out features. weft lays every other op out around the stated
ones. `--solve` calls AutoParallel where it is installed, also with its cost model under weft's choice; otherwise a kept answer is read.
"""

from __future__ import annotations

import json as to_json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

KEPT = Path(__file__).parent / "autoparallel_llama.json"
LAYERS, BATCH, SEQ, CLUSTER = 4, 16, 8192, "8x8xH100"
SIZES = {"dp": 8, "tp": 8}
OURS = {  # tensors of the Llama of its example, and of weft's
    "attention.wq": "attention.q", "attention.wk": "attention.k", "attention.wv": "attention.v", "attention.wo": "attention.o",
    "feed_forward.w1": "mlp.gate", "feed_forward.w3": "mlp.up", "feed_forward.w2": "mlp.down",
}  # fmt: skip
Places = Sequence[str | None]  # what each axis shards


def register(app: typer.Typer) -> None:
    @app.command()
    def autoparallel(
        solve: bool = typer.Option(False, "--solve", help="Call AutoParallel, which must be installed, instead of reading its kept answer."),
        out: str = typer.Option("", "-o", "--out", help="Write its answer to this file."),
        json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    ) -> None:
        """AutoParallel's placements for four layers of Llama-3-8B on 8 x 8 H100, priced by weft, next to weft's plan."""
        from bench._autoparallel import solved
        from bench._ranks import machine
        from weft.cli.output import console, emit

        theirs = solved(LAYERS, BATCH, SEQ, SIZES) if solve else to_json.loads(KEPT.read_text())
        if out:
            Path(out).write_text(to_json.dumps(theirs) + "\n")
        own, priced = weft_plan(), {name: placed(case) for name, case in theirs["cases"].items()}
        same = placed()
        for name, case in theirs["cases"].items():
            cost = case["cost_us"]["total"] / 1e3
            console.print(f"{name}: {priced[name]['ms']:,.1f} ms and {priced[name]['gb']:.1f} GB by weft; {cost:,.1f} ms by AutoParallel", highlight=False)
        console.print(f"weft's layouts on the same mesh: {same['ms']:,.1f} ms and {same['gb']:.1f} GB", highlight=False)
        console.print(f"weft's plan on any mesh: {own['ms']:,.1f} ms, {own['plan']}", highlight=False)
        if json:
            row = {
                "case": f"llama {LAYERS} layers on {CLUSTER}", "weft_ms": same["ms"], "peers_ms": {k: v["ms"] for k, v in priced.items()},
                "ratios": {k: v["ms"] / same["ms"] for k, v in priced.items()}, "limit_ms": None, "correct": True,
                "any_mesh": own, "same_mesh": same, "priced": priced,
                "by_autoparallel_ms": {k: v["cost_us"]["total"] / 1e3 for k, v in theirs["cases"].items()},
            }  # fmt: skip
            emit({"bench": "autoparallel", "machine": machine(), "origin": theirs["origin"], "rows": [row]})


def llama() -> Any:
    """The Llama that is planned, as `weft plan FILE.py:llama` takes it."""
    import weft_zoo as zoo

    made = zoo.load("llama3-8b", device="meta", layers=LAYERS, seq=SEQ)
    return made.model, made.loss, made.example(BATCH, device="meta")


def weft_plan() -> dict[str, Any]:
    from weft.plan.plan import Plan
    from weft.plan.planner import Request, make_plan
    from weft.plan.search import describe

    made = make_plan(Request(f"{__file__}:llama", CLUSTER, batch=BATCH, fastest=True))
    assert isinstance(made, Plan)
    return {"ms": made.step_ms, "plan": describe(made.setting), "gb": made.predicted["memory_gb"]}


def placed(case: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The step as AutoParallel places its matmuls, attention and parameters, or as weft would on that mesh, built and simulated as any plan of weft."""
    import torch

    from weft.api.plan_program import as_built
    from weft.cluster.spec import cluster
    from weft.core.role import Role
    from weft.cost.simulate import predict
    from weft.frontend.capture import capture
    from weft.plan.layouts import OnCluster, choose
    from weft.plan.spec import Spec

    model, loss, batch = llama()
    captured = capture(model, batch, loss, torch.optim.AdamW(model.parameters()), precision=torch.bfloat16)
    spec, where = Spec(dp=SIZES["dp"], tp=SIZES["tp"]), cluster(CLUSTER)
    given: dict[str, Any] = {}
    if case is not None:
        pins = {name: [_pin(case["parameters"][_theirs(name)])] for name in captured.program.inputs_for(Role.PARAMETER)}
        given = {"pins": pins | {state: pins[of] for state, of in captured.states.items()}, "allow": _stated(captured, case)}
    made = choose(captured.program, spec.mesh, OnCluster(where, spec.mesh), **given)
    seen = predict(as_built(spec, made.program), where)
    return {"ms": seen.step_ms, "gb": seen.memory_gb}


def _pin(stored: Sequence[int | None]) -> dict[str, Any]:
    from weft.core.layout import R, S

    return {axis: R if dim is None else S(dim) for axis, dim in zip(SIZES, stored, strict=True)}


def _theirs(name: str) -> str:
    """What AutoParallel's example calls a parameter."""
    own = name.removeprefix("param.").removesuffix(".weight")
    for theirs, ours in OURS.items():
        own = own.replace(ours, theirs)
    same = {"tokens": "tok_embeddings", "head": "output"}
    return same.get(own, own.replace("blocks.", "layers.").replace("norm1", "attention_norm").replace("norm2", "ffn_norm"))


def _stated(captured: Any, case: Mapping[str, Any]) -> Callable[[Any, Any], bool]:
    """Which ways of a node agree with what is stated of it."""
    stated: dict[Any, Places] = {}
    for node, weight, role in matmuls(captured):
        stated[node] = case["matmuls"][_theirs(weight)][role]
    for node in captured.program.nodes:
        if node.op.name == "attention" and case.get("attention"):
            stated[node] = case["attention"]

    def allows(node: Any, way: Any) -> bool:
        return node not in stated or _agrees(node, way, stated[node])

    return allows


def matmuls(captured: Any) -> list[tuple[Any, str, str]]:
    """Each matmul with a weight: the node, the weight, and whether it is forward, or gives the gradient of its input or of its weight."""
    from weft.core.role import Role
    from weft.plan.roles import Roles

    program, forward = captured.program, Roles(captured.program).forward
    found, weights = [], program.inputs_for(Role.PARAMETER)
    named = {node: name for name, node in weights.items()}
    for node in program.nodes:
        if node.op.name == "einsum":
            read = next((named[x] for x in map(_origin, node.args) if x in named), None)
            if read is not None:
                found.append((node, read, "forward" if node in forward else "input_gradient"))
    for name, gradient in captured.gradients.items():
        made = _origin(gradient)
        if made.op.name == "einsum":
            found.append((made, name, "weight_gradient"))
    return found


def _origin(node: Any) -> Any:
    """What a value was before casts and views of it."""
    from weft.ops.registry import Kind

    while len(node.args) == 1 and (node.op.kind is Kind.VIEW or node.op.name == "cast"):
        node = node.args[0]
    return node


def _agrees(node: Any, way: Any, places: Places) -> bool:
    """Whether every axis shards the dims that are stated, in all operands that have them, and nothing else."""
    from weft.core.layout import R, S

    eq = node.op.equation(tuple(a.type for a in node.args), dict(node.attrs))
    labels = _labels(node, eq)
    for axis, place in enumerate(places):
        label = labels.get(place) if place else None
        for k, operand in enumerate(way.operands):
            dim = next((d for d, x in enumerate(eq.ins[k]) if x == label), None)
            if operand[axis] != (R if dim is None else S(dim)):
                return False
    return True


def _labels(node: Any, eq: Any) -> dict[str, str]:
    """The op's own labels of what is stated: of a matmul batch, seq, in and out features, of attention batch, heads and queries."""
    if node.op.name == "attention":
        query = eq.ins[0]
        return {"batch": query[0], "heads": query[1], "seq": query[-2]}
    left, right, made = eq.ins[0], eq.ins[1], eq.outs[0]  # a weight as torch keeps it: out features, in features
    if len(made) == 2:  # the gradient of a weight, of its outputs and inputs
        batch, seq = (x for x in left if x not in made)
        return {"batch": batch, "seq": seq, "out": made[0], "in": made[1]}
    return {"batch": made[0], "seq": made[1], "out": right[0], "in": right[1]}
