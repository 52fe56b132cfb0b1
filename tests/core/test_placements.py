"""What a layout says of each axis is enough to make it again."""

from __future__ import annotations

import pytest

from weft.core.errors import LayoutError
from weft.core.layout import Layout, Mesh, P, S
from weft.core.node import Type, dtype_of
from weft.ops.comm import reshard
from weft.ops.source import input_node
from weft.testing.layouts import layouts

MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=3), Mesh(a=3, b=2))
CASES = [(mesh, shape) for mesh in MESHES for shape in ((6,), (5,), (1,), (12,), (6, 2), (9,))]


@pytest.mark.parametrize(("mesh", "shape"), CASES, ids=str)
def test_a_layout_follows_from_its_placements(mesh: Mesh, shape: tuple[int, ...]) -> None:
    for layout in layouts(mesh, shape, partials=False):
        assert Layout.of(mesh, shape, layout.placements) == layout, layout


def test_rows_that_stay_whole_are_told_apart_from_elements() -> None:
    """3 rows of 2 over 2 ranks, flattened, is not 6 elements over 2 ranks."""
    mesh = Mesh(a=2)
    rows = Layout.of(mesh, (3, 2), {"a": S(0)}).reshape((6,))
    assert rows.placement("a") == S(0, (6, 3))
    assert rows != Layout.of(mesh, (6,), {"a": S(0)})
    assert [rows.local_shape(at) for at in mesh.places()] == [(4,), (2,)]


@pytest.mark.parametrize(("mesh", "shape"), [(Mesh(a=2, b=2), (4, 3)), (Mesh(a=2, b=3), (6,)), (Mesh(a=3, b=2), (5, 2))], ids=str)
def test_reshard_reaches_the_layout_asked_for(mesh: Mesh, shape: tuple[int, ...]) -> None:
    every = layouts(mesh, shape, partials=False)
    for here in every:
        x = input_node("x", Type(dtype_of("f64"), here))
        assert all(reshard(x, there).layout == there for there in every), here


def test_a_reshape_does_not_run_through_a_cut() -> None:
    """4 over 4 ranks as 2 x 2 would cut both dims by one axis."""
    with pytest.raises(LayoutError, match="runs through an atom of 4 sharded by a"):
        Layout.of(Mesh(a=4), (4,), {"a": S(0)}).reshape((2, 2))


def test_an_uneven_inner_cut_is_gathered_first() -> None:
    """5 over 2 ranks is 3 and 2; over 2 more, 2, 1 and 1, 1. Without the outer cut the inner one would be 3 and 2 again."""
    layout = Layout.of(Mesh(a=2, b=2), (5,), {"a": S(0), "b": S(0)})
    with pytest.raises(LayoutError, match="axis a cannot be gathered under axis b"):
        layout.gather("a")
    assert layout.gather("b").gather("a") == Layout.of(Mesh(a=2, b=2), (5,))


def test_a_sum_and_a_maximum_do_not_mix() -> None:
    with pytest.raises(LayoutError, match="their order would matter"):
        Layout.of(Mesh(a=2, b=2), (4,), {"a": P("sum"), "b": P("max")})
