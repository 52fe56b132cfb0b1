"""`weft show`: a program as text, before and after a schedule; or a model's step after the passes of a plan."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from weft.core.program import Program
    from weft.passes import Draft


def show(
    name: Annotated[str | None, typer.Argument(help="An example (all are listed if none is given); with --plan a model or FILE.py:FUNCTION.")] = None,
    schedule: Annotated[str | None, typer.Option(help="One of its schedules.")] = None,
    diff: Annotated[bool, typer.Option(help="Print what the schedule changed.")] = False,
    code: Annotated[bool, typer.Option(help="Print the generated per-rank code.")] = False,
    history: Annotated[bool, typer.Option(help="Print the steps of the schedule.")] = False,
    plan: Annotated[
        str | None, typer.Option(help="A plan such as dp2,zero1 or a plan file: print a model's training step under it.")
    ] = None,
    any_plan: Annotated[
        bool, typer.Option("--any-plan", help='Under deterministic="any plan": sums in an order that no plan changes.')
    ] = False,
    cluster: Annotated[str | None, typer.Option(help="With --any-plan: what these sums cost there (NODESxDEVICESxKIND).")] = None,
    passes: Annotated[bool, typer.Option(help="Print the compiler passes, with the number of nodes before and after each.")] = False,
) -> None:
    """Print a program, before or after a schedule, or a model's training step under a plan."""
    from weft.programs.catalog import example, scheduled

    if passes or plan is not None:
        if any_plan and cluster is not None and name is not None:
            typer.echo(_price(name, plan or "dp1", cluster))
        else:
            _planned(name, plan or "dp1", passes, any_plan)
        return
    if name is None:
        _list()
        return
    program = scheduled(name, schedule)
    if code:
        from weft.codegen import show_code

        typer.echo(show_code(program))
    elif diff:
        before, after = example(name).make().text.splitlines(), program.text.splitlines()
        typer.echo("\n".join(difflib.unified_diff(before, after, name, f"{name} {schedule or ''}".strip(), lineterm="", n=2)))
    else:
        typer.echo(program.text)
    if history:
        typer.echo("\n".join(f"# {step}" for step in program.history))


def _price(name: str, plan: str, where: str) -> str:
    """What sums in one order under all plans are predicted to cost."""
    from weft.cluster.spec import cluster
    from weft.cost.simulate import predict

    plain, ordered = (predict(cast("Program", _drafted(name, plan, asked).program), cluster(where)) for asked in (False, True))
    return (
        f'{name} under {plan} on {where}: {ordered.step_ms:.2f} ms predicted with deterministic="any plan", {plain.step_ms:.2f} ms without '
        f"({ordered.step_ms / plain.step_ms:.2f}x); {ordered.memory_gb:.2f} GB, {plain.memory_gb:.2f} GB without"
    )


def _planned(name: str | None, plan: str, passes: bool, any_plan: bool) -> None:
    """A model's training step under a plan, or the passes that it goes through; without a model, what they are for."""
    from weft.passes import PASSES

    if name is None:
        typer.echo("\n".join(f"{p.name:<15} {p.why}" for p in PASSES))
        return
    draft = _drafted(name, plan, any_plan)
    if passes:
        why = {p.name: p.why for p in PASSES}
        typer.echo(f"{'pass':<15} {'before':>8} {'after':>8}  nodes of {name} under {draft.spec}")
        typer.echo("\n".join(f"{name:<15} {before:>8,} {after:>8,}  {why[name]}" for name, before, after in draft.trail))
        return
    programs = [draft.program] if draft.pipeline is None else [*(p for s in draft.pipeline.stages for p in s.phases), draft.pipeline.update]
    typer.echo("\n\n".join(p.text for p in programs if p is not None))


def _drafted(name: str, plan: str, any_plan: bool = False) -> Draft:
    """A model's step after all passes. Nothing runs: its example is on `meta`."""
    import torch

    from weft.api.micro_steps import micro_steps
    from weft.api.planfile import follow
    from weft.frontend.capture import capture
    from weft.frontend.source import load
    from weft.passes import Draft, run
    from weft.transform.any_plan import require_any_plan

    followed, work = follow(plan), load(name, device="meta")
    spec = followed.spec
    if any_plan:
        require_any_plan(spec)
    copies = spec.dp * spec.ep * spec.micro_batches
    example = work.example(-(-work.batch // copies) * copies, device="meta")
    optimizer = torch.optim.AdamW(work.model.parameters())
    captured = capture(work.model, example, work.loss, optimizer)
    several = spec.virtual_stages * spec.micro_batches > 1
    steps = micro_steps(work.model, example, work.loss, optimizer)
    return run(Draft(captured, spec, followed, derive=(lambda: steps(spec.micro_batches)) if several else None, any_plan=any_plan))


def _list() -> None:
    from rich.table import Table

    from weft.cli.output import results
    from weft.programs.catalog import line_counts

    table = Table("example", "lines", "schedule", "lines", "verbs", title="Programs and their schedules")
    for name, lines, schedule, sched_lines, steps in line_counts():
        table.add_row(name, str(lines), schedule, str(sched_lines), str(steps))
    results().print(table)
