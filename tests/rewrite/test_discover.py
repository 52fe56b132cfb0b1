"""Discovery: the same rules every time, the fewest that account for every pair, and well-known recipes found without being told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft import Mesh, P, S, f64, i64, interp, trace
from weft.cli import app
from weft.core.node import OPS
from weft.core.program import Program
from weft.ops.embed import take
from weft.ops.norm import rms_norm
from weft.ops.pointwise import elementwise
from weft.ops.registry import Kind, Linear, define
from weft.rewrite.certificate import read, shipped
from weft.rewrite.check import check
from weft.rewrite.discover.closure import Closure, Grounder, follows
from weft.rewrite.discover.enumerate import Enumerator
from weft.rewrite.discover.run import Discovery, discover, forms_of
from weft.rewrite.discover.worlds import Leaf, World, communication, op_names, worlds
from weft.rewrite.prove.audit import pair_holds
from weft.rewrite.prove.forms import form
from weft.rewrite.prove.ladder import Effort
from weft.rewrite.rulefile import parse_rule
from weft.rewrite.schema import Schema
from weft.rewrite.search import both_directions, moves

QUICK = Effort(per_mesh=2, symbolic=2)


def tiny(*more: str) -> World:
    leaves = (Leaf("x", (4, 4)), Leaf("y", (4, 4)))
    return World("tiny", (Mesh(),), leaves, (form("neg"), form("add", 2), *(form(m) for m in more)), moves=False)


def moving() -> World:
    leaves = (Leaf("x", (4, 4)), Leaf("u", (4, 4), (("m", S(0)),)), Leaf("p", (4, 4), (("m", P()),)))
    return World("moving", (Mesh(m=2), Mesh(m=3)), leaves, (form("neg"), form("relu"), *communication(("m",), 2)))


@pytest.fixture(scope="module")
def small() -> Discovery:
    return discover(2, given=[tiny(), moving()], effort=QUICK)


def lines(d: Discovery) -> list[str]:
    return [str(r.schema).split(": ", 1)[1] for r in d.rules]


def test_known_laws_are_among_them(small: Discovery) -> None:
    found = lines(small)
    assert "add(x, y) == add(y, x) for x[i, j] y[i, j]" in found
    assert "neg(neg(x)) == x for x[i, j]" in found
    assert any("all_gather(reduce_scatter(x" in f and "all_reduce(x" in f for f in found)
    assert any(f.startswith(("all_gather(f(x)", "f(all_gather(x)")) for f in found)
    assert all(r.rung == 3 for r in small.rules)


def test_the_same_every_time(small: Discovery) -> None:
    again = discover(2, given=[tiny(), moving()], effort=QUICK)
    assert again.as_file() == small.as_file()


def test_a_stopped_search_goes_on(small: Discovery, tmp_path: Path) -> None:
    state = tmp_path / "state"
    discover(2, given=[tiny()], effort=QUICK, state=state)
    before = state.read_text()
    assert before
    discover(2, given=[tiny()], effort=QUICK, state=state)
    assert state.read_text() == before  # nothing was proved again


def test_the_file_reads_back_whole(small: Discovery) -> None:
    certificates, pairs = read(small.as_file())
    assert [c.schema.name for c in certificates] == [r.schema.name for r in small.rules]
    assert all(c.is_complete for c in certificates)
    assert all(pair_holds(p, 7) for p in pairs)


def test_every_pair_follows_and_no_rule_is_spare() -> None:
    """Closed anew over the universe: all rules join every pair, and without any one some pair is left."""
    world = tiny()
    found = discover(2, given=[world], effort=QUICK)
    universe = Enumerator(world, 2).run()
    clauses = [list(Grounder(universe).clauses(r.schema)) for r in found.rules]
    pairs = [p for p in universe.pairs() if universe.leaves[p[1]] <= universe.leaves[p[0]]]

    def known(rules: list[list]) -> bool:
        closure = Closure(universe)
        closure.add(c for r in rules for c in r)
        return all(closure.known(p) for p in pairs)

    assert known(clauses)
    assert not any(known(clauses[:k] + clauses[k + 1 :]) for k in range(len(clauses)))


def test_a_new_op_brings_its_own_rules() -> None:
    """No rule is written: the op's entry is enough."""
    define("twice", kind=Kind.POINTWISE, equation=elementwise, run=lambda x: x + x, linear=Linear.FIRST, vjp=lambda n, ct: (ct + ct,),
           field=lambda p, a: (a + a) % p)  # fmt: skip
    try:
        found = lines(discover(2, given=[tiny("twice")], effort=QUICK))
        assert any("twice" in f and "add(x, x)" in f for f in found), found
    finally:
        OPS.pop("twice")


def test_a_new_op_passes_rules_that_ask_nothing_of_it() -> None:
    """An op that needs a dim whole is cut along the other, because its equation says so."""
    from weft.ops.registry import Equation

    def equation(types, attrs):
        return Equation((("i", "j"),), (("i", "j"),), unsharded=frozenset("j"))

    op = define("rowwise", kind=Kind.COMPOSITE, equation=equation, run=lambda x: x.cumsum(1))
    try:
        p = trace(lambda x: op(weft.all_gather(x, "m")), Mesh(m=2), x=f64(4, 4, m=S(0)))
        q = reached(p, lambda q: q.nodes[-1].op.name == "all_gather" and q.nodes[-1].args[0].op is op)
        assert check(p, q).equal
        cut = trace(lambda x: op(weft.all_gather(x, "m")), Mesh(m=2), x=f64(4, 4, m=S(1)))
        assert not any(q.nodes[-1].op.name == "all_gather" and q.nodes[-1].args[0].op is op for _, q in moves(cut, RULES))
    finally:
        OPS.pop("rowwise")


# -- what ships


def test_the_shipped_rules_are_whole() -> None:
    certificates, pairs = shipped("discovered.json")
    assert len(pairs) >= 1400
    assert all(c.is_complete and c.rung >= 2 for c in certificates)
    assert sum(c.rung == 3 for c in certificates) >= 0.8 * len(certificates)
    assert len(op_names(worlds())) >= 16


def test_shipped_conditions_are_needed() -> None:
    for c in shipped("discovered.json")[0]:
        assert set(c.needs) == {str(k) for k in c.schema.conditions}
        assert all(c.needs.values()), c.schema


# -- found without being told: from the shipped discovered rules alone

FOUND = [c.schema for c in shipped("discovered.json")[0]]
RULES = both_directions(FOUND)


def reached(p: Program, want: Callable[[Program], bool], depth: int = 3, rules: list[Schema] = RULES) -> Program:
    """A program with the property, by a few discovered rules."""
    front, seen = [p], {p.outputs}
    for _ in range(depth):
        after = []
        for q in front:
            for _, r in moves(q, rules):
                if want(r):
                    return r
                if r.outputs not in seen and len(r.nodes) <= len(p.nodes) + 2:
                    seen.add(r.outputs)
                    after.append(r)
        front = after
    raise AssertionError(f"not reached from\n{p}")


def comm(p: Program) -> list[str]:
    return [n.op.name for n in p.nodes if n.op.kind is Kind.COMM]


def derived(line: str, *forms: str, **leaves: tuple[tuple[int, ...], object]) -> bool:
    """Whether an equality follows from the discovered rules, among expressions of three ops over these inputs and all collectives."""
    made = tuple(Leaf(n, shape, () if p is None else (("m", p),)) for n, (shape, p) in leaves.items())
    dims = max(len(leaf.shape) for leaf in made)
    world = World("asked", (Mesh(m=2),), made, (*(form(f, 2 if f in ("matmul", "add") else 1) for f in forms), *communication(("m",), dims)))
    rule = parse_rule(f"asked: {line}")
    return follows(Enumerator(world, 3).run(), FOUND, rule.left[0], rule.right[0])


def test_rediscovers_megatron_column_then_row() -> None:
    """The lemma that a product of gathered halves is one sum is derived; with it three moves make Megatron's block."""
    lemma = "matmul(all_gather(x, axis='m'), all_gather(y, axis='m')) == all_reduce(matmul(x, y), axis='m')"
    assert derived(lemma, "matmul", x=((4, 4), S(1)), y=((4, 4), S(0)))
    both = parse_rule("lemma: matmul(all_gather(x, axis=a), all_gather(y, axis=a)) == all_reduce(matmul(x, y), axis=a)")
    p = trace(lambda x, w, v: weft.relu(x @ weft.all_gather(w, "tp")) @ weft.all_gather(v, "tp"), Mesh(tp=2),
              x=f64(2, 4), w=f64(4, 6, tp=S(1)), v=f64(6, 4, tp=S(0)))  # fmt: skip
    q = reached(p, lambda q: comm(q) == ["all_reduce"], rules=[*RULES, both])
    assert check(p, q).equal


def test_rediscovers_expert_parallel_all_to_all() -> None:
    """Tokens go to the ranks that hold their experts, and come back."""
    line = "matmul(x, all_gather(w, axis='m')) == all_to_all(matmul(all_to_all(x, axis='m', dim=0), w), axis='m', dim=1)"
    assert derived(line, "matmul", x=((4, 4, 2), S(1)), w=((4, 2, 2), S(0)))


def test_what_does_not_hold_is_not_derived() -> None:
    assert not derived("neg(x) == x", "neg", x=((4, 4), None))


def test_rediscovers_merged_qkv_projection() -> None:
    p = trace(lambda x, q, k: weft.concat([x @ q, x @ k], 1), Mesh(), x=f64(4, 4), q=f64(4, 4), k=f64(4, 4))
    assert check(p, reached(p, lambda q: len(q.find_all("matmul")) == 1)).equal


def test_rediscovers_all_reduce_as_scatter_and_gather() -> None:
    p = trace(lambda x: weft.all_reduce(x, "dp"), Mesh(dp=2), x=f64(4, dp=P()))
    assert comm(reached(p, lambda q: comm(q) == ["reduce_scatter", "all_gather"])) == ["reduce_scatter", "all_gather"]


def test_rediscovers_sequence_parallel_norm() -> None:
    """rms_norm was never enumerated: the rule holds for any op, and its equation lets rows be cut."""
    p = trace(lambda x, g: rms_norm(weft.all_reduce(x, "tp"), g), Mesh(tp=2), x=f64(4, 6, tp=P()), g=f64(6))
    q = reached(p, lambda q: comm(q) == ["reduce_scatter", "all_gather"] and q.find("rms_norm").args[0].op.name == "reduce_scatter")
    assert check(p, q).equal


def test_rediscovers_delayed_gradient_reduction() -> None:
    p = trace(lambda a, b: weft.all_reduce(a, "dp") + weft.all_reduce(b, "dp"), Mesh(dp=2), a=f64(4, 4, dp=P()), b=f64(4, 4, dp=P()))
    assert check(p, reached(p, lambda q: comm(q) == ["all_reduce"])).equal


def test_rediscovers_embedding_sharded_by_vocabulary() -> None:
    p = trace(lambda t, i: take(weft.all_gather(t, "tp"), i, 0), Mesh(tp=2), t=f64(6, 4, tp=S(0)), i=i64(3))
    q = reached(p, lambda q: comm(q) == ["all_reduce"])
    assert q.find("take").args[0].op.name == "input"
    assert check(p, q).equal


def test_the_interpreter_agrees_with_a_rediscovered_form() -> None:
    p = trace(lambda a, b: weft.all_reduce(a, "dp") + weft.all_reduce(b, "dp"), Mesh(dp=2), a=f64(4, dp=P()), b=f64(4, dp=P()))
    q = reached(p, lambda q: comm(q) == ["all_reduce"])
    given = {k: torch.randn(4, dtype=torch.float64) for k in "ab"}
    assert torch.allclose(interp.run(p, given)["out"], interp.run(q, given)["out"])


MIDDLE = """
import weft
from weft.ops.registry import Kind

middle = weft.define(
    "middle", kind=Kind.POINTWISE, equation="i j, i j -> i j", linear=(frozenset({0, 1}),), run=lambda x, y: (x + y) / 2,
    vjp=lambda n, ct: (ct * 0.5, ct * 0.5), field=lambda prime, x, y: (x + y) * ((prime + 1) // 2) % prime,
)
plain = 3
"""


def test_an_op_stands_with_as_many_operands_as_its_meaning_takes() -> None:
    op = define(
        "halved", kind=Kind.POINTWISE, equation=elementwise, run=lambda x: x / 2, field=lambda p, x: x * ((p + 1) // 2) % p,
        vjp=lambda n, ct: (ct * 0.5,),
    )  # fmt: skip
    try:
        assert [f.arity for f in forms_of(op)] == [1]
    finally:
        OPS.pop("halved")


def test_rules_of_an_op_of_a_file_are_found_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MIDDLE)
    try:
        done = CliRunner().invoke(app, ["discover", "--op", f"{path}:middle", "--max-ops", "1", "--json"])
    finally:
        OPS.pop("middle", None)
    assert done.exit_code == 0
    shown = [line for line in done.output.splitlines() if line.startswith("rung")]
    assert any("middle(x, y) == middle(y, x)" in line for line in shown)
    assert all("middle" in line for line in shown)


@pytest.mark.parametrize(
    ("name", "said"),
    [("mine.py:plain", "has no op plain"), ("mine.py:none", "has no op none"), ("mine.py", "names no op of a file"), ("gone.py:x", "no file")],
)
def test_what_is_no_op_of_a_file_is_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MIDDLE)
    try:
        done = CliRunner().invoke(app, ["discover", "--op", str(tmp_path / name)])
    finally:
        OPS.pop("middle", None)
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())
