"""Convolution over the last two dims, and its two gradients.

Channels in groups are dims of their own, so a sharding along groups is a sharding of one label: x is [n, c, h, w] or [n, g, c, h, w].
The window dims are never sharded; `conv2d_halo` shards one of them, each rank getting the rows it lacks from its neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from weft.core.errors import TypeMismatch
from weft.core.layout import S
from weft.core.node import Attrs, Node, Op, user_line
from weft.ops.comm import all_gather, slice_
from weft.ops.linalg import einsum_mod
from weft.ops.registry import Equation, Kind, Linear, Types, define
from weft.ops.shape import concat, narrow, pad, permute, reshape

Pair: TypeAlias = tuple[int, int]


def pair(x: Any) -> Pair:
    return (x, x) if isinstance(x, int) else (int(x[0]), int(x[-1]))


def windows(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """How many places a window has along a dim."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _places(size: Any, kernel: Any, attrs: Attrs) -> Pair:
    one, two = (windows(*x) for x in zip(size, kernel, attrs["stride"], attrs["padding"], attrs["dilation"], strict=True))
    if min(one, two) < 1:
        found = f"{list(size)} with padding {attrs['padding']}, a kernel of {list(kernel)} dilated by {attrs['dilation']}"
        raise TypeMismatch("the kernel does not fit into the image", needed="at least one place for it", found=found, where=user_line())
    return one, two


# -- conv2d, and its gradients by input and by weight -----------------------------------------------------------------------------


def _labels(types: Types, *operands: str) -> tuple[tuple[str, ...], ...]:
    """Labels of image-like operands; with five dims, groups stand before the channels."""
    if len({len(t.shape) for t in types}) != 1 or len(types[0].shape) not in (4, 5):
        needed = "two operands of 4 dims, or of 5 with groups"
        found = " and ".join(f"{len(t.shape)} dims" for t in types)
        raise TypeMismatch("a convolution takes images and kernels", needed=needed, found=found, where=user_line())
    grouped = len(types[0].shape) == 5
    return tuple(tuple(x for x in text.split() if grouped or x != "g") for text in operands)


IMAGE, KERNEL, RESULT = "n g c h w", "g o c kh kw", "n g o y x"
UNSHARDED = frozenset({"h", "w", "kh", "kw", "y", "x"})


def _conv_equation(types: Types, attrs: Attrs) -> Equation:
    x, w, y = _labels(types, IMAGE, KERNEL, RESULT)
    sizes = zip(("y", "x"), _places(types[0].shape[-2:], types[1].shape[-2:], attrs), strict=True)
    return Equation((x, w), (y,), unsharded=UNSHARDED, sizes=dict(sizes))


def _input_grad_equation(types: Types, attrs: Attrs) -> Equation:
    y, w, x = _labels(types, RESULT, KERNEL, IMAGE)
    _require_places(attrs["size"], types[1].shape[-2:], types[0].shape[-2:], attrs)
    return Equation((y, w), (x,), unsharded=UNSHARDED, sizes=dict(zip(("h", "w"), attrs["size"], strict=True)))


def _weight_grad_equation(types: Types, attrs: Attrs) -> Equation:
    x, y, w = _labels(types, IMAGE, RESULT, KERNEL)
    _require_places(types[0].shape[-2:], attrs["kernel"], types[1].shape[-2:], attrs)
    return Equation((x, y), (w,), unsharded=UNSHARDED, sizes=dict(zip(("kh", "kw"), attrs["kernel"], strict=True)))


def _require_places(size: Any, kernel: Any, found: Any, attrs: Attrs) -> None:
    needed = _places(size, kernel, attrs)
    if needed != tuple(found):
        raise TypeMismatch("the cotangent is not of this convolution", needed=str(list(needed)), found=str(list(found)), where=user_line())


def _groups(kernel_like: torch.Tensor) -> int:
    return kernel_like.shape[0] if kernel_like.ndim == 5 else 1


def _flat_image(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1, 2) if x.ndim == 5 else x


def _flat_kernel(w: torch.Tensor) -> torch.Tensor:
    return w.flatten(0, 1) if w.ndim == 5 else w


def _conv(x: torch.Tensor, w: torch.Tensor, **how: Any) -> torch.Tensor:
    shape = (*x.shape[:-3], w.shape[-4], *_places(x.shape[-2:], w.shape[-2:], how))
    if 0 in x.shape or 0 in w.shape:
        return x.new_zeros(shape)
    return F.conv2d(_flat_image(x), _flat_kernel(w), None, groups=_groups(w), **how).reshape(shape)


def _input_grad(y: torch.Tensor, w: torch.Tensor, size: Pair, **how: Any) -> torch.Tensor:
    shape = (*y.shape[:-3], w.shape[-3], *size)
    if 0 in y.shape or 0 in w.shape:
        return y.new_zeros(shape)
    flat = (shape[0], math.prod(shape[1:-2]), *size)
    return torch.nn.grad.conv2d_input(flat, _flat_kernel(w), _flat_image(y), groups=_groups(w), **how).reshape(shape)


def _weight_grad(x: torch.Tensor, y: torch.Tensor, kernel: Pair, **how: Any) -> torch.Tensor:
    groups = x.shape[1] if x.ndim == 5 else 1
    shape = (*x.shape[1:-3], y.shape[-3], x.shape[-3], *kernel)
    if 0 in x.shape or 0 in y.shape:
        return x.new_zeros(shape)
    flat = (groups * y.shape[-3], x.shape[-3], *kernel)
    return torch.nn.grad.conv2d_weight(_flat_image(x), flat, _flat_image(y), groups=groups, **how).reshape(shape)


# Over a prime field: one matmul per place in the kernel.


def _tap(x: torch.Tensor, at: Pair, places: Pair, how: Attrs) -> torch.Tensor:
    """The elements of a padded image that one place of the kernel meets."""
    (dy, dx), (sy, sx), (i, j) = how["dilation"], how["stride"], at
    return x[..., i * dy : i * dy + (places[0] - 1) * sy + 1 : sy, j * dx : j * dx + (places[1] - 1) * sx + 1 : sx]


def _padded(x: torch.Tensor, how: Attrs) -> torch.Tensor:
    (py, px) = how["padding"]
    return F.pad(x, [px, px, py, py])


def _spots(kernel: Any) -> Iterator[Pair]:
    return itertools.product(range(kernel[0]), range(kernel[1]))


def _letters(x: torch.Tensor) -> tuple[str, str, str]:
    return ("nghyx", "goh", "ngoyx") if x.ndim == 5 else ("nhyx", "oh", "noyx")


def _conv_field(p: int, x: torch.Tensor, w: torch.Tensor, **how: Any) -> torch.Tensor:
    places, (a, b, c) = _places(x.shape[-2:], w.shape[-2:], how), _letters(x)
    wide = _padded(x, how)
    terms = [einsum_mod(p, f"{a},{b}->{c}", _tap(wide, at, places, how), w[..., at[0], at[1]]) for at in _spots(w.shape[-2:])]
    return torch.stack(terms).sum(0) % p


def _input_grad_field(p: int, y: torch.Tensor, w: torch.Tensor, size: Pair, **how: Any) -> torch.Tensor:
    a, b, c = _letters(y)
    wide = _padded(y.new_zeros((*y.shape[:-3], w.shape[-3], *size)), how)
    for at in _spots(w.shape[-2:]):
        _tap(wide, at, (y.shape[-2], y.shape[-1]), how).add_(einsum_mod(p, f"{c},{b}->{a}", y, w[..., at[0], at[1]])).remainder_(p)
    (py, px) = how["padding"]
    return wide[..., py : py + size[0], px : px + size[1]]


def _weight_grad_field(p: int, x: torch.Tensor, y: torch.Tensor, kernel: Pair, **how: Any) -> torch.Tensor:
    (a, b, c), wide = _letters(x), _padded(x, how)
    places = (y.shape[-2], y.shape[-1])
    taps = [einsum_mod(p, f"{a},{c}->{b}", _tap(wide, at, places, how), y) for at in _spots(kernel)]
    return torch.stack(taps, -1).reshape(*taps[0].shape, *kernel)


def _how(n: Node) -> Attrs:
    return {k: n.attr(k) for k in ("stride", "padding", "dilation")}


def _size(x: Node) -> Pair:
    return x.shape[-2], x.shape[-1]


def _work(image: Node, kernel: Pair, result: Node) -> float:
    """Two flops per element of the result, channel of the image and place in the kernel."""
    return 2.0 * math.prod(result.layout.largest_local) * image.layout.largest_local[-3] * math.prod(kernel)


_conv2d: Op = define(
    "conv2d",
    kind=Kind.COMPOSITE,
    equation=_conv_equation,
    run=_conv,
    linear=Linear.EACH,
    vjp=lambda n, ct: (
        conv2d_input_grad(ct, n.args[1], size=_size(n.args[0]), **_how(n)),
        conv2d_weight_grad(n.args[0], ct, kernel=_size(n.args[1]), **_how(n)),
    ),
    field=_conv_field,
    flops=lambda n: _work(n.args[0], _size(n.args[1]), n),
)

conv2d_input_grad: Op = define(
    "conv2d_input_grad",
    kind=Kind.COMPOSITE,
    equation=_input_grad_equation,
    run=_input_grad,
    linear=Linear.EACH,
    vjp=lambda n, ct: (
        _conv2d(ct, n.args[1], **_how(n)),
        conv2d_weight_grad(ct, n.args[0], kernel=_size(n.args[1]), **_how(n)),
    ),
    field=_input_grad_field,
    flops=lambda n: _work(n, _size(n.args[1]), n.args[0]),
)

conv2d_weight_grad: Op = define(
    "conv2d_weight_grad",
    kind=Kind.COMPOSITE,
    equation=_weight_grad_equation,
    run=_weight_grad,
    linear=Linear.EACH,
    vjp=lambda n, ct: (
        conv2d_input_grad(n.args[1], ct, size=_size(n.args[0]), **_how(n)),
        _conv2d(n.args[0], ct, **_how(n)),
    ),
    field=_weight_grad_field,
    flops=lambda n: _work(n.args[0], n.attr("kernel"), n.args[1]),
)


def conv2d(x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """torch's conv2d. Batch, channels and groups may be sharded; a sharding of the channels summed over leaves the result Partial."""
    how = {"stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation)}
    if groups == 1:
        y = _conv2d(x, w, **how)
    else:
        y = _conv2d(_split_groups(x, 1, groups), _split_groups(w, 0, groups), **how)
        y = reshape(y, (y.shape[0], y.shape[1] * y.shape[2], *y.shape[3:]))
    return y if bias is None else y + reshape(bias, (1, bias.shape[0], 1, 1))


def _split_groups(x: Node, dim: int, groups: int) -> Any:
    if x.shape[dim] % groups:
        raise TypeMismatch(f"{groups} groups do not fit", needed=f"channels divisible by {groups}", found=str(x.type), where=user_line())
    return reshape(x, (*x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :]))


# -- space sharded: rows from the neighbours ------------------------------------------------------------------------------------------


def conv2d_halo(x: Any, w: Any, bias: Any = None, *, axis: str, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Any:
    """conv2d on images whose height or width is sharded along `axis`; the edges the windows reach over are gathered first."""
    place, ranks = x.type.on(axis), x.mesh.size(axis)
    if not isinstance(place, S) or place.dim not in (2, 3) or place.within is not None:
        needed = f"{axis}:S(2) or {axis}:S(3) in its images"
        raise TypeMismatch("conv2d_halo has no sharding to bridge", needed=needed, found=str(x.type), where=user_line())
    dim, k = place.dim, place.dim - 2
    s, p, d = pair(stride)[k], pair(padding)[k], pair(dilation)[k]
    after = d * (w.shape[dim] - 1) + 1 - s - p
    _require_even(x, dim, ranks, s, p, after, windows(x.shape[dim], w.shape[dim], s, p, d))
    z = _with_edges(_blocks(x, dim, ranks), axis, dim, p, after)
    inside = tuple(0 if i == k else n for i, n in enumerate(pair(padding)))
    return _unblocked(conv2d(z, w, bias, stride=stride, padding=inside, dilation=dilation), x.shape[0], dim, ranks)


def _require_even(x: Node, dim: int, ranks: int, stride: int, before: int, after: int, places: int) -> None:
    size = x.shape[dim]
    if size % (ranks * stride) or places != size // stride or max(before, after) > size // ranks:
        raise TypeMismatch(
            "conv2d_halo cannot share the windows evenly",
            needed=f"a size divisible by {ranks} x {stride}, one window per {stride}, reaching no further than the next rank",
            found=f"{size} with {places} windows that reach {before} before and {max(after, 0)} after a rank's part",
            try_="all_gather it and use conv2d",
            where=user_line(),
        )


def _blocks(x: Node, dim: int, ranks: int) -> Any:
    """Every rank's part along a dim of its own, just before the dim."""
    return reshape(x, (*x.shape[:dim], ranks, x.shape[dim] // ranks, *x.shape[dim + 1 :]))


def _with_edges(x: Node, axis: str, dim: int, before: int, after: int) -> Any:
    """Blocks with the neighbours' edges put on, zeros at the ends, as images of a longer batch."""
    size, parts = x.shape[dim + 1], [x if after >= 0 else narrow(x, dim + 1, 0, x.shape[dim + 1] + after)]
    if before:
        parts.insert(0, _shifted(narrow(x, dim + 1, size - before, size), axis, dim, 1))
    if after > 0:
        parts.append(_shifted(narrow(x, dim + 1, 0, after), axis, dim, -1))
    z = concat(parts, dim + 1) if len(parts) > 1 else parts[0]
    z = permute(z, (0, dim, *(i for i in range(1, 5) if i != dim)))
    return reshape(z, (z.shape[0] * z.shape[1], *z.shape[2:]))


def _shifted(x: Node, axis: str, dim: int, by: int) -> Any:
    """Every block's neighbour, zeros where there is none."""
    ranks, full = x.shape[dim], all_gather(x, axis=axis)
    if by > 0:
        moved = pad(narrow(full, dim, 0, ranks - by), dim, by, 0)
    else:
        moved = pad(narrow(full, dim, -by, ranks), dim, 0, -by)
    return slice_(moved, axis=axis, dim=dim)


def _unblocked(y: Node, batch: int, dim: int, ranks: int) -> Any:
    z = reshape(y, (batch, ranks, *y.shape[1:]))
    order = [i for i in range(5) if i != 1]
    z = permute(z, (*order[:dim], 1, *order[dim:]))
    return reshape(z, (*z.shape[:dim], ranks * z.shape[dim + 1], *z.shape[dim + 2 :]))


__all__ = ["conv2d", "conv2d_halo", "pair", "windows"]
