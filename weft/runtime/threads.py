"""Threads that move data beside a computation on the same cores should not break in on it for every packet."""

from __future__ import annotations

import functools
import os
from pathlib import Path

MOVERS = ("gloo_tcp_loop", "pt_gloo_runloop")


@functools.cache
def calm(ranks: int) -> int:
    """Let gloo's threads run when a core is free or at the next tick, not at each wake-up; how many were told. Their work then
    comes in larger pieces, and a product beside them keeps its caches. Once for each number of ranks: a new group has new threads."""
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    found = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() in MOVERS:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
                found += 1
        except OSError:  # the thread has ended, or may not be told
            continue
    return found
