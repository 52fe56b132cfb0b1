"""Choosing how to run a program on a cluster: cost, simulation, layouts, stages, search.

The package can be called: `weft.plan(model, ...)` is `weft.plan.ask.plan`, and `from weft.plan.spec import Spec` works as of any package.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Called(ModuleType):
    """A package that is also its main function."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        from weft.plan.ask import plan

        return plan(*args, **settings)


sys.modules[__name__].__class__ = _Called
