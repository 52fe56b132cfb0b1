"""`weft plan`, `explain` and `diff` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli import app
from weft.core.errors import PlanError
from weft.plan.space import bytes_of


def call(*args: str):
    return CliRunner().invoke(app, list(args))


def last(result) -> dict:
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_plan_explain_diff(tmp_path) -> None:
    one, two = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    made = call("plan", "gpt2", "--cluster", "1x2xA100", "--batch", "8", "--out", one, "--json", "--fastest", "--what-if", "batch=16")
    assert made.exit_code == 0, made.output
    found = last(made)
    figures = ["step_ms", "tokens_per_s", "mfu", "memory_gb"]
    ends = [f"{name}_{end}" for name in figures for end in ("low", "high")]
    keys = ["model", "cluster", *figures, *ends, "interval", "fastest_ms", "equal_ms", "seconds", "baselines_ms", "infeasible", "plan"]
    assert list(found) == [*keys, "what_if"] and found["step_ms_low"] < found["step_ms"] < found["step_ms_high"]
    assert "80% interval" in found["interval"] and "stragglers" in made.output and found["what_if"][0]["what_if"] == "batch=16"
    assert found["what_if"][0]["plan"]["given"]["global_batch"] == 16
    assert found["step_ms"] <= min(found["baselines_ms"].values())
    pinned = call("plan", "gpt2", "--cluster", "1x2xA100", "--batch", "8", "--out", two, "--json", "--pin", "recompute=full")
    assert last(pinned)["plan"]["spec"]["recompute"] == "full" and " of 85.0 GB" in pinned.output
    assert {"what": "recompute", "a": "none", "b": "full"} in last(call("diff", one, two, "--json"))["differences"]
    assert "recompute" in {d["decision"] for d in last(call("explain", one, "--json"))["decisions"]}


def test_infeasible_is_an_answer() -> None:
    made = call("plan", "gpt2", "--cluster", "1xA100", "--batch", "8", "--memory", "2GB", "--json")
    assert made.exit_code == 2
    found = last(made)
    assert found["plan"] is None and "needs at least" in found["infeasible"]["weft"] and "--memory" in found["infeasible"]["nearest"]


def test_the_nearest_change_is_the_memory_it_takes() -> None:
    """Not more than needed: the change is run, and it fits."""
    asked = ["plan", "gpt2", "--cluster", "1xA100", "--batch", "8", "--json"]
    option, size = last(call(*asked, "--memory", "2GB"))["infeasible"]["nearest"].partition(":")[0].split()
    made = call(*asked, option, size)
    assert made.exit_code == 0 and last(made)["memory_gb"] <= bytes_of(size) / 1e9 < 5  # device of 85 GB


OWN = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    return model, lambda model, batch: (model(batch["x"]) ** 2).mean(), {"x": torch.randn(8, 64)}
"""


def test_of_a_program_that_does_not_fit_the_nearest_change_is_planned_too(tmp_path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = call("plan", f"{tmp_path / 'own.py'}:make", "--cluster", "1x1xA100", "--memory", "1GB", "--json")
    found = last(made)["infeasible"]
    assert made.exit_code == 2 and "dp1 needs at least 1.5 GB of 1.0 GB" in made.output
    assert found["nearest"].startswith("without --memory: 0.") and found["nearest"].endswith(" ms with one device, micro-batch 8")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--batch", "-7"], "--batch is -7"), (["--pin", "zero=7"], "ZeRO has stages 0 to 3"), (["--pin", "tp=0"], "cannot pin tp to 0"),
        (["--out", "nowhere/plan.json"], "no folder nowhere"), (["--export", "fun"], "no system named 'fun'"), (["--objective", "fun"], "or goodput"),
        (["--objective", "goodput", "--noise", "50", "--batch", "8"], "goodput chooses the batch"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_before_the_work(options: list[str], says: str) -> None:
    made = call("plan", "gpt2", "--cluster", "1x2xA100", *options)
    assert made.exit_code == 1 and says in made.output and "planned in" not in made.output


def test_a_captured_model_has_the_length_of_its_example() -> None:
    made = call("plan", "mlp", "--cluster", "1x2xA100", "--seq", "12")
    assert made.exit_code == 1 and "mlp has the length of its example" in made.output


@pytest.mark.parametrize(("options", "tp"), [(["--max-tp", "1"], {1}), (["--pin", "tp=4"], {4}), (["--pin", "tp=1", "--pin", "zero=1"], {1})])
def test_degrees_of_a_program_are_fixed_as_those_of_a_stack(options: list[str], tp: set[int]) -> None:
    made = call("plan", "mlp", "--cluster", "1x4xA100", *options, "--json")
    found = last(made)["plan"]["spec"]
    assert made.exit_code == 0 and found.get("tp", 1) in tp and ("zero=1" not in options or found["zero"] == 1), made.output


def test_words_that_cannot_be_read() -> None:
    assert bytes_of("70GB") == 70e9 and bytes_of("1GiB") == 2**30
    with pytest.raises(PlanError, match="cannot read the memory"):
        bytes_of("much")
    made = call("plan", "gpt2", "--cluster", "1x2xA100", "--what-if", "colour=red")
    assert made.exit_code == 1 and "cannot read --what-if" in made.output
    assert "no objective" in call("plan", "gpt2", "--cluster", "1x2xA100", "--objective", "fun").output


def test_a_hugging_face_folder_has_the_length_asked_for(tmp_path: Path) -> None:
    """What a user has and what they train with: a config.json, and sequences shorter than the model takes. Its report needs no leave to run code."""
    pytest.importorskip("transformers")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "plan.json"
    made = CliRunner().invoke(app, ["plan", f"hf:{tmp_path / 'own'}", "--cluster", "1x2xA100", "--seq", "128", "--batch", "16", "--out", str(out)])
    assert made.exit_code == 0 and "global batch 16 x 128 tokens" in made.output and "tokens/s" in made.output
    page = CliRunner().invoke(app, ["report", str(out), "--no-explain"])
    assert page.exit_code == 0 and "16 × 128" in (tmp_path / "plan.html").read_text()  # the batch is drawn at that length too
