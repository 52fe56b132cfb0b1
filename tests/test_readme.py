"""The README says what weft is, and the examples run. What it prints is compared by tests/docs."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_sentence_says_what_it_does() -> None:
    assert "finds the fastest way to train your PyTorch model on your cluster, runs it, and proves" in README.splitlines()[2]


@pytest.mark.parametrize("example", ["adam.py"])
def test_examples_run(example: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
