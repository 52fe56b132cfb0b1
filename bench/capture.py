"""`weft bench capture`: CPU time to capture a whole training step, against tracing all layers with torch's make_fx.

A case is timed only after its small variant was captured and equals torch: loss and every gradient to 1e-5.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import typer

MODELS = ("llama3-8b", "llama3-405b", "mixtral-8x7b", "gpt-39b", "bert-large", "wide-resnet", "dlrm")


def register(app: typer.Typer) -> None:
    @app.command()
    def capture(
        models: list[str] = typer.Argument(None, help="zoo names; a handful by default"),
        batch: int = typer.Option(8, min=1, help="samples in the batch"),
        peers: bool = typer.Option(True, help="also trace forward and backward of all layers with make_fx"),
        json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    ) -> None:
        """Capture training steps (forward, loss, backward, AdamW) of full-size models on fake tensors."""
        from bench._ranks import machine
        from weft.cli.output import console, emit

        rows = []
        for name in models or MODELS:
            rows.append(run(name, batch, peers))
            console.print(describe(rows[-1]))
        if json:
            emit({"bench": "capture", "machine": machine(), "rows": rows})


def run(name: str, batch: int, peers: bool) -> dict[str, Any]:
    correct = equals_torch(name)
    warm_up()
    nodes, ours = timed(lambda: weft_step(name, batch))
    theirs = {"make_fx": timed(lambda: torch_trace(name, batch))[1]} if peers else {}
    ratios = {k: round(v / ours, 2) for k, v in theirs.items()}
    return {"case": name, "weft_ms": ours, "peers_ms": theirs, "ratios": ratios, "limit_ms": None, "correct": correct, "nodes": nodes}


def timed(f: Callable[[], int]) -> tuple[int, float]:
    """What it gives, and the CPU milliseconds it took."""
    begun = time.process_time()
    found = f()
    return found, round(1000 * (time.process_time() - begun), 1)


def warm_up() -> None:
    """Imports that torch puts off to the first use are no one's tracing time."""
    import torch

    weft_step("mlp", 1)
    torch.optim.AdamW([torch.zeros(1)])


def weft_step(name: str, batch: int) -> int:
    """Nodes of the program of one step, from the name of the model."""
    import torch

    import weft_zoo as zoo
    from weft.frontend.capture import capture

    work = zoo.get(name)
    optimizer = torch.optim.AdamW(work.model.parameters())
    return len(capture(work.model, work.example(batch, device="meta"), work.loss, optimizer).program.nodes)


def torch_trace(name: str, batch: int) -> int:
    """Nodes of make_fx's trace of forward and backward, every layer traced; no optimizer."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.fx.experimental.proxy_tensor import make_fx

    import weft_zoo as zoo

    work = zoo.get(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = {k: torch.empty(p.shape, dtype=p.dtype, requires_grad=True) for k, p in work.model.named_parameters()}
        buffers = {k: torch.empty(b.shape, dtype=b.dtype) for k, b in work.model.named_buffers()}
        example = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in work.example(batch, device="meta").items()}

        class Under(torch.nn.Module):
            """The model with its parameters given, where the loss looks for a model."""

            settings = work.settings

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return functional_call(work.model, {**self.given, **buffers}, args, kwargs)

        under = Under()
        for k, b in buffers.items():
            object.__setattr__(under, k.rpartition(".")[2], b)

        def step(given: Any, given_batch: Any) -> Any:
            object.__setattr__(under, "given", given)
            value = work.loss(under, given_batch)
            return value, torch.autograd.grad(value, list(given.values()), allow_unused=True)

        return len(make_fx(step)(parameters, example).graph.nodes)


def equals_torch(name: str) -> bool:
    """The small variant's program means what torch computes."""
    import weft_zoo as zoo
    from weft import interp
    from weft.frontend.capture import capture

    work = zoo.small(name, **({"dropout": 0.0} if hasattr(zoo.entry(name).settings, "dropout") else {}))
    batch = work.example(4)
    captured = capture(work.model, batch, work.loss, gradients=True)
    got = interp.run_global(captured.program, {k: v.clone() for k, v in captured.inputs(batch).items()})
    loss = work.loss(work.model, batch)
    loss.backward()
    apart = [abs(got["loss"] - loss).item()]
    for n, p in work.model.named_parameters():
        apart.append((got[f"d.param.{n}"] - p.grad).abs().max().item() / max(1.0, p.grad.abs().max().item()))
    if max(apart) > 1e-5:
        raise AssertionError(f"{name}: captured program is off by {max(apart):.3g}")
    return True


def describe(row: dict[str, Any]) -> str:
    theirs = "".join(f", {k} {v / 1000:.2f} s" for k, v in row["peers_ms"].items())
    return f"{row['case']}: {row['nodes']} nodes in {row['weft_ms'] / 1000:.2f} s of CPU{theirs}"
