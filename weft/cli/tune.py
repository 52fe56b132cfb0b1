"""`weft tune PROGRAM`: the fastest schedule of a program, found by running candidates on real ranks."""

from __future__ import annotations

from typing import Any

import typer

from weft.cli.output import console, emit, read_text, results


def tune(
    program: str = typer.Argument(..., help="An example's name (see `weft show`), or a file of program text."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    limit: int = typer.Option(12, "--limit", min=1, help="Candidates to measure, in addition to the unscheduled program."),
    again: bool = typer.Option(False, "--again", help="Discard earlier measurements of this program."),
    show: bool = typer.Option(False, "--show", help="Print the chosen program."),
) -> None:
    """Measure schedules of a program on real ranks and keep the fastest. An interrupted search resumes."""

    report = search(read(program), limit, again)
    table(report)
    if show:
        results().print(report["program"], markup=False, highlight=False)
    if json:
        emit(
            {
                "program": program,
                "choice": report["choice"],
                "gain": report["gain"],
                "times_ms": report["times"],
                "history": report["history"],
            }
        )


def read(name: str) -> Any:
    """A program by example name or from a file."""
    from pathlib import Path

    from weft.core.text import parse
    from weft.programs.catalog import example

    return parse(read_text(name, "a file of program text")) if Path(name).exists() else example(name).make()


def search(program: Any, limit: int, again: bool) -> dict[str, Any]:
    """Run the search on ranks of its own, with a bar for the candidates still to come."""
    import contextlib
    import json
    import os
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from weft.core.errors import RuntimeFault

    worker = Path(__file__).with_name("tune_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder, "program"), Path(folder, "report")
        text.write_text(program.text)
        command = [
            sys.executable,
            "-m",
            "weft",
            "run",
            "-n",
            str(program.mesh.ranks),
            str(worker),
            str(text),
            str(out),
            str(limit),
            str(int(again)),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as bar:
            task = bar.add_task("starting ranks", total=limit + 1)
            ranks = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            assert ranks.stdout is not None
            for line in ranks.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    message = json.loads(line)
                    bar.update(task, advance=1, total=message["of"], description=f"{message['tried']}: {message['ms']:.3f} ms")
            _, errors = ranks.communicate()
        if ranks.returncode or not out.exists():
            raise RuntimeFault(
                f"tuning {program.name} failed on the ranks", needed="exit status 0 of every rank", found=errors.strip()[-2000:]
            )
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def table(report: dict[str, Any]) -> None:
    from rich.table import Table

    shown = Table("schedule", "ms", "speedup", title="schedules measured")
    base = report["times"]["as it is"]
    for name, ms in sorted(report["times"].items(), key=lambda item: item[1]):
        mark = "[bold green]" if name == report["choice"] else ""
        shown.add_row(f"{mark}{name}", f"{ms:.3f}", f"{base / ms:.2f}x")
    results().print(shown)
