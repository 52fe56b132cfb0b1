"""weft plans computation and communication of distributed PyTorch programs together.

Public names are loaded when first used, so `import weft` costs next to nothing and never loads a solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "weft.core.errors": ("WeftError",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Load a public name from where it lives, once (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
