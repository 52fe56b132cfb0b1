"""What is said when ranks cannot go on together: which rank, at which op, and what to do."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.core.errors import RuntimeFault

WAITS = {
    "weft.runtime.messages": "the pipeline",
    "weft.runtime.agree": "the set-up",
    "weft.runtime.cuda": "the sharing of memory",
}  # for others
LOST_A_PEER = 75  # exit status of a rank that could not go on because of another one


class Outcome(enum.IntEnum):
    """How a wait ended; the numbers are those of weft_sync.h."""

    MET = 0
    DEAD = 1
    LATE = 2
    DISAGREES = 3
    REPORTED = 4


def timeout_s() -> float:
    """How long a rank may be waited for. A dead one is noticed at once."""
    return float(os.environ.get("WEFT_TIMEOUT", "120"))


def describe(peers: Any, outcome: Outcome, blamed: int, op: int) -> RuntimeFault:
    """The same message on every rank, from what all ranks can see."""
    rank, name = peers.global_ranks[blamed], peers.board.op_name(op)
    if outcome == Outcome.DEAD:
        return _dead(peers, blamed, rank, name)
    if outcome == Outcome.LATE:
        return RuntimeFault(
            f"rank {rank} did not reach {name}",
            needed=f"every rank to enter {name} within {peers.state.timeout_ms / 1000:g} s",
            found=f"rank {rank} is alive; the last op it entered is {peers.board.last_op(blamed) or 'none'}",
            try_="look for a rank that branches differently or waits for input; WEFT_TIMEOUT sets the limit in seconds",
        )
    return _odd_one_out(peers)


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a process group failed because a peer went away."""
    text = str(error).lower()
    return any(
        sign in text
        for sign in ("connection closed by peer", "connection reset", "broken pipe", "connection was closed", "timed out waiting")
    )


@contextmanager
def lost_connections(doing: str) -> Iterator[None]:
    """Inside, a message that another process will never send or take is reported as what it is, and not as the transport puts it."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise RuntimeFault(
            f"another rank has ended in {doing}",
            needed="every rank to go on until the step is done",
            found=str(error).splitlines()[0],
            try_="see what the other ranks say, the first to end above all: it was killed, ran out of memory, or raised",
        ) from error


def late(ranks: list[int], name: str) -> RuntimeFault:
    """A kernel gave up waiting for `ranks`."""
    return RuntimeFault(
        f"rank {', '.join(map(str, ranks)) or 'unknown'} did not reach {name}",
        needed=f"every rank to launch {name} within {timeout_s():g} s",
        found="the kernel stopped waiting, and its results are not to be used",
        try_="look for a rank that ended, branches differently or waits; WEFT_TIMEOUT sets the limit in seconds",
    )


def _odd_one_out(peers: Any) -> RuntimeFault:
    at = {r: peers.board.last_op(r) for r in peers.board.furthest()}
    usual = max(at.values(), key=list(at.values()).count)
    odd = [peers.global_ranks[r] for r, name in at.items() if name != usual]
    tied = 2 * len(odd) >= len(at)
    return RuntimeFault(
        f"ranks disagree at {usual}" if tied else f"rank {', '.join(map(str, odd))} disagrees at {usual}",
        needed="the same ops in the same order on every rank",
        found=", ".join(f"rank {peers.global_ranks[r]} is at {name}" for r, name in at.items()),
        try_="compare what these ranks run: a branch that depends on the rank, another model, or other shapes",
    )


def _dead(peers: Any, blamed: int, rank: int, name: str) -> RuntimeFault:
    return RuntimeFault(
        f"rank {rank} died before {name}",
        needed=f"every rank to enter {name}",
        found=f"process {peers.pid(blamed)} has ended; the last op it entered is {peers.board.last_op(blamed) or 'none'}",
        try_=f"see the output of rank {rank}: it was killed, ran out of memory, or raised",
    )
