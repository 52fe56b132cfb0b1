"""The cases that `weft bench wild` ships: {name: () -> (model, loss, batches) or with an optimizer and a hook after each step}."""

from __future__ import annotations

from bench._wild.modules import CASES as MODULES
from bench._wild.tools import Make

CASES: dict[str, Make] = {**MODULES}
