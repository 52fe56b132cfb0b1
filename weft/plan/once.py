"""What is worked out once, by what it depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """Of an object with a dict `_known`."""

    _known: dict[Any, Any]

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]  # type: ignore[no-any-return]
