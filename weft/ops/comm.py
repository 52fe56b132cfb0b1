"""Communication: ops that change how the ranks hold a value, never the value.

Each takes one tensor or, merged, several in one call. `exchange` is what really happens among the ranks of one group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.core.errors import LayoutError, TypeMismatch
from weft.core.layout import Layout, O, P, Placement, R, Replicated, S
from weft.core.node import Attrs, Node, Type, user_line
from weft.core.pairs import pairs
from weft.ops.registry import Kind, Linear, Types, define

Move = Callable[[Layout, Attrs], Layout]
Locals = list[Any]  # one tensor per rank of the group, None where the rank holds nothing
Places = Sequence[Mapping[str, int]]
REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def _infer(name: str, takes: type[Placement], move: Move) -> Callable[[Types, Attrs], Types]:
    def infer(types: Types, attrs: Attrs) -> Types:
        if not types:
            raise TypeMismatch(f"{name} of nothing", needed="at least one tensor", found="none", where=user_line())
        return tuple(_moved(name, takes, move, t, attrs) for t in types)

    return infer


def _moved(name: str, takes: type[Placement], move: Move, t: Type, attrs: Attrs) -> Type:
    axis = attrs["axis"]
    place = t.on(axis)
    if not isinstance(place, takes):
        raise TypeMismatch(
            f"{name} along {axis} has nothing to do here",
            needed=f"{axis}:{_LETTER[takes]} in its operand",
            found=str(t),
            where=user_line(),
        )
    return t.with_layout(move(t.layout, attrs))


_LETTER: dict[type[Placement], str] = {Replicated: "R", S: "S", P: "P", O: "O"}


def _sliced(layout: Layout, attrs: Attrs) -> Layout:
    return layout.shard(attrs["axis"], attrs["dim"], attrs.get("within"))


def _identity(*xs: torch.Tensor, **_: Any) -> Any:
    return xs[0] if len(xs) == 1 else xs


def _define(name: str, takes: type[Placement], move: Move, exchange: Any, wire: Any, linear: Any = Linear.JOINTLY, doc: str = "") -> Any:
    return define(
        name,
        kind=Kind.COMM,
        infer=_infer(name, takes, move),
        run=_identity,
        vjp=lambda n, *cts: cts,
        field=lambda p, *xs, **_: _identity(*xs),
        linear=linear,
        normal=lambda attrs: {k: v for k, v in attrs.items() if v is not None},
        exchange=exchange,
        wire=wire,
        doc=doc,
    )


# -- what happens among the ranks of a group ---------------------------------------------------------------------------------


def _reduced(xs: Locals, source: Layout, attrs: Attrs) -> torch.Tensor:
    """Of the terms; with `tree`, by pairs of ranks, which is the order in which one process sums."""
    place = source.placement(attrs["axis"])
    assert isinstance(place, P)
    if attrs.get("tree"):
        return pairs(xs)
    return functools.reduce(REDUCE[place.op], xs)


def _pick(x: torch.Tensor, have: Layout, at: Mapping[str, int], want: Layout, there: Mapping[str, int]) -> torch.Tensor:
    """The part of a local tensor that another place wants; it must hold all of it."""
    for d in range(have.rank):
        stored, wanted = have.positions(d, at), want.positions(d, there)
        if stored.shape != wanted.shape or not torch.equal(stored, wanted):
            x = x.index_select(d, torch.searchsorted(stored, wanted).to(x.device))
    return x


def _assemble(xs: Locals, places: Places, have: Layout, want: Layout, there: Mapping[str, int]) -> torch.Tensor:
    """A local tensor put together from what every rank of the group holds."""
    out = xs[0].new_zeros(want.local_shape(there))
    for x, at in zip(xs, places, strict=True):
        index = [_overlap(have.positions(d, at), want.positions(d, there)) for d in range(have.rank)]
        if all(len(i[0]) for i in index):
            source = x[torch.meshgrid(*[i[0] for i in index], indexing="ij")] if index else x
            out[torch.meshgrid(*[i[1] for i in index], indexing="ij") if index else ...] = source
    return out


def _overlap(stored: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in `stored` and where in `wanted` their common indices stand; both are sorted."""
    at = torch.searchsorted(stored, wanted).clamp(max=max(len(stored) - 1, 0))
    hit = (stored[at] == wanted) if len(stored) else torch.zeros_like(wanted, dtype=torch.bool)
    return at[hit], torch.nonzero(hit).reshape(-1)


def _all_reduce(xs: Locals, places: Places, have: Layout, want: Layout, attrs: Attrs) -> Locals:
    total = _reduced(xs, have, attrs)
    return [total.clone() for _ in xs]


def _reduce_scatter(xs: Locals, places: Places, have: Layout, want: Layout, attrs: Attrs) -> Locals:
    total = _reduced(xs, have, attrs)
    return [_pick(total, have, at, want, at) for at in places]


def _all_gather(xs: Locals, places: Places, have: Layout, want: Layout, attrs: Attrs) -> Locals:
    return [_assemble(xs, places, have, want, at) for at in places]


def _slice(xs: Locals, places: Places, have: Layout, want: Layout, attrs: Attrs) -> Locals:
    return [_pick(x, have, at, want, at) for x, at in zip(xs, places, strict=True)]


def _reduce(xs: Locals, places: Places, have: Layout, want: Layout, attrs: Attrs) -> Locals:
    total = _reduced(xs, have, attrs)
    return [total if want.present(at) else None for at in places]


def _from_root(xs: Locals, places: Places, have: Layout, want: Layout, attrs: Attrs) -> Locals:
    (x,) = [x for x, at in zip(xs, places, strict=True) if have.placement(attrs["axis"]) == O(at[attrs["axis"]])]
    return [x.clone() if x is not None and want.present(at) else None for at in places]


def _keep(xs: Locals, places: Places, have: Layout, want: Layout, attrs: Attrs) -> Locals:
    return [x if want.present(at) else None for x, at in zip(xs, places, strict=True)]


# -- the ops, with the bytes on the wire per rank over the bytes of the largest form ------------------------------------------

all_reduce = _define("all_reduce", P, lambda layout, a: layout.release(a["axis"]), _all_reduce, lambda n: 2 * (n - 1) / n, doc="P -> R")
reduce_scatter = _define(
    "reduce_scatter", P, lambda layout, a: _sliced(layout.release(a["axis"]), a), _reduce_scatter, lambda n: (n - 1) / n, doc="P -> S"
)
all_gather = _define("all_gather", S, lambda layout, a: layout.gather(a["axis"]), _all_gather, lambda n: (n - 1) / n, doc="S -> R")
all_to_all = _define(
    "all_to_all", S, lambda layout, a: _sliced(layout.gather(a["axis"]), a), _all_gather, lambda n: (n - 1) / n**2, doc="S -> S on another dim"
)
slice_ = _define("slice", Replicated, _sliced, _slice, lambda n: 0.0, doc="R -> S, no wire")
reduce_ = _define("reduce", P, lambda layout, a: layout.release(a["axis"]).hold(a["axis"], O(a["root"])), _reduce, lambda n: 1.0, doc="P -> O")
broadcast = _define("broadcast", O, lambda layout, a: layout.release(a["axis"]), _from_root, lambda n: 1.0, doc="O -> R")
send = _define(
    "send", O, lambda layout, a: layout.release(a["axis"]).hold(a["axis"], O(a["to"])), _from_root, lambda n: 1.0, doc="O -> O of another stage"
)

keep = _define("keep", Replicated, lambda layout, a: layout.hold(a["axis"], O(a["root"])), _keep, lambda n: 0.0, doc="R -> O, no wire")


def is_comm(node: Node) -> bool:
    return node.op.kind is Kind.COMM


# -- layout changes put together ----------------------------------------------------------------------------------------------


def all_reduce_partials(x: Any) -> Any:
    """Every partial reduction done."""
    for axis, place in x.layout.partials:
        if isinstance(place, P):
            x = all_reduce(x, axis=axis)
    return x


def reshard(x: Any, target: Layout) -> Any:
    """The value brought to another layout: inner shardings undone first, then outer shardings made first.

    Where all axes that change shard atoms of their own in one dim, the outer one moves the least: it is gathered first, or its sum scattered last."""
    if x.layout == target:
        return x
    if x.shape != target.shape:
        raise TypeMismatch("a layout of another shape", needed=str(list(x.shape)), found=str(list(target.shape)), where=user_line())
    outer = target.mesh.axes
    changed = [a for a in outer if x.layout.placement(a) != target.placement(a)]
    gathers = _side_by_side(x.layout, changed) and all(target.placement(a) == R for a in changed)
    scatters = _side_by_side(target, changed) and all(isinstance(x.layout.placement(a), P) for a in changed)
    for axis in outer if gathers else outer[::-1]:
        x = _undo(x, axis, target)
    for axis in outer[::-1] if scatters else outer:
        x = _redo(x, axis, target.placement(axis))
    if x.layout != target:
        raise TypeMismatch("no way to this layout is known", needed=str(target), found=str(x.layout), where=user_line())
    return x


def _side_by_side(layout: Layout, axes: Sequence[str]) -> bool:
    """Whether several axes shard one dim, none nested in another."""
    at = [layout.where_sharded(a) for a in axes]
    return len(at) > 1 and None not in at and len(set(at)) == len(at) and len({place[0] for place in at if place}) == 1


def _undo(x: Any, axis: str, target: Layout) -> Any:
    here, there = x.layout.placement(axis), target.placement(axis)
    if here == there and _same_shard(x.layout, target, axis):
        return x
    if isinstance(here, S):
        if isinstance(there, S) and there.dim != here.dim and _may_shard(x.layout.gather(axis), axis, there, target):
            return all_to_all(x, axis=axis, dim=there.dim, within=there.within)
        return all_gather(x, axis=axis)
    if isinstance(here, P) and not isinstance(there, (S, O)):
        return all_reduce(x, axis=axis)
    if isinstance(here, O):
        return send(x, axis=axis, to=there.root) if isinstance(there, O) else broadcast(x, axis=axis)
    return x


def _may_shard(layout: Layout, axis: str, place: S, target: Layout) -> bool:
    """Whether the shard may be made now: it makes its dim what it has to be in the end."""
    try:
        return layout.place(axis, place).dims[place.dim] == target.dims[place.dim]
    except LayoutError:  # the sharding does not fit yet
        return False


def _same_shard(a: Layout, b: Layout, axis: str) -> bool:
    """Whether an axis shards the same atom, under the same outer shards."""
    at, bt = a.where_sharded(axis), b.where_sharded(axis)
    if at is None or bt is None:
        return at is bt
    x, y = a.dims[at[0]][at[1]], b.dims[bt[0]][bt[1]]
    outer = x.axes[: x.axes.index(axis)] == y.axes[: y.axes.index(axis)]
    return outer and x.size == y.size


def _redo(x: Any, axis: str, there: Placement) -> Any:
    here = x.layout.placement(axis)
    if isinstance(there, S) and isinstance(here, Replicated):
        return slice_(x, axis=axis, dim=there.dim, within=there.within)
    if isinstance(there, S) and isinstance(here, P):
        return reduce_scatter(x, axis=axis, dim=there.dim, within=there.within)
    if isinstance(there, O) and isinstance(here, P):
        return reduce_(x, axis=axis, root=there.root)
    if isinstance(there, O) and isinstance(here, Replicated):
        return keep(x, axis=axis, root=there.root)
    if isinstance(there, P) and not isinstance(here, P):
        raise TypeMismatch(f"no op turns {axis}:R into {axis}:{there}", needed=f"{axis}:{there}", found=str(x.type), where=user_line())
    return x


__all__ = [
    "R",
    "all_gather",
    "all_reduce",
    "all_reduce_partials",
    "all_to_all",
    "broadcast",
    "is_comm",
    "keep",
    "reduce_",
    "reduce_scatter",
    "reshard",
    "send",
    "slice_",
]
