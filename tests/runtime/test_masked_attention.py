"""Masked attention by torch's fused kernels, forward and back: what the scores written out give, rows that see nothing among them."""

from __future__ import annotations

import math

import pytest
import torch

import weft_zoo as zoo
from weft import lang as w
from weft.codegen.library_calls import library_call
from weft.core.layout import Mesh
from weft.frontend.trace import tensor, trace
from weft.runtime import library_kernels

MASKS = {"keys": (2, 1, 1, 1, 7), "rows": (1, 1, 1, 5, 7), "heads": (2, 2, 3, 5, 7), "one key": (2, 1, 1, 5, 1)}


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("bgrsd,bgtd->bgrst", q, k) * scale + mask
    p = torch.where((scores > -math.inf).any(-1, keepdim=True), torch.softmax(scores, -1), 0.0)
    return torch.einsum("bgrst,bgte->bgrse", p, v), torch.logsumexp(scores, -1)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("hidden", ["some", "whole rows", "numbers"])
def test_masked_attention_is_what_the_scores_give(kind: str, hidden: str) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((2, 2, 3, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)))
    mask = torch.randn(MASKS[kind], dtype=torch.float64)
    if hidden != "numbers":
        mask = torch.where(torch.rand(MASKS[kind]) < 0.3, -math.inf, 0.0).double()
        mask[..., 0] = 0.0
    if hidden == "whole rows":
        mask[0] = -math.inf
    want, lse = written_out(q, k, v, mask, 0.4)
    do = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v), do)
    plain = [x.detach() for x in (q, k, v)]
    out, mine = library_kernels.attention(*plain, mask, scale=0.4)
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(mine, lse.detach())
    for got, grad in zip(library_kernels.attention_backward(do, *plain, out, mine, mask, scale=0.4), wanted, strict=True):
        torch.testing.assert_close(got, torch.nan_to_num(grad))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_order_beside_a_mask(window: int, padded: bool) -> None:
    """Causal with padding on the left, whose first rows see nothing, and a window."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((2, 2, 3, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)))
    i, j = torch.arange(6)[:, None], torch.arange(6)
    seen = (j <= i) & ((j > i - window) if window else True)
    mask = torch.zeros(2, 1, 1, 1, 6, dtype=torch.float64)
    mask[0, ..., :2] = -math.inf
    heads = [x[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2) for x in (k, v)]
    both = seen & (mask[:, 0] == 0) if padded else seen
    want = torch.nn.functional.scaled_dot_product_attention(q.flatten(1, 2), *heads, both, scale=0.4).unflatten(1, (2, 3))
    do = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v), do)
    plain, masks = [x.detach() for x in (q, k, v)], [mask] if padded else []
    out, mine = library_kernels.attention(*plain, *masks, scale=0.4, causal=True, window=window)
    torch.testing.assert_close(out, want.detach())
    back = library_kernels.attention_backward(do, *plain, out, mine, *masks, scale=0.4, causal=True, window=window)
    for got, grad in zip(back, wanted, strict=True):
        torch.testing.assert_close(got, grad)


@pytest.mark.parametrize("operand", [0, 1, 2], ids=["queries", "keys", "values"])
@pytest.mark.parametrize("hidden", ["all of a row", "some keys", "nothing"])
def test_what_is_no_number_is_hidden_by_no_mask(operand: int, hidden: str) -> None:
    """As torch's own attention has it with scores written out, forward and back: a NaN that went in comes out."""
    torch.manual_seed(5)
    given = [torch.randn(2, 2, 4, 3, dtype=torch.float64) for _ in range(3)]
    given[operand][1, 0, 2] = math.nan
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[1:3] = hidden != "all of a row"
    seen[:, 2] &= hidden == "nothing"
    q, k, v = (x.clone().requires_grad_() for x in given)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.4)
    do = torch.randn_like(want)
    wanted = [torch.isnan(g) for g in torch.autograd.grad(want, (q, k, v), do)]
    mask = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~seen, -math.inf)[None, None, None]
    query, *others = given[0].unsqueeze(2), *given[1:]
    out, lse = library_kernels.attention(query, *others, mask, scale=0.4)
    torch.testing.assert_close(out[:, :, 0], want.detach(), equal_nan=True)
    back = library_kernels.attention_backward(do.unsqueeze(2), query, *others, out, lse, mask, scale=0.4)
    assert all(g.reshape(w.shape).isnan()[w].all() for g, w in zip(back, wanted, strict=True))


def test_the_least_number_hides_a_key_but_not_all_of_them() -> None:
    q, k, v = (torch.randn(s, dtype=torch.float32) for s in ((1, 1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4)))
    mask = torch.tensor([[0.0, torch.finfo(torch.float32).min, -math.inf], [torch.finfo(torch.float32).min] * 2 + [-math.inf]])
    out, _ = library_kernels.attention(q, k, v, mask.view(1, 1, 1, 2, 3), scale=1.0)
    torch.testing.assert_close(out[0, 0, 0], torch.stack([v[0, 0, 0], v[0, 0, :2].mean(0)]))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_mask_of_the_dtype_of_its_scores_is_added_by_the_kernel(dtype: str, device: str) -> None:
    x, mask = tensor(dtype, 2, 3, 5, 16), tensor(dtype, 2, 1, 1, 5)
    p = trace(lambda x, mask: {"out": w.attention(x, x, x, mask=mask)[0]}, Mesh(dp=1), name="masked", x=x, mask=mask)
    (node,) = (n for n in p.nodes if n.op.name == "attention")
    call = library_call(node, ["q", "k", "v", "m"], device, own=False, at={})
    assert (call is None) == (dtype == "f16" and device == "cpu")
    assert call is None or call.startswith("library.attention(q, k, v, m, scale=0.25")


def test_a_model_with_a_padding_mask_calls_it() -> None:
    from weft.api.parallelize import parallelize

    bert = zoo.small("bert-large", dropout=0.0)
    batch = bert.example(3)
    batch["keep"][:, -5:] = False
    step = parallelize(bert.model, bert.loss, torch.optim.SGD(bert.model.parameters(), lr=0.1), batch)
    assert "library.attention(" in step.compiled.code.text and "library.attention_backward(" in step.compiled.code.text
    plain = zoo.small("bert-large", dropout=0.0)
    assert math.isclose(float(step(batch)), float(plain.loss(plain.model, batch).detach()), rel_tol=1e-5)
