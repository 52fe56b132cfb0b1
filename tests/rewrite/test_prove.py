"""The prover: exact meanings agree with the ops' own, true rules climb, false ones fall with a counterexample a person can read."""

from __future__ import annotations

import random

import pytest
import torch

import weft.ops  # noqa: F401
from tests.rewrite.axioms import check_axioms
from weft.core.errors import RuleError
from weft.core.node import OPS
from weft.rewrite import communicate, parallel
from weft.rewrite.certificate import shipped
from weft.rewrite.prove.audit import builtin_rules
from weft.rewrite.prove.domains import PRIME, Field, Symbolic
from weft.rewrite.prove.forms import form, usual_forms
from weft.rewrite.prove.general import derive
from weft.rewrite.prove.instances import sample
from weft.rewrite.prove.ladder import Effort, needless, prove, without
from weft.rewrite.rulefile import parse_rule, parse_rules, show
from weft.rewrite.schema import only_moves

QUICK = Effort(per_mesh=2, symbolic=2)
BUILT_IN = builtin_rules()


def rule(text: str):
    return parse_rule(f"r: {text}")


# -- the two exact meanings


@pytest.mark.parametrize("name", ["add", "sub", "mul", "neg", "square", "matmul", "sum"])
def test_a_polynomial_at_numbers_is_the_op_at_those_numbers(name: str) -> None:
    symbolic, gen = Symbolic(), torch.Generator().manual_seed(0)
    arity = 2 if name in ("add", "sub", "mul", "matmul") else 1
    node = next(iter(sample(_trivial(name, arity), (), random.Random(0), 1))).left[0]
    shapes = [a.shape for a in node.args]
    unknowns = [symbolic.draw(f"x{k}", s, ()) for k, s in enumerate(shapes)]
    numbers = [torch.randint(0, PRIME, s, generator=gen) for s in shapes]
    value = {(f"x{k}", *i): int(numbers[k][i]) for k, s in enumerate(shapes) for i in [tuple(j.tolist()) for j in torch.ones(s).nonzero()]}
    codes = symbolic.polynomial(node, unknowns)
    got = [_at(symbolic, c, value) for c in codes.reshape(-1).tolist()]
    assert got == Field().polynomial(node, numbers).reshape(-1).tolist()


def _trivial(name: str, arity: int):
    from tests.rewrite.axioms import axiom

    return axiom(form(name, arity))


def _at(symbolic: Symbolic, code: int, value: dict) -> int:
    total = 0
    for monomial, c in symbolic.polys[code].items():
        term = int(c)
        for v in monomial:
            term = term * value[symbolic.names[v]] % PRIME
        total += term
    return total % PRIME


def test_polynomials_are_interned_by_value() -> None:
    s = Symbolic()
    x, y = s.draw("x", (2,), ()).tolist()
    assert s.mul(s.add([x, y]), s.add([x, y])) == s.add([s.mul(x, x), s.mul(x, y), s.mul(y, x), s.mul(y, y)])
    assert s.add([x, s.mul(x, s.number(-1))]) == 0
    assert s.extreme("max", [x, s.extreme("max", [y, x])]) == s.extreme("max", [y, x])


def test_every_usual_op_keeps_its_axiom() -> None:
    """Under every layout it accepts, the ranks together compute the global value: in numbers, mod a prime, in unknowns."""
    assert check_axioms(usual_forms(), per_site=2) == []


def test_a_false_layout_rule_is_caught() -> None:
    """relu declared linear, as a careless entry might: a pending sum would pass, and does not."""
    from weft.ops.pointwise import elementwise
    from weft.ops.registry import Kind, Linear, define

    op = define("careless_relu", kind=Kind.POINTWISE, equation=elementwise, run=torch.relu, linear=Linear.FIRST)
    try:
        assert any("its own meaning" in f for f in check_axioms([form("careless_relu")], per_site=6))
    finally:
        OPS.pop(op.name)


# -- rules that hold


def test_every_rule_reads_back() -> None:
    for r in BUILT_IN:
        assert show(parse_rule(show(r), r.family)) == show(r)
    assert len({r.name for r in BUILT_IN}) == len(BUILT_IN)


CLIMBERS = "split_scatter sink_gather_summing_both delay_sum_both merge_projections bilinear_left bucket column_then_row"


@pytest.mark.parametrize("name", CLIMBERS.split())
def test_true_rules_are_proved_for_all_sizes(name: str) -> None:
    verdict = prove(next(r for r in BUILT_IN if r.name == name), QUICK)
    assert (verdict.rung, verdict.status) == (3, "proved"), verdict.line


def test_every_builtin_certificate_is_whole_and_general() -> None:
    certificates = shipped("builtin.json")[0]
    assert {show(c.schema) for c in certificates} == {show(r) for r in BUILT_IN}
    assert all(c.is_complete and c.rung >= 2 for c in certificates)
    assert sum(c.rung == 3 for c in certificates) >= 0.8 * len(certificates)


def test_a_changed_certificate_is_not_whole() -> None:
    from dataclasses import replace

    first = shipped("builtin.json")[0][0]
    assert not replace(first, rung=first.rung - 1).is_complete
    assert not replace(first, schema=rule("x + y == y + x")).is_complete


def test_rules_that_only_move_are_proved_by_erasure() -> None:
    for r in parallel.rules():
        if r.name != "bucket":
            assert only_moves(r), r.name
            assert derive(r)["method"] == "erasure"


def test_cut_off_sizes_grow_with_the_indices() -> None:
    found = derive(next(r for r in BUILT_IN if r.name == "matmul_regroup"))
    assert found["method"] == "cut-off"
    assert min(found["cases"][0]["sizes"].values()) >= 1


def test_no_derivation_for_a_false_rule() -> None:
    assert derive(rule("x @ y == y @ x for x[i, i] y[i, i]")) is None
    assert derive(rule("sum(x, dims=(0,)) == x for x[i]")) is None


# -- conditions


@pytest.mark.parametrize("name", [r.name for r in BUILT_IN if r.conditions])
def test_every_condition_is_needed(name: str) -> None:
    """Dropping a condition is refuted, and the counterexample is kept with the rule."""
    certificate = next(c for c in shipped("builtin.json")[0] if c.schema.name == name)
    assert certificate.needs
    assert all("left" in text and "right" in text for text in certificate.needs.values()), certificate.needs


def test_dropping_linearity_is_refuted_now() -> None:
    r = next(r for r in BUILT_IN if r.name == "linear_sum")
    assert prove(without(r, 0), QUICK).status == "refuted"
    assert all(text for _, text in needless(r, QUICK, usual_forms()))


# -- rules that do not hold


def test_a_counterexample_is_small_and_readable() -> None:
    found = prove(rule("x @ y == y @ x for x[i, i] y[i, i]"), QUICK)
    assert found.status == "refuted"
    assert "matmul(x, y)  ==  matmul(y, x)" in found.counterexample
    assert "left   [[" in found.counterexample
    assert "right  [[" in found.counterexample
    assert len(found.counterexample.splitlines()) < 10


def test_a_sum_over_ranks_does_not_pass_relu() -> None:
    found = prove(rule("relu(all_reduce(x, axis=a)) == all_reduce(relu(x), axis=a)"), QUICK)
    assert found.status == "ill-typed"
    assert "needed relu to be linear in operand 0" in found.counterexample


def test_a_wrong_gradient_is_a_wrong_rule() -> None:
    """Equal values are not enough: stop_gradient(x) is x, its gradient is not."""
    found = prove(rule("stop_gradient(x) == x"), QUICK)
    assert found.status != "proved"


def test_exp_and_division_have_laws_over_two_fields() -> None:
    """exp turns sums of exponents mod q into products mod p; division is multiplication by the inverse."""
    assert prove(rule("exp(x + y) == exp(x) * exp(y)"), QUICK).rung == 1
    assert prove(rule("(x / y) / z == x / (y * z)"), QUICK).rung == 1
    assert prove(rule("(x / y) * z == (x * z) / y"), QUICK).rung == 3  # it is linear in x, so no field is needed
    assert prove(rule("exp(x * y) == exp(x) * exp(y)"), QUICK).status == "refuted"
    assert prove(rule("x / y == y / x"), QUICK).status == "refuted"


def test_special_laws_are_judged_by_numbers() -> None:
    """A table cannot know that relu twice is relu once; whole numbers do, so it is not refuted, nor proved."""
    assert prove(rule("relu(relu(x)) == relu(x)"), QUICK).rung == 1


# -- the verbs' rules are these rules


def test_every_verb_has_its_line() -> None:
    names = {r.name for r in parallel.rules()}
    verbs = "split_scatter split_root sink_gather hoist_slice delay_sum delay_scatter cancel_slice_gather cancel_gather_slice"
    for verb in verbs.split():
        assert callable(getattr(communicate, verb))
        assert verb in names, verb
    assert {"merge", "bucket", "by_hierarchy", "turn"} <= names


def test_a_line_that_is_no_rule_is_refused() -> None:
    for line, what in (
        ("x + y", "this is not a rule"),
        ("r: x + y", "one side"),
        ("r: matmull(x, y) == x", "no op 'matmull'"),
        ("r: x == y", "on the right only"),
        ("r: f(x) == f(x) where f lovely", "condition weft does not know"),
        ("r: x + == y", "cannot be parsed"),
        ("r: x == x, x", "values left"),
    ):
        with pytest.raises(RuleError, match=what):
            parse_rule(line)


def test_rules_of_a_text_know_their_family() -> None:
    found = parse_rules("[algebra]\na: x + y == y + x  # swap\n[mine]\nb: x + (y + z)\n    == (x + y) + z\n")
    assert [(r.name, r.family) for r in found] == [("a", "algebra"), ("b", "mine")]
