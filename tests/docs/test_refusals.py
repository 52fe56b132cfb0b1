"""What a fuzzing user gives is refused by weft, in words, and never by an IndexError from inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
import weft_zoo as zoo
from weft import Mesh, P, S, WeftError, dynamic
from weft.cluster.spec import cluster
from weft.plan.plan import load

MESH, X = Mesh(dp=2), weft.f32(2, 3)
LINEAR = torch.nn.Linear(4, 4)
BATCH = {"x": torch.ones(2, 4)}


def traced(fn: Callable[..., Any], **inputs: Any) -> Any:
    return weft.trace(fn, MESH, **inputs)


def train(plan: Any = "dp1", model: Any = LINEAR, optimizer: Any = None, **more: Any) -> Any:
    optimizer = torch.optim.SGD(LINEAR.parameters(), lr=0.1) if optimizer is None else optimizer
    return weft.parallelize(model, lambda m, b: m(b["x"]).square().mean(), optimizer, BATCH, plan=plan, **more)


def two_sums(a: Any, b: Any) -> Any:
    return weft.all_reduce(a, "dp"), weft.all_reduce(b, "dp")


PROGRAMS: dict[str, tuple[Callable[[], Any], str]] = {
    "ranks": (lambda: traced(lambda x, y: weft.concat([x, y], 1), x=X, y=weft.f32(3)), "as many dims in each"),
    "no list": (lambda: traced(lambda x: weft.concat(x, 0), x=X), "not in a list"),
    "dim of a word": (lambda: traced(lambda x: weft.sum(x, dims="a"), x=X), "a dim from -2 to 1"),
    "shape of a word": (lambda: traced(lambda x: weft.reshape(x, "a"), x=X), "integer sizes"),
    "norm of a number": (lambda: traced(lambda x: weft.layer_norm(x), x=weft.f32()), "1 dims or more"),
    "table": (lambda: traced(lambda w, i: weft.embedding(w, i), w=weft.f32(4), i=weft.i64(3)), "weight of 2 dims"),
    "complex": (lambda: weft.tensor(torch.complex64, 3), "one of f64"),
    "bools subtracted": (lambda: traced(lambda x: x - x, x=weft.tensor("bool", 3)), "logical_or"),
    "bools negated": (lambda: traced(lambda x: -x, x=weft.tensor("bool", 3)), "cast"),
    "an input too few": (lambda: traced(lambda x, y: x + y, x=X), "missing a required argument: 'y'"),
    "an input too many": (lambda: traced(lambda x: x + 1.0, x=X, z=X), "unexpected keyword argument 'z'"),
    "no mesh": (lambda: weft.trace(lambda x: x, None, x=X), r"weft.Mesh\(dp=4\)"),
    "an index": (lambda: traced(lambda x: x[0], x=X), "weft.lang.narrow"),
    "a float": (lambda: traced(lambda x: float(x), x=weft.f32()), "not known while the program is written"),
    "a method": (lambda: traced(lambda x: x.exp(), x=X), r"weft.lang.exp\(x\)"),
    "a torch function": (lambda: traced(lambda x: torch.exp(x), x=X), "weft.lang.exp"),
    "a torch tensor": (lambda: traced(lambda x: torch.ones(3) + x, x=weft.f32(3)), "torch's add was given"),
    "no text": (lambda: weft.parse(3), "needed  text"),
    "a list for a tensor": (lambda: weft.interp.run(traced(lambda x: x + 1.0, x=X), {"x": [1]}), "found   list"),
    "another shape": (lambda: weft.interp.run_global(traced(lambda x: x + 1.0, x=X), {"x": torch.ones(9)}), "another shape"),
    "a sum with a max": (
        lambda: weft.merge(traced(two_sums, a=weft.f32(3, dp=P()), b=weft.f32(3, dp=P("max"))), "%0", "%1"),
        r"one reduction, dp:P\n  found   dp:P\(max\)",
    ),
    "an equation": (lambda: weft.define("odd", kind=weft.ops.registry.Kind.POINTWISE, equation="i j", run=torch.exp), "index equation"),
    "a model": (lambda: train(model=3), "a torch.nn.Module"),
    "an optimizer": (lambda: train(optimizer="adam"), "torch.optim.Optimizer"),
    "no parts": (lambda: train(accumulate=0), "1 or more"),
    "a precision": (lambda: train(precision="bf16"), "torch.bfloat16"),
    "no plan": (lambda: train(plan=None), "this is no plan"),
    "no ranks": (lambda: weft.optim.AdamW(LINEAR.parameters()), "init_process_group"),
    "edges": (lambda: dynamic.edges([[(0, 1), (1, 0)]]), r"\(number of vertices"),
    "lengths": (lambda: dynamic.chains([2, -1]), "0 or more"),
    "lengths of words": (lambda: dynamic.chains("abc"), "integers"),
    "a setting": (lambda: zoo.get("gpt2", layers="x"), "an integer"),
    "no cluster": (lambda: cluster(None), "NODESxDEVICESxKIND"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bad_input_is_refused_in_words(name: str) -> None:
    attempt, words = PROGRAMS[name]
    with pytest.raises(WeftError, match=words):
        attempt()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("groups: [", "cannot be read"),
        ("groups: [3]", "cannot be read"),
        ("groups: [{nodes: two, devices: 8, kind: H100}]", "nodes of .* cannot be .two."),
        ("groups: [{nodes: 2, devices: 8, kind: 4}]", "cannot be read"),
        ("groups: [{nodes: 2, devices: 8, kind: H100, network_gbps_per_device: fast}]", "network_gbps_per_device of .* cannot be .fast."),
        ("\udcff", "cannot read"),
    ],
)
def test_a_bad_cluster_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(WeftError, match=words):
        cluster(str(path))


def test_a_plan_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeftError, match="is not JSON"):
        load(tmp_path / "p.json")


def test_a_dim_counted_from_the_end_is_the_same_node() -> None:
    p = traced(lambda x: {"a": weft.sum(x, dims=-1), "b": weft.sum(x, dims=1), "c": weft.amax(x, dims=(1, 0)), "d": weft.amax(x, dims=(-2, -1))}, x=X)
    assert p.output_names["a"] is p.output_names["b"]
    assert p.output_names["c"] is p.output_names["d"]
    assert weft.trace(lambda x: weft.sum(x, dims=-1), MESH, x=weft.f32(2, 4, dp=S(1))).output_names["out"].type.on("dp") == P()
