"""The same problem as a mixed-integer programme, for HiGHS.

    minimise   sum c_v[a] x_v[a] + sum w_e[a, b] y_e[a, b]
    subject to sum_a x_v[a] = 1,   sum_b y_e[a, b] = x_u[a],   sum_a y_e[a, b] = x_v[b]
               sum_{q live at t} m_q . x_owner(q) <= M_t             for the times t found to be overrun
               x binary, y >= 0 and continuous: binary x leaves y one way to be

First the relaxation, adding overrun times until there are none: often it is integral already. Then with the nodes that came out
integral held fixed, for a solution soon; then all of it, for the proof. Limits are in simplex iterations and nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.plan.assignment.budget import Budget
from weft.plan.assignment.problem import Floats, Ints, Problem, offsets, summed
from weft.plan.assignment.search import Choice, better

INTEGRAL = 1e-6
CUTS = 10  # times added at once, spread over all
STEPS_PER_NODE = 20  # simplex iterations that a node of the search tree takes, or so
WORK_PER_ITERATION = 2.0  # of a simplex iteration, for each column


@dataclass(frozen=True, eq=False)
class Outcome:
    """The best choice known and what is proved of the rest."""

    best: Choice | None
    bound: float


def solve(p: Problem, best: Choice | None, budget: Budget, gap: float = 1e-9) -> Outcome:
    """Solve p to within `gap`, starting from the best choice known; the budget may end it early."""
    model = _HighsModel(p, best)
    model.h.setOptionValue("mip_rel_gap", gap)
    bound = model.relax(budget)
    if model.is_integral():
        return Outcome(better(best, model.found()), bound)
    for fixed in (model.integral_nodes(), np.zeros(p.nodes, bool)):
        while not budget.over:
            proved = model.branch(fixed, best, budget)
            found = model.found()
            added = model.add_overrun(found.x) if found is not None and p.excess(found.x) > 0 else 0
            if found is not None and not added:
                best = better(best, found)
            bound = max(bound, proved) if not fixed.any() else bound
            if not added:
                break
    return Outcome(best, bound)


class _HighsModel:
    """A HiGHS model: columns are x then y, rows the sums of nodes and edges, then one for each time added."""

    def __init__(self, p: Problem, best: Choice | None) -> None:
        import highspy

        self.p, self.hp = p, highspy
        costs = np.concatenate([p.c, p.w])
        costs = costs[np.isfinite(costs)]
        self.ceiling = best.cost if best is not None and costs.min(initial=0.0) >= 0 else np.inf
        self.scale = max(abs(best.cost) if best is not None else float(np.median(costs)), 1e-30) * 1e-5
        self.columns = len(p.c) + len(p.w)
        self.step = WORK_PER_ITERATION * self.columns
        self.seen: set[int] = set()
        self.h = highspy.Highs()
        for option, value in _OPTIONS.items():
            self.h.setOptionValue(option, value)
        self.h.passModel(self._programme())

    def _programme(self) -> Any:
        rows, columns, values, count = _marginals(self.p)
        order = np.lexsort((rows, columns))
        lp = self.hp.HighsLp()
        lp.num_col_, lp.num_row_ = self.columns, count
        cost = np.concatenate([self.p.c, self.p.w])
        useful = np.isfinite(cost) & (cost <= self.ceiling)
        lp.col_cost_ = np.where(useful, cost, 0.0) / self.scale
        lp.col_lower_, lp.col_upper_ = np.zeros(self.columns), useful.astype(float)
        lp.row_lower_ = lp.row_upper_ = np.where(np.arange(count) < self.p.nodes, 1.0, 0.0)
        lp.a_matrix_.format_ = self.hp.MatrixFormat.kColwise
        lp.a_matrix_.start_ = offsets(np.bincount(columns, minlength=self.columns)).astype(np.int32)
        lp.a_matrix_.index_ = rows[order].astype(np.int32)
        lp.a_matrix_.value_ = values[order]
        return lp

    @property
    def x(self) -> Floats:
        return np.array(self.h.getSolution().col_value)[: len(self.p.c)]

    def _run(self, budget: Budget) -> None:
        before = self.h.getInfo().simplex_iteration_count
        self.h.setOptionValue("time_limit", float(self.h.getRunTime() + max(min(budget.left, 1e7), 0.0)))
        steps = min(max((budget.work - budget.spent) / self.step, 1), 2e9)
        self.h.setOptionValue("simplex_iteration_limit", int(steps))
        self.h.setOptionValue("mip_max_nodes", int(max(steps / STEPS_PER_NODE, 1)))
        self.h.run()
        budget.spend(max(self.h.getInfo().simplex_iteration_count - before, 1) * self.step)

    def relax(self, budget: Budget) -> float:
        """The bound of the relaxation with every time it overruns."""
        bound = -np.inf
        while not budget.over:
            self._run(budget)
            if self.h.getModelStatus() != self.hp.HighsModelStatus.kOptimal:
                break
            bound = self.h.getInfo().objective_function_value * self.scale
            if not self._cut(self._usage()):
                break
        return bound

    def _usage(self) -> Floats:
        p = self.p
        entry = np.repeat(p.c_at[p.owner] - p.m_at[:-1], p.k[p.owner]) + np.arange(len(p.m))
        claim = np.repeat(np.arange(len(p.owner)), p.k[p.owner])
        return p.spread(summed(claim, p.m * self.x[entry], len(p.owner)))

    def add_overrun(self, x: Ints) -> int:
        return self._cut(self.p.profile(x))

    def _cut(self, usage: Floats) -> int:
        """Add rows for the times most overrun, some way apart; how many were added."""
        over = usage - self.p.limit * (1 + INTEGRAL)
        added: list[int] = []
        for t in np.argsort(-over, kind="stable")[: int((over > 0).sum())]:
            if t not in self.seen and all(abs(t - s) > self.p.times // 50 for s in added):
                added.append(int(t))
                self._add_time(int(t))
            if len(added) == CUTS:
                break
        return len(added)

    def _add_time(self, t: int) -> None:
        p, per = self.p, max(float(self.p.limit[t]), 1e-30)
        live = np.flatnonzero((p.start <= t) & (t < p.stop))
        entries = np.concatenate([np.arange(p.m_at[q], p.m_at[q + 1]) for q in live])
        columns = np.concatenate([np.arange(p.c_at[v], p.c_at[v + 1]) for v in p.owner[live]])
        used = p.m[entries] > 0
        self.h.addRow(-np.inf, p.limit[t] / per, int(used.sum()), columns[used].astype(np.int32), p.m[entries][used] / per)
        self.seen.add(t)

    def integral_nodes(self) -> NDArray[np.bool_]:
        return np.maximum.reduceat(self.x, self.p.c_at[:-1]) > 1 - INTEGRAL

    def is_integral(self) -> bool:
        optimal = self.h.getModelStatus() == self.hp.HighsModelStatus.kOptimal
        return optimal and bool(self.integral_nodes().all()) and self.p.feasible(self._choice())

    def branch(self, fixed: NDArray[np.bool_], best: Choice | None, budget: Budget) -> float:
        """Solve with integral x, `fixed` nodes held at their place in the last solution; the bound proved."""
        n = len(self.p.c)
        fixed_choice = np.repeat(fixed, self.p.k)
        low, high = (
            np.where(fixed_choice, self.x.round(), 0.0),
            np.where(fixed_choice, self.x.round(), np.isfinite(self.p.c) & (self.p.c <= self.ceiling)),
        )
        self.h.changeColsBounds(n, np.arange(n, dtype=np.int32), low, high)
        self.h.changeColsIntegrality(n, np.arange(n, dtype=np.int32), np.full(n, self.hp.HighsVarType.kInteger))
        if best is not None and not fixed.any():
            self._warm(best.x)
        self._run(budget)
        return float(self.h.getInfo().mip_dual_bound) * self.scale

    def _warm(self, x: Ints) -> None:
        p = self.p
        taken = p.w_at[:-1] + x[p.tail] * p.k[p.head] + x[p.head]
        columns = np.concatenate([p.c_at[:-1] + x, len(p.c) + taken])
        values = np.zeros(self.columns)
        values[columns] = 1.0
        self.h.setSolution(self.columns, np.arange(self.columns, dtype=np.int32), values)

    def _choice(self) -> Ints:
        x = self.x
        return np.array([x[a:b].argmax() for a, b in zip(self.p.c_at[:-1], self.p.c_at[1:], strict=True)], np.int64)

    def found(self) -> Choice | None:
        """The last solution, if HiGHS has one and it is integral. It may overrun times not yet added."""
        if len(self.x) == 0 or not self.integral_nodes().all():
            return None
        x = self._choice()
        return Choice(self.p.cost(x), x)


_OPTIONS = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_abs_gap": 0.0}


def _marginals(p: Problem) -> tuple[Ints, Ints, Floats, int]:
    """Rows that sum each node's x to one and each edge's y to the x at its ends, and how many they are."""
    nx, entries = len(p.c), np.arange(len(p.w))
    edge = np.repeat(np.arange(p.edges), np.diff(p.w_at))
    a, b = np.divmod(entries - p.w_at[edge], p.k[p.head][edge])
    from_tail = p.nodes + offsets(p.k[p.tail])
    from_head = from_tail[-1] + offsets(p.k[p.head])
    rows = [np.repeat(np.arange(p.nodes), p.k), from_tail[edge] + a, from_head[edge] + b]
    columns = [np.arange(nx), nx + entries, nx + entries]
    values = [np.ones(nx), np.ones(len(p.w)), np.ones(len(p.w))]
    for end, at in ((p.tail, from_tail), (p.head, from_head)):
        of = np.repeat(np.arange(p.edges), p.k[end])
        rows.append(np.arange(at[0], at[-1]))
        columns.append(p.c_at[end[of]] + rows[-1] - at[of])
        values.append(np.full(len(of), -1.0))
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(values), int(from_head[-1])
