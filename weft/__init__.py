"""weft plans computation and communication of distributed PyTorch programs together.

Public names are loaded when first used, so `import weft` costs next to nothing and never loads a solver.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "weft.core.errors": ("WeftError",),
    "weft.plan.plan": ("Plan",),
    "weft.plan.spec": ("Spec",),
    "weft.core.layout": ("Layout", "Mesh", "O", "P", "R", "S"),
    "weft.core.program": ("Program",),
    "weft.core.text": ("parse",),
    "weft.ops.registry": ("Linear", "define"),
    "weft.frontend.lang": (
        "abs",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "amax",
        "amin",
        "attention",
        "broadcast",
        "cast",
        "clamp",
        "concat",
        "cos",
        "cross_entropy",
        "dropout",
        "einsum",
        "embedding",
        "eq",
        "erf",
        "exp",
        "expand",
        "floor",
        "gelu",
        "isfinite",
        "layer_norm",
        "log",
        "log_softmax",
        "logical_and",
        "logical_not",
        "logical_or",
        "matmul",
        "maximum",
        "mean",
        "minimum",
        "narrow",
        "ne",
        "norm",
        "pad",
        "permute",
        "reduce",
        "reduce_scatter",
        "relu",
        "reshape",
        "reshard",
        "rms_norm",
        "rsqrt",
        "send",
        "settle",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "slice",
        "softmax",
        "sqrt",
        "square",
        "sum",
        "tanh",
        "transpose",
        "where",
    ),
    "weft.autodiff": ("grad", "vjp"),
    "weft.frontend.capture": ("capture",),
    "weft.api.module": ("parallelize_module",),
    "weft.api.parallelize": ("parallelize",),
    "weft.api.compile": ("compile",),
    "weft.schedule": (
        "bucket",
        "by_hierarchy",
        "cut",
        "delay",
        "drop_dead",
        "fuse",
        "hoist",
        "merge",
        "overlap",
        "shard_state",
        "sink",
        "split",
        "turn",
        "undo",
    ),
    "weft.frontend.trace": ("bf16", "f32", "f64", "i64", "tensor", "trace"),
}
if TYPE_CHECKING:
    from weft.plan.ask import plan as plan  # the package of that name, which can be called

_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Load a public name from its home, or a part of weft (`weft.optim`), when first asked for (PEP 562)."""
    if name in _HOME:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
    if not name.startswith("_") and find_spec(f"weft.{name}"):
        return import_module(f"weft.{name}")
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
