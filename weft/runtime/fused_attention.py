"""Attention by torch's fused kernels, forward and back: those of the CPU, of cuDNN, flash and memory-efficient ones.

They are called behind torch's front door, so what that sees to is seen to here: operands lie as the kernels read them, heads are
as wide as they take, and nothing is empty. Which of them is called depends on device, dtype, shape and mask alone, so that a backward
finds what its forward left.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
LINE = 16  # bytes that a GPU kernel reads at once, and so where its rows begin
WIDEST = 256  # numbers in a head that the flash kernel of GPUs takes


def _as_read(x: Tensor) -> Tensor:
    """Queries, keys or values [b, h, s, d] with each row in one piece and rows apart; on a GPU, every one at the start of a line.

    A kernel takes this for granted of whatever it is given, and reads other memory where it does not hold."""
    rows, width = x.shape[2:]
    full = (width == 1 or x.stride(3) == 1) and (rows == 1 or x.stride(2) >= width)
    if full and (not x.is_cuda or _on_lines(x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _on_lines(x: Tensor) -> bool:
    step = LINE // x.element_size()
    strides = [n for n, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    return not any(n % step for n in (*strides, x.storage_offset()))


def _by_flash(q: Tensor) -> bool:
    """Whether a GPU's flash kernel takes it; the memory-efficient one takes the rest."""
    return q.dtype != torch.float32 and q.shape[-1] <= WIDEST


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    if _by_cudnn(q, k, causal):
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse
    if _by_flash(q):
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]  # type: ignore[no-any-return]
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> Any:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, out, lse, 0.0, causal, scale=scale)
    if _by_cudnn(q, k, causal):
        return _cudnn_backward(do, q, k, v, out, lse, None, causal, scale)
    if not _by_flash(q):
        return _efficient_backward(do, q, k, v, out, lse, None, causal, scale)
    none = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none[0], scale=scale
    )


def _efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Any:
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a generator that is not used
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # rows come by 32
    if q.dtype != torch.float32:  # then the kernel reads the result as the forward kernel lays it out, whatever its strides say
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = [True, True, True, False]
    return _aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, bias, out, lse, none, none, 0.0, wanted, causal, scale=scale
    )[:3]


def _cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Any:
    none, lse = torch.zeros((), dtype=torch.int64, device=q.device), lse.reshape(*q.shape[:3], 1)
    where = (bias, None, None, q.shape[2], k.shape[2])
    do = do if do.stride() == out.stride() else torch.empty_like(out).copy_(do)  # read by the strides of the result
    return _aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, out, lse, none, none, *where, 0.0, causal, scale=scale)


def _by_cudnn(q: Tensor, k: Tensor, causal: bool, masked: bool = False) -> bool:
    """Whether cuDNN's kernels are the fast ones: for half precision, from Hopper on."""
    if q.dtype == torch.float32 or torch.cuda.get_device_capability(q.device) < (9, 0) or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return _cudnn_has(tuple(q.shape[1:]), tuple(k.shape[1:]), q.dtype, q.device, causal, masked)


@functools.cache
def _cudnn_has(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, device: torch.device, causal: bool, masked: bool) -> bool:
    """Whether it has an attention of this shape, forward and back: tried on one sample."""
    with _disable_current_modes(), torch.no_grad():
        query, key = (torch.zeros(1, *shape, dtype=dtype, device=device) for shape in (q, k))
        bias = (
            torch.zeros(1, 1, 1, -(-k[1] // 16) * 16, dtype=dtype, device=device)[..., : k[1]].expand(1, *q[:2], k[1]) if masked else None
        )
        try:
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(query, key, key, bias, True, 0.0, causal, False)
            _cudnn_backward(query, query, key, key, out, lse, bias, causal, 1.0)
        except RuntimeError:
            return False
        return tuple(lse.shape) == (1, *q[:2], 1)


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)  # type: ignore[no-any-return]
    if _by_cudnn(q, k, False, masked=True):
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, False, False, scale=scale)
        return out, lse
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out, lse[..., : q.shape[2]]


def _masked_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float) -> Any:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    back = _cudnn_backward if _by_cudnn(q, k, False, masked=True) else _efficient_backward
    return back(do, q, k, v, out, lse, bias, False, scale)


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A mask [b, g, r, s, t], stretched where a size is 1, as the kernels add it, [b, g * r, s, t], and which rows see any key.

    Without infinities, whose differences are no numbers: a key that is not seen stays far below any that is.
    """
    far = -6e4 if mask.dtype == torch.float16 else -1e30  # times a few it is still a number
    bias = torch.where(mask == -torch.inf, far, mask.clamp(min=far / 2))
    seen = (mask > -torch.inf).any(-1, keepdim=True)
    b, g, r, s = q.shape[:4]
    bias = _in_memory(_in_lines(bias, k.shape[2])) if q.is_cuda else bias
    heads = (1, 1) if bias.shape[1:3] == (1, 1) else (g, r)
    flat = bias.expand(-1, *heads, -1, -1).flatten(1, 2)
    return flat.expand(b, g * r, s, k.shape[2]), seen  # stretched last of all, so that it is not written out


def _in_lines(bias: Tensor, keys: int) -> Tensor:
    """A row for all keys in one piece, and rows that start every 16 numbers, as a GPU's kernels read them."""
    rows = bias.expand(*bias.shape[:-1], keys)
    return torch.nn.functional.pad(rows, (0, -keys % 16)).contiguous()[..., :keys]


def _in_memory(x: Tensor) -> Tensor:
    """The same; in a trace, what Inductor must have in memory: of what it has not, it would write out every stretched view."""
    if not isinstance(x, FakeTensor):
        return x
    from torch._inductor import inductor_prims

    return inductor_prims.force_stride_order(x, x.stride())  # type: ignore[no-any-return]


def _shares_keys(q: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel itself lets several query heads read one key head."""
    return q.is_cuda and mask is None and _by_flash(q)


def _heads(x: Tensor, like: Tensor, mask: Tensor | None) -> Tensor:
    """Keys or values [b, g, t, d] for every one of the r query heads of their group, [b, g * r, t, d]."""
    b, g, r = like.shape[:3]
    return x if r == 1 or _shares_keys(like, mask) else x.unsqueeze(2).expand(b, g, r, *x.shape[2:]).reshape(b, g * r, *x.shape[2:])


def _flat(x: Tensor, like: Tensor) -> Tensor:
    """What stands at query rows, [b, g, r, s, d], as the kernels read it, [b, g * r, s, d]."""
    b, g, r, s = like.shape[:4]
    return _ready(x.reshape(b, g * r, s, x.shape[-1]))


def _ready(x: Tensor) -> Tensor:
    """As the kernels read it; on a GPU, with zeros up to the next width of a head that is a multiple of 8."""
    short = -x.shape[-1] % 8 if x.is_cuda else 0
    return _as_read(torch.nn.functional.pad(x, (0, short)) if short else x)


def _ordered(mask: Tensor | None, q: Tensor, k: Tensor, causal: bool, window: int) -> tuple[Tensor | None, bool]:
    """The mask with the order of rows and keys in it, where the kernels do not take both; and whether they know the order."""
    if not window and (mask is None or not causal):
        return mask, causal
    rows, keys = torch.arange(q.shape[3], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    seen = (keys <= rows) if causal else torch.ones((), dtype=torch.bool, device=q.device)
    seen = seen & (keys > rows - window) if window else seen
    order = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~seen, -math.inf)[None, None, None]
    return order if mask is None else mask + order, False


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float, causal: bool = False, window: int = 0
) -> tuple[Tensor, Tensor]:
    """q [b, g, r, s, d], k and v [b, g, t, d] -> result and log-sum-exp, without all scores ever being in memory."""
    b, g, r, s, d = q.shape
    mask, causal = _ordered(mask, q, k, causal, window)
    if not q.numel() or not k.numel():
        return q.new_zeros(b, g, r, s, d), _every_row(q, math.log(k.shape[2]) if k.shape[2] else -math.inf)
    flat = _flat(q, q), _ready(_heads(k, q, mask)), _ready(_heads(v, q, mask))
    if mask is None:
        out, lse = _flash(*flat, causal, scale)
        return out[..., :d].reshape(b, g, r, s, d), lse.reshape(b, g, r, s)
    bias, seen = _bias(mask, q, k)
    out, lse = _masked(*flat, bias, scale)
    out, lse = out[..., :d].reshape(b, g, r, s, d), lse.reshape(b, g, r, s)
    return out * seen, torch.where(seen[..., 0] | lse.isnan(), lse, -torch.inf)  # what is no number stays none, as in torch


def _every_row(q: Tensor, value: float) -> Tensor:
    """A log-sum-exp that is one and the same for every row."""
    return q.new_full(q.shape[:4], value, dtype=torch.promote_types(q.dtype, torch.float32))


def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int = 0,
) -> Any:
    """The gradients of q, k and v from that of the result, with what the forward gave."""
    b, g, r, s, d = q.shape
    mask, causal = _ordered(mask, q, k, causal, window)
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    ours = _flat(do, q), _flat(q, q), _ready(_heads(k, q, mask)), _ready(_heads(v, q, mask)), _flat(out, q)
    if mask is None:
        dq, dk, dv = _flash_backward(*ours, lse.reshape(b, g * r, s).contiguous(), causal, scale)
    else:
        bias, seen = _bias(mask, q, k)
        lse = torch.where(seen[..., 0] | lse.isnan(), lse, torch.inf)  # so that the weights of a row that sees no key are 0
        dq, dk, dv = _masked_backward(*ours, lse.reshape(b, g * r, s).contiguous(), bias, scale)
    if r > 1 and not _shares_keys(q, mask):
        dk, dv = (x.reshape(b, g, r, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq[..., :d].reshape(q.shape), dk[..., :d], dv[..., :d]
