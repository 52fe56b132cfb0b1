"""Numbers that the host works out for a kernel, as tensors would be: what overflows is infinite, what is undefined is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def host_function(text: str) -> Callable[..., tuple[float, ...]]:
    """The lambda that codegen wrote, on numbers or lists of them by name."""
    run = eval(text, {"np": np, "erf": math.erf})  # the text is weft's own

    def call(**given: Any) -> tuple[float, ...]:
        with np.errstate(all="ignore"):
            return tuple(float(x) for x in run(**{name: _exact(x) for name, x in given.items()}))

    return call


def _exact(x: Any) -> Any:
    return [np.float64(y) for y in x] if isinstance(x, (list, tuple)) else np.float64(x)
