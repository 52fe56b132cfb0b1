"""Experts as grouped products against the sum over experts, one by one, by torch's own autograd."""

import pytest
import torch

from weft.codegen.quick import quick_call
from weft.core.layout import Layout, Mesh, S
from weft.core.node import Type
from weft.ops.experts import experts as experts_op
from weft.ops.source import input_node
from weft.runtime import grouped

T, K, E, D, F = 10, 2, 6, 16, 24


def gated_by(act, gate, up):
    if not act.startswith("clamped"):
        return grouped.ACTIVATIONS[act](gate) * up
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    return gate / (1 + torch.exp(-1.7 * gate)) * (up + 1)


def _plain(x, picks, weights, up, down, *gate, act, first):
    """Every token through the experts it picked, in Python."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for j, e in enumerate((picks[t] - first).tolist()):
            if 0 <= e < up.shape[0]:
                h = gated_by(act, x[t] @ gate[0][e].T, x[t] @ up[e].T) if gate else grouped.ACTIVATIONS[act](x[t] @ up[e].T)
                out[t] = out[t] + weights[t, j] * (h @ down[e].T)
    return out


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("first", "count"), [(0, 6), (2, 3), (5, 1)])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "clamped:1.7:2.0:1.0"])
def test_values_and_gradients_are_torchs(gated, first, count, act):
    if act.startswith("clamped") and not gated:
        pytest.skip("gates alone are clamped")
    torch.manual_seed(first)
    picks = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])  # the last expert is picked by nobody
    x, weights = torch.randn(T, D), torch.rand(T, K)
    mats = [torch.randn(count, F, D), torch.randn(count, D, F), *([torch.randn(count, F, D)] if gated else [])]
    floats = [t.requires_grad_() for t in (x, weights, *mats)]
    want = _plain(x, picks, weights, *mats, act=act, first=first)
    ct = torch.randn(T, D)
    grads = torch.autograd.grad(want, floats, ct, allow_unused=True) if want.requires_grad else [None] * len(floats)
    with torch.no_grad():
        got = grouped.experts(x, picks, weights, *mats, act=act, first=first)
        back = grouped.experts_backward(ct, x, picks, weights, *mats, act=act, first=first)
    torch.testing.assert_close(got, want.detach())
    for b, g, like in zip(back, grads, floats, strict=True):
        torch.testing.assert_close(b, torch.zeros_like(like) if g is None else g, rtol=1e-4, atol=1e-4)


def test_generated_code_calls_it_on_gpus_only_and_knows_its_experts():
    mesh = Mesh(ep=2)
    bf16, i64 = torch.bfloat16, torch.int64

    def given(name, dtype, *shape, **held):
        return input_node(name, Type(dtype, Layout.of(mesh, shape, held)))

    cut = {"ep": S(0)}
    node = experts_op(
        given("x", bf16, T, D), given("picks", i64, T, K), given("w", bf16, T, K), given("up", bf16, E, F, D, **cut),
        given("down", bf16, E, D, F, **cut), act="silu",
    )  # fmt: skip
    args = ["x", "picks", "w", "up", "down"]
    assert quick_call(node, args, "cuda", False, {"ep": 1}) == "quick.experts(x, picks, w, up, down, act='silu', first=3)"
    assert quick_call(node, args, "cpu", False, {"ep": 1}) is None
