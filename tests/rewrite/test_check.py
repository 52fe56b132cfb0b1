"""`weft check`: a 12-layer GPT, forward and backward, against its form on a mesh; what is wrong is named by layer and op."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import weft
from weft import Mesh, P, f64, trace
from weft.cli import app
from weft.core.node import OPS
from weft.core.program import Program
from weft.rewrite.check import check, equal_or_raise, layer_name, locate


@pytest.fixture(scope="module")
def gpt() -> tuple[Program, Program]:
    """One device, and dp2 x tp2 with the sequence cut between the sums."""
    import weft_zoo as zoo
    from weft.frontend.capture import capture
    from weft.plan.named import input_layouts
    from weft.plan.place import place
    from weft.plan.spec import Spec

    work = zoo.small("gpt3-125m", layers=12, hidden=32, heads=4, device="meta")
    captured = capture(work.model, work.example(4, device="meta"), work.loss, gradients=True)
    plan = Spec.parse("dp2,tp2,sp")
    layouts, options = input_layouts(captured.program, plan, captured.states)
    return captured.program, place(captured.program, plan.mesh, layouts, options)


def test_a_gpt_on_dp2_tp2_with_sequence_parallelism_is_equal(gpt: tuple[Program, Program]) -> None:
    single, sharded = gpt
    assert len([n for n in sharded.nodes if n.op.name == "reduce_scatter"]) >= 24
    report = check(single, sharded)
    assert report.equal, str(report)
    assert report.derived == report.outputs == len(single.outputs)
    assert report.kinds_run > 50


def _without_one_sum(text: str, layer: str) -> tuple[str, str]:
    """The text with one all_reduce of a layer skipped: its readers read what it read."""
    for m in re.finditer(r"\n  (%\d+) = all_reduce\((%\d+), axis='tp'\).*", text):
        name, source = m[1], m[2]
        line = text[: m.start()].count("\n") + 2
        place = locate(text, line)
        if place is not None and layer in place.layer:
            rest = text[: m.start()] + text[m.end() :]
            return re.sub(rf"{name}(?!\d)", source, rest), place.layer
    raise AssertionError(f"no sum in {layer}")


def test_a_missing_sum_is_named_with_its_layer(gpt: tuple[Program, Program], tmp_path: Path) -> None:
    single, sharded = gpt
    broken, _ = _without_one_sum(sharded.text, "blocks.7")
    (tmp_path / "a").write_text(single.text)
    (tmp_path / "b").write_text(broken)
    done = CliRunner().invoke(app, ["check", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert done.exit_code == 1
    assert '"equal": false' in done.stdout
    assert '"op": "all_reduce", "layer": "param.blocks.7' in done.stdout


def test_a_wrong_shard_dim_is_named_with_its_layer(gpt: tuple[Program, Program], tmp_path: Path) -> None:
    single, sharded = gpt
    name = next(n for n in sharded.input_names if "blocks.5.mlp" in n and "tp:S(0)" in str(sharded.input_names[n].type))
    line = next(t for t in sharded.text.splitlines() if t.strip().startswith(f"%{name} "))
    (tmp_path / "a").write_text(single.text)
    (tmp_path / "b").write_text(sharded.text.replace(line, line.replace("tp:S(0)", "tp:S(1)")))
    done = CliRunner().invoke(app, ["check", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert done.exit_code == 1
    assert "blocks.5.mlp" in done.stdout


def test_swapped_weights_are_found_by_value(gpt: tuple[Program, Program]) -> None:
    """Well typed, and wrong: two layers read each other's weight."""
    single, sharded = gpt
    a, b = (sharded.input_names[f"param.blocks.{k}.mlp.up.weight"] for k in (3, 4))
    from weft.core.node import make

    def swapped(node: weft.core.node.Node, done: dict) -> weft.core.node.Node:
        if node not in done:
            args = tuple(swapped(x, done) for x in node.args)
            done[node] = node if args == node.args else make(node.op, args, dict(node.attrs))
        return done[node]

    import sys

    sys.setrecursionlimit(10000)
    done = {a: b, b: a}
    wrong = replace(sharded, outputs=tuple((n, swapped(x, done)) for n, x in sharded.outputs))
    report = check(single, wrong, run=False)
    assert not report.equal
    assert report.first is not None
    assert "blocks." in report.first.layer
    assert "the other program computes no such value" in report.first.why


# -- small programs


def _sum_of_two(mesh: Mesh, **places: object) -> Program:
    return trace(lambda x, y: weft.all_reduce(x, "dp") + weft.all_reduce(y, "dp"), mesh, x=f64(4, 2, **places), y=f64(4, 2, **places))


def test_bucketed_sums_are_derived() -> None:
    p = _sum_of_two(Mesh(dp=2), dp=P())
    q = weft.bucket(p, *p.find_all("all_reduce"))
    report = equal_or_raise(p, q)
    assert report.derived == 1


def test_another_order_of_operands_is_found_equal_by_value() -> None:
    p = trace(lambda x, y: x + y, Mesh(), x=f64(3), y=f64(3), name="p")
    q = trace(lambda x, y: y + x, Mesh(), x=f64(3), y=f64(3), name="q")
    report = check(p, q)
    assert (report.equal, report.derived, report.evaluated) == (True, 0, 1)


def test_a_table_of_one_row_is_compared_by_its_row() -> None:
    inputs = {"x": f64(1, 3), "index": weft.tensor("i64", 4)}
    p = trace(lambda x, index: weft.embedding(x, index) + 1.0, Mesh(), name="p", **inputs)
    q = trace(lambda x, index: 1.0 + weft.embedding(x, index), Mesh(), name="q", **inputs)
    assert check(p, q).evaluated == 1 and check(p, q).equal


def test_a_wrong_layout_rule_is_seen_on_the_ranks() -> None:
    import torch

    from weft.ops.pointwise import elementwise
    from weft.ops.registry import Kind, Linear, define

    op = define("careless", kind=Kind.POINTWISE, equation=elementwise, run=torch.relu, linear=Linear.FIRST)
    try:
        p = trace(lambda x: weft.all_reduce(op(x), "dp"), Mesh(dp=2), x=f64(4, dp=P()))
        report = check(p, p)
        assert not report.equal
        assert report.first.op == "careless"
        assert "do not compute its global value" in report.first.why
    finally:
        OPS.pop("careless")


def test_missing_outputs_are_named() -> None:
    p = trace(lambda x: {"a": x + 1.0, "b": x * 2.0}, Mesh(), x=f64(3))
    q = trace(lambda x: {"a": x + 1.0}, Mesh(), x=f64(3))
    assert check(p, q).missing == ("b",)


def test_layers_are_read_off_weight_names() -> None:
    assert layer_name("param.blocks.3.mlp.up.weight") == "param.blocks.3.mlp"
    text = "program p()\n  %w.1.a = input()   f64[2]\n  %0 = neg(%w.1.a)   f64[2]\n  return y=%0"
    assert locate(text, 3).layer == "w.1"
    assert locate(text, 1) is None
