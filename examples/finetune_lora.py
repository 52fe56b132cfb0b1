"""Fine-tune a Hugging Face Llama with LoRA by `Trainer`: `weft run -n 2 examples/finetune_lora.py --plan dp2`.

Two lines differ from a script for one process: the import of Trainer, and its plan.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import peft
import torch
import transformers

from weft.api.trainer import Trainer  # instead of transformers.Trainer


class Notes(torch.utils.data.Dataset[Any]):
    """Instructions of several lengths, padded by the collator; the prompt has no loss."""

    def __init__(self, samples: int = 22) -> None:
        draw = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(1, 64, (int(torch.randint(6, 13, (), generator=draw)),), generator=draw) for _ in range(samples)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        ids = self.rows[i].tolist()
        return {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(r["input_ids"]) for r in rows)

    def padded(key: str, value: int) -> torch.Tensor:
        return torch.tensor([r[key] + [value] * (longest - len(r[key])) for r in rows])

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": padded("input_ids", 0).ne(0).long()}


def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape))
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).double()


def settings(folder: str, samples: int) -> Any:
    return transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=samples, num_train_epochs=2, learning_rate=1e-2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=2,
    )  # fmt: skip


def summary(trainer: Any) -> dict[str, Any]:
    """Losses as they were logged, and the size of what was trained."""
    trained = [p.detach().double().norm().item() for p in trainer.model.parameters() if p.requires_grad]
    return {"losses": [row["loss"] for row in trainer.state.log_history if "loss" in row], "norms": trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="dp2")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model(), settings(folder, 4), collate, Notes(), plan=asked.plan)
        trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps(summary(trainer)))


if __name__ == "__main__":
    main()
