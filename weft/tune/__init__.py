"""Measured choices: candidates are timed on the real ranks, "leave it alone" among them, and the winner is remembered."""

from weft.tune.matmuls import tune_matmul
from weft.tune.measure import Measured, measure
from weft.tune.programs import tune_program
from weft.tune.store import Store

__all__ = ["Measured", "Store", "measure", "tune_matmul", "tune_program"]
