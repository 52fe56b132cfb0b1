"""Plans and runs as pages a person reads: `weft report`, and pictures in notebooks. A page is one HTML file and needs no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.report.facts import Facts


def facts_of(source: str | Path, explained: bool = True, progress: Callable[[str], None] = lambda _: None, run_model: bool = False) -> Facts:
    """The facts of a plan file, of a run's folder, or of its file."""
    from weft.core.files import read_json
    from weft.plan import plan
    from weft.record import run
    from weft.report.of_plan import of_plan
    from weft.report.of_run import of_run

    where = Path(source)
    if where.is_dir():
        return of_run(run.load(where))
    if not where.exists() and where.suffix != ".json":
        from weft.core.errors import PlanError

        needed = "a file that `weft plan --out` wrote, or the folder of a run"
        raise PlanError(f"there is no {source} to report on", needed=needed, found="nothing there", try_=run.TRY)
    try:
        is_run = where.is_file() and "weft_run" in read_json(where)
    except (OSError, ValueError, TypeError):
        is_run = False
    return of_run(run.load(where)) if is_run else of_plan(plan.load(where), explained, progress, run_model)


def report(
    source: str | Path, out: str | Path = "", explained: bool = True, progress: Callable[[str], None] = lambda _: None, run_model: bool = False,
    other: str | Path = "", refresh: int = 0,
) -> tuple[Path, Path]:  # fmt: skip
    """Write the page of a plan or run, or of two side by side, and a trace for Perfetto next to it; where they are.

    A plan of a model in a Python file is compared with it, which runs that file, only with `run_model`. With `refresh`, the page loads
    itself again every so many seconds.
    """
    import json
    from dataclasses import replace

    from weft.report.compare import compared
    from weft.report.facts import perfetto
    from weft.report.page import page

    facts = replace(facts_of(source, explained and not other, progress, run_model), refresh=refresh)
    if other:
        stems = Path(source).stem, Path(other).stem
        names = stems if stems[0] != stems[1] else (str(source), str(other))
        facts = compared(facts, facts_of(other, False, progress, run_model), names)
    page_at = Path(out) if out else _next_to(Path(source))
    page_at.parent.mkdir(parents=True, exist_ok=True)
    page_at.write_text(page(facts))
    trace_at = page_at.with_suffix(".trace.json")
    trace_at.write_text(json.dumps(perfetto(facts), separators=(",", ":")))
    return page_at, trace_at


def _next_to(source: Path) -> Path:
    return source / "report.html" if source.is_dir() else source.with_suffix(".html")


def html(thing: Any) -> str:
    """A picture of a plan, run, program or schedule for a notebook."""
    from weft.report.notebook import picture

    return picture(thing)
