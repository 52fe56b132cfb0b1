"""A sample of the cases that `weft bench wild` ships, over real processes: each equals plain torch or is refused in words."""

from __future__ import annotations

import pytest

from bench import wild
from bench.wild_cases import CASES

EQUAL = [
    ("dp1", ["hf_bloom", "hf_mpnet"]),
    ("dp1", ["scheduler_one_cycle", "optimizer_loaded_adamw", "batch_keys_alike", "nn_unet", "loss_dice"]),
    ("dp2", ["nn_cells", "nn_batchnorm1d", "nn_transformer", "loss_cross_entropy_ignored"]),
    ("dp2", ["batch_nested", "feature_spectral_norm", "hf_vit"]),
    ("dp2,zero3", ["nn_experts", "feature_tied_weights"]),
    ("tp2", ["nn_attention_of_torch"]),
    ("pp2", ["loss_mean_over_tokens", "loss_cross_entropy_sum"]),
]
EITHER = [
    ("dp1", ["feature_item", "feature_counter", "feature_gradient_penalty", "feature_zero_rows", "nn_embedding_by_frequency"]),
    ("pp2", ["loss_contrastive", "nn_batchnorm1d"]),
]


def statuses(plan: str, names: list[str]) -> tuple[set[str], str]:
    imports = ["transformers"] if any(name.startswith("hf_") for name in names) else []
    rows = list(wild.run({name: CASES[name] for name in names}, [plan], jobs=1, timeout=100, imports=imports))
    assert [row["case"] for row in rows] == names
    return {row["status"] for row in rows}, "\n".join(map(wild.line, rows))


@pytest.mark.parametrize(("plan", "names"), EQUAL)
def test_a_sample_equals_torch(plan: str, names: list[str]) -> None:
    found, lines = statuses(plan, names)
    assert found == {"ok"}, lines


@pytest.mark.parametrize(("plan", "names"), EITHER)
def test_what_is_hard_equals_torch_or_is_refused(plan: str, names: list[str]) -> None:
    found, lines = statuses(plan, names)
    assert found <= {"ok", "refused"}, lines


def test_at_least_a_hundred_and_twenty_cases_are_shipped() -> None:
    assert len(CASES) >= 120
