"""Small programs, and calls of verbs on them: those that pass and those that are refused, one for every reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import weft.schedule as schedule
from weft.core.layout import Mesh, P, R, S
from weft.core.program import Program
from weft.frontend.trace import f64, trace
from weft.ops import comm
from weft.ops.linalg import einsum
from weft.ops.norm import softmax
from weft.ops.pointwise import dropout, gelu, sqrt, square, tanh
from weft.ops.reduce import sum_

DP, TP, BOTH = Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2)
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(mesh: Mesh, **inputs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a traced function into the table."""

    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = lambda: trace(fn, mesh, **inputs)
        return fn

    return enter


@program(DP, g=f64(6, dp=P()), w=f64(6), m=f64(6))
def descent(g: Any, w: Any, m: Any) -> Any:
    """Momentum: an all_reduce, then elementwise ops on state."""
    m = 0.9 * m + 0.1 * comm.all_reduce(g, axis="dp")
    return {"w": w - 0.1 * m, "m": m}


@program(DP, g=f64(6, dp=P()), w=f64(6))
def trust(g: Any, w: Any) -> Any:
    """An update scaled by norms."""
    g = comm.all_reduce(g, axis="dp")
    return {"w": w - g * (sqrt(sum_(square(w))) / sqrt(sum_(square(g)) + 1.0))}


@program(TP, x=f64(4, 6, tp=S(1)), w=f64(6, 6, tp=S(0)), b=f64(6), r=f64(4, 6))
def layer(x: Any, w: Any, b: Any, r: Any) -> Any:
    """The second product of a parallel block."""
    return dropout(comm.all_reduce(x @ w, axis="tp") + b, 7, p=0.1, site=0) + r


@program(TP, x=f64(4, 6, tp=P()), w=f64(6, 5))
def rows(x: Any, w: Any) -> Any:
    """A sum that a product and a softmax read."""
    y = comm.all_gather(comm.reduce_scatter(x, axis="tp", dim=1), axis="tp")
    return {"product": y @ w, "chances": softmax(y, 1)}


@program(TP, x=f64(4, 6), w=f64(6, 5), v=f64(5, 6))
def whole(x: Any, w: Any, v: Any) -> Any:
    return gelu(x @ w) @ v


@program(BOTH, g=f64(6, 4, dp=P(), tp=P()))
def twice(g: Any) -> Any:
    """A sum over both axes."""
    return square(comm.all_reduce(comm.all_reduce(g, axis="dp"), axis="tp"))


@program(DP, a=f64(4, dp=P()), b=f64(2, 3, dp=P()), c=f64(5, dp=P()), d=f64(4, dp=S(0)))
def several(a: Any, b: Any, c: Any, d: Any) -> Any:
    a, b, c = (comm.all_reduce(x, axis="dp") for x in (a, b, c))
    return {"a": tanh(a), "b": b * 2.0, "c": square(c), "d": comm.all_gather(d, axis="dp")}


@program(DP, x=f64(4, dp=P()), y=f64(4, dp=P()))
def waiting(x: Any, y: Any) -> Any:
    """The second sum needs the first."""
    a = comm.all_reduce(x, axis="dp")
    return comm.all_reduce(y * a, axis="dp")


@program(DP, x=f64(6, 4, dp=P()), w=f64(6, 4), v=f64(4, 3))
def linear(x: Any, w: Any, v: Any) -> Any:
    y = comm.all_reduce(x, axis="dp")
    return {"scaled": y * w, "product": y @ v, "shifted": y + w, "curved": tanh(y)}


@program(DP, x=f64(6, 4), y=f64(6, 4, dp=S(0)), z=f64(6, 4))
def slices(x: Any, y: Any, z: Any) -> Any:
    a, b = comm.slice_(x, axis="dp", dim=0), comm.slice_(z, axis="dp", dim=0)
    return {"both": a + b, "mixed": a * y, "total": sum_(a, dims=0), "half": comm.slice_(tanh(x) * z, axis="dp", dim=1)}


@program(DP, x=f64(6, dp=S(0)), m=f64(6), k=f64(6), u=f64(6), r=f64(6))
def kept(x: Any, m: Any, k: Any, u: Any, r: Any) -> Any:
    """Inputs read in slices, whole, in two ways, and not at all."""
    one = comm.slice_(m, axis="dp", dim=0)
    two, inner = comm.slice_(k, axis="dp", dim=0), comm.slice_(k, axis="dp", dim=0, within=2)
    return {"m": comm.all_gather(one + x, axis="dp"), "a": two * x, "b": inner, "u": u + 1.0, "r": r}


@program(TP, x=f64(4, 6, tp=P()), y=f64(4, 6, tp=P()))
def two_sums(x: Any, y: Any) -> Any:
    a, b = comm.all_reduce(x, axis="tp"), comm.all_reduce(y, axis="tp")
    return tanh(a) * b


@program(BOTH, x=f64(4, 6, tp=P(), dp=S(0)), w=f64(6, 6))
def mixed(x: Any, w: Any) -> Any:
    """A sum, a product, a gather, and two axes."""
    y = tanh(comm.all_reduce(x, axis="tp"))
    return {"y": comm.all_gather(y, axis="dp"), "z": y @ w, "t": comm.all_to_all(y, axis="dp", dim=1)}


@program(DP, x=f64(4, 6, dp=S(0)), y=f64(4, 6, dp=P()), z=f64(4, 6))
def chunky(x: Any, y: Any, z: Any) -> Any:
    """What cannot be made, or not be taken, chunk by chunk."""
    s = comm.all_reduce(y, axis="dp")
    chances, cut = comm.all_gather(softmax(x, 1), axis="dp"), comm.slice_(softmax(z, 1), axis="dp", dim=1)
    return {"chances": chances, "around": tanh(s) * s, "outer": einsum("ij,kj->ik", s, s), "cut": cut}


@program(TP, x=f64(4, 6, tp=P()), w=f64(6, 4, tp=S(1)), m=f64(6), n=f64(6))
def columns(x: Any, w: Any, m: Any, n: Any) -> Any:
    """A product cut by columns; state whose next value is cut otherwise; an input nothing reads."""
    part = comm.slice_(m, axis="tp", dim=0)
    other = comm.all_to_all(part * 2.0, axis="tp", dim=0, within=2)
    return {"y": comm.all_reduce(x, axis="tp") @ w, "m": comm.all_gather(other, axis="tp")}


@dataclass(frozen=True)
class Scene:
    """A call on a program. `setup` are calls before it."""

    name: str
    program: str
    call: str
    setup: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def start(self) -> Program:
        p = PROGRAMS[self.program]()
        for call in self.setup:
            p = run(call, p)
        return p


def run(call: str, p: Program) -> Any:
    return eval(call, {name: getattr(schedule, name) for name in schedule.__all__}, {"p": p})


SPLIT = "split(p, 'all_reduce', dim=0)"
SUNK = (SPLIT, "sink(p, 'all_gather')")
KERNEL = "fuse(p, p.between('reduce_scatter', 'all_gather'))"
ADDS = "p.find_all('add')[0], p.find_all('add')[1]"

SCENES = [
    Scene("split into scatter and gather", "layer", "split(p, 'all_reduce', dim=1)"),
    Scene("split at a root", "layer", "split(p, 'all_reduce', root=1)"),
    Scene("sink through an optimizer", "descent", "sink(p, 'all_gather')", (SPLIT,)),
    Scene("sink past one op only", "layer", "sink(p, 'all_gather', past=p.find_all('add')[0])", (SPLIT,)),
    Scene("sink through dropout", "layer", "sink(p, 'all_gather')", (SPLIT,)),
    Scene("sink past a norm brings its all_reduce", "trust", "sink(p, 'all_gather')", (SPLIT,)),
    Scene("sink past a product by its kept dim", "whole", "sink(p, 'all_gather')", ("shard(p, 'x', axis='tp', dim=0)",)),
    Scene("sink past a product by summing", "whole", "sink(p, 'all_gather', summing=True)", ("shard(p, 'x', axis='tp', dim=1)",)),
    Scene("sink a slice", "slices", "sink(p, p.find_all('slice')[0], past='add')"),
    Scene("hoist a gather", "mixed", "hoist(p, 'all_gather')"),
    Scene("hoist a slice past two ops", "slices", "hoist(p, 'half', past=[p.find_all('mul')[1], 'tanh'])"),
    Scene("delay past a product", "linear", "delay(p, 'all_reduce', past='matmul')"),
    Scene("delay past an elementwise product", "linear", "delay(p, 'all_reduce', past='mul')"),
    Scene("delay a scatter", "linear", "delay(p, 'reduce_scatter', past='mul')", (SPLIT, "sink(p, 'all_gather', past='mul')")),
    Scene("shard the moments", "descent", "shard_state(p, 'm')", SUNK),
    Scene("shard the weights, gathered where read", "descent", "shard_state(p, 'w', gather=True)", SUNK),
    Scene("drop a pair and an input", "descent", "drop_dead(p, 'm')", (*SUNK, "shard_state(p, 'm')")),
    Scene("merge two sums", "several", "merge(p, *p.find_all('all_reduce')[:2])"),
    Scene("bucket three sums", "several", "bucket(p, *p.find_all('all_reduce'))"),
    Scene("bucket by size", "several", "bucket(p, *p.find_all('all_reduce'), max_bytes=90)"),
    Scene("by hierarchy", "twice", "by_hierarchy(p, p.find_all('all_reduce')[1], inside='tp', dim=1)"),
    Scene("shard an input", "whole", "shard(p, 'w', axis='tp', dim=1)"),
    Scene("redistribute a gather", "whole", "redistribute(p, 'all_gather', dim=1)", ("shard(p, 'x', axis='tp', dim=0)",)),
    Scene("fuse around a scatter", "layer", KERNEL, SUNK),
    Scene("overlap a product with a kernel", "layer", "overlap(p, 'matmul', 'k0', dim=0, chunks=2)", (*SUNK, KERNEL)),
    Scene("undo", "descent", "undo(p)", SUNK),
]  # fmt: skip

REFUSALS = [
    Scene("split of an add", "descent", "split(p, p.find_all('add')[0], dim=0)"),
    Scene("split of merged sums", "several", "split(p, 'all_reduce', dim=0)", ("merge(p, *p.find_all('all_reduce'))",)),
    Scene("split with neither dim nor root", "descent", "split(p, 'all_reduce')"),
    Scene("split with both", "descent", "split(p, 'all_reduce', dim=0, root=0)"),
    Scene("split along a dim that is not there", "layer", "split(p, 'all_reduce', dim=2)"),
    Scene("split at a rank that is not there", "layer", "split(p, 'all_reduce', root=5)"),
    Scene("sink of a sum", "descent", "sink(p, 'all_reduce')"),
    Scene("sink past an op that does not read it", "descent", "sink(p, 'all_gather', past='sub')", (SPLIT,)),
    Scene("sink with nothing after it", "several", "sink(p, 'all_gather')"),
    Scene("sink past a product that sums it", "rows", "sink(p, 'all_gather', past='matmul')"),
    Scene("sink past a softmax along the cut dim", "rows", "sink(p, 'all_gather', past='softmax')"),
    Scene("sink of a slice beside what is cut already", "slices", "sink(p, p.find_all('slice')[0], past='mixed')"),
    Scene("sink of a slice past a sum over it", "slices", "sink(p, p.find_all('slice')[0], past='sum')"),
    Scene("hoist of a sum", "descent", "hoist(p, 'all_reduce')"),
    Scene("hoist past communication", "rows", "hoist(p, 'all_gather')"),
    Scene("hoist past an op it does not read", "mixed", "hoist(p, 'all_gather', past='matmul')"),
    Scene("hoist past a softmax along the cut dim", "chunky", "hoist(p, 'slice')"),
    Scene("delay with nothing after it", "several", "delay(p, p.find_all('all_reduce')[0], past='mul')"),
    Scene("delay past a curve", "linear", "delay(p, 'all_reduce', past='tanh')"),
    Scene("delay past a product that is cut", "columns", "delay(p, 'all_reduce')"),
    Scene("delay past a shift", "linear", "delay(p, 'all_reduce', past='add')"),
    Scene("shard an input that is not there", "descent", "shard_state(p, 'q')"),
    Scene("shard what is read whole", "descent", "shard_state(p, 'm')"),
    Scene("shard what is sliced in two ways", "kept", "shard_state(p, 'k')"),
    Scene("shard what nothing reads", "columns", "shard_state(p, 'n')"),
    Scene("shard what is cut otherwise next", "columns", "shard_state(p, 'm')"),
    Scene("shard what is returned as it is", "kept", "shard_state(p, 'r')"),
    Scene("shard what nothing says how to cut", "kept", "shard_state(p, 'u', gather=True)"),
    Scene("shard after an unsunk gather", "descent", "shard_state(p, 'm')", (SPLIT,)),
    Scene("drop an output that is not there", "descent", "drop_dead(p, 'q')"),
    Scene("drop all outputs", "descent", "drop_dead(p, 'w', 'm')"),
    Scene("drop with nothing dead", "descent", "drop_dead(p)"),
    Scene("merge one", "descent", "merge(p, 'all_reduce')"),
    Scene("merge different kinds", "several", "merge(p, p.find_all('all_reduce')[0], 'all_gather')"),
    Scene("merge different axes", "twice", "merge(p, *p.find_all('all_reduce'))"),
    Scene("merge what waits", "waiting", "merge(p, *p.find_all('all_reduce'))"),
    Scene("bucket nothing fits", "several", "bucket(p, *p.find_all('all_reduce'), max_bytes=8)"),
    Scene("bucket gathers", "several", "bucket(p, 'all_gather', p.find_all('all_reduce')[0])"),
    Scene("hierarchy of one sum", "descent", "by_hierarchy(p, 'all_reduce', inside='dp')"),
    Scene("hierarchy at the inner sum", "twice", "by_hierarchy(p, p.find_all('all_reduce')[0], inside='tp')"),
    Scene("hierarchy inside no axis", "twice", "by_hierarchy(p, p.find_all('all_reduce')[1], inside='pp')"),
    Scene("shard what is sharded", "rows", "shard(p, 'reduce_scatter', axis='tp', dim=0)"),
    Scene("shard a dim that is not there", "whole", "shard(p, 'x', axis='tp', dim=3)"),
    Scene("redistribute to the same dim", "whole", "redistribute(p, 'all_gather', dim=0)", ("shard(p, 'x', axis='tp', dim=0)",)),
    Scene("redistribute to no dim", "whole", "redistribute(p, 'all_gather', dim=4)", ("shard(p, 'x', axis='tp', dim=0)",)),
    Scene("redistribute a sum", "layer", "redistribute(p, 'all_reduce', dim=0)"),
    Scene("fuse one node", "layer", "fuse(p, ['dropout'])"),
    Scene("fuse a product", "layer", "fuse(p, ['matmul', 'all_reduce'])"),
    Scene("fuse an all_to_all", "mixed", "fuse(p, ['tanh', 'all_to_all'])"),
    Scene("fuse along two axes", "mixed", "fuse(p, ['all_reduce', 'tanh', 'all_gather'])"),
    Scene("fuse two sums", "two_sums", "fuse(p, [*p.find_all('all_reduce'), 'tanh', 'mul'])"),
    Scene("fuse around a middle op", "layer", "fuse(p, [p.find_all('add')[0], p.find_all('add')[1]])"),
    Scene("fuse twice", "layer", "fuse(p, ['dropout', p.find_all('add')[1]])", ("fuse(p, [p.find_all('add')[0], 'dropout'])",)),
    Scene("fuse under a name that is taken", "several", "fuse(p, ['all_gather', 'mul'], name='k')",
          ("fuse(p, [p.find_all('all_reduce')[0], 'tanh'], name='k')",)),
    Scene("overlap one stage", "layer", "overlap(p, 'matmul', dim=0)"),
    Scene("overlap in one chunk", "layer", "overlap(p, 'matmul', 'all_reduce', dim=0, chunks=1)"),
    Scene("overlap strangers", "linear", "overlap(p, 'mul', 'tanh', dim=0, chunks=2)"),
    Scene("overlap computation alone", "layer", "overlap(p, p.find_all('add')[0], 'dropout', dim=0, chunks=2)"),
    Scene("overlap communication alone", "layer", "overlap(p, 'reduce_scatter', 'all_gather', dim=0, chunks=2)", (SPLIT,)),
    Scene("overlap in the wrong order", "two_sums", "overlap(p, p.find_all('all_reduce')[0], 'mul', 'tanh', dim=0, chunks=2)"),
    Scene("overlap leaving a middle op out", "layer", f"overlap(p, 'all_reduce', {ADDS}, dim=0, chunks=2)"),
    Scene("overlap in more chunks than rows", "layer", "overlap(p, 'matmul', 'all_reduce', dim=0, chunks=9)"),
    Scene("overlap along a dim that a softmax needs whole", "rows", "overlap(p, 'all_gather', 'softmax', dim=1, chunks=2)"),
    Scene("overlap along a dim that a product sums", "rows", "overlap(p, 'all_gather', 'matmul', dim=1, chunks=2)"),
    Scene("overlap of a softmax that makes its dim at once", "chunky",
          "overlap(p, p.find_all('softmax')[0], 'all_gather', dim=1, chunks=2)"),
    Scene("overlap around a middle op", "chunky", "overlap(p, 'all_reduce', 'mul', dim=0, chunks=2)"),
    Scene("overlap with what needs all chunks of its other operand", "chunky", "overlap(p, 'all_reduce', 'einsum', dim=0, chunks=2)"),
    Scene("overlap with a merged sum", "several", "overlap(p, 'all_reduce', p.find_all('item')[0], 'tanh', dim=0, chunks=2)",
          ("merge(p, *p.find_all('all_reduce'))",)),
    Scene("overlap twice", "layer", "overlap(p, 'matmul', 'all_reduce', dim=1, chunks=2)",
          ("overlap(p, 'matmul', 'all_reduce', dim=0, chunks=2)",)),
    Scene("split inside a kernel", "layer", "split(p, 'all_reduce', dim=0)", ("fuse(p, ['all_reduce', p.find_all('add')[0]])",)),
    Scene("undo of the first program", "descent", "undo(p)"),
    Scene("a place that is not printed", "descent", "split(p, '%99', dim=0)"),
    Scene("a place that is two", "several", "split(p, 'all_reduce', dim=0)"),
    Scene("a place that is none", "descent", "sink(p, 'all_gather')"),
]  # fmt: skip

__all__ = ["PROGRAMS", "REFUSALS", "SCENES", "R", "Scene", "run"]
