"""Assignment problems: one strategy per node, costs on nodes and edges, limits on what is live at any time."""

from weft.plan.assignment.problem import Problem, assemble
from weft.plan.assignment.solve import Solution, solve

__all__ = ["Problem", "Solution", "assemble", "solve"]
