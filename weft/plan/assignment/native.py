"""Compiles `native.cpp` on first use and keeps the library in a private cache, keyed by source, compiler, flags and processor.

Without a C++ compiler, or with WEFT_NATIVE=0, `library()` is None and `loops.py` does the same work slowly.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-ffp-contract=off", "-shared", "-fPIC")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be had."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if os.environ.get("WEFT_NATIVE") == "0" or compiler is None:
        return None
    try:
        target = _folder() / f"assignment-{_key(compiler)}.so"
        if not target.exists():
            _build(compiler, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError):
        return None


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=20, check=True).stdout
    parts = SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _processor().encode()
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on: a cache on a shared disk may be read by another machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _folder() -> Path:
    """A folder only this user can write; a fresh temporary one where the cache cannot be trusted."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "native"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
        if status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return base
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="weft-native-"))


def _build(compiler: str, target: Path) -> None:
    """Compile beside the target and move it there, so that nobody loads half a library."""
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *FLAGS, "-o", str(partial), str(SOURCE)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    partial.chmod(0o700)
    partial.replace(target)
