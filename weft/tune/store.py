"""What was measured, kept on disk by what it depends on: one JSON file per key, so a search that was stopped goes on."""

from __future__ import annotations

import json
import os
from typing import Any

from weft.core import cache


class Store:
    """Times of candidates under one key, in milliseconds. Only rank 0 writes; every rank reads the same at the start."""

    def __init__(self, *key: str, writes: bool = True) -> None:
        self.path = cache.cache_dir() / f"tuned-{cache.digest(*key)}.json"
        self.key, self.writes = list(key), writes
        self.times: dict[str, float] = self._read()

    def _read(self) -> dict[str, float]:
        """What was kept, or nothing where the file is not there or not complete: then it is measured again."""
        try:
            times = json.loads(self.path.read_text())["times"]
            return {str(name): float(ms) for name, ms in times.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def put(self, candidate: str, ms: float, **more: Any) -> None:
        self.times[candidate] = ms
        if self.writes:
            draft = self.path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({"key": self.key, "times": self.times, **more}))
            os.replace(draft, self.path)

    def forget(self) -> None:
        self.times = {}
        if self.writes:
            self.path.unlink(missing_ok=True)
