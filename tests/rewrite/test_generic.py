"""Rules of any number of operands: written once, proved by induction, used wherever a list of that length stands."""

from __future__ import annotations

import pytest
import torch

import weft
import weft.ops
from weft import interp
from weft.core.errors import RuleError
from weft.core.layout import Mesh
from weft.rewrite import algebra
from weft.rewrite.generic import step, unrolled
from weft.rewrite.prove.general import derive
from weft.rewrite.prove.ladder import Effort, prove
from weft.rewrite.rulefile import parse_rule, show
from weft.rewrite.schema import flipped
from weft.rewrite.search import uses
from weft.rewrite.second.z3_check import available, check_by_z3

GENERIC = [r for r in algebra.rules() if r.lists]


def rule(text: str):
    return parse_rule(f"r: {text}")


@pytest.mark.parametrize("schema", GENERIC, ids=lambda s: s.name)
def test_it_is_proved_by_induction_and_by_the_second_judge(schema) -> None:
    found = derive(schema)
    assert found is not None
    assert found["method"] == "induction"
    assert parse_rule(found["step"]) is not None
    assert show(parse_rule(show(schema), schema.family)) == show(schema)
    assert not available() or check_by_z3(schema).agreed


def test_unrolled_it_is_an_ordinary_rule() -> None:
    three = unrolled(rule("concat(*(x @ y_), dim=1) == x @ concat(*y_, dim=1) for x[i, k] y_[k, j_]"), 3)
    assert show(three) == (
        "r: concat(matmul(x, y_1), matmul(x, y_2), matmul(x, y_3), dim=1) == matmul(x, concat(y_1, y_2, y_3, dim=1))"
        " for x[i, k] y_1[k, j_1] y_2[k, j_2] y_3[k, j_3]"
    )


@pytest.mark.parametrize(
    "text",
    [
        "concat(*(x @ y_), dim=0) == x @ concat(*y_, dim=1) for x[i, i] y_[i, i]",
        "concat(*f(x_), dim=d) == f(concat(*x_, dim=d))",
        "concat(*x_, dim=1) == reshape(concat(*reshape(x_, shape=(size(x_, 0), size(x_, 1), 1)), dim=2), shape=(size(x_, 0), -1)) for x_[i, k]",
    ],
)
def test_a_false_one_is_refused_by_both_judges(text: str) -> None:
    found = prove(rule(text), Effort(per_mesh=2, symbolic=1))
    assert found.status in ("refuted", "ill-typed")
    assert derive(rule(text)) is None
    assert not available() or not check_by_z3(rule(text)).agreed


def test_true_of_two_and_false_of_three_is_no_rule() -> None:
    """The members in turn, the first one last: of two that is an exchange, which a sum does not see; the step does."""
    with pytest.raises(RuleError, match="joins its list on no side"):
        step(rule("sum(concat(*x_, dim=0), dims=(0,)) == sum(concat(*neg(neg(x_)), dim=0), dims=(0,)) for x_[i, k]"))


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_it_is_used_for_any_number_of_operands(n: int) -> None:
    def model(x, w):
        return weft.concat([x @ (w * float(k + 1)) for k in range(n)], dim=1)

    p = weft.trace(model, Mesh(), x=weft.f64(4, 3), w=weft.f64(3, 5))
    given = {"x": torch.randn(4, 3, dtype=torch.float64), "w": torch.randn(3, 5, dtype=torch.float64)}
    want = interp.run(p, given)["out"]
    found = {use.rule: there for use, there in uses(p, GENERIC)}
    assert {"merge_projections", "stack_columns"} <= found.keys()
    for there in found.values():
        torch.testing.assert_close(interp.run(there, given)["out"], want)
    merged = found["merge_projections"]
    assert len(merged.find_all("matmul")) == 1
    reversed_ = [way for way in map(flipped, GENERIC) if way is not None]
    back = {use.rule: there for use, there in uses(merged, reversed_)}
    assert len(back["merge_projections~"].find_all("matmul")) == n
