"""`weft calibrate`: measure this machine's kernels and collectives, and write them as a profile for `--cluster`."""

from __future__ import annotations

import typer

from weft.cli.output import console, emit, results, writable

MOST_RANKS = 1024


def calibrate(
    out: str = typer.Option("profile.json", "-o", "--out", help="Where to write the profile."),
    name: str = typer.Option("", "--name", help="Name of the device.", show_default="its own"),
    device: str = typer.Option("", "--device", help="Device to measure.", show_default="the accelerator if there is one, else the CPU"),
    ranks: str = typer.Option("", "--ranks", help="Group sizes to time collectives with, such as 2,4."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Time matmuls, attention, memory, kernel launches and collectives here, and write them as a profile for --cluster."""
    import json as text
    import time
    from pathlib import Path

    from rich.progress import Progress

    from weft.api.local_calls import local_calls
    from weft.cluster.calibrate import calibrate as measure
    from weft.cluster.profile import dump
    from weft.runtime import memory

    writable(out)
    counts = _counts(ranks)
    memory.keep()  # as steps do: else new results are timed with the making of their pages
    began = time.perf_counter()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        found = measure(device, name, counts, lambda what, n, of: bar.update(task, description=what, completed=n, total=of), local_calls)
    Path(out).write_text(text.dumps(dump(found), indent=1) + "\n")
    for key, constant in found.constants():
        if not constant.origin.startswith(("datasheet", "table", "assumed")):
            results().print(f"  {key:28} {constant.value:<12.4g} {constant.origin}", markup=False, highlight=False)
    console.print(f"written to {out}; use it as --cluster {out}", markup=False)
    if json:
        taken = time.perf_counter() - began
        emit({"profile": out, "name": found.name, "constants": {k: c.value for k, c in found.constants()}, "seconds": taken})


def _counts(text: str) -> list[int]:
    """Numbers of processes, as in 2,4."""
    from weft.core.errors import ClusterError

    found = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and len(part) < 6 and 1 < int(part) <= MOST_RANKS for part in found):
        needed = f"numbers of 2 to {MOST_RANKS} with commas between them"
        raise ClusterError(f"cannot time collectives between {text!r} processes", needed=needed, found=text, try_="--ranks 2,4")
    return [int(part) for part in found]
