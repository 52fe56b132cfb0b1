"""The model as a picture: its blocks in order, equal layers folded into one, every tensor drawn as the part a rank holds of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from weft.report.tags import Markup, join, tag
from weft.report.words import colour, count, means

SMALL, LARGE = 10.0, 68.0  # pixels of the shortest and the longest side of a tensor
LINES = 8  # shard boundaries drawn at most; the chip says how many there are
_CUT = re.compile(r"S\((\d+)(?:\.\d+)?\)")
_AT = re.compile(r"O\((\d+)\)")


@dataclass(frozen=True)
class Block:
    """Layers that are the same, or one part of the model. `parts` are its tensors by module."""

    title: str
    layers: tuple[int, ...]
    parts: Mapping[str, Sequence[Mapping[str, Any]]]


def fold(tensors: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Blocks in the order of the model. Layers with the same tensors, held the same way, are one block."""
    layers: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for t in tensors:
        head, index, rest = _numbered(t["name"])
        layers.setdefault((head, index), {})[rest] = t
    groups: dict[tuple[str, object], list[tuple[int, dict[str, Mapping[str, Any]]]]] = {}
    for (head, index), own in layers.items():
        looks = (head, tuple((rest, tuple(t["shape"]), tuple(t["places"].items()), t["dtype"]) for rest, t in own.items()))
        groups.setdefault(looks if index >= 0 else (head, None), []).append((index, own))
    return list(_joined([_block(head, found) for (head, _), found in groups.items()]))


def _joined(blocks: Sequence[Block]) -> Iterator[Block]:
    """Neighbours that are no layers as one block, each a part of it."""
    for layered, run in groupby(blocks, key=lambda b: bool(b.layers)):
        found = list(run)
        if layered or len(found) == 1:
            yield from found
            continue
        parts = {b.title: [{**t, "leaf": f"{m}.{t['leaf']}" if m else t["leaf"]} for m, own in b.parts.items() for t in own] for b in found}
        yield Block("", (), parts)


def _numbered(name: str) -> tuple[str, int, str]:
    """`blocks.3.mlp.up.weight` as blocks, 3, mlp.up.weight; -1 where no layer is numbered."""
    path = name.split(".")
    at = next((i for i, word in enumerate(path) if word.isdigit()), None)
    if at is None or at == 0:
        return path[0], -1, ".".join(path[1:]) or path[0]
    return ".".join(path[:at]), int(path[at]), ".".join(path[at + 1 :])


def _block(head: str, found: list[tuple[int, dict[str, Mapping[str, Any]]]]) -> Block:
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for rest, t in found[0][1].items():
        module, _, leaf = rest.partition(".") if rest.count(".") else ("", "", rest)
        parts.setdefault(module, []).append({**t, "leaf": leaf})
    return Block(head, tuple(i for i, _ in found if i >= 0), parts)


# --- drawing


def picture(
    tensors: Sequence[Mapping[str, Any]], mesh: Mapping[str, int], repeats: float = 1.0, stages: Sequence[float] = ()
) -> Markup:
    """Batch, blocks and head from top to bottom. `repeats` scales the number of layers, where fewer were looked at."""
    params = [t for t in tensors if t["role"] in ("param", "buffer")]
    states = {t["name"]: t for t in tensors if t["role"] == "state"}
    longest = max((n for t in params for n in t["shape"]), default=1)
    batch = [{**t, "leaf": t["name"]} for t in tensors if t["role"] == "batch" and t["shape"]]
    blocks = [Block("batch", (), {"": batch})] if batch else []
    blocks += fold(params)
    drawn = [_draw(b, mesh, states, longest, repeats, stages) for b in blocks]
    return tag("div", legend(mesh), tag("div", drawn, cls="model"), cls="picture")


def legend(mesh: Mapping[str, int]) -> Markup:
    """Which colour is which axis, and how to read a tensor."""
    sharded = {a: n for a, n in mesh.items() if n > 1}
    chips = [chip(a, f"{a} × {n}", f"{n} ranks; {means(a)}") for a, n in sharded.items()]
    how = "filled: what one rank holds; lines: where the axis of that colour shards" if sharded else "one rank holds everything"
    return tag("p", chips, tag("span", how, cls="muted"), cls="legend")


def chip(kind: str, text: str, title: str = "") -> Markup:
    return tag("span", text, cls=f"chip {colour(kind)}", title=title or None)


def _draw(
    block: Block, mesh: Mapping[str, int], states: Mapping[str, Any], longest: int, repeats: float, stages: Sequence[float]
) -> Markup:
    many = round(len(block.layers) * repeats) if block.layers else 1
    head = [tag("b", block.title)] if block.title else []
    if many > 1:
        head.append(tag("span", f"{many} identical layers", cls="muted"))
    elif block.layers:
        head.append(tag("span", f"layer {block.layers[0]}", cls="muted"))
    if many > 1 and len(stages) > 1:
        head += [chip("pp", f"{n:g} layers", f"stage {i} holds {n:g} layers") for i, n in enumerate(stages)]
    block, at = _joined_block(block)
    head += [chip("pp", _word("pp", at), _describe_placement("pp", at, mesh))] if at else []
    parts = [_part(name, own, mesh, states, longest) for name, own in block.parts.items()]
    return tag("section", tag("header", head), tag("div", parts, cls="parts"), cls="block folded" if many > 1 else "block")


def _joined_block(block: Block) -> tuple[Block, str]:
    """The block with its stage said once, where one stage has all of it."""
    found = {t["places"].get("pp", "") for own in block.parts.values() for t in own}
    if len(found) != 1 or not (at := found.pop()):
        return block, ""
    parts = {m: [{**t, "places": {a: p for a, p in t["places"].items() if a != "pp"}} for t in own] for m, own in block.parts.items()}
    return Block(block.title, block.layers, parts), at


def _part(name: str, tensors: Sequence[Mapping[str, Any]], mesh: Mapping[str, int], states: Mapping[str, Any], longest: int) -> Markup:
    drawn = [_tensor(t, mesh, states.get(t["name"]), longest) for t in tensors]
    return tag("div", tag("span", name, cls="part-name") if name else None, tag("div", drawn, cls="tensors"), cls="part")


def _tensor(t: Mapping[str, Any], mesh: Mapping[str, int], state: Mapping[str, Any] | None, longest: int) -> Markup:
    shape = " × ".join(count(n) for n in t["shape"]) or "number"
    figures = [glyph(t, mesh, longest)]
    separate = state is not None and {**state["places"], "pp": ""} != {**t["places"], "pp": ""}  # a stage's state is where it is
    if separate:
        figures.append(tag("span", glyph(state, mesh, longest), cls="state", title="its optimizer state"))
    chips = [tag("div", _chips(t["places"], mesh))] if t["places"] else []
    if separate:
        places = {a: p for a, p in state["places"].items() if a != "pp"}  # type: ignore[index]
        chips.append(tag("div", tag("small", "state"), _chips(places, mesh)))
    return tag("figure", tag("div", figures, cls="glyphs"), tag("figcaption", t["leaf"], tag("br"), tag("small", shape), chips))


def _chips(places: Mapping[str, str], mesh: Mapping[str, int]) -> list[Markup]:
    return [chip(a, _word(a, p), _describe_placement(a, p, mesh)) for a, p in places.items()]


def _word(axis: str, place: str) -> str:
    at = _AT.fullmatch(place)
    return f"stage {at[1]}" if at and axis == "pp" else f"{axis} {place}"


def _describe_placement(axis: str, place: str, mesh: Mapping[str, int]) -> str:
    sharded, at = _CUT.fullmatch(place), _AT.fullmatch(place)
    if at:
        return f"only rank {at[1]} along {axis} has it"
    return f"dim {sharded[1]} is sharded {mesh.get(axis, 1)} ways along {axis}" if sharded else f"{place} along {axis}"


def glyph(t: Mapping[str, Any], mesh: Mapping[str, int], longest: int) -> Markup:
    """A tensor as a rectangle: rows down, columns across, further dims as sheets behind. One rank's part is filled."""
    shape = list(t["shape"]) or [1]
    sides = [SMALL + (LARGE - SMALL) * (min(n, longest) / longest) ** 0.5 for n in shape]
    height, width = (7.0, sides[0]) if len(shape) == 1 else (sides[-2], sides[-1])
    sheets = min(3, len(shape) - 1) if len(shape) > 2 else 1
    shift = 4.0 * (sheets - 1)
    back = [_rect(shift - 4 * i, 4 * i, width, height, "sheet") for i in range(sheets - 1)]
    front = _sheet(t["places"], len(shape), mesh, width, height)
    body = tag("g", front, transform=f"translate(0 {shift:g})")
    names = ", ".join(f"{a} {p}" for a, p in t["places"].items()) or "replicated on every rank"
    box = f"-1 -1 {width + shift + 2:.0f} {height + shift + 2:.0f}"
    label = f"{t['name']}: {names}"
    return tag("svg", tag("title", label), back, body, viewBox=box, width=round(width + shift + 2), height=round(height + shift + 2), role="img")


def _rect(x: float, y: float, width: float, height: float, cls: str) -> Markup:
    return tag("rect", x=x, y=y, width=width, height=height, cls=cls)


def _sheet(places: Mapping[str, str], ndim: int, mesh: Mapping[str, int], width: float, height: float) -> Markup:
    shards = {a: int(m[1]) for a, p in places.items() if (m := _CUT.fullmatch(p)) and mesh.get(a, 1) > 1}
    across = {a: d for a, d in shards.items() if d == ndim - 1}
    down = {a: d for a, d in shards.items() if ndim > 1 and d == ndim - 2}
    deep = [a for a in shards if a not in across and a not in down]
    part_w, lines_w = _local_extent(across, mesh, width)
    part_h, lines_h = _local_extent(down, mesh, height)
    axis_held = next(iter(across), next(iter(down), deep[0] if deep else ""))
    marks = [tag("line", x1=x, x2=x, y1=0, y2=height, cls=f"cut {colour(a)}") for a, x in lines_w]
    marks += [tag("line", x1=0, x2=width, y1=y, y2=y, cls=f"cut {colour(a)}") for a, y in lines_h]
    full = _rect(0, 0, width, height, "whole")
    return join([full, _rect(0, 0, part_w, part_h, f"held {colour(axis_held)}" if axis_held else "held"), marks, _rect(0, 0, width, height, "edge")])


def _local_extent(axes: Mapping[str, int], mesh: Mapping[str, int], length: float) -> tuple[float, list[tuple[str, float]]]:
    """How long one rank's part is, at least two pixels, and where lines of which axis go."""
    part, lines = length, list[tuple[str, float]]()
    for axis in axes:
        pieces = min(mesh[axis], LINES)
        lines += [(axis, part * i / pieces) for i in range(1, pieces)]
        part /= pieces
    return max(part, 2.0), lines
