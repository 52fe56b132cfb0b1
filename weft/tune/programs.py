"""Search schedules of a program: verbs and their parameters, measured on the ranks of its mesh.

Only candidates that are predicted to be at most `KEEP` x slower than the fastest are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.cluster.here import here
from weft.cluster.spec import Cluster
from weft.core import cache
from weft.core.errors import WeftError
from weft.core.node import Node
from weft.core.program import Program
from weft.cost.simulate import predict
from weft.ops.registry import Kind
from weft.runtime.agree import from_first, rank
from weft.runtime.machine import describe
from weft.schedule import by_hierarchy, fuse, merge, overlap, recipes, split
from weft.schedule.groups import FUSIBLE
from weft.tune.measure import Measured, measure
from weft.tune.store import Store

KEEP = 4.0
CHUNKS = (2, 4, 8)
AS_IS = "as it is"


def candidates(program: Program) -> dict[str, Program]:
    """Schedules worth a look, the program as it is first. A step that is not valid here gives none."""
    found = {AS_IS: program}
    for name, make in _schedules(program):
        try:
            scheduled = make()
        except WeftError:
            continue
        if scheduled.text not in {p.text for p in found.values()}:
            found[name] = scheduled
    return found


def _schedules(p: Program) -> Iterator[tuple[str, Callable[[], Program]]]:
    yield "fuse compute", lambda: recipes.fuse_compute(p)
    for axis in p.mesh.axes:
        yield f"one shot {axis}", lambda axis=axis: one_shot(p, axis)
        for dim in range(max((n.ndim for n in recipes.gradient_sums(p, axis)), default=0)):
            yield f"scatter {axis} dim {dim}", lambda axis=axis, dim=dim: recipes.scatter_compute_gather(p, axis, dim)
            yield f"state in slices {axis} dim {dim}", lambda axis=axis, dim=dim: recipes.zero1(p, axis, dim=dim)
            yield (
                f"one kernel {axis} dim {dim}",
                lambda axis=axis, dim=dim: recipes.one_kernel(recipes.scatter_compute_gather(p, axis, dim)),
            )
            yield (
                f"one kernel, state in slices {axis} dim {dim}",
                lambda axis=axis, dim=dim: recipes.one_kernel(recipes.zero1(p, axis, dim=dim)),
            )
    yield from _overlaps(p, "")
    for node in recipes_sums(p):
        for dim in range(node.ndim):
            yield from _overlaps_after(p, node, dim)
    if len(p.mesh.axes) > 1:
        for node in recipes_sums(p):
            for axis in p.mesh.axes:
                yield f"sum inside {axis} first", lambda node=node, axis=axis: by_hierarchy(p, node, inside=axis)


def one_shot(p: Program, axis: str) -> Program:
    """The sums along the axis and all that is computed from them in one kernel: every rank reads every term, none is gathered."""
    sums = recipes.gradient_sums(p, axis)
    p = merge(p, *sums) if len(sums) > 1 else p
    full = [n for n in p.find_all("all_reduce") if n.attr("axis") == axis and n.types[0].shape]
    after = [n for n in p.nodes if n.op.kind in FUSIBLE and n.args and any(s in p.needs(n) for s in full)]
    return fuse(p, [*full, *after])


def recipes_sums(p: Program) -> list[Node]:
    return [n for n in p.find_all("all_reduce") if n.ndim and len(n.args) == 1]


def _overlaps(p: Program, text: str) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Matmuls with a collective right after or right before them, in chunks."""
    for pair in _neighbours(p):
        for dim in range(pair[0].types[0].layout.rank):
            for chunks in CHUNKS:
                names = " and ".join(n.op.name for n in pair)
                yield (
                    f"{text}overlap {names}, {chunks} chunks of dim {dim}",
                    lambda pair=pair, dim=dim, chunks=chunks: overlap(p, *pair, dim=dim, chunks=chunks),
                )


def _overlaps_after(p: Program, node: Node, dim: int) -> Iterator[tuple[str, Callable[[], Program]]]:
    """The same after an all_reduce has been split."""
    try:
        q = split(p, node, dim=dim)
    except WeftError:
        return
    yield from _overlaps(q, f"split dim {dim}, ")


def _neighbours(p: Program) -> list[tuple[Node, Node]]:
    heavy = (Kind.CONTRACT, Kind.COMPOSITE)
    pairs = []
    for n in p.nodes:
        for a in n.args:
            kinds = a.op.kind, n.op.kind
            if (kinds[0] in heavy and kinds[1] is Kind.COMM) or (kinds[0] is Kind.COMM and kinds[1] in heavy):
                pairs.append((a, n))
    return pairs


def prune(found: dict[str, Program], cluster: Cluster, limit: int) -> dict[str, Program]:
    """The program as it is, and those of the rest that are predicted to be fastest."""
    costs = {name: predict(p, cluster).step_ms for name, p in found.items()}
    near = min(costs.values()) * KEEP
    kept = sorted((name for name in found if name != AS_IS and costs[name] <= near), key=lambda name: costs[name])
    return {name: found[name] for name in [AS_IS, *kept[:limit]]}


# -- measured --------------------------------------------------------------------------------------------------------


def tune_program(
    program: Program,
    *,
    compile_: Callable[[Program], Callable[[Any], Any]],
    inputs: Callable[[Program], Any],
    cluster: Cluster | None = None,
    limit: int = 16,
    again: bool = False,
    on_result: Callable[[str, float, int], None] = lambda name, ms, of: None,
    device: torch.device | None = None,
) -> tuple[Program, Measured]:
    """The fastest schedule of a program on these ranks, and what was tried; `cluster` is this machine unless given. All ranks call it."""
    device = device or torch.device("cpu")
    kept = prune(candidates(program), cluster or here(program.mesh.ranks, device), limit)
    store = Store("program", program.text, cache.digest(str(program.mesh)), describe(device), torch.__version__, writes=rank() == 0)
    if again:
        store.forget()
    known: dict[str, float] = from_first(store.times)
    calls = {name: _call(compile_, p, inputs) for name, p in kept.items()}

    def report(name: str, ms: float) -> None:
        store.put(name, ms)
        on_result(name, ms, len(kept))

    result = measure(calls, AS_IS, known=known, on_result=report, device=device)
    return kept[result.choice], result


def _call(compile_: Callable[[Program], Callable[[Any], Any]], p: Program, inputs: Callable[[Program], Any]) -> Callable[[], object]:
    """Compiled when first called, so that candidates whose time is known are not."""
    made: list[Any] = []

    def call() -> object:
        if not made:
            made.extend((compile_(p), inputs(p)))
        return made[0](made[1])

    return call


