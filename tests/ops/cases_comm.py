"""Communication: the value stays, whatever the layout becomes. Along axis `a`, so a second axis may hold anything."""

from __future__ import annotations

from typing import Any

from tests.ops.harness import Case, case, normal
from weft.ops import comm


def _same(x: Any) -> Any:
    return x.clone()


def _move(name: str, op: Any, *shape: int, **attrs: Any) -> Case:
    return case(name, lambda x: op(x, axis="a", **attrs), _same, normal(*shape), local=True)


CASES = [
    _move("all_reduce", comm.all_reduce, 5, 4),
    _move("reduce_scatter", comm.reduce_scatter, 5, 4, dim=0),
    _move("reduce_scatter within", comm.reduce_scatter, 5, 4, dim=1, within=2),
    _move("all_gather", comm.all_gather, 5, 4),
    _move("all_to_all", comm.all_to_all, 5, 4, dim=1),
    _move("all_to_all within", comm.all_to_all, 6, 4, dim=1, within=2),
    _move("slice", comm.slice_, 5, 4, dim=0),
    _move("slice within", comm.slice_, 5, 4, dim=1, within=2),
    _move("reduce", comm.reduce_, 5, 4, root=1),
    _move("broadcast", comm.broadcast, 5, 4),
    _move("keep", comm.keep, 5, 4, root=1),
    _move("send", comm.send, 5, 4, to=1),
    case(
        "all_reduce of two", lambda x, y: comm.all_reduce(x, y, axis="a"), lambda x, y: (x.clone(), y.clone()),
        normal(5, 4), normal(3), local=True, inner=False,
    ),
]  # fmt: skip
