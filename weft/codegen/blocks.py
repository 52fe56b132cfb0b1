"""Groups as steps: a fuse group is one kernel call, an overlap group one pipeline over chunks. What cannot be either runs
node by node, as it would without the group, and the code says why.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from weft.codegen.fuse import Fused, NotFusable, Place, fuse_group
from weft.codegen.kernel import Kernel, compile_group
from weft.core.layout import Layout, S
from weft.core.node import Node, Type, make
from weft.core.program import Group, Program, new_program
from weft.ops.registry import Kind, Local, equation_of
from weft.ops.shape import expand_op, reshape_op
from weft.ops.source import input_node


@dataclass(frozen=True, eq=False)
class Call:
    """A kernel and the values it works on: for each part, its row length and, by slot, a value and where its rows start."""

    kernel: Kernel
    fused: Fused

    @cached_property
    def made(self) -> tuple[Node, ...]:
        """What the call gives, in order: tensors, then numbers."""
        tensors = (p.node for p in self._places() if p.role in ("out", "gathered"))
        return tuple(dict.fromkeys([*tensors, *self.fused.numbers]))

    @cached_property
    def given(self) -> tuple[Node, ...]:
        """What the call takes, in order: tensors, then numbers."""
        tensors = (p.node for p in self._places() if p.role not in ("out", "gathered", "index"))
        return tuple(dict.fromkeys([*tensors, *(n for part in self.fused.parts for n in part.scalars.values())]))

    def _places(self) -> list[Place]:
        return [p for part in self.fused.parts for p in part.places.values()]


@dataclass(frozen=True)
class Chunked:
    """One chunk's program, and how its inputs and outputs are chunks of the group's: dim and slices side by side."""

    program: Program
    chunks: int
    sharded: dict[Node, tuple[int, int]]  # inputs that come in chunks
    full: tuple[Node, ...]
    joins: dict[Node, tuple[int, int]]
    origin: dict[Node, Node]  # a chunk's node and the group's node it is a chunk of
    hows: dict[Node, tuple[int, int]]  # of the group's nodes: dim and slices side by side


@dataclass(frozen=True)
class ChunkLocal(Local):
    """What a rank knows when it runs one node on one chunk: which indices of the full tensor it has in hand."""

    how: dict[Node, tuple[int, int]]
    chunk: int
    chunks: int

    def positions(self, arg: int, dim: int) -> torch.Tensor:
        return self._of_chunk(super().positions(arg, dim), self.node.args[arg], dim)

    def out_positions(self, dim: int, out: int = 0) -> torch.Tensor:
        return self._of_chunk(super().out_positions(dim, out), self.node, dim)

    def out_shape(self, out: int = 0) -> tuple[int, ...]:
        full = super().out_shape(out)
        dim = self.how[self.node][0]
        return tuple(n // self.chunks if d == dim else n for d, n in enumerate(full))

    def _of_chunk(self, at: torch.Tensor, value: Node, dim: int) -> torch.Tensor:
        where, parts = self.how.get(value, (None, 1))
        return at.reshape(parts, self.chunks, -1)[:, self.chunk].reshape(-1) if dim == where else at


@dataclass(frozen=True, eq=False)
class Block:
    """A group as one step of a rank."""

    group: Group
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    calls: tuple[Call, ...] = ()
    chunked: Chunked | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.group.nodes


def blocks_of(
    program: Program, rank: int, fuse: Collection[str | None], donate: bool, target: str = "cpu"
) -> tuple[list[Block], dict[str, str]]:
    """The groups that become one step on this rank, and why the others do not. `fuse` are axes with peer memory."""
    blocks, reasons = [], {}
    overlapped = {n for g in program.groups if g.kind == "overlap" for n in g.nodes}
    for group in (_with_items(program, g) for g in program.groups):
        try:
            if group.kind == "overlap":
                blocks.append(_overlap_block(program, group))
            elif not overlapped & set(group.nodes) and _takes_part(program, group, rank):
                blocks.append(_fuse_block(program, group, rank, fuse, donate, target))
        except NotFusable as error:
            reasons[group.name] = f"{error.message}: {error.found}" if error.found else error.message
    return blocks, reasons


def _takes_part(program: Program, group: Group, rank: int) -> bool:
    """Whether the rank holds what the group computes; all of it or none."""
    coords = program.mesh.coords(rank)
    here = {t.layout.present(coords) for n in group.nodes for t in n.types}
    if len(here) > 1:
        raise NotFusable("some of its values are not held by this rank")
    return here.pop()


def _with_items(program: Program, group: Group) -> Group:
    """The group and the single results of its collectives over several tensors."""
    items = [u for n in group.nodes for u in program.users[n] if u.op.is_item]
    return replace(group, nodes=tuple(dict.fromkeys([*group.nodes, *items])))


def edges(program: Program, group: Group) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """What a group reads from outside it, and what of it is read outside."""
    inside = set(group.nodes)
    inputs = dict.fromkeys(a for n in group.nodes for a in n.args if a not in inside and not a.op.is_number)
    outputs = [n for n in group.nodes if program.outputs_of(n) or any(u not in inside for u in program.users[n])]
    outputs = [n for n in outputs if not n.op.is_number]
    return tuple(inputs), tuple(outputs)


# -- one kernel ------------------------------------------------------------------------------------------------------


def _fuse_block(program: Program, group: Group, rank: int, fuse: Collection[str | None], donate: bool, target: str) -> Block:
    found = fuse_group(program, group, rank, donate=donate)
    axis = found[0].axis
    if axis not in fuse:
        raise NotFusable(f"no memory that ranks along {axis} can all reach" if axis else "no compiler for kernels")
    world = 1 if axis is None else program.mesh.size(axis)
    inputs, outputs = edges(program, group)
    calls = tuple(Call(compile_group(f.body, world, target), f) for f in found)
    return Block(group, inputs, outputs, calls)


# -- a pipeline over chunks ------------------------------------------------------------------------------------------


def _overlap_block(program: Program, group: Group) -> Block:
    inputs, outputs = edges(program, group)
    chunked = _Chunking(program, group, inputs, outputs).run()
    return Block(group, inputs, outputs, chunked=chunked)


class _Chunking:
    """Follows the chunked dim through a group and makes the program of one chunk."""

    def __init__(self, program: Program, group: Group, inputs: Sequence[Node], outputs: Sequence[Node]) -> None:
        self.program, self.group, self.inputs, self.outputs = program, group, inputs, outputs
        self.chunks = int(group.option("chunks"))
        self.where: dict[Node, int] = {}  # members and inputs that come in chunks, and along which dim
        self.small: dict[Node, Node] = {}

    def run(self) -> Chunked:
        for n in self.group.nodes:
            self._follow(n)
        self.moving = self._moving_axes()
        for x in self.inputs:
            self.small[x] = input_node(_name(x, self.inputs), self._type(x) if x in self.where else x.type)
        for n in self.group.nodes:
            self.small[n] = self._remake(n)
        small = {f"y{k}": self.small[n] for k, n in enumerate(self.outputs)}
        chunk = new_program(self.group.name, self.program.mesh, [self.small[x] for x in self.inputs], small)
        return Chunked(
            chunk, self.chunks, {x: self._how(x) for x in self.inputs if x in self.where},
            tuple(x for x in self.inputs if x not in self.where), {n: self._how(n) for n in self.outputs},
            {small: n for n, small in self.small.items()}, {n: self._how(n) for n in self.where},
        )  # fmt: skip

    def _follow(self, n: Node) -> None:
        """Where the result of `n`, and what it reads from outside, come in chunks."""
        known = [a for a in n.args if a in self.where]
        eq = equation_of(n)
        if eq is None:
            d = self.where[known[0]] if known else int(self.group.option("dim"))
            self.where[n] = d
            for a in n.args:
                self.where.setdefault(a, d)
            return
        if known:
            label = eq.label(n.args.index(known[0]), self.where[known[0]])
        else:
            label = eq.outs[0][int(self.group.option("dim"))]
        if label not in eq.outs[0]:
            raise NotFusable(f"{n.op.name} needs the full chunked dim")
        self.where[n] = eq.outs[0].index(label)
        for k, a in enumerate(n.args):
            if not a.op.is_number and label in eq.ins[k]:
                self.where.setdefault(a, eq.ins[k].index(label))

    def _moving_axes(self) -> set[str]:
        """Axes along which the group scatters or gathers the chunked dim itself."""
        found = set()
        for n in self.group.nodes:
            if n.op.kind is Kind.COMM:
                axis = n.attr("axis")
                for layout in (*(a.type.layout for a in n.args), *(t.layout for t in n.types)):
                    place = layout.placement(axis)
                    if isinstance(place, S) and place.dim == self.where[n]:
                        found.add(axis)
        return found

    def _how(self, n: Node) -> tuple[int, int]:
        """Along which dim, and in how many slices side by side, `n` is chunked locally."""
        d = self.where[n]
        axes = {a for a in n.mesh.axes if isinstance(n.types[0].on(a), S) and n.types[0].on(a).dim == d}  # type: ignore[attr-defined]
        return d, math.prod(n.mesh.size(a) for a in self.moving - axes)

    def _type(self, n: Node) -> Type:
        """The type of one chunk: the dim shorter, laid out as before."""
        d, t = self.where[n], n.types[0]
        axes = [a for a in t.mesh.axes if isinstance(t.on(a), S) and t.on(a).dim == d]  # type: ignore[attr-defined]
        each = math.prod(t.mesh.size(a) for a in {*axes, *self.moving}) * self.chunks
        if t.shape[d] % each or len(t.layout.dims[d]) > 1:
            raise NotFusable(f"dim {d} of {list(t.shape)} cannot be split into {self.chunks} even chunks on every rank")
        shape = tuple(s // self.chunks if k == d else s for k, s in enumerate(t.shape))
        layout = Layout.of(t.mesh, shape, {a: t.on(a) for a in t.mesh.axes})
        return Type(t.dtype, layout)

    def _remake(self, n: Node) -> Node:
        attrs = dict(n.attrs)
        if n.op in (reshape_op, expand_op):
            d = self.where[n]
            attrs["shape"] = tuple(s // self.chunks if k == d else s for k, s in enumerate(attrs["shape"]))
        return make(n.op, tuple(self.small.get(a, a) for a in n.args), attrs)


def _name(x: Node, inputs: Sequence[Node]) -> str:
    return str(x.attr("name") or f"x{list(inputs).index(x)}")


# -- the order of steps ----------------------------------------------------------------------------------------------


def in_blocks(nodes: Sequence[Node], blocks: Sequence[Any]) -> list[Any]:
    """The nodes in order, each block (or form) in one place: after all it reads, before all that reads it."""
    home: dict[Node, Any] = {n: b for b in blocks for n in b.nodes}
    units: dict[Any, None] = dict.fromkeys(home.get(n, n) for n in nodes)
    done: dict[Any, None] = {}

    def place(unit: Any) -> None:
        stack = [(unit, False)]
        while stack:
            u, ready = stack.pop()
            if ready:
                done.setdefault(u, None)
            elif u not in done:
                stack.append((u, True))
                args = u.args if isinstance(u, Node) else u.inputs
                stack.extend((home.get(a, a), False) for a in reversed(args) if home.get(a, a) in units)

    for unit in units:
        place(unit)
    return list(done)
