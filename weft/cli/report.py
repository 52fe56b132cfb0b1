"""`weft report PLAN_OR_RUN`: one self-contained page of a plan or of a training run, and a trace for Perfetto next to it."""

from __future__ import annotations

import time

import typer

from weft.cli.output import console, emit, writable


def report(
    source: str = typer.Argument(..., help="A plan saved by `weft plan --out`, or the folder of a run (`record=` of parallelize)."),
    other: str = typer.Argument("", help="Another plan or run, to compare side by side."),
    out: str = typer.Option("", "-o", "--out", help="Where to write the page.", show_default="next to the source"),
    explain: bool = typer.Option(True, help="Include the runner-up of each decision; takes as long as planning."),
    run_model: bool = typer.Option(
        False, "--run-model", help="Run the Python file named by the plan as its model. Only for plans you trust."
    ),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Write a self-contained HTML report of a plan or a run: decisions, layouts, timeline, memory, alternatives."""
    from weft.report import report as write

    began = time.perf_counter()
    writable(out, make=True)
    with console.status("reading") as status:
        page, trace = write(source, out, explain, lambda text: status.update(f"drawing {text}"), run_model, other)
    console.print(
        f"the page is at {page}, {page.stat().st_size / 1e3:,.0f} kB; a trace for Perfetto at {trace}", markup=False, highlight=False
    )
    if json:
        emit({"page": str(page), "trace": str(trace), "bytes": page.stat().st_size, "seconds": time.perf_counter() - began})
