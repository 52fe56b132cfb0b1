"""Layouts as DTensor placements: the shards of real DTensors on every rank are what weft says a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.dtensors import device_mesh, from_placements
from weft.core.dtensor import to_placements
from weft.core.errors import LayoutError
from weft.core.layout import Layout, Mesh, O, P, S
from weft.interp import take_local
from weft.testing.layouts import layouts

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2), Mesh(a=3, b=2), Mesh(a=2, b=3), Mesh(a=2, b=2, c=2)]
SHAPES = [(4,), (5,), (6,), (8, 3), (12,), (1, 4)]


@contextmanager
def as_rank(rank: int, mesh: Mesh) -> Iterator[Any]:
    """The device mesh as one rank of it sees it, with no other process."""
    dist.init_process_group("fake", rank=rank, world_size=mesh.ranks, store=FakeStore())
    try:
        yield device_mesh(mesh)
    finally:
        dist.destroy_process_group()


def said(mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[Layout, tuple[Any, ...]]]:
    out = []
    for layout in layouts(mesh, shape, partials=False):
        try:
            out.append((layout, to_placements(layout)))
        except LayoutError:
            continue
    return out


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_real_shards_are_what_weft_says(mesh: Mesh, shape: tuple[int, ...]) -> None:
    x = torch.arange(math.prod(shape)).reshape(shape)
    cases = said(mesh, shape)
    assert cases
    for rank in range(mesh.ranks):
        with as_rank(rank, mesh) as devices:
            for layout, placements in cases:
                shard = distribute_tensor(x, devices, placements, src_data_rank=None).to_local()
                assert torch.equal(shard, take_local(x, layout, mesh.coords(rank))), (str(layout), placements)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(mesh: Mesh, shape: tuple[int, ...]) -> None:
    for layout, placements in said(mesh, shape):
        assert from_placements(mesh, shape, placements) == layout


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", [4, 5, 6, 8, 12])
def test_what_dtensor_says_weft_says_or_refuses(mesh: Mesh, size: int) -> None:
    """Every list of placements of one dim: a layout weft gives for it holds what the real shards hold."""
    one = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (2, 3, 4))]
    given = [()]
    for _ in mesh.axes:
        given = [(*g, p) for g in given for p in one]
    taken = []
    for placements in given:
        try:
            taken.append((placements, from_placements(mesh, (size,), placements)))
        except LayoutError:
            continue
    assert {p for p, _ in taken} >= {p for p in given if all(type(x) is not _StridedShard for x in p)}
    x = torch.arange(size)
    for rank in range(mesh.ranks):
        with as_rank(rank, mesh) as devices:
            for placements, layout in taken:
                shard = distribute_tensor(x, devices, placements, src_data_rank=None).to_local()
                assert torch.equal(shard, take_local(x, layout, mesh.coords(rank))), (str(layout), placements)


def test_even_layouts_are_always_said() -> None:
    for mesh in MESHES:
        for layout in layouts(mesh, (12, 2), partials=False):
            if layout.is_even:
                assert from_placements(mesh, (12, 2), to_placements(layout)) == layout


def test_pending_values() -> None:
    layout = Layout.of(Mesh(a=2, b=2), (4,), {"a": P("max"), "b": S(0)})
    assert to_placements(layout) == (Partial("max"), Shard(0))
    assert from_placements(layout.mesh, (4,), (Partial("max"), Shard(-1))) == layout


def test_the_order_of_nested_cuts() -> None:
    """tp outside dp in one dim, as FSDP over tensor parallelism holds it."""
    layout = Layout.of(Mesh(dp=2, tp=2), (8,), {"dp": S(0, within=4), "tp": S(0)})
    assert to_placements(layout) == (_StridedShard(0, split_factor=2), Shard(0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: to_placements(Layout.of(Mesh(a=2), (4,), {"a": O(1)})), r"DTensor cannot say a:O\(1\)\n\n.*\n.*\n  try     broadcast it"),
        (lambda: to_placements(Layout.of(Mesh(a=2), (6,), {"a": S(0, within=3)})), r"  found   \[2\*3\] a:S\(0.1\)\n  try     gather it"),
        (lambda: from_placements(Mesh(a=2), (4,), (Partial("avg"),)), "a Partial has no such reduction"),
        (lambda: from_placements(Mesh(a=2), (4,), ()), r"not one placement per axis\n\n  needed  1 for Mesh\(a=2\)\n  found   0"),
        (lambda: from_placements(Mesh(a=2), (6,), (_StridedShard(0, split_factor=4),)), "has no 4 blocks to shard along a"),
        (
            lambda: from_placements(Mesh(a=2, b=2), (12,), (_StridedShard(0, split_factor=3), Shard(0))),
            "weft cannot say these placements",
        ),
        (lambda: from_placements(Mesh(a=2), (4,), (_OtherPartial(),)), r"weft has no placement like .*\n\n  needed  Shard, _StridedShard"),
    ],
)  # fmt: skip
def test_refusals(wrong: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        wrong()


class _OtherPartial(Partial):
    """As DTensor's own masked and norm partials: pending in a way of its own."""
