"""Grows a random program node by node, and knows every node's global value as it goes.

Values keep the program honest: a node whose value is not finite, is large, or lies on the edge of a jump is not taken, so a
difference between two runs is a difference in meaning and not in rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.core.errors import LayoutError, TypeMismatch
from weft.core.layout import Layout, Mesh, O, P, Placement, R, S
from weft.core.node import Node, Type, dtype_of, toposort
from weft.ops import comm
from weft.ops.source import input_node
from weft.plan.space import divisors
from weft.testing.values import draw, seed_of

EDGE = 1e-5  # no value that decides something is nearer to the point of decision
LARGE = 1e3
Test = Callable[[Node], bool]


class Stuck(Exception):
    """Nothing here fits the op; try another."""


class Maker:
    """A pool of nodes, the inputs they came from, and their values."""

    def __init__(self, rng: random.Random, mesh: Mesh, seed: int = 0) -> None:
        self.rng, self.mesh, self.seed = rng, mesh, seed
        self.sizes = [rng.randint(1, 6) for _ in range(3)]
        self.pool: list[Node] = []
        self.inputs: list[Node] = []
        self.kinds: dict[str, str] = {}
        self.values: dict[Node, Any] = {}
        self.state: list[tuple[Node, Node]] = []  # (next value, input)

    # -- inputs ----------------------------------------------------------------------------------------------------------

    def shape(self, least: int = 0, most: int = 3) -> tuple[int, ...]:
        rank = min(max(self.rng.choice((0, 1, 1, 2, 2, 2, 3)), least), most)
        return tuple(self.rng.choice(self.sizes) for _ in range(rank))

    def input(
        self, shape: Sequence[int], places: Mapping[str, Placement] | None = None, *, dtype: str = "f64", kind: str = "normal"
    ) -> Node:
        """A new input, with the placements given or, if none are, any."""
        layout = self.layout(tuple(shape), dtype != "bool") if places is None else Layout.of(self.mesh, tuple(shape), places)
        name = f"x{len(self.inputs)}"
        node = input_node(name, Type(dtype_of(dtype), layout))
        self.inputs.append(node)
        self.kinds[name] = kind
        self.values[node] = draw(node.type, kind, seed_of(name, self.seed))
        self.pool.append(node)
        return node

    def layout(self, shape: tuple[int, ...], sums: bool = True) -> Layout:
        layout = Layout.of(self.mesh, shape)
        for axis in self.mesh.axes:
            try:
                layout = layout.place(axis, self.placement(shape, axis, sums))
            except LayoutError:  # the axis then holds the full value
                continue
        return layout

    def placement(self, shape: tuple[int, ...], axis: str, sums: bool) -> Placement:
        what = self.rng.choices(("R", "S", "P", "O", "inner", "order"), (30, 35, 24, 4, 5, 2))[0]
        if what in ("S", "inner") and shape:
            dim = self.rng.randrange(len(shape))
            return S(dim, self.rng.choice([None, *divisors(shape[dim])]) if what == "inner" else None)
        if what in ("P", "order") and sums:
            return P(self.rng.choice(("max", "min"))) if what == "order" else P()
        return O(self.rng.randrange(self.mesh.sizes[axis])) if what == "O" else R

    # -- operands --------------------------------------------------------------------------------------------------------

    def pick(self, *tests: Test) -> Node | None:
        """A node of the pool that passes, late ones more often."""
        found = [n for n in self.pool if all(t(n) for t in tests)]
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))] if found else None

    def some(self, least: int = 0, most: int = 3, dtype: str = "f64", kind: str = "normal", test: Test | None = None) -> Node:
        """A node of the pool of so many dims, or a new input."""
        tests = [lambda n: least <= n.ndim <= most and n.dtype == dtype_of(dtype), *([test] if test else [])]
        got = self.pick(*tests) if self.rng.random() < 0.85 else None
        return got or self.input(self.shape(least, most), dtype=dtype, kind=kind)

    def sized(self, shape: Sequence[int], dtype: str = "f64", kind: str = "normal", test: Test | None = None) -> Node:
        """A node of the pool of this shape, or a new input."""
        want = tuple(shape)
        tests = [lambda n: n.shape == want and n.dtype == dtype_of(dtype), *([test] if test else [])]
        got = self.pick(*tests) if self.rng.random() < 0.8 else None
        return got or self.input(want, dtype=dtype, kind=kind)

    def index(self, below: int, shape: Sequence[int]) -> Node:
        """Integers below a bound."""
        return self.sized(shape, "i64", f"below {below}", lambda n: _within(self.value(n), below))

    def positive(self, shape: Sequence[int] | None = None) -> Node:
        fits: Test = lambda n: shape is None or n.shape == tuple(shape)  # noqa: E731
        found = self.pick(lambda n: n.dtype == torch.float64, fits, lambda n: _least(self.value(n)) > 0.05)
        return found or self.input(self.shape() if shape is None else shape, kind="positive")

    def dim(self, x: Node) -> int:
        if not x.ndim:
            raise Stuck
        return self.rng.randrange(x.ndim)

    # -- nodes -----------------------------------------------------------------------------------------------------------

    def emit(self, fn: Callable[..., Any], *args: Node) -> Any:
        """fn on operands brought by random communication to layouts it takes."""
        now = list(args)
        for attempt in range(5):
            try:
                return self.keep(fn(*now))
            except (TypeMismatch, LayoutError):
                if attempt == 1:
                    now = [self._aligned(a, now[0]) for a in now]
                else:
                    k = self.rng.randrange(len(now))
                    now[k] = self.move(now[k], towards_replicated=self.rng.random() < 0.7)
        return self.make(lambda: fn(*map(self.replicated, now)))

    def make(self, fn: Callable[[], Any]) -> Any:
        """What fn gives, taken into the pool; stuck where it does not fit."""
        try:
            return self.keep(fn())
        except (TypeMismatch, LayoutError) as e:
            raise Stuck from e

    def keep(self, made: Any, steady: bool = True) -> Any:
        """Takes a node, or all values of one, into the pool if its values are sound."""
        nodes = [n for x in (made if isinstance(made, (tuple, list)) else [made]) for n in (list(x) if len(x.types) > 1 else [x])]
        if any(not self._is_sound(n, steady) for n in nodes):
            raise Stuck
        self.pool += [n for n in nodes if n not in self.pool]
        return made

    def one(self, made: Node) -> Node:
        """Takes one node into the pool."""
        self.keep(made)
        return made

    def _is_sound(self, node: Node, steady: bool) -> bool:
        for n in toposort([node]):
            if n not in self.values:
                args = [self.values[a] for a in n.args]
                if steady and not is_steady(n, args):
                    return False
                self.values[n] = n.op.run(*args, **dict(n.attrs))
        value = self.values[node]
        return not node.dtype.is_floating_point or bool(torch.isfinite(value).all() and (value.abs() < LARGE).all())

    def value(self, node: Node) -> torch.Tensor:
        return self.values[node]

    # -- communication ---------------------------------------------------------------------------------------------------

    def move(self, x: Node, axis: str | None = None, towards_replicated: bool = False) -> Node:
        """One random layout change, or the node itself where none is possible."""
        axis = axis or self.rng.choice(self.mesh.axes)
        try:
            return self.one(self._moved(x, axis, towards_replicated))
        except (LayoutError, TypeMismatch, Stuck):
            return x

    def _moved(self, x: Node, axis: str, towards_replicated: bool) -> Any:
        place, rng, ranks = x.type.on(axis), self.rng, self.mesh.sizes[axis]
        dim = rng.randrange(x.ndim) if x.ndim else None
        other = not towards_replicated and rng.random() < 0.6
        if isinstance(place, P):
            if dim is not None and rng.random() < 0.3:
                return comm.reduce_scatter(x, axis=axis, dim=dim)
            return comm.reduce_(x, axis=axis, root=rng.randrange(ranks)) if other and rng.random() < 0.3 else comm.all_reduce(x, axis=axis)
        if isinstance(place, S):
            return comm.all_to_all(x, axis=axis, dim=dim) if other and dim != place.dim else comm.all_gather(x, axis=axis)
        if isinstance(place, O):
            return comm.send(x, axis=axis, to=rng.randrange(ranks)) if other and rng.random() < 0.3 else comm.broadcast(x, axis=axis)
        if towards_replicated or dim is None:
            return x
        return comm.slice_(x, axis=axis, dim=dim) if rng.random() < 0.9 else comm.keep(x, axis=axis, root=rng.randrange(ranks))

    def replicated(self, x: Node) -> Node:
        """Replicated along every axis."""
        return self.one(comm.reshard(x, Layout.of(self.mesh, x.shape)))

    def _aligned(self, x: Node, like: Node) -> Node:
        """In the layout of another value of the same shape, where that can be reached."""
        try:
            return self.one(comm.reshard(x, like.layout)) if x.shape == like.shape else x
        except (LayoutError, TypeMismatch):
            return x


def _within(x: torch.Tensor, below: int) -> bool:
    return bool(((x >= 0) & (x < below)).all())


def _least(x: torch.Tensor) -> float:
    return float(x.min()) if x.numel() else 1.0


# -- where rounding could decide ---------------------------------------------------------------------------------------------------


def _disjoint(*xs: torch.Tensor) -> torch.Tensor:
    return (xs[0].double() - xs[1].double()).abs()


def _gaps(x: torch.Tensor, **_: Any) -> torch.Tensor:
    """Distances between neighbours in order."""
    return torch.sort(x.double().reshape(-1)).values.diff()


def _to_whole(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return (x.double() - x.double().round()).abs()


def _casting(x: torch.Tensor, dtype: str) -> torch.Tensor:
    jumps = x.dtype.is_floating_point and not dtype_of(dtype).is_floating_point
    return _to_whole(x) if jumps else torch.ones(())


def _clamping(x: torch.Tensor, lo: float | None = None, hi: float | None = None) -> torch.Tensor:
    return torch.stack([(x - b).abs() for b in (lo, hi) if b is not None])


def _above(least: float) -> Callable[..., torch.Tensor]:
    return lambda x, *_, **__: x.double() - least


def _floats(test: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *xs, **attrs: test(*xs, **attrs) if xs[0].dtype.is_floating_point else torch.ones(())


# How far each op's operands are from where its result jumps, bends, or stops to exist.
DISTANCE: Mapping[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "maximum", "minimum"), _floats(_disjoint)),
    **dict.fromkeys(("amax", "amin", "sort", "topk", "argmax"), _floats(_gaps)),
    **dict.fromkeys(("relu", "abs", "sign"), lambda x: x.abs()),
    **dict.fromkeys(("log", "sqrt", "rsqrt", "pow"), _above(0.02)),
    "relu_backward": lambda ct, y: y.abs(),
    "max_pool2d": _gaps,
    "floor": _to_whole,
    "div": lambda a, b: b.abs() - 0.02,
    "cast": _casting,
    "clamp": _clamping,
}


def is_steady(node: Node, args: Sequence[Any]) -> bool:
    """Whether rounding of the operands cannot change the result by more than rounding."""
    far = DISTANCE.get(node.op.name)
    if far is None:
        return True
    distance = far(*args, **dict(node.attrs))
    return not distance.numel() or float(distance.min()) > EDGE
