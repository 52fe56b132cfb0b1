"""The gradient noise scale, measured by a training step at no extra communication.

With B samples on n copies, rank r holding b_r, let t_r be its term of the gradient g = sum of t_r. Then, over the choice of samples,

    E[ sum of |t_r|^2 * B / b_r ] = |G|^2 + n * tr(S) / B          E[ |g|^2 ] = |G|^2 + tr(S) / B

where G is the true gradient and S the covariance of one sample's. Two numbers per step give both unknowns, and their ratio
tr(S) / |G|^2 is the batch at which noise and gradient are equally strong. A rank's own number is no value of the program, so it
is taken outside of it, from the terms the program hands out; it enters the next step as a term of an input, and is summed in the
all_reduce that the loss has anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor

from weft.core.errors import PlanError
from weft.core.layout import Layout, Mesh, P
from weft.core.node import Node, Type
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.ops import comm, pointwise
from weft.ops.reduce import sum_
from weft.ops.registry import Kind
from weft.ops.source import input_node
from weft.schedule import bucket
from weft.schedule.groups import is_scalar

AXIS = "dp"
INPUT, TERM, SQUARES = "noise", "noise.term", "noise.squares"
KEPT = 0.95  # of what was known, at each step


def measured(p: Program) -> Program:
    """The placed step, which also gives every gradient's term, the squares of the sums, and last step's numbers summed over ranks."""
    _check_mesh(p.mesh)
    sums = list(dict.fromkeys(gradient_sums(p)))
    loss = _loss_sum(p)
    if not sums:
        raise PlanError("no gradient is reduced over replicas", needed="a training step whose batch is sharded along dp", found=p.name)
    terms = {f"{TERM}.{k}": a for k, a in enumerate(dict.fromkeys(a for n in sums for a in n.args))}
    squares = {f"{SQUARES}.{k}": n for k, n in enumerate(_squares(p, sums))}
    given = input_node(INPUT, Type(loss.dtype, Layout.of(p.mesh, (2,), {AXIS: P()})))
    reduced = comm.all_reduce(given, axis=AXIS)
    outputs = {**p.output_names, **terms, **squares, INPUT: reduced}
    q = new_program(p.name, p.mesh, (*p.inputs, given), outputs, state=p.state, lines=p.lines)
    return bucket(q, loss, reduced)


def _check_mesh(mesh: Mesh) -> None:
    others = [a for a, n in mesh.sizes.items() if a != AXIS and n > 1]
    if others or mesh.sizes.get(AXIS, 1) == 1:
        raise PlanError(
            "the noise scale needs data-parallel replicas", needed="a plan of dp, with or without zero", found=str(mesh), try_='plan="dp2"'
        )


def gradient_sums(p: Program) -> Iterator[Node]:
    """The reductions over copies that the updates read, through whatever is done to a gradient element by element."""
    for n in p.nodes:
        if n.op.unfold is not None:
            yield from _sums_behind(n.args[1])


def _sums_behind(node: Node) -> Iterator[Node]:
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        if n.op in (comm.all_reduce, comm.reduce_scatter) and n.attr("axis") == AXIS:
            yield n
        elif n.op.kind in (Kind.POINTWISE, Kind.VIEW, Kind.COMM):
            fresh = [a for a in n.args if a not in seen and not is_scalar(a)]
            seen.update(fresh)
            todo += fresh


def _loss_sum(p: Program) -> Node:
    """The reduction of the loss over copies."""
    found = [
        n for n in p.nodes if n in p.needs(p.output_names["loss"]) and n.op is comm.all_reduce and n.attr("axis") == AXIS and is_scalar(n)
    ]
    if not found:
        raise PlanError("the loss is not summed over the copies", needed="a loss that is a mean over the batch", found=p.name)
    return found[-1]


def _squares(p: Program, sums: list[Node]) -> Iterator[Node]:
    """The sum of squares of what ranks hold after the sums, a number for each way it is laid out: replicated, or in slices."""
    found: dict[Type, list[Node]] = {}
    for n in sums:
        number = sum_(pointwise.square(n))
        found.setdefault(number.type, []).append(number)
    for numbers in found.values():
        yield reduce(pointwise.add, numbers)


class Noise:
    """What the steps have told so far, older steps counting less. It outlives a change of the batch."""

    def __init__(self, keep: float = KEPT) -> None:
        self.keep, self.steps = keep, 0
        self._spread: Tensor | float = 0.0  # tr(S) and |G|^2, both to be divided by the weight of all that was seen
        self._strength: Tensor | float = 0.0
        self._weight = 0.0

    def add(self, own: Tensor | float, summed: Tensor | float, batch: int, copies: int) -> None:
        """One step's two numbers."""
        spread = (own - summed) * batch / (copies - 1)
        strength = (copies * summed - own) / (copies - 1)
        old = self.keep
        self._spread = old * self._spread + (1 - old) * spread
        self._strength = old * self._strength + (1 - old) * strength
        self._weight = old * self._weight + (1 - old)
        self.steps += 1

    @property
    def scale(self) -> float:
        """The batch at which noise and gradient are equally strong; not a number before anything is known."""
        if not self.steps:
            return math.nan
        spread, strength = float(self._spread), float(self._strength)
        return max(0.0, spread) / strength if strength > 0 else math.inf


class Probe:
    """Carries one program's numbers from a step to the next."""

    def __init__(self, program: Program, coords: Mapping[str, int], noise: Noise, device: torch.device) -> None:
        rows = [n.layout for n in program.inputs_for(Role.BATCH).values() if n.ndim]
        self.noise, self.copies = noise, program.mesh.sizes[AXIS]
        self.batch, self.mine = rows[0].shape[0], rows[0].local_shape(coords)[0]
        self.type = program.input_names[INPUT].type
        self.divisors = {name: self.copies if not n.layout.partials else 1 for name, n in program.outputs if name.startswith(SQUARES)}
        self.next = torch.zeros(2, dtype=self.type.dtype, device=device)
        self.known = False

    def inputs(self) -> dict[str, Tensor]:
        return {INPUT: self.next}

    def take(self, out: Mapping[str, Tensor]) -> None:
        """Last step's numbers, now summed, and this step's, to be summed with the next loss."""
        if self.known:
            own_square, sum_square = out[INPUT].unbind()
            self.noise.add(own_square, sum_square, self.batch, self.copies)
        norms = torch._foreach_norm([out[name] for name in out if name.startswith(TERM)])
        own = torch.stack(norms).square().sum() * (self.batch / self.mine)
        summed = sum((out[name] / n for name, n in self.divisors.items()), torch.zeros((), device=own.device))
        self.next, self.known = torch.stack([own, summed]).to(self.type.dtype), True
