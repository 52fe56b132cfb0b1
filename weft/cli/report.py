"""`weft report PLAN_OR_RUN`: one self-contained page of a plan or of a training run, and a trace for Perfetto beside it."""

from __future__ import annotations

import time

import typer

from weft.cli.output import console, emit, writable


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    source: str = typer.Argument(..., help="A plan saved by `weft plan --out`, or the folder of a run recorded while training."),
    out: str = typer.Option("", "--out", help="Where to write the page; beside the source if not given."),
    explain: bool = typer.Option(True, help="Also say why each decision of a plan is as it is; takes as long as planning."),
    run_model: bool = typer.Option(False, "--run-model", help="Run the Python file that the plan names as its model: only for plans you know."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Write a page that shows a plan or a run: decisions, layouts, timeline, memory, alternatives, proofs."""
    from weft.report import report as write

    began = time.perf_counter()
    writable(out, make=True)
    with console.status("reading") as status:
        page, trace = write(source, out, explain, lambda text: status.update(f"drawing {text}"), run_model)
    console.print(f"the page is at {page}, {page.stat().st_size / 1e3:,.0f} kB; a trace for Perfetto at {trace}", markup=False, highlight=False)
    if json:
        emit({"page": str(page), "trace": str(trace), "bytes": page.stat().st_size, "seconds": time.perf_counter() - began})
