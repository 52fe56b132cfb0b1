"""`weft price FILE --cluster SPEC`: what a configuration of another system takes, and which of its keys to change for what would be better."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import CLUSTER, IMBALANCE, emit, many, read_text, results

if TYPE_CHECKING:
    from weft.plan.price_configuration import PricedConfiguration


SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def price(
    ctx: typer.Context,
    config: str = typer.Argument(
        ..., help="Configuration of torchtitan (TOML or Python), Megatron (arguments), DeepSpeed (JSON) or accelerate (YAML)."
    ),
    cluster: str = CLUSTER,
    model: str = typer.Option("", "--model", help="A known name or a Hugging Face config.json, where the configuration does not say it."),
    seq: int = typer.Option(0, "--seq", help="Sequence length, where the configuration has none.", show_default=False),
    batch: int = typer.Option(0, "--batch", help="Global batch in samples, where the configuration has none.", show_default=False),
    imbalance: float = typer.Option(1.0, "--imbalance", help=IMBALANCE),
    better: bool = typer.Option(True, help="Also search for a better configuration."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Predict the step time and memory of an existing configuration, and which keys to change for a better one."""
    from weft.plan.price_configuration import price_configuration

    began = time.perf_counter()
    options = config.startswith("-") or bool(ctx.args)  # Megatron's, instead of a file
    text = " ".join([config, *ctx.args]) if options else read_text(config, "the configuration of a training system, as text")
    found = price_configuration(text, cluster, model, seq, batch, better, imbalance)
    _show(found)
    if json:
        emit({**_result(found), "seconds": time.perf_counter() - began})


def _result(found: PricedConfiguration) -> dict[str, Any]:
    r = found.read
    return {
        "form": r.form, "model": found.model, "cluster": found.cluster, **found.figures, **found.bounds, "interval": found.interval, "fits": found.fits,
        "device_memory_gb": found.has / 1e9, "setting": found.text, "assumed": dict(r.assumed), "unused": list(r.unused), "unmodelled": list(r.unmodelled),
        "better": None if found.better is None else {**found.better, "changes": found.changes},
    }  # fmt: skip


def _show(found: PricedConfiguration) -> None:
    f, b = found.figures, found.bounds
    results().print(f"[bold]{found.read.form}[/], {found.model} on {found.cluster}: {found.text}", highlight=False)
    results().print(
        f"predicted step {f['step_ms']:,.1f} ms ({b['step_ms_low']:,.1f} to {b['step_ms_high']:,.1f}), {f['tokens_per_s']:,.0f} tokens/s, MFU {f['mfu']:.1%}, "
        f"memory {f['memory_gb']:.1f} ({b['memory_gb_low']:.1f} to {b['memory_gb_high']:.1f}) of {found.has / 1e9:.1f} GB: "
        + ("[green]it fits[/]" if found.fits else "[red]it does not fit[/]"),
        highlight=False,
    )  # fmt: skip
    for name, value in found.read.assumed.items():
        results().print(f"  assumed: {name} = {value}", highlight=False)
    for words in found.read.unmodelled:
        results().print(f"  not modelled: {words}", highlight=False)
    if found.read.unused:
        results().print(f"  {many(len(found.read.unused), 'key')} not used: {', '.join(found.read.unused)}", highlight=False)
    if found.better is None:
        results().print("nothing better was found" if found.searched else "no search for a better one")
        return
    gain = f"{found.better['gain']:.2f}x" if found.fits else "and it fits"
    results().print(f"better: {found.better['step_ms']:,.1f} ms, {gain}, with {found.better['setting']}", highlight=False)
    for change in found.changes:
        results().print(f"  {change['key']}: {change['now']} -> {change['then']}", highlight=False)
    for words in found.better["not_said"]:
        results().print(f"  not expressed by its keys: {words}", highlight=False)
