"""The loops people have: each script in `examples/` on two processes, against the same loop in plain torch."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from weft.api.data import Rows

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(commands: Path, name: str, plan: str) -> tuple[dict[str, Any], str]:
    """What two processes print, and what they say."""
    command = [str(commands / "weft"), "run", "-n", "2", str(EXAMPLES / f"{name}.py"), "--plan", plan]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"losses"'))), done.stdout + done.stderr


def stepped(model: Any, optimizer: Any, loss: Tensor, clip: float | None = None) -> float:
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def test_pretraining_on_packed_documents(commands: Path) -> None:
    of = example("pretrain_packed")
    model, optimizer = of.made()
    losses = [stepped(model, optimizer, of.loss(model, batch), 1.0) for batch in of.batches(8)]
    found, said = run(commands, "pretrain_packed", "dp2")
    torch.testing.assert_close(found["losses"], losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["norms"], [p.norm().item() for p in model.parameters()], rtol=1e-8, atol=1e-8)
    assert found["shapes"].startswith("tokens [4, 16 to 64]") and said.count("compiled for") == 2


def test_a_vision_transformer_with_a_last_small_batch(commands: Path) -> None:
    of = example("train_vit")
    model, optimizer, scheduler = of.made()
    data, losses = of.Images(), list[float]()
    for batch, _ in zip(DataLoader(data, batch_sampler=Rows(len(data), of.BATCH, torch.arange, seed=3)), range(8), strict=False):
        losses.append(stepped(model, optimizer, of.loss(model, batch)))
        scheduler.step()
    found, said = run(commands, "train_vit", "dp2,zero2")
    torch.testing.assert_close(found["losses"], losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["norms"], [p.norm().item() for p in model.parameters()], rtol=1e-8, atol=1e-8)
    assert "lr_scheduler.step()" not in said


def test_fine_tuning_with_lora_by_trainer(commands: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    import transformers

    of = example("finetune_lora")
    trainer = transformers.Trainer(of.model(), of.settings(str(tmp_path), 8), of.collate, of.Notes())
    trainer.train()
    found, _ = run(commands, "finetune_lora", "dp2")
    want = of.summary(trainer)
    torch.testing.assert_close(found["losses"], want["losses"], rtol=1e-6, atol=0)  # the Trainer adds them up in float32
    torch.testing.assert_close(found["norms"], want["norms"], rtol=1e-7, atol=1e-8)  # Llama rounds its rotary angles to float32
