"""Programs are many small objects that live long: looking for cycles among them often takes a fifth of the time, and finds none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 200_000  # objects made before one looks for cycles again
COMMAND = 5_000_000  # of a command, which ends soon: most make fewer


@contextmanager
def seldom_collected(after: int = SELDOM) -> Iterator[None]:
    """Inside, garbage is collected seldom, if at all; afterwards as before."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], after), 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
