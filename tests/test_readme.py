"""The README's program is as short as it says, and the examples run. What it prints is compared by tests/docs."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [body for lang, body in re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.S | re.M) if lang == language]


def test_the_program_is_ten_lines() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 10


@pytest.mark.parametrize("example", ["adam.py"])
def test_examples_run(example: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
