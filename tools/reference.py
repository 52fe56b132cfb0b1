"""docs/api.md: the public names with their signatures and docstrings, and the commands with their options, read off the code.

`python -m tools.reference` writes the page; a test compares.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import weft
from weft.core.node import Op
from weft.core.program import Program

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
TITLES = {  # the home of public names, and what they are for
    "weft.plan.ask": "Plan",
    "weft.plan.plan": "Plan",
    "weft.plan.spec": "Plan",
    "weft.plan.fits": "Plan",
    "weft.api.parallelize": "Train",
    "weft.api.options": "Train",
    "weft.api.shard": "Your own loop",
    "weft.api.compile": "Programs",
    "weft.frontend.capture": "Programs",
    "weft.frontend.trace": "Programs",
    "weft.core.program": "Programs",
    "weft.core.layout": "Layouts",
    "weft.core.errors": "Errors",
}
PUBLIC = {"weft.plan.ask": ("plan",), **weft._PUBLIC}
GIVEN = {"weft.api.parallelize": ("Step",)}  # what public functions give
MODULES = {
    "weft.lang": None,
    "weft.schedule": None,
    "weft.interp": ("run", "run_global", "run_ranks"),
    "weft.optim": None,
    "weft.nn": None,
    "weft.dynamic": None,
}
HEAD = "# API reference\n\nMade by `make docs` from docstrings; do not edit. Every name below is reached as `weft.NAME` unless its heading says otherwise.\n"


def page() -> str:
    parts, title = [HEAD], ""
    for home, heading in TITLES.items():
        parts += [] if heading == title else [f"## {heading}\n"]
        title = heading
        parts += [entry(n, getattr(import_module(home), n)) for n in (*PUBLIC[home], *GIVEN.get(home, ()))]
    for name, chosen in MODULES.items():
        module = import_module(name)
        parts += [f"## {name}\n", f"{summary(module)}\n"]
        parts += [entry(n, getattr(module, n)) for n in chosen or module.__all__]
    return "\n".join([*parts, *commands()]).rstrip() + "\n"


def entry(name: str, value: Any) -> str:
    if isinstance(value, Op):
        return f"**`{name}`** {value.kind.value}. {value.doc}\n".replace(" \n", "\n")
    lines = [f"### {name}\n", f"```text\n{name}{signature(value)}\n```\n", f"{documented(value)}\n"]
    if isinstance(value, type) and (value is Program or value.__module__.startswith(("weft.api", "weft.dynamic"))):
        own = [(n, m) for n, m in vars(value).items() if inspect.isfunction(m) and not n.startswith("_")]
        lines += [f"- `.{n}{signature(m)}` {summary(m)}" for n, m in own] + [""]
    return "\n".join(lines)


def signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"<function <lambda>[^>]*>|<(?:function|factory)[^>]*>", "...", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are kept as text
    return re.sub(r"\b(?:typing|collections\.abc|torch\.nn\.modules\.module)\.", "", text).replace("(self, ", "(").replace("(self)", "()")


def documented(value: Any) -> str:
    """The docstring; indented drawings become blocks."""
    text = re.sub(r"^(Args|Returns|Raises):\n((?:    .*\n?)+)", lambda m: _section(m[1], m[2]), inspect.getdoc(value) or "", flags=re.M)
    text = re.sub(r"^Example:$", "**Example**", text, flags=re.M)
    return re.sub(r"(?:^    .*\n?|^\n(?=    ))+", lambda m: f"\n```text\n{inspect.cleandoc(m[0])}\n```\n", text, flags=re.M)


def _section(title: str, text: str) -> str:
    """Arguments and errors as a list, results as a sentence."""
    items = re.split(r"\n(?=\S)", inspect.cleandoc(text))
    if title == "Returns":
        return f"**Returns** {' '.join(text.split())}\n"
    rows = [re.sub(r"^(\w+): ", r"- `\1`: ", " ".join(item.split())) for item in items]
    return "\n".join([f"**{'Arguments' if title == 'Args' else title}**", "", *rows, ""])


def summary(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def described(option: Any) -> str:
    """An option's help with its default, unless that is to leave it out."""
    shown = getattr(option, "show_default", None)
    given = bool(shown) and not isinstance(option.default, bool) and option.default not in (None, "", [])
    default = shown if isinstance(shown, str) else option.default if given else None
    return " ".join([*(getattr(option, "help", "") or "").split(), *([f"Default: {default}."] if default is not None else [])])


def commands() -> list[str]:
    import typer

    from weft.cli import app

    group = typer.main.get_command(app)
    out = ["## Commands\n"]
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        out += [f"### weft {name}\n", f"{(command.help or '').strip()}\n"]
        rows = [(", ".join([*p.opts, *p.secondary_opts]), described(p)) for p in command.params if p.name != "help"]
        if rows:
            out += ["| option | |", "|---|---|", *(f"| `{o}` | {h.replace('|', '/')} |" for o, h in rows), ""]
    return out


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{len(weft._HOME)} names in {PAGE.relative_to(ROOT)}")
    sys.exit(0)
