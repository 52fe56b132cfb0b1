"""The README's program runs as it stands, and prints what the README says it prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [body for lang, body in re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.S | re.M) if lang == language]


def test_the_program_after_three_verbs_prints_as_shown(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(b for b in blocks("python") if not b.startswith("# train.py")))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(script))
    assert out.getvalue().strip() == next(b for b in blocks("") if b.startswith("program")).strip()


def test_the_program_is_ten_lines() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 10


@pytest.mark.parametrize("example", ["adam.py"])
def test_examples_run(example: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")


def test_the_model_trains_on_four_processes(tmp_path: Path) -> None:
    (code,) = [b for b in blocks("python") if b.startswith("# train.py")]
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    losses = [float(x) for x in out.stdout.split()]
    assert len(losses) == 10, out.stderr[-2000:]  # how gloo's threads end after that is not looked at
    assert losses[-1] < losses[0]
