"""Work overlapped with the main stream: a second stream where the device has streams, the same one where it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Side:
    """A side line of work on a device. Marks order work between it and the main line."""

    def __init__(self, device: torch.device, *, urgent: bool = True) -> None:
        """`urgent`: what runs here takes the device before what the main line has waiting."""
        self._stream: Any = torch.cuda.Stream(device, priority=-1 if urgent else 0) if device.type == "cuda" else None

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """What is launched here runs on the side line."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def after_main(self) -> None:
        """The side line goes on only when the main line has come this far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def mark(self) -> Any:
        """A point on the side line, now."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def main_after(self, mark: Any = None) -> None:
        """The main line goes on only when the side line has passed `mark`, or all it was given."""
        if self._stream is None:
            return
        if mark is None:
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            torch.cuda.current_stream().wait_event(mark)
