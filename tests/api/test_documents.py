"""Packed documents: masks made of segments, of positions and by FlexAttention train as in torch's one process under every way of cutting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.api.ranks import on_ranks
from weft.api.documents import balanced, work_of
from weft.api.parallelize import parallelize
from weft.api.program_facts import model_flops
from weft.core.errors import CaptureError, RuntimeFault
from weft.frontend.capture import capture
from weft.ops.registry import flops

SEQ = 16


class Packed(nn.Module):
    """One block of attention inside documents, by a mask or by FlexAttention."""

    def __init__(self, flex: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flex = flex
        self.table, self.q, self.k, self.v = nn.Embedding(32, 16), *(nn.Linear(16, 16) for _ in range(3))
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 32)
        self.double()

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        h = self.table(x)
        q, k, v = (f(h).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.flex:
            mask = create_block_mask(lambda b, h, i, j: (i >= j) & (document[b, i] == document[b, j]), len(x), None, SEQ, SEQ, device=x.device)
            y = flex_attention(q, k, v, block_mask=mask)
        else:
            same = document[:, :, None] == document[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=(same & torch.ones(SEQ, SEQ, dtype=torch.bool).tril())[:, None])
        return self.head(h + self.out(y.transpose(1, 2).flatten(2)))


def batch(seed: int) -> dict[str, Tensor]:
    """Documents of random lengths end to end; the last token of each has no label, so rows differ in how many count."""
    gen = torch.Generator().manual_seed(seed)
    x, begins = torch.randint(0, 32, (4, SEQ), generator=gen), torch.rand(4, SEQ, generator=gen) < 0.25
    begins[:, 0] = True
    first = torch.where(begins, torch.arange(SEQ), 0).cummax(1).values
    last = begins.roll(-1, 1)
    return {"x": x, "document": begins.cumsum(1), "place": torch.arange(SEQ) - first, "y": torch.where(last, -100, x.roll(-1, 1))}


def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(b["x"], b["document"]).flatten(0, 1), b["y"].flatten())


def by_place(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=b["x"], position_ids=b["place"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), b["y"].flatten())


def llama() -> nn.Module:
    t = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, intermediate_size=16, max_position_embeddings=32)).double()  # type: ignore[no-any-return]


def torch_losses(model: nn.Module, loss: Any) -> list[float]:
    opt, out = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for i in range(2):
        opt.zero_grad()
        value = loss(model, batch(i))
        value.backward()
        opt.step()
        out.append(value.item())
    return out


def weft_losses(model: nn.Module, loss: Any, plan: str, check: bool = True) -> list[float]:
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(0), plan=plan, check=check)
    return [step(batch(i)).item() for i in range(2)]


@pytest.mark.timeout(300)
def test_losses_equal_one_process(tmp_path: Path) -> None:
    own, theirs = torch_losses(Packed(), loss), torch_losses(llama(), by_place)

    def job(rank: int) -> None:
        for plan in ("dp2", "cp2,ring", "cp2,a2a", "tp2", "pp2,micro2"):
            torch.testing.assert_close(weft_losses(Packed(), loss, plan), own, rtol=1e-8, atol=0, msg=lambda m, plan=plan: f"{plan}: {m}")
        torch.testing.assert_close(weft_losses(Packed(flex=True), loss, "cp2,ring", check=False), own, rtol=1e-8, atol=0)
        torch.testing.assert_close(weft_losses(llama(), by_place, "cp2,ring"), theirs, rtol=1e-8, atol=0)

    on_ranks(2, job, tmp_path)


@pytest.mark.parametrize("flex", [False, True])
def test_the_causal_part_is_told_from_the_documents(flex: bool) -> None:
    program = capture(Packed(flex), batch(0), loss).program
    (attention,) = program.find_all("attention")
    assert attention.attr("causal")


def test_scores_that_are_changed_are_refused() -> None:
    class Biased(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + i - j)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="changes its scores") as caught:
        capture(Biased(), torch.ones(1, 1, 16, 4))
    assert "a score_mod" in str(caught.value)


# -- dealt out by flops -----------------------------------------------------------------------------------------------------------------


def lengths(seed: int) -> list[list[int]]:
    """The documents of each row of a batch."""
    return [row.bincount(minlength=1)[1:].tolist() for row in batch(seed)["document"]]


def dealt(samples: int) -> tuple[list[dict[str, Tensor]], list[list[int]]]:
    """Rows of one document, of two and of many, the longest all at the front."""
    data = [{k: x[r] for k, x in batch(i).items()} for i in range(samples // 4) for r in range(4)]
    order = sorted(range(samples), key=lambda i: -sum(n * n for n in lengths(i // 4)[i % 4]))
    return [data[i] for i in order], [lengths(i // 4)[i % 4] for i in order]


def test_rows_are_dealt_by_flops_and_losses_are_those_of_one_process(tmp_path: Path) -> None:
    data, packed = dealt(16)

    def joined(rows: list[int]) -> dict[str, Tensor]:
        return {k: torch.stack([data[i][k] for i in rows]) for k in data[0]}

    model, want = Packed(), []
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(2):
        opt.zero_grad()
        value = loss(model, joined(list(range(8 * i, 8 * i + 8))))
        value.backward()
        opt.step()
        want.append(value.item())

    def job(rank: int) -> None:
        for plan in ("dp2", "pp2,micro2", "dp2,micro2"):
            model = Packed()
            step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), joined(list(range(8))), plan=plan, check=False)
            rows = iter(step.rows(len(data), shuffle=False, documents=packed))
            mine = [next(rows) for _ in want]
            torch.testing.assert_close([step(joined(r)).item() for r in mine], want, rtol=1e-8, atol=0, msg=lambda m, plan=plan: f"{plan}: {m}")
            parts = [r if plan == "dp2" else r[4 * rank : 4 * rank + 4] for r in mine]
            work = work_of(step.traced, packed, len(packed))
            for k, part in enumerate(parts):
                half = work[8 * k : 8 * k + 8].sum().item() / 2
                assert abs(work[part].sum().item() - half) < 0.2 * (work[8 * k : 8 * k + 4].sum().item() - half)

    on_ranks(2, job, tmp_path)


def test_flops_of_documents_are_those_of_steps_of_their_length() -> None:
    """Counted of programs that have these lengths, a row each."""
    program = capture(Packed(), batch(0), loss, torch.optim.SGD(Packed().parameters(), lr=1e-2)).program
    by_length = work_of(program, [[16], [8, 8], [8], [4] * 4], 4)
    assert by_length[0].item() == pytest.approx(model_flops(program) / 4)
    assert by_length[1] == 2 * by_length[2] and by_length[3] < by_length[1] < by_length[0]
    scores = sum(flops(n) for n in program.nodes if n.op.attends is not None) / 4
    assert (by_length[0] - by_length[1]).item() == pytest.approx(scores / 2)


def test_the_order_of_a_batch_balances_every_power_of_two() -> None:
    work = torch.rand(64, generator=torch.Generator().manual_seed(1)) ** 4
    order = balanced(work)
    assert sorted(order.tolist()) == list(range(64))
    for parts, worst in ((2, 1.001), (4, 1.001), (8, 1.01)):
        assert work[order].view(parts, -1).sum(1).max() / work.sum() * parts < worst < work.view(parts, -1).sum(1).max() / work.sum() * parts


def test_documents_of_other_samples_are_refused() -> None:
    model = Packed()
    step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=1e-2), batch(0), check=False)
    with pytest.raises(RuntimeFault, match="documents= has other samples") as caught:
        step.rows(8, documents=[[16]] * 7)
    assert "8 samples" in str(caught.value) and caught.value.found == "7"
    plain = nn.Linear(4, 4)
    step = parallelize(plain, lambda m, x: m(x).sum(), torch.optim.SGD(plain.parameters(), lr=1e-2), torch.ones(2, 4), check=False)
    with pytest.raises(RuntimeFault, match="documents= needs attention"):
        step.rows(2, documents=[[4]] * 2)
