"""weft's training step on one GPU against eager torch and torch.compile of the same step, for five models.

    python bench/gpu_train.py [--models gpt2,llama3-8b,vit,resnext50,dlrm]

Losses are compared before anything is timed. One JSON object on the last line.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 8, "batch": 8},
    "llama3-8b": {"layers": 2, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000, "seq": 1024, "batch": 4},
    "vit": {"batch": 32},
    "resnext50": {"batch": 32},
    "dlrm": {"batch": 1024},
}


def timed(step: Callable[[], Any], rounds: int = 12) -> float:
    """Median milliseconds, each step ended by a synchronise."""
    for _ in range(3):
        step()
    took = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return 1e3 * statistics.median(took)


def ways(name: str, settings: dict[str, Any], compiled: bool) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The ways to run a step, and the loss each begins with."""
    from weft.api.parallelize import parallelize
    from weft.frontend import zoo

    settings = dict(settings)
    batch_size = settings.pop("batch")
    if "dropout" in vars(zoo.entry(name).settings):
        settings["dropout"] = 0.0
    w = zoo.get(name, device="cpu", **settings)
    cpu_batch = w.example(batch_size)
    batch = {k: v.cuda() for k, v in cpu_batch.items()}
    step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-4), cpu_batch, device="cuda")
    model = copy.deepcopy(w.model).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def plain(loss_fn: Callable[..., Any]) -> Any:
        opt.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        opt.step()
        return loss

    out: dict[str, Callable[[], Any]] = {"weft": lambda: step(batch), "eager": lambda: plain(w.loss)}
    if compiled:
        fast = torch.compile(lambda m, b: w.loss(m, b))
        out["compile"] = lambda: plain(fast)
        step.compiled._step = torch.compile(step.compiled._step)
        out["weft compiled"] = lambda: step(batch)
    losses = {n: float(way().detach()) for n, way in out.items() if n in ("weft", "eager")}
    return out, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        try:
            calls, losses = ways(name, SIZES[name], args.compile)
            apart = abs(losses["weft"] - losses["eager"]) / abs(losses["eager"])
            assert apart < 1e-3, losses
            row = {"case": name, "apart": apart, "ms": {n: round(timed(c), 3) for n, c in calls.items()}}
        except Exception as e:
            row = {"case": name, "failed": f"{type(e).__name__}: {e}"[:600]}
        rows.append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    print(json.dumps({"bench": "gpu_train", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
