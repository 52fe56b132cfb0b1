"""Routes are the ones programs take, and prices are of their bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from bench._alpha_beta import AlphaBeta
from weft.cluster.spec import cluster
from weft.core.errors import LayoutError, TypeMismatch
from weft.core.layout import Layout, Mesh, P, R, S
from weft.core.node import Node, Type
from weft.ops.comm import is_comm, reshard
from weft.ops.registry import nbytes
from weft.ops.source import input_node
from weft.plan.layouts import OnCluster, Reshard
from weft.plan.layouts.moves import Placements, of, route

PLACES = (R, S(0), S(1), S(2), P())
SHAPE = (8, 16, 4)


def layouts(mesh: Mesh) -> list[Layout]:
    found = []
    for places in itertools.product(PLACES, repeat=len(mesh.axes)):
        try:
            found.append(Layout.of(mesh, SHAPE, dict(zip(mesh.axes, places, strict=True))))
        except LayoutError:
            continue
    return [layout for layout in found if layout.is_even]


def taken(node: Node) -> list[Reshard]:
    """The collectives of a resharded input, first to last."""
    moves = []
    while is_comm(node):
        source, axis = node.args[0], node.attr("axis")
        size = {"all_gather": nbytes(node.type)}.get(node.op.name, nbytes(source.type))
        moves.insert(0, Reshard(node.op.name, axis, float(size)))
        node = source
    return moves


@pytest.mark.parametrize("mesh", [Mesh(a=2), Mesh(a=2, b=2), Mesh(a=2, b=4), Mesh(a=2, b=2, c=2)], ids=str)
def test_routes_are_those_of_reshard(mesh: Mesh) -> None:
    size = 8 * 16 * 4 * 4.0
    known = layouts(mesh)
    pairs = list(itertools.product(known, known))
    for source, target in pairs[:: max(1, len(pairs) // 1500)]:
        x = input_node("x", Type(torch.float32, source))
        moves = route(mesh, of(source), of(target), size)
        try:
            made = reshard(x, target)
        except (TypeMismatch, LayoutError):
            assert moves is None, (str(source), str(target))
            continue
        assert moves == taken(made), (str(source), str(target))


def places(**by_axis: object) -> Placements:
    return tuple(by_axis.get(axis, R) for axis in ("x", "y"))  # type: ignore[misc]


def test_prices_as_published() -> None:
    """A tensor of 128 x 128 floats on a mesh of 2 x 3, with alpha and beta of 1."""
    mesh = Mesh(x=2, y=3)
    prices = AlphaBeta(mesh, {"x": 1, "y": 1}, {"x": 1, "y": 1})

    def price(source: Placements, target: Placements) -> float:
        moves = route(mesh, source, target, 65536.0)
        assert moves is not None
        return sum(map(prices.move, moves))

    assert price(places(x=S(0)), places(x=S(0), y=S(1))) == 0
    assert price(places(x=S(0)), places()) == pytest.approx(32769.1)
    assert price(places(y=S(1)), places()) == pytest.approx(43691.767, abs=1e-3)


def test_nothing_turns_whole_into_pending() -> None:
    assert route(Mesh(x=2), (R,), (P(),), 64.0) is None


def test_inner_axes_are_faster_on_a_cluster() -> None:
    prices = OnCluster(cluster("2x8xA100"), Mesh(dp=2, tp=8))
    inner, outer = (prices.move(Reshard("all_gather", axis, 1e8)) for axis in ("tp", "dp"))
    assert 0 < inner < outer
    assert prices.move(Reshard("slice", "dp", 1e8)) < 1e-6
