"""Type checkers accept right use of weft and report misuse: tests/typing/user_code.py."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = "tests/typing/user_code.py"


@pytest.mark.timeout(600)
def test_mypy_strict() -> None:
    settings = ROOT / "tests/typing/mypy.ini"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, CODE], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None and shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright() -> None:
    command = [sys.executable, "-m", "pyright"] if importlib.util.find_spec("pyright") else ["pyright"]
    done = subprocess.run(
        [*command, "-p", "tests/typing", "--pythonpath", sys.executable, "--outputjson"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    wrong = [f"{d['range']['start']['line'] + 1}: {d['message']}" for d in found if d["severity"] == "error"]
    assert not wrong, "\n".join(wrong)
