"""Over how many groups the messages between hosts are sent: as `WEFT_CHANNELS` says, else as many as carried them fastest.

One NCCL group over sockets leaves half of a link idle, on another network a second group only gets in the way of the first. So where a
program sends much to other hosts, a few messages of each kind it sends are timed over 1, 2 and 4 groups; the slowest rank
counts, one group wins ties, and what was found is kept for the next run on such hardware.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft.codegen.order import is_wire
from weft.core.errors import RuntimeFault
from weft.core.program import Program
from weft.ops.comm import all_gather, all_reduce, reduce_scatter
from weft.ops.registry import nbytes
from weft.runtime import comm
from weft.runtime.agree import from_all, from_first
from weft.runtime.intra_host import HostGroup
from weft.runtime.machine import describe
from weft.runtime.parallel_groups import ParallelGroups, parallel_groups
from weft.runtime.replay import is_accelerator
from weft.runtime.shm import host_identity
from weft.runtime.trace import synchronize
from weft.tune.measure import decide
from weft.tune.store import Store

COUNTS = (1, 2, 4)
MUCH = 4 << 20  # bytes along an axis from which a second group can matter
MESSAGE, BURST, ROUNDS, MARGIN = 8 << 20, 8, 3, 0.05  # bytes of a timed message, messages under way at once
KINDS = (all_reduce, reduce_scatter, all_gather)


def with_channels(program: Program, on: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The groups a program sends over, by axis, with others next to those that are better for it. All ranks call it together."""
    asked = _requested()
    out = dict(on)
    for axis, group in on.items():
        if group is None or isinstance(group, HostGroup) or comm.ranks_of(group) == 1:
            continue
        count = asked if isinstance(asked, int) else _quickest(_sends(program, axis), group, device, everywhere=asked == "measure")
        if count > 1:
            out[axis] = ParallelGroups(parallel_groups(group, count))
    return out


def _requested() -> int | str:
    """What the user says: a number of groups, or that they be measured on any device."""
    asked = os.environ.get("WEFT_CHANNELS", "")
    if asked in ("", "measure"):
        return asked
    if not asked.isdigit() or int(asked) < 1:
        raise RuntimeFault("WEFT_CHANNELS does not name a number of groups", needed="1 or more, or `measure`", found=asked, try_="unset WEFT_CHANNELS")
    return int(asked)


def _sends(program: Program, axis: str) -> tuple[str, ...]:
    """The kinds of messages a program sends along an axis, if it sends much."""
    wires = [n for n in program.nodes if is_wire(n) and n.attr("axis") == axis and n.op in KINDS]
    size = sum(nbytes(a.type) for n in wires for a in n.args)
    return tuple(k.name for k in KINDS if any(n.op is k for n in wires)) if size >= MUCH else ()


def _quickest(kinds: tuple[str, ...], group: Any, device: torch.device, everywhere: bool) -> int:
    """How many groups to send over: measured between hosts, on devices that compute while the host sends."""
    if not kinds or not (everywhere or is_accelerator(device)) or not _spans_hosts(group):
        return 1
    times = _known(Store("channels", describe(device), str(dist.get_world_size(group)), *kinds), kinds, group, device)
    return int(decide(times, "1", MARGIN))


def _spans_hosts(group: Any) -> bool:
    """Whether a group's ranks are on several hosts."""
    return len(set(from_all(host_identity(), group))) > 1


def _known(store: Store, kinds: Collection[str], group: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds by number of groups: as the group's first rank remembers them, else as measured now."""
    answer: dict[str, float] = from_first(store.times, group)
    if answer.keys() >= {str(c) for c in COUNTS}:
        return answer
    times = _measured(kinds, group, device)
    store.writes = dist.get_rank(group) == 0
    for name, ms in times.items():
        store.put(name, ms)
    return times


def _measured(kinds: Collection[str], group: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds of a burst of messages of each kind, over so many groups in turn, on the slowest rank."""
    bursts = {str(count): _burst(kinds, parallel_groups(group, count), device) for count in COUNTS}
    took: dict[str, list[float]] = {name: [] for name in bursts}
    for turn in range(ROUNDS + 1):  # the first one connects the groups
        for name, burst in bursts.items():
            _meet(group, device)
            start = time.perf_counter()
            burst()
            synchronize(device)
            took[name] += [1e3 * (time.perf_counter() - start)] if turn else []
    slowest = torch.tensor([statistics.median(t) for t in took.values()], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return dict(zip(took, slowest.tolist(), strict=True))


def _burst(kinds: Collection[str], groups: list[Any], device: torch.device) -> Callable[[], None]:
    n = dist.get_world_size(groups[0])
    count = MESSAGE // 4 // n * n
    start: dict[str, Callable[[torch.Tensor, Any], comm.InFlight]] = {
        "all_reduce": lambda x, g: comm.all_reduce(x, g),
        "reduce_scatter": lambda x, g: comm.reduce_scatter(x, g, span=(1, count, 1), mine=count // n, shape=(count // n,)),
        "all_gather": lambda x, g: comm.all_gather(x[: count // n], g, span=(1, count // n, 1), full=count, shape=(count,)),
    }
    message = torch.ones(count, device=device)

    def burst() -> None:
        for kind in kinds:
            for pending in [start[kind](message, groups[k % len(groups)]) for k in range(BURST)]:
                pending.wait()

    return burst


def _meet(group: Any, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    synchronize(device)
