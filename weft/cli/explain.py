"""`weft explain PLAN`: for each decision the next best, what it would cost, why, and what would flip it."""

from __future__ import annotations

import time

import typer

from weft.cli.output import console, emit, results


def explain(
    plan: str = typer.Argument(..., help="A plan saved by `weft plan --out`."),
    run_model: bool = typer.Option(
        False, "--run-model", help="Run the Python file named by the plan as its model. Only for plans you trust."
    ),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Explain a plan: for each decision the next best choice, what it would cost, and what would change the decision."""
    from weft.cli.plan import show
    from weft.plan.explain import explain as reasons
    from weft.plan.plan import load

    began = time.perf_counter()
    made = load(plan)
    show(made, None, results())
    found = []
    with console.status("explaining") as status:
        for r in reasons(made, lambda text: status.update(f"what else for {text}"), run_model):
            found.append(r)
            results().print(str(r), highlight=False, markup=False)
    if made.objective == "time" and any(r.ms < 0 for r in found):
        results().print("a next best with less time is within the prediction error and less simple: weft plan --fastest takes it", highlight=False)
    if json:
        emit({"plan": plan, "step_ms": made.step_ms, "decisions": [r.data() for r in found], "seconds": time.perf_counter() - began})
