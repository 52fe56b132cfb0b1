"""Where generated code is kept: one private folder, entries named by the hash of what made them.

Code is executed from here, so the folder must be the user's own and closed to everyone else, and an entry must be
what was written. The folder is $WEFT_CACHE; else $XDG_CACHE_HOME/weft or ~/.cache/weft, and where that cannot be used
(no home, read-only, full) a private one among the temporary files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

from weft.core.errors import KernelError

T = TypeVar("T")


def digest(*parts: str) -> str:
    """A name for content: equal parts, equal name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cache_dir() -> Path:
    """The user's cache, made on first use (mode 0700) and refused if others could write to it."""
    return in_a_place(_writable)


def entry(name: str, make: Callable[[Path], None], use: Callable[[Path], T]) -> T:
    """`use(path)` of the cached file `name`; `make(path)` writes it once, whichever process comes first."""
    return in_a_place(lambda folder: use(_kept(folder / name, make)))


def in_a_place(use: Callable[[Path], T]) -> T:
    """`use(folder)` with the first folder where it raises no OSError. A folder that $WEFT_CACHE names is the only one."""
    failed: list[str] = []
    for place in _places():
        folder = _opened(place, failed)
        if folder is None:
            continue
        try:
            found = use(folder)
        except OSError as error:
            failed.append(_describe_error(error))
            continue
        if failed:
            _tell(failed[0])
        return found
    raise KernelError(
        "there is no place to keep compiled code",
        needed="a folder of your own, mode 0700, that can be written and has room",
        found="; ".join(failed),
        try_="make room, or set WEFT_CACHE to such a folder",
    )


def _opened(place: Callable[[], Path], failed: list[str]) -> Path | None:
    """The folder, if it can be trusted. One that the user named and cannot is refused; of others it is noted why."""
    try:
        return _private(place())
    except KernelError as error:
        if os.environ.get("WEFT_CACHE"):
            raise
        failed.append(f"{error.message} ({error.found})")
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where home is
        failed.append(_describe_error(error))
    return None


def _places() -> tuple[Callable[[], Path], ...]:
    if named := os.environ.get("WEFT_CACHE"):
        return (lambda: Path(named),)
    return _home, _temporary


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weft"


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"weft-{os.geteuid()}"


def _writable(folder: Path) -> Path:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")
    return folder


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


@cache
def _tell(why: str) -> None:
    warnings.warn(f"weft keeps compiled code in {_temporary()}: {why}", RuntimeWarning, stacklevel=2)


# --- one folder


def _private(path: Path) -> Path:
    """The folder, made where it is missing; all that is made on the way is the user's alone, whatever the umask."""
    path = path.absolute()
    for folder in reversed([p for p in (path, *path.parents) if not p.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)
    path = path.resolve()
    _close_to_readers(path)
    _check_private(path)
    for above in path.parents:
        _check_not_replaceable(above)
    return path


def _close_to_readers(path: Path) -> None:
    """A folder of one's own that others may only read has done no harm yet."""
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o077 and not found.st_mode & 0o022:
        path.chmod(0o700)


def _check_private(path: Path) -> None:
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or stat.S_ISLNK(found.st_mode):
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


# --- one entry: the file, and next to it the sum of what was written


def _kept(path: Path, make: Callable[[Path], None]) -> Path:
    if not _is_complete(path):
        with _locked(path):
            if not _is_complete(path):
                _write(path, make)
    _check_private(path)
    return path


def _write(path: Path, make: Callable[[Path], None]) -> None:
    """Written next to its place and moved there, so that nobody finds half of it."""
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        make(draft)
        os.chmod(draft, 0o600)
        made = _sum(draft)
        os.replace(draft, path)
        draft.write_text(made)
        os.chmod(draft, 0o600)
        os.replace(draft, _sum_of(path))
    finally:
        draft.unlink(missing_ok=True)


def _is_complete(path: Path) -> bool:
    """Whether the file is there as it was written: a full disk or a crash may have truncated it."""
    try:
        return _sum_of(path).read_text() == _sum(path)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _sum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sum")


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path.with_name(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
