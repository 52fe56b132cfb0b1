"""What is enumerated: worlds of typed inputs and ops. A world is small, so that all its expressions up to a size can be run.

Inputs of one layout come in pairs where a law may need two. Attributes are filled from what they mean: an axis, a dim, a root.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.core.layout import Layout, Mesh, P, Placement, S
from weft.core.node import Node, Type
from weft.ops.source import input_node
from weft.rewrite.prove.forms import form
from weft.rewrite.schema import Form

ONE_AXIS = ("m",)


@dataclass(frozen=True)
class Leaf:
    """An input: its name, shape and layout; leaves of one kind are interchangeable."""

    name: str
    shape: tuple[int, ...]
    places: tuple[tuple[str, Placement], ...] = ()
    dtype: torch.dtype = torch.float64

    @property
    def kind(self) -> tuple[object, ...]:
        return self.shape, self.places, self.dtype

    def node(self, mesh: Mesh) -> Node:
        return input_node(self.name, Type(self.dtype, Layout.of(mesh, self.shape, dict(self.places))))


@dataclass(frozen=True)
class World:
    """Inputs, ops, and the meshes on which every expression is run."""

    name: str
    meshes: tuple[Mesh, ...]
    leaves: tuple[Leaf, ...]
    forms: tuple[Form, ...]
    moves: bool = True  # the largest expressions must communicate; those that do not are another world's


def communication(axes: Sequence[str], dims: int) -> list[Form]:
    """Every collective, along every axis and dim."""
    out = []
    for axis in axes:
        out += [form(op, 1, {"axis": axis}) for op in ("all_reduce", "all_gather", "broadcast")]
        out += [form(op, 1, {"axis": axis, "dim": d}) for op in ("reduce_scatter", "slice", "all_to_all") for d in range(dims)]
        out += [form("reduce", 1, {"axis": axis, "root": 0})]
    return out


def _of(shape: tuple[int, ...], **kinds: Placement | None) -> list[Leaf]:
    """Leaves of one shape; a name of two letters makes two of a kind."""
    return [Leaf(x, shape, (("m", p),) if p is not None else ()) for names, p in kinds.items() for x in names]


def _forms(*given: tuple[str, int, dict[str, object]] | str) -> list[Form]:
    return [form(g) if isinstance(g, str) else form(*g) for g in given]


def worlds(extra: Sequence[Form] = ()) -> list[World]:
    """The usual worlds; `extra` ops join those their arity and shapes allow, so a new op brings its own rules."""
    square, alone, two, three = (4, 4), Mesh(), Mesh(m=2), Mesh(m=3)
    unary = _forms("neg", "relu", ("permute", 1, {"order": (1, 0)}), ("softmax", 1, {"dim": 1}), ("sum", 1, {"dims": (0,)}))
    scale = form("mul", 1, {}, (2.0,))
    binary = _forms(("add", 2, {}), ("mul", 2, {}), ("matmul", 2, {}))
    blocks = _forms(("concat", 2, {"dim": 0}), ("concat", 2, {"dim": 1}))
    algebra = World("algebra", (alone,), tuple(_of(square, xyz=None)), (*unary, scale, *binary, *blocks, *extra), moves=False)
    moves = World(
        "moves",
        (two, three),
        tuple(_of(square, x=None, uv=S(0), s=S(1), pq=P())),
        (*unary, *binary, blocks[0], *communication(ONE_AXIS, 2), *extra),
    )
    table = [*_of((4, 4), t=S(0), u=S(1), w=None), Leaf("i", (3,), (), torch.int64), Leaf("j", (4,), (("m", S(0)),), torch.int64)]
    lookup = World(
        "lookup", (two, three), tuple(table), (form("take", 2, {"dim": 0}), form("neg"), form("relu"), *communication(ONE_AXIS, 2))
    )
    cubes = [*_of((4, 4, 2), x=None, u=S(0), v=S(1)), *_of((4, 2, 2), w=S(0), y=None)]
    experts = World("experts", (two, three), tuple(cubes), (form("matmul", 2), form("relu"), *communication(ONE_AXIS, 3)))
    return [algebra, moves, lookup, experts, _two_axes()]


def _two_axes() -> World:
    """Collectives along different axes, and what passes between them."""
    mesh = Mesh(m=2, n=2)
    kinds: dict[str, tuple[tuple[str, Placement], ...]] = {
        "x": (), "p": (("m", P()), ("n", P())), "u": (("m", S(0)), ("n", S(1))), "v": (("m", S(1)), ("n", P())),
    }  # fmt: skip
    leaves = tuple(Leaf(name, (4, 4), places) for name, places in kinds.items())
    return World("axes", (mesh,), leaves, (*communication(("m", "n"), 2), form("neg")))


def op_names(given: Sequence[World]) -> list[str]:
    return sorted(set(itertools.chain.from_iterable((f.op.name for f in w.forms) for w in given)))
