"""Attention by torch's kernels on operands of every order of strides, stretched, overlapping and empty: what the scores written out give."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from weft.runtime import library_kernels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SLACK = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 5e-2}
Tensors = dict[str, torch.Tensor]


def written_out(x: Tensors, causal: bool) -> list[torch.Tensor]:
    """The result, its log-sum-exp and the gradients of q, k and v, in float64 on the CPU."""
    q, k, v = (x[n].detach().double().cpu().requires_grad_() for n in "qkv")
    scores = torch.einsum("bgrsd,bgtd->bgrst", q, k) * 0.5
    scores = scores + x["mask"].double().cpu() if "mask" in x else scores
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    out = torch.einsum("bgrst,bgte->bgrse", scores.softmax(-1), v)
    grads = torch.autograd.grad(out, (q, k, v), x["do"].double().cpu())
    return [y.detach() for y in (out, scores.logsumexp(-1), *grads)]


def by_kernel(x: Tensors, causal: bool) -> list[torch.Tensor]:
    masks = [x["mask"]] if "mask" in x else []
    q, k, v = x["q"], x["k"], x["v"]
    out, lse = library_kernels.attention(q, k, v, *masks, scale=0.5, causal=causal)
    return [out, lse, *library_kernels.attention_backward(x["do"], q, k, v, out, lse, *masks, scale=0.5, causal=causal)]


def same(x: Tensors, causal: bool = False) -> None:
    slack = SLACK[x["q"].dtype]
    for got, want in zip(by_kernel(x, causal), written_out(x, causal), strict=True):
        torch.testing.assert_close(got.double().cpu(), want, rtol=slack, atol=slack)


def operands(r: int = 3, d: int = 4, dtype: torch.dtype = torch.float64, device: str = "cpu", mask: bool = False) -> Tensors:
    gen = torch.Generator().manual_seed(5)
    shapes = {"q": (2, 2, r, 6, d), "k": (2, 2, 6, d), "v": (2, 2, 6, d), "do": (2, 2, r, 6, d)}
    shapes |= {"mask": (2, 2, r, 6, 6)} if mask else {}
    return {n: torch.randn(s, generator=gen, dtype=torch.float64).to(device, dtype) for n, s in shapes.items()}


def lying(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values with the dims in memory in that order."""
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["q", "k", "v", "do", "mask"])
@pytest.mark.parametrize("r", [1, 3])
def test_every_order_of_dims_in_memory(which: str, r: int, device: str) -> None:
    for dtype in (torch.float64, torch.float32) if device == "cpu" else (torch.bfloat16, torch.float32):
        x = operands(r, 8, dtype, device, mask=which == "mask")
        for order in itertools.permutations(range(x[which].ndim)):
            for causal in (False, True) if which != "mask" else (False,):
                same(x | {which: lying(x[which], order)}, causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
@pytest.mark.parametrize("r", [1, 3])
def test_operands_that_are_stretched_or_overlap(which: str, r: int, device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    x = operands(r, 8, dtype, device)
    for dim in range(x[which].ndim):
        same(x | {which: x[which].narrow(dim, 0, 1).expand_as(x[which])})
    n = x[which].ndim
    near = x[which].flatten().as_strided(x[which].shape, (*range(n, 0, -1),)[:-1] + (1,))
    same(x | {which: near})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("mask", [False, True])
def test_heads_of_any_width_at_any_offset(d: int, mask: bool, device: str) -> None:
    for dtype in (torch.float64, torch.float32) if device == "cpu" else (torch.bfloat16, torch.float32):
        x = operands(2, d, dtype, device, mask)
        beside = {n: torch.cat([y.new_zeros(1), y.flatten()])[1:].view(y.shape) for n, y in x.items()}  # not at the start of a line
        same(x)
        same(beside)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 6), (2, 1, 1, 6, 1), (1, 2, 3, 1, 6)])
@pytest.mark.parametrize("device", DEVICES)
def test_masks_that_are_stretched(shape: tuple[int, ...], device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    gen = torch.Generator().manual_seed(6)
    same(operands(dtype=dtype, d=8, device=device) | {"mask": torch.randn(shape, generator=gen, dtype=torch.float64).to(device, dtype)})


@pytest.mark.parametrize("empty", ["b", "s", "t", "g", "d"])
def test_nothing_to_attend_to(empty: str) -> None:
    """Torch's kernel divides by the number of rows and ends the process."""
    b, g, s, t, d = (0 if c == empty else n for c, n in zip("bgstd", (2, 2, 3, 5, 4), strict=True))
    x = {"q": torch.randn(b, g, 3, s, d), "k": torch.randn(b, g, t, d), "v": torch.randn(b, g, t, d), "do": torch.randn(b, g, 3, s, d)}
    same({n: y.double() for n, y in x.items()})
