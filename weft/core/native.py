"""C++ source text to a loaded library: compile once, keep by content, load with ctypes.

Without a compiler, or with WEFT_NATIVE=0, `available()` is false and callers take their slower way.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TypeVar

from weft.core import cache
from weft.core.errors import KernelError

# No -ffast-math: it would flush denormals for the full process, and a NaN gradient must stay a NaN.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp-simd", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=fast", "-Wall",
         *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()))  # fmt: skip

Library = TypeVar("Library", bound=ctypes.CDLL)


def available() -> bool:
    """Whether there is a compiler and it may be used."""
    return os.environ.get("WEFT_NATIVE") != "0" and bool(_compiler()) and shutil.which(_compiler()[0]) is not None


@functools.cache
def load(
    source: str, *, flags: tuple[str, ...] = (), header: Path | None = None, kind: type[Library] = ctypes.CDLL  # type: ignore[assignment]
) -> Library:
    """The library compiled from `source`, which may include `header`; `flags` come after FLAGS."""
    name = cache.digest(source, header.read_text() if header else "", " ".join((*FLAGS, *flags)), _compiler_version(), _cpu())
    include = (f"-I{header.parent}",) if header else ()
    return cache.entry(f"{name}.so", lambda out: _compile(source, name, out, (*flags, *include)), lambda path: kind(str(path)))


def _compile(source: str, name: str, out: Path, flags: tuple[str, ...]) -> None:
    text = out.with_name(f"{name}.cpp")
    text.write_text(source)
    command = [*_compiler(), *FLAGS, *flags, str(text), "-o", str(out)]
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as scratch:  # where there is room, if anywhere
        environment = {**os.environ, "LC_ALL": "C", "TMPDIR": scratch}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out.parent))
    if done.returncode:
        raise KernelError(
            "the C++ compiler refused a generated kernel",
            needed=f"{text} compiles with {' '.join(command[:-3])}",
            found=done.stderr.strip()[:2000],
            try_="report this with the file named above; CXX chooses another compiler",
        )


def _compiler() -> list[str]:
    return (os.environ.get("CXX") or "g++").split()


@functools.cache
def _compiler_version() -> str:
    try:
        return subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelError(
            "no C++ compiler for CPU kernels",
            needed=f"`{' '.join(_compiler())}` on the path",
            found=str(error),
            try_="install g++, or set CXX; without one weft runs the unfused form",
        ) from None


@functools.cache
def _cpu() -> str:
    """What -march=native depends on: a cache shared between machines must not mix their code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)
