"""A captured training step split into pipeline stages: its forward pass at values, its backward pass by the chain rule.

Let V_1 ... V_m be sets of values, one behind the other, where the forward pass can be split: what each repeated block gives or, where no
block repeats, every value that passes alone or, where these are too few, the few that pass together. A node stands in the first part whose
end needs it; what no end needs (the rest of the loss, terms of it that blocks give) stands behind all it reads. `partition` makes the flops
of the heaviest stage least.

What reads no batch or no parameter (masks, casts of weights) is made wherever it is read. The backward pass of a stage is the vjp of its own
forward pass, so every stage that reads a tied weight has a gradient of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.autodiff import backward
from weft.core.errors import PlanError
from weft.core.node import Node, constant, remade, toposort
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.frontend.capture import Captured, Instance
from weft.ops.fill import stop_gradient
from weft.ops.pointwise import add
from weft.ops.registry import flops
from weft.ops.source import input_node
from weft.plan.partition import early, partition

LOSS_SUM = "loss.sum"  # the losses of the micro-batches, added up
Cut = tuple[Node, ...]  # values that end a stage


@dataclass(frozen=True)
class Region:
    """Nodes of the forward pass that are recomputed, each for as long as nothing outside `within` reads it in the forward pass.

    `host` says what the host's memory keeps: of `inputs` those of the region, which is recomputed from them; of `all` nothing is recomputed, and
    all that the backward pass reads was there; of `none` nothing, and nothing is recomputed either: others are fetched while it is at work.
    """

    nodes: frozenset[Node]
    within: frozenset[Node]
    host: str = ""

    def mapped(self, made: Callable[[Node], Node | None]) -> Region:
        """The region in another program."""
        nodes, within = (frozenset(x for n in own if (x := made(n)) is not None) for own in (self.nodes, self.within))
        return replace(self, nodes=nodes, within=within)


@dataclass(frozen=True)
class Stage:
    """What a stage does with a micro-batch: forward alone, and forward and backward in one program.

    `act.K` is a value that passes a border, an output of the stage that makes it and an input of those that read it. Its
    gradient goes the other way as `d.act.K.STAGE`, from each of its readers. `d.param.NAME` are gradients of parameters.
    """

    number: int
    forward: Program
    step: Program
    again: tuple[Region, ...] = ()  # what of the forward pass is recomputed

    def reads(self, kind: str) -> list[str]:
        return [n for n in self.step.input_names if n.startswith(kind)]

    def gives(self, kind: str) -> list[str]:
        return [n for n in self.step.output_names if n.startswith(kind)]


def split(captured: Captured, stages: int, ends: Sequence[Cut] | None = None, again: Sequence[Region] = ()) -> tuple[Stage, ...]:
    """The stages of a step, split for balance unless told where."""
    forward = Forward(captured)
    ends = chosen_ends(captured, stages) if ends is None else ends
    made = forward.stages(forward.split_at(ends), len(ends) + 1, again)
    return _with_gradients(captured, made) if captured.gradients else tuple(made)


def split_like(captured: Captured, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The forward pass of another step of the same model, every parameter read where it was."""
    forward, homes = Forward(captured), dict[str, int]()
    for k, s in enumerate(stages):
        for name in s.forward.input_names:
            homes.setdefault(name, k)
    return numbered(forward.stages(forward.active_stages(homes, len(stages)), len(stages)), [s.number for s in stages])


def numbered(stages: Iterable[Stage], numbers: Sequence[int]) -> tuple[Stage, ...]:
    """The stages, first to last, by the numbers that a schedule has for them."""
    return tuple(replace(s, number=k) for s, k in zip(stages, numbers, strict=True))


def chosen_ends(captured: Captured, stages: int) -> tuple[Cut, ...]:
    """Where stages are parted so that their work is even."""
    forward = Forward(captured)
    if stages > (forward.repeats or len(forward.ends) + 1):
        forward.split_anywhere(stages)
    most = len(forward.ends) + 1
    if stages > most:
        raise PlanError(
            f"{stages} stages are more than the model can be split into",
            needed=f"{stages} or more parts",
            found=str(most),
            try_=f"pp{most}" if most > 1 else "a plan without pp: there is one op alone",
        )
    return balanced_ends(forward, stages)


def balanced_ends(forward: Forward, stages: int) -> tuple[Cut, ...]:
    return tuple(forward.ends[k] for k in balanced(forward.weights(), stages))


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where to split a row of weights, as numbers of the gaps, so that the heaviest part is as light as can be."""
    total = [0.0, *itertools.accumulate(weights)]
    ends = partition(len(weights), parts, lambda _, a, b: total[b] - total[a], tie=early)
    return tuple(b - 1 for b in ends[:-1]) if ends else ()


# -- the forward pass ----------------------------------------------------------------------------------------------------------


class Forward:
    """The forward pass of a captured step, in order, and where it can be split."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.program = captured, captured.program
        self.loss = self.program.output_names["loss"]
        self.written = {name: n for name, n in self.program.outputs if name.startswith("buffer.")}
        self.main = toposort([self.loss])
        self.order = toposort([self.loss, *self.written.values()])
        self.at = {n: i for i, n in enumerate(self.main)}
        reads = _reads(self.order)
        self.active = {n for n, r in reads.items() if r == BOTH}
        self.fixed = {n for n, r in reads.items() if r == PARAMETER}  # made of parameters alone
        self.blocks = self._blocks()
        self.repeats = len(self.blocks)
        self.ends = [self.given(b) for b in self.blocks] or [(self.main[i],) for i in narrow(self.main, self.active)]

    def split_anywhere(self, stages: int) -> None:
        """Ends where several values pass, as few as give so many stages: skip connections and branches cross such a border."""
        places = [tuple(n for n in self.main if n in open_) for _, open_ in _open(self.main, self.active, len(self.main)) if _may_pass(open_)]
        places = list(dict.fromkeys(places))
        for most in sorted({len(end) for end in places}):
            self.ends = [end for end in places if len(end) <= most]
            if len(self.ends) >= stages - 1:
                break

    def _blocks(self) -> list[Instance]:
        """Repeated blocks that the loss needs, in the order in which they end: a decoder's may begin before the encoder it reads.

        A block that gives nothing but what those before it need ends no part of its own."""
        every = [b for group in self.captured.blocks for b in group if self.given(b)]
        found: dict[Node, int] = {}
        blocks = []
        for block in sorted(every, key=lambda b: max(self.at[n] for n in self.given(b))):
            before = len(found)
            self._stand(self.given(block), 0, found)
            blocks += [block] if len(found) > before else []
        return blocks

    def given(self, block: Instance) -> Cut:
        """What a block passes on."""
        return tuple(n for n in block.outputs if n in self.at and n in self.active)

    def weights(self) -> list[float]:
        """Flops between the ends."""
        sums = [0.0] * (len(self.ends) + 1)
        for n, k in self.split_at(self.ends).items():
            sums[k] += flops(n) if n in self.at else 0.0
        return sums

    def split_at(self, cuts: Sequence[Cut]) -> dict[Node, int]:
        """The stage of every active value: the first whose end needs it, or behind all it reads."""
        found: dict[Node, int] = {}
        for k, end in enumerate(cuts):
            self._stand(end, k, found)
        ends = {n: k for k, end in enumerate(cuts) for n in end}
        for n in self.order:
            if n in self.active and (n not in found or n.op.is_item):
                behind = (max(found[a], ends.get(a, -1) + (not n.op.is_item)) for a in n.args if a in found)
                found[n] = max(behind, default=len(cuts))
        return found | {self.loss: len(cuts)}

    def _stand(self, values: Cut, stage: int, found: dict[Node, int]) -> None:
        todo = [n for n in values if n not in found]
        while todo:
            n = todo.pop()
            if n not in found:
                found[n] = stage
                todo += [a for a in n.args if a in self.active and a not in found]

    def active_stages(self, homes: Mapping[str, int], stages: int) -> dict[Node, int]:
        """The stage of every active value: behind all it reads, at the parameters it reads or after them."""
        at: dict[Node, int] = {}
        for n in self.order:
            here = homes.get(n.attr("name"), 0) if n.op.is_input and n in self.fixed else 0
            at[n] = max((at[a] for a in n.args), default=here)
        return {n: k for n, k in at.items() if n in self.active} | {self.loss: stages - 1}

    def stages(self, where: Mapping[Node, int], count: int, again: Sequence[Region] = ()) -> list[Stage]:
        readers: dict[Node, set[int]] = {}
        for n in self.order:
            for a in n.args:
                if a in where and where[a] != where[n]:
                    readers.setdefault(a, set()).add(where[n])
        borders = _Borders(where, readers, {n: f"act.{k}" for k, n in enumerate(readers)}, self._homes(where))
        return [self._stage(g, borders, g == count - 1, again) for g in range(count)]

    def _homes(self, where: Mapping[Node, int]) -> dict[str, int]:
        """The stage that writes each buffer: where its new value is made or, made of parameters alone, the first that reads it or the old."""
        read: dict[Node, set[int]] = {n: set() for n in self.order}
        for n in reversed(self.order):
            for a in n.args:
                read[a] |= {where[n]} if n in where else read[n]
        old = self.program.input_names
        return {
            name: where[n] if n in where else min(read[n] | (read.get(old[name], set()) if name in old else set()), default=0)
            for name, n in self.written.items()
        }

    def _stage(self, g: int, borders: _Borders, is_last: bool, again: Sequence[Region]) -> Stage:
        where, readers, names = borders.where, borders.readers, borders.names
        roots = {names[n]: n for n in readers if where[n] == g} | ({"loss": self.loss} if is_last else {})
        roots |= {name: n for name, n in self.written.items() if borders.homes[name] == g}
        swap = {n: input_node(names[n], n.type) for n, who in readers.items() if g in who}
        made = remade(roots.values(), swap)
        program = program_of(f"{self.program.name}.{g}", {name: made[n] for name, n in roots.items()}, self.program, made)
        regions = (r.mapped(lambda n: made.get(n) if where.get(n) == g else None) for r in again)
        return Stage(g, program, program, tuple(r for r in regions if r.nodes))


@dataclass(frozen=True)
class _Borders:
    """The stage of every active value, which others read it, what it is called on its way there, and the stage that writes a buffer."""

    where: Mapping[Node, int]
    readers: Mapping[Node, set[int]]
    names: Mapping[Node, str]
    homes: Mapping[str, int]


BATCH, PARAMETER, BOTH = 1, 2, 3


def _reads(order: Iterable[Node]) -> dict[Node, int]:
    """Whether nodes read of a batch, of a parameter, or both."""
    reads: dict[Node, int] = {}
    for n in order:
        reads[n] = BATCH if n.role in (Role.BATCH, Role.SEED) else PARAMETER if n.role is Role.PARAMETER else 0
        for a in n.args:
            reads[n] |= reads[a]
    return reads


def narrow(order: Sequence[Node], active: Collection[Node], kept: Iterable[Node] = ()) -> list[int]:
    """The places of a row of nodes where one active value alone is read later; `kept` are read after the last."""
    return [i for i, open_ in _open(order, active, 1, kept) if order[i] in open_ and _may_pass(open_)]


def _open(order: Sequence[Node], active: Collection[Node], most: int, kept: Iterable[Node] = ()) -> Iterator[tuple[int, set[Node]]]:
    """The places of a row of nodes at which no more than so many active values are read later, and these."""
    last = {a: i for i, n in enumerate(order) for a in n.args if a in active} | dict.fromkeys(kept, len(order))
    open_ = set(last).difference(order)
    for i, n in enumerate(order[:-1]):
        open_ -= {a for a in n.args if last.get(a) == i}
        open_ |= {n} if n in active else set()
        if 0 < len(open_) <= most:
            yield i, set(open_)


def _may_pass(values: Iterable[Node]) -> bool:
    return all(len(n.types) == 1 for n in values)


def program_of(name: str, outputs: Mapping[str, Node], like: Program, made: Mapping[Node, Node], inputs: Iterable[Node] = ()) -> Program:
    """The program of some outputs, with all inputs they read or are the next value of, and more if told."""
    old = [like.input_names[i] for o, i in like.state if o in outputs]
    read = dict.fromkeys([*inputs, *(n for n in toposort(outputs.values()) if n.op.is_input), *old])
    kept = {n.attr("name") for n in read}
    state = tuple((o, i) for o, i in like.state if o in outputs and i in kept)
    lines = {made[n]: line for n, line in like.lines.items() if n in made}
    return new_program(name, like.mesh, list(read), dict(outputs), state=state, lines=lines)


# -- the backward pass ---------------------------------------------------------------------------------------------------------


def _with_gradients(captured: Captured, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Last stage first: what a stage finds of its border values' gradients is what the stages before it start from."""
    moving = _moving(stages, captured)
    found: dict[str, list[int]] = {}
    made: list[Stage] = []
    for stage in reversed(stages):
        program, reached = _gradient(stage, captured.gradients, moving, found)
        for name in reached:
            found.setdefault(name, []).append(stage.number)
        made.insert(0, replace(stage, step=program))
    return tuple(made)


def _moving(stages: Sequence[Stage], captured: Captured) -> set[str]:
    """The border values through which a gradient can flow to a parameter."""
    moves: set[str] = set()
    for stage in stages:
        known: dict[Node, bool] = {}
        for n in stage.forward.nodes:
            name = n.attr("name") if n.op.is_input else None
            flows = any(known[a] for a in n.args) and n.op is not stop_gradient and n.types[0].dtype.is_floating_point
            known[n] = name in moves or name in captured.gradients or flows
        moves |= {name for name, n in stage.forward.outputs if known[n]}
    return moves


def _gradient(
    stage: Stage, params: Mapping[str, Node], moving: set[str], found: Mapping[str, Sequence[int]]
) -> tuple[Program, list[str]]:
    p, seeds = stage.forward, dict[Node, Node]()
    for name, node in p.outputs:
        cts = [input_node(f"d.{name}.{reader}", node.type) for reader in found.get(name, ())]
        cts += [constant(1.0, node.dtype, p.mesh)] if name == "loss" else []
        for ct in cts:
            seeds[node] = add(seeds[node], ct) if node in seeds else ct
    wrt = [n for n in p.input_names if n in moving or n in params]
    grads = backward(seeds, [p.input_names[n] for n in wrt])
    reached = [n for n in wrt if p.input_names[n] in grads]
    outputs = dict(p.outputs)
    outputs |= {f"d.{n}": grads[p.input_names[n]] for n in reversed(reached) if n in params}  # as the backward pass finds them
    outputs |= {f"d.{n}.{stage.number}": grads[p.input_names[n]] for n in reached if n in moving}
    return program_of(f"{p.name}.step", outputs, p, {n: n for n in p.nodes}), [n for n in reached if n in moving]


__all__ = [
    "LOSS_SUM", "Cut", "Forward", "Region", "Stage", "balanced", "chosen_ends", "narrow", "program_of", "split", "split_like",
]  # fmt: skip
