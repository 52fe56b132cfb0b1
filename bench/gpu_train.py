"""weft's training step on one GPU against eager torch and torch.compile of the same step, for five models.

    python bench/gpu_train.py [--models gpt2,llama3-8b,vit,resnext50,dlrm] [--precision bf16]

Values are compared before anything is timed. Every case is a process of its own: all compile at the same time, then they are
timed one after the other. A case that fails says so and the others go on. One JSON object on the last line.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 6, "batch": 8},
    "llama3-8b": {"layers": 2, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000, "seq": 1024, "batch": 4},
    "vit": {"layers": 6, "batch": 64},
    "resnext50": {"batch": 64},
    "dlrm": {"batch": 2048},
    "bert-large": {"layers": 6, "batch": 16},
    "wide-resnet": {"stages": (2, 2, 2, 2), "base": 64, "batch": 32},
}
FIVE = "gpt2,llama3-8b,vit,resnext50,dlrm"
LIMIT = 230.0  # seconds in which all must have compiled


# -- the parent ----------------------------------------------------------------------------------------------------------------


class Case:
    """One case in its own process: told to go when all have compiled."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.name, self.out, self.log = name, folder / f"{name}.json", folder / f"{name}.log"
        self.ready, self.go = folder / f"{name}.ready", folder / f"{name}.go"
        files = ["--out", str(self.out), "--ready", str(self.ready), "--go", str(self.go)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *files], env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self, until: Callable[[], bool], deadline: float) -> None:
        while not until() and self.process.poll() is None and time.time() < deadline:
            time.sleep(0.05)

    def result(self) -> dict[str, Any]:
        if self.out.exists():
            return json.loads(self.out.read_text())  # type: ignore[no-any-return]
        return {"case": self.name, "failed": self.log.read_text()[-1500:] or "stopped at the time limit"}

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()


def run_cases(cases: list[Case], seconds: float) -> list[dict[str, Any]]:
    deadline = time.time() + seconds
    try:
        for case in cases:
            case.wait(case.ready.exists, deadline)
        for case in cases:
            case.go.touch()
            case.wait(case.out.exists, deadline + 30)
            print(json.dumps(case.result()), flush=True)
    finally:
        for case in cases:
            case.end()
    return [case.result() for case in cases]


def parent(args: argparse.Namespace) -> None:
    import torch

    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    how = ["--precision", args.precision, "--rounds", str(args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        cases = [Case(name, [sys.executable, __file__, "--case", name, *how], env, Path(folder)) for name in args.models.split(",")]
        rows = run_cases(cases, LIMIT)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"bench": "gpu_train", "machine": machine, "precision": args.precision, "rows": rows}))


# -- a child ---------------------------------------------------------------------------------------------------------------------


def timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, ended by a synchronise; a round takes them in turn, so all see the same machine."""
    import torch

    took: dict[str, list[float]] = {n: [] for n in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            for _ in range(3):
                torch.cuda.synchronize()
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                took[name].append(time.perf_counter() - start)
    return {n: round(1e3 * statistics.median(t), 4) for n, t in took.items()}


SORTS = {"nchwToNhwc": "turned", "nhwcToNchw": "turned", "triton_red": "reductions", "triton_per": "reductions", "triton_poi": "elementwise",
         "Memcpy": "copies", "Memset": "copies", "multi_tensor": "update"}  # fmt: skip


def kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """How often each sort of kernel ran in a step and its microseconds in all, and the same of those that take most of its time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = sorted((e for e in seen.key_averages() if e.self_device_time_total), key=lambda e: -e.self_device_time_total)
    sorts: dict[str, list[float]] = {}
    for e in rows:
        kind = next((sort for part, sort in SORTS.items() if part in e.key), "libraries")
        count, us = sorts.get(kind, (0, 0.0))
        sorts[kind] = [count + e.count, round(us + e.self_device_time_total, 1)]
    return {"sorts": sorts, "most": {e.key[:100]: [e.count, round(e.self_device_time_total, 1)] for e in rows[:30]}}


def workload(name: str) -> tuple[Any, dict[str, Any]]:
    from weft.frontend import zoo

    settings = dict(SIZES[name])
    batch = settings.pop("batch")
    if "dropout" in vars(zoo.entry(name).settings):
        settings["dropout"] = 0.0
    w = zoo.get(name, device="cpu", **settings)
    return w, w.example(batch)


def one(name: str, precision: str) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """The ways to run a step on one GPU, warm, and what was compared."""
    import torch

    from weft.api.parallelize import parallelize

    torch.set_float32_matmul_precision("high")
    w, cpu_batch = workload(name)
    batch = {k: v.cuda() for k, v in cpu_batch.items()}
    low = torch.bfloat16 if precision == "bf16" else None
    mine = copy.deepcopy(w.model)
    step = parallelize(mine, w.loss, torch.optim.AdamW(mine.parameters(), lr=1e-4), cpu_batch, device="cuda", precision=low)

    def plain(compiled: bool) -> Callable[[], Any]:
        model = copy.deepcopy(w.model).cuda()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def loss_of(m: Any, b: Any) -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=low is not None):
                return w.loss(m, b)

        run = torch.compile(loss_of) if compiled else loss_of

        def go() -> Any:
            opt.zero_grad()
            loss = run(model, batch)
            loss.backward()
            opt.step()
            return loss

        return go

    ways = {"weft": lambda: step(batch), "eager": plain(False), "compile": plain(True)}
    losses, seconds = {}, {}
    for key, way in ways.items():
        start = time.time()
        losses[key] = [float(way().detach()) for _ in range(4)]
        seconds[key] = round(time.time() - start, 1)
        for _ in range(3):
            way()
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["weft"], losses["eager"], strict=True))
    theirs = max(abs(a - b) / abs(b) for a, b in zip(losses["compile"], losses["eager"], strict=True))
    assert apart < max(2e-2 if low else 2e-3, 3 * theirs), losses
    said = f"losses of 4 steps equal eager's to {apart:.1e} (torch.compile's to {theirs:.1e})"
    return ways, {"correct": said, "first_calls_s": seconds, "how": step.compiled.how}


def child(args: argparse.Namespace) -> None:
    try:
        ways, said = one(args.case, args.precision)
        args.ready.touch()
        while not args.go.exists():
            time.sleep(0.02)
        took = timed(ways, args.rounds)
        peers = {n: ms for n, ms in took.items() if n != "weft"}
        row = {"case": args.case, "weft_ms": took["weft"], "peers_ms": peers,
               "ratios": {n: round(ms / took["weft"], 4) for n, ms in peers.items()}, **said}  # fmt: skip
        row["kernels_us"] = {n: kernels(ways[n]) for n in ("weft", "compile")}
    except Exception as e:
        row = {"case": args.case, "failed": f"{type(e).__name__}: {e}"[:800], "where": traceback.format_exc()[-1500:]}
    whole = args.out.with_suffix(".part")
    whole.write_text(json.dumps(row))
    whole.rename(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=FIVE, help=f"any of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--precision", default="tf32", choices=["tf32", "bf16"])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    for name in ("out", "ready", "go"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    child(args) if args.case else parent(args)


if __name__ == "__main__":
    main()
