"""weft finds the fastest way to train a PyTorch model on a cluster, runs it, and checks that it equals one device.

Public names are loaded when first used, so `import weft` costs next to nothing and never loads a solver. The language of programs is
`weft.lang`, the transformations of programs are `weft.schedule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"

# What type checkers see; the same names are loaded on first use below.
if TYPE_CHECKING:
    from weft import dynamic as dynamic
    from weft import interp as interp
    from weft import lang as lang
    from weft import nn as nn
    from weft import optim as optim
    from weft import schedule as schedule
    from weft.api.compile import compile as compile
    from weft.api.options import Options as Options
    from weft.api.parallelize import parallelize as parallelize
    from weft.api.shard import shard as shard
    from weft.core.errors import WeftError as WeftError
    from weft.core.layout import Mesh as Mesh
    from weft.core.layout import O as O
    from weft.core.layout import P as P
    from weft.core.layout import R as R
    from weft.core.layout import S as S
    from weft.core.program import Program as Program
    from weft.frontend.capture import capture as capture
    from weft.frontend.trace import trace as trace
    from weft.plan.ask import plan as plan
    from weft.plan.fits import fits as fits
    from weft.plan.plan import Plan as Plan
    from weft.plan.spec import Spec as Spec

_PUBLIC = {
    "weft.plan.plan": ("Plan",),
    "weft.plan.spec": ("Spec",),
    "weft.plan.fits": ("fits",),
    "weft.api.parallelize": ("parallelize",),
    "weft.api.options": ("Options",),
    "weft.api.shard": ("shard",),
    "weft.api.compile": ("compile",),
    "weft.frontend.capture": ("capture",),
    "weft.frontend.trace": ("trace",),
    "weft.core.program": ("Program",),
    "weft.core.layout": ("Mesh", "R", "S", "P", "O"),
    "weft.core.errors": ("WeftError",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
_RENAMED = {"parallelize_module": "weft.api.shard"}  # these warn when called
_MOVED = ("weft.lang", "weft.schedule")  # where names went that were found here up to 0.1

__all__ = ["__version__", "lang", "plan", "schedule", *_HOME]  # noqa: PLE0604

if not TYPE_CHECKING:  # a type checker that sees this takes every misspelt name for Any

    def __getattr__(name):
        """Load a public name, or a part of weft (`weft.optim`), when first asked for (PEP 562)."""
        from importlib import import_module
        from importlib.util import find_spec

        if name in _HOME:
            value = globals()[name] = getattr(import_module(_HOME[name]), name)
            return value
        if name in _RENAMED:
            return getattr(import_module(_RENAMED[name]), name)
        if name.startswith("_"):
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        if find_spec(f"weft.{name}"):
            return import_module(f"weft.{name}")
        for home in map(import_module, _MOVED):
            if name in home.__all__:
                import warnings

                warnings.warn(f"weft.{name} is now {home.__name__}.{name}", DeprecationWarning, stacklevel=2)
                return getattr(home, name)
        raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
