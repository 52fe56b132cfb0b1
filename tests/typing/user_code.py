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


def more_right_use(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Plan:
    optimizer = torch.optim.Adam(model.parameters())
    step = weft.parallelize(model, loss, optimizer, batch, plan=Spec.parse("dp2,tp2"), deterministic="any plan", on_nan="skip", record="run")
    store = step.checkpoints("checkpoints", keep=3)
    store.restore()
    full: torch.Tensor = step.full("param.weight")
    by_name: dict[str, torch.Tensor] = step.state_dict()
    step.load_state_dict(by_name)
    held_out: torch.Tensor = step.eval(batch)
    trained: torch.nn.Module = step.sync_model()
    print(full, held_out, trained, step.steps)
    plan = weft.plan("llama3-8b", batch=512, cluster="2x8xH100", fixed="tp4,zero1", pins=["layers.*.mlp.w1=tp:S(1)"], memory="70GB")
    text: str = plan.export("torchtitan")
    print(text, plan.predicted["step_ms"])
    return plan


def more_misuse(model: torch.nn.Module, batch: dict[str, torch.Tensor], plan: Plan) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    step = weft.parallelize(model, loss, optimizer, batch)
    weft.parallelize(model, loss, optimizer, batch, deterministic="any plans")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    weft.parallelize(model, loss, optimizer, batch, precision=16)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    weft.parallelize(model, loss, optimizer, batch, clip="1.0")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    weft.parallelize(model, optimizer, loss, batch)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    step.chekpoints("folder")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    step.checkpoints(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    step.full(0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    plan.exprt("torchtitan")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    plan.save()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Spec.parse(2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    S("0")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    weft.fits("llama3-8b", "H100", gpu_count=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    lang.f32(8.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
