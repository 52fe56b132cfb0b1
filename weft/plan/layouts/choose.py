"""Solve the layouts of a program and write them into it, with every communication explicit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.core.errors import PlanError
from weft.core.layout import Layout, Mesh, Placement, R, S
from weft.core.node import Node, make
from weft.core.program import Program
from weft.ops.comm import is_comm, reshard, slice_
from weft.ops.source import input_in_layout
from weft.plan.assignment import Solution, solve
from weft.plan.assignment.budget import Budget
from weft.plan.layouts.model import COPY, Allow, Instance, LayoutModel, Rates, Tap, build
from weft.plan.layouts.moves import Placements, Prices
from weft.plan.layouts.strategies import Centre, Strategies, Strategy
from weft.plan.place import remake
from weft.plan.roles import Roles

AT_ONCE = 2
WORK = 1e9  # about two seconds; the solver finds good layouts in a tenth of it
GAP = 5e-3  # a plan this close to the best is good enough to go on with
Pins = Mapping[str, Sequence[Mapping[str, Placement]]]


@dataclass(frozen=True, eq=False)
class Chosen:
    """A program on a mesh, its cost in the prices it was chosen by, and how far from the best it may be."""

    program: Program
    model: LayoutModel
    answer: Solution
    again: frozenset[str]  # inputs gathered in the forward pass whose copies are dropped and made again in the backward pass

    @property
    def cost(self) -> float:
        return self.answer.cost

    @property
    def gap(self) -> float:
        return self.answer.gap

    def way(self, node: Node) -> Strategy:
        """How a node of the program that was given is computed."""
        at = self.model.site[node]
        return self.model.sites[at].ways[int(self.answer.x[at])]  # type: ignore[index]

    @cached_property
    def inputs(self) -> dict[str, dict[str, Placement]]:
        """How every input is laid out, as `place` takes it."""
        return {name: dict(n.layout.placements) for name, n in self.program.input_names.items()}

    @cached_property
    def communication(self) -> Counter[str]:
        """How many collectives of each kind the program has; slices move nothing and are left out."""
        return Counter(n.op.name for n in self.program.nodes if is_comm(n) and n.op is not slice_)


def choose(
    program: Program,
    mesh: Mesh,
    prices: Prices,
    *,
    memory: float = math.inf,
    blocks: Sequence[Sequence[Instance]] = (),
    pins: Pins | None = None,
    work: float = WORK,
    seconds: float = math.inf,
    gap: float = GAP,
    rates: Rates | None = None,
    at_once: int = AT_ONCE,
    allow: Allow | None = None,
    ways: Strategies | None = None,
) -> Chosen:
    """The cheapest layouts found within `work`, or the first within `gap` of the cheapest; `memory` is in bytes per device.

    `blocks` are repeated parts that shall be laid out the same. `pins` give, by name of input, the layouts it may have. `rates` say what
    counts for less; `at_once` how many axes are searched together, since the ways of a node grow as a power of their number;
    `allow` which ways of a node may be taken. `ways` on the mesh may be those that other programs were laid out by.
    """
    _check_pins(program, pins or {})
    task = _LayoutChoice(program, mesh, prices, memory, blocks, pins or {}, Budget(work, seconds), gap, rates or Rates(), at_once, allow, ways)
    model, answer = task.solve() if len(mesh.axes) <= at_once else task.refine()
    if answer.x is None:
        raise _no_layouts(program, mesh, memory, str(answer.reason))
    writer = _LayoutWriter(program, mesh, model, [int(a) for a in answer.x])
    made = remake(program, mesh, writer.made, writer._input, writer._node)
    return Chosen(made, model, answer, frozenset(writer.again))


@dataclass(frozen=True, eq=False)
class _LayoutChoice:
    """A choice to be made. Of three axes or more the last two are first taken as one; that choice is then refined, each node free
    to change along one axis at a time, until nothing is gained. The bound then tells of the last refinement only, so none is given."""

    program: Program
    mesh: Mesh
    prices: Prices
    memory: float
    blocks: Sequence[Sequence[Instance]]
    pins: Pins
    budget: Budget
    gap: float
    rates: Rates
    at_once: int
    allow: Allow | None
    ways: Strategies | None

    def solve(self, centres: Mapping[Node, Centre] | None = None) -> tuple[LayoutModel, Solution]:
        pins = {name: [_placements(self.mesh, p) for p in options] for name, options in self.pins.items()}
        strategies = self.ways or Strategies(self.mesh)
        model = build(
            self.program, strategies, self.prices, limit=self.memory, blocks=self.blocks, pins=pins, centres=centres, rates=self.rates, allow=self.allow
        )  # fmt: skip
        left = self.budget.work - self.budget.spent
        answer = solve(model.problem, work=left, seconds=self.budget.left, gap=self.gap)
        self.budget.spend(answer.work)
        return model, answer

    def refine(self) -> tuple[LayoutModel, Solution]:
        *outer, middle, inner = self.mesh.axes
        joined = Mesh(**{a: self.mesh.sizes[a] for a in outer}, **{middle: self.mesh.sizes[middle] * self.mesh.sizes[inner]})
        pins = {name: [{a: p for a, p in option.items() if a != inner} for option in options] for name, options in self.pins.items()}
        coarse = replace(self, mesh=joined, prices=self.prices.on(joined), pins=pins, ways=None)
        model, answer = coarse.solve() if len(joined.axes) <= self.at_once else coarse.refine()
        centres = {n: tuple((*p, p[-1]) for p in c) for n, c in _centres(model, answer).items()}
        best = self.solve(centres)
        while best[1].x is not None and not self.budget.over:
            last, best = best, min(best, self.solve(_centres(*best)), key=lambda found: found[1].cost)
            if best[1].cost >= last[1].cost * (1 - self.gap):
                break
        return best[0], replace(best[1], bound=-math.inf)


def _centres(model: LayoutModel, answer: Solution) -> dict[Node, tuple[Placements, ...]]:
    """The way each node was given: the layouts of its operands, or of itself where it has none."""
    if answer.x is None:
        return {}
    strategies = {n: model.sites[at].ways[int(answer.x[at])] for n, at in model.site.items()}
    return {n: w.operands or w.results for n, w in strategies.items() if not n.op.is_item}


def _no_layouts(program: Program, mesh: Mesh, memory: float, reason: str) -> PlanError:
    return PlanError(
        f"no layouts for {program.name} on {mesh}",
        needed=f"at most {memory:.4g} bytes in use on a device" if math.isfinite(memory) else "layouts that every op accepts",
        found=reason,
        try_="more memory, more ranks, a smaller batch, or fewer pins",
    )


def _placements(mesh: Mesh, places: Mapping[str, Placement]) -> Placements:
    for axis in places:
        mesh.require(axis)
    return tuple(places.get(axis, R) for axis in mesh.axes)


def _check_pins(program: Program, pins: Mapping[str, object]) -> None:
    for name in pins:
        if name not in program.input_names:
            known = ", ".join(list(program.input_names)[:8])
            raise PlanError(f"{program.name} has no input {name!r} to pin", needed=f"one of {known}, ...", found=name)


class _LayoutWriter:
    """Makes the program anew, every operand brought to the layout its node was chosen to read it in."""

    def __init__(self, program: Program, mesh: Mesh, model: LayoutModel, x: Sequence[int]) -> None:
        self.program, self.mesh, self.model, self.x = program, mesh, model, x
        self.forward = Roles(program).forward
        self.made: dict[Node, Node] = {}
        self.again: set[str] = set()

    def _way(self, node: Node) -> Strategy:
        at = self.model.site[node]
        return self.model.sites[at].ways[self.x[at]]

    def _layout(self, shape: tuple[int, ...], places: Placements) -> Layout:
        return Layout.of(self.mesh, shape, dict(zip(self.mesh.axes, places, strict=True)))

    def _input(self, node: Node) -> Node:
        layout = self._layout(node.shape, self._way(node).results[0])
        self.made[node] = input_in_layout(node, layout)
        return self.made[node]

    def _node(self, node: Node) -> Node:
        attrs = {k: self.mesh.key if k == "mesh" else v for k, v in node.attrs}
        if node.op.is_item:
            return make(node.op, (self.made[node.args[0]],), attrs)
        strategy = self._way(node)
        args = tuple(self._operand(node, a, places) for a, places in zip(node.args, strategy.operands, strict=True))
        return make(node.op, args, attrs)

    def _operand(self, node: Node, arg: Node, places: Placements) -> Node:
        value, late = self.made[arg], node not in self.forward
        tap = self._tap(arg, late)
        if tap is not None:
            value = reshard(value, self._layout(arg.shape, tap.layout))
            if late and tap.how == COPY and arg in self.program.input_set and self._gathered_before(arg):
                self.again.add(arg.attr("name"))
        return reshard(value, self._layout(arg.shape, places))  # type: ignore[no-any-return]

    def _tap(self, value: Node, late: bool) -> Tap | None:
        at = self.model.taps.get((value, late))
        return None if at is None else self.model.sites[at].taps[self.x[at]]

    def _gathered_before(self, value: Node) -> bool:
        """Whether the forward pass reads a copy in which some shard of the value is undone."""
        tap, layout = self._tap(value, late=False), self._way(value).results[0]
        return tap is not None and tap.how == COPY and any(isinstance(h, S) and h != p for h, p in zip(layout, tap.layout, strict=True))
