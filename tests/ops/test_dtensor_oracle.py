"""DTensor as an outside judge: where its own propagation keeps all operands as they are, weft takes them and gives the same layout.

Every combination of whole, cut and pending operands on one axis, and for small ops on two, is run on real DTensors; those
that DTensor redistributes first are left out. `EXCEPTIONS` lists all that weft does not say alike, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dispatch
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.dtensors import device_mesh, from_placements
from tests.ops.harness import as_list
from weft.core.errors import LayoutError, TypeMismatch
from weft.core.layout import Layout, Mesh
from weft.core.node import Type
from weft.ops import attention, conv, embed, linalg, norm, order, pointwise, pool, reduce, shape
from weft.ops.source import input_node

ONE, TWO = Mesh(a=2), Mesh(a=2, b=2)
FLOAT, INDEX = torch.float32, torch.int64


@dataclass(frozen=True)
class Ask:
    """One op as DTensor runs it and as weft types it."""

    name: str
    torch_fn: Callable[..., Any]
    weft_fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    two: bool = False  # also on two axes
    device: str = "cpu"

    def __str__(self) -> str:
        return self.name


def ask(name: str, torch_fn: Any, weft_fn: Any, *shapes: tuple[int, ...], dtypes: Any = None, **more: Any) -> Ask:
    return Ask(name, torch_fn, weft_fn, shapes, dtypes or (FLOAT,) * len(shapes), **more)


M, V = (4, 8), (8,)
HEADS = (2, 4, 6, 8)


def _flash(q: Any, k: Any, v: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v)[:2]


ASKS = [
    *(ask(n, getattr(torch, n), getattr(pointwise, n), M) for n in ("exp", "neg", "tanh", "relu", "sigmoid", "sqrt")),
    *(ask(n, getattr(torch, n), getattr(pointwise, n), M, M, two=n == "mul") for n in ("add", "sub", "mul", "div", "maximum", "gt")),
    ask("gelu", F.gelu, pointwise.gelu, M),
    ask("silu", F.silu, pointwise.silu, M),
    ask("add of a number", lambda x: x + 1.0, lambda x: x + 1.0, M),
    ask("mul by a number", lambda x: x * 2.0, lambda x: x * 2.0, M),
    ask("add stretched", torch.add, pointwise.add, M, V),
    ask("mul stretched", torch.mul, pointwise.mul, M, (4, 1)),
    ask("where", lambda c, x, y: torch.where(c, x, y), pointwise.where, M, M, M, dtypes=(torch.bool, FLOAT, FLOAT)),
    ask("cast", lambda x: x.to(torch.bfloat16), lambda x: pointwise.cast(x, dtype="bf16"), M),
    ask("matmul", torch.mm, linalg.matmul, (4, 6), (6, 8), two=True),
    ask("batched matmul", torch.bmm, linalg.matmul, (2, 4, 6), (2, 6, 8)),
    ask("linear", F.linear, lambda x, w: linalg.einsum("bsi,oi->bso", x, w), (2, 4, 6), (8, 6)),
    ask("sum", lambda x: x.sum(1), lambda x: reduce.sum_(x, dims=1), M, two=True),
    ask("sum of all", torch.sum, reduce.sum_, M),
    ask("sum kept", lambda x: x.sum(0, keepdim=True), lambda x: reduce.sum_(x, dims=0, keepdim=True), M),
    ask("mean", lambda x: x.mean(1), lambda x: reduce.mean(x, dims=1), M),
    ask("amax", lambda x: x.amax(1), lambda x: reduce.amax(x, dims=1), M),
    ask("amin", lambda x: x.amin(0), lambda x: reduce.amin(x, dims=0), M),
    ask("cumsum", lambda x: x.cumsum(1), lambda x: order.cumsum(x, 1), M),
    ask("argmax", lambda x: x.argmax(1), lambda x: order.argmax(x, 1), M),
    ask("softmax", lambda x: F.softmax(x, -1), lambda x: norm.softmax(x, -1), (2, 4, 8)),
    ask("log_softmax", lambda x: F.log_softmax(x, 0), lambda x: norm.log_softmax(x, 0), M),
    ask("layer_norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), norm.layer_norm, (2, 4, 8), V, V),
    ask("rms_norm", lambda x, w: torch.ops.aten._fused_rms_norm(x, [8], w, 1e-6)[0], norm.rms_norm, M, V),
    ask("embedding", lambda w, i: F.embedding(i, w), embed.embedding, (8, 6), (2, 4), dtypes=(FLOAT, INDEX)),
    ask("attention", _flash, attention.attention, HEADS, HEADS, HEADS, device="meta", dtypes=(torch.bfloat16,) * 3),
    ask("view that merges", lambda x: x.view(8, 6), lambda x: shape.reshape(x, 8, 6), (2, 4, 6), two=True),
    ask("view that splits", lambda x: x.view(2, 4, 6), lambda x: shape.reshape(x, 2, 4, 6), (8, 6), two=True),
    ask("transpose", lambda x: x.t(), shape.transpose, M, two=True),
    ask("permute", lambda x: x.permute(2, 0, 1), lambda x: shape.permute(x, 2, 0, 1), (2, 4, 6)),
    ask("unsqueeze", lambda x: x.unsqueeze(1), lambda x: shape.reshape(x, 4, 1, 8), M),
    ask("expand", lambda x: x.expand(4, 8), lambda x: shape.expand(x, (4, 8)), (1, 8)),
    ask("narrow", lambda x: x[1:3], lambda x: shape.narrow(x, 0, 1, 3), M),
    ask("concat", lambda x, y: torch.cat([x, y], 0), lambda x, y: shape.concat([x, y], 0), M, M),
    ask("pad", lambda x: F.pad(x, (1, 1)), lambda x: shape.pad(x, 1, 1, 1), M),
    ask("conv2d", F.conv2d, conv.conv2d, (2, 4, 6, 6), (8, 4, 3, 3)),
    ask("avg_pool2d", lambda x: F.avg_pool2d(x, 2), lambda x: pool.avg_pool2d(x, 2), (2, 4, 6, 6)),
]

EXCEPTIONS: dict[str, tuple[str, set[str]]] = {
    "mean": ("DTensor averages pending terms; weft divides by the global count first, and the terms are a sum", {"S(1)"}),
    "argmax": ("DTensor's handler gathers inside the op; weft's communication is never implied", {"P", "S(1)"}),
    "conv2d": (
        "DTensor's handler runs the local convolution and exchanges halos inside the op; it calls a result whole though its "
        "channels are cut or its terms pending",
        {
            "R ; P", "R ; S(0)", "P ; R", "P ; P", "P ; S(0)", "S(0) ; P", "S(0) ; S(0)", "S(1) ; S(1)",
            "S(2) ; R", "S(2) ; P", "S(2) ; S(0)", "S(3) ; R", "S(3) ; P", "S(3) ; S(0)",
        },
    ),
}  # fmt: skip


# -- DTensor ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@contextmanager
def noticing(moved: list[Any]) -> Iterator[None]:
    """Notes every operand that DTensor redistributes before it runs an op."""
    inner = _dispatch.redistribute_local_tensor

    def spy(local: Any, current: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if current.placements != target.placements:
            moved.append((current, target))
        return inner(local, current, target, *args, **kwargs)

    _dispatch.redistribute_local_tensor = spy
    try:
        yield
    finally:
        _dispatch.redistribute_local_tensor = inner


def kept(a: Ask, mesh: Mesh, combo: tuple[tuple[Any, ...], ...]) -> list[Any] | None:
    """What DTensor gives when it keeps the operands as they are, else None."""
    devices = device_mesh(mesh) if mesh is TWO else device_mesh(TWO)["a"]
    args = [_operand(s, d, p, devices, a.device) for s, d, p in zip(a.shapes, a.dtypes, combo, strict=True)]
    moved: list[Any] = []
    try:
        with noticing(moved):
            outs = as_list(a.torch_fn(*args))
    except (RuntimeError, NotImplementedError, ValueError, AssertionError):  # DTensor has no such rule
        return None
    return None if moved else outs


def _operand(size: tuple[int, ...], dtype: torch.dtype, placements: tuple[Any, ...], devices: Any, device: str) -> Any:
    local = list(size)
    for p in placements:
        if isinstance(p, Shard):
            local[p.dim] //= 2
    value = torch.ones(local, dtype=dtype, device=device)
    return DTensor.from_local(value, devices, placements, run_check=False, shape=torch.Size(size), stride=torch.ones(size).stride())


def combos(a: Ask, mesh: Mesh) -> Iterator[tuple[tuple[Any, ...], ...]]:
    def one(size: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Any, ...]]:
        single = [Replicate(), *([Partial()] if dtype.is_floating_point else []), *(Shard(d) for d in range(len(size)))]
        every = itertools.product(single, repeat=len(mesh.axes))
        return [p for p in every if all(_held(size, p, d) > 0 for d in range(len(size)))]

    return itertools.product(*(one(s, d) for s, d in zip(a.shapes, a.dtypes, strict=True)))


def _held(size: tuple[int, ...], placements: tuple[Any, ...], dim: int) -> int:
    """What is left of a dim; 0 where the cuts do not divide it."""
    parts = 2 ** sum(isinstance(p, Shard) and p.dim == dim for p in placements)
    return 0 if size[dim] % parts else size[dim] // parts


# -- weft ------------------------------------------------------------------------------------------------------------------------


def layout_of(mesh: Mesh, size: tuple[int, ...], placements: tuple[Any, ...]) -> Layout:
    """The layout that placements give; the mask that DTensor's embedding keeps with its Partial is no part of the value."""
    plain = tuple(Partial() if type(p).__name__ in ("MaskPartial", "_MaskPartial") else p for p in placements)
    return from_placements(mesh, size, plain)


def said(a: Ask, mesh: Mesh, combo: tuple[tuple[Any, ...], ...]) -> list[Layout] | None:
    """The layouts weft gives, or None where it refuses or would communicate."""
    types = [Type(d, layout_of(mesh, s, p)) for s, d, p in zip(a.shapes, a.dtypes, combo, strict=True)]
    nodes = [input_node(f"x{k}", t) for k, t in enumerate(types)]
    try:
        return [n.layout for n in as_list(a.weft_fn(*nodes))]
    except (TypeMismatch, LayoutError):
        return None


def differences(a: Ask, mesh: Mesh) -> tuple[int, dict[str, str]]:
    """How many combinations DTensor keeps, and those that weft does not say alike."""
    count, found = 0, {}
    for combo in combos(a, mesh):
        outs = kept(a, mesh, combo)
        if outs is None:
            continue
        count += 1
        mine = said(a, mesh, combo)
        theirs = [o.placements for o in outs]
        if mine is None or not all(_alike(x, o) for x, o in zip(mine, outs, strict=True)):
            found[" ; ".join(_show(p) for p in combo)] = f"{[_show(p) for p in theirs]} against {mine and list(map(str, mine))}"
    return count, found


def _alike(mine: Layout, theirs: Any) -> bool:
    try:
        return mine == layout_of(mine.mesh, tuple(theirs.shape), theirs.placements)
    except LayoutError:
        return False


def _show(placements: tuple[Any, ...]) -> str:
    return ",".join("P" if type(p).__name__.endswith("Partial") and p.reduce_op == "sum" else str(p) for p in placements)


@pytest.mark.parametrize("a", ASKS, ids=str)
def test_what_dtensor_keeps_weft_keeps(a: Ask) -> None:
    count, found = differences(a, ONE)
    assert count > 0
    if a.two:
        more, also = differences(a, TWO)
        assert more > count
        found |= also
    _, listed = EXCEPTIONS.get(a.name, ("", set()))
    assert set(found) <= listed, "\n".join(f"{a.name}: {k}: {v}" for k, v in found.items() if k not in listed)


def test_exceptions_are_of_ops_asked_for() -> None:
    assert set(EXCEPTIONS) <= {a.name for a in ASKS}
