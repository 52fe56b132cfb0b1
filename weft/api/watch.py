"""A watchdog for hangs: within a bounded time it says which rank did not come, and to which op, and ends the run.

One thread per process looks at where the main thread is, and whether the device is done with the step it was given. A rank that has
waited at one line of its program for too long asks the others, through the store the processes met at, where they are. `WEFT_TIMEOUT`
sets the limit in seconds; 0 turns it off. That the thread itself can run is reported to the launcher, if there is one.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from weft.core.errors import RuntimeFault
from weft.runtime import faults
from weft.runtime.board import world_board
from weft.runtime.replay import is_accelerator, reached

SLOWER = 5  # times the longest step so far that a device may take for one
ALARM, VERDICT = "weft.watch.alarm", "weft.watch.verdict"


@dataclass(frozen=True)
class Place:
    """Where a process is: a line of a program of weft's, or of the user's code; since how many seconds."""

    inside: str  # the program; empty for the user's code
    line: str
    idle: float = 0.0

    def __str__(self) -> str:
        return f"`{self.line}` of {self.inside}" if self.inside else self.line


def place_of(frame: FrameType | None) -> Place:
    """The innermost line of a program, else where weft waits for other ranks, else the innermost line of the user's own code."""
    user, waits = "", None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<weft "):
            lines = str(frame.f_globals.get("__source__", "")).splitlines()
            line = lines[frame.f_lineno - 1].strip() if frame.f_lineno <= len(lines) else f"line {frame.f_lineno}"
            return Place(name[6:-1], line)
        home = str(frame.f_globals.get("__name__", ""))
        if waits is None and home in faults.WAITS:
            places = ", ".join(f"{k} {frame.f_locals[k]}" for k in ("source", "key", "to", "what") if k in frame.f_locals)
            waits = Place(faults.WAITS[home], f"{frame.f_code.co_name}: {places}" if places else frame.f_code.co_name)
        if not user and not home.startswith(("weft.", "torch.", "threading")):
            user = f"{os.path.basename(name)}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return waits or Place("", user or "no code of its own")


class Watchdog:
    """Looks at the main thread of this process, and speaks with the watchdogs of the others."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self.pause = min(5.0, timeout / 4)
        self._main = threading.main_thread().ident
        self._seen, self._seen_calls, self._since = Place("", ""), _calls, time.monotonic()
        self._given: tuple[Callable[[], bool], str, float] | None = (
            None  # whether the device is done with a step, the step, when it was given
        )
        self._longest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weft-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Leave the store before the interpreter ends: a thread that comes back from C++ later would abort the process."""
        self._stop.set()
        self._thread.join(2 * self.pause)

    def where(self) -> Place:
        """Where the main thread is, and since when it has not moved."""
        now = place_of(sys._current_frames().get(self._main or 0))
        given = self._given
        if not now.inside and given is not None and time.monotonic() - given[2] > SLOWER * self._longest and not self._done():
            return Place("the device", given[1], time.monotonic() - given[2])
        if (now.inside, now.line, _calls) != (self._seen.inside, self._seen.line, self._seen_calls):
            self._seen, self._seen_calls, self._since = now, _calls, time.monotonic()
        return Place(now.inside, now.line, time.monotonic() - self._since)

    def launched(self, step: str, device: torch.device) -> None:
        """The device was given a step. Only the oldest it is not done with is watched."""
        if self._done():
            self._given = (reached(device), step, time.monotonic())

    def _done(self) -> bool:
        if self._given is not None and self._given[0]():
            self._longest = max(self._longest, time.monotonic() - self._given[2])
            self._given = None
        return self._given is None

    def _watch(self) -> None:
        board = world_board()
        try:
            while not self._stop.wait(self.pause):
                if board is not None:
                    board.beat()
                self._look()
        except (RuntimeError, OSError):  # the store went away with the process that kept it: the run is over
            return

    def _look(self) -> None:
        here = self.where()
        if self.store.check([VERDICT]):
            self._end(self.store.get(VERDICT).decode(), speak=False)
        if self.store.check([ALARM]):
            self._answer(here)
            time.sleep(2 * self.pause)  # for the one who asked to judge
            if self.store.check([VERDICT]):
                self._end(self.store.get(VERDICT).decode(), speak=False)
        elif here.inside and here.idle > self.timeout and int(self.store.add(ALARM, 1)) == 1:
            self._answer(here)
            self._decide()

    def _answer(self, here: Place) -> None:
        self.store.set(f"{ALARM}.{self.rank}", json.dumps(asdict(here)))

    def _decide(self) -> None:
        """Ask all, wait for their answers, and end the run, or call it off if somebody is still at work."""
        end = time.monotonic() + 3 * self.pause
        keys = [f"{ALARM}.{r}" for r in range(self.world)]
        while time.monotonic() < end and not self.store.check(keys):
            time.sleep(self.pause / 10)
        places = {r: Place(**json.loads(self.store.get(k))) for r, k in enumerate(keys) if self.store.check([k])}
        fault = verdict(places, self.world, self.timeout)
        if fault is None:
            for key in (ALARM, *keys):
                self.store.delete_key(key)
            self._since = time.monotonic()
            return
        self.store.set(VERDICT, str(fault))
        self._end(str(fault), speak=True)

    def _end(self, text: str, *, speak: bool) -> None:
        """The main thread waits in a library and cannot be told: the process ends, and torchrun starts all again or gives up."""
        board = world_board()
        if board is not None:
            board.post_final_message(text)
        elif speak:
            os.write(2, f"weft: {text}\n".encode())
            time.sleep(self.pause)  # a store kept by this process is read by the others first
        sys.stdout.flush()
        os._exit(faults.LOST_A_PEER)


def verdict(places: Mapping[int, Place], world: int, timeout: float) -> RuntimeFault | None:
    """Who is missing, from where every rank is; None while somebody is at work."""
    silent = [r for r in range(world) if r not in places]
    waiting = {r: p for r, p in places.items() if p.inside and p.idle > timeout / 2}
    moving = [r for r, p in places.items() if p.inside and r not in waiting]
    late = silent + [r for r, p in places.items() if not p.inside]
    if moving or not waiting:
        return None
    at = max(waiting.values(), key=lambda p: sum(q.line == p.line for q in waiting.values()))
    late += [r for r, p in waiting.items() if p.line != at.line]
    found = [f"rank {r} {'does not answer: it has ended or was stopped' if r in silent else f'is at {places[r]}'}" for r in sorted(late)]
    return RuntimeFault(
        f"rank {', '.join(map(str, sorted(late)))} did not reach {at}" if late else f"no rank goes on from {at}",
        needed=f"every rank there within {timeout:g} s",
        found="; ".join(found[:8]) or "every rank waits there: the network between them may be gone",
        try_="look for a rank that branches differently or waits for input; WEFT_TIMEOUT sets the limit in seconds",
    )


_watchdog: Watchdog | None = None
_calls = 0  # of programs so far: one that is mostly at one of its lines is found there again and again, and yet goes on


def called() -> None:
    """A program is called."""
    global _calls
    _calls += 1


def launched(step: str, device: torch.device) -> None:
    """Watch over a step that the device was given."""
    if _watchdog is not None and is_accelerator(device):
        _watchdog.launched(step, device)


def watch() -> Watchdog | None:
    """This process's watchdog, started where several processes run and `WEFT_TIMEOUT` is not 0."""
    global _watchdog
    timeout = faults.timeout_s()
    if _watchdog is None and timeout > 0 and dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store().clone()
        _watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), timeout)
    return _watchdog
