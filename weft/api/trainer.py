"""A Hugging Face `Trainer` whose training step is weft's: `Trainer(..., plan="dp2")` in a script that `weft run` starts.

Every rank reads full batches in one process's order, so that plans, last small batches and token counts mean what they mean there.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from weft.api.parallelize import parallelize
from weft.api.step import Step
from weft.core.errors import PlanError


class Trainer(transformers.Trainer):
    """transformers.Trainer under a plan; `settings` are those of `weft.parallelize`. A batch has `per_device_train_batch_size` samples for every rank."""

    def __init__(self, *args: Any, plan: str = "dp1", settings: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.plan, self.settings, self.step = plan, dict(settings or {}), None
        self.accelerator.prepare_model = lambda model, **_: model  # weft has what DDP would do
        self.args.average_tokens_across_devices = False  # every rank counts the tokens of the full batch
        self._require()

    step: Step | None

    def _require(self) -> None:
        args = self.args
        odd = {
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}": args.gradient_accumulation_steps > 1,
            "fp16=True": args.fp16, "fsdp": self.is_fsdp_enabled, "deepspeed": self.is_deepspeed_enabled,
        }  # fmt: skip
        found = [what for what, is_set in odd.items() if is_set]
        if found:
            raise PlanError(
                "the Trainer is set to split the work as well",
                needed="a Trainer that leaves it to the plan",
                found=", ".join(found),
                try_=("plan='dp2,micro4' with a larger per_device_train_batch_size, for accumulation", "bf16=True", "plan='dp2,zero3'"),
            )

    # -- full batches on every rank ---------------------------------------------------------------------------------------------

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, is_training: bool = False, **more: Any) -> Any:
        if not is_training:
            return super()._get_dataloader(dataset, description, batch_size, *args, is_training=is_training, **more)
        prepare = self.accelerator.prepare
        try:
            self.accelerator.prepare = self._full_batches
            return super()._get_dataloader(dataset, description, batch_size * self.args.world_size, *args, is_training=is_training, **more)
        finally:
            self.accelerator.prepare = prepare

    def _full_batches(self, loader: DataLoader[Any]) -> Any:
        config = self.accelerator.dataloader_config
        return prepare_data_loader(
            loader, self.accelerator.device, num_processes=1, process_index=0, put_on_device=self.accelerator.device_placement,
            use_seedable_sampler=config.use_seedable_sampler, data_seed=config.data_seed, rng_types=None,
        )  # fmt: skip

    # -- the step ----------------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward, backward and update; what the Trainer does next finds no gradients and changes nothing."""
        model.train()
        batch = {"inputs": dict(self._prepare_inputs(inputs)), "items": num_items_in_batch}
        if self.step is None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            known = {"clip": self.args.max_grad_norm or None, "precision": torch.bfloat16 if self.args.bf16 else None, "device": self.args.device}
            self.step = parallelize(self.model, self._loss, optimizer, batch, self.plan, **{**known, **self.settings})
        return self.step(batch).detach().to(self._tr_loss.device)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.compute_loss(model, dict(batch["inputs"]), num_items_in_batch=batch["items"])

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.step.grad_norm if self.step is not None else None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm

    # -- the module with the step's values ---------------------------------------------------------------------------------------

    def sync(self, optimizer: bool = False) -> None:
        """Put what was trained into the module, and into the optimizer; every rank must ask."""
        if self.step is not None:
            self.step.sync_model()
            if optimizer:
                self.step.sync_optimizer()

    def train(self, *args: Any, **more: Any) -> Any:
        """Train; the module has the trained values afterwards."""
        self.step = None
        out = super().train(*args, **more)
        self.sync()
        return out

    def _save_checkpoint(self, *args: Any, **more: Any) -> None:
        self.sync(optimizer=True)
        super()._save_checkpoint(*args, **more)

    def _finalize_training(self, *args: Any, **more: Any) -> Any:
        self.sync()
        return super()._finalize_training(*args, **more)

    def evaluate(self, *args: Any, **more: Any) -> Any:
        self.sync()
        return super().evaluate(*args, **more)

    def predict(self, *args: Any, **more: Any) -> Any:
        self.sync()
        return super().predict(*args, **more)
