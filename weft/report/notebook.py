"""Pictures in a notebook: a plan with its decisions, a program with its layouts, a schedule with its batches."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from weft.core.program import Program
from weft.plan.plan import Plan
from weft.plan.summaries import rows
from weft.record.run import Run
from weft.report import charts, page
from weft.report.facts import Facts, Figure
from weft.report.graph import graph
from weft.report.tags import Markup, join, tag

PAGE = re.compile(r"^(?:html|main|nav|\*)[^{]*\{[^}]*\}\n", re.M)  # rules for what only a page has
# How notebooks name their themes: JupyterLab, VS Code, Colab, and pages of this documentation.
LIGHT = ('[data-jp-theme-light="true"]', ".vscode-light", 'html[theme="light"]', '[data-md-color-scheme="default"]')
DARK = ('[data-jp-theme-light="false"]', ".vscode-dark", 'html[theme="dark"]', '[data-md-color-scheme="slate"]')


def picture(thing: Any) -> str:
    """The picture of anything that has one; plain text of anything else."""
    for kind, draw in DRAWN.items():
        if isinstance(thing, kind):
            return wrapped(draw(thing))
    if type(thing).__name__ == "Schedule" and hasattr(thing, "rounds"):  # of weft.dynamic, which need not be loaded to draw a plan
        return wrapped(_schedule(thing))
    return f"<pre>{html.escape(str(thing))}</pre>"


def wrapped(*inner: Any) -> str:
    """A fragment with the style it needs, kept inside an element of its own so that the notebook's style stays as it is."""
    return str(tag("div", tag("style", _scoped()), *inner, cls="weft-picture"))


@lru_cache(maxsize=1)
def _scoped() -> Markup:
    """The page's style, nested under the picture. Colours follow the notebook's theme where it says which it has, else the system's scheme."""
    text = str(page.asset("style.css"))
    light, dark = (text.partition(f"{head} {{")[2].partition("}")[0] for head in (":root", ':root[data-theme="dark"]'))
    themed = [f"{', '.join(f'{theme} &' for theme in themes)} {{{colours}}}" for themes, colours in ((LIGHT, light), (DARK, dark))]
    nested = PAGE.sub("", text).replace(":root", "&").replace("body {", "& {", 1)
    return Markup("\n".join([".weft-picture {", nested, "& { padding: 10px 14px; border-radius: 10px; max-width: 1100px; }", *themed, "}"]))


def _plan(plan: Plan) -> Markup:
    from weft.report.of_plan import figures, name_of

    facts = Facts(f"{name_of(plan)} on {plan.cluster}", "", figures(plan), list(rows(plan)))
    causes = {k: v for k, v in (plan.predicted.get("causes_ms") or {}).items() if v > 0}
    return _short(facts, charts.shares({"predicted": causes}) if causes else None)


def _run(run: Run) -> Markup:
    from weft.report.of_run import of_run

    facts = of_run(run)
    return _short(facts, charts.shares(facts.causes_ms) if facts.causes_ms else None)


def _short(facts: Facts, more: Markup | None) -> Markup:
    table = tag("table", tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in facts.plan]), id="plan-table")
    return join([tag("h3", facts.title), page._figures(facts), table, more])


def _program(program: Program) -> Markup:
    mesh = ", ".join(f"{a} {n}" for a, n in program.mesh.sizes.items()) or "one rank"
    figures = [Figure("nodes", f"{len(program.nodes):,}"), Figure("mesh", mesh)]
    head = tag("h3", f"program {program.name}"), tag("p", ", ".join(f"{f.value} {f.label}" for f in figures[:1]), f" on {mesh}", cls="muted")
    return join([*head, graph(program)])


def _schedule(schedule: Any) -> Markup:
    from weft.dynamic.draw import as_data

    data = as_data(schedule)
    summary = f"{data['samples']:,} samples in {data['batches']:,} batches; at least {data['least']:,} are needed"
    return join([tag("h3", "batched schedule"), tag("p", summary, cls="muted"), charts.rounds(data)])


DRAWN: dict[type, Callable[[Any], Markup]] = {Plan: _plan, Run: _run, Program: _program}
