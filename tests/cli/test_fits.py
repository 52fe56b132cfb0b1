"""Will it fit, from a config alone: against torch's own count of parameters and of what autograd keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from weft.cli import app
from weft.cluster.spec import cluster
from weft.core.errors import PlanError, UnknownName
from weft.plan.fits import will_fit
from weft.plan.planner import sized_stack
from weft.plan.setting import Setting
from weft.plan.simulate import memory_of
from weft.plan.sizes import STATE, Stacked, Trained, Watched, model_of, shape_of, watch

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 256}


def call(*words: str) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["fits", *words, "--json"])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]) if result.stdout.strip() else {"error": result.output}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_the_answer_and_its_bytes(config: str) -> None:
    code, found = call(config, "--gpu", "H100-80", "--gpus", "8", "--seq", "4096")
    assert code == 0 and found["fits"] and found["params"] == pytest.approx(8030261248, rel=1e-5)
    assert sum(found["bytes_gb"].values()) == pytest.approx(found["memory_gb"]) and found["memory_gb"] <= found["device_memory_gb"] == 85.0
    assert set(found["bytes_gb"]) == {"weights", "gradients", "optimizer", "activations", "workspace"}
    assert found["largest_batch"] >= 8 and found["plan"]["dp"] * found["plan"]["tp"] == 8
    assert found["memory_gb_low"] < found["memory_gb"] < found["memory_gb_high"]


def test_changes_that_are_named_do_fit(config: str) -> None:
    code, found = call(config, "--gpu", "A100-80")
    assert code == 2 and not found["fits"] and {"--lora 16", "--gpus 2"} <= set(found["changes"])
    for change in found["changes"]:
        if not change.startswith("--gpu "):
            assert call(config, "--gpu", "A100-80", *change.split())[1]["fits"], change


def test_state_of_optimizers_and_adapters(config: str) -> None:
    """Two bytes of weights, four of gradients, four of the copy in fp32, and what the optimizer has."""
    place, model = cluster("1xH100"), model_of(config, 1024)
    n = model.params
    for name, state in STATE.items():
        s = Setting.counted(1, recompute="full")
        m = memory_of(replace(model, how=Trained(state)).work(s), s, place)
        assert (m.params, m.grads, m.optimizer) == pytest.approx((2 * n, 4 * n, (4 + state) * n), rel=1e-6), name
    m = memory_of(replace(model, how=Trained(8.0, 16)).work(Setting.counted(1)), Setting.counted(1), place)
    adapters = 16 * 32 * (4096 + 4096 + 2 * (4096 + 1024) + 4096 + 4096 + 3 * (4096 + 14336))
    assert (m.grads, m.optimizer) == pytest.approx((4 * adapters, 12 * adapters), rel=1e-6)
    assert m.params == pytest.approx(2 * (n + adapters), rel=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        {"model_type": "llama", "tie_word_embeddings": False}, {"model_type": "mistral", "tie_word_embeddings": False}, {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "qwen2", "tie_word_embeddings": True}, {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16},
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    ],
    ids=lambda k: k["model_type"],
)  # fmt: skip
def test_parameters_by_sizes_are_those_of_the_library(kind: dict) -> None:
    transformers = pytest.importorskip("transformers")
    config = {**SMALL, **kind} if kind["model_type"] != "gpt2" else {**kind, "vocab_size": 256}
    made = shape_of(config)
    assert made is not None
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    theirs.tie_weights()
    assert sized_stack(made, "bf16").params == pytest.approx(sum(p.numel() for p in theirs.parameters()), rel=5e-3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_what_is_watched_is_what_autograd_keeps() -> None:
    """The same count on real values, by the tensors that torch's graph holds."""
    with torch.device("meta"):
        model = Net()
    found = watch("net", model, lambda m, b: m(b["x"]).sum(), {"x": torch.empty(1, 5, 32, device="meta")})
    real, kept = Net(), {}
    own = {p.untyped_storage().data_ptr() for p in real.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        loss = real(torch.randn(1, 5, 32)).sum()
    assert loss.isfinite() and sum(p.kept for p in found.parts) == sum(t.untyped_storage().nbytes() for d, t in kept.items() if d not in own)
    assert [p.name for p in found.parts] == ["blocks.0", "blocks.1", "blocks.2", "the rest"] and found.params == sum(p.numel() for p in real.parameters())


def test_any_model_that_is_watched_fits_or_not() -> None:
    with torch.device("meta"):
        model = Net()
    found = watch("net", model, lambda m, b: m(b["x"]).sum(), {"x": torch.empty(1, 5, 32, device="meta")})
    assert isinstance(found, Watched)
    answer = will_fit(found, cluster("2xV100"), 8, "fp16")
    assert answer.fits and answer.setting.zero == 0 and answer.setting.micro_batch == 4
    with pytest.raises(PlanError, match="does not run without values"):
        watch("odd", model, lambda m, b: torch.zeros(int(b["x"].sum())), {"x": torch.empty(1, device="meta")})


def test_a_model_that_asks_for_values_is_captured(tmp_path: Path) -> None:
    """Gemma reads a number of its own, which a module without values cannot give."""
    transformers = pytest.importorskip("transformers")
    gemma = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 16, **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**{k: v for k, v in gemma.items() if k not in ("architectures", "model_type")}))
    code, found = call(str(tmp_path), "--gpu", "A100-40", "--seq", "64")
    assert code == 0 and found["fits"] and found["params"] == sum(p.numel() for p in model.parameters()) and found["seq"] == 64


def test_refusals(config: str, tmp_path: Path) -> None:
    assert "no device named 'Z90'" in call(config, "--gpu", "Z90")[1]["error"] and "H100" in call(config, "--gpu", "Z90")[1]["error"]
    assert "no optimizer named 'magic'" in call(config, "--gpu", "H100", "--optimizer", "magic")[1]["error"]
    with pytest.raises(UnknownName, match="no config and no model named"):
        model_of("nothing-of-the-kind")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UnknownName, match="no config of Hugging Face"):
        model_of(str(tmp_path / "other.json"))
    assert isinstance(model_of("gpt2"), Stacked)


def test_experts_are_spread_where_sharding_alone_is_not_enough() -> None:
    """A layer's experts are gathered whole by ZeRO-3; spread over devices they are not."""
    model, place = model_of("mixtral-8x7b", 4096), cluster("1x8xH100")
    found = will_fit(model, place, 8, "bf16")
    assert found.setting.ep == 8
    whole = replace(found.setting, dp=8, ep=1)
    assert memory_of(model.work(whole), whole, place).total > found.memory.total


def test_a_kind_whose_nodes_would_not_be_full_is_not_advised() -> None:
    """GB200 come by 72."""
    found = will_fit(model_of("llama3-405b", 8192), cluster("256xH100"), 256 * 64, "fp32", ("GB200",))
    assert "--gpu GB200" not in found.changes
