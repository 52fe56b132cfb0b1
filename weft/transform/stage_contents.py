"""What the stages of a plan are made of, found again in a captured step: where it is split, and what is recomputed.

A plan counts layers and halves of layers, or names the modules that begin its stages. Either gives splits and regions of the step's
own nodes, and words for whatever could not be found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from weft.core.names import bare
from weft.core.node import Node, toposort
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.plan.layers import ATTENTION, FFN, FULL, Layers, of_host
from weft.plan.spec import Piece, Spec, left_to_host
from weft.plan.split import Cut, Forward, Region, narrow

HALVES = {"layer": (FULL, 2), "attention": (ATTENTION, 1), "ffn": (FFN, 1)}


@dataclass
class FoundStages:
    """Where a step is split and what is recomputed, None where that is left open; what of the plan is not followed, and why."""

    splits: tuple[Cut, ...] | None = None
    recomputed: tuple[Region, ...] | None = None
    problems: list[str] = field(default_factory=list)


class StageContents(Protocol):
    def find(self, captured: Captured) -> FoundStages: ...


def stage_contents_of(spec: Spec) -> StageContents | None:
    """The pieces of a plan; None where it leaves balance and recompute to its words."""
    if spec.splits:
        return Modules(spec.splits)
    stages = spec.stages
    if spec.offload:
        stages = tuple(tuple((name, left_to_host(mode) if name in HALVES else mode, n) for name, mode, n in stage) for stage in stages)
    return Counted(stages) if stages else None


# -- stages counted in layers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """Stages made of layers and halves of them."""

    stages: tuple[tuple[Piece, ...], ...]

    def find(self, captured: Captured) -> FoundStages:
        layers = Layers(captured)
        stages = self._in_blocks(layers) or self.stages
        depth = sum(n * HALVES[name][1] for stage in stages for name, _, n in stage if name in HALVES) // 2
        if depth != layers.count:
            lost = ["where its stages are split"] * (len(stages) > 1) + ["what it recomputes"] * self._mixed
            why = f"it has {depth} layers and this model {layers.count} blocks that repeat"
            return FoundStages(problems=[f"{' and '.join(lost)}: {why}"] if lost else [])
        found = FoundStages()
        found.splits = self._splits(stages, layers, found.problems)
        found.recomputed = tuple(self._again(stages, layers, found.problems))
        return found

    def _in_blocks(self, layers: Layers) -> tuple[tuple[Piece, ...], ...]:
        """Stages that count units of rows of blocks, counted in blocks; those before, between and behind the rows are as they were."""
        rows = layers.rows
        units = sum(n * HALVES[name][1] for stage in self.stages for name, _, n in stage if name in HALVES) // 2
        if not rows or units == layers.count or units != sum(row.count for row in rows):
            return ()
        sizes = [row.period for row in rows for _ in range(row.count)]
        gaps = {sum(r.count for r in rows[:i]): row.start - (rows[i - 1].start + rows[i - 1].blocks if i else 0) for i, row in enumerate(rows)}
        at, made = 0, list[list[Piece]]()
        for stage in self.stages:
            made.append([])
            for name, mode, n in stage:
                for _ in range(n if name in HALVES else 0):
                    made[-1] += [("layer", "none", gap)] if at % 2 == 0 and (gap := gaps.get(at // 2)) else []
                    made[-1].append((name, mode, sizes[at // 2] if name == "layer" else 1))
                    at += HALVES[name][1]
                made[-1] += [] if name in HALVES else [(name, mode, n)]
        made[-1].append(("layer", "none", layers.count - rows[-1].start - rows[-1].blocks))
        return tuple(tuple(stage) for stage in made)

    @property
    def _mixed(self) -> bool:
        return any(mode != "none" for stage in self.stages for _, mode, _ in stage)

    def _splits(self, stages: Sequence[Sequence[Piece]], layers: Layers, notes: list[str]) -> tuple[Cut, ...] | None:
        """The ends of all stages but the last; none where one of them is no place to split."""
        ends = itertools.accumulate(sum(n * HALVES[name][1] for name, _, n in stage if name in HALVES) for stage in stages[:-1])
        splits = [(at, layers.end(at)) for at in ends]
        notes += [f"where stage {g} of it ends: {_describe_halves(at)} no value passes alone" for g, (at, end) in enumerate(splits, 1) if not end]
        return tuple(end for _, end in splits if end) if all(end for _, end in splits) else None

    def _again(self, stages: Sequence[Sequence[Piece]], layers: Layers, notes: list[str]) -> Iterator[Region]:
        lost: dict[str, list[str]] = {}
        at, hosted = 0, any(of_host(mode)[1] for stage in stages for _, mode, _ in stage)
        for name, mode, n in (piece for stage in stages for piece in stage if piece[0] in HALVES):
            half, width = HALVES[name]
            for k in range(at, at + n * width, width):
                found = _regions(layers, k // 2, mode, half)
                yield from found
                if hosted and mode == "none":  # while it is at work, what others need comes back
                    yield from (replace(r, host="none") for r in _regions(layers, k // 2, "full", half))
                if mode != "none" and not found and _may(mode, half):
                    lost.setdefault(mode, []).append(str(k // 2 + 1))
            at += n * width
        notes += [
            f"recompute {mode} of layer {', '.join(of)}: it has no such part that could be recomputed, and keeps everything"
            for mode, of in lost.items()
        ]


def _describe_halves(halves: int) -> str:
    if halves == 0:
        return "before the first layer"
    return f"inside layer {halves // 2 + 1}" if halves % 2 else f"after layer {halves // 2}"


def _regions(layers: Layers, k: int, mode: str, half: int) -> list[Region]:
    if mode == "none" or (half != FULL and layers.middle(k) is None):
        return []
    return layers.again(k, mode, half)


def _may(mode: str, half: int) -> bool:
    """Whether half a layer should have a part of this kind."""
    return not (half == ATTENTION and mode in ("activation", "ffn"))


# -- stages that begin with modules --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Modules:
    """Stages that begin with these modules, all but the first."""

    paths: tuple[str, ...]

    def find(self, captured: Captured) -> FoundStages:
        forward = Forward(captured)
        layers = Layers(captured) if forward.repeats else None
        halves = (layers.end(h) for h in range(2 * layers.count)) if layers is not None else ()
        places = {*filter(None, halves), *((forward.main[i],) for i in narrow(forward.main, forward.active)), *forward.ends}
        ordered = sorted(places, key=lambda end: -max(forward.at[n] for n in end))
        reads = _weights_read(forward)
        ends = [_before(path, forward, reads, ordered) for path in self.paths]
        lost = [path for path, end in zip(self.paths, ends, strict=True) if end is None]
        notes = [f"a stage begins with {path}: no value passes alone right before it" for path in lost]
        return FoundStages(problems=notes) if notes else FoundStages(tuple(end for end in ends if end))


def _weights_read(forward: Forward) -> dict[Node, set[str]]:
    """Parameters by name that every active node reads, cast or turned on the way."""
    made: dict[Node, set[str]] = {}
    for n in forward.order:
        own = {bare(str(n.attr("name")))} if n.role is Role.PARAMETER else set[str]()
        made[n] = own.union(*(made[a] for a in n.args if a in forward.fixed))
    return {n: names for n, names in made.items() if n in forward.active and names}


def _before(path: str, forward: Forward, reads: Mapping[Node, set[str]], places: Sequence[Cut]) -> Cut | None:
    """The last place before a module, where nothing but it is computed in between."""
    inside = {n: names for n, names in reads.items() if any(name.startswith(f"{path}.") for name in names)}
    if not inside:
        return None
    first = min(inside, key=forward.at.__getitem__)
    for end in places:
        behind = {n for n, stage in forward.split_at([end]).items() if stage}
        if inside.keys() <= behind:
            return None if any(n in behind and n in reads and n is not first for n in toposort([first])) else end
    return None
