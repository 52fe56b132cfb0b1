"""A dynamic model's batch as one op: graphs, a row of numbers for each sample, with inputs and weights, give a row at each sample's root.

Labels: s samples, r hands, all others kept in one piece. Samples are apart, so s may be sharded. Or every rank has all graphs and some of the hands: samples
are split over the hands by predicted time, a rank runs those of its own and leaves the rows of others zero, and the result is a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from weft.core.node import Attrs, Node, dtype_of
from weft.ops.comm import all_reduce_partials
from weft.ops.fill import arange
from weft.ops.registry import Equation, Kind, Types, define

HANDS = 64  # ranks that can share the samples, at most


class Runner(Protocol):
    """Vertex functions, ready to run the samples of some graphs that belong to some hands."""

    def forward(self, graphs: Tensor, hands: Tensor, tensors: Sequence[Tensor], wants: tuple[int, ...]) -> tuple[Tensor, ...]: ...

    def shown(self) -> dict[str, Any]: ...

    def backward(
        self, cts: Sequence[Tensor], graphs: Tensor, hands: Tensor, tensors: Sequence[Tensor], wants: tuple[int, ...]
    ) -> tuple[Tensor, ...]: ...


RUNNERS: dict[str, Runner] = {}  # by the name that programs have them by: functions that compute the same have one


def rounds_of(runner: str, graphs: Node, tensors: Sequence[Node], wants: tuple[int, ...], gives: Any) -> list[Node]:
    """The outputs of a batch. `wants` are the tensors, inputs and then weights, that get gradients; `gives` are dtypes and shapes of a row."""
    made = rounds(graphs, arange(HANDS, graphs.mesh), *tensors, runner=runner, wants=wants, gives=gives)
    return [made] if len(gives) == 1 else list(made)


def _given(types: Types, first: int) -> list[tuple[str, ...]]:
    """Labels of graphs, hands and tensors; the latter are replicated."""
    tensors = [tuple(f"{k}.{d}" for d in range(len(t.shape))) for k, t in enumerate(types[first + 2 :])]
    return [("s", "w"), ("r",), *tensors]


def _rows(gives: Any) -> list[tuple[str, ...]]:
    return [("s", *(f"out{k}.{d}" for d in range(len(shape)))) for k, (_, shape) in enumerate(gives)]


def _equation(types: Types, attrs: Attrs) -> Equation:
    ins, outs = _given(types, 0), _rows(attrs["gives"])
    sizes = {f"out{k}.{d}": n for k, (_, shape) in enumerate(attrs["gives"]) for d, n in enumerate(shape)}
    return Equation(tuple(ins), tuple(outs), _unsharded(ins, outs), sizes=sizes)


def _back_equation(types: Types, attrs: Attrs) -> Equation:
    cts = _rows(attrs["gives"])
    ins = [*cts, *_given(types, len(cts))]
    return Equation(tuple(ins), tuple(ins[len(cts) + 2 + k] for k in attrs["wants"]), _unsharded(ins, ()))


def _unsharded(ins: Sequence[tuple[str, ...]], outs: Sequence[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(x for labels in (*ins, *outs) for x in labels) - {"s", "r"}


def _run(graphs: Tensor, hands: Tensor, *tensors: Tensor, runner: str, wants: tuple[int, ...], gives: Any) -> Any:
    out = RUNNERS[runner].forward(graphs, hands, tensors, wants)
    return out if len(gives) > 1 else out[0]


def _back_run(*xs: Tensor, runner: str, wants: tuple[int, ...], gives: Any) -> Any:
    cts, (graphs, hands, *tensors) = xs[: len(gives)], xs[len(gives) :]
    found = RUNNERS[runner].backward(cts, graphs, hands, tensors, wants)
    return found if len(wants) > 1 else found[0]


def _work(n: Node, first: int, factor: float) -> float:
    """Of a vertex, a matmul with every matrix; three vertices to twelve numbers of a graph's row, whose length is about its largest's."""
    samples, width = n.args[first].type.layout.largest_local
    hands = n.args[first + 1].type.layout.largest_local[0] / HANDS
    return factor * samples * hands * width / 4 * sum(math.prod(a.shape) for a in n.args[first + 2 :] if a.ndim == 2)


rounds_backward = define(
    "rounds_backward",
    kind=Kind.COMPOSITE,
    equation=_back_equation,
    run=_back_run,
    dtype=lambda types, attrs: tuple(types[len(attrs["gives"]) + 2 + k].dtype for k in attrs["wants"]),
    flops=lambda n: _work(n, len(n.attr("gives")), 4.0),
    doc="gradients of a dynamic model's inputs and weights",
)


def _vjp(n: Node, *cts: Node) -> Any:
    wants = n.attr("wants")
    if not wants:
        return (None,) * len(n.args)
    made = rounds_backward(*cts, *map(all_reduce_partials, n.args), **dict(n.attrs))
    grads = iter([made] if len(wants) == 1 else list(made))
    return None, None, *(next(grads) if k in wants else None for k in range(len(n.args) - 2))


rounds = define(
    "rounds",
    kind=Kind.COMPOSITE,
    equation=_equation,
    run=_run,
    dtype=lambda types, attrs: tuple(dtype_of(dtype) for dtype, _ in attrs["gives"]),
    vjp=_vjp,
    flops=lambda n: _work(n, 0, 2.0),
    doc="(graphs, hands, inputs and weights) -> the outputs of vertex functions at the roots of the graphs",
)
