"""docs/errors.md: every class of error with an example that is really raised, and every refusal in the program by its words.

The words are read from the source, so the page cannot lag behind it: `python -m tools.refusals` writes it, a test compares.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.examples_of_errors import EXAMPLES
from weft.core import errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"
FACTS = ("needed", "found", "try_")
HEAD = """# Errors

Made by `make docs` from the source; do not edit.

Every refusal is a `weft.WeftError`: a headline that names the thing, an excerpt of the program with the place marked where there is one, then
what was **needed**, what was **found** and what to **try**. Repairs offered for a program were tried on it and pass. The command line prints
the same words and ends with status 1 (an infeasible plan with status 2). Below, words in *italics* stand for what is filled in.

    try:
        ...
    except weft.WeftError as e:
        e.message, e.needed, e.found, e.repairs, e.where
"""


@dataclass(frozen=True)
class Refusal:
    """One place that makes an error; `words` has its message and facts as templates."""

    kind: str
    file: str
    line: int
    words: dict[str, str]


def classes() -> dict[str, type[errors.WeftError]]:
    """Base first, then in the order of the file."""
    return {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.WeftError)}


def refusals(folder: Path = ROOT / "weft") -> Iterator[Refusal]:
    """Every call of an error's class in the source."""
    known = classes()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known and (node.args or node.keywords):
                yield Refusal(node.func.id, str(path.relative_to(folder.parent)), node.lineno, words_of(node))


def words_of(call: ast.Call) -> dict[str, str]:
    given = {"message": call.args[0]} if call.args else {}
    given |= {k.arg: k.value for k in call.keywords if k.arg in (*FACTS, "message")}
    return {key: template(value) for key, value in given.items()}


def template(node: ast.AST) -> str:
    """An expression as words, what is filled in between asterisks."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(v) if isinstance(v, ast.Constant) else filled(v.value) for v in node.values)  # type: ignore[attr-defined]
    if isinstance(node, (ast.List, ast.Tuple)):
        return "; ".join(template(x) for x in node.elts)
    if isinstance(node, ast.IfExp):
        sides = [template(x) for x in (node.body, node.orelse) if not (isinstance(x, ast.Constant) and x.value is None)]
        return " / ".join(dict.fromkeys(sides))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.BoolOp):
        return " / ".join(dict.fromkeys(template(v) for v in node.values))
    return filled(node)


def filled(node: ast.AST) -> str:
    """The last plain word of what is filled in: `type(x).__name__` of `batch.shape` says shape."""
    names = [n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(node) if isinstance(n, (ast.Attribute, ast.Name))]
    plain = [n.strip("_") for n in names if n not in ("str", "repr", "len", "type", "list", "join", "sorted", "map", "int", "dict")]
    return f"*{plain[0].replace('_', ' ')}*" if plain else "*...*"


# -- the page ------------------------------------------------------------------------------------------------------------------


def page() -> str:
    found: dict[str, list[Refusal]] = {}
    for r in refusals():
        found.setdefault(r.kind, []).append(r)
    space: dict[str, object] = {"__name__": "__main__"}
    return "\n".join([HEAD, *(section(name, kind, found.get(name, []), space) for name, kind in classes().items())]).rstrip() + "\n"


def section(name: str, kind: type[errors.WeftError], found: list[Refusal], space: dict[str, object]) -> str:
    lines = [f"## {name}", "", (kind.__doc__ or "").strip(), ""]
    if name in EXAMPLES:
        lines += example(EXAMPLES[name], space)
    rows = dict.fromkeys(row(r) for r in sorted(found, key=lambda r: (r.file, r.line)))
    if rows:
        lines += ["| refusal | needed | found | try |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def example(code: str, space: dict[str, object]) -> list[str]:
    """The code as a block that runs, and what it printed as the block's output."""
    from tools.pages import Block, run_python, tidy

    code = f"{code.strip()}\n"
    printed = tidy(run_python(Block("python", code, 1, {}), "errors.md", space))
    printed = re.sub(r"errors\.md, line \d+", "errors.md, line ...", printed)
    return ["```python", *code.splitlines(), "```", "", "```output", *printed.splitlines(), "```", ""]


def row(r: Refusal) -> str:
    return "| " + " | ".join(cell(r.words.get(k, "")) for k in ("message", *FACTS)) + " |"


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{sum(1 for _ in refusals())} refusals in {PAGE.relative_to(ROOT)}")
    sys.exit(0)
