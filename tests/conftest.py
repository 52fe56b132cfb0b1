"""What every test stands on: one thread per process, no AMX, which some machines announce and cannot run, and golden text.

`pytest --accept` writes the golden files anew; read the difference before committing it.
"""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

gc.set_threshold(50_000, 5, 5)  # as the command does
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="accept the text found as the golden text")
    parser.addoption("--all-faults", action="store_true", help="look for planted faults also by the fuzzer unfocused")


@pytest.fixture(autouse=True, scope="module")
def kept_apart() -> Iterator[None]:
    """What a module leaves behind (loaded packages, caches) is kept apart, so that later collections do not walk through it again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a `weft` that starts at once, to be put first in PATH."""
    from tests import forks

    with forks.started(tmp_path_factory.mktemp("forks")) as folder:
        yield folder


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name under tests/golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip() + "\n")
        assert path.exists(), f"no golden file {name}; run pytest --accept and read what it writes"
        assert text.rstrip() + "\n" == path.read_text(), f"{name} differs; if that is meant, run pytest --accept"

    return compare


@pytest.fixture
def golden_figures(request: pytest.FixtureRequest) -> Callable[[str, Mapping[str, Any]], None]:
    """Compares nested figures and words with the JSON of that name under tests/golden: numbers to five digits, all else exactly."""

    def compare(name: str, found: Mapping[str, Any]) -> None:
        path = GOLDEN / f"{name}.json"
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_rounded(found), indent=1, ensure_ascii=False) + "\n")
        assert path.exists(), f"no golden file {path.name}; run pytest --accept and read what it writes"
        moved = _moved(dict(_flat(json.loads(path.read_text()))), dict(_flat(_rounded(found))))
        if moved:
            pytest.fail("\n  ".join([f"{name} differs; if that is meant, run pytest --accept and say why", *moved]), pytrace=False)

    return compare


def _rounded(found: Any) -> Any:
    if isinstance(found, Mapping):
        return {str(k): _rounded(v) for k, v in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(v) for v in found]
    return float(f"{found:.5g}") if isinstance(found, float) else found


def _flat(found: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of every leaf."""
    parts = found.items() if isinstance(found, Mapping) else enumerate(found) if isinstance(found, list) else ()
    if not isinstance(found, Mapping | list) or not found:
        yield at, found
    for key, value in parts:
        yield from _flat(value, f"{at}.{key}" if at else str(key))


def _moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each figure that is another one now. The fifth digit may differ by one: another processor may round otherwise."""
    lines = [f"{k}: {old[k]!r} -> gone" for k in old if k not in new] + [f"{k}: new, {new[k]!r}" for k in new if k not in old]
    for key in (k for k in old if k in new):
        a, b = old[key], new[key]
        if _is_number(a) and _is_number(b):
            if not math.isclose(a, b, rel_tol=2e-5, abs_tol=1e-9):
                lines.append(f"{key}: {a} -> {b}" + (f" ({b / a - 1:+.2%})" if a else ""))
        elif a != b:
            lines.append(f"{key}: {a!r} -> {b!r}")
    return lines


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
