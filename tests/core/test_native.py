"""One cache and one way from C++ text to a loaded library, whatever the home directory is like."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weft.core import cache, native
from weft.core.errors import KernelError

TWICE = 'extern "C" int twice(int x) { return 2 * x; }\n'
needs_compiler = pytest.mark.skipif(not native.available(), reason="no C++ compiler here")
not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and an empty folder of temporary files beside it."""
    tmp_path.chmod(0o700)
    for name in ("WEFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    native.load.cache_clear()
    cache._tell.cache_clear()
    return tmp_path / "home"


def built(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs_compiler
def test_an_empty_home_serves_the_planner_and_the_runtime_in_either_order(home: Path) -> None:
    """The planner's loops and a rank's kernels lie in one folder, and neither is refused for what the other made."""
    planner = "from weft.plan.assignment import kernel; assert kernel._library() is not None"
    runtime = "from weft.core import native; from weft.runtime import peers; assert native.load(peers.SYNC, header=peers.HEADER).weft_barrier"
    trees = "from weft.dynamic import native; assert native.library() is not None"
    for n, script in enumerate((planner, runtime, trees, planner)):
        done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert len(built(home / ".cache/weft")) == min(n + 1, 3)
    assert mode(home / ".cache") == mode(home / ".cache/weft") == 0o700
    assert not list(home.parent.glob("tmp/*"))


def test_what_is_made_on_the_way_is_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        assert cache.cache_dir() == home / ".cache/weft"
    finally:
        os.umask(before)
    assert mode(home / ".cache") == mode(home / ".cache/weft") == 0o700


def test_which_folder_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_dir() == home / ".cache/weft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache.cache_dir() == home / "xdg/weft"
    monkeypatch.setenv("WEFT_CACHE", str(home / "own"))
    assert cache.cache_dir() == home / "own"


def test_a_folder_that_others_may_only_read_is_closed_and_used(home: Path) -> None:
    (home / ".cache/weft").mkdir(parents=True)
    (home / ".cache/weft").chmod(0o755)
    assert mode(cache.cache_dir()) == 0o700


def test_code_is_not_run_from_a_place_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(0o777)
    monkeypatch.setenv("WEFT_CACHE", str(place))
    with pytest.raises(KernelError, match="others could write to it") as e:
        cache.cache_dir()
    assert "mode 0777" in str(e.value)
    assert f"chmod 700 {place}" in str(e.value)
    place.chmod(0o700)
    assert cache.cache_dir() == place
    tmp_path.chmod(0o777)
    with pytest.raises(KernelError, match="others could write"):
        cache.cache_dir()
    tmp_path.chmod(0o700)


def test_a_home_that_others_can_write_is_not_used(home: Path) -> None:
    home.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"keeps compiled code in .*/tmp/weft-\d+: will not run code from .*others could write"):
        assert cache.cache_dir() == home.parent / f"tmp/weft-{os.geteuid()}"


@not_root
@pytest.mark.parametrize("permissions", [0o000, 0o500])
def test_a_home_that_cannot_be_read_or_written_is_left_alone(home: Path, permissions: int) -> None:
    home.chmod(permissions)
    try:
        with pytest.warns(RuntimeWarning, match=r"keeps compiled code in .*/tmp/weft-\d+: .*Permission denied"):
            assert cache.cache_dir().is_relative_to(home.parent / "tmp")
    finally:
        home.chmod(0o700)


def test_a_home_that_is_a_file_or_unknown_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))
    with pytest.warns(RuntimeWarning, match=r"keeps compiled code in .*Not a directory"):
        assert cache.cache_dir().is_relative_to(home.parent / "tmp")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", _unknown)
    with pytest.warns(RuntimeWarning, match="home directory"):
        assert cache.cache_dir().is_relative_to(home.parent / "tmp")


def _unknown(uid: int) -> object:
    raise KeyError(uid)


@needs_compiler
def test_a_full_disk_sends_it_elsewhere_and_two_full_disks_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, write = [home], cache._write

    def on_a_full_disk(path: Path, make: object) -> None:
        if any(path.is_relative_to(f) for f in full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, make)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "_write", on_a_full_disk)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert native.load(TWICE).twice(4) == 8
    assert built(home.parent / f"tmp/weft-{os.geteuid()}")
    full.append(home.parent / "tmp")
    with pytest.raises(KernelError, match="no place to keep compiled code") as e:
        native.load(TWICE + "\n")
    assert str(e.value).count("No space left on device") == 2
    assert "set WEFT_CACHE to such a folder" in str(e.value)


@needs_compiler
def test_a_compiler_that_finds_no_room_is_not_blamed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = home / "full++"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] || { echo 'a.s: fatal error: No space left on device' >&2; exit 1; }\n")
    fake.chmod(0o700)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(KernelError, match="no place to keep compiled code"):
        native.load(TWICE)


@needs_compiler
def test_a_library_is_built_once_and_found_by_content(home: Path) -> None:
    assert native.load(TWICE).twice(21) == 42
    (first,) = built(home / ".cache/weft")
    stamp = first.stat().st_mtime_ns
    assert mode(first) == 0o600
    native.load.cache_clear()
    assert native.load(TWICE).twice(21) == 42
    assert first.stat().st_mtime_ns == stamp
    native.load(TWICE + "// more\n")
    assert len(built(home / ".cache/weft")) == 2
    native.load(TWICE, flags=("-ffp-contract=off",))
    assert len(built(home / ".cache/weft")) == 3
    assert not list((home / ".cache/weft").glob(".build-*"))


@needs_compiler
@pytest.mark.parametrize("length", [0, 100, 4096, -1])
def test_a_library_that_was_cut_is_built_again(home: Path, length: int) -> None:
    """A library cut in the middle may load and then end the process with a bus error."""
    script = f"from weft.core import native; print(native.load({TWICE!r}).twice(3))"

    def run() -> str:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
        return done.stdout.strip() or f"{done.returncode} {done.stderr}"

    assert run() == "6"
    (path,) = built(home / ".cache/weft")
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    assert run() == "6"
    assert path.read_bytes() == whole
    path.with_name(f"{path.name}.sum").write_bytes(b"\xff")
    assert run() == "6"


def test_a_module_that_was_cut_is_written_again(home: Path) -> None:
    from weft.runtime import modules

    assert modules.load("a = 1\nb = 2\n").b == 2
    (path,) = (home / ".cache/weft").glob("*.py")
    path.write_text("a = 1\n")
    modules.load.cache_clear()
    assert modules.load("a = 1\nb = 2\n").b == 2


def test_times_that_were_cut_are_measured_again(home: Path) -> None:
    from weft.tune.store import Store

    Store("key").put("plain", 1.5)
    assert Store("key").times == {"plain": 1.5}
    for damaged in ('{"times": {"pl', "[]", '{"times": 3}', '{"times": {"plain": null}}'):
        Store("key").path.write_text(damaged)
        assert Store("key").times == {}


@needs_compiler
def test_a_kernel_that_does_not_compile_says_so(home: Path) -> None:
    with pytest.raises(KernelError, match="refused a generated kernel") as e:
        native.load("not C++ at all\n")
    assert ".cpp" in str(e.value)


def test_without_a_compiler_it_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    native._compiler_version.cache_clear()
    assert not native.available()
    try:
        with pytest.raises(KernelError, match=r"no C\+\+ compiler for CPU kernels") as e:
            native.load(TWICE)
    finally:
        native._compiler_version.cache_clear()
    assert "`no-such-compiler -O1` on the path" in str(e.value)
