"""Every kind of plan on ranks that share a GPU: do its losses equal torch's, and does every run end?

    python -m bench.gpu_plans [--stages hosts,symmetric] [--plans "dp4,zero1;pp4" | --plans pipelines] [--times 1] [--json]

`hosts`: every rank is a host of its own to NCCL, joined by sockets. `symmetric`: ranks map each other's memory and meet over gloo. The judge
is eager torch in one process on the whole batch, parameters in bf16 as here, AdamW, five batches in turn.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch
import typer

from bench import _gpu
from bench._gpu_rank import Rank

STAGES = {
    "hosts": _gpu.Stage("plans", limit=60, backend=_gpu.NCCL, settings={"hosts": True}),
    "symmetric": _gpu.Stage("plans", limit=60, settings={"hosts": False}),
}
PLANS = (
    "dp4;dp4,zero1;dp4,zero3;tp4;tp4,sp;dp2,tp2;cp4,ring;dp2,pp2,micro4;pp4,micro4;pp4,micro4,gpipe;pp4,micro4,zero-bubble;"
    "pp2,tp2,micro4,interleaved"
)
SIZES = {True: {"layers": 8, "hidden": 512, "heads": 8, "vocab": 4096, "seq": 256, "batch": 16},  # on a GPU
         False: {"layers": 8, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 8}}  # fmt: skip
CLOSE = {torch.bfloat16: 1e-3, torch.float32: 1e-3}  # relative, of losses
STEPS, EACH = 5, 30.0  # seconds that a plan may take to compile and run


def register(app: typer.Typer) -> None:
    app.command("gpu-plans")(gpu_plans)


def gpu_plans(
    stages: str = typer.Option(",".join(STAGES)),
    plans: str = typer.Option(PLANS, help="With semicolons between; `pipelines`: every schedule, on two stages of two ranks and on four stages."),
    times: int = typer.Option(1, help="How often each is run."), dtype: str = typer.Option("bfloat16", help="Of the parameters."),
    layers: int = typer.Option(8, help="Of the model; interleaved stages need two for each."),
    ranks: int = _gpu.RANKS, device: str = _gpu.DEVICE, json: bool = _gpu.JSON,
) -> None:  # fmt: skip
    """Losses under every kind of plan against torch on one device."""
    wanted = pipelines() if plans == "pipelines" else plans.split(";")
    settings = {"plans": wanted * times, "dtype": dtype, "layers": layers}
    timed = {name: replace(stage, limit=stage.limit + EACH * len(settings["plans"])) for name, stage in STAGES.items()}
    _gpu.report("gpu-plans", _gpu.run_stages("bench.gpu_plans", timed, stages, ranks, device, **settings), json)


def pipelines() -> list[str]:
    from weft.plan.schedules import SCHEDULES

    return [f"{mesh},{name}" for name in SCHEDULES for mesh in ("dp2,pp2,micro4", "pp4,micro8")]


def plans(me: Rank, plans: list[str], hosts: bool, dtype: str, layers: int) -> None:
    if hosts:
        me.become_host()
    Judge(me, getattr(torch, dtype), layers).run(plans)


class Judge:
    """One model, and the losses torch trains it with."""

    def __init__(self, me: Rank, dtype: torch.dtype, layers: int) -> None:
        import weft_zoo as zoo

        sizes = SIZES[me.cuda] | {"layers": layers}
        batch = sizes.pop("batch")
        self.me, self.dtype, self.done = me, dtype, 0
        self.workload = zoo.get("gpt2", device="cpu", dropout=0.0, **sizes)
        self.model = self.workload.model.to(dtype)
        self.batches = [self.workload.example(batch, seed=i) for i in range(STEPS)]
        self.want = self._torch()
        me.say(note="torch", losses=self.want)

    def _torch(self) -> list[float]:
        model = copy.deepcopy(self.model).to(self.me.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for batch in self.batches:
            optimizer.zero_grad()
            loss = self.workload.loss(model, {k: v.to(self.me.device) for k, v in batch.items()})
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    def run(self, plans: list[str]) -> None:
        for number, plan in enumerate(plans, 1):
            start = time.time()
            made = self.me.tried(plan, lambda plan=plan: self._weft(plan))
            if made is None:
                continue
            losses, how = made
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, self.want, strict=True))
            right = {} if apart <= CLOSE[self.dtype] else {"failed": f"losses differ by {apart:.1e}", "losses": losses}
            self.done += not right
            self.me.say(case=plan, apart=apart, how=how, seconds=round(time.time() - start, 1), right=f"{self.done} of {number}", **right)

    def _weft(self, plan: str) -> tuple[list[float], Any]:
        from weft.api.parallelize import parallelize

        model = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = parallelize(model, self.workload.loss, optimizer, self.batches[0], plan=plan, device=self.me.device.type)
        losses = [float(step({k: v.to(self.me.device) for k, v in batch.items()})) for batch in self.batches]
        return losses, getattr(step.compiled, "how", "")


if __name__ == "__main__":
    typer.run(gpu_plans)
