"""Models with a gradient of their own: functions are nodes; for those that write in place, and old hooks, autograd runs under the trace."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.capture.checks import ops, same_as_torch
from tests.ranks import run_ranks
from weft import parallelize
from weft.core.errors import CaptureError
from weft.frontend.capture import capture


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -2 * g


class Rounded(torch.autograd.Function):
    """Straight through: rounds forward, passes gradients backward."""

    @staticmethod
    def forward(ctx, x):
        return torch.floor(x * 4) / 4

    @staticmethod
    def backward(ctx, g):
        return g


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit), x.abs()

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= ctx.limit) * 0.5 + h * x.sign(), None


class Net(nn.Module):
    """Whole ops, ATen ops, views, lookups, convolution and batch norm on both sides of its own gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.table, self.conv, self.bn = nn.Embedding(5, 8), nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)

    def forward(self, x, ids):
        h = Reversed.apply(self.norm(F.gelu(self.first(x)) + self.table(ids)))
        h = Rounded.apply(self.last(h) * 3)
        h, size = Clipped.apply(h, 1.5)
        q = h.view(2, 1, 4, 8)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(8, 8) + size[:, :1]
        image = self.bn(self.conv(h.view(1, 1, 8, 8)))
        return F.cross_entropy(h, ids) + F.silu(image).mean() + torch.softmax(h, -1)[1:, ::2].square().sum() + torch.tanh(h).mean()


def loss(model, batch):
    return model(*batch)


BATCH = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


def test_own_gradients_are_respected():
    captured = same_as_torch(Net(), loss, BATCH)
    found = ops(captured)
    assert found["attention"] == found["attention_backward"] == 1
    assert found["layer_norm_backward"] == 1
    assert captured.opaque == {}


def joint(model: nn.Module) -> nn.Module:
    """With a hook for which torch's autograd must run under the trace."""
    model.register_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("changed", [lambda m: m, joint])
def test_in_double_it_is_exact(changed):
    captured = same_as_torch(changed(Net().double()), loss, (BATCH[0].double(), BATCH[1]), tolerance=1e-12)
    assert captured.joint == (changed is joint)


def test_a_whole_step_with_accumulation():
    model = Net()
    model.bn.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture(model, (torch.cat([BATCH[0]] * 2), torch.cat([BATCH[1]] * 2)), loss, optimizer, accumulate=2, allow_micro_mean=True, clip=1.0)
    assert "grad_norm" in captured.program.output_names
    assert "param.first.weight" in captured.program.output_names


def test_blocks_are_not_reused_under_autograd():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList([Net(), Net()])

        def forward(self, x, ids):
            return sum(net(x, ids) for net in self.nets)

    assert same_as_torch(Two(), loss, BATCH).blocks
    assert same_as_torch(joint(Two()), loss, BATCH).blocks == ()


class Scaled(torch.autograd.Function):
    """Two operands, a number, a context set up apart, and gradients that are none of what it computes."""

    @staticmethod
    def forward(x, w, k):
        return x * w * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, ctx.k = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return -g * w * ctx.k, 3 * (g * x * ctx.k).sum(0), None


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.scale = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        for layer in self.layers:
            x = x + Scaled.apply(Rounded.apply(Reversed.apply(layer(x))), self.scale, 0.5) + Rounded.apply(x.detach())
        return x


def squares(model, x):
    return model(x).square().mean()


def test_a_function_with_one_result_is_cut_into_stages_and_micro_batches(tmp_path: Path):
    model, x = Deep().double(), torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    captured = capture(model, x, squares, torch.optim.SGD(model.parameters(), lr=0.01))
    assert not captured.joint and len(captured.gradients) == 9 and "own_gradient" in ops(captured)
    optimizer, want = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        want.append(squares(model, x))
        want[-1].backward()
        optimizer.step()
    want = [v.item() for v in want]

    def job(rank):
        for plan in ("pp2", "pp2,micro2", "dp2,zero3", "tp2"):
            model = Deep().double()
            step = parallelize(model, squares, torch.optim.SGD(model.parameters(), lr=0.01), x, plan)
            torch.testing.assert_close([step(x).item() for _ in range(3)], want, rtol=1e-12, atol=0)

    run_ranks(2, job, tmp_path)


class Reversible(torch.autograd.Function):
    """As reversible networks do: computes its layers again in the backward pass, and runs a backward pass of them there."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        return layer(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x.requires_grad = True
            ctx.layer(x).backward(g)
        return g + x.grad, None


class Recomputed(Reversible):
    """The same, with the gradients asked for."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(ctx.layer(x), x, g)
        return gradient, None


class Wants(torch.autograd.Function):
    """Reads what is not there: in torch, too, its backward raises."""

    @staticmethod
    def forward(ctx, x, layer):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g + g.grad, None


class Asks(torch.autograd.Function):
    """Asks its context for what only autograd's own has."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.raw = not ctx.name().startswith("Asks")
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        assert not ctx.raw and ctx._raw_saved_tensors
        (x,) = ctx.saved_tensors
        return 3 * g * x.cos(), None


class Around(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x):
        return self.function.apply(self.first(x), self.layer)


@pytest.mark.parametrize("changed", [lambda m: m, joint])
def test_a_backward_pass_inside_another_gives_all_gradients(changed):
    assert same_as_torch(changed(Around(Reversible).double()), squares, BATCH[0].double(), tolerance=1e-12).joint


@pytest.mark.parametrize("changed", [lambda m: m, joint])
def test_a_function_whose_backward_raises_is_named(changed):
    with pytest.raises(CaptureError) as error:
        capture(changed(Around(Wants)), BATCH[0], squares, gradients=True)
    words = "Wants.backward, which the backward pass calls", "TypeError: unsupported operand", "return g + g.grad, None", "test_joint.py, line"
    assert [w for w in (*words, "needed  torch ops", "try     torch.autograd.grad") if w not in str(error.value)] == []


@pytest.mark.parametrize("changed", [lambda m: m, joint])
@pytest.mark.parametrize("function", [Reversible, Recomputed])
def test_random_numbers_of_a_forward_pass_that_is_computed_again_are_refused(function, changed):
    model = Around(function)
    model.layer = nn.Sequential(model.layer, nn.Dropout(0.5))
    with pytest.raises(CaptureError) as error:
        capture(changed(model), BATCH[0], squares, gradients=True)
    words = "random numbers are drawn again", "test_joint.py, line", "needed  the same numbers", "found   a draw where", "try     a dropout of 0"
    assert [w for w in words if w not in str(error.value)] == []


def test_a_function_that_asks_for_autograds_own_context_runs_under_autograd():
    model = Around(Asks).double()
    model.layer.requires_grad_(False)
    assert same_as_torch(model, squares, BATCH[0].double(), tolerance=1e-12).joint
