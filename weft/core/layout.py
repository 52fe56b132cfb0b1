"""How the ranks of a mesh hold one global tensor.

A dim is an ordered product of atoms; an atom is sharded by zero or more mesh axes, nested in mesh order, by torch.chunk's rule.
An axis that shards no atom holds the full value (R), a term of it (P) or holds it at one rank only (O).
Dims are kept canonical, so two dims that give every index to the same ranks are written the same and compare equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch

from weft.core.errors import LayoutError
from weft.core.mesh import REDUCTIONS, Mesh, O, P, Placement, R, Replicated, S, Within


@dataclass(frozen=True, slots=True)
class Atom:
    """One factor of a dim, and the axes that shard it, outermost first."""

    size: int
    axes: tuple[str, ...] = ()


Dim: TypeAlias = tuple[Atom, ...]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one chunk, by torch.chunk's rule; late chunks may be short or empty."""
    step = -(-size // parts) if size else 0
    start = min(index * step, size)
    return start, min(start + step, size)


def canonical(dim: Dim, mesh: Mesh) -> Dim:
    """The shortest list of atoms that gives each index of the dim to the same ranks; equal for all dims that do."""
    return _canonical(tuple(dim), mesh)


@lru_cache(maxsize=65536)
def _canonical(dim: Dim, mesh: Mesh) -> Dim:
    if len(dim) == 1 and not dim[0].axes:
        return dim
    atoms, lone = finest(dim, mesh)
    out: list[Atom] = []
    for atom in atoms:
        out.append(atom)
        while len(out) > 1 and (joined := _join(out[-2], out[-1], mesh)) is not None:
            out[-2:] = [joined]
    for axis in lone:
        out = _attach(out, axis, mesh)
    return tuple(out) or (Atom(1),)


def _join(left: Atom, right: Atom, mesh: Mesh) -> Atom | None:
    """One atom that gives each index to the same ranks as the two side by side, if there is one."""
    joined = Atom(left.size * right.size, left.axes + right.axes)
    in_order = list(joined.axes) == _in_order(joined.axes, mesh)
    return joined if in_order and finest((joined,), mesh) == finest((left, right), mesh) else None


def _attach(atoms: list[Atom], axis: str, mesh: Mesh) -> list[Atom]:
    """The dim with an axis that shards single elements only: on the first atom where that is what it does, else on one of size 1."""
    want = finest((*atoms, Atom(1, (axis,))), mesh)
    for k, atom in enumerate(atoms):
        new = [*atoms[:k], Atom(atom.size, tuple(_in_order((*atom.axes, axis), mesh))), *atoms[k + 1 :]]
        if finest(tuple(new), mesh) == want:
            return new
    return [*atoms, Atom(1, (axis,))]


def _in_order(axes: Iterable[str], mesh: Mesh) -> list[str]:
    return sorted(axes, key=mesh.axes.index)


@lru_cache(maxsize=65536)
def finest(dim: Dim, mesh: Mesh) -> tuple[Dim, tuple[str, ...]]:
    """The dim as its smallest atoms, and the axes that shard single elements only.

    Dims that give each index to the same ranks have the same smallest atoms. Of a lone axis only the first rank holds anything.
    """
    axes = _in_order((axis for atom in dim for axis in atom.axes), mesh)
    if dim_size(dim) == 0:
        return (Atom(0),), tuple(axes)
    out: list[Atom] = []
    for atom in itertools.chain.from_iterable(_smallest(atom, mesh) for atom in dim):
        if out and not atom.axes and not out[-1].axes:
            out[-1] = Atom(out[-1].size * atom.size)
        elif atom.size > 1:
            out.append(atom)
    kept = {axis for atom in out for axis in atom.axes}
    return tuple(out), tuple(axis for axis in axes if axis not in kept)


def _smallest(atom: Atom, mesh: Mesh) -> Iterator[Atom]:
    """The atom as smaller ones; axes that shard single elements only are left out."""
    axes = _sharding_axes(atom, mesh)
    if not axes:
        yield Atom(atom.size)
        return
    step = -(-atom.size // mesh.sizes[axes[0]])
    if len(axes) > 1 and atom.size % step == 0:
        yield Atom(atom.size // step, axes[:1])
        yield from _smallest(Atom(step, axes[1:]), mesh)
        return
    same = _common_block(Atom(atom.size, axes), mesh)
    yield Atom(atom.size // same, axes)
    yield Atom(same)


def _sharding_axes(atom: Atom, mesh: Mesh) -> tuple[str, ...]:
    """The axes that shard a piece of more than one element into more than one."""
    left, axes = atom.size, []
    for axis in atom.axes:
        if left > 1 and mesh.sizes[axis] > 1:
            axes.append(axis)
            left = -(-left // mesh.sizes[axis])
    return tuple(axes)


def _common_block(atom: Atom, mesh: Mesh) -> int:
    """The largest run of indices that never parts."""
    places = itertools.product(*(range(mesh.sizes[a]) for a in atom.axes))
    coords = (tuple(zip(atom.axes, at, strict=True)) for at in places)
    return math.gcd(atom.size, *(n for at in coords for n in _atom_positions(atom, mesh, at)))


def dim_size(dim: Dim) -> int:
    return math.prod(a.size for a in dim)


@lru_cache(maxsize=65536)
def _atom_positions(atom: Atom, mesh: Mesh, coords: tuple[tuple[str, int], ...]) -> tuple[int, int]:
    place = dict(coords)
    start, stop = 0, atom.size
    for axis in atom.axes:
        lo, hi = chunk(stop - start, mesh.sizes[axis], place[axis])
        start, stop = start + lo, start + hi
    return start, stop


@dataclass(frozen=True)
class Layout:
    """A shape, and one placement per mesh axis over it."""

    mesh: Mesh
    dims: tuple[Dim, ...]
    partials: tuple[tuple[str, Placement], ...] = ()  # the axes that hold P or O, in mesh order

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.partials))

    @staticmethod
    def of(mesh: Mesh, shape: tuple[int, ...], placements: Mapping[str, Placement] | None = None) -> Layout:
        """The layout of `shape` with the placements given; every other axis holds the full value."""
        return _layout_of(mesh, tuple(shape), tuple(placements.items()) if placements else ())

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim_size(d) for d in self.dims)

    @property
    def rank(self) -> int:
        return len(self.dims)

    # -- one axis at a time ------------------------------------------------------------------------------------------

    def where_sharded(self, axis: str) -> tuple[int, int] | None:
        """The dim and the atom in it that the axis shards."""
        for d, dim in enumerate(self.dims):
            for k, atom in enumerate(dim):
                if axis in atom.axes:
                    return d, k
        return None

    def placement(self, axis: str) -> Placement:
        self.mesh.require(axis)
        for a, p in self.partials:
            if a == axis:
                return p
        at = self.where_sharded(axis)
        if at is None:
            return R
        return S(at[0], self._within(axis, *at))

    def _within(self, axis: str, d: int, k: int) -> Within:
        """What to say of a sharding besides its dim: as little as shards the same when the axis comes after those before it in the mesh."""
        atom, size = self.dims[d][k], dim_size(self.dims[d][k:])
        plain = None if k == 0 else size
        if k == len(self.dims[d]) - 1:
            return plain
        before = self.mesh.axes[: self.mesh.axes.index(axis)]
        head, *tail = (Atom(a.size, tuple(x for x in a.axes if x in before)) for a in self.dims[d][k:])
        lead, *rest = canonical((head, *tail), self.mesh)
        atoms = finest((Atom(lead.size, (*lead.axes, axis)), *rest), self.mesh)
        return plain if atoms == finest((Atom(atom.size, (*head.axes, axis)), *tail), self.mesh) else (size, atom.size)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        return {a: self.placement(a) for a in self.mesh.axes}

    def place(self, axis: str, placement: Placement) -> Layout:
        """The same layout with this axis, which must hold the full value, placed as given."""
        if not isinstance(placement, Placement):
            raise LayoutError(
                f"axis {axis} holds nothing known",
                needed="a placement: R, S(dim), P(), P('max'), P('min') or O(root)",
                found=getattr(placement, "__name__", repr(placement)),
                try_=f"{axis}={placement.__name__}(...)" if placement in (S, P, O) else None,
            )
        if isinstance(placement, Replicated):
            return self
        if isinstance(placement, S):
            return self.shard(axis, placement.dim, placement.within)
        return self.hold(axis, placement)

    def hold(self, axis: str, placement: Placement) -> Layout:
        """R on the axis becomes P or O."""
        size = self.mesh.size(axis)
        if isinstance(placement, O) and not 0 <= placement.root < size:
            raise LayoutError(f"axis {axis} has no rank {placement.root}", needed=f"a root from 0 to {size - 1}", found=str(placement))
        placements = {**dict(self.partials), axis: placement}
        kinds = {p.op for p in placements.values() if isinstance(p, P)}
        if len(kinds) > 1:
            raise LayoutError(
                "one value cannot be a sum over one axis and a max over another: their order would matter",
                needed="one kind of partial reduction per value",
                found=" and ".join(sorted(kinds)),
            )
        return Layout(self.mesh, self.dims, tuple((a, placements[a]) for a in self.mesh.axes if a in placements))

    def release(self, axis: str) -> Layout:
        """P or O on the axis becomes R."""
        return Layout(self.mesh, self.dims, tuple((a, p) for a, p in self.partials if a != axis))

    def shard(self, axis: str, dim: int, within: Within = None) -> Layout:
        """R on the axis becomes S: its leading atom is sharded, or the inner `within` indices of the dim, as `S` says."""
        self.mesh.require(axis)
        if not 0 <= dim < len(self.dims):
            dims = f"a dim from 0 to {len(self.dims) - 1}"
            raise LayoutError(f"S({dim}) on a tensor of {len(self.dims)} dims", needed=dims, found=str(dim))
        atoms, k = self._atom_to_shard(dim, within)
        atom = atoms[k]
        order = self.mesh.axes.index
        if any(order(a) >= order(axis) for a in atom.axes):
            raise LayoutError(
                f"axis {axis} cannot shard dim {dim}: axis {atom.axes[-1]} already shards it and comes later in the mesh",
                needed="nested shardings in mesh order, outermost first",
                found=f"dim {dim} sharded by {', '.join(atom.axes)}",
                try_=f"shard along {axis} before {atom.axes[-1]}, or order the mesh axes the other way",
            )
        new = (*atoms[:k], Atom(atom.size, (*atom.axes, axis)), *atoms[k + 1 :])
        return self.with_dim(dim, new)

    def _atom_to_shard(self, dim: int, within: Within) -> tuple[Dim, int]:
        atoms = self.dims[dim]
        if within is None:
            return atoms, 0
        size, pieces = within if isinstance(within, tuple) else (within, within)
        split = split_at(atoms, size, self.mesh)
        parts = split_at(split[1], size // pieces, self.mesh) if split is not None and pieces > 0 and size % pieces == 0 else None
        if split is None or parts is None:
            raise LayoutError(
                f"dim {dim} of size {dim_size(atoms)} has no inner part of {within}",
                needed="a size that divides the dim and does not straddle another sharding",
                found=f"{show_dim(atoms)}",
            )
        (outer, inner), (lead, tail) = split, parts
        new = canonical(inner, self.mesh) if pieces == size else (*canonical(lead, self.mesh), *tail)
        return (*outer, *new), len(outer)

    def with_dim(self, dim: int, atoms: Dim) -> Layout:
        return Layout(self.mesh, (*self.dims[:dim], canonical(atoms, self.mesh), *self.dims[dim + 1 :]), self.partials)

    def gather(self, axis: str) -> Layout:
        """S on the axis becomes R."""
        at = self.where_sharded(axis)
        if at is None:
            return self
        atoms, lone = finest(self.dims[at[0]], self.mesh)
        full = tuple(self._without(axis, atom) for atom in atoms)
        return self.with_dim(at[0], (*full, Atom(1, tuple(a for a in lone if a != axis))))

    def _without(self, axis: str, atom: Atom) -> Atom:
        if axis in atom.axes[:-1]:
            raise LayoutError(
                f"axis {axis} cannot be gathered under axis {atom.axes[-1]} of the same dim",
                needed="pieces of equal size",
                found=f"an atom of {atom.size} sharded by {', '.join(atom.axes)}",
                try_=f"gather {atom.axes[-1]} first",
            )
        return Atom(atom.size, tuple(a for a in atom.axes if a != axis))

    # -- what one rank holds -----------------------------------------------------------------------------------------

    def spans(self, dim: int, coords: Mapping[str, int]) -> list[tuple[int, int, int]]:
        """Per atom of the dim: its size, and start and stop of what the rank holds of it."""
        key = tuple(coords.items())
        return [(a.size, *_atom_positions(a, self.mesh, key)) for a in self.dims[dim]]

    def local_shape(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(hi - lo for _, lo, hi in self.spans(d, coords)) for d in range(self.rank))

    def positions(self, dim: int, coords: Mapping[str, int]) -> torch.Tensor:
        """The global indices along `dim` of what the rank holds, in order."""
        at = torch.zeros(1, dtype=torch.int64)
        for size, lo, hi in self.spans(dim, coords):
            at = (at[:, None] * size + torch.arange(lo, hi)).reshape(-1)
        return at

    def run(self, dim: int, coords: Mapping[str, int]) -> range | None:
        """The same where they follow each other without a gap, else None."""
        first, count = 0, 1
        for size, lo, hi in self.spans(dim, coords):
            if count > 1 and (lo, hi) != (0, size):
                return None
            first, count = first * size + lo, count * (hi - lo)
        return range(first, first + count)

    def present(self, coords: Mapping[str, int]) -> bool:
        """Whether the rank holds anything at all."""
        return all(coords[a] == p.root for a, p in self.partials if isinstance(p, O))

    @cached_property
    def largest_local(self) -> tuple[int, ...]:
        """The local shape of the rank that holds most: the first along every axis."""
        return self.local_shape(dict.fromkeys(self.mesh.axes, 0))

    @property
    def is_even(self) -> bool:
        return all(a.size % math.prod(self.mesh.sizes[x] for x in a.axes) == 0 for d in self.dims for a in d)

    # -- views -------------------------------------------------------------------------------------------------------

    def reshape(self, shape: tuple[int, ...]) -> Layout:
        """The layout after a reshape: atoms are regrouped, and split where a dim ends inside one."""
        if math.prod(shape) != math.prod(self.shape):
            raise LayoutError(
                f"cannot reshape {list(self.shape)} to {list(shape)}",
                needed="the same number of elements",
                found=f"{math.prod(self.shape)} and {math.prod(shape)}",
            )
        if 0 in shape:
            return self._reshape_empty(shape)
        left = list(finest(tuple(itertools.chain.from_iterable(self.dims)), self.mesh)[0])
        dims = [self._take(left, n, shape) for n in shape]
        for d, dim in enumerate(self.dims):
            for axis in finest(dim, self.mesh)[1]:
                at = self._lone_dim(d, axis, shape)
                dims[at] = canonical((*dims[at], Atom(1, (axis,))), self.mesh)
        return Layout(self.mesh, tuple(dims), self.partials)

    def _lone_dim(self, d: int, axis: str, shape: tuple[int, ...]) -> int:
        """Where an axis that shards single elements of dim `d` stays near it: any dim would do."""
        if not shape:
            raise self._straddle(shape, Atom(1, (axis,)))
        before, after = math.prod(self.shape[:d]), math.prod(self.shape[: d + 1])
        ends = list(itertools.accumulate(shape, lambda x, y: x * y))
        ones = [j for j, n in enumerate(shape) if n == 1 and ends[j] == before]
        return ones[0] if before == after and ones else next(j for j, end in enumerate(ends) if end >= after)

    def _reshape_empty(self, shape: tuple[int, ...]) -> Layout:
        if any(a.axes for d in self.dims for a in d):
            raise LayoutError("cannot reshape an empty tensor that is sharded", needed="no sharded dim", found=str(self))
        return Layout(self.mesh, tuple((Atom(n),) for n in shape), self.partials)

    def _take(self, left: list[Atom], size: int, shape: tuple[int, ...]) -> Dim:
        got: list[Atom] = []
        need = size
        while need > 1:
            atom = left.pop(0)
            if need % atom.size == 0:
                got.append(atom)
                need //= atom.size
            elif atom.size % need == 0 and not atom.axes:
                got.append(Atom(need))
                left.insert(0, Atom(atom.size // need))
                need = 1
            else:
                raise self._straddle(shape, atom)
        return canonical(tuple(got), self.mesh)

    def _straddle(self, shape: tuple[int, ...], atom: Atom) -> LayoutError:
        axes = f"an atom of {atom.size} sharded by {', '.join(atom.axes)}" if atom.axes else f"an atom of {atom.size}"
        return LayoutError(
            f"reshape {list(self.shape)} to {list(shape)} runs through {axes}",
            needed="every sharded atom to lie in one dim of the result, its blocks unsplit",
            found=str(self),
            try_=f"gather axis {atom.axes[-1]} first" if atom.axes else None,
        )

    def permute(self, order: tuple[int, ...]) -> Layout:
        return Layout(self.mesh, tuple(self.dims[i] for i in order), self.partials)

    def __str__(self) -> str:
        return show_layout(self)


@lru_cache(maxsize=65536)
def _layout_of(mesh: Mesh, shape: tuple[int, ...], placements: tuple[tuple[str, Placement], ...]) -> Layout:
    odd = [n for n in shape if int(n) != n or n < 0]
    if odd:
        raise LayoutError("not a shape", needed="integer sizes, 0 or more", found=str(list(shape)))
    layout, given = Layout(mesh, tuple((Atom(int(n)),) for n in shape)), dict(placements)
    for axis in given:
        mesh.require(axis)
    for axis in mesh.axes:
        layout = layout.place(axis, given.get(axis, R))
    return layout


def split_at(dim: Dim, within: int, mesh: Mesh) -> tuple[Dim, Dim] | None:
    """The dim as outer x `within`, no sharding straddling; None where that cannot be."""
    atoms, lone = finest(dim, mesh)
    outer, need = list(atoms), within
    inner: list[Atom] = []
    while need > 1 and outer:
        atom = outer.pop()
        if need % atom.size == 0:
            inner.insert(0, atom)
            need //= atom.size
        elif atom.size % need == 0 and not atom.axes:
            outer.append(Atom(atom.size // need))
            inner.insert(0, Atom(need))
            need = 1
        else:
            return None
    return ((*outer, *(Atom(1, (a,)) for a in lone)), tuple(inner) or (Atom(1),)) if need == 1 else None


def show_dim(dim: Dim) -> str:
    return "*".join(str(a.size) for a in dim)


def show_layout(layout: Layout) -> str:
    """`[16*8192, 4096] dp:S(0) tp:S(0.1)`: dims as product of atoms, then what each axis holds."""
    return f"[{', '.join(map(show_dim, layout.dims))}]" + "".join(f" {a}:{_show_place(layout, a)}" for a in layout.mesh.axes)


def _show_place(layout: Layout, axis: str) -> str:
    at = layout.where_sharded(axis)
    if at is None:
        return str(layout.placement(axis))
    return f"S({at[0]})" if len(layout.dims[at[0]]) == 1 else f"S({at[0]}.{at[1]})"


__all__ = [
    "REDUCTIONS",
    "Atom",
    "Dim",
    "Layout",
    "Mesh",
    "O",
    "P",
    "Placement",
    "R",
    "Replicated",
    "S",
    "Within",
    "canonical",
    "chunk",
    "dim_size",
    "finest",
    "show_dim",
]
