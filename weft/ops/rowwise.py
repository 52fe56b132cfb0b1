"""Updates of tables that read their gradient as the rows a batch looked up: update(p, put(x, index, rows), ...), without the put's result.

Each is made from the update it stands for, and means that update of that put. Rows of equal index are summed first, so the batch may not be
sharded; table and state are sharded the same, by rows or by columns. Where a zero gradient changes nothing, only rows looked up are touched.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from weft.core.node import Attrs, Node, Op, Type, op_named
from weft.ops.embed import need_index
from weft.ops.optimizers import adagrad, adam, rmsprop, sgd
from weft.ops.registry import Equation, Kind, Types, define, nbytes

SLOT = 4  # bytes that say where the gradient of a row of the table is
SECTOR = 32  # bytes that a device moves at least, where it reads or writes here and there
EXTRA_KERNELS = 2  # kernels before the one that updates: every row looked up claims a slot, and rows of one slot are summed


def _equation(types: Types, attrs: Attrs) -> Equation:
    """Table, rows looked up, their index, the rows of the table; state like the table; then the learning rate and the step."""
    need_index("an update by rows", types, 2, 3)
    dim, at = attrs["dim"], tuple(f"i{k}" for k in range(len(types[2].shape)))
    own = tuple("v" if d == dim else f"d{d}" for d in range(len(types[0].shape)))
    states = (own,) * (len(types) - 6)
    return Equation((own, (*own[:dim], *at, *own[dim + 1 :]), at, ("v",), *states, (), ()), (own, *states), frozenset(at))


def _dtypes(types: Types, attrs: Attrs) -> tuple[torch.dtype, ...]:
    return (types[0].dtype, *(t.dtype for t in types[4:-2]))


def _by_rows(update: Op) -> Op:
    put = op_named("put")

    def run(p: torch.Tensor, x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, *rest: torch.Tensor, dim: int, **attrs: Any) -> Any:
        return update.run(p, put.run(x, index, rows, dim), *rest, **attrs)

    def defined(p: Any, x: Any, index: Any, rows: Any, *rest: Any, dim: Any, **attrs: Any) -> Any:
        return update(p, put(x, index, rows, dim=dim), *rest, **attrs)

    return define(
        f"{update.name}_at",
        kind=Kind.COMPOSITE,
        equation=_equation,
        dtype=_dtypes,
        run=run,
        defined=defined,
        parts=_parts,
        update=update,
        flops=lambda n: 12.0 * (_hits(n) * _width(n) if is_still(n) else math.prod(n.types[0].layout.largest_local)),
        traffic=_traffic,
        extra_kernels=EXTRA_KERNELS,
    )


def _parts(n: Node) -> tuple[Node, Node]:
    """The put and the update that a node stands for, outside any program."""
    p, x, index, rows, *rest = n.args
    gradient = Node(op_named("put"), (x, index, rows), (("dim", n.attr("dim")),), (Type(x.dtype, p.layout),))
    assert n.op.update is not None
    return gradient, Node(n.op.update, (p, gradient, *rest), tuple(_settings(n).items()), n.types)


def at_rows(n: Node) -> Node:
    """An update of what a put made, by the put's own operands."""
    p, gradient, *rest = n.args
    made: Node = AT[n.op](p, *gradient.args, *rest, dim=gradient.attr("dim"), **dict(n.attrs))
    return made


def _settings(n: Node) -> Attrs:
    return {k: v for k, v in n.attrs if k != "dim"}


# -- what it costs -----------------------------------------------------------------------------------------------------------------


def is_still(n: Node) -> bool:
    """Whether a zero gradient leaves the parameter and its state as they are."""
    return stays(n.op.update, tuple(sorted(_settings(n).items())), len(n.args) - 6)


@cache
def stays(update: Op, settings: tuple[tuple[str, Any], ...], states: int) -> bool:
    """Tried on numbers of either sign, in the first step and later."""
    p, kept = torch.tensor([-1.5, -0.1, 0.3, 2.0], dtype=torch.float64), torch.tensor([0.25, 1.5, 1e-3, 3.0], dtype=torch.float64)
    before = [p, *[kept] * states]
    for step in (1, 2, 1000):
        out = update.run(p, torch.zeros_like(p), *before[1:], torch.tensor(0.1, dtype=torch.float64), torch.tensor(step), **dict(settings))
        after = out if isinstance(out, tuple) else (out,)
        if not all(torch.equal(x, y) for x, y in zip(before, after, strict=True)):
            return False
    return True


def _hits(n: Node) -> float:
    """Rows looked up that a rank holds, where all rows are looked up the same; some more than once."""
    full, local = n.args[0].shape[n.attr("dim")], n.args[0].type.layout.largest_local[n.attr("dim")]
    return float(math.prod(n.args[2].shape) * local / max(1, full))


def _width(n: Node) -> float:
    """Numbers of a row that a rank holds."""
    local = n.args[0].type.layout.largest_local
    return float(math.prod(local) / max(1, local[n.attr("dim")]))


def _traffic(n: Node) -> float:
    """The index is read and every hit claims a slot and looks it up again; rows are read and summed into zeros, the sums read. Then table
    and state are read and written, all of them or where they were hit; a row that may not have been asks its slot."""
    kept = (n.args[0], *n.args[4:-2])
    local, hits = n.args[0].type.layout.largest_local[n.attr("dim")], _hits(n)
    row = _width(n) * n.args[1].dtype.itemsize
    sums = 2 * nbytes(n.args[2].type) + hits * (2 * SECTOR + max(SECTOR, row) + 4 * row)
    if is_still(n):
        return float(sums + 2 * min(hits, local) * sum(max(SECTOR, _width(n) * a.dtype.itemsize) for a in kept))
    return float(sums + 2 * SLOT * local + 2 * sum(nbytes(a.type) for a in kept))


AT: dict[Op, Op] = {update: _by_rows(update) for update in (adam, sgd, adagrad, rmsprop)}
