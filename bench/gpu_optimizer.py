"""The fused optimizer step of `weft.optim` on ranks that share a GPU, against the ways a user would otherwise run it.

    python -m bench.gpu_optimizer [--ranks 4] [--only 2^26] [--launches] [--json]

ddp       torch's two-shot all_reduce over symmetric memory, then its fused AdamW on everything, on every rank
sharded   reduce_scatter, torch's fused AdamW on the slice, all_gather, over the memory the fused step uses: what is left is fusion alone

The limit is the bytes a step moves over the rate at which all ranks together copy. Steps are compared with float64 first.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import typer

from bench import _gpu
from bench._gpu_rank import Call, Rank, rounded, timed_row
from weft import lang
from weft.optim import FusedOptimizer
from weft.optim.base import body_of
from weft.optim.rules import NESTEROV, Numbers, Rule

MIXED = [int(2 ** (10 + 12 * (k * 37 % 100) / 100)) + k for k in range(100)]
CASES = {**{f"2^{k}": [1 << k] for k in (16, 20, 22, 24, 26)}, "100 mixed": MIXED}
CHECKED = [1 << 16, 1000, 37, 100003, 5]  # sizes that divide badly
HYPER: dict[str, Any] = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}
RULES = ("adamw", "adamw_clip", "lamb", "lion", "adan", "nesterov")
MOST = 1.0  # the norm that clipping leaves


def register(app: typer.Typer) -> None:
    app.command("gpu-optimizer")(optimizer)


def optimizer(json: bool = _gpu.JSON, ranks: int = _gpu.RANKS, only: str = typer.Option("", help="Run only cases whose name contains this."),
              launches: bool = typer.Option(False, help="Also time the kernels launched in other ways than the one weft chooses.")) -> None:  # fmt: skip
    """Fused reduce_scatter + update + all_gather on one GPU against DDP and a sharded optimizer."""
    stage = _gpu.Stage("measure", limit=300 if launches else 150)
    _gpu.report("gpu-optimizer", [_gpu.run("bench.gpu_optimizer", stage, ranks, launches=launches, only=only)], json)


def measure(me: Rank, launches: bool, only: str) -> None:
    check(me)
    speed = copy_rate(me)
    me.say(case="copy of all ranks", TB_per_s=round(speed / 1e12, 3))
    for label, sizes in CASES.items():
        if only in label:
            time_case(me, label, sizes, speed, launches)
            torch.cuda.empty_cache()


def copy_rate(me: Rank) -> float:
    """Bytes per second all ranks together move when each copies a large buffer: reads and writes both counted."""
    n = 1 << 28
    a, b = torch.empty(n, dtype=torch.uint8, device=me.device), torch.ones(n, dtype=torch.uint8, device=me.device)
    ms = me.time_graphs({"copy": lambda: a.copy_(b)}, calls=20)["copy"]
    return me.world * 2 * n / (ms / 1e3)


# -- updates of a user's own, as functions of one element ------------------------------------------------------------------------


def lion(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    way = lang.sign(h["beta1"] * s["m"] + (1.0 - h["beta1"]) * g)
    return x * (1.0 - h["lr"] * h["weight_decay"]) - h["lr"] * way, {"m": h["beta2"] * s["m"] + (1.0 - h["beta2"]) * g}


def adan(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    by = g - s["last"]
    m, v = h["beta1"] * s["m"] + (1.0 - h["beta1"]) * g, h["beta2"] * s["v"] + (1.0 - h["beta2"]) * by
    n = 0.9 * s["n"] + 0.1 * ((g + h["beta2"] * by) * (g + h["beta2"] * by))
    step = h["lr"] * (m + h["beta2"] * v) / (lang.sqrt(n) + h["eps"])
    return (x - step) / (1.0 + h["lr"] * h["weight_decay"]), {"m": m, "v": v, "n": n, "last": g}


OWN = {
    "lion": Rule("lion", lion, {"m": "m"}, ("lr", "beta1", "beta2", "weight_decay")),
    "adan": Rule("adan", adan, {s: s for s in ("m", "v", "n", "last")}, ("lr", "beta1", "beta2", "eps", "weight_decay")),
    "nesterov": NESTEROV,
}
MORE = {"beta1": 0.9, "beta2": 0.99, "momentum": 0.9, "fresh": 1.0}


class Users(FusedOptimizer):
    def __init__(self, params: Any, rule: Rule) -> None:
        self._rule = rule
        super().__init__(params, {k: {**HYPER, **MORE}[k] for k in rule.scalars})

    def rule(self, group: dict[str, Any]) -> Rule:
        return self._rule

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        return {k: group[k] for k in self._rule.scalars}


# -- weft ----------------------------------------------------------------------------------------------------------------------


class Fused:
    """weft.optim as a user has it: parameters and gradients in memory that all ranks reach, this rank's slices of the state."""

    def __init__(self, me: Rank, rule: str, sizes: list[int]) -> None:
        from weft import optim

        self.params = [torch.nn.Parameter(x) for x in values(me, 0, sizes)]
        if rule in OWN:
            self.optimizer: Any = Users(self.params, OWN[rule])
        else:
            kind = optim.Lamb if rule == "lamb" else optim.AdamW
            self.optimizer = kind(self.params, **HYPER, **({"max_norm": MOST} if rule == "adamw_clip" else {}))
        (self.bank,) = self.optimizer._banks
        for p, home, grad in zip(self.params, self.bank.grad_views, values(me, 1 + me.rank, sizes), strict=True):
            p.grad = home.copy_(grad)
        me.sync()

    def kernel(self, launch: Any = None) -> Any:
        """Its kernel with the numbers of the first step, launched as weft chooses or as told."""
        from weft.runtime.launched import DeviceKernel

        ((kernel, told),) = self.optimizer._calls(tuple(self.params))
        numbers = [x for group, _, expand in told for x in expand(self.optimizer.scalars(group, 1))]
        if launch is not None:
            places = range(len(self.params))
            names = body_of(self.optimizer.rule(self.optimizer.param_groups[0]), self.bank.peers.world, Numbers(), False)[1]
            rows, spans = [self.bank.row(k, 0, names) for k in places], [self.bank.span(k) for k in places]
            kernel = DeviceKernel(kernel._kernel, rows, self.bank.peers, launch, spans)
        kernel.scalars[: len(numbers)].copy_(torch.tensor(numbers, dtype=kernel.scalars.dtype))
        return kernel


def values(me: Rank, seed: int, sizes: list[int]) -> list[torch.Tensor]:
    """The same numbers on every rank: parameters for seed 0, rank r's gradients for seed 1 + r."""
    gen = torch.Generator(me.device).manual_seed(seed)
    return [torch.randn(n, generator=gen, device=me.device) for n in sizes]


def check(me: Rank) -> None:
    """Every rule, meeting inside and outside of its kernels, against torch in float64."""
    from weft.runtime.launched import Launch

    for rule in RULES:
        want = stepped(rule, values(me, 0, CHECKED), [values(me, 1 + r, CHECKED) for r in range(me.world)])
        for launch in (None, Launch(1024, 2048, 4, 16, True), Launch(1024, 1024, 4, 4096, False)):
            fused = Fused(me, rule, CHECKED)
            kernel = fused.kernel(launch)
            kernel.launch_phases()
            me.sync()
            kernel.check()
            error = me.worst(max((p.double() - x).abs().max().item() for p, x in zip(fused.params, want, strict=True)))
            # clipped gradients come near epsilon, where Adam turns the rounding of a sum of terms into a part of its step
            most = 0.03 * HYPER["lr"] if rule == "adamw_clip" else 2e-6
            me.say(case=f"check {rule}", launch=show(launch or kernel.launch), error=error, correct=f"{error:.1e} from float64")
            assert error < most, (rule, launch, error)


def stepped(rule: str, start: list[torch.Tensor], grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """One step on the averaged gradients, in float64."""
    params = [torch.nn.Parameter(x.double()) for x in start]
    for p, *terms in zip(params, *grads, strict=True):
        p.grad = torch.stack(terms).double().mean(0)
    if rule in OWN:
        own, words = OWN[rule].update, {"lang": torch}
        h, start = {**HYPER, **MORE}, {k: torch.zeros(()) for k in OWN[rule].states}
        return [FunctionType(own.__code__, words)(p.grad, p.detach(), start, h)[0] for p in params]  # type: ignore[arg-type]
    if rule == "lamb":
        return [lamb(p.detach(), p.grad) for p in params if p.grad is not None]
    if rule == "adamw_clip":
        torch.nn.utils.clip_grad_norm_(params, MOST)
    torch.optim.AdamW(params, **HYPER).step()
    return [p.detach() for p in params]


def lamb(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """LAMB's first step, at which the moments corrected for their start are the gradient and its square."""
    way = g / (g.abs() + HYPER["eps"]) + HYPER["weight_decay"] * x
    return x - HYPER["lr"] * (x.norm() / way.norm()) * way


# -- times ---------------------------------------------------------------------------------------------------------------------


def time_case(me: Rank, label: str, sizes: list[int], speed: float, launches: bool) -> None:
    elements = sum(sizes)
    for rule in RULES:
        fused = Fused(me, rule, sizes)
        kernel = fused.kernel()
        ways: dict[str, Call] = {"weft": kernel.launch_phases}
        if rule == "adamw":
            ways |= {"sharded": Sharded(me, fused.bank.peers, elements), "ddp": ddp(me, elements)}
        ms = me.time_graphs(ways, calls=10)
        kernel.check()
        limit = kernel._kernel.bytes_per_element * elements / speed * 1e3
        row = timed_row(f"{rule} {label}", ms, limit_ms=round(limit, 5), of_limit=round(limit / ms["weft"], 3), launch=show(kernel.launch))
        if launches:
            others = {show(one): fused.kernel(one).launch_phases for one in other_launches(me, fused.bank.peers, elements)}
            row["tried"] = rounded(me.time_graphs({"as chosen": kernel.launch_phases, **others}, calls=10))
        me.say(**row)


def other_launches(me: Rank, peers: Any, elements: int) -> list[Any]:
    """Ways to launch that are worth trying at this size."""
    from weft.runtime.launched import Launch

    resident, per_rank = peers.resident_blocks(), -(-elements // me.world)
    inside = [(2048, 16), (4096, 32), (8192, 32)] if elements <= 1 << 22 else [(4096, 16), (4096, 32), (8192, 32)]
    found = [Launch(b, max(b, min(4 * b, -(-per_rank // resident // b) * b)), warps, resident, True) for b, warps in inside]
    if elements > 1 << 18:
        outside = [(1024, 1, 4), (2048, 1, 8), (2048, 2, 4), (4096, 1, 16), (4096, 4, 8)]
        found += [Launch(block, times * block, warps, 1 << 20, False) for block, times, warps in outside]
        found += [Launch(2048, 4 * 2048, 8, 33 * 4, False), Launch(4096, 4 * 4096, 8, 33 * 2, False)]
    return found


def show(launch: Any) -> str:
    where = "inside" if launch.inside else "outside"
    return f"block {launch.block} chunk {launch.chunk} warps {launch.warps} blocks {launch.blocks} {where}"


class Sharded:
    """reduce_scatter, torch's fused AdamW on the slice, all_gather, by the generator of the fused kernel."""

    def __init__(self, me: Rank, peers: Any, elements: int) -> None:
        from weft.codegen.expr import Slot, load, reduce

        share = -(-elements // (64 * me.world)) * 64
        self.peers, self.buffers = peers, {slot: peers.empty(4 * share * me.world) for slot in "gw"}
        for buffer in self.buffers.values():
            buffer.view(0, (share * me.world,), torch.float32).normal_()
        mine = torch.nn.Parameter(torch.randn(share, device=me.device))
        mine.grad = torch.empty_like(mine)
        self.adamw = torch.optim.AdamW([mine], lr=1e-4, fused=True, capturable=True)
        at = {slot: [a + 4 * share * me.rank for a in b.addresses] for slot, b in self.buffers.items()}
        self.row = share, {**at, "x": mine.data_ptr(), "d": mine.grad.data_ptr()}
        g, w = (Slot(name, "f32", spread=True) for name in "gw")
        self.scatter = self.collective("reduce_scatter", (Slot("d", "f32"), reduce(g) * (1 / me.world)))
        self.gather = self.collective("all_gather", (w, load(Slot("x", "f32"))))

    def collective(self, name: str, store: tuple[Any, Any]) -> Call:
        from weft.codegen.expr import Group
        from weft.codegen.kernel import compile_group
        from weft.runtime.fused import Row, bind

        kernel = compile_group(Group(name, (store,)), self.peers.world, self.peers.target)
        return bind(kernel, [Row(*self.row)], self.peers).launch_phases  # type: ignore[no-any-return]

    def __call__(self) -> None:
        self.scatter()
        self.adamw.step()
        self.gather()


def ddp(me: Rank, elements: int) -> Call:
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    total = -(-elements // (64 * me.world)) * 64 * me.world
    grad = symm_mem.empty(total, dtype=torch.float32, device=me.device)
    symm_mem.rendezvous(grad, dist.group.WORLD)
    whole = torch.nn.Parameter(torch.randn(total, device=me.device))
    whole.grad = grad.normal_()
    adamw = torch.optim.AdamW([whole], lr=1e-4, fused=True, capturable=True)

    def step() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(grad, "sum", dist.group.WORLD.group_name)
        adamw.step()

    return step


if __name__ == "__main__":
    typer.run(optimizer)
