"""Pictures for notebooks. What draws them is the highest part of weft and nothing here may import it: it is asked for through
the root package, by name, when a notebook wants a picture."""

from __future__ import annotations

import sys
from typing import Any

ROOT = __name__.partition(".")[0]


def html_of(thing: Any) -> str:
    """The thing drawn as HTML, by `report.html` of the root package."""
    return str(sys.modules[ROOT].report.html(thing))
