"""What a value asks of higher parts of weft, pictures for notebooks, runs and plans of programs: nothing here may import them, so they are
asked for through the root package, by name, when they are wanted."""

from __future__ import annotations

import sys
from typing import Any

ROOT = __name__.partition(".")[0]


def html_of(thing: Any) -> str:
    """The thing drawn as HTML, by `report.html` of the root package."""
    return str(sys.modules[ROOT].report.html(thing))


def part_of_root(name: str) -> Any:
    """A part of weft by its name."""
    return getattr(sys.modules[ROOT], name)


def run_by_root(*step: Any, **settings: Any) -> Any:
    """A training step, by `parallelize` of the root package."""
    return sys.modules[ROOT].parallelize(*step, **settings)
