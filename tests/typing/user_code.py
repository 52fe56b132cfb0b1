"""A user's code as type checkers see it: right use has no error, and every misuse is one.

A misuse carries the ignore comments of both checkers, which report a comment that ignores nothing: so a misuse that passes is an error too.
Checked by tests/test_typing.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import Mesh, Options, P, Plan, Program, S, Spec, WeftError, lang, schedule


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(batch["x"])
    return (out - batch["y"]).square().mean()


def right_use(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    plan: Plan = weft.plan(model, loss, optimizer, batch, cluster="1x8xH100")
    plan.save(Path("plan.json"))
    step = weft.parallelize(model, loss, optimizer, batch, plan="dp2,zero1", clip=1.0, precision=torch.bfloat16)
    weft.parallelize(model, loss, optimizer, batch, Spec(dp=2, zero=1), device="cpu", options=Options(clip=1.0, on_nan="skip"))
    weft.parallelize(model, loss, optimizer, batch, plan=Path("plan.json"))
    weft.parallelize(model, loss, optimizer, batch, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    own_loop: torch.nn.Module = weft.shard(model, batch, "dp2,zero3")
    print(own_loop, step.state["param.weight"])
    value: torch.Tensor = step(batch)
    print(value.item(), step.check(batch))
    run = weft.compile(model, "tp2", batch)
    logits: torch.Tensor = run(batch)["out"]
    print(logits)
    fit = weft.fits("llama3-8b", "H100", gpus=8)
    print(fit.fits, fit.changes)


def right_program() -> Program:
    mesh = Mesh(dp=2)
    p = weft.trace(lambda g: lang.all_reduce(g, "dp"), mesh, g=lang.f32(8, dp=P()))
    p = schedule.split(p, "all_reduce", dim=0)
    try:
        weft.trace(lambda x: x + 1.0, mesh, x=lang.f32(4, dp=S(0)))
    except WeftError as error:
        print(error)
    return p


def misuse(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    weft.parralelize()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    weft.parallelize(1, 2)  # type: ignore[call-arg,arg-type]  # pyright: ignore[reportCallIssue]
    weft.parallelize(model, loss, optimizer, batch, nonsense=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    weft.parallelize(model, loss, optimizer, batch, plan=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    weft.parallelize(model, loss, optimizer, batch, on_nan="maybe")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    weft.compile("model")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    weft.shard(model)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    weft.shard(model, batch, 2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Spec(dp="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Spec(ddp=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Options(clipp=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Mesh(dp="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    weft.plan(model, loss, optimizer, batch, clusters="1x8xH100")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    weft.fits("llama3-8b")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    lang.all_reduse(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    schedule.spilt(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    weft.trace(3, Mesh(dp=2))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
