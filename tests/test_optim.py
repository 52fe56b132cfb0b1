"""weft.optim trains as torch.optim does on averaged gradients, and their state dicts are interchangeable."""

from __future__ import annotations

import copy
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from weft import lang, optim
from weft.core.errors import KernelError
from weft.optim.bank import UNIT, Slices
from weft.optim.base import body_of
from weft.optim.rules import Numbers, Rule

PAIRS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    "amsgrad": (lambda p: optim.AdamW(p, amsgrad=True), lambda p: torch.optim.AdamW(p, amsgrad=True)),
    "sgd": (lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    "momentum": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    ),
    "nesterov": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 77), nn.GELU(), nn.LayerNorm(77), nn.Linear(77, 5))


def backward(net: nn.Module, seed: int, rank: int) -> None:
    gen = torch.Generator().manual_seed(100 * seed + rank)
    net(torch.randn(8, 13, generator=gen)).square().mean().backward()


def average(net: nn.Module) -> None:
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def close(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_every_optimizer_trains_as_torchs_does(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        for ours, theirs in PAIRS.values():
            a = model()
            b = copy.deepcopy(a)
            x, y = ours(a.parameters()), theirs(b.parameters())
            schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (x, y)]
            for step in range(5):
                for net, opt in ((a, x), (b, y)):
                    opt.zero_grad()
                    backward(net, step, rank)
                average(b)
                x.step(), y.step()
                [s.step() for s in schedules]
                if step == 2:  # each goes on from the other's state
                    mine, yours = x.state_dict(), y.state_dict()
                    x.load_state_dict(yours), y.load_state_dict(mine)
            close(a, b)

    run_ranks(3, job, tmp_path)


def test_parameter_groups_accumulation_and_unused_parameters(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        a = model()
        b = copy.deepcopy(a)

        def groups(net: nn.Module) -> list[dict[str, Any]]:
            matrices, rest = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim == 1]
            return [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "lr": 1e-3, "betas": (0.8, 0.95)}]

        x, y = optim.AdamW(groups(a), lr=1e-2), torch.optim.AdamW(groups(b), lr=1e-2)
        for step in range(4):
            x.zero_grad(), y.zero_grad()
            for part in range(2):
                backward(a, 10 * step + part, rank), backward(b, 10 * step + part, rank)
            average(b)
            if step == 1:  # one parameter has no gradient in this step, on any rank
                a[0].bias.grad = b[0].bias.grad = None
            x.step(), y.step()
        close(a, b)

    run_ranks(2, job, tmp_path)


def test_clipping_is_by_the_norm_of_the_averaged_gradient(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        a = model()
        b = copy.deepcopy(a)
        x, y = optim.AdamW(a.parameters(), lr=1e-2, eps=1e-4, max_norm=0.1), torch.optim.AdamW(b.parameters(), lr=1e-2, eps=1e-4)
        for step in range(3):
            x.zero_grad(), y.zero_grad()
            backward(a, step, rank), backward(b, step, rank)
            average(b)
            nn.utils.clip_grad_norm_(b.parameters(), 0.1)
            x.step(), y.step()
        close(a, b)

    run_ranks(3, job, tmp_path)


def lamb_step(params: list[torch.Tensor], grads: list[torch.Tensor], state: dict[int, Any], step: int, lr: float) -> None:
    """LAMB as its paper has it, in float64."""
    for k, (w, g) in enumerate(zip(params, grads, strict=True)):
        m, v = state.get(k, (torch.zeros_like(w), torch.zeros_like(w)))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        state[k] = (m, v)
        way = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.01 * w
        trust = w.norm() / way.norm() if w.norm() > 0 and way.norm() > 0 else 1.0
        w.sub_(lr * trust * way)


def test_lamb_scales_every_tensor_by_its_own_norms(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        a = model()
        judge = [p.detach().double() for p in a.parameters()]
        x, state = optim.Lamb(a.parameters(), lr=1e-2), {}
        for step in range(1, 4):
            x.zero_grad()
            backward(a, step, rank)
            grads = [p.grad.double() for p in a.parameters()]
            for g in grads:
                dist.all_reduce(g)
                g.div_(dist.get_world_size())
            x.step()
            lamb_step(judge, grads, state, step, 1e-2)
        for p, q in zip(a.parameters(), judge, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-4, atol=1e-6)

    run_ranks(3, job, tmp_path)


def lion(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The new parameter does not read the new state."""
    way = lang.sign(h["beta1"] * s["m"] + (1.0 - h["beta1"]) * g)
    return x * (1.0 - h["lr"] * h["decay"]) - h["lr"] * way, {"m": h["beta2"] * s["m"] + (1.0 - h["beta2"]) * g}


def adan(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One state is the gradient itself."""
    by = g - s["last"]
    m, v = h["beta1"] * s["m"] + (1.0 - h["beta1"]) * g, h["beta2"] * s["v"] + (1.0 - h["beta2"]) * by
    n = 0.9 * s["n"] + 0.1 * ((g + h["beta2"] * by) * (g + h["beta2"] * by))
    return (x - h["lr"] * (m + h["beta2"] * v) / (lang.sqrt(n) + 1e-3)) / (1.0 + h["lr"] * h["decay"]), {"m": m, "v": v, "n": n, "last": g}


def averaged(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One state reads the new parameter, another the old one and no gradient."""
    new = x - h["lr"] * g
    return new, {"mean": h["beta1"] * s["mean"] + (1.0 - h["beta1"]) * new, "old": 0.5 * x + 0.5 * s["old"]}


def alone(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return x - h["lr"] * g, {"by_itself": s["by_itself"] * 0.5}


class Users(optim.FusedOptimizer):
    """An optimizer of a user's own."""

    HYPER: ClassVar = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "decay": 0.1}

    def __init__(self, params: Any, update: Any, states: tuple[str, ...], **more: Any) -> None:
        self.own = Rule(update.__name__, update, {s: s for s in states}, tuple(self.HYPER))
        super().__init__(params, dict(self.HYPER), **more)

    def rule(self, group: dict[str, Any]) -> Rule:
        return self.own

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        return {k: group[k] for k in self.HYPER}


class Torchs:
    """The words an update is written in, as torch has them."""

    sign, sqrt = staticmethod(torch.sign), staticmethod(torch.sqrt)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("over", ["peers", "group"])
def test_a_users_own_update_whatever_state_and_parameter_read(over: str, master: bool, tmp_path: Path) -> None:
    """The same function on averaged gradients, run by torch in float64."""
    cases = [(lion, ("m",)), (adan, ("m", "v", "n", "last")), (averaged, ("mean", "old"))]

    def job(rank: int) -> None:
        for update, states in cases:
            a = model().to(torch.bfloat16 if master else torch.float32)
            ours = Users(a.parameters(), update, states, master_weights=master, over=over)
            want = [p.detach().double() for p in a.parameters()]
            kept = [{s: torch.zeros_like(x) for s in states} for x in want]
            by_torch = FunctionType(update.__code__, {"lang": Torchs})
            for step in range(4):
                gen = torch.Generator().manual_seed(100 * step + rank)
                grads = [torch.randn(p.shape, generator=gen).to(p.dtype) for p in a.parameters()]
                for p, g in zip(a.parameters(), grads, strict=True):
                    p.grad = g.clone()
                    ours._rehome(p)
                ours.step()
                for k, g in enumerate(grads):
                    mean = g.double()
                    dist.all_reduce(mean)
                    want[k], kept[k] = by_torch(mean / dist.get_world_size(), want[k], kept[k], Users.HYPER)
            for k, p in enumerate(a.parameters()):
                bound, exact = 1e-2 if master else 2e-6, 1e-2 if master and over == "group" else 2e-6  # which sums in bfloat16
                torch.testing.assert_close(
                    p.detach().double(), want[k], rtol=bound, atol=bound, msg=lambda m, u=update: f"{u.__name__}: {m}"
                )
                held = ours.state_dict()["state"][k]
                for s in states:
                    torch.testing.assert_close(held[s].double(), kept[k][s], rtol=exact, atol=exact, msg=lambda m, s=s: f"{s}: {m}")

    run_ranks(2, job, tmp_path)


def test_state_that_meets_nothing_is_refused() -> None:
    with pytest.raises(KernelError, match=r"alone has state of its own(.|\n)*by_itself(.|\n)*scalars\(\)"):
        body_of(Rule("alone", alone, {"by_itself": "by_itself"}, ("lr",)), 2, Numbers(), False)


def test_low_precision_parameters_with_a_master_copy(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        a = model().bfloat16()
        judge = [p.detach().float() for p in a.parameters()]
        reference = torch.optim.AdamW([nn.Parameter(w) for w in judge], lr=1e-3)
        x = optim.AdamW(a.parameters(), lr=1e-3, master_weights=True)
        for step in range(4):
            x.zero_grad()
            gen = torch.Generator().manual_seed(100 * step + rank)
            for p, q in zip(a.parameters(), reference.param_groups[0]["params"], strict=True):
                p.grad = torch.randn(p.shape, generator=gen).bfloat16()
                total = p.grad.float()
                dist.all_reduce(total)
                q.grad = total / dist.get_world_size()
            for p in a.parameters():
                x._rehome(p)
            x.step(), reference.step()
        for p, q in zip(a.parameters(), reference.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(p.float(), q.detach().bfloat16().float(), rtol=1e-2, atol=1e-2)
            assert (p.float() - q.detach()).abs().max() < 0.01

    run_ranks(2, job, tmp_path)


def test_ranks_that_update_different_parameters_are_told(tmp_path: Path) -> None:
    def job(rank: int) -> str:
        import os

        os.environ["WEFT_TIMEOUT"] = "5"
        a = model()
        x = optim.AdamW(a.parameters())
        backward(a, 0, rank)
        if rank == 1:
            a[0].bias.grad = None
        try:
            x.step()
        except Exception as fault:
            return str(fault)
        return "nothing"

    said = run_ranks(2, job, tmp_path)
    assert "ranks disagree" in said[0]
    assert "adamw step of 6 f32 parameters" in said[0]
    assert "adamw step of 5 f32 parameters" in said[0]


def test_state_is_kept_in_slices(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        x = optim.AdamW(model().parameters())
        kept = sum(flat.numel() for bank in x._banks for flat in bank.states.values())
        whole = 2 * sum(p.numel() for g in x.param_groups for p in g["params"])
        assert kept < whole / 4 + 6 * 64 * 2

    run_ranks(4, job, tmp_path)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("each", [False, True])
def test_slices_cover_every_tensor_once_and_start_aligned(world: int, each: bool) -> None:
    sizes = [1, 5, 63, 64, 65, 1000, 12345, 4096]
    slices = Slices.of(sizes, world, each)
    for n, start, runs in zip(sizes, slices.starts, slices.runs, strict=True):
        assert [i for lo, hi in runs for i in range(lo, hi)] == list(range(n))
        assert all((start + lo) % UNIT == 0 for lo, hi in runs if lo < hi)
    shares = [sum(hi - lo for lo, hi in (runs[r] for runs in slices.runs)) for r in range(world)]
    assert sum(shares) == sum(sizes) and max(shares) <= slices.share + each * UNIT * len(sizes)
    longest = [max(hi - lo for lo, hi in runs) for runs in slices.runs]
    assert not each or all(n <= -(-size // world) + UNIT for n, size in zip(longest, sizes, strict=True)), (
        "no rank waits for another's tensor"
    )


def test_what_cannot_be_fused_is_refused(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        with pytest.raises(KernelError, match="cannot be fused") as e:
            optim.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
        assert "float32, bfloat16 or float16" in str(e.value)
        mixed = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).bfloat16())]
        x = optim.AdamW(mixed, max_norm=1.0)
        for p in mixed:
            p.grad = torch.ones_like(p)
        with pytest.raises(KernelError, match="max_norm over parameters of several kinds"):
            x.step()

    run_ranks(1, job, tmp_path)


def test_over_the_process_group_it_is_the_same_step(tmp_path: Path) -> None:
    kinds: list[Any] = [
        lambda p, **o: optim.AdamW(p, lr=1e-2, max_norm=0.5, **o),
        lambda p, **o: optim.Lamb(p, lr=1e-2, **o),
        lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, **o),
    ]

    def job(rank: int) -> None:
        for kind in kinds:
            a = model()
            b = copy.deepcopy(a)
            x, y = kind(a.parameters(), over="peers"), kind(b.parameters(), over="group")
            for step in range(3):
                x.zero_grad(), y.zero_grad()
                backward(a, step, rank), backward(b, step, rank)
                x.step(), y.step()
            close(a, b)
            for p, q in zip(x.state_dict()["state"].values(), y.state_dict()["state"].values(), strict=True):
                for key in p:
                    torch.testing.assert_close(p[key], q[key], rtol=1e-4, atol=1e-6)
        low = model().bfloat16()
        z = optim.AdamW(low.parameters(), master_weights=True, over="group")
        for p in low.parameters():
            p.grad = torch.ones_like(p)
            z._rehome(p)
        z.step()

    run_ranks(2, job, tmp_path)
