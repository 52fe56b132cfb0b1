"""Run the code of a page, in order, in one folder. A page that does not do what it says fails, at its own line.

    ```python              runs; the Python blocks of a page share their names
    ```python file=NAME    is written to NAME
    ```sh                  runs in bash and must end with status 0, or with N after `status=N`
    ```output              is what the block before it printed; `...` stands for anything, and after `about=20%` numbers may be so far off
    <!-- skip: why -->     above a block leaves it out

Other languages (`text`, `json`, `yaml`) are shown only. `python -m tools.pages docs/ops.md` runs one page; `--accept` writes what was
printed into its output blocks.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("text", "json", "yaml")
SURROUNDINGS = {"PYTHONPATH": str(ROOT), "COLUMNS": "140", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}  # of commands
FENCE = re.compile(r"^```(\w+)?[ \t]*([^\n]*)\n(.*?)^```$", re.S | re.M)
SKIP = re.compile(r"<!-- skip: (.+?) -->\n*\Z")


class PageError(Exception):
    """A block that failed, or printed something else; the message begins with its page and line."""


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int  # of its first line of code
    options: dict[str, str]
    skip: str | None = None


def pages() -> list[Path]:
    """Every page whose code is run, notebooks among them."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*.ipynb"))]


def text_of(path: Path) -> str:
    """A page; of a notebook, its cells as one."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    parts = ["".join(c["source"]) if c["cell_type"] == "markdown" else f"```python\n{''.join(c['source'])}\n```" for c in cells]
    return "\n\n".join(parts) + "\n"


def blocks(text: str) -> list[Block]:
    out = []
    for m in FENCE.finditer(text):
        skip = SKIP.search(text, 0, m.start())
        options = dict(word.partition("=")[::2] for word in m[2].split())
        out.append(Block(m[1] or "", m[3], text.count("\n", 0, m.start(3)) + 1, options, skip[1] if skip else None))
    return out


def run_page(path: Path, folder: Path, accept: bool = False, commands: Path = Path(sys.executable).parent) -> int:
    """Runs the page's blocks in the folder, with `weft` from that of commands; the number of blocks that were run, written or compared.

    With `accept`, what was printed replaces output that differs, unless that has `...` in it.
    """
    space: dict[str, object] = {"__name__": "__main__"}
    printed, done = "", 0
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")  # as for a reader who stands in the checkout
    sys.path[:0] = [str(folder), str(ROOT / "examples")]  # the process is the page's own
    with contextlib.chdir(folder):
        for number, block in enumerate(blocks(text_of(path))):
            where = f"{path.name}, line {block.line}"
            if block.skip or block.kind in SHOWN:
                continue
            if block.kind == "output" and accept and "..." not in block.text:
                rewrite(path, number, tidy(printed) + "\n")
            elif block.kind == "output":
                compare(block.text, printed, where, float(block.options.get("about", "0%").rstrip("%")) / 100)
            elif block.kind == "python" and "file" in block.options:
                Path(block.options["file"]).write_text(block.text)
            elif block.kind == "python":
                printed = run_python(block, path.name, space)
            elif block.kind == "sh":
                printed = run_shell(block, where, commands)
            else:
                raise PageError(f"{where}: a block of {block.kind or 'no language'}; needed python, sh, output, {', '.join(SHOWN)}")
            done += 1
    return done


def rewrite(path: Path, number: int, text: str) -> None:
    """Another text for a block of the page."""
    page = path.read_text()
    at = list(FENCE.finditer(page))[number]
    path.write_text(page[: at.start(3)] + text + page[at.end(3) :])


def run_python(block: Block, name: str, space: dict[str, object]) -> str:
    """What it prints. Line numbers, also those in weft's errors, are the page's."""
    out = io.StringIO()
    tree = ast.parse("\n" * (block.line - 1) + block.text, name)
    shown = tree.body.pop() if name.endswith(".ipynb") and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(tree, name, "exec"), space)
            if isinstance(shown, ast.Expr):  # what a notebook draws beneath the cell
                value = eval(compile(ast.Expression(shown.value), name, "eval"), space)
                value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
    except Exception as error:
        raise PageError(f"{name}, block at line {block.line}: {type(error).__name__}: {error}") from error
    return out.getvalue()


def run_shell(block: Block, where: str, commands: Path, seconds: float = 400) -> str:
    """What it prints, to either stream."""
    environ = {**os.environ, **SURROUNDINGS, "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], env=environ, timeout=seconds, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != int(block.options.get("status", 0)):
        raise PageError(f"{where}: status {done.returncode} of\n{block.text}\n{done.stdout[-3000:]}")
    return done.stdout


NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])"  # not one within a word, such as zero3


def compare(want: str, got: str, where: str, about: float = 0.0) -> None:
    """Equal but for `...` and spaces at line ends; with `about`, numbers up to that share apart."""
    want, got = tidy(want), tidy(got)
    numbers = re.findall(NUMBER, want) if about else []
    pattern = re.escape(re.sub(NUMBER, "<number>", want) if about else want).replace(re.escape("..."), ".*?")
    found = re.fullmatch(pattern.replace("<number>", r"(\d[\d,]*(?:\.\d+)?)"), got, re.S)
    far = [b for a, b in zip(map(_value, numbers), map(_value, found.groups() if found else ()), strict=False) if abs(a - b) > about * a]
    if found is None or far:
        raise PageError(f"{where}: printed something else{f', such as {far[0]:g}' if far else ''}\n--- the page says\n{want}\n--- printed\n{got}")


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


if __name__ == "__main__":
    for name in (a for a in sys.argv[1:] if a != "--accept"):
        with tempfile.TemporaryDirectory() as place:
            print(f"{name}: {run_page(Path(name).resolve(), Path(place), accept='--accept' in sys.argv)} blocks")
