"""Layouts against a brute-force map from every index to the set of places that hold it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import LayoutError
from weft.core.layout import Atom, Dim, Layout, Mesh, O, P, R, S, canonical, chunk, dim_size, finest
from weft.testing.layouts import factorizations, layouts

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2), Mesh(a=3, b=2), Mesh(a=2, b=3), Mesh(a=2, b=1, c=2)]
Holders = dict[int, frozenset[tuple[int, ...]]]


def torch_pieces(indices: list[int], atom: Atom, mesh: Mesh, at: dict[str, int]) -> list[int]:
    """What a place holds of an atom, cut again and again by torch.chunk itself."""
    held = torch.tensor(indices)
    for axis in atom.axes:
        pieces = torch.chunk(held, mesh.sizes[axis])
        held = pieces[at[axis]] if at[axis] < len(pieces) else held[:0]
    return held.tolist()


def held_by(dim: Dim, mesh: Mesh, at: dict[str, int]) -> list[int]:
    """The indices of the dim a place holds, straight from the definition."""
    out = [0]
    for atom in dim:
        out = [i * atom.size + j for i in out for j in torch_pieces(list(range(atom.size)), atom, mesh, at)]
    return out


def holders(dim: Dim, mesh: Mesh) -> Holders:
    who: dict[int, set[tuple[int, ...]]] = {i: set() for i in range(dim_size(dim))}
    for at in mesh.places():
        for i in held_by(dim, mesh, at):
            who[i].add(tuple(at.values()))
    return {i: frozenset(w) for i, w in who.items()}


@st.composite
def dims(draw: st.DrawFn, mesh: Mesh) -> Dim:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 72))
    cuts: list[list[str]] = [[] for _ in sizes]
    for axis in mesh.axes:
        k = draw(st.integers(-1, len(sizes) - 1))
        if k >= 0:
            cuts[k].append(axis)
    return tuple(Atom(n, tuple(c)) for n, c in zip(sizes, cuts, strict=True))


mesh_and_dim = st.sampled_from(MESHES).flatmap(lambda mesh: st.tuples(st.just(mesh), dims(mesh)))
mesh_and_layout = st.sampled_from(MESHES[:5]).flatmap(
    lambda mesh: st.sampled_from([(4,), (6, 2), (2, 3, 2), (1, 4), (5,), ()]).flatmap(
        lambda shape: st.tuples(st.just(mesh), st.sampled_from(layouts(mesh, shape)))
    )
)


def unless(ask: Callable[[], Layout], *refusals: str) -> Layout | None:
    """The layout asked for, or None where it is refused for one of the reasons given."""
    try:
        return ask()
    except LayoutError as e:
        if not any(text in str(e) for text in refusals):
            raise
        return None


@given(mesh_and_dim)
def test_a_canonical_dim_gives_every_index_to_the_same_ranks(case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    assert holders(canonical(dim, mesh), mesh) == holders(dim, mesh)
    assert canonical(canonical(dim, mesh), mesh) == canonical(dim, mesh)
    assert len(canonical(dim, mesh)) <= max(len(dim), 1)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8, 12])
def test_dims_that_hold_alike_are_written_alike(mesh: Mesh, size: int) -> None:
    """Every way to write a dim: two that give each index to the same ranks have one canonical form, and only they do."""
    written: dict[tuple[frozenset[str], tuple[tuple[int, frozenset[tuple[int, ...]]], ...]], set[Dim]] = {}
    factors = [(*f[:k], 1, *f[k:]) for f in factorizations(size) for k in range(len(f) + 1)]
    for f in [*factors, *factorizations(size)]:
        for at in itertools.product(range(-1, len(f)), repeat=len(mesh.axes)):
            cuts = [tuple(a for a, k in zip(mesh.axes, at, strict=True) if k == i) for i in range(len(f))]
            dim = tuple(map(Atom, f, cuts))
            used = frozenset(a for a, k in zip(mesh.axes, at, strict=True) if k >= 0)
            written.setdefault((used, tuple(holders(dim, mesh).items())), set()).add(canonical(dim, mesh))
    assert [forms for forms in written.values() if len(forms) > 1] == []
    assert len({d for forms in written.values() for d in forms}) == len(written)


def test_dims_once_written_in_two_ways() -> None:
    three = Mesh(a=3)
    assert canonical((Atom(2, ("a",)), Atom(2)), three) == (Atom(4, ("a",)),)
    assert canonical((Atom(4, ("a",)), Atom(3)), three) == canonical((Atom(2, ("a",)), Atom(6)), three)
    two = Mesh(a=2, b=2)
    assert canonical((Atom(1, ("a",)), Atom(4)), two) == canonical((Atom(4), Atom(1, ("a",))), two)
    assert canonical((Atom(6, ("a",)),), Mesh(a=1)) == (Atom(6, ("a",)),)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_is_torch_chunk(size: int, parts: int) -> None:
    pieces = list(torch.chunk(torch.arange(size), parts)) if size else []
    for i in range(parts):
        lo, hi = chunk(size, parts, i)
        assert list(range(lo, hi)) == (pieces[i].tolist() if i < len(pieces) else [])


@given(mesh_and_layout)
def test_positions_and_local_shape(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    for at in mesh.places():
        held = [held_by(dim, mesh, at) for dim in layout.dims]
        assert [layout.positions(d, at).tolist() for d in range(layout.rank)] == held
        assert layout.local_shape(at) == tuple(map(len, held))
        assert all(n <= m for n, m in zip(layout.local_shape(at), layout.largest_local, strict=True))
    sizes = {layout.local_shape(at) for at in mesh.places()}
    assert layout.is_even == (len(sizes) == 1 and 0 not in next(iter(sizes)))


@given(mesh_and_layout)
def test_uncut_holds_what_all_ranks_of_the_axis_held(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    for axis in mesh.axes:
        cut = layout.where_sharded(axis)
        whole = unless(lambda axis=axis: layout.gather(axis), "cannot be gathered under")
        if whole is None:
            continue
        assert whole.placement(axis) == (R if cut is not None else layout.placement(axis))
        for at in mesh.places() if cut is not None else ():
            group = [held_by(layout.dims[cut[0]], mesh, {**at, axis: i}) for i in range(mesh.sizes[axis])]
            assert held_by(whole.dims[cut[0]], mesh, at) == sorted(i for held in group for i in held)


@given(mesh_and_layout, st.data())
def test_cut_parts_what_a_rank_holds(case: tuple[Mesh, Layout], data: st.DataObject) -> None:
    """A cut gives each rank of the axis a part of what all of them held, and the parts together are the whole."""
    mesh, layout = case
    free = [a for a in mesh.axes if layout.placement(a) == R]
    if not free or not layout.rank:
        return
    axis, d = data.draw(st.sampled_from(free)), data.draw(st.integers(0, layout.rank - 1))
    within = data.draw(st.sampled_from([None, *(n for n in range(1, layout.shape[d] + 1) if layout.shape[d] % n == 0)]))
    cut = unless(lambda: layout.shard(axis, d, within), "already cuts it", "has no inner part")
    if cut is None:
        return
    for at in mesh.places():
        parts = [held_by(cut.dims[d], mesh, {**at, axis: i}) for i in range(mesh.sizes[axis])]
        assert sorted(i for p in parts for i in p) == held_by(layout.dims[d], mesh, at)
    assert isinstance(cut.placement(axis), S)
    assert cut.gather(axis) == layout


def test_cut_within_is_the_chunk_of_every_inner_block() -> None:
    mesh = Mesh(a=2)
    layout = Layout.of(mesh, (12,), {"a": S(0, within=4)})
    assert layout.positions(0, {"a": 1}).tolist() == [2, 3, 6, 7, 10, 11]
    assert layout.placements == {"a": S(0, within=4)}


def flat_held(layout: Layout, at: dict[str, int]) -> list[int]:
    """Row-major indices of what a place holds."""
    strides = [math.prod(layout.shape[d + 1 :]) for d in range(layout.rank)]
    held = [[i * s for i in held_by(dim, layout.mesh, at)] for dim, s in zip(layout.dims, strides, strict=True)]
    return [sum(x) for x in itertools.product(*held)]


@given(mesh_and_layout, st.data())
def test_reshape_moves_nothing(case: tuple[Mesh, Layout], data: st.DataObject) -> None:
    mesh, layout = case
    shapes = list(factorizations(math.prod(layout.shape)))
    shape = data.draw(st.sampled_from([*shapes, *((*s[:1], 1, *s[1:]) for s in shapes)]))
    new = unless(lambda: layout.reshape(shape), "runs through")
    if new is None:
        assert not _some_reshape(layout, shape)
        return
    assert new.shape == shape
    assert new.partials == layout.partials
    for at in mesh.places():
        assert flat_held(new, at) == flat_held(layout, at)


def _some_reshape(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether any layout of the new shape has every rank hold the same elements by the same axes."""
    mesh = layout.mesh
    cut = {a for a in mesh.axes if layout.where_sharded(a) is not None}
    same = (
        new
        for new in layouts(mesh, shape, partials=False)
        if {a for a in mesh.axes if new.where_sharded(a) is not None} == cut
        and all(flat_held(new, at) == flat_held(layout, at) for at in mesh.places())
    )
    return next(same, None) is not None


def test_reshape_of_uncut_dims_needs_no_common_factor() -> None:
    assert Layout.of(Mesh(a=2), (4, 3)).reshape((6, 2)).shape == (6, 2)


@given(mesh_and_layout, st.data())
def test_permute(case: tuple[Mesh, Layout], data: st.DataObject) -> None:
    mesh, layout = case
    order = tuple(data.draw(st.permutations(range(layout.rank))))
    new = layout.permute(order)
    for at in mesh.places():
        assert new.local_shape(at) == tuple(layout.local_shape(at)[i] for i in order)


@given(mesh_and_layout)
def test_smallest_atoms_multiply_to_the_dim(case: tuple[Mesh, Layout]) -> None:
    for dim in case[1].dims:
        atoms, lone = finest(dim, case[0])
        assert dim_size(atoms) == dim_size(dim)
        assert holders((*atoms, Atom(1, lone)), case[0]) == holders(dim, case[0])


def test_enumeration_is_complete_for_one_axis() -> None:
    found = {str(x) for x in layouts(Mesh(a=2), (4, 3))}
    assert found == {
        "[4, 3] a:R", "[4, 3] a:P", "[4, 3] a:P(max)", "[4, 3] a:P(min)", "[4, 3] a:O(0)", "[4, 3] a:O(1)",
        "[4, 3] a:S(0)", "[2*2, 3] a:S(0.1)", "[4, 3] a:S(1)",
    }  # fmt: skip
    assert {str(x) for x in layouts(Mesh(a=2, b=2), (4,), partials=False)} >= {"[4] a:S(0) b:S(0)", "[2*2] a:S(0.1) b:S(0.0)"}


# -- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Mesh(a=0), r"mesh axis 'a' has no size\n\n  needed  an integer, 1 or more\n  found   0"),
        (lambda: Mesh(a=2).size("b"), r"the mesh has no axis 'b'\n\n  needed  one of a\n  found   'b'"),
        (lambda: Layout.of(Mesh(a=2), (4,), {"b": R}), "the mesh has no axis 'b'"),
        (lambda: Layout.of(Mesh(a=2), (4,), {"a": S(1)}), r"S\(1\) on a tensor of 1 dims\n\n  needed  a dim from 0 to 0"),
        (lambda: Layout.of(Mesh(a=2), (6,), {"a": S(0, within=4)}), "dim 0 of size 6 has no inner part of 4"),
        (lambda: P("mean"), r"a Partial has no such reduction\n\n  needed  sum or max or min\n  found   'mean'"),
        (lambda: Layout.of(Mesh(a=2), (4,), {"a": O(2)}), r"axis a has no rank 2\n\n  needed  a root from 0 to 1\n  found   O\(2\)"),
        (lambda: Layout.of(Mesh(a=2, b=2), (4,), {"a": P(), "b": P("max")}), "one kind of partial reduction per value"),
        (lambda: Layout.of(Mesh(a=2, b=2), (4,), {"b": S(0)}).shard("a", 0), "already shards it and comes later in the mesh"),
        (lambda: Layout.of(Mesh(a=2, b=2), (3,), {"a": S(0), "b": S(0)}).gather("a"), r"try     gather b first"),
        (lambda: Layout.of(Mesh(a=2), (4,)).reshape((3,)), r"cannot reshape \[4\] to \[3\]\n\n  needed  the same number of elements"),
        (lambda: Layout.of(Mesh(a=4), (8, 3), {"a": S(0)}).reshape((2, 12)), r"runs through an atom of 4 sharded by a"),
        (lambda: Layout.of(Mesh(a=2), (0, 4), {"a": S(1)}).reshape((4, 0)), "cannot reshape an empty tensor that is sharded"),
    ],
)
def test_refusals(wrong: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        wrong()  # type: ignore[operator]


def test_mesh_places_and_groups() -> None:
    mesh = Mesh(dp=2, tp=3)
    assert [mesh.rank(mesh.coords(r)) for r in range(mesh.ranks)] == list(range(6))
    assert mesh.coords(4) == {"dp": 1, "tp": 1}
    assert mesh.groups("tp") == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups("dp") == [[0, 3], [1, 4], [2, 5]]
    assert mesh == Mesh(dp=2, tp=3)
    assert mesh != Mesh(tp=3, dp=2)
    assert repr(mesh) == "Mesh(dp=2, tp=3)"
