"""Training steps: optimizers, accumulation, clipping, schedulers, mixed precision, and functions the user wrote."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft_zoo as zoo
from tests.frontend.capture.checks import close, run, same_as_torch
from weft import interp
from weft.core.errors import CaptureError
from weft.frontend.capture import capture, capture_step

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x))))


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


BATCH = {"x": X, "y": Y}


def train(captured, steps, rates=None):
    """Several steps of the program, state fed back."""
    values = {k: v.clone() for k, v in captured.inputs(BATCH).items()}
    losses = []
    for i in range(steps):
        if rates:
            values["lr.0"] = torch.tensor(rates[i], dtype=torch.float64)
        out = interp.run_global(captured.program, values)
        losses.append(out.get("loss", out.get("out")).item())
        values |= {i: out[o] for o, i in captured.program.state}
    return losses, values


def train_torch(model, optimizer, steps, each=None):
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = mse(model, BATCH)
        loss.backward()
        if each:
            each(i)
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1, maximize=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1),
    "radam decoupled": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.8, 0.7), weight_decay=0.1, decoupled_weight_decay=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    model = Net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    batch = {k: v.double() for k, v in BATCH.items()}
    captured = capture(model, batch, mse, optimizer)
    values = {k: v.clone() for k, v in captured.inputs(batch).items()}
    for step in range(8):
        values |= {"step": torch.tensor(step)} if "step" in values else {}
        out = interp.run_global(captured.program, values)
        values |= {i: out[o] for o, i in captured.program.state}
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(out["loss"], loss.detach(), atol=1e-10, rtol=1e-10)
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(values[f"param.{n}"], p.detach(), atol=1e-10, rtol=1e-10)
            for key, state in optimizer.state[p].items():
                if f"{key}.{n}" in values:
                    torch.testing.assert_close(values[f"{key}.{n}"], state, atol=1e-10, rtol=1e-10)


def test_one_op_per_parameter_and_none_for_unused_ones():
    model = Net()
    program = capture(model, BATCH, mse, torch.optim.AdamW(model.parameters())).program
    assert len(program.find_all("adam")) == 6
    assert not any("unused" in n for n in program.input_names)


def test_parameter_groups_and_a_scheduler():
    model = Net()
    groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.last.parameters(), "lr": 0.01}]
    captured = capture(model, BATCH, mse, torch.optim.SGD(groups))
    assert captured.rates == (0.1, 0.01)
    got = run(captured, BATCH, rates=(0.2, 0.0))
    loss = mse(model, BATCH)
    loss.backward()
    torch.testing.assert_close(got["param.first.weight"], model.first.weight - 0.2 * model.first.weight.grad)
    torch.testing.assert_close(got["param.last.weight"], model.last.weight.detach())
    assert "param.norm.weight" not in got


def test_an_optimizer_that_hides_its_numbers():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            self.calls = getattr(self, "calls", 0) + 1

    model = Net()
    with pytest.raises(CaptureError, match="Mine keeps state outside of its parameters' own") as error:
        capture(model, BATCH, mse, Mine(model.parameters(), lr=0.1))
    assert "self.calls" in str(error.value)


def test_an_optimizer_that_needs_a_number_itself():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.mul_(float(p.grad.norm().item()))

    model = Net()
    with pytest.raises(CaptureError, match="Python needs the value of a number"):
        capture(model, BATCH, mse, Mine(model.parameters(), lr=0.1))


def test_a_batch_of_batches():
    model = Net()
    batch = {"in": [X, {"scale": torch.tensor(2.0)}], "y": (Y,), "note": "not a tensor"}

    def loss(model, batch):
        return F.mse_loss(model(batch["in"][0]) * batch["in"][1]["scale"], batch["y"][0])

    captured = capture(model, batch, loss)
    assert {n for n in captured.program.input_names if n.startswith("batch")} == {"batch.in.0", "batch.in.1.scale", "batch.y.0"}
    torch.testing.assert_close(run(captured, batch)["loss"], loss(model, batch).detach())
    assert captured.constants == {}


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_equals_the_whole_batch(parts):
    model = Net()
    whole = run(capture(model, BATCH, mse, gradients=True), BATCH)
    captured = capture(model, BATCH, mse, gradients=True, accumulate=parts)
    got = run(captured, BATCH)
    for name, value in whole.items():
        close(got[name], value, 1e-6, name)
    assert [len(g) for g in captured.blocks] == [parts]


def test_clipping():
    model = Net()
    captured = capture(model, BATCH, mse, gradients=True, clip=0.1)
    got = run(captured, BATCH)
    mse(model, BATCH).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(got["grad_norm"], norm)
    for n, p in model.named_parameters():
        if p.grad is not None:
            close(got[f"d.param.{n}"], p.grad, 1e-6, n)


def test_clipping_by_far_loses_no_digits():
    """Gradients are multiplied in place, as constants: nothing is added to what they were."""
    model = Net()
    captured = capture(model, BATCH, lambda m, b: 1e4 * mse(m, b), gradients=True, clip=1e-3)
    assert not captured.program.find_all("overwritten")
    got = run(captured, BATCH)
    (1e4 * mse(model, BATCH)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert (got[f"d.param.{n}"] - p.grad).abs().max() <= 2e-6 * p.grad.abs().max(), n


def test_gradients_are_constants_unless_a_graph_is_made():
    def by_grad(m, out, graph):
        (slope,) = torch.autograd.grad(out.square().sum(), m.last.weight, retain_graph=True, create_graph=graph)
        return out.sum() + (slope.square() * m.last.weight).sum()

    def by_backward(m, out, graph):
        out.square().sum().backward(retain_graph=True, create_graph=graph, inputs=[m.last.weight, m.first.weight])
        penalty = m.last.weight.grad.square().sum()
        m.last.weight.grad = m.first.weight.grad = None
        return out.sum() * penalty

    for made, graph in itertools.product((by_grad, by_backward), (False, True)):
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = {k: v.double() if v.is_floating_point() else v for k, v in BATCH.items()}

        def step(batch, made=made, graph=graph, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = made(model, model(batch["x"]), graph)
            loss.backward()
            optimizer.step()
            return loss.detach()

        got = run(capture_step(step, model, optimizer, batch), batch)
        step(batch)
        for n, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(got[f"param.{n}"], p.detach(), rtol=1e-10, atol=1e-12)


def test_backward_for_other_tensors_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        h = model(batch["x"])
        h.sum().backward(inputs=[h])

    with pytest.raises(CaptureError, match="gradients of other tensors") as caught:
        capture_step(step, model, optimizer, BATCH)
    for words in ("the module's parameters", "1 others", "torch.autograd.grad"):
        assert words in str(caught.value)


def test_frozen_parameters_stay():
    model = Net()
    model.first.requires_grad_(False)
    captured = capture(model, BATCH, mse, torch.optim.AdamW(model.parameters()))
    assert "param.first.weight" in captured.program.input_names
    assert "param.first.weight" not in captured.program.output_names


# -- the user's own function ---------------------------------------------------------------------------------------------


def test_a_training_function():
    model, schedule = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for i in range(2):
            part = {k: v[4 * i : 4 * i + 4] for k, v in batch.items()}
            loss = mse(model, part) / 2
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.append(1)
        return total

    captured = capture_step(step, model, optimizer, BATCH)
    assert captured.program.name == "step"
    losses, values = train(captured, 3)
    assert optimizer.state == {}
    for want in losses:
        assert step(BATCH).item() == pytest.approx(want, abs=1e-6)
    for n, p in model.named_parameters():
        if p.grad is not None:
            close(values[f"param.{n}"], p.detach(), 1e-5, n)


def test_two_losses_and_a_gradient_penalty():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        out = model(batch["x"])
        (slope,) = torch.autograd.grad(out.sum(), model.last.weight, create_graph=True)
        (F.mse_loss(out, batch["y"]) + 0.1 * slope.square().mean()).backward()
        optimizer.step()
        return {"out": out.detach(), "loss": slope.norm()}

    captured = capture_step(step, model, optimizer, BATCH)
    got = run(captured, BATCH)
    want = step(BATCH)
    torch.testing.assert_close(got["out.out"], want["out"], atol=1e-5, rtol=1e-5)
    for n, p in model.named_parameters():
        if p.grad is not None:
            close(got[f"param.{n}"], p.detach(), 1e-5, n)


def test_gradients_are_asked_of_a_leaf_alone():
    """A tensor detached or cloned and then asked for its gradient has its own, not that of others with its values."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    batch = {"x": torch.randn(5, 4, dtype=torch.float64)}

    def loss(model, batch):
        x = batch["x"]
        a, b, h = x.detach().requires_grad_(), x.clone().requires_grad_(True), model[0](x)
        k = h.detach().requires_grad_()
        out = model(a).tanh().sum() * model(b).sin().sum() + model(x).square().sum() + (model(x.detach()) * model(a)).sum() + model[1:](k).sum()
        grads = torch.autograd.grad(out, [a, b, k], create_graph=True)
        return out + sum((i + 2) * g.square().sum() for i, g in enumerate(grads)) + (h * grads[2].detach()).sum()

    captured = capture(model, batch, loss, gradients=True)
    got = interp.run_global(captured.program, captured.inputs(batch))
    want = loss(model, batch)
    want.backward()
    torch.testing.assert_close(got["loss"], want.detach(), rtol=1e-12, atol=1e-12)
    for n, p in model.named_parameters():
        torch.testing.assert_close(got[f"d.param.{n}"], p.grad, rtol=1e-11, atol=1e-12)


# -- mixed precision -----------------------------------------------------------------------------------------------------


def test_autocast_puts_casts_into_the_program_and_keeps_state_wide():
    work = zoo.small("gpt2")
    batch = work.example(2)
    program = capture(work.model, batch, work.loss, torch.optim.AdamW(work.model.parameters()), precision=torch.bfloat16).program
    products = [n for n in program.nodes if n.op.name in ("einsum", "attention")]
    assert products
    assert all(n.args[0].dtype == torch.bfloat16 for n in products)
    assert all(n.args[0].dtype == torch.float32 for n in program.find_all("layer_norm"))
    assert all(n.dtype == torch.float32 for name, n in program.input_names.items() if name.startswith(("param.", "exp_avg")))
    assert all(a.dtype == torch.float32 for n in program.find_all("adam") for a in n.args[:4])


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "vit", "resnext50", "mixtral-8x7b", "bert-large"])
def test_autocast_is_near_torch_autocast(name):
    work = zoo.small(name)
    batch = work.example(4)

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return work.loss(model, batch)

    got = run(capture(work.model, batch, work.loss, precision=torch.bfloat16), batch)["loss"]
    exact = work.loss(copy.deepcopy(work.model), batch).detach()
    theirs = loss(copy.deepcopy(work.model), batch).detach()
    assert abs(got - exact) <= 2 * abs(theirs - exact) + 0.02 * abs(exact)
    inside = run(capture(work.model, batch, loss), batch)["loss"]
    torch.testing.assert_close(inside, got)


def test_autocast_for_any_device_is_followed():
    def loss(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return mse(model, batch)

    program = capture(Net(), BATCH, loss).program
    assert all(n.args[0].dtype == torch.bfloat16 for n in program.find_all("einsum"))


def test_a_model_in_half_precision():
    work = zoo.small("llama3-8b", dtype=torch.bfloat16)
    same_as_torch(work.model, work.loss, work.example(2), tolerance=0.02)
