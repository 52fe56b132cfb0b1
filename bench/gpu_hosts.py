"""Ranks that are hosts of their own to NCCL, which joins them by sockets: programs and optimizers give what they must.

    python -m bench.gpu_hosts [--ranks 4] [--json]

Every example of the catalog and each of its schedules runs over NCCL, some also with their kernels over symmetric memory, and is compared
with the interpreter; every fused optimizer is compared with its unfused form. Nothing is timed: `bench.gpu_train_ranks` does that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import typer

from bench import _gpu
from bench._gpu_rank import Rank

KERNELS = {("adamw", "fuse(RS-C-AG)"), ("lamb", "fuse(RS-C-AG)"), ("mlp", "MM-AR-C")}  # those that also run over symmetric memory
CLOSE, CLOSE_STEPS = 1e-3, 2e-5


def register(app: typer.Typer) -> None:
    app.command("gpu-hosts")(hosts)


def hosts(ranks: int = _gpu.RANKS, device: str = _gpu.DEVICE, json: bool = _gpu.JSON) -> None:
    """Programs and optimizers over NCCL sockets against the interpreter and symmetric memory."""
    stage = _gpu.Stage("agree", limit=150, backend=_gpu.NCCL)
    _gpu.report("gpu-hosts", [_gpu.run("bench.gpu_hosts", stage, ranks, device)], json)


def agree(me: Rank) -> None:
    from weft.runtime.peers import connect

    connect(device=me.device)  # before they are hosts, since what is compared needs each other's memory
    me.become_host()
    wrong = [*optimizers_that_differ(me), *programs_that_differ(me)]
    assert not wrong, wrong


def programs_that_differ(me: Rank) -> list[str]:
    from weft import interp
    from weft.programs.catalog import EXAMPLES

    wrong = []
    for name, example in EXAMPLES.items():
        for how, schedule in {"as written": lambda p: p, **example.schedules}.items():
            program = schedule(example.make())
            if program.mesh.ranks != me.world:
                continue
            given = inputs(program)
            want = interp.run_ranks(program, given)
            bare = program.with_groups((), program, "no groups") if program.groups else program
            kinds = {"nccl": bare, **({"kernels": program} if (name, how) in KERNELS else {})}
            wrong += [case for kind, one in kinds.items() if not same(me, case := f"{name}, {how}, {kind}", one, given, want)]
    return wrong


def same(me: Rank, case: str, program: Any, given: Mapping[str, Any], want: Mapping[str, Any]) -> bool:
    """Whether every rank computes what the interpreter does; said in any case."""
    from weft.api.compiled import Compiled

    def apart() -> float:
        mine = {k: v[me.rank].to(me.device) for k, v in given.items() if v[me.rank] is not None}
        got = Compiled(program, device=me.device.type)(mine)
        return max(((got[k].cpu() - w[me.rank]).abs().max().item() for k, w in want.items() if w[me.rank] is not None), default=0.0)

    error = me.tried(case, apart)
    if error is None:
        return False
    error = me.worst(error)
    me.say(case=case, error=error, correct=f"{error:.1e} from the interpreter")
    return error < CLOSE


def inputs(program: Any) -> dict[str, Any]:
    """What every rank holds of random inputs."""
    from weft import interp

    gen, out = torch.Generator().manual_seed(0), {}
    for i, (name, n) in enumerate(program.input_names.items()):
        x = torch.randn(n.shape, generator=gen, dtype=torch.float64) if n.shape else torch.tensor(3.0)
        out[name] = interp.distribute((x.abs() if name.startswith("v.") else x).to(n.dtype), n.type, i)
    return out


def optimizers_that_differ(me: Rank) -> list[str]:
    """Steps fused over symmetric memory against the same steps over NCCL."""
    from weft import optim

    kinds: dict[str, Callable[..., Any]] = {
        "adamw": lambda p, **o: optim.AdamW(p, lr=1e-2, **o),
        "adamw clipped": lambda p, **o: optim.AdamW(p, lr=1e-2, eps=1e-4, max_norm=0.5, **o),
        "lamb": lambda p, **o: optim.Lamb(p, lr=1e-2, **o),
        "sgd": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, **o),
    }
    wrong = []
    for name, kind in kinds.items():
        error = me.worst(steps_apart(me, kind))
        me.say(case=f"{name}: symmetric memory against nccl", error=error, correct=f"{error:.1e} apart after four steps")
        wrong += [name] if error >= CLOSE_STEPS else []
    return wrong


def steps_apart(me: Rank, kind: Callable[..., Any], steps: int = 4) -> float:
    torch.manual_seed(0)
    fused = torch.nn.Sequential(torch.nn.Linear(130, 77), torch.nn.GELU(), torch.nn.Linear(77, 50)).to(me.device)
    plain = copy.deepcopy(fused)
    ways = [(fused, kind(fused.parameters(), over="peers")), (plain, kind(plain.parameters(), over="group"))]
    for step in range(steps):
        gen = torch.Generator(me.device).manual_seed(10 * step + me.rank)
        data = torch.randn(8, 130, generator=gen, device=me.device)
        for net, opt in ways:
            opt.zero_grad()
            net(data).square().mean().backward()
            opt.step()
    return max((p - q).abs().max().item() for p, q in zip(fused.parameters(), plain.parameters(), strict=True))


if __name__ == "__main__":
    typer.run(hosts)
