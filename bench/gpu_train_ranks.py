"""Training steps of a GPT on ranks that share a GPU, against DDP and FSDP2.

    python -m bench.gpu_train_ranks [--stages hosts,symmetric] [--plans "dp4;dp4,zero1 lanes2"] [--model gpt|llama|llama-mixed] [--json]

`hosts`: every rank is a host of its own to NCCL, which joins them by sockets. `symmetric`: ranks map each other's memory, and torch's ways
have their collectives replaced by ones over the same memory. Losses of three steps are compared before anything is timed.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import typer

from bench import _gpu
from bench._gpu_memory import Memory
from bench._gpu_rank import Rank, timed_row
from bench._gpu_time import timeline
from bench._gpu_train_model import HuggingFace

STAGES = {
    "hosts": _gpu.Stage("train", limit=300, backend=_gpu.NCCL, settings={"hosts": True}),
    "symmetric": _gpu.Stage("train", limit=300, settings={"hosts": False}),
}
SIZES = {True: {"layers": 4, "hidden": 768, "heads": 12, "vocab": 8192, "seq": 512, "batch": 8},  # on a GPU
         False: {"layers": 1, "hidden": 32, "heads": 2, "vocab": 64, "seq": 8, "batch": 2}}  # fmt: skip
LLAMA = {True: ({"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,  # 0.37 billion, bf16
                 "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048}, 8, 1024),
         False: ({"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
                  "vocab_size": 64, "max_position_embeddings": 16}, 8, 8)}  # fmt: skip
CLOSE = 2e-3  # relative, of losses
TIMING = 10.0  # seconds that rounds of all ways may take, of which there are three at least
Step = Callable[[Any], Any]  # from a global batch to the loss, of this rank's part or of all


def register(app: typer.Typer) -> None:
    app.command("gpu-train-ranks")(train_ranks)


def train_ranks(
    stages: str = typer.Option(",".join(STAGES)),
    plans: str = typer.Option("", help="With semicolons between; ` lanesN` after one: its messages over N groups, not as measured."),
    model: str = typer.Option("gpt", help="gpt: of the zoo, fp32. llama: of transformers, bf16, every way compiled; -mixed: fp32 parameters."),
    peers: str = typer.Option("ddp,fsdp2,tp", help="Of llama: what it is compared with; tp over NCCL only."),
    profile: bool = typer.Option(False, help="Also tell what rank 0's kernels do in a step."),
    ranks: int = _gpu.RANKS, device: str = _gpu.DEVICE, quick: bool = _gpu.QUICK, json: bool = _gpu.JSON,
) -> None:  # fmt: skip
    """parallelize()'s steps against DDP and FSDP2, over NCCL sockets and over symmetric memory."""
    some = [f"dp{ranks}", f"dp{ranks},zero1", *([] if quick else [f"dp{ranks},zero3"])]
    settings = {"plans": plans.split(";") if plans else some, "quick": quick, "model": model, "peers": peers.split(","), "profile": profile}
    _gpu.report("gpu-train-ranks", _gpu.run_stages("bench.gpu_train_ranks", STAGES, stages, ranks, device, **settings), json)


def train(me: Rank, plans: list[str], hosts: bool, quick: bool, model: str, peers: list[str], profile: bool) -> None:
    if hosts:
        me.become_host()
    race = Race(me, None if hosts else Memory(me), model, profile)
    if model.startswith("llama"):
        known = COMPILED if hosts or not me.cuda else {k: v for k, v in COMPILED.items() if k != "tp"}
        race.run(plans, {f"{k} compiled": way for k, way in known.items() if k in peers})
        return
    compiled = {"ddp compiled": compiled_ddp} if me.cuda and not hosts and not quick else {}
    race.run(plans, {"ddp": ddp, "fsdp2": fsdp2, **compiled})


class Race:
    """One model, and ways to train it that were seen to give the same losses."""

    def __init__(self, me: Rank, over: Memory | None, model: str, profile: bool) -> None:
        torch.set_float32_matmul_precision("high")
        self.me, self.over, self.losses, self.name = me, over, dict[str, list[float]](), model
        self.mixed, self.profile = model.endswith("-mixed"), profile
        self.workload, batches = llama(me, self.mixed) if model.startswith("llama") else gpt(me)
        self.batches = [{k: v.to(me.device) for k, v in batch.items()} for batch in batches]
        count = sum(p.numel() for p in self.workload.model.parameters())
        me.say(note="model", parameters=count, shapes={k: list(v.shape) for k, v in self.batches[0].items()})

    def run(self, plans: list[str], makers: dict[str, Callable[[Race], Step]]) -> None:
        peers = {name: step for name, make in makers.items() if (step := self.started(name, make)) is not None}
        for plan in plans:
            step = self.started(plan, lambda race, plan=plan: Planned(race, plan))
            if step is not None:
                self.time(plan, step, peers)

    def started(self, name: str, make: Callable[[Race], Step]) -> Step | None:
        """The way to train of this name after three steps, if its losses are those of the first one made."""

        def start() -> tuple[Step, list[float]]:
            step = make(self)
            return step, [float(step(batch)) for batch in self.batches]

        made = self.me.tried(name, start)
        if made is None:
            return None
        step, mine = made
        self.losses[name] = [statistics.fmean(each) for each in zip(*self.me.all(mine), strict=True)]
        if self.apart(name) > CLOSE:
            self.me.say(case=name, failed="other losses", losses=self.losses[name], wanted=next(iter(self.losses.values())))
            return None
        for batch in self.batches:
            step(batch)
        return step  # type: ignore[no-any-return]

    def apart(self, name: str) -> float:
        first = next(iter(self.losses.values()))
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses[name], first, strict=True))

    def time(self, plan: str, step: Any, peers: dict[str, Step]) -> None:
        batch = self.batches[0]
        ways = {name: (lambda one=one: one(batch)) for name, one in {"weft": step, **peers}.items()}
        once = sum(self.me.time_calls(ways, rounds=1).values())
        ms = self.me.time_calls(ways, rounds=max(3, min(10, int(TIMING * 1e3 / once))))
        if self.profile and self.me.cuda:
            for name, one in {plan: step, **peers}.items():
                self.me.sync()
                seen = timeline(lambda one=one: one(batch))
                self.me.say(note=f"kernels of {name}", **{**seen, "most": seen["most"][:45]})
        same = f"losses of three steps equal {next(iter(self.losses))}'s to {self.apart(plan):.1e}"
        self.me.say(**timed_row(f"{self.name} {plan}", ms, how=step.how, correct=same))


def gpt(me: Rank) -> tuple[Any, list[Any]]:
    import weft_zoo as zoo

    sizes = dict(SIZES[me.cuda])
    batch = sizes.pop("batch") * me.world
    workload = zoo.get("gpt2", device="cpu", dropout=0.0, **sizes)
    return workload, [workload.example(batch, seed=i) for i in range(3)]


def llama(me: Rank, mixed: bool) -> tuple[Any, list[Any]]:
    workload = HuggingFace("LlamaForCausalLM", *LLAMA[me.cuda], torch.float32 if mixed else torch.bfloat16)
    return workload, [workload.example(i) for i in range(3)]


# -- ways to train -------------------------------------------------------------------------------------------------------------


class Planned:
    """weft, by a plan."""

    def __init__(self, race: Race, plan: str) -> None:
        from weft.api.parallelize import parallelize

        plan, _, lanes = plan.partition(" lanes")
        os.environ["WEFT_CHANNELS"] = lanes  # groups over which messages are sent in turn; none said, as measured
        model = copy.deepcopy(race.workload.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        example = {k: v.cpu() for k, v in race.batches[0].items()}
        low = torch.bfloat16 if race.mixed else None
        self.step = parallelize(model, race.workload.loss, optimizer, example, plan=plan, device=race.me.device.type, precision=low)

    def __call__(self, batch: Any) -> Any:
        return self.step(batch)

    @property
    def how(self) -> str:
        return getattr(getattr(self.step, "compiled", None), "how", "a pipeline")


def ddp(race: Race, compiled: bool = False) -> Step:
    """DistributedDataParallel and torch's fused AdamW; over symmetric memory by a communication hook."""
    from torch.nn.parallel import DistributedDataParallel

    model: Any = DistributedDataParallel(copy.deepcopy(race.workload.model).to(race.me.device), gradient_as_bucket_view=True)
    if race.over is not None:
        model.register_comm_hook(None, race.over.hook)
    return loop(race, torch.compile(model) if compiled else model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), race.mixed)


def compiled_ddp(race: Race) -> Step:
    return ddp(race, compiled=True)


def compiled_fsdp2(race: Race) -> Step:
    return fsdp2(race, compiled=True)


def fsdp2(race: Race, compiled: bool = False) -> Step:
    """fully_shard per block and over the whole; over symmetric memory by custom collectives."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if race.mixed else {}
    model, mesh = copy.deepcopy(race.workload.model).to(race.me.device), DeviceMesh.from_group(dist.group.WORLD, race.me.device.type)
    for blocks in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        for block in blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    for module in model.modules():
        if race.over is not None and isinstance(module, FSDPModule):
            race.over.install(module)
    return loop(race, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=race.me.cuda))


def compiled_tp(race: Race) -> Step:
    """torch's tensor parallelism of every block of a Llama, and of its head, whose output is gathered."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = copy.deepcopy(race.workload.model).to(race.me.device), DeviceMesh.from_group(dist.group.WORLD, race.me.device.type)
    cut = {n: RowwiseParallel() if n.endswith(("o_proj", "down_proj")) else ColwiseParallel() for n, _ in model.named_modules() if n.endswith("_proj")}
    parallelize_module(model, mesh, {**cut, "lm_head": ColwiseParallel(output_layouts=Replicate())})
    for block in model.model.layers if race.me.cuda else ():
        block.compile()
    sharded = {p for p in model.parameters() if isinstance(p, DTensor)}  # torch's fused update takes either these or plain tensors
    groups = [{"params": [p for p in model.parameters() if (p in sharded) is kind]} for kind in (True, False)]
    return loop(race, model, torch.optim.AdamW(groups, lr=1e-3, fused=race.me.cuda), race.mixed, whole=True)


COMPILED: dict[str, Callable[[Race], Step]] = {"ddp": compiled_ddp, "fsdp2": compiled_fsdp2, "tp": compiled_tp}


def loop(race: Race, model: Any, optimizer: Any, mixed: bool = False, whole: bool = False) -> Step:
    """Steps on this rank's part of a batch, or on the whole; `mixed`: under autocast."""
    me = race.me

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast(me.device.type, torch.bfloat16, enabled=mixed):
            loss = race.workload.loss(model, batch if whole else {k: v.chunk(me.world)[me.rank] for k, v in batch.items()})
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    typer.run(train_ranks)
