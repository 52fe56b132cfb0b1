"""Models of experts by transformers under expert parallelism, alone and with other kinds, overlapped and not: the losses of torch's one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.api.ranks import on_ranks
from weft import passes
from weft.api.parallelize import parallelize
from weft.codegen.order import order
from weft.core.errors import PlanError
from weft.frontend.capture import capture
from weft.plan.spec import Spec
from weft.runtime import token_all_to_all

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 1}
GROUPED = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 1, "experts_implementation": "eager"}


def config(name: str) -> Any:
    t = transformers
    if name == "mixtral":
        return t.MixtralConfig(**{**GROUPED, "num_hidden_layers": 2}, intermediate_size=8, num_local_experts=4, sliding_window=None)
    if name == "qwen3":
        return t.Qwen3MoeConfig(**GROUPED, head_dim=4, moe_intermediate_size=8, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)
    if name == "few and small":
        return t.Qwen3MoeConfig(**GROUPED, head_dim=4, moe_intermediate_size=6, num_experts=4, num_experts_per_tok=2)
    if name == "deepseek":
        low = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
        routed = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0}
        return t.DeepseekV3Config(**{**GROUPED, "num_key_value_heads": 4}, moe_intermediate_size=8, **low, **routed)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    sizes = {**GROUPED, "attn_implementation": "eager", "head_dim": 4, "intermediate_size": 8, "sliding_window": 4, "rope_parameters": rope}
    return t.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.02)  # so that many are clamped


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = transformers.AutoModelForCausalLM.from_config(config(name)).double()
    for p in made.parameters():  # biases of experts begin as zeros
        nn.init.normal_(p, std=0.1)
    for buffer in made.buffers():  # of DeepSeek's router, that it picks by the bias too
        if buffer.shape == (8,):
            buffer.copy_(torch.linspace(-1, 1, 8))
    return made  # type: ignore[no-any-return]


def batch(seed: int) -> Tensor:
    return torch.randint(2, 32, (4, 8), generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=x, use_cache=False).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def torch_losses(name: str, batch: Callable[[int], Tensor] = batch) -> list[float]:
    own, out = model(name), []
    opt = torch.optim.AdamW(own.parameters(), lr=1e-2)
    for i in range(2):
        opt.zero_grad()
        value = loss(own, batch(i))
        value.backward()
        opt.step()
        out.append(value.item())
    return out


PLANS = {
    "mixtral": (4, ["ep2,pp2,micro2,async-ep", "ep4,ragged-ep", "ep2,pp2,micro2,ragged-ep"]),
    "qwen3": (2, ["ep2", "ep2,async-ep", "ep2,ragged-ep"]),
    "deepseek": (4, ["ep2,tp2", "dp2,ep2,ragged-ep", "ep2,tp2,ragged-ep"]),
    "gpt-oss": (2, ["ep2,async-ep", "ep2,ragged-ep"]),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLANS)
def test_losses_equal_one_process(name: str, tmp_path: Path) -> None:
    want, (world, plans) = torch_losses(name), PLANS[name]

    def job(rank: int) -> None:
        routed, counted = token_all_to_all._routing, []
        token_all_to_all._routing = lambda *given: (counted.append(1), routed(*given))[1]
        for plan in plans:
            own = model(name)
            step = parallelize(own, loss, torch.optim.AdamW(own.parameters(), lr=1e-2), batch(0), plan=plan)
            counted.clear()
            got = [step(batch(i)).item() for i in range(2)]
            torch.testing.assert_close(got, want, rtol=1e-8, atol=0, msg=lambda m, plan=plan: f"{plan}: {m}")
            layers = own.config.num_hidden_layers  # in two stages of two micro-batches each rank has half of them twice
            assert len(counted) == (2 * 2 * layers if "ragged" in plan else 0), plan  # tokens are sent forward and backward

    on_ranks(world, job, tmp_path)


def test_where_experts_are_gathered_tokens_alone_come_in_chunks(tmp_path: Path) -> None:
    """More tokens than their small experts have weights, backward: there the experts are gathered."""

    def many(seed: int) -> Tensor:
        return torch.randint(2, 32, (6, 6), generator=torch.Generator().manual_seed(seed))

    own = model("few and small")
    captured = capture(own, many(0), loss, torch.optim.AdamW(own.parameters(), lr=1e-2))
    placed = passes.run(passes.Draft(captured, Spec.parse("ep2"))).program
    assert placed is not None and any(n.args[4].op.name == "all_gather" for n in placed.find_all("experts_backward"))
    want = torch_losses("few and small", many)

    def job(rank: int) -> None:
        own = model("few and small")
        step = parallelize(own, loss, torch.optim.AdamW(own.parameters(), lr=1e-2), many(0), plan="ep2,async-ep")
        torch.testing.assert_close([step(many(i)).item() for i in range(2)], want, rtol=1e-8, atol=0)

    on_ranks(2, job, tmp_path)


def test_tokens_in_uneven_parts_are_sent_to_no_rank_alone() -> None:
    """Six samples on four ranks, though their tokens divide."""
    own = model("few and small")
    captured = capture(own, torch.ones(6, 6, dtype=torch.int64), loss, torch.optim.SGD(own.parameters(), lr=1e-2))
    with pytest.raises(PlanError, match="ragged-ep has nothing to do") as caught:
        passes.run(passes.Draft(captured, Spec.parse("ep4,ragged-ep")))
    assert "an even number on every rank" in str(caught.value)


def test_experts_with_biases_are_one_op() -> None:
    program = capture(model("gpt-oss"), batch(0), loss).program
    assert [n.attr("act") for n in program.find_all("experts")] == ["clamped:1.702:0.02:1.0"]
    assert all(n.op.name != "take" or n.shape[-1] == 16 and n.ndim < 4 for n in program.nodes)  # no matrix is gathered for each token


def test_a_chunk_is_on_its_way_while_experts_are_at_work() -> None:
    """Both ways: the second gather is begun before the first experts, and the first sum before the second experts."""
    own = model("qwen3")
    captured = capture(own, batch(0), loss, torch.optim.AdamW(own.parameters(), lr=1e-2))
    program = passes.run(passes.Draft(captured, Spec.parse("ep2,async-ep"))).program
    assert program is not None
    run = order(program)
    for op in ("experts", "experts_backward"):
        first, second = (n for n in run if n.op.name == op)
        gathers = [a.args[0] for a in second.args if a.op.name == "reshape" and a.args[0].op.name == "all_gather"]
        sums = [n for n in run if n.op.name == "reduce_scatter" and first in _behind(n) and second not in _behind(n)]
        assert gathers and all(run.index(g) < run.index(first) for g in gathers)
        assert sums and run.index(sums[0]) < run.index(second)


def _behind(n: Any) -> set[Any]:
    from weft.core.node import toposort

    return set(toposort([n]))


def test_nothing_to_overlap_is_refused() -> None:
    with pytest.raises(PlanError, match="ep2 or more for async-ep"):
        Spec.parse("dp2,async-ep")
    own = nn.Linear(4, 4)
    captured = capture(own, torch.ones(4, 4), lambda m, x: m(x).sum(), torch.optim.SGD(own.parameters(), lr=1e-2))
    with pytest.raises(PlanError, match="async-ep has nothing to do"):
        passes.run(passes.Draft(captured, Spec.parse("ep2,async-ep")))
