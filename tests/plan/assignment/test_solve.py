"""The solver as a whole: near on what can be enumerated, the same every time, and honest about the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import _iopddl as iopddl
from tests.plan.assignment.problems import brute_force, random_problem
from weft.plan.assignment import Problem, assemble, solve

INF = np.inf
TRUTH = Path(__file__).resolve().parents[4] / "shared" / "truth"
outside = pytest.mark.skipif(not TRUTH.is_dir(), reason="the outside problems are not beside this checkout")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([12.0, 20.0, 30.0, 60.0]))
def test_small_problems_are_solved_as_near_as_the_answer_says(seed: int, limit: float) -> None:
    p = random_problem(seed, limit=limit)
    answer, truth = solve(p), brute_force(p)
    if np.isfinite(truth) and answer.feasible:
        assert answer.bound - 1e-6 <= truth <= answer.cost + 1e-6 == p.cost(answer.x) + 1e-6
        assert p.feasible(answer.x)
        assert answer.cost <= truth * (1 + answer.gap) + 1e-6
        assert answer.gap < 0.2
    else:
        assert not answer.feasible
        assert answer.reason


def test_nearly_all_small_problems_are_solved_exactly() -> None:
    problems = [random_problem(seed, nodes=6, limit=limit) for seed in range(25) for limit in (12.0, 20.0, 30.0, 60.0)]
    found = [(solve(p), brute_force(p)) for p in problems]
    assert all(a.feasible == np.isfinite(truth) for a, truth in found)
    assert sum(a.feasible and a.cost > truth + 1e-6 for a, truth in found) <= 1


def layered(layers: int, width: int, seed: int) -> Problem:
    """Layers of nodes, each wired to the next, that all want memory at one time."""
    rng = np.random.default_rng(seed)
    nodes, k = layers * width, 6
    costs = [rng.integers(0, 100, k).astype(float) for _ in range(nodes)]
    pairs = [(i * width + a, (i + 1) * width + b) for i in range(layers - 1) for a in range(width) for b in range(width)]
    edges = [(u, v, rng.integers(0, 100, (k, k))) for u, v in pairs if rng.random() < 0.7]
    claims = [(v, v // width, 2 * layers - v // width, [0, 1, 2, 3, 5, 8]) for v in range(nodes)]
    return assemble(costs, edges, claims, nodes * 0.8)


def test_the_same_work_gives_the_same_answer() -> None:
    p = layered(8, 5, seed=3)
    first, second = (solve(p, work=5e7) for _ in range(2))
    assert first.x.tolist() == second.x.tolist()
    assert (first.cost, first.bound, first.work) == (second.cost, second.bound, second.work)


def test_a_hard_problem_has_an_answer_a_bound_and_a_gap() -> None:
    p = layered(8, 5, seed=3)
    answer = solve(p, work=5e7)
    assert p.feasible(answer.x)
    assert 0 < answer.bound <= answer.cost
    assert 0 <= answer.gap < 0.5


def test_a_deadline_cuts() -> None:
    p = layered(8, 5, seed=3)
    answer = solve(p, work=INF, seconds=1.0)
    assert answer.feasible
    assert answer.seconds < 60


def test_nothing_to_choose() -> None:
    answer = solve(assemble([[3.0], [4.0]], [(0, 1, [[5.0]])]))
    assert (answer.cost, answer.bound, answer.x.tolist()) == (12.0, 12.0, [0, 0])


def test_infeasible_is_an_answer_with_a_reason() -> None:
    answer = solve(assemble([[1.0, 2.0]], claims=[(0, 0, 2, [7, 6])], limit=5))
    assert not answer.feasible
    assert answer.reason == "at time 0 the least that can be in use is 6, beyond the limit 5"


def test_infeasible_only_together() -> None:
    """Each node could fit alone, but the two that use nothing at one time use most at the other."""
    differ = np.where(np.eye(2, dtype=bool), INF, 0)
    claims = [(0, 0, 1, [3, 0]), (1, 0, 1, [3, 0]), (0, 1, 2, [0, 3]), (1, 1, 2, [0, 3])]
    answer = solve(assemble([[0, 0], [0, 0]], [(0, 1, differ)], claims, limit=2))
    assert not answer.feasible
    assert answer.reason


# --- an operator with aliases, as a compiler states it: five nodes, two of which follow two others


def aliased(limit: float = 1_500_000) -> dict[str, list]:
    """Parts of a problem whose nodes 4 and 3 must take the strategies of nodes 1 and 2."""
    k = [4, 3, 4, 4, 3]
    costs = [[110.0 * (v + 1) + 11 * a for a in range(k[v])] for v in range(5)]
    memory = [[100_000.0 * (v + 1) + 10_000 * a for a in range(k[v])] for v in range(5)]
    memory[0][2] = 990_000.0
    spans = [(0, 5), (0, 5), (2, 4), (3, 5)]
    edges = [(0, 2, steps(1000, 4, 4)), (1, 2, steps(5000, 3, 4)), (1, 4, same(3)), (2, 3, same(4))]
    return {"costs": costs, "edges": edges, "claims": [(v, *span, memory[v]) for v, span in enumerate(spans)]}


def steps(base: float, rows: int, columns: int) -> np.ndarray:
    return base + 1000.0 * np.arange(rows)[:, None] + 100.0 * np.arange(columns)


def same(k: int) -> np.ndarray:
    return np.where(np.eye(k, dtype=bool), 0.0, INF)


def test_aliases() -> None:
    answer = solve(assemble(**aliased(), limit=1_500_000))
    assert (answer.cost, answer.x.tolist()) == (7650, [0, 0, 0, 0, 0])


def test_aliases_with_forbidden_strategies() -> None:
    parts = aliased()
    parts["costs"][0][:3] = [INF] * 3
    answer = solve(assemble(**parts, limit=1_500_000))
    assert (answer.cost, answer.x.tolist()) == (10683, [3, 0, 0, 0, 0])


def test_aliases_with_a_forbidden_pair() -> None:
    parts = aliased()
    parts["edges"][0][2][0, 0] = INF
    answer = solve(assemble(**parts, limit=1_500_000))
    assert (answer.cost, answer.x.tolist()) == (7872, [0, 0, 1, 1, 0])


def test_two_edges_between_the_same_merged_nodes_add_up() -> None:
    parts = aliased()
    parts["edges"].append((1, 3, steps(5000, 3, 4)))
    assert solve(assemble(**parts, limit=1_500_000)).cost == 12650


def test_a_costly_edge_between_a_node_and_its_follower() -> None:
    parts = aliased()
    table = np.array([[9000.0, 5100, 5200, 5300], *(1000.0 * (6 + i) + 100 * np.arange(4) for i in range(3))])
    parts["edges"].append((2, 3, table))
    answer = solve(assemble(**parts, limit=1_500_000))
    assert (answer.cost, answer.x.tolist()) == (13972, [0, 0, 1, 1, 0])


def test_evaluate_a_given_choice() -> None:
    assert assemble(**aliased()).cost([3, 1, 2, 2, 1]) == 12149


def test_a_limit_that_may_be_overrun_at_a_price() -> None:
    parts = aliased()
    room = 10_000.0 * np.arange(0, 101)
    parts["costs"].append((10 * room).tolist())
    parts["claims"].append((5, 0, 5, -room))
    assert solve(assemble(**parts, limit=100_000)).cost == 7650 + 10 * 900_000


def test_the_least_memory_any_choice_needs() -> None:
    parts = aliased()
    assert solve(assemble(**parts, limit=1_000_000)).feasible
    answer = solve(assemble(**parts, limit=999_999))
    assert answer.reason == "at time 3 the least that can be in use is 1000000, beyond the limit 999999"


# --- outside problems


@outside
def test_the_outside_example() -> None:
    case = json.loads((TRUTH / "planner_cases.json").read_text())["iopddl_example"]
    p = iopddl.load(TRUTH / "iopddl" / "example.json")
    answer = solve(p)
    assert [answer.cost, answer.x.tolist()] == case["optimum"]
    free = assemble([p.costs(v) for v in range(p.nodes)], [(p.tail[e], p.head[e], p.table(e)) for e in range(p.edges)])
    answer = solve(free)
    assert [answer.cost, answer.x.tolist()] == case["optimum_no_limit"]


@outside
@pytest.mark.parametrize("name", ["B", "G"])
def test_outside_problems_are_proved_optimal(name: str) -> None:
    rows = json.loads((TRUTH / "planner_cases.json").read_text())["iopddl_best_known"]["rows"]
    known = next(row for row in rows if row[0] == name)
    p = iopddl.load(TRUTH / "iopddl" / f"{name}.json.gz")
    answer = solve(p)
    assert p.feasible(answer.x)
    assert (answer.cost, answer.bound) == (float(known[1]), float(known[3]))
