"""A program as a picture: one row per node in order, its layout as chips, arcs from what is made to what reads it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.core.node import DTYPE_NAMES, Node
from weft.core.program import Program
from weft.core.text import node_names
from weft.ops.registry import Kind
from weft.report.tags import Markup, tag
from weft.report.words import colour

ROW, ARCS, NAME, OP = 22, 120, 150, 330  # pixels: a row's height; where arcs end, and names, ops and types begin
MOST = 80  # rows drawn; of a longer program the middle is left out


def graph(program: Program, chosen: Collection[Node] | None = None) -> Markup:
    """The program, or the chosen nodes of it."""
    names = node_names(program)
    nodes = [n for n in program.nodes if n in names and (chosen is None or n in chosen)]
    kept = nodes if len(nodes) <= MOST else [*nodes[: MOST // 2], *nodes[-MOST // 2 :]]
    at = {n: (i if len(nodes) <= MOST or i < MOST // 2 else i + 1) * ROW + ROW / 2 + 4 for i, n in enumerate(kept)}
    height = (len(kept) + (len(nodes) > MOST)) * ROW + 10
    drawn = [_groups(program, at), _arcs(kept, at), [_row(n, names[n], at[n], program) for n in kept]]
    if len(nodes) > MOST:
        drawn.append([tag("text", f"… {len(nodes) - MOST:,} more …", x=NAME, y=MOST // 2 * ROW + ROW / 2 + 8, cls="muted-text")])
    body = tag("svg", tag("title", f"program {program.name}"), *drawn, viewBox=f"0 0 1040 {height}", role="img", cls="chart program")
    return tag("div", body, cls="scroll")


def _groups(program: Program, at: dict[Node, float]) -> list[Markup]:
    """What runs as one kernel or pipeline, as a band behind its rows."""
    bands = []
    for g in program.groups:
        ys = [at[n] for n in g.nodes if n in at]
        bands += [tag("rect", tag("title", f"{g.kind} {g.name}"), x=ARCS + 8, y=y - ROW / 2, width=900, height=ROW, cls="band") for y in ys]
        if ys:
            bands.append(tag("text", f"{g.kind} {g.name}", x=ARCS + 900, y=min(ys) + 4, text_anchor="end"))
    return bands


def _arcs(nodes: Sequence[Node], at: dict[Node, float]) -> list[Markup]:
    """Curves on the left: the further apart, the further out."""
    lines = []
    for n in nodes:
        for a in dict.fromkeys(n.args):
            if a in at:
                low, high = at[a], at[n]
                out = min(ARCS - 10, 10 + (high - low) * 0.35)
                lines.append(tag("path", d=f"M{ARCS} {low:g} C{ARCS - out:.0f} {low:g} {ARCS - out:.0f} {high:g} {ARCS} {high:g}", cls="arc"))
    return lines


def _row(node: Node, name: str, y: float, program: Program) -> list[Markup]:
    comm = node.op.kind is Kind.COMM
    source = node.op.kind is Kind.SOURCE
    dot = tag("circle", cx=ARCS + 14, cy=y, r=5 if comm else 4, cls=f"dot {colour(str(node.attr('axis')))}" if comm else "dot source" if source else "dot")
    outputs = program.outputs_of(node)
    label = node.op.name + (f" along {node.attr('axis')}" if comm else "") + (f" → {', '.join(outputs[:2])}" if outputs else "")
    x = OP + 240.0
    shape = f"{DTYPE_NAMES[node.types[0].dtype]}[{', '.join(map(str, node.types[0].shape))}]"
    parts = [dot, tag("text", name[:24], x=NAME, y=y + 4, cls="mono"), tag("text", label[:40], x=OP, y=y + 4, cls="strong" if comm else None),
             tag("text", shape, x=x, y=y + 4)]  # fmt: skip
    x += 190
    for axis, place in node.types[0].layout.placements.items():
        if str(place) != "R":
            text = f"{axis} {place}"
            wide = 7 * len(text) + 12
            parts += [tag("rect", x=x, y=y - 8, width=wide, height=16, rx=8, cls=f"mark {colour(axis)}"), tag("text", text, x=x + 6, y=y + 4)]
            x += wide + 6
    return parts
