"""`weft bench wild`: models that a file names, trained under every plan over real processes, against plain torch run by itself."""

from __future__ import annotations

import json as json_
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

Row = dict[str, Any]
PLANS = ["dp1", "dp2", "dp2,zero3", "tp2", "pp2", "auto"]
STATUSES = ["ok", "refused", "wrong", "crash", "timeout"]
MISSES = ["wrong", "crash", "timeout"]
SHIPPED = Path(__file__).with_name("wild_cases.py")


def register(app: typer.Typer) -> None:
    @app.command()
    def wild(
        cases: Annotated[Path, typer.Option(help="a Python file with CASES: {name: () -> (model, loss, batches)}")] = SHIPPED,
        plans: Annotated[str, typer.Option(help="which, joined by commas or semicolons")] = ";".join(PLANS),
        only: Annotated[str, typer.Option(help="a regular expression that names of cases match")] = "",
        jobs: Annotated[int, typer.Option(min=1, help="cases at a time")] = max(1, (os.cpu_count() or 2) // 2),
        resume: Annotated[Path | None, typer.Option(help="a file that rows are added to; those in it are not repeated")] = None,
        timeout: Annotated[float, typer.Option(min=1, help="seconds for one case under one plan")] = 180.0,
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
    ) -> None:
        """Train a file's models under every plan, and compare losses, parameters and buffers with plain torch's."""
        from weft.cli.output import console, emit

        found, wanted = load(cases), plans_of(plans)
        names = [name for name in found if re.search(only, name)]
        rows = []
        warmed = ["transformers"] if "transformers" in cases.read_text() else []
        for row in run({name: found[name] for name in names}, wanted, jobs, timeout, resume, warmed):
            rows.append(row)
            if row["status"] in (*MISSES, "torch"):
                console.print(line(row), markup=False, highlight=False, soft_wrap=True)
        counted = counts(rows, wanted)
        for plan, of in counted.items():
            console.print(f"{plan:12} " + "  ".join(f"{status} {of[status]}" for status in STATUSES), markup=False, highlight=False)
        if json:
            emit({"bench": "wild", "cases": len(names), "counts": counted, "torch": of_torch(rows), "rows": rows})
        if any(row["status"] in MISSES for row in rows):
            raise typer.Exit(1)


def load(path: Path) -> dict[str, Callable[[], Any]]:
    """The cases of a file, which is imported as a module of its own."""
    import sys
    from importlib.util import module_from_spec, spec_from_file_location

    from weft.core.errors import UnknownName

    found, spec = None, spec_from_file_location(f"{path.stem}_of_wild", path)
    if path.is_file() and spec is not None and spec.loader is not None:
        sys.modules[spec.name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        found = getattr(module, "CASES", None)
    if not isinstance(found, Mapping) or not all(callable(make) for make in found.values()):
        raise UnknownName(
            f"no cases in {path}",
            needed="a Python file with CASES: {name: () -> (model, loss, batches)}",
            found="no such file" if not path.is_file() else f"CASES = {found!r}"[:200],
            try_=f"weft bench wild --cases {os.path.relpath(SHIPPED)}",
        )
    return {str(name): make for name, make in found.items()}


def plans_of(text: str) -> list[str]:
    """Plans joined by semicolons, or by commas: then a word that begins no plan (zero3, micro4) belongs to the one before it."""
    if ";" in text:
        return [part.strip().strip('"') for part in text.split(";") if part.strip()]
    plans: list[str] = []
    for quoted, word in re.findall(r'"([^"]*)"|([^,"]+)', text):
        begins = quoted or re.fullmatch(r"auto|[dtpce]p\d+|micro\d+", word.strip())
        if begins or not plans:
            plans.append(quoted or word.strip())
        else:
            plans[-1] += f",{word.strip()}"
    return plans


def run(
    cases: Mapping[str, Callable[[], Any]],
    plans: list[str],
    jobs: int,
    timeout: float,
    resume: Path | None = None,
    imports: Iterable[str] = (),
) -> Iterable[Row]:
    """A row for every case and plan. Rows of `resume` come first and are not run again; new ones are added to it as they come."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # ranks are forked, which no device survives
    from bench._wild.processes import rows_of, warm, world_of

    for plan in plans:
        world_of(plan)  # words that are no plan are refused before anything runs
    done = {(row["case"], row["plan"]): row for row in kept(resume)}
    yield from (row for (case, plan), row in done.items() if case in cases and plan in plans)
    wanted = {name: [plan for plan in plans if (name, plan) not in done] for name in cases}
    wanted = {name: left for name, left in wanted.items() if left}
    if wanted:
        warm(imports)
    for row in rows_of(cases, wanted, jobs, timeout):
        if resume is not None:
            with resume.open("a") as f:
                f.write(json_.dumps(row) + "\n")
        yield row


def kept(path: Path | None) -> list[Row]:
    """Rows of an earlier run; a line that was cut off is left out."""
    rows = []
    for text in path.read_text().splitlines() if path is not None and path.exists() else []:
        try:
            rows.append(json_.loads(text))
        except ValueError:
            continue
    return rows


def line(row: Row) -> str:
    words = f" [{row['words']}]" if row["words"] else ""
    return f"{row['case']:28} {row['plan']:10} {row['status']:8} {row['error']}{words}"


def counts(rows: Iterable[Row], plans: Iterable[str]) -> dict[str, dict[str, int]]:
    seen = Counter((row["plan"], row["status"]) for row in rows)
    return {plan: {status: seen[plan, status] for status in STATUSES} for plan in plans}


def of_torch(rows: Iterable[Row]) -> list[str]:
    """Cases that torch itself does not run."""
    return sorted({row["case"] for row in rows if row["status"] == "torch"})
