"""`weft fits CONFIG --gpu KIND`: whether a model can be trained there, what takes the memory, and what would make it fit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import typer

from weft.cli.output import count, emit, many, results

if TYPE_CHECKING:
    from weft.plan.fits import Answer
    from weft.plan.sizes import Model

KINDS = {"params": "weights", "grads": "gradients", "optimizer": "optimizer", "activations": "activations"}


def fits(
    model: str = typer.Argument(..., help="A Hugging Face config.json, a folder that has one, or a known name such as llama3-8b."),
    gpu: str = typer.Option(..., "--gpu", help="Device kind; an unknown one lists those that are known."),
    gpus: int = typer.Option(1, "--gpus", help="Number of devices."),
    lora: int = typer.Option(0, "--lora", help="Train LoRA adapters of this rank on every linear layer of the blocks, all else frozen.", show_default=False),
    seq: int = typer.Option(0, "--seq", callback=count, help="Sequence length.", show_default="the longest the model takes"),
    batch: int = typer.Option(0, "--batch", callback=count, help="Global batch in samples.", show_default="one per device"),
    optimizer: str = typer.Option(
        "adamw", "--optimizer", help="adamw, muon, sgd, momentum, lion, adafactor, adamw8bit; an unknown one lists all."
    ),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Predict whether training fits in memory: bytes by kind, the plan that fits, the largest batch, or what to change."""
    from weft.plan.fits import fits as ask

    began = time.perf_counter()
    answer = ask(model, gpu, gpus=gpus, lora=lora, seq=seq, batch=batch, optimizer=optimizer)
    asked = cast("Model", answer.model)
    _show(model, asked, answer, answer.place)
    if json:
        emit(
            {
                **_result(model, asked, answer),
                "gpu": gpu,
                "gpus": gpus,
                "optimizer": optimizer,
                "lora": lora,
                "seconds": time.perf_counter() - began,
            }
        )
    if not answer.fits:
        raise typer.Exit(2)


def _bytes(answer: Answer) -> dict[str, float]:
    parts = answer.memory.parts()
    named = {word: parts.pop(part) for part, word in KINDS.items()}
    return {**named, "workspace": sum(parts.values())}


def _result(name: str, model: Model, answer: Answer) -> dict[str, Any]:
    from weft.cost.interval import memory_spread
    from weft.plan.search import describe

    low, high = memory_spread().of(answer.memory.total / 1e9)
    s = answer.setting
    return {
        "model": name, "params": model.params, "seq": model.seq, "fits": answer.fits, "memory_gb": answer.memory.total / 1e9, "memory_gb_low": low,
        "memory_gb_high": high, "device_memory_gb": answer.has / 1e9, "bytes_gb": {k: v / 1e9 for k, v in _bytes(answer).items()},
        "plan": {"text": describe(s), "dp": s.dp, "ep": s.ep, "tp": s.tp, "zero": s.zero, "recompute": s.named("recompute"), "micro_batch": s.micro_batch,
                 "micro_batches": s.micro_batches, "dtype": s.dtype},
        "global_batch": s.global_batch, "largest_batch": answer.largest, "changes": list(answer.changes),
    }  # fmt: skip


def _show(name: str, model: Model, answer: Answer, place: str) -> None:
    from weft.cost.interval import memory_spread
    from weft.plan.search import describe

    low, high = memory_spread().of(answer.memory.total / 1e9)
    length = f", sequences of {model.seq:,}" if model.seq else ""
    size = f"{model.params / 1e9:,.2f}B" if model.params >= 1e8 else f"{model.params / 1e6:,.1f}M"
    only = f", of which only LoRA adapters of rank {model.how.lora} are trained" if model.how.lora else ""
    results().print(f"[bold]{name}[/] on {place}: {size} parameters{only}{length}", highlight=False)
    verdict = "[green]it fits[/]" if answer.fits else "[red]it does not fit[/]"
    needs = f"{answer.memory.total / 1e9:.1f} ({low:.1f} to {high:.1f}) of {answer.has / 1e9:.1f} GB"
    results().print(f"{verdict}: {needs} with {describe(answer.setting)}", highlight=False)
    parts = _bytes(answer)
    unit, scale = ("GB", 1e9) if max(v for k, v in parts.items() if k != "workspace") >= 1e8 else ("MB", 1e6)
    results().print(", ".join(f"{k} {v / scale:,.1f}" for k, v in parts.items()) + f" {unit}", highlight=False)
    if answer.fits:
        results().print(f"largest batch without micro-batches: {many(answer.largest, 'sample')} over all devices", highlight=False)
    elif not answer.changes:
        results().print("no single change that fits was found, up to 64 times the devices", highlight=False)
    for change in answer.changes:
        results().print(f"  fits with {change}", highlight=False)
    if not answer.fits:
        results().print("tried: ZeRO, recompute, ep and tp; weft plan also tries pipelines, cp and host memory", highlight=False)
