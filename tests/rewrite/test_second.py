"""The second judge: its meanings are torch's, it agrees to true rules, and false ones it refuses with numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import weft
import weft.ops
from weft.cli import app
from weft.core.layout import Layout, Mesh
from weft.core.node import OPS, Type, apply
from weft.ops.source import input_node
from weft.rewrite import algebra
from weft.rewrite.certificate import FILES, shipped
from weft.rewrite.prove.ladder import Effort, prove
from weft.rewrite.rulefile import parse_rule
from weft.rewrite.search import uses
from weft.rewrite.second import z3_check as second
from weft.rewrite.second.meaning import MEANINGS, Meaning
from weft.rewrite.second.z3_check import check_by_z3

z3 = pytest.importorskip("z3")

ATTRS = {
    "permute": {"order": (1, 0)}, "reshape": {"shape": (6,)}, "einsum": {"equation": "ij,ij->j"}, "sum": {"dims": (0,)},
    "narrow": {"dim": 1, "start": 0, "stop": 2, "step": 1}, "concat": {"dim": 1}, "put": {"dim": 0}, "take": {"dim": 0},
}  # fmt: skip
UNARY = {"neg", "square", "relu", "permute", "reshape", "sum", "narrow"}


def rule(text: str):
    return parse_rule(f"r: {text}")


def numbers(name: str) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(len(name))
    x, y = (torch.randint(-3, 4, (2, 3), generator=gen).to(torch.float64) for _ in range(2))
    if name == "matmul":
        return [x, y.T.contiguous()]
    if name in ("put", "take"):
        return [x, torch.tensor([1, 0 if name == "take" else 1]), *([torch.tensor([0, 1, 2])] if name == "put" else [])]
    return [x] if name in UNARY else [x, y + 0.5]


@pytest.mark.parametrize("name", sorted({*MEANINGS, "take"} - {"const", "item"}))
def test_an_op_means_what_torch_computes(name: str) -> None:
    given = numbers(name)
    inputs = [input_node(f"x{k}", Type(x.dtype, Layout.of(Mesh(), tuple(x.shape)))) for k, x in enumerate(given)]
    node, m = apply(OPS[name], tuple(inputs), ATTRS.get(name, {})), Meaning()
    known = []
    for k, x in enumerate(given):
        real = x.dtype.is_floating_point
        for i, v in zip(torch.ones(x.shape).nonzero().tolist(), x.reshape(-1).tolist(), strict=True):
            unknown = m.unknown(f"x{k}[{','.join(map(str, i))}]", "real" if real else "int")
            known.append((unknown, m.number(v) if real else z3.IntVal(v)))
    got = [z3.simplify(z3.substitute(t, *known)).as_fraction() for t in m.alone(node).reshape(-1)]
    want = OPS[name].run(*given, **dict(node.attrs))
    assert tuple(node.shape) == tuple(want.shape)
    assert [float(v) for v in got] == pytest.approx(want.reshape(-1).tolist())


TRUE = ("add_swap", "matmul_regroup", "merge_projections", "concat_kept", "linear_sum", "stack_columns", "sink_gather", "delay_sum",
        "split_root", "by_hierarchy", "merge", "bucket", "adam_by_rows", "all_reduce_f_c0f0a")  # fmt: skip


@pytest.mark.parametrize("name", TRUE)
def test_true_rules_are_agreed_to(name: str) -> None:
    schema = next(c.schema for file in FILES for c in shipped(file)[0] if c.schema.name == name)
    found = check_by_z3(schema, seed=3)
    assert found.agreed, found
    assert found.cases >= 3


@pytest.mark.parametrize(
    "text",
    [
        "x - y == y - x",
        "relu(x + y) == relu(x) + relu(y)",
        "f(x + y) == f(x) + f(y)",
        "concat(f(x), f(y), dim=0) == f(concat(x, y, dim=0))",
        "x @ y == y @ x for x[i, i] y[i, i]",
        "concat(x @ y, x @ z, dim=1) == x @ concat(z, y, dim=1) for x[i, k] y[k, j] z[k, j]",
        "all_reduce(x * y, axis=a) == all_reduce(x, axis=a) * all_reduce(y, axis=a) + all_reduce(x, axis=a)",
        "exp(x + y) == exp(x) + exp(y)",
    ],
)
def test_false_rules_are_refused_with_numbers(text: str) -> None:
    found = check_by_z3(rule(text))
    assert found.status in ("refuted", "no case")
    assert found.status == "no case" or " = " in found.why


def test_a_sum_that_passes_what_is_not_linear_has_no_case() -> None:
    assert check_by_z3(rule("square(all_reduce(x, axis=a)) == all_reduce(square(x), axis=a)")).status == "no case"


def test_what_it_has_no_words_for_is_said() -> None:
    found = check_by_z3(rule("gather(x, k, dim=0) + y == y + gather(x, k, dim=0) for x[i, j] k[int: i, j] y[i, j]"))
    assert found.status == "inexpressible"
    assert found.why == "gather knows which slice it holds"
    assert not found.disputes


def test_certificates_name_both_judges_and_a_disputed_rule_is_not_used() -> None:
    certificates = [c for name in FILES for c in shipped(name)[0]]
    assert sum(c.second["status"] == "agreed" for c in certificates) >= 0.9 * len(certificates)
    assert all(c.is_complete and c.may_be_used and c.second["judge"].startswith("z3") for c in certificates)
    disputed = replace(certificates[0], second={"status": "refuted", "judge": "z3"})
    assert not disputed.may_be_used
    assert not disputed.is_complete


def test_a_rule_only_one_judge_accepts_fails_the_command(tmp_path, monkeypatch) -> None:
    path = tmp_path / "mine.rules"
    path.write_text("good: x + y == y + x\n")
    from weft.rewrite.prove import audit

    monkeypatch.setattr(audit, "check_by_z3", lambda schema, seed=0: second.Second("refuted", 1, "x[0] = 1", "z3"))
    done = CliRunner().invoke(app, ["verify", "--rules", str(path), "--workers", "1"])
    assert done.exit_code == 1
    assert "good: proved; z3: refuted" in done.output
    assert "1 disputed" in done.output


def test_without_z3_the_command_says_so(tmp_path, monkeypatch) -> None:
    path = tmp_path / "mine.rules"
    path.write_text("good: x + y == y + x\n")
    from weft.rewrite.prove import audit

    monkeypatch.setattr(second, "available", lambda: "")
    monkeypatch.setattr(audit, "available", lambda: "")
    done = CliRunner().invoke(app, ["verify", "--rules", str(path), "--workers", "1"])
    assert done.exit_code == 0
    assert "Z3 is not installed" in done.output
    assert "good: proved\n" in done.output


@pytest.mark.parametrize(
    "text",
    [
        "concat(f(x), f(y), dim=0) == f(concat(x, y, dim=1))",
        "sum(f(concat(x, y, dim=0)), dims=(0,)) == sum(f(concat(y, x, dim=1)), dims=(0,)) where f keeps 0 of 0 as 0",
    ],
)
def test_ops_of_every_kind_fill_a_hole(text: str) -> None:
    """False of a function of whole rows only, one that turns them or one that makes a row a number."""
    assert check_by_z3(rule(text)).status == "refuted"


@pytest.mark.parametrize("text", ["f(x + y) == f(x) + f(y) where f linear in 0", "f(x + y, z) == f(x, z) + f(y, z) where f linear in 0"])
def test_a_stretched_operand_counts_too_often_in_a_sum(text: str) -> None:
    """sum(x + y) of a y that is stretched over the rows has it once a row, sum(x) + sum(y) once."""
    assert check_by_z3(rule(text)).status == "refuted"
    assert check_by_z3(rule(f"{text}, x like y")).agreed


def test_the_first_judge_tries_a_stretched_operand_too() -> None:
    assert prove(rule("f(x + y) == f(x) + f(y) where f linear in 0"), Effort(per_mesh=4, symbolic=2)).status == "refuted"


def test_a_rule_of_values_alike_is_not_used_where_one_is_stretched() -> None:
    (linear,) = [r for r in algebra.rules() if r.name == "linear_sum"]
    alike, stretched = (
        weft.trace(lambda x, y: weft.sum(x + y, dims=0), Mesh(), x=weft.f64(2, 3), y=weft.f64(rows, 3)) for rows in (2, 1)
    )
    assert [use.rule for use, _ in uses(alike, [linear])] == ["linear_sum"]
    assert list(uses(stretched, [linear])) == []
