"""What the user's Python says changes between steps: against torch in float64, step by step."""

from __future__ import annotations

import collections
import contextvars
import copy
import enum
import functools
import gc
import math
import os
import random
import sys
import threading
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import weft
from weft import parallelize
from weft.core.errors import CaptureError, RuntimeFault

SETTINGS = types.SimpleNamespace(beta=0.5)
STEP = 0
TABLE = torch.ones(4, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.alpha, self.config, self.scales = 0.5, types.SimpleNamespace(gain=1.0, act="tanh"), [1.0, 2.0]
        self.table = torch.linspace(0, 1, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def mean(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def batches(many: int = 5) -> list[Tensor]:
    return [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(many)]


def same(
    model: nn.Module,
    loss: Any,
    many: list[Any],
    each: Any = None,
    plan: str = "dp1",
    optimizer: Any = torch.optim.AdamW,
    begin: Any = None,
    **how: Any,
) -> Any:
    """The steps of weft, then those of torch from the same beginning; `each(model, i)` is the loop's own code after step i."""
    mirror = copy.deepcopy(model)
    ours = optimizer(model.parameters(), lr=0.05)
    begin() if begin is not None else None
    step = parallelize(model, loss, ours, many[0], plan, **how)
    got = []
    for i, batch in enumerate(many):
        got.append(step(batch))
        each(model, i) if each is not None else None
    trained = {n: step.full(f"param.{n}").clone() for n, _ in model.named_parameters() if f"param.{n}" in step.state_names}
    begin() if begin is not None else None
    theirs = optimizer(mirror.parameters(), lr=0.05)
    for i, batch in enumerate(many):
        theirs.zero_grad()
        want = loss(mirror, batch)
        want.backward()
        theirs.step()
        torch.testing.assert_close(got[i], want.detach(), atol=1e-11, rtol=1e-11, msg=lambda m, i=i: f"step {i}: {m}")
        each(mirror, i) if each is not None else None
    for name, p in mirror.named_parameters():
        if name in trained:
            torch.testing.assert_close(trained[name], p.detach(), atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    return step


def programs(step: Any) -> int:
    return len(step.forms.kept)


# -- the batch ---------------------------------------------------------------------------------------------------------


def test_a_number_in_the_batch():
    many = [{"x": x, "scale": s} for x, s in zip(batches(), (2.0, 2.0, 7.0, 0.25, 1.5), strict=True)]
    step = same(Net().double(), lambda m, b: mean(m, b["x"]) * b["scale"] + (1 - b["scale"]) * m(b["x"]).sum(), many)
    assert programs(step) == 2  # then it is an input


def test_a_whole_number_in_the_batch_that_counts():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = batch["x"]
        for _ in range(batch["times"]):
            out = model(out)
        return out.square().mean()

    step = same(Net().double(), loss, [{"x": x, "times": t} for x, t in zip(batches(), (1, 2, 1, 3, 2), strict=True)])
    assert programs(step) == 3


def test_flags_strings_and_none_in_the_batch():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        out = out if batch["mask"] is None else out * batch["mask"]
        return (out.abs() if batch["how"] == "abs" else out.square()).mean() + (out.sum() if batch["more"] else 0)

    kinds = [
        ("abs", False, None),
        ("square", True, None),
        ("abs", True, batches()[0]),
        ("abs", False, None),
        ("square", True, batches()[1]),
    ]
    same(Net().double(), loss, [{"x": x, "how": h, "more": m, "mask": k} for x, (h, m, k) in zip(batches(), kinds, strict=True)])


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def test_arrays_lists_of_numbers_enums_and_slices_in_the_batch():
    """What Python makes a tensor of is a constant of the program, which has other values at another call."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"]) * torch.from_numpy(batch["array"]) * torch.tensor(batch["list"], dtype=torch.float64)
        out = out if batch["colour"] is Colour.RED else out.abs()
        return out[batch["part"]].square().mean()

    draw = np.random.default_rng(0)
    many = [
        {"x": x, "array": draw.standard_normal((6, 1)), "list": [1.0, i, 0.5, -i], "colour": Colour(1 + i // 3), "part": slice(i // 4, 5)}
        for i, x in enumerate(batches())
    ]
    many[1]["list"] = many[0]["list"]
    same(Net().double(), loss, many)
    array = many[0]["array"]
    step = parallelize(model := Net().double(), loss, torch.optim.SGD(model.parameters(), lr=0.0), many[0])
    before = step(many[0])
    array *= 2  # a loader that fills one array again and again
    torch.testing.assert_close(step(many[0]), 4 * before)


def test_batches_of_other_shapes():
    many = [torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (6, 6, 3, 6, 3)]
    assert programs(same(Net().double(), mean, many)) == 2


def test_more_shapes_than_programs_are_kept():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return mean(model, x) * math.sin(len(x))  # no product of sizes

    many = [torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (6, *range(1, 20), 6, 3)]
    assert programs(same(Net().double(), loss, many)) == 16


# -- what the loop changes ---------------------------------------------------------------------------------------------


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    return mean(model, x) * model.alpha + (1 - model.alpha) * model(x).sin().mean()


def test_an_attribute():
    def anneal(model: nn.Module, i: int) -> None:
        model.alpha = 0.5 * 0.7**i

    assert programs(same(Net().double(), scaled, batches(8), anneal)) == 2


def test_a_field_of_a_config():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x) * model.config.gain * model.scales[1]
        return (out.relu() if model.config.act == "relu" else out.tanh()).sum()

    def change(model: nn.Module, i: int) -> None:
        model.config.gain = 1.0 + i
        model.config.act = "relu" if i == 2 else "tanh"
        model.scales[1] = 2.0 - i / 4

    same(Net().double(), loss, batches(), change)


def test_a_closure():
    beta = 0.1

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return mean(model, x) + beta * model(x).cos().mean()

    def anneal(model: nn.Module, i: int) -> None:
        nonlocal beta
        beta = 0.1 + 0.2 * i if i < 4 else 0.1

    assert programs(same(Net().double(), loss, batches(), anneal)) == 2


def test_globals_of_this_file_and_of_objects():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return mean(model, x) * (STEP + 1) + SETTINGS.beta * model(x).mean()

    def count(model: nn.Module, i: int) -> None:
        global STEP
        STEP, SETTINGS.beta = (i + 1) % 5, 0.5 + i % 4

    same(Net().double(), loss, batches(), count)


class Weighted:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return mean(model, x) * self.weight


def test_an_object_that_is_the_loss():
    loss = Weighted()

    def change(model: nn.Module, i: int) -> None:
        loss.weight = 1.0 + i % 4

    same(Net().double(), loss, batches(), change)


def test_tensors_kept_in_python():
    held = {"t": torch.ones(4, dtype=torch.float64)}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * model.table * held["t"] * TABLE).square().mean() + model.number * model(x).sum()

    def change(model: nn.Module, i: int) -> None:
        model.table.mul_(1.5) if i % 2 else setattr(model, "table", model.table + 1)
        held["t"] = held["t"] * (1.1 if i < 4 else 1.1**-4)
        TABLE.mul_(2.0 if i < 4 else 2.0**-4)
        model.number = torch.tensor(0.1 * i, dtype=torch.float64)

    model = Net().double()
    model.table, model.number = model.table.double(), torch.tensor(0.3, dtype=torch.float64)
    assert programs(same(model, loss, batches(), change)) == 1


def test_a_teacher_outside_the_module():
    teacher = Net().double()
    before = copy.deepcopy(teacher.state_dict())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            want = teacher(x)
        return (model(x) - want).square().mean()

    def average(model: nn.Module, i: int) -> None:
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(0.9)

    same(Net().double(), loss, batches(), average, begin=lambda: teacher.load_state_dict(before))


def test_parameters_reached_past_the_module():
    model = Net().double()
    kept = [list(model.parameters())]
    loss = lambda m, x: mean(m, x) + 0.1 * sum(p.square().sum() for p in (kept[0] if m is model else m.parameters()))  # noqa: E731
    same(model, loss, batches())


def test_training_and_evaluation_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    same(model, mean, batches(), lambda m, i: m.train(i % 2 == 1), optimizer=torch.optim.SGD)


def test_parameters_frozen_and_thawed():
    """A frozen parameter has had fewer updates than the others, as its optimizer counts."""

    def change(model: nn.Module, i: int) -> None:
        model.a.requires_grad_(i % 3 != 0)

    same(Net().double(), mean, batches(7), change)


def test_a_part_whose_flag_is_taken_away_for_one_loss():
    """As a discriminator's is while the generator learns from it: gradients go through it, and to it from the other losses alone."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        fake = model.a(x)
        judged = model.b(x).square().mean() + model.b(fake.detach()).exp().mean()
        model.b.requires_grad_(False)
        fooled = model.b(fake).tanh().mean()
        for p in model.b.parameters():
            p.requires_grad = True
        return judged + fooled

    same(Net().double(), loss, batches())


@pytest.mark.parametrize("how", ["data", "write"])
def test_a_teacher_that_follows_in_the_forward_pass(how: str):
    """`p.data = x` is a write that no gradient sees."""

    class Followed(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = self.a(x)
            with torch.no_grad():
                for mine, theirs in zip(self.a.parameters(), self.b.parameters(), strict=True):
                    if how == "data":
                        theirs.data = 0.9 * theirs.data + 0.1 * mine.data
                    else:
                        theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)
                aim = self.b(x)
            return out - aim

    same(Followed().double().requires_grad_(True), mean, batches(), optimizer=lambda params, lr: torch.optim.SGD(list(params)[:2], lr))


def test_another_data_of_another_shape_is_refused():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model.a.weight.data = torch.zeros(3, 4, dtype=torch.float64)
        return mean(model, x)

    with pytest.raises(CaptureError, match=r"another tensor is put into .data(.|\n)*\(3, 4\) torch.float64 into \(4, 4\)"):
        parallelize(model := Net().double(), loss, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0])


def test_another_function():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model.act(model(x)).square().mean()

    def change(model: nn.Module, i: int) -> None:
        model.act = torch.sigmoid if i % 2 else torch.relu

    model = Net().double()
    model.act = torch.relu
    assert programs(same(model, loss, batches(), change)) == 2


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR", "StepLR", "CosineAnnealingLR"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1)])
def test_schedulers(kind, scheduler):
    """Momenta and betas are cycled with the rate; the weight decay is changed by hand."""
    how = {"OneCycleLR": {"max_lr": 0.1, "total_steps": 9}, "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
           "StepLR": {"step_size": 2}, "CosineAnnealingLR": {"T_max": 4}}[scheduler]  # fmt: skip
    model = Net().double()
    mirror = copy.deepcopy(model)
    ours, theirs = kind(model.parameters(), lr=0.05), kind(mirror.parameters(), lr=0.05)
    step = parallelize(model, mean, ours, batches()[0])
    mine, other = (getattr(torch.optim.lr_scheduler, scheduler)(o, **how) for o in (ours, theirs))
    for i, x in enumerate(batches(6)):
        theirs.zero_grad()
        want = mean(mirror, x)
        want.backward()
        theirs.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(step(x), want.detach(), atol=1e-11, rtol=1e-11)
            mine.step()
            other.step()
        for o in (ours, theirs):
            o.param_groups[0]["weight_decay"] = 0.1 / (i + 1) if i > 2 else 0.1
    for n, p in mirror.named_parameters():
        torch.testing.assert_close(step.full(f"param.{n}"), p.detach(), atol=1e-10, rtol=1e-10)
    assert programs(step) <= 3


# -- what the model itself changes -------------------------------------------------------------------------------------


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(self.calls, 4)


class Dropping(Net):
    source: Any = random

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer in (self.a, self.b, self.a):
            if self.source.random() < 0.5:
                out = torch.tanh(layer(out))
        return out + self.b(x) * 0 + self.a(x) * 0


class Skipping(nn.Module):
    """Layers alike, each with a draw of its own; a layer left out is not updated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Skipped() for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Skipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x + self.inner(x)


def seeded() -> None:
    random.seed(3)
    np.random.seed(3)


@pytest.mark.filterwarnings("ignore:the step changes Python")
@pytest.mark.parametrize("make", [Counting, Dropping, Skipping])
def test_a_model_that_counts_or_draws(make):
    model = make().double()
    step = same(model, mean, batches(7), begin=seeded)
    assert step.forms.impure
    assert getattr(model, "calls", 7) in (7, 0)


class Numpys(types.SimpleNamespace):
    """Stays the one it is in a copied model, whose copy of np.random.rand would draw from a state of its own."""

    def __deepcopy__(self, _: Any) -> Any:
        return self


@pytest.mark.filterwarnings("ignore:the step changes Python")
def test_numpys_random_numbers():
    model = Dropping().double()
    model.source = Numpys(random=np.random.rand)
    same(model, mean, batches(), begin=seeded)


@pytest.mark.filterwarnings("ignore:the step changes Python")
def test_a_counter_outside_the_module():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        global STEP
        STEP += 1
        return mean(model, x) * STEP

    def begin() -> None:
        global STEP
        STEP = 0

    same(Net().double(), loss, batches(), begin=begin)


def test_it_is_said_that_a_step_is_traced_at_every_call():
    model = Counting().double()
    with pytest.warns(UserWarning, match=r"changes Python as it runs \(model.calls\): it is traced at every call"):
        parallelize(model, mean, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0])
    assert model.calls == 0


class Noting(Net):
    """By-products that no step reads again."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows, self.last, self.notes = x.shape[0], super().forward(x), {"mean": x.mean()}
        return self.last * self.rows + self.notes["mean"]


def test_by_products_are_no_state():
    step = same(Noting().double(), mean, batches())
    assert not step.forms.impure
    assert not hasattr(step.model, "last")


class Recording(Net):
    """Hooks that are put in place when it is first called, as transformers records what its layers give."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.a.register_forward_hook(lambda _m, _a, out: self.put(out))
            self.hooked = True
        given: list[Tensor] = []
        self.put = given.append
        out = super().forward(x)
        del self.put
        return out + len(given) * given[0].square()


def test_hooks_that_come_with_the_first_call_come_once():
    step = same(Recording().double(), mean, batches())
    assert len(step.model.a._forward_hooks) == 1


class Recurrent(Net):
    hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x if self.hidden is None else x + self.hidden)
        self.hidden = out.detach()
        return out


def test_a_tensor_carried_from_step_to_step_is_refused():
    model = Recurrent().double()
    with pytest.raises(CaptureError, match=r"model.hidden carries a tensor from one step into the next"):
        parallelize(model, mean, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0])


WEIGHT = contextvars.ContextVar("weight", default=1.0)
LOCAL = threading.local()


class Kept:
    def __init__(self) -> None:
        self.deep: Any = {"a": [{"b": [{"c": [{"d": [1.0]}]}]}]}


def test_what_threads_contexts_the_environment_and_functions_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()

    def scale(model: nn.Module, batch: Any) -> Tensor:
        scale.calls = getattr(scale, "calls", 0) + 1
        parts = WEIGHT.get(), LOCAL.weight, float(os.environ["WEIGHT"]), kept.deep["a"][0]["b"][0]["c"][0]["d"][0], scale.calls
        return mean(model, batch) * sum(parts)

    def begin() -> None:
        scale.calls, kept.deep["a"][0]["b"][0]["c"][0]["d"][0], LOCAL.weight = 0, 1.0, 1.0
        WEIGHT.set(1.0)
        monkeypatch.setenv("WEIGHT", "1")

    def each(model: nn.Module, i: int) -> None:
        if i == 0:
            WEIGHT.set(3.0)
        elif i == 1:
            LOCAL.weight = 2.0
        elif i == 2:
            monkeypatch.setenv("WEIGHT", "5")
        else:
            kept.deep["a"][0]["b"][0]["c"][0]["d"][0] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(Net().double(), scale, batches(), each, begin=begin)


def test_a_module_that_the_loss_moves_to_the_batch_and_a_loss_of_one_element() -> None:
    teacher = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher.to(batch.device, batch.dtype)(batch)
        return (model(batch) - wanted).square().mean().reshape(1)

    model = Net().double()
    step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0])
    torch.testing.assert_close(step(batches()[0]), loss(Net.forward.__get__(model), batches()[0]).detach()[0])


class Aside(nn.Module):
    """Hands a loss of its own on through a list."""

    def __init__(self, bag: Any) -> None:
        super().__init__()
        self.inner, self.bag = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), bag

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.bag.append(out.square().mean())
        return x + out


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_losses_that_like_layers_put_aside(kind: Any) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        out = mean(model, batch) + sum((k + 1) * x for k, x in enumerate(model[0].bag))
        model[0].bag.clear()
        return out

    bag = kind()
    same(nn.Sequential(Aside(bag), Aside(bag), Aside(bag)).double(), loss, batches(3))


class Fixed(dict[str, Any]):
    """A table of settings that refuses to be written into."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("fixed")

    update = clear = pop = popitem = setdefault = __delitem__ = _refuse  # type: ignore[assignment]

    def copy(self) -> Fixed:
        return Fixed(self)


def test_a_table_that_refuses_to_be_written_into_is_left_alone() -> None:
    class Configured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Fixed(gain=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.settings["gain"]

    step = same(Configured().double(), mean, batches(2))
    assert programs(step) == 1


# -- constants that the first call keeps ---------------------------------------------------------------------------------


class Positions(nn.Module):
    """Positions up to the longest so far, made when they are needed: what they are depends on the call that made them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.made, self.tables = nn.Linear(4, 4), how, None, {}
        self.register_buffer("steps", torch.linspace(0.5, 1, 4))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * getattr(self, self.how)(x.shape[1]).to(x.dtype)[: x.shape[1], None]).mean(1)

    def attribute(self, n: int) -> Tensor:
        if self.made is None or len(self.made) < n:
            self.made = torch.linspace(0, 1, n, dtype=torch.float64)
        return self.made

    def pair(self, n: int) -> Tensor:
        if self.made is None or len(self.made[0]) < n:
            self.made = torch.linspace(0, 1, n, dtype=torch.float64), torch.ones(n)
        return self.made[0] + self.made[1]

    def table(self, n: int) -> Tensor:
        if n not in self.tables:
            self.tables[n] = torch.arange(n, dtype=torch.float64) / n
        return self.tables[n]

    def of_a_buffer(self, n: int) -> Tensor:
        if self.made is None:
            self.made = self.steps.repeat(3).cos()
        return self.made

    def buffer(self, n: int) -> Tensor:
        if self.later is None:
            self.later = torch.arange(12, dtype=torch.float64) / 12
        return self.later

    @functools.lru_cache  # noqa: B019
    def memo(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.float64) / n


def lengths(*many: int) -> list[Tensor]:
    return [torch.randn(3, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(many)]


@pytest.mark.parametrize("how", ["attribute", "pair", "table", "of_a_buffer", "buffer", "memo"])
def test_a_constant_that_the_first_call_keeps_is_what_it_is_in_torch(how: str) -> None:
    model = Positions(how).double()
    same(model, mean, lengths(5, 4, 7, 5, 7))
    if how not in ("table", "memo"):
        held = model.later if how == "buffer" else model.made[0] if how == "pair" else model.made
        assert type(held) is Tensor and len(held) == (7 if how in ("attribute", "pair") else 12)
    assert not any(isinstance(x, FakeTensor) for x in [*model.tables.values(), Positions.memo(model, 5)])


class Resized(nn.Module):
    """Relative positions in a buffer, which begins as a placeholder and is made for the size that comes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("positions", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.positions) != x.shape[1]:
            self.positions = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return self.linear(x * self.positions[:, None]).mean(1)


def test_a_buffer_that_the_first_call_makes_in_its_final_size_is_traced_once() -> None:
    model = Resized().double()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as that the step is traced at every call
        step = same(model, mean, lengths(5, 5, 5))
    assert programs(step) == 1 and torch.equal(model.positions, torch.linspace(0, 1, 5, dtype=torch.float64))


def test_a_buffer_that_the_first_call_resizes_is_no_state_of_micro_batches() -> None:
    same(nn.Sequential(Resized(), nn.Linear(4, 4)).double(), mean, [x.repeat(2, 1, 1)[:4] for x in lengths(5, 5)], plan="micro2")


def test_a_buffer_that_a_later_batch_would_make_in_another_size_is_refused() -> None:
    model = Resized().double()
    step = parallelize(model, mean, torch.optim.SGD(model.parameters(), lr=0.1), lengths(5)[0])
    with pytest.raises(RuntimeFault, match=r"another buffer for this batch: positions[\s\S]*\[5\] float64[\s\S]*\[7\] float64"):
        step(lengths(5, 7)[1])
    assert model.positions.shape == (5,) and torch.isfinite(step(lengths(5)[0]))


class Masked(nn.Module):
    """A causal mask made by the first call, in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        h = self.linear(x)
        return nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], attn_mask=self.mask)[:, 0]


def test_a_mask_that_the_first_call_keeps_is_still_seen_to_be_causal() -> None:
    step = same(nn.Sequential(Masked(), Masked()).double(), mean, lengths(5, 5, 5))
    masked = step.program.find_all("attention")
    assert len(masked) == 2 and all(n.attr("causal") for n in masked)


class Handed(Net):
    how = "none"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", None)
        self.total = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "none":
            out = super().forward(x if self.hidden is None else x + self.hidden)
            self.hidden = out.detach()
            return out
        self.total += 0.1
        return super().forward(x) + self.total


def test_a_buffer_that_was_none_and_carries_what_a_step_made_is_refused() -> None:
    model = Handed().double()
    with pytest.raises(CaptureError, match=r"model.hidden carries a tensor from one step into the next"):
        parallelize(model, mean, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0])
    assert model.hidden is None


def test_writing_into_a_tensor_that_is_no_buffer_is_refused_and_leaves_it_as_it_was() -> None:
    model = Handed().double()
    model.how = "total"
    with pytest.raises(CaptureError, match=r"a step writes into a tensor that is no buffer .*test_guards.py") as refused:
        parallelize(model, mean, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0])
    assert "register_buffer" in str(refused.value) and not model.total.any()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_value_that_never_settles_is_named():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return mean(model, batch["x"]) * float(f"{batch['temperature']:.3f}")

    model = Net().double()
    first, *others = [{"x": batches()[0], "temperature": 1.0 + i} for i in range(20)]
    step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), first, check=False)
    words = r"16 different programs[\s\S]*temperature of the batch keeps changing[\s\S]*as a tensor in the batch"
    with pytest.raises(RuntimeFault, match=words):
        [step(batch) for batch in others]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_group_that_comes_later(frozen: bool) -> None:
    """Its parameters count their updates from then on, whether or not they had gradients before."""
    models = [Net().double()]
    models.append(copy.deepcopy(models[0]))
    ours, theirs = (torch.optim.AdamW(m.a.parameters(), lr=0.1) for m in models)
    for m in models:
        m.b.requires_grad_(not frozen)
    step = parallelize(models[0], mean, ours, batches()[0])
    for i in range(5):
        if i == 2:
            for m, optimizer in zip(models, (ours, theirs), strict=True):
                m.b.requires_grad_(True)
                optimizer.add_param_group({"params": list(m.b.parameters()), "lr": 0.03, "weight_decay": 0.2})
        x = batches()[i % len(batches())]
        models[1].zero_grad()
        want = mean(models[1], x)
        want.backward()
        theirs.step()
        torch.testing.assert_close(step(x), want.detach(), rtol=1e-11, atol=1e-11)
    for n, p in models[1].named_parameters():
        torch.testing.assert_close(step.full(f"param.{n}"), p.detach(), rtol=1e-11, atol=1e-11, msg=n)


def test_groups_and_state_that_change_are_refused():
    model = Net().double()
    optimizer = torch.optim.SGD([{"params": m.parameters()} for m in (model.a, model.b)], lr=0.1)
    step = parallelize(model, mean, optimizer, batches()[0])
    step(batches()[0])
    del optimizer.param_groups[1]
    with pytest.raises(RuntimeFault, match="other parameter groups than when the step was made"):
        step(batches()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = parallelize(model, mean, optimizer, batches()[0])
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuntimeFault, match="SGD of group 0 keeps other state than when the step was made"):
        step(batches()[0])


# -- evaluation and inference -------------------------------------------------------------------------------------------


def test_the_loss_alone_follows_python_too():
    model = Net().double()
    step = parallelize(model, scaled, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0])
    model.b.eval()
    for alpha in (0.5, 0.25, 0.5):
        model.alpha = alpha
        torch.testing.assert_close(step.eval(batches()[1]), scaled(model, batches()[1]).detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(step.eval(batches()[1][:3]), scaled(model, batches()[1][:3]).detach(), atol=1e-12, rtol=1e-12)
    assert model.training and not model.b.training


def test_inference_follows_python_too():
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.alpha + self.table

    model = Scaled().double()
    model.table = model.table.double()
    run = weft.compile(model, "dp1", batches()[0])
    for alpha in (0.5, 0.25, 0.5):
        model.alpha, model.table = alpha, model.table + 1
        (got,) = run(batches()[1]).values()
        torch.testing.assert_close(got, model(batches()[1]).detach(), atol=1e-12, rtol=1e-12)
    model = Counting().double()
    with pytest.raises(CaptureError, match=r"changes Python as it runs \(model.calls\)"):
        weft.compile(model, "dp1", batches()[0])


def test_a_parallelized_module_whose_values_change_is_refused():
    class Scaled(Net):
        def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
            return super().forward(x) * self.alpha * times

    model = weft.shard(Scaled().double(), (batches()[0],), "dp1")
    model(batches()[1])
    with pytest.raises(RuntimeFault, match=r"other values in Python[\s\S]*times|1 of the call"):
        model(batches()[1], 2.0)
    model.alpha = 0.25
    with pytest.raises(RuntimeFault, match=r"other values in Python[\s\S]*model.alpha: 0.5 when traced, 0.25 now"):
        model(batches()[1])
    with pytest.raises(CaptureError, match=r"changes Python as it runs \(model.calls\)[\s\S]*traces such a step at every call"):
        weft.shard(Counting().double(), (batches()[0],), "dp1")


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_are_traced_once(kind: type[nn.RNNBase]) -> None:
    """They keep weak references to their weights, made anew while the weights are traced: that is no state of Python's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(kind(4, 3).double(), lambda model, batch: model(batch[:, None])[0].square().mean(), batches(3))


def test_a_profiler_that_runs_goes_on() -> None:
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    try:
        same(Net().double(), mean, batches(2))
        mean(Net().double(), batches(1)[0])
    finally:
        profile.disable()
    assert any("test_guards" in str(entry.code) for entry in profile.getstats())


def test_a_batch_that_lacks_a_tensor_is_told_by_its_name():
    model = nn.Linear(4, 1)
    step = parallelize(model, lambda m, b: m(b["x"]).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), {"x": torch.randn(2, 4)})
    with pytest.raises(RuntimeFault, match="the batch has no 'x'") as e:
        step({"y": torch.randn(2, 4)})
    assert "KeyError: 'x'" in e.value.found


def test_a_listener_to_collections_is_not_called_while_a_model_is_traced() -> None:
    """Python 3.11 ends where a collection with a listener begins while a profiler is being called."""
    heard: list[str] = []
    before = gc.get_threshold()
    gc.callbacks.append(listener := lambda phase, _info: heard.append(phase) if sys.getprofile() is not None else None)
    gc.set_threshold(1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        parallelize(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4), check=False)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(listener)
    assert not heard and gc.isenabled()


def test_two_functions_of_one_code_are_told_apart() -> None:
    def doubled(flag: bool) -> nn.Module:
        model = Net().double()
        model.after = lambda y: y * 2 if flag else y  # type: ignore[assignment]
        model.register_forward_hook(lambda m, _, y: m.after(y))
        return model

    models = [doubled(True), doubled(False)]
    out = weft.compile(models[1], "dp1", batches()[0])(batches()[0])["out"]  # the other one's variable is no change of this one's
    assert torch.allclose(out, models[1](batches()[0]), atol=1e-12)
