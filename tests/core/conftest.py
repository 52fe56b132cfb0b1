"""Hypothesis without a clock: cores are shared, and no test may fail for being slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("weft", deadline=None, derandomize=True)
settings.load_profile("weft")
