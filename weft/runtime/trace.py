"""One run of a generated step with a clock between its statements, or with its memory counted there.

The text of the step gets a mark before every statement; the marked text runs in place of the plain one, once. A statement lasts
until the next begins. On a GPU marks are events on the stream, so statements are timed where they run, not where they are launched.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_STATEMENT = re.compile(r"    ([A-Za-z_][\w, ]*?),? = (?!inputs\[)(.*)")
_ON = re.compile(r"\bon\.(\w+)")


@dataclass(frozen=True)
class Statement:
    """`made` is the first name it binds; `axis` where it starts a collective; `waits` where it ends one."""

    made: str
    text: str
    axis: str = ""
    waits: bool = False


@dataclass
class Trace:
    """When each statement began and ended, in seconds from the first, and how many bytes were in use then where that was asked for."""

    statements: list[Statement]
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    bytes_in_use: list[int] = field(default_factory=list)


def marked(text: str) -> tuple[str, list[Statement]]:
    """The step's text with `_mark(k, locals())` before statement k and before the return."""
    lines, found = [], list[Statement]()
    for line in text.splitlines():
        match = _STATEMENT.fullmatch(line)
        if match is not None:
            lines.append(f"    _mark({len(found)}, locals())")
            found.append(_read(match[1].split(",")[0], match[2]))
        elif line.startswith("    return"):
            lines.append(f"    _mark({len(found)}, locals())")
        lines.append(line)
    return "\n".join(lines) + "\n", found


def _read(made: str, text: str) -> Statement:
    if text.startswith(f"{made}.wait()"):
        return Statement(made, text, waits=True)
    axis = _ON.search(text) if text.startswith("comm.") else None
    return Statement(made, text, axis[1] if axis else "")


def traced(step: Callable[..., Any], text: str, device: torch.device, *, memory: bool = False) -> tuple[Callable[..., Any], Trace]:
    """The step marked, to be called once, and what its marks will have noted. It runs node by node, however the step runs else."""
    new, statements = marked(text)
    trace, marks = Trace(statements), _LiveBytes(device) if memory else _clock(device)
    plain = getattr(step, "_plain", step)  # a step compiled in one piece has no statements; what it was compiled from has
    names = {**plain.__globals__, "_mark": marks.mark}
    exec(compile(new, "<traced step>", "exec"), names)  # the text is weft's own

    def call(inputs: Any) -> Any:
        out = names["step"](inputs)
        if memory:
            trace.bytes_in_use = marks.values()
        else:
            times = marks.values()
            trace.began, trace.ended = times[:-1], times[1:]
        return out

    return call, trace


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _HostClock:
    def __init__(self) -> None:
        self.times: list[float] = []

    def mark(self, _k: int, _values: Any) -> None:
        self.times.append(time.perf_counter())

    def values(self) -> list[float]:
        return [t - self.times[0] for t in self.times]


class _StreamClock:
    """Events on the stream; read when all is done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.events = device, list[Any]()

    def mark(self, _k: int, _values: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.events.append(event)

    def values(self) -> list[float]:
        torch.cuda.synchronize(self.device)
        return [self.events[0].elapsed_time(e) / 1e3 for e in self.events]


def _clock(device: torch.device) -> Any:
    return _StreamClock(device) if device.type == "cuda" else _HostClock()


class _LiveBytes:
    """Bytes in use: what the allocator counts where there is one, else the storage of everything the step can still reach."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, list[int]()

    def mark(self, _k: int, values: Any) -> None:
        if self.device.type == "cuda":
            self.bytes.append(torch.cuda.memory_allocated(self.device))
        else:
            self.bytes.append(sum(_stores(values).values()))

    def values(self) -> list[int]:
        return self.bytes


def live_bytes(values: Any, device: torch.device, without: Any = ()) -> int:
    """Bytes of the storage of all tensors in `values` without those in `without`; none where an allocator counts them already."""
    if device.type == "cuda":
        return 0
    less = _stores(without)
    return sum(size for at, size in _stores(values).items() if at not in less)


def _stores(values: Any) -> dict[int, int]:
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in _reached(values))}


def _reached(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a value: in containers, and in what a collective in flight will give."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _reached(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _reached(item)
    elif hasattr(value, "wait") and hasattr(value, "_finish"):
        finish = value._finish
        if isinstance(finish, functools.partial):
            yield from _reached((*finish.args, *finish.keywords.values()))
            finish = finish.func
        for cell in getattr(finish, "__closure__", None) or ():
            yield from _reached(cell.cell_contents)
