"""`weft bench plan-faults`: faults of kinds that training systems have shipped, planted one at a time in a step; who notices, and when?"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command("plan-faults")(plan_faults)


def plan_faults(json: Annotated[bool, typer.Option("--json", help="one JSON object on the last line")] = False) -> None:
    """Every fault must be refused before the first step, in words that name it, and the step without it must not be."""
    from bench._plan_faults import PLAN_FAULTS
    from weft.cli.output import console, emit

    rows: list[dict[str, Any]] = []
    for fault in PLAN_FAULTS:
        start = time.monotonic()
        said, clean = fault.refusal(), fault.refusal(planted=False)
        found = fault.names in said and bool(said)
        by = "the check of the plan" if fault.plan else "torch"
        row = {"fault": fault.name, "model": fault.model, "plan": fault.plan, "by": by, "found": found, "false_alarm": bool(clean)}
        rows.append({**row, "words": said.replace("\n", " ")[:400], "seconds": round(time.monotonic() - start, 2)})
        console.print(f"{'found ' if found else 'MISSED'} by {by:21} {fault.name}", markup=False, soft_wrap=True)
    found, alarms = (sum(r[key] for r in rows) for key in ("found", "false_alarm"))
    if json:
        emit({"bench": "plan-faults", "faults": len(rows), "found": found, "false_alarms": alarms, "rows": rows})
    if found < len(rows) or alarms:
        raise typer.Exit(1)
