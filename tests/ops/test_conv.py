"""What convolution, pooling and batch norm refuse, and what they say; work counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from weft import interp
from weft.core.errors import TypeMismatch
from weft.core.layout import Mesh, P, S
from weft.frontend.trace import f64, trace
from weft.ops.batchnorm import batch_norm
from weft.ops.conv import conv2d, conv2d_halo, conv2d_input_grad, conv2d_weight_grad
from weft.ops.pool import max_pool2d
from weft.ops.registry import flops

MESH = Mesh(a=2)
IMAGES = f64(2, 4, 6, 6)


@pytest.mark.parametrize(
    ("fn", "inputs", "message"),
    [
        (conv2d, {"x": IMAGES, "w": f64(3, 4, 7, 7)}, "the kernel does not fit into the image"),
        (conv2d, {"x": f64(2, 4, 6), "w": f64(3, 4, 2)}, r"two operands of 4 dims, or of 5 with groups\n  found   3 dims and 3 dims"),
        (lambda x, w: conv2d(x, w, groups=3), {"x": IMAGES, "w": f64(3, 4, 2, 2)}, "needed  channels divisible by 3"),
        (conv2d, {"x": f64(2, 4, 6, 6, a=S(2)), "w": f64(3, 4, 2, 2)}, "dim 2 of operand 0, which conv2d needs in full, unsharded"),
        (conv2d, {"x": f64(2, 4, 6, 6, a=P()), "w": f64(3, 4, 2, 2, a=P())}, "to be linear in operands 0, 1"),
        (
            lambda x, w: conv2d_halo(x, w, axis="a"), {"x": IMAGES, "w": f64(3, 4, 3, 3)},
            r"conv2d_halo has no sharding to bridge .*\n\n  needed  a:S\(2\) or a:S\(3\) in its images",
        ),
        (
            lambda x, w: conv2d_halo(x, w, axis="a"), {"x": f64(2, 4, 6, 6, a=S(2)), "w": f64(3, 4, 3, 3)},
            r"found   6 with 4 windows that reach 0 before and 2 after a rank's part\n  try     all_gather it and use conv2d",
        ),
        (
            lambda x, w: conv2d_halo(x, w, axis="a", padding=1), {"x": f64(2, 4, 5, 6, a=S(2)), "w": f64(3, 4, 3, 3)},
            r"needed  a size divisible by 2 x 1",
        ),
        (lambda x: max_pool2d(x, 2, 2, 2), {"x": IMAGES}, "needed  padding of at most half the kernel"),
        (lambda x: max_pool2d(x, 8), {"x": IMAGES}, "the window does not fit into the image"),
        (lambda x: max_pool2d(x, 2), {"x": f64(4, 4)}, r"pooling takes images .*\n\n  needed  \[n, c, h, w\]"),
    ],
)  # fmt: skip
def test_refusals(fn: Callable[..., Any], inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeMismatch, match=message):
        trace(fn, MESH, **inputs, name="refused")


def test_the_cotangent_must_belong() -> None:
    how = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    with pytest.raises(TypeMismatch, match=r"needed  \[5, 5\]\n  found   \[4, 5\]"):
        trace(lambda y, w: conv2d_input_grad(y, w, size=(6, 6), **how), MESH, y=f64(2, 3, 4, 5), w=f64(3, 4, 2, 2), name="x")
    with pytest.raises(TypeMismatch, match="the cotangent is not of this convolution"):
        trace(lambda x, y: conv2d_weight_grad(x, y, kernel=(2, 2), **how), MESH, x=IMAGES, y=f64(2, 3, 6, 6), name="x")


def test_one_value_per_channel_has_no_variance() -> None:
    vectors = dict.fromkeys(("w", "b", "m", "v"), f64(3))
    with pytest.raises(TypeMismatch, match="needed  two or more in training"):
        trace(lambda x, w, b, m, v: batch_norm(x, w, b, m, v), MESH, x=f64(1, 3, 1, 1), **vectors, name="bn")


def test_flops_of_the_busiest_rank() -> None:
    p = trace(lambda x, w: conv2d(x, w, stride=2), MESH, x=f64(4, 3, 9, 9, a=S(0)), w=f64(8, 3, 3, 3), name="conv")
    assert flops(p.find("conv2d")) == 2 * (2 * 8 * 4 * 4) * 3 * 9


def test_batch_norm_on_a_cut_batch_is_that_of_the_whole() -> None:
    """Statistics per rank would differ: the ranks' batches are drawn far apart."""
    vectors = dict.fromkeys(("w", "b", "m", "v"), f64(3))
    p = trace(lambda **xs: dict(zip("ymv", batch_norm(*xs.values()), strict=True)), MESH, x=f64(4, 3, 2, 2, a=S(0)), **vectors, name="bn")
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64) + torch.arange(4).reshape(4, 1, 1, 1)
    one, zero = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    out = interp.run(p, {"x": x, "w": one, "b": zero, "m": zero, "v": one})
    mean, var = zero.clone(), one.clone()
    torch.testing.assert_close(out["y"], F.batch_norm(x, mean, var, one, zero, training=True))
    torch.testing.assert_close(out["m"], mean)
    torch.testing.assert_close(out["v"], var)
    assert len(p.find_all("all_reduce")) == 2
