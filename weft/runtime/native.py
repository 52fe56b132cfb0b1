"""C++ source text to a loaded library: compile once, keep by content, load with ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

from weft.core.errors import KernelError
from weft.runtime import cache

# No -ffast-math: it would flush denormals for the whole process, and a NaN gradient must stay a NaN.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp-simd", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=fast", "-mprefer-vector-width=512", "-Wall")  # fmt: skip
HEADER = Path(__file__).with_name("weft_sync.h")


@functools.cache
def load(source: str) -> ctypes.CDLL:
    """The library compiled from `source`, which may include weft_sync.h."""
    return ctypes.CDLL(str(build(source)))


def build(source: str) -> Path:
    """The shared object of `source`, from the cache or from the compiler."""
    name = cache.digest(source, HEADER.read_text(), " ".join(FLAGS), _compiler_version(), _cpu())
    return cache.entry(f"{name}.so", lambda out: _compile(source, name, out))


def available() -> bool:
    return shutil.which(_compiler()) is not None


def _compile(source: str, name: str, out: Path) -> None:
    text = out.with_name(f"{name}.cpp")
    text.write_text(source)
    command = [_compiler(), *FLAGS, f"-I{HEADER.parent}", str(text), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(
            "the C++ compiler refused a generated kernel",
            needed=f"{text} compiles with {' '.join(command[:-3])}",
            found=done.stderr.strip()[:2000],
            try_="report this with the file named above; CXX chooses another compiler",
        )


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def _compiler_version() -> str:
    try:
        return subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelError(
            "no C++ compiler for CPU kernels",
            needed=f"`{_compiler()}` on the path",
            found=str(error),
            try_="install g++, or set CXX; without one weft runs the unfused form",
        ) from None


@functools.cache
def _cpu() -> str:
    """What -march=native depends on: a cache shared between machines must not mix their code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)
