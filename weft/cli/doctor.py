"""`weft doctor`: what this machine has, what weft can do with it, and what to change.

A check is a function that returns a Finding; CHECKS lists them in the order shown. Only a `fail` stops weft.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import typer

from weft.cli.output import emit, results

Status = Literal["ok", "warn", "fail"]
GIB = 2**30
BF16_ADVICE = "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"


@dataclass(frozen=True)
class Finding:
    """What one check saw, and what to do about it unless it is ok."""

    name: str
    status: Status
    found: str
    advice: str = ""


def doctor(json: bool = typer.Option(False, "--json", help="Print the result as one JSON object.")) -> None:
    """Check this machine: what weft can use and what to change."""
    findings = [check() for check in CHECKS]
    counts = {status: sum(f.status == status for f in findings) for status in ("ok", "warn", "fail")}
    _show(findings)
    if json:
        emit({**counts, "checks": [asdict(f) for f in findings]})
    if counts["fail"]:
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    colour = {"ok": "green", "warn": "yellow", "fail": "red"}
    for f in findings:
        line = f"[{colour[f.status]}]{f.status:<4}[/]  {f.name:<14} "
        results().print(line, end="")
        results().print(f.found, markup=False, highlight=False, soft_wrap=True)
        if f.advice:
            results().print(f"{'':<6}{'':<14} -> {f.advice}", markup=False, highlight=False, soft_wrap=True)


# --- software


def python() -> Finding:
    found = sys.version.split()[0]
    if (3, 11) <= sys.version_info < (3, 14):
        return Finding("python", "ok", found)
    return Finding("python", "fail", found, "use Python 3.11, 3.12 or 3.13")


def torch() -> Finding:
    advice = "pip install 'torch>=2.11,<2.14'"
    return _package("torch", "torch", absent="fail", advice=advice, low=(2, 11), high=(2, 14))


def triton() -> Finding:
    return _package("triton", "triton", advice="pip install triton: no fused GPU kernels without it", low=(3, 6))


def z3() -> Finding:
    return _package("Z3", "z3-solver", "z3", advice="pip install z3-solver: only weft verify uses it, to verify rules a second time")


def transformers() -> Finding:
    return _package("transformers", "transformers", advice="pip install transformers: Hugging Face models and the Trainer need it", low=(4, 50))


def yaml() -> Finding:
    return _package(
        "PyYAML", "pyyaml", "yaml", advice="pip install pyyaml: without it clusters and configurations in YAML are not read"
    )


def _package(
    name: str,
    distribution: str,
    module: str | None = None,
    *,
    advice: str,
    absent: Status = "warn",
    low: tuple[int, int] = (0, 0),
    high: tuple[int, int] = (10**6, 0),
) -> Finding:
    """Import it for real, since a package may be listed and still not load."""
    try:
        found = version(distribution)
        import_module(module or distribution)
    except PackageNotFoundError:
        return Finding(name, absent, "not installed", advice)
    except Exception as error:
        return Finding(name, absent, f"{found} does not import: {type(error).__name__}: {error}", advice)
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if low <= release < high:
        return Finding(name, "ok", found)
    return Finding(name, "fail" if release < low else "warn", f"{found}, which weft is not tested with", advice)


# --- the machine


def cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    found = f"{count} usable" + (f", limited to {quota:g} by a quota" if quota else "")
    if min(count, quota or count) >= 2:
        return Finding("cores", "ok", found)
    return Finding("cores", "warn", found, "several ranks will take turns: results are right, timings mean little")


def _cpu_quota() -> float | None:
    """Cores granted by the control group, if it sets a limit."""
    text = _read("/sys/fs/cgroup/cpu.max").split()
    return int(text[0]) / int(text[1]) if len(text) == 2 and text[0] != "max" else None


def memory() -> Finding:
    free = _available_memory()
    if free is None:
        return Finding("memory", "warn", "unknown", "keep at least 4 GiB free")
    if free >= 4 * GIB:
        return Finding("memory", "ok", f"{free / GIB:.1f} GiB available")
    return Finding("memory", "warn", f"{free / GIB:.1f} GiB available", "keep 4 GiB free, or plan smaller models")


def _available_memory() -> int | None:
    """Free memory of the machine or, where it is less, what the control group still grants."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in fields:
        return None
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "warn", "no /dev/shm", "ranks on CPUs will use gloo, which is slower")
    stat = os.statvfs("/dev/shm")
    free = stat.f_bavail * stat.f_frsize
    if free >= GIB:
        return Finding("shared memory", "ok", f"{free / GIB:.1f} GiB free in /dev/shm")
    advice = "give the container more, as in `docker run --shm-size=8g`: ranks on CPUs keep their buffers there"
    return Finding("shared memory", "warn", f"{free / GIB:.2f} GiB free in /dev/shm", advice)


def threads() -> Finding:
    value = os.environ.get("OMP_NUM_THREADS")
    if value in (None, "1"):
        return Finding(
            "threads", "ok", "OMP_NUM_THREADS=1" if value else "OMP_NUM_THREADS is not set: weft run and torchrun start processes with 1"
        )
    advice = "export OMP_NUM_THREADS=1 when ranks are processes on CPUs: ranks x threads should not exceed the cores"
    return Finding("threads", "warn", f"OMP_NUM_THREADS={value}", advice)


def compiler() -> Finding:
    """A C++ compiler that links a shared library, since CPU kernels are built that way."""
    command = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "")
    advice = "install g++ or clang++, or set CXX: without one, CPU kernels run as torch calls"
    if not command:
        return Finding("compiler", "warn", "no C++ compiler on PATH", advice)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text('extern "C" int probe(int x) { return x + 1; }\n')
        argv = [*command.split(), "-O1", "-shared", "-fPIC", str(source), "-o", str(Path(folder, "probe.so"))]
        status, output = _try(argv)
    if status == 0:
        return Finding("compiler", "ok", shutil.which(command.split()[0]) or command)
    return Finding("compiler", "warn", f"{command} cannot build a shared library: {output}", advice)


# --- what torch can do here


def distributed() -> Finding:
    dist = _torch("distributed")
    if dist is None or not dist.is_available():
        return Finding("distributed", "fail", "torch.distributed is not available", "install a torch build that has it")
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = ", ".join(name if there else f"no {name}" for name, there in has.items())
    if not has["gloo"]:
        return Finding("distributed", "warn", found, "ranks on CPUs need gloo: install a torch build that has it")
    return Finding("distributed", "ok", found)


def gpu() -> Finding:
    cuda = _torch("cuda")
    if cuda is None or not cuda.is_available():
        return Finding("GPU", "ok", "none: plans can still be made and simulated for any cluster, and run on CPU ranks")
    count = cuda.device_count()
    seen = cuda.get_device_properties(0)
    found = f"{count} x {seen.name}, sm_{seen.major}{seen.minor}, {seen.total_memory / GIB:.0f} GiB"
    if (seen.major, seen.minor) < (8, 0):
        return Finding("GPU", "warn", found, "bf16 and the fused kernels need compute capability 8.0 or more")
    if count > 1 and not all(cuda.can_device_access_peer(0, other) for other in range(1, count)):
        return Finding("GPU", "warn", f"{found}, no peer access", "fused collectives need it; NCCL will be used")
    return Finding("GPU", "ok", found)


def bf16() -> Finding:
    """Multiply in bf16 in another process: where AMX is announced and cannot run, the process is killed."""
    probe = (
        "import torch; a = torch.randn(256, 256).bfloat16(); w = a.float() @ a.float(); "
        "raise SystemExit(bool(((a @ a).float() - w).abs().max() > 0.05 * w.abs().max()))"
    )
    status, output = _try([sys.executable, "-c", probe])
    amx = "amx_tile" in _read("/proc/cpuinfo").split()
    capped = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if status < 0:
        return Finding("bf16 on CPU", "warn", f"a matmul dies of {signal.Signals(-status).name}", BF16_ADVICE)
    if status > 0:
        return Finding("bf16 on CPU", "warn", f"a matmul fails or is wrong: {output}".rstrip(": "), BF16_ADVICE)
    if amx and not capped:
        advice = f"{BF16_ADVICE} if bf16 ever dies of SIGILL: some virtual machines announce AMX and cannot run it"
        return Finding("bf16 on CPU", "warn", "works here, through AMX", advice)
    return Finding("bf16 on CPU", "ok", f"works, ONEDNN_MAX_CPU_ISA={capped}" if capped else "works")


# --- helpers


def _torch(name: str) -> Any:
    """`torch.NAME`, or None where torch does not import (`torch()` already says so)."""
    try:
        return import_module(f"torch.{name}")
    except Exception:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _try(argv: list[str]) -> tuple[int, str]:
    """Exit status (negative: the signal) and the last line of what was said on stderr."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"{type(error).__name__}: {error}"
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


CHECKS: tuple[Callable[[], Finding], ...] = (
    python,
    torch,
    triton,
    yaml,
    transformers,
    z3,
    cores,
    memory,
    shared_memory,
    threads,
    compiler,
    distributed,
    gpu,
    bf16,
)
