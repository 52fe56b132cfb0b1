"""A Llama block in bf16 under tensor parallelism on ranks that share a GPU, against torch's over the same symmetric memory.

    python -m bench.gpu_inference [--ranks 2,4] [--quick] [--json]

Both are called and replayed from graphs. Results are compared before anything is timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from bench import _gpu
from bench._gpu_memory import Memory
from bench._gpu_rank import Rank, timed_row

SIZES = {True: {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 256, "seq": 2048},  # on a GPU
         False: {"hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64, "seq": 64}}  # fmt: skip
CALLS = {"decode x1": (1, 1), "decode x16": (16, 1), "prefill 2048": (1, 2048)}  # batch, new tokens
CLOSE = 3e-2  # relative to the largest result
Forward = Callable[[Tensor], Tensor]


def register(app: typer.Typer) -> None:
    app.command("gpu-inference")(inference)


def inference(
    ranks: str = typer.Option("2,4", help="Of tensor parallelism, one run for each."),
    device: str = _gpu.DEVICE, quick: bool = _gpu.QUICK, json: bool = _gpu.JSON,
) -> None:  # fmt: skip
    """Decoding and prefill of a Llama block against torch's tensor parallelism; --quick: without torch.compile."""
    stage, compiled = _gpu.Stage("measure", limit=220), not quick and device == "cuda"
    results = [_gpu.run("bench.gpu_inference", stage, int(n), device, compiled=compiled) for n in ranks.split(",")]
    _gpu.report("gpu-inference", results, json)


def measure(me: Rank, compiled: bool) -> None:
    import weft_zoo as zoo

    torch.set_float32_matmul_precision("high")
    sizes = SIZES[me.cuda]
    model = zoo.get("llama3-8b", device="cpu", layers=1, **sizes).model.eval().bfloat16()
    over = Memory(me)
    for case, (batch, tokens) in CALLS.items():
        x = torch.randint(0, sizes["vocab"], (batch, min(tokens, sizes["seq"])), generator=torch.Generator().manual_seed(1)).to(me.device)
        makers: dict[str, Callable[[], Forward]] = {"weft": lambda x=x: ours(me, model, x), "torch tp": lambda: theirs(me, model, over)}
        if compiled:
            makers["torch tp compiled"] = lambda: theirs(me, model, over, compiled=True)
        ways = {name: me.tried(f"{name}, {case}", lambda make=make, x=x: started(make, x)) for name, make in makers.items()}
        time_case(me, f"llama block {case}", {name: way for name, way in ways.items() if way is not None}, x)
        if me.cuda:
            torch.cuda.empty_cache()


def started(make: Callable[[], Forward], x: Tensor) -> Forward:
    run = make()
    for _ in range(3):
        run(x)
    return run


def time_case(me: Rank, case: str, ways: dict[str, Forward], x: Tensor) -> None:
    if len(ways) < 2 or "weft" not in ways:
        return
    results = {name: way(x).float().clone() for name, way in ways.items()}
    judge = next(result for name, result in results.items() if name != "weft")
    apart = me.worst(float((results["weft"] - judge).abs().max() / judge.abs().max()))
    if not apart < CLOSE:
        me.say(case=case, failed=f"results differ by {apart:.1e}")
        return
    calls = {name: (lambda way=way: way(x)) for name, way in ways.items()}
    graphs = {name: me.tried(f"{name} recorded, {case}", lambda call=call: me.recorded(call)) or call for name, call in calls.items()}
    for kind, some in {"graph": graphs, "call": calls}.items():
        ms = me.time_calls(some, calls=20 if me.cuda else 2)
        me.say(**timed_row(f"{case}, {kind}", ms, correct=f"results equal to {apart:.1e}"))


def ours(me: Rank, model: Any, x: Tensor) -> Forward:
    from weft.api.compile import compile as weft_compile

    run = weft_compile(copy.deepcopy(model), f"tp{me.world}", x.cpu(), device=me.device.type)
    return lambda x: next(iter(run(x).values()))


def theirs(me: Rank, model: Any, over: Memory, compiled: bool = False) -> Forward:
    """torch's tensor parallelism: columns, then rows, of each linear on this rank, and its sum over symmetric memory."""
    model = copy.deepcopy(model).to(me.device)
    block = model.blocks[0]
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        cut(block.get_submodule(name), 0, me)
    for name in ("attention.o", "mlp.down"):
        linear = block.get_submodule(name)
        cut(linear, 1, me)
        linear.forward = lambda x, linear=linear, name=name: over.summed(F.linear(x, linear.weight), name)
    run = torch.compile(model) if compiled else model

    @torch.no_grad()
    def forward(x: Tensor) -> Tensor:
        return run(x)  # type: ignore[no-any-return]

    return forward


def cut(linear: Any, dim: int, me: Rank) -> None:
    linear.weight = torch.nn.Parameter(linear.weight.chunk(me.world, dim)[me.rank].contiguous(), requires_grad=False)


if __name__ == "__main__":
    typer.run(inference)
