"""3. Ops from index equations: `i k, k j -> i j` says what a matmul does to sizes. It also says all there is to know about running
it in parallel: shard i, and the result is sharded along i; shard k, which the result lacks, and the result is partial. One fact is added,
in which operands the op is linear: there a partial sum may pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .layouts import P, Placement, R, Refused, S, Type
from .nodes import Node, Op


def define(name: str, equation: str, run: Callable[..., Tensor], linear: Sequence[set[int]] = ()) -> Op:
    """`*` in an equation stands for all dims of its operands. `linear` lists sets of operands, the others fixed."""
    left, right = (side.strip() for side in equation.split("->"))

    def labels(types: Sequence[Type]) -> tuple[list[list[str]], list[str]]:
        every = " ".join(f"d{i}" for i in range(len(types[0].shape)))
        ins = [part.replace("*", every).split() for part in left.split(",")]
        return ins, right.replace("*", every).split()

    def infer(types: Sequence[Type], *attrs: Any) -> Type:
        ins, out = labels(types)
        dims = bind(name, ins, types)
        placements = []
        for axis, _ in types[0].mesh.axes:
            sharded = [label for label, (_, by) in dims.items() if by == axis]
            partial = {k for k, t in enumerate(types) if t.on(axis) == P}
            if len(sharded) > 1:
                raise Refused(f"{name} needs {axis} to shard one label, found {sharded}: a rank would see only a diagonal block")
            if sharded and partial:
                raise Refused(f"{name} needs replicated operands next to what {axis} shards, found a partial sum")
            if partial and partial not in linear:
                raise Refused(f"{name} is not linear in what is partial along {axis}: all_reduce it first")
            placements.append((axis, S(out.index(sharded[0])) if sharded and sharded[0] in out else P if sharded or partial else R))
        return Type(types[0].mesh, tuple(dims[x][0] for x in out), tuple(placements))

    return Op(name, infer, run, labels)


def bind(name: str, ins: list[list[str]], types: Sequence[Type]) -> dict[str, tuple[int, str | None]]:
    """Each label with its size and the axis that shards it; all operands must agree."""
    dims: dict[str, tuple[int, str | None]] = {}
    for names, t in zip(ins, types, strict=True):
        if len(names) != len(t.shape):
            raise Refused(f"{name} needs {len(names)} dims, found {t}")
        for d, label in enumerate(names):
            if dims.setdefault(label, t.dim(d)) != t.dim(d):
                raise Refused(f"{name} needs {label} laid out the same, found {' and '.join(map(str, types))}")
    return dims


def matmul(equation: str, name: str) -> Op:
    return define(name, equation, lambda *xs: torch.einsum(equation.replace(" ", ""), *xs), linear=[{0}, {1}])


mm = matmul("i k, k j -> i j", "mm")
mm_t = matmul("i k, j k -> i j", "mm_t")  # x @ y.T
t_mm = matmul("k i, k j -> i j", "t_mm")  # x.T @ y
add = define("add", "*, * -> *", torch.add, linear=[{0, 1}])
sub = define("sub", "*, * -> *", torch.sub, linear=[{0, 1}])
mul = define("mul", "*, * -> *", torch.mul, linear=[{0}, {1}])
div = define("div", "*, * -> *", torch.div, linear=[{0}])
scale = define("scale", "* -> *", torch.mul, linear=[{0}])
above = define("above", "* -> *", lambda x, c: x.clamp(min=c))
sqrt = define("sqrt", "* -> *", torch.sqrt)
relu = define("relu", "* -> *", torch.relu)
step = define("step", "* -> *", lambda x: (x > 0).to(x.dtype))

# -- communication -----------------------------------------------------------------------------------------------------------
#
# A collective is a change of placement along one axis. That is its type, and it is also its meaning.


def communication(name: str, before: Callable[..., Placement], after: Callable[..., Placement]) -> Op:
    def infer(types: Sequence[Type], axis: str, *dim: int) -> Type:
        (t,) = types
        if t.on(axis) != before(*dim):
            raise Refused(f"{name} along {axis} needs {before(*dim)}, found {t}")
        return t.place(axis, after(*dim))

    return Op(name, infer, moves=(before, after))


all_reduce = communication("all_reduce", lambda: P, lambda: R)
reduce_scatter = communication("reduce_scatter", lambda d: P, S)
all_gather = communication("all_gather", S, lambda d: R)
slice_ = communication("slice", lambda d: R, S)


def bring(x: Node, axis: str, want: Placement) -> Node:
    """The value laid out as wanted along the axis, by explicit communication. Nothing makes a value partial again."""
    here = x.type.on(axis)
    if here == want:
        return x
    if here == P:
        return all_reduce(x, axis) if want == R else reduce_scatter(x, axis, want.dim)
    if here != R:
        x = all_gather(x, axis, here.dim)
    return x if want == R else slice_(x, axis, want.dim)
