"""Ranks of a benchmark on one GPU: processes under MPS that call one function of a module, with a limit on their time.

    report("gpu-matmuls", run_stages("bench.gpu_matmuls", {"gather": Stage("gather", limit=100)}, "gather", ranks=4), json=True)

The function is called as `work(me, **settings)` with a `Rank`. What rank 0 says is shown as it comes and kept whatever happens after.
With device "cpu" the same code runs over gloo, to see that it runs.
"""

from __future__ import annotations

import contextlib
import json as text
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from weft.core.errors import RuntimeFault, UnknownName
from weft.runtime.faults import LOST_A_PEER

ROOT = Path(__file__).resolve().parent.parent
ON_CPUS = "a machine with an NVIDIA GPU; `weft bench optimizer`, `overlap`, `train`, `inference` and `dynamic` need none"
PEERS, NCCL = "gloo", "cpu:gloo,cuda:nccl"  # ranks that share memory meet over gloo

JSON = typer.Option(False, "--json", help="Print one JSON object as the last line.")
RANKS = typer.Option(4, help="Processes that share the GPU.")
QUICK = typer.Option(False, help="Fewer cases and ways.")
DEVICE = typer.Option("cuda", help="With `cpu` the same code runs over gloo, to see that it runs.")


@dataclass(frozen=True)
class Stage:
    """What ranks of their own do together: a function's name, the seconds it may take, how the ranks reach each other, and what it is told."""

    work: str
    limit: float
    backend: str = PEERS
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""  # in the report, where a benchmark has several


def run_stages(
    module: str, stages: Mapping[str, Stage], wanted: str, ranks: int, device: str = "cuda", **settings: Any
) -> list[dict[str, Any]]:
    """Those of a benchmark's stages that are wanted, one after the other."""
    names = wanted.split(",")
    if unknown := [name for name in names if name not in stages]:
        raise UnknownName("no such stage", needed=f"some of {', '.join(stages)}, joined by commas", found=", ".join(unknown))
    return [run(module, replace(stages[name], name=name), ranks, device, **settings) for name in names]


def run(module: str, stage: Stage, ranks: int, device: str = "cuda", **settings: Any) -> dict[str, Any]:
    """A stage's rows and how it ended; what was said before a failure or the limit is kept."""
    start = time.monotonic()
    with ended_with_us(), tempfile.TemporaryDirectory() as folder, _mps(device, Path(folder)) as env:
        out, logs = Path(folder, "rows"), [Path(folder, f"{r}.log") for r in range(ranks)]
        command = [sys.executable, "-m", "bench._gpu_rank", module, stage.work, stage.backend, device, str(out)]
        command += [text.dumps({**stage.settings, **settings})]
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
                "WEFT_BENCH_LIMIT": str(stage.limit)}  # fmt: skip
        processes = [_start(command, {**env, "RANK": str(r)}, logs[r]) for r in range(ranks)]
        status = _watch(processes, start + stage.limit, out)
        found = {"stage": stage.name, "ranks": ranks, "status": status, "seconds": round(time.monotonic() - start, 1)}
        if status != "ok":
            found["logs"] = [log.read_text()[-3000:] for log in logs]
            print(text.dumps(found), file=sys.stderr, flush=True)
        return {**found, "rows": _rows(out)}


def report(bench: str, results: Sequence[Mapping[str, Any]], json: bool) -> None:
    """A table of what was timed and, if asked for, everything as one object. Fails where a stage or a case did."""
    from weft.cli.output import console, emit

    said = [{"stage": r["stage"], "ranks": r["ranks"], **row} for r in results for row in r["rows"]]
    rows = [{k: v for k, v in row.items() if k != "machine"} for row in said if "case" in row]
    if timed := [row for row in rows if "weft_ms" in row]:
        console.print(_table(bench, timed), width=max(console.width, 140))
    if json:
        machine = next((row["machine"] for row in said if "machine" in row), {})
        stages = [{k: v for k, v in r.items() if k != "rows"} for r in results]
        emit({"bench": bench, "machine": machine, "stages": stages, "rows": rows})
    if any(r["status"] != "ok" for r in results) or any("failed" in row for row in rows):
        raise typer.Exit(1)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title=f"{title}: milliseconds, and how many times weft is faster")
    peers = list(dict.fromkeys(name for row in rows for name in row.get("peers_ms", {})))
    for column in ("case", "weft", "limit", *peers):
        table.add_column(column)
    for row in rows:
        cells = [f"{row['peers_ms'][p]:.4g} ({row['ratios'][p]:.2f}x)" if p in row.get("peers_ms", {}) else "" for p in peers]
        limit = f"{row['limit_ms']:.4g}" if row.get("limit_ms") else ""
        table.add_row(f"{row['stage']} x{row['ranks']} {row['case']}".strip(), f"{row['weft_ms']:.4g}", limit, *cells)
    return table


def need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeFault(
            "this benchmark runs on a GPU", needed="one that torch can use", found=f"none (torch {torch.__version__})", try_=ON_CPUS
        )


# -- processes -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """Being told to end is an exception like others here, so that no process is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _mps(device: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of ranks. Those that share a GPU run at the same time only under MPS: a new one, so that no failure is inherited."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
           "TORCHINDUCTOR_COMPILE_THREADS": "4"}  # fmt: skip
    if device == "cpu":
        yield env
        return
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise RuntimeFault(
            "ranks share a GPU under MPS",
            needed="nvidia-cuda-mps-control",
            found="none on the PATH",
            try_=ON_CPUS,
        )
    for name in ("pipe", "log"):
        (folder / name).mkdir()
        env[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str(folder / name)
    subprocess.run([control, "-d"], env=env, check=True, timeout=30)
    try:
        yield env
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([control], input="quit\n", text=True, env=env, timeout=20, check=False)


def _start(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)


def _watch(processes: Sequence[subprocess.Popen[bytes]], deadline: float, out: Path) -> str:
    """Wait for all, showing what rank 0 says; when one fails or the time is up, end the rest."""
    shown = 0
    try:
        while True:
            codes = [p.poll() for p in processes]
            said = out.read_text() if out.exists() else ""
            print(said[shown:], end="", file=sys.stderr, flush=True)
            shown = len(said)
            if all(code == 0 for code in codes):
                return "ok"
            failed = {rank: code for rank, code in enumerate(codes) if code}
            culprits = {rank: code for rank, code in failed.items() if code != LOST_A_PEER}
            deadline = min(deadline, time.monotonic() + 10) if failed else deadline  # who was lost ends a moment after whoever lost it
            if culprits or (failed and (None not in codes or time.monotonic() > deadline)):
                rank, code = next(iter((culprits or failed).items()))
                return f"rank {rank} ended with {code}"
            if time.monotonic() > deadline:
                return "stopped at its limit"
            time.sleep(0.1)
    finally:
        for p in processes:
            if p.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()


def _rows(out: Path) -> list[dict[str, Any]]:
    lines = out.read_text().splitlines() if out.exists() else []
    return [text.loads(line) for line in lines]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
