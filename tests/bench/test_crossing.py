"""Tensors between meshes: every host gets all it needs, each part once, and the busiest link is as light as can be."""

from __future__ import annotations

import itertools
import math

import pytest

from bench._crossing import Crossing, crossing, naive
from weft.core.layout import Layout, Mesh, S

TWO, THREE = Mesh(x=2, y=2), Mesh(x=3, y=2)
SHAPE = (12, 6)
HELD = [{}, {"x": S(0)}, {"y": S(0)}, {"x": S(1)}, {"x": S(0), "y": S(0)}, {"x": S(1), "y": S(0)}]


def arrives(found: Crossing, target: Layout) -> None:
    """Follow the messages: a host has nothing before it is sent, and at the end what its ranks hold, each element once."""
    got: dict[int, list[tuple[int, ...]]] = {h: [] for h in range(target.mesh.size("x"))}
    for m in found.messages:
        assert m.sender in m.cell.have and sorted(m.through) == list(m.cell.need)
        elements = list(itertools.product(*m.cell.dims))[m.first : m.last]
        for host in m.through:
            got[host] += elements
    for host, elements in got.items():
        ranks = [c for c in target.mesh.places() if c["x"] == host]
        want = {e for c in ranks for e in itertools.product(*(target.positions(d, c).tolist() for d in range(target.rank)))}
        assert len(elements) == len(set(elements)) and set(elements) == want


@pytest.mark.parametrize("mesh", [TWO, THREE], ids=["2x2", "3x2"])
@pytest.mark.parametrize(("a", "b"), list(itertools.product(range(len(HELD)), repeat=2)))
def test_all_of_it_arrives_over_the_lightest_links(a: int, b: int, mesh: Mesh) -> None:
    source, target = Layout.of(TWO, SHAPE, HELD[a]), Layout.of(mesh, SHAPE, HELD[b])
    found = crossing(source, target, "x", 4)
    arrives(found, target)
    needed = max(found.received.values())
    assert found.busiest == max(needed, math.prod(SHAPE) * 4 // 2)  # both hosts of the source send, each its half
    assert found.busiest <= naive(source, target, 4)


def test_one_host_takes_what_two_send() -> None:
    source = Layout.of(Mesh(x=2, y=2), (12,), {"x": S(0), "y": S(0)})
    whole = Layout.of(Mesh(x=1, y=1), (12,))
    found = crossing(source, whole, "x", 1)
    assert found.sent["source", 0] == found.sent["source", 1] == 6 and found.received == {("target", 0): 12}
