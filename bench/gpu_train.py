"""weft's training step on one GPU against eager torch and torch.compile of the same step, for several models.

    python -m bench.gpu_train [--models gpt2,llama3-8b,vit,resnext50,dlrm] [--precision bf16] [--json]

Losses are compared before anything is timed. Every model is a process of its own (`bench._gpu_train_model`): all compile at the same time,
then they are timed one after the other. One that fails says so and the others go on.
"""

from __future__ import annotations

import json as text
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from bench import _gpu

MODELS = "gpt2,llama3-8b,vit,resnext50,dlrm,bert-large"
LIMIT = float(os.environ.get("WEFT_BENCH_LIMIT", "230"))  # seconds in which all must have compiled
TIMING = 30.0  # and each have been timed


def register(app: typer.Typer) -> None:
    app.command("gpu-train")(train)


def train(
    models: str = typer.Option(MODELS, help="Joined by commas: NAME, NAME:LAYERS; with @weft or @compile first steps alone."),
    precision: str = typer.Option("tf32", help="Of products: tf32 or bf16."),
    rounds: int = typer.Option(10), json: bool = _gpu.JSON,
) -> None:  # fmt: skip
    """A training step in one process against eager torch and torch.compile."""
    _gpu.need_gpu()
    with _gpu.ended_with_us(), tempfile.TemporaryDirectory() as folder:
        rows = run([Model(name, precision, rounds, Path(folder)) for name in models.split(",")])
    done = {"stage": precision, "ranks": 1, "status": "failed" if any("failed" in row for row in rows) else "ok", "rows": rows}
    _gpu.report("gpu-train", [done], json)


class Model:
    """One model in its own process, which says when it has compiled and waits to be told to go on."""

    def __init__(self, name: str, precision: str, rounds: int, folder: Path, module: str = "bench._gpu_train_model") -> None:
        self.name = name
        self.log, self.ready, self.go, self.out = (folder / f"{name}.{end}" for end in ("log", "ready", "go", "json"))
        command = [sys.executable, "-m", module, name, precision, str(rounds), str(folder)]
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"{name}.cache")}  # no other's code is found there
        env = {**os.environ, **caches, "PYTHONPATH": str(_gpu.ROOT), "OMP_NUM_THREADS": "2"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self, until: Callable[[], bool], deadline: float) -> None:
        while not until() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def result(self) -> dict[str, Any]:
        if self.out.exists():
            return text.loads(self.out.read_text())  # type: ignore[no-any-return]
        return {"case": self.name, "failed": self.log.read_text()[-1500:] or "stopped at its limit"}

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run(models: list[Model]) -> list[dict[str, Any]]:
    """All compile at the same time, and none is timed before all have."""
    deadline = time.monotonic() + LIMIT
    try:
        for model in models:
            model.wait(model.ready.exists, deadline)
        for model in models:
            if not model.ready.exists():
                model.end()  # it would go on while others are timed
            model.go.touch()
        for model in models:
            model.wait(model.out.exists, time.monotonic() + TIMING)
            print(text.dumps(model.result()), file=sys.stderr, flush=True)
    finally:
        for model in models:
            model.end()
    return [model.result() for model in models]


if __name__ == "__main__":
    typer.run(train)
