"""Where generated code is kept: one private directory, entries named by the hash of what made them.

Code is executed from here, so the directory must be the user's own and closed to everyone else.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.core.errors import KernelError


def cache_dir() -> Path:
    """The user's cache, made on first use (mode 0700) and refused if others could write to it."""
    base = os.environ.get("WEFT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weft"
    path = Path(base).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve()
    _check_private(path)
    for above in path.parents:
        _check_not_replaceable(above)
    return path


def digest(*parts: str) -> str:
    """A name for content: equal parts, equal name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def entry(name: str, make: Callable[[Path], None]) -> Path:
    """The cached file `name`; `make(path)` writes it once, whichever process comes first."""
    path = cache_dir() / name
    if not path.exists():
        with _locked(path):
            if not path.exists():
                draft = path.with_name(f".{os.getpid()}-{path.name}")
                try:
                    make(draft)
                    os.chmod(draft, 0o600)
                    os.rename(draft, path)
                finally:
                    draft.unlink(missing_ok=True)
    _check_private(path)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path.with_name(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_private(path: Path) -> None:
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or stat.S_ISLNK(found.st_mode):
        raise _unsafe(path, found)
    if path.is_dir() and found.st_mode & 0o077:
        raise _unsafe(path, found)


def _check_not_replaceable(path: Path) -> None:
    """A directory above may be shared only if it is sticky (as a temporary directory is)."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        raise _unsafe(path, found)


def _unsafe(path: Path, found: os.stat_result) -> KernelError:
    return KernelError(
        f"will not run code from {path}: others could write to it",
        needed="a path owned by you, mode 0700, below directories only you or root can change",
        found=f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o} (you are {os.geteuid()})",
        try_=f"chmod 700 {path}, or set WEFT_CACHE to a directory of your own",
    )
