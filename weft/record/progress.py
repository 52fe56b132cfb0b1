"""What training prints: speed, MFU, predicted against measured, and why they differ."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

from weft.cost.simulate import FUSED
from weft.cost.timeline import Seen
from weft.record.run import Run

APART = 0.15  # beyond this, a difference between prediction and measurement is reported
EVERY = 10.0  # seconds between two lines


def line(run: Run) -> str:
    """One line on the run so far."""
    if not run.step_ms:
        return "no step yet"
    words = [f"step {len(run.steps['ms'])}", f"{time_of(run.step_ms)}", f"{run.per_second:,.0f} {run.unit}/s"]
    words += [f"MFU {run.mfu:.1%}"] if run.mfu is not None else []
    if run.predicted is not None:
        words.append(f"predicted {time_of(run.predicted.step_ms)} ({_off(run.step_ms, run.predicted.step_ms)})")
    words += [_memory(run.predicted, run.measured)] if run.measured is not None and run.measured.memory_gb else []
    return ", ".join(words)


def _memory(predicted: Seen | None, measured: Seen) -> str:
    memory_text = f"memory {size_of(measured.memory_gb)}"
    return memory_text if predicted is None else f"{memory_text}, predicted {size_of(predicted.memory_gb)} ({_off(measured.memory_gb, predicted.memory_gb)})"


def time_of(ms: float) -> str:
    return f"{ms / 1e3:,.2f} s" if ms >= 1e4 else f"{ms:,.1f} ms"


def size_of(gb: float) -> str:
    return f"{gb:,.1f} GB" if gb >= 1 else f"{gb * 1e3:,.1f} MB"


def _off(measured: float, predicted: float) -> str:
    return f"{measured / predicted - 1:+.0%}" if predicted else "nothing was predicted"


# --- why


def partings(run: Run) -> Iterator[str]:
    """Where measured and predicted differ by more than 15%, with what the traced step shows."""
    p, m = run.predicted, run.measured
    if p is not None and p.step_ms and run.step_ms and abs(run.step_ms / p.step_ms - 1) > APART:
        how = "longer" if run.step_ms > p.step_ms else "less"
        yield f"a step takes {time_of(run.step_ms)}, {abs(run.step_ms / p.step_ms - 1):.0%} {how} than predicted: {why(run)}"
    if p is not None and m is not None and p.memory_gb and abs(m.memory_gb / p.memory_gb - 1) > APART:
        how = "more" if m.memory_gb > p.memory_gb else "less"
        yield f"memory is {size_of(m.memory_gb)}, {abs(m.memory_gb / p.memory_gb - 1):.0%} {how} than the {size_of(p.memory_gb)} predicted"
    if run.wait_ms > APART * run.step_ms > 0:
        yield f"training waits for input: {time_of(run.wait_ms)} between steps of {time_of(run.step_ms)}"


def why(run: Run) -> str:
    """What takes longer, or less long, from the traced step: the causes that explain most of the difference."""
    if run.predicted is None or run.measured is None or not run.measured.causes_ms:
        return "no step was traced yet"
    usual = run.step_ms / run.measured.step_ms  # a traced step is slower than others
    changes = parted(run.predicted.causes_ms, {k: v * usual for k, v in run.measured.causes_ms.items()})
    difference = run.step_ms - run.predicted.step_ms
    causes = [f"{_means(k)} {_how(k, d)} ({d:+,.1f} ms)" for k, d in changes if d * difference > 0.05 * difference * difference]
    return ", ".join(causes[:3]) or "the traced step shows no one cause; other work on this machine may slow it"


def parted(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[tuple[str, float]]:
    """Milliseconds measured beyond those predicted, by cause, the largest change first."""
    keys = {**predicted, **measured}
    return sorted(((k, measured.get(k, 0.0) - predicted.get(k, 0.0)) for k in keys), key=lambda item: -abs(item[1]))


def _how(cause: str, change: float) -> str:
    return ("longer" if change > 0 else "shorter") if cause in ("bubble", "peers") else ("slower" if change > 0 else "faster")


def _means(cause: str) -> str:
    known = {
        "compute": "compute is", FUSED: "the fused update with its communication is", "host": "launching kernels is",
        "forward": "forward is", "backward": "backward is", "weight": "the pass of weight gradients is", "optimizer": "the update is",
        "bubble": "the pipeline bubble is", "peers": "waiting for other ranks is",
    }  # fmt: skip
    return known.get(cause, f"communication along {cause} is")


class Printer:
    """Says a line now and then, and each parting once; every line is one write."""

    def __init__(self, stream: TextIO | None = None, every: float = EVERY) -> None:
        self.stream, self.every, self.last = stream, every, 0.0
        self.printed: set[str] = set()

    def due(self) -> bool:
        return not self.last or time.monotonic() - self.last >= self.every

    def report(self, run: Run) -> None:
        self.last = time.monotonic()
        self._write(line(run))
        rules = [f"rules by which the step is rewritten: {', '.join(run.rules)}"] if run.rules else []
        for text in (*rules, *partings(run)):
            if (kind := text.split(" ")[0]) not in self.printed:
                self.printed.add(kind)
                self._write(text)

    def _write(self, text: str) -> None:
        stream = self.stream or sys.stderr
        stream.write(f"weft: {text}\n")
        stream.flush()
