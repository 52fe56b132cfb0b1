"""Start a script on several ranks with torch's elastic agent, watch over them, and say once what went wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import RuntimeFault
from weft.runtime import faults
from weft.runtime.board import Board, open_for_launch


@dataclass(frozen=True)
class Ranks:
    """How many processes, and how they find each other when there are several hosts."""

    per_host: int
    hosts: int = 1
    host: int = 0
    meet_at: str = "localhost:0"

    @property
    def world(self) -> int:
        return self.per_host * self.hosts

    @property
    def here(self) -> range:
        """The ranks of this host: of the others a launcher sees nothing."""
        return range(self.host * self.per_host, (self.host + 1) * self.per_host)


class Stopped(Exception):
    """The launcher was told to end, and has ended its ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def launch(script: Sequence[str], ranks: Ranks) -> None:
    """Run `script` with its arguments on all ranks; return when all have exited with 0, else raise what happened."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    board, segment, key = open_for_launch(ranks.world)
    logs = tempfile.TemporaryDirectory(prefix="weft-run-", ignore_cleanup_errors=True)  # else torch's agent leaves a folder for each run
    with _environment(WEFT_BOARD=key), _quiet(), logs, Watch(board, ranks) as watch:
        try:
            elastic_launch(_config(ranks, logs.name), sys.executable)("-u", "-m", "weft.runtime.worker", *script)
        except ChildFailedError as failed:
            raise _what_happened(failed.failures, board, watch, ranks) from None
        except SignalException as stopped:
            raise Stopped(stopped.sigval) from None
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None
        finally:
            segment.seal()


def _config(ranks: Ranks, logs: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    known = {f.name for f in dataclasses.fields(LaunchConfig)}
    alone = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": f"weft-{os.getpid()}"}
    several = {"rdzv_backend": "static", "rdzv_endpoint": ranks.meet_at, "rdzv_configs": {"rank": ranks.host}, "run_id": "weft"}
    wanted = {
        "min_nodes": ranks.hosts, "max_nodes": ranks.hosts, "nproc_per_node": ranks.per_host, "max_restarts": 0,
        "monitor_interval": 0.1, "logs_specs": DefaultLogsSpecs(logs), "shutdown_timeout": 10, **(alone if ranks.hosts == 1 else several),
    }  # fmt: skip
    return LaunchConfig(**{k: v for k, v in wanted.items() if k in known})


def _what_happened(failures: Mapping[int, Any], board: Board, watch: Watch, ranks: Ranks) -> RuntimeFault:
    """The rank that failed first, and where it was. Ranks that only lost a peer, or that the agent stopped, are not it."""
    if watch.verdict is not None:
        return watch.verdict
    by_signal = {r: f for r, f in failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
    spoken = board.last_word()
    own = {r: f for r, f in failures.items() if f.exitcode not in (faults.LOST_A_PEER, -signal.SIGTERM)}
    culprits = by_signal or own or dict(failures)
    rank = min(culprits, key=lambda r: culprits[r].timestamp)
    how = signal.Signals(-culprits[rank].exitcode).name if culprits[rank].exitcode < 0 else f"status {culprits[rank].exitcode}"
    if not by_signal and not own and spoken:
        return RuntimeFault(spoken)
    if not by_signal and not own and ranks.hosts > 1:
        return _elsewhere(board, ranks)
    op = board.last_op(rank) if board.noted(rank)[0] else None
    fault = RuntimeFault(
        f"rank {rank} ended with {how} at {op}" if op and op != "start" else f"rank {rank} ended with {how}",
        needed="exit status 0 of every rank",
        found=f"rank {rank} (process {culprits[rank].pid})" + (f"; {_others(board, rank)}" if len(board.pages) > 1 else ""),
        try_=("see the error above" if spoken else f"see what rank {rank} printed above")
        if culprits[rank].exitcode > 0
        else "it was killed: look for a lack of memory, or who sent the signal",
    )
    fault.status = max(1, own[rank].exitcode) if rank in own else 1
    return fault


def _elsewhere(board: Board, ranks: Ranks) -> RuntimeFault:
    """What is known where every rank only lost a peer."""
    at = [op for op in map(board.last_op, ranks.here) if op and op != "start"]
    return RuntimeFault(
        f"a rank of another host was lost{f' at {at[0]}' if at else ''}",
        needed=f"exit status 0 of all {ranks.world} ranks",
        found=f"host {ranks.host} reported no error: {_named(ranks.here)} only lost the connection",
        try_="see what `weft run` says on the other hosts",
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}"


def _others(board: Board, rank: int) -> str:
    at = {r: board.last_op(r) for r in range(len(board.pages)) if r != rank and board.noted(r)[0]}
    named = [f"rank {r} at {op}" for r, op in at.items() if op and op != "start"]
    return "the others were stopped" + (f": {', '.join(named[:8])}" if named else "")


class Watch:
    """Looks at the board while ranks run: a rank of this host that others wait for, for too long, ends the run. Where all of this host
    wait, it is one of another: its launcher is given the time to say so."""

    def __init__(self, board: Board, ranks: Ranks) -> None:
        self.board, self.ranks = board, ranks
        self.verdict: RuntimeFault | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        limit = faults.timeout_s() + 5  # ranks that meet in memory notice first, and say more
        while not self._stop.wait(0.5):
            notes = {r: self.board.noted(r) for r in self.ranks.here}
            stuck = [r for r, note in notes.items() if note[0] and self.board.silent(r) > limit]
            if stuck:
                self._stop_all(notes, self._stuck(stuck, notes))
                return
            waited = {r: time.monotonic() - since for r, (pid, _, waits, since) in notes.items() if pid and waits}
            late = max(waited, key=waited.__getitem__) if waited else None
            if late is None or waited[late] <= limit:
                continue
            missing = self._missing(notes, notes[late][1])
            if missing or self.ranks.hosts > 1 and waited[late] > limit + 10:
                self._end(notes, missing, notes[late][1])
                return

    @staticmethod
    def _missing(notes: Mapping[int, Any], op: str | None) -> list[int]:
        return [r for r, note in notes.items() if note[1] != op or not note[2]]

    def _end(self, notes: Mapping[int, Any], missing: Sequence[int], op: str | None) -> None:
        verdict = RuntimeFault(
            f"{_named(missing) if missing else 'a rank of another host'} did not reach {op}",
            needed=f"every rank at {op} within {faults.timeout_s():g} s",
            found="; ".join(f"rank {r} at {notes[r][1] or 'nothing yet'}" for r in missing[:8])
            or f"all ranks of host {self.ranks.host} there",
            try_="look for a rank that branches differently or waits for input; WEFT_TIMEOUT sets the limit in seconds",
        )
        self._stop_all(notes, verdict)

    @staticmethod
    def _stuck(ranks: Sequence[int], notes: Mapping[int, Any]) -> RuntimeFault:
        """Of ranks in which no thread of Python's runs any more: a call of a library keeps the interpreter to itself."""
        return RuntimeFault(
            f"{_named(ranks)} no longer runs",
            needed=f"a sign of life within {faults.timeout_s():g} s",
            found="; ".join(f"rank {r} at {notes[r][1] or 'nothing yet'}, in a call of a library that does not return" for r in ranks[:8]),
            try_="look for a call that waits and keeps Python's lock; WEFT_TIMEOUT sets the limit in seconds",
        )

    def _stop_all(self, notes: Mapping[int, Any], verdict: RuntimeFault) -> None:
        self.verdict = verdict
        for pid, *_ in notes.values():
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for k, v in before.items():
            os.environ.pop(k, None) if v is None else os.environ.update({k: v})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The agent's own report of a failure repeats ours in thirty lines."""
    named = ("torch.distributed.elastic", "torch.distributed.run")
    known = [name for name in logging.root.manager.loggerDict if name.startswith(named)]  # some set a level of their own
    loggers = [logging.getLogger(name) for name in {*named, *known}]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
