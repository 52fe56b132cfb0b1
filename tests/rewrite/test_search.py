"""Search over substitutions: cheaper programs that mean the same, with the rules that led there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import weft
from weft import Mesh, P, S, f64, trace
from weft.core.errors import InvalidTransform
from weft.core.program import Program
from weft.ops.registry import Kind, flops, memory_traffic, nbytes
from weft.rewrite import algebra, parallel
from weft.rewrite.check import check
from weft.rewrite.search import Use, both_directions, made, moves, search, uses

RULES = {r.name: r for r in (*parallel.rules(), *algebra.rules())}


def some(*names: str):
    return [RULES[n] for n in names]


def rough_cost(program: Program) -> float:
    """Bytes the busiest rank moves: on the wire (dear), in memory, a little for arithmetic, and something per op."""
    total = 0.0
    for n in program.nodes:
        if n.op.kind is Kind.COMM:
            total += 64 + 8 * n.op.wire(n.mesh.size(n.attr("axis"))) * sum(max(nbytes(a.type), nbytes(t)) for a, t in zip(n.args, n.types, strict=True))
        elif n.op.kind is Kind.VIEW and len(n.args) > 1:
            total += 64 + 2 * sum(nbytes(t) for t in n.types)  # joining copies
        elif n.op.kind not in (Kind.SOURCE, Kind.VIEW):
            total += 64 + memory_traffic(n) + 0.05 * flops(n)
    return total


def count(op: str) -> Callable[[Program], float]:
    return lambda p: float(len(p.find_all(op)))


def test_three_projections_become_one() -> None:
    p = trace(lambda x, q, k: weft.concat([x @ q, x @ k], 1), Mesh(), x=f64(4, 8), q=f64(8, 8), k=f64(8, 8))
    found = search(p, count("matmul"), some("merge_projections"))
    assert len(found.program.find_all("matmul")) == 1
    assert found.rules == ("merge_projections",)
    assert check(p, found.program).equal


def test_a_stack_of_equal_blocks_is_changed_as_one() -> None:
    def stack(x, ws):
        for a, b in ws:
            x = weft.relu(weft.concat([x @ a, x @ b], 1))
        return x

    p = trace(stack, Mesh(), x=f64(4, 8), ws=[[f64(8, 4), f64(8, 4)] for _ in range(6)])
    found = search(p, count("matmul"), some("merge_projections"), budget=3)
    assert len(found.program.find_all("matmul")) == 6
    assert any(" x" in r for r in found.rules)
    assert found.expanded <= 3
    assert check(p, found.program).equal


def test_a_step_uphill_is_taken_when_relaxed() -> None:
    """(a b) c costs less as a (b c) here, by way of a form that costs as much as the first."""
    p = trace(lambda a, b, c, d: ((a @ b) @ c) @ d, Mesh(), a=f64(64, 2), b=f64(2, 64), c=f64(64, 2), d=f64(2, 64))
    greedy = search(p, rough_cost, some("matmul_regroup"), relax=1.0, budget=20)
    relaxed = search(p, rough_cost, some("matmul_regroup"), relax=3.0, budget=20)
    assert relaxed.cost <= greedy.cost < greedy.start
    assert check(p, relaxed.program).equal


def test_the_budget_is_kept() -> None:
    p = trace(lambda x, y, z: x * y + x * z + y * z, Mesh(), x=f64(3), y=f64(3), z=f64(3))
    found = search(p, rough_cost, [r for r in algebra.rules() if not r.op_holes], budget=4, relax=2.0)
    assert found.expanded <= 4
    assert found.cost <= found.start
    assert check(p, found.program).equal


def test_no_rule_no_change() -> None:
    p = trace(lambda x: weft.relu(x), Mesh(), x=f64(3))
    found = search(p, rough_cost, some("matmul_regroup"))
    assert found.program is p
    assert found.rules == ()


def test_every_move_keeps_the_meaning() -> None:
    p = trace(lambda x, w: weft.relu(weft.all_reduce(x @ w, "tp")), Mesh(tp=2), x=f64(4, 6, tp=S(1)), w=f64(6, 4, tp=S(0)))
    reached = list(moves(p, both_directions([*parallel.rules(), *algebra.rules()])))
    assert len(reached) > 5
    for name, q in reached:
        assert check(p, q, run=False).equal, f"{name}\n{q}"


def test_a_use_of_a_rule_leads_the_same_way_again() -> None:
    p = trace(lambda x, w, v: (x @ w) @ v + (x @ v) @ w, Mesh(), x=f64(4, 4), w=f64(4, 4), v=f64(4, 4))
    rules = both_directions(some("matmul_regroup"))
    found = list(uses(p, rules))
    assert [str(use) for use, _ in found] == ["matmul_regroup x2", "matmul_regroup"]
    for use, there in found:
        assert made(p, use, rules).outputs == there.outputs
    other = trace(lambda x, w, v: (x @ w) @ v, Mesh(), x=f64(8, 2), w=f64(2, 4), v=f64(4, 3))
    assert made(other, found[1][0], rules).output_names["out"].args[1].shape == (2, 3)


def test_a_use_that_cannot_be_made_is_refused() -> None:
    p = trace(lambda x, w: x @ w, Mesh(), x=f64(4, 4), w=f64(4, 4))
    rules = both_directions(some("matmul_regroup"))
    for use, needed in (
        (Use("no_such", "matmul", 0), "needed  a proved rule"), (Use("matmul_regroup", "matmul", 1), "needed  matmul 1 of"),
        (Use("matmul_regroup", "matmul", 0), r"does not match\n\n +needed  matmul\(matmul"),
    ):  # fmt: skip
        with pytest.raises(InvalidTransform, match=needed):
            made(p, use, rules)


@pytest.mark.parametrize("relax", [1.0, 1.3])
def test_algebra_and_parallelism_are_chosen_together(relax: float) -> None:
    """A sum over the ranks waits until after the cheaper of two orders of products."""
    p = trace(lambda x, w: weft.all_reduce(x, "tp") @ w, Mesh(tp=2), x=f64(64, 64, tp=P()), w=f64(64, 2))
    found = search(p, rough_cost, relax=relax, rules=some("delay_sum_beside", "matmul_regroup", "split_scatter"), budget=30)
    assert found.rules == ("delay_sum_beside",)
    assert found.program.find("all_reduce").shape == (64, 2)
