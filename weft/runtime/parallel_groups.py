"""Groups of the same ranks next to each other: between hosts one may carry less than the link does.

A message goes over the group that has carried least since the step began. What it has carried follows from the messages alone, so ranks
that start the same messages in the same order take the same groups, and every group sees them in the same order on all its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_others: dict[Any, list[Any]] = {}  # of a group, those next to it that there are already


class ParallelGroups:
    """A process group and others of the same ranks."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups = tuple(groups)
        self.group = self.groups[0]
        self.restart()

    def restart(self) -> None:
        """Forget what was carried: at the start of a step, so that all its runs send the same, however one ran before."""
        self._carried = [0] * len(self.groups)

    def take(self, sent: int) -> Any:
        """The group for a message of so many bytes."""
        channel = self._carried.index(min(self._carried))
        self._carried[channel] += sent
        return self.groups[channel]


def parallel_groups(group: Any, count: int) -> list[Any]:
    """A group and others of its ranks, so many in all; those it lacks are made. All its ranks call it.

    Once made they stay: torch would give a new one the name, and the old addresses, of one that was taken apart.
    """
    ranks, others = dist.get_process_group_ranks(group), _others.setdefault(group, [])
    while len(others) < count - 1:
        others.append(dist.new_group(ranks, use_local_synchronization=True))
    return [group, *others[: count - 1]]
