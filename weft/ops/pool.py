"""Pooling over windows of the last two dims, which stay replicated; batch and channels may be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from weft.core.errors import TypeMismatch
from weft.core.node import DTYPE_NAMES, Attrs, Node, Op, user_line
from weft.ops.conv import Pair, pair, windows
from weft.ops.opaque import opaque_grad
from weft.ops.reduce import mean
from weft.ops.registry import Equation, Kind, Linear, Types, define
from weft.ops.shape import reshape

Pool = Callable[..., torch.Tensor]
Sizes = Callable[[Pair, Attrs], Pair]


def _image(types: Types) -> Pair:
    if any(len(t.shape) != 4 for t in types):
        found = " and ".join(str(t) for t in types)
        raise TypeMismatch("pooling takes images", needed="[n, c, h, w]", found=found, where=user_line())
    return types[0].shape[2], types[0].shape[3]


def _window_places(size: Pair, attrs: Attrs) -> Pair:
    if any(2 * p > k for p, k in zip(attrs["padding"], attrs["kernel"], strict=True)):
        needed, found = "padding of at most half the kernel", f"{attrs['padding']} for a kernel of {attrs['kernel']}"
        raise TypeMismatch("a window of padding alone", needed=needed, found=found, where=user_line())
    one, two = (windows(*x) for x in zip(size, attrs["kernel"], attrs["stride"], attrs["padding"], strict=True))
    if min(one, two) < 1:
        needed, found = "at least one place for the window", f"{list(size)} and a kernel of {attrs['kernel']}"
        raise TypeMismatch("the window does not fit into the image", needed=needed, found=found, where=user_line())
    return one, two


def _forward_equation(sizes: Sizes, reduce: str = "sum") -> Callable[[Types, Attrs], Equation]:
    def equation(types: Types, attrs: Attrs) -> Equation:
        y, x = sizes(_image(types), attrs)
        return Equation((tuple("nchw"),), (tuple("ncyx"),), unsharded=frozenset("hw"), reduce=reduce, sizes={"y": y, "x": x})

    return equation


def _images(run: Pool, sizes: Sizes) -> Pool:
    """The torch function, which refuses images without channels, on any."""

    def pooled(x: torch.Tensor, **attrs: Any) -> torch.Tensor:
        shape = (*x.shape[:2], *sizes((x.shape[2], x.shape[3]), attrs))
        return run(x, **attrs) if x.numel() else x.new_zeros(shape)

    return pooled


# -- averages are linear: the backward is the transpose -------------------------------------------------------------------------------


def _linear_pool(name: str, run: Pool, sizes: Sizes) -> Op:
    """The op and, as `NAME_backward`, its transpose; each is the other's vjp."""

    def transposed(ct: torch.Tensor, size: Pair, **attrs: Any) -> torch.Tensor:
        image = ct.new_zeros((*ct.shape[:2], *size))
        return torch.func.vjp(lambda x: run(x, **attrs), image)[1](ct)[0] if ct.numel() else image

    def back_equation(types: Types, attrs: Attrs) -> Equation:
        found, needed = _image(types), sizes(attrs["size"], {k: v for k, v in attrs.items() if k != "size"})
        if found != needed:
            raise TypeMismatch("the cotangent is not of this pooling", needed=str(needed), found=str(found), where=user_line())
        (y, x) = attrs["size"]
        return Equation((tuple("ncyx"),), (tuple("nchw"),), unsharded=frozenset("yx"), sizes={"h": y, "w": x})

    def forward_attrs(n: Node) -> Attrs:
        return {k: v for k, v in n.attrs if k != "size"}

    forward = define(
        name, kind=Kind.COMPOSITE, equation=_forward_equation(sizes), run=_images(run, sizes), linear=Linear.FIRST,
        vjp=lambda n, ct: (back(ct, size=n.args[0].shape[2:], **dict(n.attrs)),),
    )  # fmt: skip
    back: Op = define(
        f"{name}_backward", kind=Kind.COMPOSITE, equation=back_equation, run=transposed, linear=Linear.FIRST,
        vjp=lambda n, ct: (forward(ct, **forward_attrs(n)),),
    )  # fmt: skip
    return forward


def _avg(x: torch.Tensor, kernel: Pair, stride: Pair, padding: Pair, count_pad: bool) -> torch.Tensor:
    return F.avg_pool2d(x, kernel, stride, padding, count_include_pad=count_pad)


_avg_pool2d = _linear_pool("avg_pool2d", _avg, _window_places)
_adaptive = _linear_pool("adaptive_avg_pool2d", lambda x, places: F.adaptive_avg_pool2d(x, places), lambda size, attrs: attrs["places"])


def avg_pool2d(x: Any, kernel: Any, stride: Any = None, padding: Any = 0, *, count_pad: bool = True) -> Any:
    """The mean of each window; with `count_pad` the zeros around the image count."""
    return _avg_pool2d(x, **_window(kernel, stride, padding), count_pad=count_pad)


def adaptive_avg_pool2d(x: Any, places: Any) -> Any:
    """Means of parts of the image. Equal parts are a plain mean, so that a sharded height or width is reduced, not gathered."""
    (rows, columns), (h, w) = pair(places), x.shape[2:]
    if h % rows or w % columns:
        return _adaptive(x, places=(rows, columns))
    return mean(reshape(x, (*x.shape[:2], rows, h // rows, columns, w // columns)), (3, 5))


def _window(kernel: Any, stride: Any, padding: Any) -> Attrs:
    return {"kernel": pair(kernel), "stride": pair(kernel if stride is None else stride), "padding": pair(padding)}


# -- the maximum ----------------------------------------------------------------------------------------------------------------------


def _max(x: torch.Tensor, kernel: Pair, stride: Pair, padding: Pair) -> torch.Tensor:
    return F.max_pool2d(x, kernel, stride, padding)


def _max_backward(x: torch.Tensor, ct: torch.Tensor, **window: Any) -> torch.Tensor:
    """Each window gives its cotangent to its first maximum."""
    if not ct.numel():
        return torch.zeros_like(x)
    _, at = F.max_pool2d(x, window["kernel"], window["stride"], window["padding"], return_indices=True)
    return torch.zeros_like(x).flatten(2).scatter_add_(2, at.flatten(2), ct.flatten(2)).reshape(x.shape)


def _max_backward_equation(types: Types, attrs: Attrs) -> Equation:
    needed = _window_places(_image(types), attrs)
    if types[1].shape[2:] != needed:
        found = str(types[1].shape[2:])
        raise TypeMismatch("the cotangent is not of this pooling", needed=str(needed), found=found, where=user_line())
    return Equation((tuple("nchw"), tuple("ncyx")), (tuple("nchw"),), unsharded=frozenset("hwyx"))


_max_pool2d: Op = define(
    "max_pool2d",
    kind=Kind.COMPOSITE,
    equation=_forward_equation(_window_places, "max"),
    run=_images(_max, _window_places),
    monotone=(frozenset({0}),),
    vjp=lambda n, ct: (_max_pool2d_backward(n.args[0], ct, **dict(n.attrs)),),
    flops=lambda n: float(math.prod(n.layout.largest_local) * math.prod(n.attr("kernel"))),
    adds_nothing=True,
)


def _max_backward_written(x: Node, ct: Node, kernel: Pair, stride: Pair, padding: Pair) -> Any:
    """As torch's own gradient, which has one in turn."""
    what = {"target": "aten.max_pool2d.default", "call": (("tensor", 0), kernel, stride, padding), "keys": ()}
    return opaque_grad(x, ct, **what, gives=((DTYPE_NAMES[x.dtype], ct.shape),), moves=(0,), of=(0,), to=(0,), operands=1)


_max_pool2d_backward: Op = define(
    "max_pool2d_backward",
    kind=Kind.COMPOSITE,
    equation=_max_backward_equation,
    run=_max_backward,
    linear=(frozenset({1}),),
    written=_max_backward_written,
)


def max_pool2d(x: Any, kernel: Any, stride: Any = None, padding: Any = 0) -> Any:
    """The maximum of each window."""
    return _max_pool2d(x, **_window(kernel, stride, padding))


__all__ = ["adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"]
