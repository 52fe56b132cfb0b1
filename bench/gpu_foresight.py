"""Foresight on the accelerator at hand: step time and memory of zoo models, predicted on fake tensors and then measured.

`python -m bench.gpu_foresight --calibrate` measures the device first and uses what it found. One JSON object on stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from weft.cluster.profile import Device
    from weft.plan.observe import Observed


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    compiled: bool = False
    recompute: bool = False

    @property
    def name(self) -> str:
        said = ",".join(f"{k}={v}" for k, v in self.changes.items() if k != "dropout")
        ways = [w for w, on in (("compiled", self.compiled), ("recompute", self.recompute)) if on] or ["eager"]
        return f"{self.model}{f'({said})' if said else ''} b{self.batch} {self.dtype} {' '.join(ways)}"

    def make(self, device: str, compiler: Callable[..., Any] | None = None) -> Callable[[], Any]:
        """Build it and return its training step."""
        import torch

        from weft.frontend import zoo

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        work = zoo.get(self.model, device=device, dtype=dtype, **self.changes)
        batch = work.example(self.batch, device=device)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        if self.recompute:
            _checkpoint(work.model)
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-5, fused=True)

        def forward() -> Any:
            return work.loss(work.model, batch)

        run = compiler(forward) if compiler is not None else forward

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            run().backward()
            optimizer.step()

        return step


def _checkpoint(model: nn.Module) -> None:
    """Recompute each block of the model in its backward."""
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:  # type: ignore[union-attr]
        inner = block.forward
        block.forward = lambda *args, _inner=inner, **kw: checkpoint(_inner, *args, use_reentrant=False, **kw)


PLAIN = {"dropout": 0.0}
SHORT = {"layers": 12, "dropout": 0.0}
TIMES = [
    *(Case(m, 8, SHORT) for m in ("gpt2", "gpt2-medium", "gpt2-large")),
    *(Case("llama3-1b", 2, {"layers": n, "seq": 2048}) for n in (2, 4, 8)),
    *(Case(m, b, SHORT) for m, b in (("bert-base", 32), ("bert-large", 16), ("bert-1.2b", 8))),
    *(Case(m, b, {"layers": 12}) for m, b in (("vit-b16", 128), ("vit-l16", 64), ("vit-h14", 32))),
    *(Case("mlp", 4096, {"layers": 8, "hidden": h, "inputs": h}) for h in (1024, 4096, 8192)),
]
COMPILED = [
    Case("gpt2", 8, PLAIN, compiled=True),
    Case("llama3-1b", 2, {"layers": 2, "seq": 2048}, compiled=True),
    Case("bert-base", 32, PLAIN, compiled=True),
    Case("vit-b16", 128, compiled=True),
    Case("mlp", 4096, {"layers": 8, "hidden": 4096, "inputs": 4096}, compiled=True),
]
MEMORY = [
    Case("gpt2", 16, PLAIN),
    Case("gpt2", 8, PLAIN, "fp32"),
    Case("gpt2", 16, PLAIN, recompute=True),
    Case("llama3-1b", 4, {"layers": 4, "seq": 2048}, recompute=True),
    Case("bert-large", 8, SHORT, "fp32"),
    Case("vit-l16", 64, {"layers": 12}, recompute=True),
    Case("vit-b16", 64, dtype="fp32"),
]


def predict(case: Case, device: Device, place: str) -> tuple[float, float, Observed]:
    """Seconds and bytes of a step, from fake tensors alone."""
    from weft.plan.fusion import observe_compiled
    from weft.plan.observe import observe, seconds

    if case.compiled:
        seen = observe_compiled(lambda compiler: case.make(place, compiler))
        return seconds(seen, device, "host.compiled"), seen.peak + device.get("workspace.bytes", 0.0), seen
    seen = observe(lambda: case.make(place))
    return seconds(seen, device), seen.peak + device.get("workspace.bytes", 0.0), seen


def measure(case: Case, place: str, steps: int = 10) -> tuple[float, float]:
    """Median seconds of a step among several, and the most bytes allocated."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    on_device = place != "cpu"
    if on_device:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = case.make(place, torch.compile if case.compiled else None)
    for _ in range(3):
        step()
    taken = []
    for _ in range(3):
        _wait(on_device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(on_device)
        taken.append((time.perf_counter() - began) / steps)
    return statistics.median(taken), float(torch.cuda.max_memory_allocated() if on_device else 0)


def _wait(on_device: bool) -> None:
    import torch

    if on_device:
        torch.cuda.synchronize()


def compare(case: Case, device: Device, place: str, timed: bool) -> dict[str, Any]:
    try:
        time_, bytes_, seen = predict(case, device, place)
        took, held = measure(case, place)
    except Exception as error:  # one model that cannot run must not lose the others
        return {"case": case.name, "reason": f"{type(error).__name__}: {error}"[:300]}
    row: dict[str, Any] = {"case": case.name, "kernels": sum(op.launches for op in seen.ops)}
    if timed:
        row |= {"predicted_ms": time_ * 1e3, "measured_ms": took * 1e3, "error": time_ / took - 1}
    if held:
        row |= {"predicted_gb": bytes_ / 1e9, "measured_gb": held / 1e9, "memory_error": bytes_ / held - 1}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    found = sorted(abs(r[key]) for r in rows if key in r)
    return {"count": len(found), "median": statistics.median(found), "worst": found[-1]} if found else {"count": 0}


def main(argv: list[str]) -> None:
    import torch

    from weft.cluster.calibrate import calibrate
    from weft.cluster.profile import dump, load

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="", help="a profile by name or file; the shipped one of this device if not given")
    parser.add_argument("--calibrate", action="store_true", help="measure the device first; --profile is then where to write it")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args(argv)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    if given.calibrate:
        profile = calibrate(place, progress=lambda what, n, of: print(f"{n}/{of} {what}", file=sys.stderr))
        with open(given.profile or "calibrated.json", "w") as file:
            json.dump(dump(profile), file, indent=1)
    else:
        profile = load(given.profile or "H200")
    spent = time.perf_counter() - began
    chosen = [(c, True) for c in TIMES + COMPILED] + [(c, False) for c in MEMORY]
    rows = [compare(c, profile.device, place, timed) for c, timed in chosen if given.only in c.name]
    result = {
        "bench": "gpu-foresight", "machine": profile.name, "rows": rows, "time": summary(rows, "error"),
        "memory": summary(rows, "memory_error"), "calibration_s": spent, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
