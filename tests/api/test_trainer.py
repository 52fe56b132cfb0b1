"""transformers' Trainer with weft's step, and an accelerate loop: equal to theirs, with checkpoints and evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.core.errors import PlanError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.ids = torch.randint(0, 32, (samples, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def gpt2() -> Any:
    torch.manual_seed(0)
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, **none)).double()


def trainer(kind: Any, folder: Path, more: dict[str, Any] | None = None, **settings: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, **{"save_strategy": "epoch", "eval_strategy": "epoch", **settings},
    )  # fmt: skip
    return kind(gpt2(), args, train_dataset=Rows(10), eval_dataset=Rows(6), **(more or {}))


def test_it_trains_evaluates_saves_and_resumes_as_transformers_does(tmp_path: Path) -> None:
    from weft.api.trainer import Trainer

    theirs, ours = trainer(transformers.Trainer, tmp_path / "theirs"), trainer(Trainer, tmp_path / "ours", {"plan": "micro2"})
    theirs.train()
    ours.train()
    resumed = trainer(Trainer, tmp_path / "ours", {"plan": "dp1"})
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    want = theirs.model.state_dict()
    for made in (ours, resumed):  # transformers' loss is of logits in float32
        torch.testing.assert_close(dict(made.model.state_dict()), dict(want), rtol=1e-5, atol=1e-7)
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        assert [r[key] for r in ours.state.log_history if key in r] == pytest.approx([r[key] for r in theirs.state.log_history if key in r], rel=1e-5)


def test_what_the_trainer_would_split_itself_is_refused(tmp_path: Path) -> None:
    from weft.api.trainer import Trainer

    with pytest.raises(PlanError, match=r"set to split the work as well(.|\n)*gradient_accumulation_steps=2(.|\n)*micro4"):
        trainer(Trainer, tmp_path, gradient_accumulation_steps=2)


def _accelerate(folder: Path, world: int, rank: int, by_weft: bool) -> list[float]:
    """A loop of accelerate's: with weft, what was `prepare` of the model, and the five lines of a step, are one line each."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
    loader = accelerator.prepare(DataLoader(Rows(16), batch_size=8 // world))
    example = {k: torch.cat([x] * world) for k, x in next(iter(loader)).items()}
    step = parallelize(model, lambda m, b: m(**b).loss, optimizer, example, f"dp{world}") if by_weft else None
    losses = []
    for batch in loader:
        if step is not None:
            loss = step(batch)
        else:
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_a_loop_of_accelerate(tmp_path: Path) -> None:
    want = _accelerate(tmp_path, 1, 0, False)

    def job(rank: int) -> None:
        from accelerate import PartialState

        PartialState._reset_state()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        assert _accelerate(tmp_path, 2, rank, True) == pytest.approx(want, rel=1e-6)

    on_ranks(2, job, tmp_path)
