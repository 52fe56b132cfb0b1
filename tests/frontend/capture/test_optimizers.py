"""Every optimizer weft knows against torch's own, over several steps: each setting, each dtype, each form an update has."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft import interp, parallelize
from weft.core.errors import CaptureError
from weft.core.program import new_program
from weft.frontend.capture import capture
from weft.ops.source import input_node

GRIDS: dict[type, dict[str, tuple[Any, ...]]] = {
    torch.optim.SGD: {"momentum": (0.0, 0.9), "dampening": (0.0, 0.3), "weight_decay": (0.0, 0.1), "maximize": (False, True)},
    torch.optim.Adam: {"amsgrad": (False, True), "weight_decay": (0.0, 0.1), "betas": ((0.9, 0.999), (0.3, 0.5)), "maximize": (False, True)},
    torch.optim.AdamW: {"amsgrad": (False, True), "weight_decay": (0.0, 0.1), "eps": (1e-8, 1e-2), "maximize": (False, True)},
    torch.optim.Adagrad: {"lr_decay": (0.0, 0.1), "weight_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.5), "eps": (1e-10, 0.1)},
    torch.optim.RMSprop: {"momentum": (0.0, 0.9), "centered": (False, True), "alpha": (0.99, 0.5), "weight_decay": (0.0, 0.1)},
}
MORE = [(torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": w}) for w in (0.0, 0.1)]
CASES = [(kind, dict(zip(grid, values, strict=True))) for kind, grid in GRIDS.items() for values in itertools.product(*grid.values())] + MORE
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean() + model(batch).sum()


def torch_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, each: Any = None) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        if each is not None:
            each()


def same(step: Any, mirror: nn.Module, tolerance: float) -> None:
    for name, want in mirror.named_parameters():
        torch.testing.assert_close(step.full(f"param.{name}"), want.detach(), atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def batches(dtype: torch.dtype = torch.float64, many: int = 5) -> list[Tensor]:
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(many)]


def _id(case: Any) -> str:
    return f"{case[0].__name__} {' '.join(f'{k}={v}' for k, v in case[1].items())}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", GRIDS, ids=lambda k: k.__name__)
def test_the_ops_themselves(kind, dtype):
    """Whole and unfolded, the update of one parameter by given gradients, over five steps."""
    for settings in (s for k, s in CASES if k is kind):
        model = nn.Linear(3, 2, bias=False)
        p = nn.Parameter(torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).reshape(2, 3).to(dtype))
        model.weight = p
        optimizer = kind([p], lr=0.01, **settings)
        captured = capture(model, torch.zeros(1, 3, dtype=dtype), lambda m, b: m(b).sum(), optimizer)
        (update,) = (n for n in captured.program.nodes if n.op.unfold is not None)
        known = captured.updates["param.weight"].known
        assert known is not None, settings
        states = [f"{s}.weight" for s in known[0].states]
        rows = [[p.detach(), *(captured.begun.get(s, torch.zeros_like(p)).detach().clone() for s in states)] for _ in range(2)]
        for t in range(1, 6):
            p.grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(t), dtype=torch.float64).to(dtype)
            numbers = torch.tensor(0.01, dtype=torch.float64), torch.tensor(t)
            out = update.op.run(rows[0][0], p.grad, *rows[0][1:], *numbers, **dict(update.attrs))
            rows[0] = list(out) if isinstance(out, tuple) else [out]
            rows[1] = _unfolded(update, rows[1], p.grad, *numbers)
            optimizer.step()
            for row in rows:
                torch.testing.assert_close(row[0], p.detach(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=lambda m, s=settings: f"{s}: {m}")


def _unfolded(update: Any, row: list[Tensor], grad: Tensor, lr: Tensor, step: Tensor) -> list[Tensor]:
    names = ["p", "g", *(f"s{i}" for i in range(len(row) - 1)), "lr", "step"]
    nodes = [input_node(n, a.type) for n, a in zip(names, update.args, strict=True)]
    made = update.op(*nodes, **dict(update.attrs))
    outs = update.op.unfold(made)
    program = new_program("update", nodes[0].mesh, nodes, {f"o{i}": n for i, n in enumerate(outs)})
    values = dict(zip(names, [row[0], grad, *row[1:], lr, step], strict=True))
    out = interp.run_global(program, {n: values[n] for n in program.input_names})
    return [out[f"o{i}"] for i in range(len(outs))]


@pytest.mark.parametrize("kind", GRIDS, ids=lambda k: k.__name__)
def test_a_step(kind):
    for settings in [s for k, s in CASES if k is kind][::5]:
        model = net()
        mirror = copy.deepcopy(model)
        step = parallelize(model, loss, kind(model.parameters(), lr=0.01, **settings), batches()[0], check=False)
        for batch in batches():
            step(batch)
        torch_steps(mirror, kind(mirror.parameters(), lr=0.01, **settings), batches())
        same(step, mirror, 1e-11)


@pytest.mark.parametrize("plan", ["dp1", "micro2"])
def test_bfloat16_parameters_learn(plan):
    """The bias correction 1 - 0.999 is nothing in bfloat16: its moments were divided by zero."""
    model = net(torch.bfloat16)
    mirror = copy.deepcopy(model)
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=0.05), batches(torch.bfloat16)[0], plan)
    for batch in batches(torch.bfloat16):
        step(batch)
    torch_steps(mirror, torch.optim.AdamW(mirror.parameters(), lr=0.05), batches(torch.bfloat16))
    same(step, mirror, 2e-2)


@pytest.mark.parametrize("kind", GRIDS, ids=lambda k: k.__name__)
def test_state_of_a_run_that_was_loaded(kind):
    how = {"momentum": 0.9} if "momentum" in GRIDS[kind] else {}
    model = net()
    before = kind(model.parameters(), lr=0.01, **how)
    torch_steps(model, before, batches(many=3))
    mirror, mine = copy.deepcopy(model), copy.deepcopy(model)
    theirs, ours = kind(mirror.parameters(), lr=0.01, **how), kind(mine.parameters(), lr=0.01, **how)
    theirs.load_state_dict(before.state_dict())
    ours.load_state_dict(copy.deepcopy(before.state_dict()))
    step = parallelize(mine, loss, ours, batches()[0])
    for batch in batches():
        step(batch)
    torch_steps(mirror, theirs, batches())
    same(step, mirror, 1e-11)
    step.sync_model()
    step.sync_optimizer()
    torch_steps(mine, ours, batches())
    torch_steps(mirror, theirs, batches())
    for a, b in zip(mine.parameters(), mirror.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_steps_counted_for_each_parameter():
    """A layer that was frozen at first has had fewer updates than the rest."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model[0].requires_grad_(False)
    torch_steps(model, optimizer, batches(many=3))
    model[0].requires_grad_(True)
    mirror = copy.deepcopy(model)
    theirs = torch.optim.AdamW(mirror.parameters(), lr=0.05)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = parallelize(model, loss, optimizer, batches()[0])
    for batch in batches():
        step(batch)
    torch_steps(mirror, theirs, batches())
    same(step, mirror, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rate_that_is_a_tensor(dtype: torch.dtype):
    model = net()
    mirror = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.05, dtype=dtype)) for m in (model, mirror))
    step = parallelize(model, loss, ours, batches()[0])
    for batch in batches():
        step(batch)
        ours.param_groups[0]["lr"].mul_(0.7)
    torch_steps(mirror, theirs, batches(), lambda: theirs.param_groups[0]["lr"].mul_(0.7))
    same(step, mirror, 1e-11)


class Own(torch.optim.AdamW):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


class Late(torch.optim.Adamax):
    """Does nothing else in its second update than in its others, but for this."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if self.state[p]["step"].item() == 2:
                    p.mul_(1.1)


class Renamed(torch.optim.AdamW):
    """Its own defaults, and nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, weight_decay=0.3)


def test_a_subclass_steps_as_it_says():
    for kind in (Own, Renamed, Late):
        model = net()
        mirror = copy.deepcopy(model)
        step = parallelize(model, loss, kind(model.parameters()), batches()[0])
        for batch in batches():
            step(batch)
        torch_steps(mirror, kind(mirror.parameters()), batches())
        same(step, mirror, 1e-11)


def test_a_method_put_into_an_optimizer_is_refused():
    model = net()
    patched = torch.optim.AdamW(model.parameters())
    patched.step = lambda closure=None: None
    with pytest.raises(CaptureError, match="AdamW has a method of its own in place of its class's"):
        parallelize(model, loss, patched, batches()[0])


class Around(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_an_optimizer_around_another_is_refused():
    model = net()
    with pytest.raises(CaptureError, match="Around has another optimizer's step in its own") as error:
        parallelize(model, loss, Around(model.parameters()), batches()[0])
    assert "optimizer.base for weft" in str(error.value)


@pytest.mark.parametrize("plan", ["dp1", "micro2"])
def test_hooks_before_the_step(plan):
    model = net()
    mirror = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, mirror))

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_value_(params, 1e-2)
        nn.utils.clip_grad_norm_(params, 1e-2)

    for optimizer in (ours, theirs):
        optimizer.register_step_pre_hook(clip)
    step = parallelize(model, loss, ours, batches()[0], plan)
    for batch in batches():
        step(batch)
    torch_steps(mirror, theirs, batches())
    same(step, mirror, 1e-11)


def test_hooks_and_differentiable_steps_are_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="AdamW has hooks that run around its step"):
        parallelize(model, loss, optimizer, batches()[0])
    handle.remove()
    with pytest.raises(CaptureError, match="AdamW has differentiable=True"):
        parallelize(model, loss, torch.optim.AdamW(model.parameters(), differentiable=True), batches()[0])


def test_a_tensor_that_only_the_optimizer_has_is_refused():
    model, loose = nn.Linear(3, 2).double(), torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    with pytest.raises(CaptureError, match="trains a tensor that is no parameter of the module"):
        parallelize(model, lambda m, b: (m(b) + loose).square().mean(), optimizer, batches()[0])


def test_torchs_own_inputs():
    """Every setting torch's tests try, of every optimizer: equal, or refused in words. Muon to a digit of the bfloat16 it rounds to on its way."""
    common = pytest.importorskip("torch.testing._internal.common_optimizers", exc_type=ImportError)
    refused: dict[str, str] = {}
    for info in common.optim_db:
        for given in info.optim_inputs_func(device="cpu")[:: 1 if info.optim_cls in GRIDS else 3]:
            model = nn.Linear(3, 2, bias=info.optim_cls.__name__ != "Muon").double()
            mirror = copy.deepcopy(model)
            theirs, ours = (info.optim_cls(m.parameters(), **copy.deepcopy(given.kwargs)) for m in (mirror, model))
            try:
                captured = capture(model, batches()[0], loss, ours)
            except CaptureError as e:
                refused[info.optim_cls.__name__] = str(e)
                continue
            values = {k: v.clone() for k, v in captured.inputs(batches()[0]).items()}
            for batch in batches():
                out = interp.run_global(captured.program, {**values, "batch.0": batch})
                values |= {i: out[o] for o, i in captured.program.state}
            torch_steps(mirror, theirs, batches())
            digit = theirs.param_groups[0]["lr"] * torch.finfo(torch.bfloat16).eps / 2 * len(batches())  # one a step: sums of another order round
            far = digit if info.optim_cls.__name__ == "Muon" else 1e-11
            for name, want in mirror.named_parameters():
                torch.testing.assert_close(values[f"param.{name}"], want.detach(), atol=far, rtol=1e-11, msg=lambda m, g=given: f"{g.desc}: {m}")
    assert refused.keys() == {"LBFGS", "SparseAdam"}
    assert "LBFGS takes a closure and computes the loss itself" in refused["LBFGS"]
    assert "SparseAdam does not support dense gradients" in refused["SparseAdam"] and "such as torch.optim.Adam" in refused["SparseAdam"]
