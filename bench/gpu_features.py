"""fp8, packed documents and offload on one GPU: each against what it should be faster or smaller than, losses compared first.

    python -m bench.gpu_features [--parts fp8,documents,attention,offload] [--json]

Every part is a process of its own (`bench._gpu_features_part`): all compile at the same time, and are timed one after the other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from bench import _gpu
from bench.gpu_train import Model, run

PARTS = "fp8,documents,attention,offload"


def register(app: typer.Typer) -> None:
    app.command("gpu-features")(features)


def features(parts: str = typer.Option(PARTS), device: str = _gpu.DEVICE, rounds: int = typer.Option(5), json: bool = _gpu.JSON) -> None:
    """fp8 against bf16, documents against a full causal mask, offload against recompute."""
    if device == "cuda":
        _gpu.need_gpu()
    with _gpu.ended_with_us(), tempfile.TemporaryDirectory() as folder:
        rows = run([Model(name, device, rounds, Path(folder), "bench._gpu_features_part") for name in parts.split(",")])
    done = {"stage": "one GPU", "ranks": 1, "status": "failed" if any("failed" in row for row in rows) else "ok", "rows": rows}
    _gpu.report("gpu-features", [done], json)


if __name__ == "__main__":
    typer.run(features)
