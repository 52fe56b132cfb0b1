"""The verbs of a program and the theorems behind them: which rule each uses, and what its certificate says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.report.tags import Markup, tag

GROUPING = ("fuse", "overlap")  # they say how a program is run, and leave it as it is
RUNGS = {1: "tried on finite fields", 2: "proved for small sizes", 3: "proved for all sizes and meshes"}
METHODS = {"erasure": "by erasure: without communication both sides are one expression", "cut-off": "by a finite set of sizes that decides all",
           "induction": "by induction over the number of operands"}  # fmt: skip


def certificates(verb: str) -> list[Any]:
    """The shipped certificates of the rules a verb applies: those that bear its name."""
    from weft.rewrite.certificate import shipped

    moves = (c for c in shipped("builtin.json")[0] if c.schema.family != "algebra" or c.schema.name == verb)
    found = [c for c in shipped("discovered.json")[0] if c.schema.name == verb]
    return [*(c for c in moves if c.schema.name == verb or c.schema.name.startswith(f"{verb}_")), *found]


def table(verbs: Sequence[Mapping[str, Any]]) -> Markup:
    """Each step, why it is right, and the rules it draws on."""
    rows = [_row(i, v["step"], v["same"], v.get("said", "")) for i, v in enumerate(verbs, 1)]
    head = tag("tr", [tag("th", name, scope="col") for name in ("", "step", "why it means the same")])
    return tag("table", tag("thead", head), tag("tbody", rows), cls="steps")


def _row(number: int, step: str, same: bool, detail: str) -> Markup:
    verb = step.split(" ")[0]
    short = step if len(step) <= 90 else f"{step[:90].rsplit(',', 1)[0]}, … ({step.count('%')} places)"
    return tag("tr", tag("td", number, cls="num"), tag("td", tag("code", short)), tag("td", detail or _why(verb, same), _rules(verb)))


def _why(verb: str, same: bool) -> str:
    if verb in GROUPING:
        return "Only says what runs together; the program is unchanged."
    if same:
        return "Checked here: without communication it is the same program, node for node."
    return "Changes what one device would run, by an algebraic identity; the check of the full step covers it."


def _rules(verb: str) -> Markup | None:
    found = certificates(verb)
    if not found:
        return None
    title = f"{len(found)} proved rule{'s' if len(found) > 1 else ''}"
    return tag("details", tag("summary", title), tag("ul", [tag("li", _rule(c)) for c in found]))


def _rule(c: Any) -> list[Any]:
    from weft.rewrite.rulefile import show

    name, _, statement = show(c.schema).partition(": ")
    how = METHODS.get((c.derivation or {}).get("method", ""), "")
    full = "its seal holds" if c.is_complete else "its seal is broken: run weft verify --full --write"
    second = f"; {c.second.get('judge', 'no second judge')}: {c.second.get('status', '')}, {c.second.get('cases', 0)} cases"
    detail = f"{RUNGS.get(c.rung, c.rung)}{', ' + how if how else ''}{second}; certificate {c.seal}, {full}"
    return [tag("b", name), " ", tag("code", statement), tag("br"), tag("small", detail)]
