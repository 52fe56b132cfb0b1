"""Choose how a matmul and its collective run, by timing every way on the real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.core.errors import WeftError
from weft.runtime.agree import from_first
from weft.runtime.machine import describe
from weft.tune.measure import Measured, measure
from weft.tune.store import Store


def tune_matmul(
    run: Callable[[Any], object],
    candidates: Sequence[Any],
    key: Sequence[str],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    again: bool = False,
    on_result: Callable[[str, float], None] = lambda name, ms: None,
) -> tuple[Any, Measured]:
    """The fastest of `candidates` for `run(candidate)`, the first of them being to leave it alone. All ranks call it."""
    device = device or torch.device("cpu")
    names = {str(way): way for way in candidates}
    store = Store("matmul", *key, describe(device), torch.__version__, writes=dist.get_rank(group) == 0)
    if again:
        store.forget()
    known = from_first(store.times, group)
    usable = {name: way for name, way in names.items() if name in known or _works(run, way)}

    def report(name: str, ms: float) -> None:
        store.put(name, ms)
        on_result(name, ms)

    calls = {name: (lambda way=way: run(way)) for name, way in usable.items()}
    result = measure(calls, str(candidates[0]), group=group, known=known, on_result=report, device=device)
    return names[result.choice], result


def _works(run: Callable[[Any], object], candidate: Any) -> bool:
    """A way that cannot be used here (no shared memory, no compiler) is left out on all ranks."""
    try:
        run(candidate)
    except WeftError:
        return False
    return True
