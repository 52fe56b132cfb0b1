"""`weft price FILE --cluster SPEC`: what a configuration of another system takes, and which of its keys to change for what would be better."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import console, emit, many, read_text

if TYPE_CHECKING:
    from weft.plan.judge import Judged


def register(app: typer.Typer) -> None:
    app.command("price", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(price)


def price(
    ctx: typer.Context,
    config: str = typer.Argument(..., help="A torchtitan TOML or Python file, Megatron arguments, a DeepSpeed JSON or an accelerate YAML."),
    cluster: str = typer.Option(..., "--cluster", help="NODESxDEVICESxKIND, `+` between unequal groups, or a YAML file."),
    model: str = typer.Option("", "--model", help="A model of the zoo by name, or a Hugging Face config.json; Megatron arguments may say it themselves."),
    seq: int = typer.Option(0, "--seq", help="Sequence length, where the configuration has none."),
    batch: int = typer.Option(0, "--batch", help="Samples of a step, where the configuration has none."),
    better: bool = typer.Option(True, help="Also search for what would be better."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Price a configuration: time, tokens per second, utilisation and memory of a step, and what to change."""
    from weft.plan.judge import judge

    began = time.perf_counter()
    text = read_text(config, "a configuration") if Path(config).is_file() else " ".join([config, *ctx.args])
    found = judge(text, cluster, model, seq, batch, better)
    _show(found)
    if json:
        emit({**_result(found), "seconds": time.perf_counter() - began})


def _result(found: Judged) -> dict[str, Any]:
    r = found.read
    return {
        "form": r.form, "model": found.model, "cluster": found.cluster, **found.figures, **found.bounds, "interval": found.interval, "fits": found.fits,
        "device_memory_gb": found.has / 1e9, "setting": found.text, "assumed": dict(r.assumed), "unused": list(r.unused), "unmodelled": list(r.unmodelled),
        "better": None if found.better is None else {**found.better, "changes": found.changes},
    }  # fmt: skip


def _show(found: Judged) -> None:
    f, b = found.figures, found.bounds
    console.print(f"[bold]{found.read.form}[/], {found.model} on {found.cluster}: {found.text}", highlight=False)
    console.print(
        f"step {f['step_ms']:,.1f} ms ({b['step_ms_low']:,.1f} to {b['step_ms_high']:,.1f}), {f['tokens_per_s']:,.0f} tokens/s, utilisation {f['mfu']:.1%}, "
        f"memory {f['memory_gb']:.1f} ({b['memory_gb_low']:.1f} to {b['memory_gb_high']:.1f}) of {found.has / 1e9:.1f} GB: "
        + ("[green]it fits[/]" if found.fits else "[red]it does not fit[/]"),
        highlight=False,
    )  # fmt: skip
    for name, value in found.read.assumed.items():
        console.print(f"  assumed: {name} = {value}", highlight=False)
    for words in found.read.unmodelled:
        console.print(f"  not modelled: {words}", highlight=False)
    if found.read.unused:
        console.print(f"  {many(len(found.read.unused), 'key')} not used: {', '.join(found.read.unused)}", highlight=False)
    if found.better is None:
        console.print("nothing simpler or faster was found" if found.searched else "no better one was looked for")
        return
    gain = f"{found.better['gain']:.2f}x" if found.fits else "and it fits"
    console.print(f"better: {found.better['step_ms']:,.1f} ms, {gain}, with {found.better['setting']}", highlight=False)
    for change in found.changes:
        console.print(f"  {change['key']}: {change['now']} -> {change['then']}", highlight=False)
    for words in found.better["not_said"]:
        console.print(f"  its keys do not say: {words}", highlight=False)
