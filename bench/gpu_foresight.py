"""Foresight on the accelerator at hand: step time and memory of zoo models, predicted on fake tensors and then measured.

    python -m bench.gpu_foresight --calibrate --profile H200.json --out foresight.json

measures the device first, writes what it found and predicts with it. Predictions, and memory, which others on the device do
not change, are taken by several processes at once; times by one alone. One JSON object on stdout; `--out` also keeps what was
observed of each step and the kernels that ran, so that a prediction can be traced.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from torch import nn

    from weft.cluster.profile import Device
    from weft.plan.observe import Observed

WAYS = ("weft", "weft nodes", "eager", "compiled")


@dataclass(frozen=True)
class Case:
    """A training step: torch's own, torch's compiled, or weft's (as it runs here, or node by node)."""

    model: str
    batch: int
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    way: str = "eager"
    recompute: bool = False

    @property
    def name(self) -> str:
        said = ",".join(f"{k}={v}" for k, v in self.changes.items() if k != "dropout")
        ways = f"{self.way}{' recompute' if self.recompute else ''}"
        return f"{self.model}{f'({said})' if said else ''} b{self.batch} {self.dtype} {ways}"

    @property
    def host(self) -> str:
        """How its ops are issued."""
        return "host.plain" if self.way.startswith("weft") else "host.launch"

    def make(self, device: str, compiler: Callable[..., Any]) -> Callable[[], Any]:
        """Build it and return its training step."""
        import torch

        from weft.frontend import zoo

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        work = zoo.get(self.model, device="cpu" if self.way.startswith("weft") else device, dtype=dtype, **self.changes)
        if self.recompute:
            _checkpoint(work.model)
        return (self._weft if self.way.startswith("weft") else self._torch)(work, dtype, device, compiler)

    def _example(self, work: Any, dtype: Any, device: str) -> dict[str, Any]:
        batch = work.example(self.batch, device=device)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

    def _torch(self, work: Any, dtype: Any, device: str, compiler: Callable[..., Any]) -> Callable[[], Any]:
        import torch

        batch = self._example(work, dtype, device)
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-5, fused=True)

        def forward() -> Any:
            return work.loss(work.model, batch)

        run = compiler(forward) if self.way == "compiled" else forward

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            run().backward()
            optimizer.step()

        return step

    def _weft(self, work: Any, dtype: Any, device: str, _: Callable[..., Any]) -> Callable[[], Any]:
        import torch

        from weft.api.parallelize import parallelize

        batch = self._example(work, dtype, device)
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-5)
        with _inductor(self.way == "weft"):
            made = parallelize(work.model, work.loss, optimizer, self._example(work, dtype, "cpu"), device=device)
        if _fake() and hasattr(made.compiled._step, "_recorder"):
            made.compiled._step._recorder = None  # there is no device to record; the kernels are the same
        return lambda: made(batch)

    def recorded(self, place: str) -> bool:
        """Whether it runs as one graph of the device."""
        return self.way == "weft" and place == "cuda"


def _fake() -> bool:
    from torch._guards import detect_fake_mode

    return detect_fake_mode() is not None


@contextmanager
def _inductor(on: bool) -> Iterator[None]:
    """Whether `parallelize` may compile a step whole."""
    with patch.dict(os.environ, {} if on else {"WEFT_INDUCTOR": "0"}):
        yield


def _checkpoint(model: nn.Module) -> None:
    """Recompute each block of the model in its backward."""
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:  # type: ignore[union-attr]
        inner = block.forward
        block.forward = lambda *args, _inner=inner, **kw: checkpoint(_inner, *args, use_reentrant=False, **kw)


def _sizes() -> list[Case]:
    """Five models of three sizes."""
    short = {"layers": 6, "dropout": 0.0}
    return [
        *(Case(m, 8, short) for m in ("gpt2", "gpt2-medium", "gpt2-large")),
        *(Case("llama3-1b", 2, {"layers": n, "seq": 2048}) for n in (2, 4, 8)),
        *(Case(m, b, short) for m, b in (("bert-base", 32), ("bert-large", 16), ("bert-1.2b", 8))),
        *(Case(m, b, {"layers": 6}) for m, b in (("vit-b16", 128), ("vit-l16", 64), ("vit-h14", 32))),
        *(Case("mlp", 4096, {"layers": 8, "hidden": h, "inputs": h}) for h in (1024, 4096, 8192)),
    ]


def _settings() -> list[Case]:
    """Twelve settings of models, batch, precision and recompute, each as torch runs it and compiled."""
    short = {"layers": 4, "dropout": 0.0}
    kept = [
        Case("gpt2", 8, short), Case("gpt2", 16, short), Case("gpt2", 8, short, "fp32"), Case("gpt2", 16, short, recompute=True),
        Case("llama3-1b", 2, {"layers": 2, "seq": 2048}), Case("llama3-1b", 4, {"layers": 4, "seq": 2048}, recompute=True),
        Case("bert-base", 32, short), Case("bert-large", 8, short, "fp32"), Case("vit-b16", 128, {"layers": 4}),
        Case("vit-l16", 64, {"layers": 6}, recompute=True), Case("vit-b16", 64, {"layers": 4}, "fp32"),
        Case("mlp", 4096, {"layers": 8, "hidden": 4096, "inputs": 4096}),
    ]  # fmt: skip
    return kept + [replace(c, way="compiled") for c in kept]


TIMES = [replace(c, way=way) for way in ("weft", "weft nodes") for c in _sizes()]
TIMES += [replace(c, way=way) for way in ("eager", "compiled") for c in _sizes()[::3]]
MEMORY = _settings()


def predict(case: Case, place: str, device: Device) -> Observed:
    """What a step does and holds, from fake tensors alone."""
    from weft.plan.fusion import observe_compiled

    return observe_compiled(lambda compiler: case.make(place, compiler), device=device, host=case.host)


def measure(case: Case, place: str, steps: int = 10, rounds: int = 3) -> dict[str, Any]:
    """Median seconds of a step among several, the most bytes allocated, and the kernels of one step."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    on_device = place != "cpu"
    if on_device:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = case.make(place, torch.compile)
    for _ in range(3):
        step()
    taken = []
    for _ in range(rounds):
        _wait(on_device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(on_device)
        taken.append((time.perf_counter() - began) / steps)
    held = float(torch.cuda.max_memory_allocated() if on_device else 0)
    return {"seconds": statistics.median(taken) if taken else 0.0, "bytes": held, "kernels": _kernels(step) if on_device and rounds else {}}


def _wait(on_device: bool) -> None:
    import torch

    if on_device:
        torch.cuda.synchronize()


def _kernels(step: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """How often each kernel of a step ran, and its microseconds in all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        _wait(True)
    found = {e.key[:120]: (e.count, round(e.self_device_time_total, 1)) for e in seen.key_averages() if e.self_device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:60])


def _written() -> str:
    """The code a compiler wrote for what this process ran."""
    from torch._inductor.codecache import PyCodeCache

    return "\n".join(Path(m.__file__).read_text() for m in PyCodeCache.modules if m.__file__)


# --- what several processes do at once


def _predicted(case: Case, place: str, device: Device) -> Observed | str:
    try:
        return predict(case, place, device)
    except Exception as error:  # one model that cannot run must not lose the others
        return f"{type(error).__name__}: {error}"[:600]


def _held(case: Case, place: str) -> tuple[float, str]:
    try:
        return float(measure(case, place, rounds=0)["bytes"]), _written() if case.way == "compiled" else ""
    except Exception as error:
        return 0.0, f"{type(error).__name__}: {error}"[:600]


def _each(work: Callable[..., Any], cases: Sequence[Case], processes: int, *args: Any) -> list[Any]:
    """In fresh processes, so that one case leaves nothing for the next."""
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        return [f.result() for f in [pool.submit(work, case, *args) for case in cases]]


# --- results


def timed(case: Case, seen: Observed | str, device: Device, place: str) -> dict[str, Any]:
    from weft.plan.observe import seconds

    if isinstance(seen, str):
        return {"case": case.name, "way": case.way, "reason": f"not observed: {seen}"}
    try:
        got = measure(case, place)
    except Exception as error:
        return {"case": case.name, "way": case.way, "reason": f"{type(error).__name__}: {error}"[:600]}
    foreseen = seconds(seen, device, case.recorded(place))
    row = {
        "case": case.name, "way": case.way, "kernels": sum(seen.issued.values()), "predicted_ms": foreseen * 1e3,
        "measured_ms": got["seconds"] * 1e3, "error": foreseen / got["seconds"] - 1, "ran": got["kernels"],
    }  # fmt: skip
    return row | _memory(seen, got["bytes"], device)


def _memory(seen: Observed, held: float, device: Device) -> dict[str, Any]:
    if not held:
        return {}
    foreseen = seen.peak + device.get("workspace.bytes", 0.0)
    return {"predicted_gb": foreseen / 1e9, "measured_gb": held / 1e9, "memory_error": foreseen / held - 1}


def filled(case: Case, seen: Observed | str, held: tuple[float, str], device: Device) -> dict[str, Any]:
    if isinstance(seen, str) or not held[0]:
        reason = seen if isinstance(seen, str) else held[1]
        return {"case": case.name, "way": case.way, "reason": reason, "measured_gb": held[0] / 1e9}
    return {"case": case.name, "way": case.way, **_memory(seen, held[0], device)}


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """By the way a step ran: how far off."""
    found: dict[str, Any] = {}
    for way in dict.fromkeys(r["way"] for r in rows):
        errors = sorted(abs(r[key]) for r in rows if r["way"] == way and key in r)
        if errors:
            found[way] = {"count": len(errors), "median": statistics.median(errors), "worst": errors[-1]}
    return found


def _observed(case: Case, seen: Observed | str) -> dict[str, Any]:
    """Each distinct op once, with how often it runs."""
    if isinstance(seen, str):
        return {"case": case.name, "reason": seen}
    counts = Counter(seen.ops)
    ops = [{"count": n, "op": type(op).__name__, **asdict(op)} for op, n in counts.items()]
    return {"case": case.name, "peak": seen.peak, "held": seen.held, "issued": dict(seen.issued), "ops": ops}


def main(argv: list[str]) -> None:
    import torch

    from weft.cluster.calibrate import calibrate
    from weft.cluster.profile import dump, load

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="", help="a profile by name or file; the shipped one of this device if not given")
    parser.add_argument("--calibrate", action="store_true", help="measure the device first; --profile is then where to write it")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--stages", default="time,memory")
    parser.add_argument("--ways", default=",".join(WAYS), help="of the timed cases")
    parser.add_argument("--out", default="", help="also write what was observed, which kernels ran, and compiled code, here")
    parser.add_argument("--processes", type=int, default=6)
    given = parser.parse_args(argv)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    clock = _Clock()
    if given.calibrate:
        profile = calibrate(place, progress=lambda what, n, of: print(f"{n}/{of} {what}", file=sys.stderr, flush=True))
        Path(given.profile or "calibrated.json").write_text(json.dumps(dump(profile), indent=1) + "\n")
    else:
        profile = load(given.profile or "H200")
    clock.lap("calibrate")
    ways = given.ways.split(",")
    times = [c for c in TIMES if given.only in c.name and c.way in ways] if "time" in given.stages else []
    memory = [c for c in MEMORY if given.only in c.name] if "memory" in given.stages else []
    seen = _each(_predicted, times + memory, 2 * given.processes, place, profile.device)
    clock.lap("predict")
    held = _each(_held, memory, given.processes, place)
    clock.lap("memory")
    rows = [filled(c, s, h, profile.device) for c, s, h in zip(memory, seen[len(times) :], held, strict=True)]
    for case, foreseen in zip(times, seen, strict=False):
        rows.append(timed(case, foreseen, profile.device, place))
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "ran"}), file=sys.stderr, flush=True)
    clock.lap("time")
    if given.out:
        kept = [_observed(c, s) for c, s in zip(times + memory, seen, strict=True)]
        code = {c.name: h[1] for c, h in zip(memory, held, strict=True) if h[1]}
        Path(given.out).write_text(json.dumps({"rows": rows, "observed": kept, "code": code}))
    shown = [{k: v for k, v in r.items() if k != "ran"} for r in rows]
    result = {
        "bench": "gpu-foresight", "machine": profile.name, "rows": shown, "time": summary(rows, "error"),
        "memory": summary(rows, "memory_error"), "seconds": clock.laps,
    }  # fmt: skip
    print(json.dumps(result))


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 1), now


if __name__ == "__main__":
    main(sys.argv[1:])
