"""Recomputation: of a region of the forward pass only its inputs are kept, and the rest is recomputed before its backward pass.

Nodes are values, so running a region again needs inputs that are other nodes of the same value. Region i is remade over the items
of one tuple, `optimization_barrier(its inputs, what its backward pass starts from)`: the same values, there once all that stands after the
tuple's name is computed. Its backward pass then reads the second run, and of the first only what stands outside reads outlives it.

For a node b of the backward pass let l(b) be the least region it reads anything inside of, itself or through others. What b reads
has a level of l(b) or more, so what region i starts from, the nodes of a level above i that nodes of level i read and the gradients
of the next level, never waits for its second run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.core.errors import PlanError
from weft.core.node import Node, make, op_named, remade, toposort, with_operands
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.ops.host import from_host, landed, to_host
from weft.ops.registry import Kind
from weft.plan.layers import Layers, of_host
from weft.plan.split import Forward, Region, Stage, balanced_ends


def regions_of(captured: Captured, mode: str) -> tuple[Region, ...]:
    """What is recomputed, or kept by the host, where every repeated block does so in this way; nothing if it is none. Where no block repeats, the
    forward pass is parted for `full` at values that pass alone: n such places into about sqrt(n) segments, which together keep the least."""
    if not mode:
        return ()
    layers = Layers(captured)
    part, host = of_host(mode)
    found = tuple(r for k in range(layers.count) for r in layers.again(k, mode)) if layers.count or part != "full" else _segments(layers.forward, host)
    if not found or not captured.gradients:
        raise PlanError(
            "nothing can be recomputed",
            needed="repeated blocks, whose gradients follow from the forward pass",
            found=_lacking(captured, layers, mode),
            try_="leave out recompute" if part == "full" or not layers.count else "recompute",
        )
    return found


def _segments(forward: Forward, host: str) -> tuple[Region, ...]:
    ends = balanced_ends(forward, max(1, math.isqrt(len(forward.ends) + 1)))
    parts: dict[int, set[Node]] = {}
    for n, part in forward.split_at(ends).items():
        if n.args:
            parts.setdefault(part, set()).add(n)
    return tuple(Region(nodes, nodes, host) for nodes in map(frozenset, parts.values())) if ends else ()


def _lacking(captured: Captured, layers: Layers, mode: str) -> str:
    if not captured.gradients:
        return "a model traced together with its backward pass"
    return f"blocks with no {mode} between two matmuls with weights" if layers.count else "no block that repeats, and no value that passes alone"


def recomputed(captured: Captured, again: Sequence[Region]) -> Captured:
    """The captured step with some of its forward pass run twice, or kept by the host."""
    if not again:
        return captured
    kept = [name for name in captured.program.output_names if name == "loss" or name.startswith("buffer.")]
    program, made = recompute(captured.program, again, kept, list(captured.gradients.values()))
    return replace(captured, program=program, gradients={name: made[g] for name, g in captured.gradients.items()})


def recomputed_stage(stage: Stage, weights_apart: bool) -> Stage:
    """A pipeline stage with its regions run twice; where weight gradients come later, no region waits for them."""
    if not stage.again or stage.step is stage.forward:
        return stage
    gradients = [n for name, n in stage.step.outputs if name.startswith("d.")]
    program, _ = recompute(stage.step, stage.again, list(stage.forward.output_names), gradients, not weights_apart)
    return replace(stage, step=program)


def recompute(
    p: Program, again: Sequence[Region], forward: Sequence[str], gradients: Sequence[Node], before: bool = True
) -> tuple[Program, Mapping[Node, Node]]:
    """The program with regions recomputed for their backward pass, and what became of its nodes.

    `forward` names the outputs of the forward pass. With `before`, a region waits for the gradients of the next one's parameters,
    which then need not wait with all they read.
    """
    made = _Recomputed(p, again, forward, gradients, before).made()
    everything = remade([n for _, n in p.outputs], made)
    new = p.with_outputs([(name, everything[n]) for name, n in p.outputs], "recompute")
    return replace(new, lines={everything[n]: line for n, line in p.lines.items() if n in everything}), everything


FETCHED = ("inputs", "all")  # regions of which the host keeps something


class _Recomputed:
    def __init__(self, p: Program, again: Sequence[Region], forward: Sequence[str], gradients: Sequence[Node], before: bool) -> None:
        self.ahead = set(toposort(p.output_names[name] for name in forward))
        at = {n: i for i, n in enumerate(p.nodes)}
        found = [(sorted(r.nodes & self.ahead, key=at.__getitem__), r) for r in again]
        found = sorted((f for f in found if f[0]), key=lambda f: at[f[0][0]])
        self.regions, self.within = [nodes for nodes, _ in found], [r.within for _, r in found]
        self.host = [r.host for _, r in found]
        self.inside = self._inside(p, {p.output_names[name] for name in forward})
        self.back = [n for n in toposort(gradients) if n not in self.ahead]
        self.level = self._levels()
        self.starts = self._starts(gradients if before else ())
        self.sent = self._sent() if "inputs" in self.host else {}
        self._second: dict[int, dict[Node, Node]] = {}
        self._made: dict[Node, Node] = {}

    def _inside(self, p: Program, roots: set[Node]) -> dict[Node, int]:
        """The region of everything it makes again, and of the parameters that only it reads in the forward pass."""
        owner = {n: i for i, nodes in enumerate(self.regions) for n in nodes}
        found = {}
        for n in self.ahead - roots:
            readers = [u for u in p.users[n] if u in self.ahead]
            mine = owner.get(n) if not n.op.is_input else self._reader(owner, readers)
            if mine is not None and readers and all(u in self.within[mine] for u in readers):
                found[n] = mine
        return found

    def _reader(self, owner: Mapping[Node, int], readers: Iterable[Node]) -> int | None:
        """The one region that all these are in."""
        regions = {owner.get(u) for u in readers}
        return regions.pop() if len(regions) == 1 else None

    def _levels(self) -> dict[Node, float]:
        level: dict[Node, float] = {}
        for n in self.back:
            level[n] = min((level.get(a, self.inside.get(a, math.inf)) for a in n.args), default=math.inf)
        return level

    def _starts(self, gradients: Iterable[Node]) -> dict[int, list[Node]]:
        """What each region's second run waits for."""
        starts: dict[int, dict[Node, None]] = {i: {} for i in range(len(self.regions))}
        for n in self.back:
            for a in n.args:
                if self.level[n] < math.inf and self.level.get(a, -1) > self.level[n] and len(a.types) == 1:
                    starts[int(self.level[n])][a] = None
        levels = sorted({*self.level.values(), math.inf})
        for g in gradients:
            if g in self.level:
                below = [x for x in levels if x < self.level[g]]
                if below:
                    starts[int(below[-1])][g] = None
        return {i: list(nodes) for i, nodes in starts.items()}

    def made(self) -> dict[Node, Node]:
        """The backward pass over second runs, later regions first."""
        for n in sorted(self.back, key=lambda n: -self.level[n]):
            args = tuple(self._read(a, self.level[n]) for a in n.args)
            self._made[n] = with_operands(n, args)
        return self._made

    def _read(self, a: Node, level: float) -> Node:
        """What a node of the backward pass reads, by the region it belongs to."""
        if a in self.inside:
            return self._given(self.inside[a])[a]
        if level < math.inf and self.sent.get(a) == level:
            return self._given(int(level))[a]
        return self._made.get(a, a)

    def _given(self, i: int) -> dict[Node, Node]:
        """What the backward pass of a region reads in place of the first run."""
        if i not in self._second:
            made = {"all": self._fetched, "none": self._as_it_is}.get(self.host[i], self._recomputed)
            self._second[i] = made(i)
        return self._second[i]

    def _as_it_is(self, i: int) -> dict[Node, Node]:
        return {a: a for a in self._read_of(i)}

    def _recomputed(self, i: int) -> dict[Node, Node]:
        nodes = self._needed(i)
        inner = set(nodes)
        outer = dict.fromkeys(a for n in nodes for a in n.args if a not in inner and _is_value(a))
        outer |= dict.fromkeys(a for a in self._read_of(i) if a.op.is_input)
        outer |= dict.fromkeys(a for n in self.back if self.level[n] == i for a in n.args if self.sent.get(a) == i and a not in self.inside)
        second = self._remade_inputs(i, list(outer))
        for n in nodes:
            second[n] = with_operands(n, tuple(second.get(a, a) for a in n.args))
        return second

    def _fetched(self, i: int) -> dict[Node, Node]:
        """What the backward pass reads of a region, which was sent to the host."""
        read = self._read_of(i)
        kept = [a for a in dict.fromkeys(map(_viewed, read)) if len(a.types) == 1 and a.ndim and not a.op.is_input and self.inside.get(a) == i]
        second = dict(zip(kept, self._from_host(i, kept), strict=True))
        return {a: _view(a, second) for a in read} | second

    def _sent(self) -> dict[Node, int]:
        """What one region alone reads of those before it, where the host keeps that."""
        readers: dict[Node, set[float]] = {}
        for i, nodes in enumerate(self.regions):
            own = set(nodes)
            for a in (a for n in nodes for a in n.args if a not in own):
                readers.setdefault(a, set()).add(i)
        for n in self.back:
            for a in n.args:
                readers.setdefault(a, set()).add(self.level[n])
        alone = {a: int(level) for a, of in readers.items() if len(of) == 1 and (level := next(iter(of))) < math.inf}
        return {a: i for a, i in alone.items() if self.host[i] == "inputs" and a in self.ahead and a.args and _is_value(a) and a.ndim}

    def _remade_inputs(self, i: int, outer: Sequence[Node]) -> dict[Node, Node]:
        """What a region reads, as other nodes of the same values, there once its backward pass may start."""
        kept = [a for a in outer if self.sent.get(a) == i]
        rest = [a for a in outer if a not in kept]
        return dict(zip(rest, self._after(rest, i), strict=True)) | dict(zip(kept, self._from_host(i, kept), strict=True))

    def _after(self, values: Sequence[Node], i: int, op: Any = lambda x: x) -> list[Node]:
        """The op on every value, once a region's backward pass may start."""
        if not values:
            return []
        tied = make(op_named("optimization_barrier"), (*values, *(self._made[s] for s in self.starts[i])), {})
        return [op(make(op_named("item"), (tied,), {"index": k})) for k in range(len(values))]

    def _sooner(self, i: int) -> int | None:
        """The region whose backward pass begins as what the host kept of this one is fetched: that of the next region of which the host keeps
        something, whose values are there then, or the last of all. None for the last region itself, whose values are needed at once."""
        later = [k for k in range(i + 1, len(self.regions)) if self.starts[k]]
        return next((k for k in later if self.host[k] in FETCHED), later[-1] if later else None)

    def _from_host(self, i: int, values: Sequence[Node]) -> list[Node]:
        """Values that went to the host, and come back while regions after this one are at work."""
        sooner = self._sooner(i)
        if sooner is None:
            return self._after(values, i)
        return self._after(self._after([to_host(a) for a in values], sooner, from_host), i, landed)

    def _read_of(self, i: int) -> list[Node]:
        """What the backward pass reads inside a region."""
        return list(dict.fromkeys(a for n in self.back for a in n.args if self.inside.get(a) == i))

    def _needed(self, i: int) -> list[Node]:
        """The nodes of a region that must be recomputed for it, in order."""
        mine, needed = set(self.regions[i]), set[Node]()
        todo = [n for n in self._read_of(i) if n in mine]
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                todo += [a for a in n.args if a in mine]
        return [n for n in self.regions[i] if n in needed]


def _view(a: Node, second: Mapping[Node, Node]) -> Node:
    """A view, of what its base became."""
    base = _viewed(a)
    return second.get(base, base) if a is base else make(a.op, (_view(a.args[0], second),), dict(a.attrs))


def _viewed(a: Node) -> Node:
    """What a view is of."""
    return _viewed(a.args[0]) if a.op.kind is Kind.VIEW and len(a.args) == 1 and len(a.args[0].types) == 1 else a


def _is_value(a: Node) -> bool:
    """Neither made from nothing nor a tuple."""
    return len(a.types) == 1 and (bool(a.args) or a.op.is_input)
