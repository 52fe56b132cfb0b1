"""One self-contained page of facts: style and script inlined, data as JSON, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from weft.core.program import Program
from weft.record.run import pack
from weft.report import charts, model, proofs
from weft.report.facts import Facts
from weft.report.graph import graph
from weft.report.tags import Markup, join, tag
from weft.report.words import colour, means, ms, signed, size

LONGEST = 25  # tasks listed beneath the timeline
Section = tuple[str, str, Callable[[Facts], Markup | None]]


def page(facts: Facts) -> str:
    """The entire document."""
    parts = [(key, title, body) for key, title, make in SECTIONS if (body := make(facts)) is not None]
    links = [tag("a", title, href=f"#{key}") for key, title, _ in parts]
    toggle = tag("button", "light or dark", id="theme", type="button", title="switch between light and dark")
    sections = [tag("section", tag("h2", title), body, id=key) for key, title, body in parts]
    top = tag("header", tag("h1", facts.title), tag("p", facts.about, cls="about"), _figures(facts), _warnings_of(facts), id="top")
    body = tag("body", tag("nav", links, toggle, aria_label="sections"), tag("main", top, sections), _data(facts), tag("script", asset("page.js")))
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="refresh", content=str(facts.refresh)) if facts.refresh else None, tag("title", facts.title), tag("style", asset("style.css")),
    )  # fmt: skip
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def asset(name: str) -> Markup:
    """A file that comes with this package, as it is."""
    return Markup(resources.files("weft.report").joinpath(name).read_text())


def _data(facts: Facts) -> Markup:
    """The timelines, as the script reads them. A `<` is escaped, so no text can end the element."""
    views = [
        {"title": v.title, "note": v.note, "lines": [{"label": k, **pack(line)} for k, line in v.lines.items()]} for v in facts.views
    ]
    causes = {c: [colour(c), means(c)] for v in facts.views for line in v.lines.values() for c in {t.cause for t in line.tasks}}
    text = json.dumps({"views": views, "causes": causes}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id="data")


def _figures(facts: Facts) -> Markup:
    cards = [tag("div", tag("dt", f.label), tag("dd", tag("b", f.value), tag("small", f.note) if f.note else None)) for f in facts.figures]
    return tag("dl", cards, cls="figures")


def _warnings_of(facts: Facts) -> Markup | None:
    return tag("ul", [tag("li", text[:1].upper() + text[1:]) for text in facts.says], cls="says") if facts.says else None


# --- tables


def sortable(head: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = (), name: str = "") -> Markup:
    """A table whose columns sort. A cell is text, or (text, number to sort by)."""
    columns = [
        tag("th", tag("button", text, type="button"), scope="col", aria_sort="none", cls="num" if i in numbers else None)
        for i, text in enumerate(head)
    ]
    body = [tag("tr", [_cell(cell, i in numbers) for i, cell in enumerate(row)]) for row in rows]
    table = tag("table", tag("thead", tag("tr", columns)), tag("tbody", body), cls="sortable", id=name or None)
    return tag("div", table, cls="scroll")


def _cell(cell: Any, number: bool) -> Markup:
    text, value = cell if isinstance(cell, tuple) else (cell, None)
    return tag("td", text, cls="num" if number else None, data_v=repr(float(value)) if value is not None else None)


# --- sections


def _plan(f: Facts) -> Markup | None:
    return sortable(f.plan_head, f.plan, name="plan-table") if f.plan else None


def _model(f: Facts) -> Markup | None:
    if not f.tensors:
        return None
    drawn = model.picture(f.tensors, f.mesh, f.repeats, f.stages)
    return join([drawn, _ops(f.program) if f.program is not None else None, _communication(f) if f.communication else None])


def _ops(program: Program) -> Markup:
    """The forward pass op by op; the backward pass follows from it."""
    from weft.plan.roles import Roles

    ready = program.input_set
    forward = {n for n in Roles(program).forward if n.args and not (n.op.is_cast and n.args[0] in ready)}
    note = "One op a row, from top to bottom: what it makes and how the ranks hold it. A large dot is communication; P is a partial sum."
    body = [tag("p", note, cls="muted"), graph(program, forward)]
    return tag("details", tag("summary", f"Op by op: the {len(forward):,} ops of the forward pass and their layouts"), body)


def _communication(f: Facts) -> Markup:
    rows = [
        (c["kind"].replace("_", " "), model.chip(c["axis"], c["axis"]), (f"{c['count']:,}", c["count"]), (size(c["bytes"]), c["bytes"]))
        for c in f.communication
    ]
    note = "for one micro-batch of the layers drawn" if f.repeats != 1 else "for one micro-batch" if f.per_micro_batch else "in one step"
    return join([tag("h3", "Communication"), tag("p", f"Collectives {note}, and the size of their tensors.", cls="muted"),
                 sortable(("collective", "axis", "how many", "size"), rows, (2, 3))])  # fmt: skip


def _timeline(f: Facts) -> Markup | None:
    if not f.views:
        return None
    tabs = [
        tag("button", v.title, type="button", role="tab", aria_selected="true" if i == 0 else "false", data_view=i) for i, v in enumerate(f.views)
    ]
    buttons = [tag("button", text, type="button", data_zoom=how, title=title) for text, how, title in (
        ("+", "in", "zoom in"), ("−", "out", "zoom out"), ("←", "left", "earlier"), ("→", "right", "later"), ("all", "all", "the full step"))]  # fmt: skip
    bar = tag("div", tag("div", tabs, role="tablist", cls="tabs") if len(tabs) > 1 else None, tag("div", buttons, cls="tools"), cls="toolbar")
    how = "Wheel or pinch zooms, dragging moves; with the keyboard: + and −, arrows, 0 for all."
    label = "Timeline of one step. Plus and minus zoom, arrows move, 0 shows all."
    canvas = tag("canvas", id="timeline", tabindex=0, role="img", aria_label=label)
    return join([bar, tag("div", canvas, tag("div", id="tip", hidden=True), cls="timeline"), tag("p", id="range", cls="muted num-text", aria_live="polite"),
                 tag("p", id="view-note", cls="muted"), tag("p", how, cls="muted"), tag("p", id="causes", cls="legend"), _longest(f)])  # fmt: skip


def _longest(f: Facts) -> Markup:
    """The tasks that take longest in total, for those who read rather than look."""
    rows = []
    for label, line in f.views[0].lines.items():
        total: dict[tuple[str, str], list[float]] = {}
        for t in (t for t in line.tasks if t.stream not in ("phase", "layer")):
            total.setdefault((t.name, t.cause), []).append(t.seconds)
        for (name, cause), took in sorted(total.items(), key=lambda item: -sum(item[1]))[:LONGEST]:
            spent = sum(took) * 1e3
            rows.append((name, means(cause), label, (f"{len(took):,}", len(took)), (ms(spent), spent), (ms(max(took) * 1e3), max(took))))
    table = sortable(("what", "for", "", "times", "in all", "longest"), rows, (3, 4, 5))
    return tag("details", tag("summary", "As a table: what takes longest"), table)


def _time(f: Facts) -> Markup | None:
    if not f.causes_ms:
        return None
    keys = sorted({c for parts in f.causes_ms.values() for c in parts}, key=lambda c: -max(p.get(c, 0.0) for p in f.causes_ms.values()))
    both = len(f.causes_ms) == 2
    rows = [_cause_row(c, f.causes_ms, both) for c in keys]
    head = ["cause", *(x for label in f.causes_ms for x in (label, "share")), *(["difference"] if both else [])]
    return join([charts.shares(f.causes_ms), sortable(head, rows, range(1, len(head)))])


def _cause_row(cause: str, causes_ms: Mapping[str, Mapping[str, float]], both: bool) -> list[Any]:
    row: list[Any] = [join([tag("i", cls=f"swatch {colour(cause)}"), means(cause)])]
    for parts in causes_ms.values():
        value, total = parts.get(cause, 0.0), sum(parts.values()) or 1.0
        row += [(ms(value), value), (f"{value / total:.1%}", value)]
    if both:
        a, b = (parts.get(cause, 0.0) for parts in causes_ms.values())
        row.append((signed(b - a, ms), b - a))
    return row


def _memory(f: Facts) -> Markup | None:
    if not f.memory:
        return None
    key = [tag("span", tag("i", cls=f"swatch {colour(c.kind or c.label)}"), c.label, cls="key") for c in f.memory]
    rows = [(c.label, (size(peak), peak)) for c in f.memory for peak in [max(b for _, b in c.points)]]
    table = sortable(("what", "at most"), rows, (1,))
    return join([tag("p", f.memory_note, cls="muted"), charts.memory(f.memory, f.budget), tag("p", key, cls="legend"),
                 tag("details", tag("summary", "As a table"), table)])  # fmt: skip


def _alternatives(f: Facts) -> Markup | None:
    if not f.alternatives and not f.reasons:
        return None
    return join([_plans(f) if f.alternatives else None, _reasons(f) if f.reasons else None])


def _plans(f: Facts) -> Markup:
    timed = [a for a in f.alternatives if not a["reason"] and a["step_ms"]]
    best = next((a["step_ms"] for a in timed if a["plan"] == f.chosen), min((a["step_ms"] for a in timed), default=1.0))
    rows = []
    for a in sorted(f.alternatives, key=lambda a: (bool(a["reason"]), a["step_ms"] or 0.0)):
        chosen = a["plan"] == f.chosen
        name = tag("b", a["plan"], " ", tag("span", "taken", cls="chip taken")) if chosen else a["plan"]
        if a["reason"]:
            rows.append((name, ("", 1e30), ("", 1e30), tag("span", f"does not fit: {a['reason']}", cls="muted")))
            continue
        stored = (size(a["memory_gb"] * 1e9), a["memory_gb"]) if a["memory_gb"] else ("", 0.0)
        rows.append((name, (ms(a["step_ms"]), a["step_ms"]), stored, _against(a, f, best)))
    return sortable(("plan", "step, predicted", "memory", "against the one taken"), rows, (1, 2), name="alternatives-table")


def _against(a: Mapping[str, Any], f: Facts, best: float) -> Markup:
    """How much longer, as a bar and in words: the causes that grow."""
    longer = a["step_ms"] / best - 1
    own = next((x for x in f.alternatives if x["plan"] == f.chosen), {})
    grown = sorted(((v - own.get("causes_ms", {}).get(k, 0.0), k) for k, v in a.get("causes_ms", {}).items()), reverse=True)
    why = ", ".join(f"{means(k)} {d:+,.1f} ms" for d, k in grown[:2] if abs(d) > 0.05) if a["plan"] != f.chosen else ""
    bar = tag("span", cls="longer", style=f"width:{min(100.0, max(0.0, longer) * 100):.1f}px")
    return join([tag("span", f"{longer:+.1%}", cls="num-text"), " ", bar, tag("small", why, cls="muted") if why else None])


def _reasons(f: Facts) -> Markup:
    rows = [
        (tag("b", f"{r['decision']} {r['value']}"), r["other"], (signed(r["ms"], ms), r["ms"]), (signed(r["gb"] * 1e9, size), r["gb"]), r["why"], r["flips"])
        for r in f.reasons
    ]
    head = ("decision", "next best without it", "time", "memory", "because", "would win with")
    note = "For each decision the best plan that decides otherwise, with everything else free."
    return join([tag("h3", "Each decision and its runner-up"), tag("p", note, cls="muted"), sortable(head, rows, (2, 3))])


def _rules(f: Facts) -> Markup | None:
    return proofs.table(f.verbs) if f.verbs else None


def _schedule(f: Facts) -> Markup | None:
    s = f.schedule
    if not s:
        return None
    bound = "the fewest possible" if s["batches"] == s["least"] else f"at least {s['least']} are needed"
    summary = f"{s['samples']:,} samples, {s['vertices']:,} vertices and {s['edges']:,} edges in {s['batches']:,} batches by {s['policy']}: {bound}."
    kinds: dict[str, list[int]] = {}
    for name, rows, edges in s["rounds"]:
        own = kinds.setdefault(name, [0, 0, 0])
        own[:] = own[0] + 1, own[1] + rows, own[2] + edges
    rows = [(name, (f"{n:,}", n), (f"{r:,}", r), (f"{r / n:,.1f}", r / n), (f"{e:,}", e)) for name, (n, r, e) in kinds.items()]
    table = sortable(("vertices", "batches", "rows", "rows a batch", "edges"), rows, (1, 2, 3, 4), name="schedule-table")
    return join([tag("p", summary), charts.rounds(s), table])


def _training(f: Facts) -> Markup | None:
    took, loss = list(f.steps.get("ms", ())), list(f.steps.get("loss", ()))
    if len(took) < 2:
        return None
    made = []
    if len(loss) > 1:
        made += [tag("h3", "Loss"), charts.series(loss, "loss at each step", lambda v: f"{v:.4g}", "loss", from_zero=False)]
    for key, title in (("lr", "Learning rate"), ("grad_norm", "Gradient norm")):
        if len(f.steps.get(key, ())) > 1:
            made += [tag("h3", title), charts.series(list(f.steps[key]), f"{title.lower()} at each step", lambda v: f"{v:.4g}", "optimizer")]
    usual = took[1:] if len(took) > 2 else took  # the first compiles
    first = len(took) - len(usual) + 1
    return join([*made, tag("h3", "Time of each step"), charts.series(usual, "time of each step after the first", ms, "measured", first=first)])


SECTIONS: tuple[Section, ...] = (
    ("plan", "The plan", _plan),
    ("model", "The model and its layouts", _model),
    ("schedule", "The batched schedule", _schedule),
    ("steps", "Timeline of one step", _timeline),
    ("time", "Where the time goes", _time),
    ("memory", "Memory over the step", _memory),
    ("alternatives", "Alternatives", _alternatives),
    ("rules", "Why it is correct", _rules),
    ("training", "Training", _training),
)
