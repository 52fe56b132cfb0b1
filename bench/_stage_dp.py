"""Stages over submeshes, as Alpa states the problem: consecutive layers to a stage, a submesh and a configuration to each.

With t(a, b, m, c) the cost of layers a..b on submesh m under configuration c, and F(s, a, d; T) the least sum of costs of s stages that
hold layers a.. on exactly d devices, none of them above T,

    F(s, a, d; T) = min over b, m, c of t(a, b, m, c) + F(s - 1, b + 1, d - |m|; T),       t <= T, at least s - 1 successors allowed,

training costs min over T and s of F + (B - 1) * the largest cost; inference s times the least largest cost, over s.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
Stage = list[Any]  # [[first, last), submesh, configuration]


def read(row: Mapping[str, Any]) -> Problem | str:
    """The problem a row states; a text where that is not understood."""
    shape = (row["layers"], row["layers"], len(row["submesh"]), row["configs"])
    given = row.get("cost", row.get("cost_source"))
    cost = _evaluated(given) if isinstance(given, str) else np.asarray(given, float) if given is not None else None
    if cost is None or cost.shape != shape:
        return str(given)[:80]
    room = row.get("max_n_succ", math.inf)
    room = _evaluated(room) if isinstance(room, str) else np.asarray(room, float)
    if room is None:
        return str(row["max_n_succ"])[:80]
    return Problem(cost, np.broadcast_to(room, shape), [math.prod(m) for m in row["submesh"]], row["hosts"] * row["dev"], row["B"])


def _evaluated(text: str) -> Table | None:
    """A formula of numpy's generators: `np.random.seed(42); np.random.rand(8,8,4,5)`, with numbers and + - * / ** around calls."""
    value: Any = None
    try:
        for line in ast.parse(text.strip()).body:
            value = _value(line.value) if isinstance(line, ast.Expr) else _refuse(line)
    except (SyntaxError, ValueError, TypeError):
        return None
    return None if value is None else np.asarray(value, float)


CALLS = {
    "np.random.seed": np.random.seed, "np.random.rand": np.random.rand, "np.random.random": np.random.random, "np.random.randn": np.random.randn,
    "np.random.randint": np.random.randint, "np.random.uniform": np.random.uniform, "np.full": np.full, "np.ones": np.ones, "np.zeros": np.zeros,
    "np.arange": np.arange,
}  # fmt: skip
SIGNS = {ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide, ast.Pow: np.power}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [_value(x) for x in items]
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return -_value(x)
        case ast.BinOp(left=a, op=sign, right=b) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(a), _value(b))
        case ast.Call(func=f, args=args, keywords=named) if (name := ast.unparse(f).replace("numpy.", "np.")) in CALLS:
            return CALLS[name](*(_value(a) for a in args), **{str(k.arg): _value(k.value) for k in named})
    return _refuse(node)


def _refuse(node: ast.AST) -> Any:
    raise ValueError(ast.unparse(node))


@dataclass(frozen=True)
class Problem:
    cost: Table
    room: Table  # how many stages may follow
    sizes: list[int]
    devices: int
    rounds: int

    def check(self, row: Mapping[str, Any]) -> tuple[Any, bool]:
        cost, stages = self.training()
        found: dict[str, Any] = {"training_cost": cost, "solution": stages}
        good = [math.isclose(cost, row["training_cost"], rel_tol=1e-5) or cost < row["training_cost"]] if "training_cost" in row else []
        if "solution" in row:  # the stages told cost what is told, and ours no more
            good.append(cost <= self.total(row["solution"]) * (1 + 1e-6))
        if "inference_cost" in row:
            found["inference_cost"] = self.inference()
            good.append(found["inference_cost"] <= row["inference_cost"] * (1 + 1e-5))
        return found, all(good)

    def total(self, stages: list[Stage]) -> float:
        costs = [float(self.cost[a, b - 1, m, c]) for (a, b), m, c in stages]
        return sum(costs) + (self.rounds - 1) * max(costs)

    def training(self) -> tuple[float, list[Stage]]:
        best, found = math.inf, list[Stage]()
        usable = np.unique(self.cost[np.isfinite(self.cost)])
        for most in usable:
            if most * self.rounds >= best:
                break
            stages = self._cheapest(float(most))
            if stages and self.total(stages) < best:
                best, found = self.total(stages), stages
        return best, found

    def _cheapest(self, most: float) -> list[Stage]:
        """The stages of least sum, none above `most`."""
        layers = len(self.cost)
        sums = {(0, layers, 0): (0.0, list[Stage]())}
        best = (math.inf, list[Stage]())
        for s in range(1, layers + 1):
            row: dict[tuple[int, int, int], tuple[float, list[Stage]]] = {}
            for (_, end, used), (total, after) in sums.items():
                for a in range(end):
                    for m, size in enumerate(self.sizes):
                        if used + size > self.devices:
                            continue
                        here = np.where(
                            (self.room[a, end - 1, m] >= s - 1) & (self.cost[a, end - 1, m] <= most), self.cost[a, end - 1, m], np.inf
                        )
                        c = int(here.argmin())
                        key = s, a, used + size
                        if here[c] + total < row.get(key, (math.inf,))[0]:
                            row[key] = float(here[c]) + total, [[[a, end], m, c], *after]
            sums = row
            best = min(best, row.get((s, 0, self.devices), best), key=lambda x: x[0])
        return best[1]

    def inference(self) -> float:
        layers = len(self.cost)
        cheap = self.cost.min(axis=3)
        most, best = {(0, 0): 0.0}, math.inf
        for s in range(1, layers + 1):
            row: dict[tuple[int, int], float] = {}
            for (start, used), worst in most.items():
                for b in range(start, layers):
                    for m, size in enumerate(self.sizes):
                        if used + size <= self.devices:
                            key, here = (b + 1, used + size), max(worst, float(cheap[start, b, m]))
                            row[key] = min(row.get(key, math.inf), here)
            most = row
            best = min(best, s * row.get((layers, self.devices), math.inf))
        return best
