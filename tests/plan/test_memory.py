"""Bytes that a layer keeps for its backward, against counts by hand: what is kept is listed, in units of samples x tokens x hidden bytes."""

from __future__ import annotations

import pytest

from weft.plan.memory import saved
from weft.plan.planner import sized_stack
from weft.plan.setting import Setting
from weft.plan.sizes import Shape

SAMPLES, TOKENS, HIDDEN, HEADS = 4, 1024, 1024, 16
GPT = Shape(3, HIDDEN, HEADS, 50304, TOKENS, dropout=True)
LLAMA = Shape(3, HIDDEN, HEADS, 32000, TOKENS, kv_heads=4, ffn=2816, gated=True, rotary=True, bias=False, tied=False)
INNER, SHARED, SCORES = LLAMA.ffn / HIDDEN, LLAMA.kv_heads / HEADS, HEADS * TOKENS / HIDDEN
SHARDED = [(1, False), (2, False), (4, False), (2, True), (4, True)]  # tp, with sequence parallelism


def keeps(shape: Shape, tp: int, sp: bool, **how: str) -> float:
    setting = Setting.counted(SAMPLES, SAMPLES, tp=tp, sequence_parallel=sp, dtype="bf16", **how)
    return saved(setting, sized_stack(shape, "bf16").work(setting).layer) / (SAMPLES * TOKENS * HIDDEN)


@pytest.mark.parametrize(("tp", "sp"), SHARDED)
def test_classic_kernels_keep_what_korthikanti_counted(tp: int, sp: bool) -> None:
    """Reducing activation recomputation, table 2: 10 are of norms, masks and inputs that all ranks have, 5 scores of the softmax and of what it drops.
    `selective` makes the attended (2) and the activation's result (8) again as well."""
    whole = 34 / tp if sp else 10 + 24 / tp
    counted = {"none": whole + 5 * SCORES / tp, "selective": whole - 10 / tp, "full": 2 / tp if sp else 2.0}
    for recompute, count in counted.items():
        assert keeps(GPT, tp, sp, kernels="classic", recompute=recompute) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize(("tp", "sp"), SHARDED)
def test_a_gpt_keeps(tp: int, sp: bool, kernels: str) -> None:
    """Inputs of two norms (2 + 2) and what these hand to matmuls, gathered (2 + 2); sharded: q, k, v and the attended (8), inputs of the activation
    and of the matmul after it (8 + 8)."""
    count = (4 / tp if sp else 4) + 4 + 24 / tp
    assert keeps(GPT, tp, sp, kernels=kernels) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize(("tp", "sp"), SHARDED)
def test_a_llama_keeps(tp: int, sp: bool, kernels: str) -> None:
    """As a GPT, but fewer keys and values; of the gated feed-forward both factors, their product, and in eager torch the activation as well. Of
    what the first norm hands on a rank keeps its slice: for weight gradients it is cheaper to exchange the fewer gradients of keys and values."""
    wide = 2 * INNER * (4 if kernels == "eager" else 3)
    count = (6 / tp if sp else 6) + 2 + (4 + 4 * SHARED + wide) / tp
    assert keeps(LLAMA, tp, sp, kernels=kernels) == pytest.approx(count, rel=0.05)
