"""The kernels of attention inside documents, interpreted, against torch's softmax in float64; and where generated code calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import run_interpreted_ranks
from weft import passes
from weft.codegen.pipeline import lower
from weft.frontend.capture import capture
from weft.plan.spec import Spec


def documents(kind: str, batch: int, tokens: int) -> Tensor:
    gen = torch.Generator().manual_seed(0)
    if kind == "packed":
        return (torch.rand(batch, tokens, generator=gen) < 0.02).cumsum(1)
    if kind == "long":
        return (torch.arange(tokens) >= 250).long().expand(batch, -1)
    return torch.randint(0, 4, (batch, tokens), generator=gen) if kind == "mixed" else torch.zeros(1, tokens, dtype=torch.int64)


def kernels(rank: int) -> None:
    from weft.runtime.library_kernels import document_attention, document_attention_backward

    cases = (2, 1, 2, 300, True, "packed"), (1, 2, 1, 150, False, "packed"), (2, 1, 1, 150, True, "mixed"), (2, 1, 1, 64, True, "one")
    cases += (1, 1, 2, 520, True, "long"), (1, 1, 1, 520, False, "long"), (1, 1, 1, 330, True, "one")
    for b, g, r, s, causal, kind in cases:
        torch.manual_seed(0)
        q, k, v = (torch.randn(b, s, *heads, 16).movedim(1, -2) for heads in ((g, r), (g,), (g,)))  # as projections leave them
        ids, how = documents(kind, b, s), {"scale": 0.3, "causal": causal}
        of = ids[:, :, None], ids[:, None]
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        seen = (of[0] == of[1])[:, None, None] & (torch.ones(s, s, dtype=torch.bool).tril() if causal else True)
        scores = (torch.einsum("bgrsd,bgtd->bgrst", *wide[:2]) * 0.3).masked_fill(~seen, -torch.inf)
        want, ct = torch.einsum("bgrst,bgtd->bgrsd", scores.softmax(-1), wide[2]), torch.randn(q.shape)
        out, lse = document_attention(q, k, v, *of, **how)
        grads = document_attention_backward(ct, q, k, v, out, lse, *of, **how)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
        for got, theirs in zip((out, *grads), (want, *torch.autograd.grad(want, wide, ct.double())), strict=True):
            torch.testing.assert_close(got.double(), theirs, rtol=0, atol=1e-5)


@pytest.mark.timeout(200)
def test_kernels_equal_a_softmax_in_float64(tmp_path: Path) -> None:
    run_interpreted_ranks(1, kernels, tmp_path, seconds=150)


class Packed(nn.Module):
    """Attention where numbers of tokens are equal, and where something else of them is."""

    def __init__(self, equal: bool) -> None:
        super().__init__()
        self.equal, self.maps = equal, nn.Linear(64, 192, dtype=torch.bfloat16)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 32)).transpose(1, 2) for y in self.maps(x).chunk(3, -1))
        a, b = ids[:, None, :, None], ids[:, None, None]
        seen = (a == b if self.equal else a >= b) & torch.ones(32, 32, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).float().pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("equal", "device", "calls"), [(True, "cuda", 2), (False, "cuda", 0), (True, "cpu", 0)])
def test_generated_code_calls_them_for_documents_on_a_gpu(equal: bool, device: str, calls: int) -> None:
    model = Packed(equal)
    batch = {"x": torch.randn(2, 32, 64, dtype=torch.bfloat16), "ids": documents("packed", 2, 32)}
    captured = capture(model, batch, lambda m, b: m(**b), torch.optim.SGD(model.parameters(), lr=0.1))
    program = passes.run(passes.Draft(captured, Spec.parse("dp1"))).program
    assert program is not None
    assert lower(program, device=device).text.count("library.document_attention") == calls
