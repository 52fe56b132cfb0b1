"""`weft export PLAN --to FORM`: a saved plan as the configuration of another training system."""

from __future__ import annotations

from pathlib import Path

import typer

from weft.cli.output import console, writable


def export(
    plan: str = typer.Argument(..., help="A plan saved by `weft plan --out`."),
    to: str = typer.Option(..., "--to", help="torchtitan, megatron, fsdp2, accelerate, huggingface or deepspeed."),
    out: str = typer.Option("", "-o", "--out", help="Write to this file instead of standard output."),
) -> None:
    """Write a plan as another system's configuration. What that system cannot express is listed in a comment."""
    from weft.plan.export import export as write
    from weft.plan.plan import load

    writable(out)
    text = write(load(plan), to)
    if out:
        Path(out).write_text(text)
        console.print(f"written to {out}", highlight=False)
    else:
        print(text, end="")
