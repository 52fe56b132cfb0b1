"""Experts as grouped products against the sum over experts, one by one, by torch's own autograd."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_interpreted_ranks
from weft.codegen.library_calls import library_call
from weft.core.layout import Layout, Mesh, S
from weft.core.node import Type
from weft.ops.experts import experts as experts_op
from weft.ops.source import input_node
from weft.runtime import grouped

T, K, E, D, WIDE = 10, 2, 6, 16, 24
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def gated_by(act, gate, up):
    if not act.startswith("clamped"):
        return ACTIVATIONS[act](gate) * up
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    return gate / (1 + torch.exp(-1.7 * gate)) * (up + 1)


def _plain(x, picks, weights, up, down, *gate, act, first):
    """Every token through the experts it picked, in Python."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for j, e in enumerate((picks[t] - first).tolist()):
            if 0 <= e < up.shape[0]:
                h = gated_by(act, x[t] @ gate[0][e].T, x[t] @ up[e].T) if gate else ACTIVATIONS[act](x[t] @ up[e].T)
                out[t] = out[t] + weights[t, j] * (h @ down[e].T)
    return out


def values_and_gradients(rank):
    cases = [(act, gated, first, count) for act in ("silu", "clamped:1.7:2.0:1.0") for gated in (True, False) for first, count in ((0, 6), (2, 3))]
    cases += [*((act, True, 5, 1) for act in ("relu", "gelu", "gelu_tanh")), ("gelu_tanh", False, 2, 3), ("silu", False, 5, 1)]
    for act, gated, first, count in cases:
        if gated or not act.startswith("clamped"):  # gates alone are clamped
            compare(act, gated, first, count)


def compare(act, gated, first, count):
    torch.manual_seed(first)
    picks = torch.stack([torch.randperm(E - (first < 5))[:K] for _ in range(T)])  # but once the last expert is picked by nobody
    x, weights = torch.randn(T, D), torch.rand(T, K)
    mats = [torch.randn(count, WIDE, D), torch.randn(count, D, WIDE), *([torch.randn(count, WIDE, D)] if gated else [])]
    floats, ct = (x, weights, *mats), torch.randn(T, D)
    want, near = ([*_with_gradients([t.to(dtype) for t in floats], picks, ct.to(dtype), act, first)] for dtype in (torch.float64, torch.float32))
    got = grouped.experts(x, picks, weights, *mats, act=act, first=first)
    back = grouped.experts_backward(ct, x, picks, weights, *mats, act=act, first=first)
    for found, exact, rounded in zip((got, *back), want, near, strict=True):
        allowed = 4 * (rounded - exact).abs().max() + 4 * torch.finfo(torch.float32).eps * exact.abs().max()  # torch's own error in float32
        assert (found - exact).abs().max() <= allowed, (act, gated, first, count)


def _with_gradients(floats, picks, ct, act, first):
    x, weights, *mats = (t.clone().requires_grad_() for t in floats)
    out = _plain(x, picks, weights, *mats, act=act, first=first)
    yield out.detach()
    grads = torch.autograd.grad(out, (x, weights, *mats), ct, allow_unused=True)
    yield from (torch.zeros_like(t) if g is None else g for g, t in zip(grads, (x, weights, *mats), strict=True))


@pytest.mark.timeout(200)
def test_values_and_gradients_are_torchs(tmp_path: Path):
    run_interpreted_ranks(1, values_and_gradients, tmp_path, seconds=150)


def test_generated_code_calls_it_on_gpus_only_and_knows_its_experts():
    mesh = Mesh(ep=2)
    bf16, i64 = torch.bfloat16, torch.int64

    def given(name, dtype, *shape, **held):
        return input_node(name, Type(dtype, Layout.of(mesh, shape, held)))

    cut = {"ep": S(0)}
    node = experts_op(
        given("x", bf16, T, D), given("picks", i64, T, K), given("w", bf16, T, K), given("up", bf16, E, WIDE, D, **cut),
        given("down", bf16, E, D, WIDE, **cut), act="silu",
    )  # fmt: skip
    args = ["x", "picks", "w", "up", "down"]
    assert library_call(node, args, "cuda", False, {"ep": 1}) == "library.experts(x, picks, w, up, down, act='silu', first=3)"
    assert library_call(node, args, "cpu", False, {"ep": 1}) is None
