"""What the contest's problems need beyond the solver of plans: an exact solver, annealing, and branch and bound."""

from bench._assignment.solve import solve

__all__ = ["solve"]
