"""What every test stands on: one thread per process, no AMX, which some machines announce and cannot run, and golden text.

`pytest --accept` writes the golden files anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="accept the text found as the golden text")
    parser.addoption("--all-faults", action="store_true", help="look for planted faults also by the fuzzer unfocused")


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
