"""Hooks of the forward and of the backward pass, of modules, activations and parameters: run as torch runs them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft import parallelize
from weft.core.errors import CaptureError, PlanError, RuntimeFault


class Net(nn.Module):
    """Two layers alike, and an activation that may be hooked."""

    hook: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        if self.hook is not None:
            x.register_hook(self.hook)
        return self.head(x)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def halved(grad: Tensor) -> Tensor:
    return grad * 0.5


def clamped(p: Tensor) -> None:
    p.grad.clamp_(-0.01, 0.01)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "full backward": lambda m: m.layers[1].register_full_backward_hook(lambda _m, into, _out: (into[0] * 0.3,)),
    "full backward of a leaf": lambda m: m.layers[1][1].register_full_backward_hook(lambda _m, into, _out: (into[0].sign() * 0.1,)),
    "backward pre": lambda m: m.head.register_full_backward_pre_hook(lambda _m, out: (out[0] * 2,)),
    "of a parameter": lambda m: m.layers[0][0].weight.register_hook(halved),
    "two of a parameter": lambda m: [m.head.weight.register_hook(h) for h in (halved, torch.tanh)],
    "after accumulation": lambda m: [p.register_post_accumulate_grad_hook(clamped) for p in m.parameters()],
    "of an activation": lambda m: setattr(m, "hook", halved),
    "forward": lambda m: m.layers[0].register_forward_hook(lambda _m, _a, out: out * 2),
    "forward pre": lambda m: m.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] + 1,)),
}


def same(put: Callable[[nn.Module], Any], later: bool = False, plan: str = "auto", loss_of: Any = loss) -> None:
    torch.manual_seed(0)
    models = [Net().double()]
    models.append(copy.deepcopy(models[0]))
    for m in models:
        put(m) if not later else None
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in models)
    many = [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    step = parallelize(models[0], loss_of, ours, many[0], plan)
    for i, x in enumerate(many):
        if later and i == 1:
            [put(m) for m in models]
        theirs.zero_grad()
        want = loss_of(models[1], x)
        want.backward()
        theirs.step()
        torch.testing.assert_close(step(x), want.detach(), atol=1e-11, rtol=1e-11)
    for n, p in ((n, p) for n, p in models[1].named_parameters() if p.grad is not None):
        torch.testing.assert_close(step.full(f"param.{n}"), p.detach(), atol=1e-11, rtol=1e-11, msg=n)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks(kind):
    same(KINDS[kind])


@pytest.mark.parametrize("kind", ["full backward", "of a parameter", "after accumulation", "forward"])
def test_hooks_that_come_later(kind):
    same(KINDS[kind], later=True)


def test_a_hook_that_asks_for_numbers():
    """Its answers are those of the state and the batch at hand."""
    same(lambda m: m.head.weight.register_hook(lambda g: g * (0.5 if float(g.norm()) > 1 else 1.0)))


def test_a_hook_that_steps_an_optimizer_is_refused():
    model = Net().double()
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: each[p].step())
    with pytest.raises(CaptureError, match=r"accumulated cannot be traced[\s\S]*in the training loop"):
        parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 4).double())


@pytest.mark.parametrize("kind", ["full backward", "backward pre", "two of a parameter", "after accumulation", "of an activation"])
def test_hooks_with_micro_batches(kind):
    same(KINDS[kind], plan="micro2")


@pytest.mark.parametrize("kind", ["of results", "of the old kind"])
def test_hooks_that_need_autograd_are_refused_with_micro_batches(kind):
    model = Net().double()
    if kind == "of results":
        model.head.register_full_backward_hook(lambda _m, into, out: (into[0] * out[0].sum(),))
    else:
        model.head.register_backward_hook(lambda _m, into, out: None)
    with pytest.raises(PlanError, match="gradients that follow from the forward pass"):
        parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 4).double(), "micro2")


def test_a_hook_that_needs_all_samples_is_refused_with_micro_batches():
    model = Net().double()
    model.hook = lambda g: g / g.norm()
    with pytest.raises(PlanError, match="micro-batch"):
        parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 4).double(), "micro2")


def test_one_value_hooked_by_several_readers():
    def put(m: nn.Module) -> None:
        for layer in m.layers:
            layer[0].register_full_backward_hook(lambda _m, into, _out: (into[0].sign() * 0.01,))

    def both(model: nn.Module, x: Tensor) -> Tensor:
        x = model.layers[0][1](model.head.weight.sum() + x)
        return (model.layers[0][0](x) * model.layers[1][0](x).tanh()).square().mean()

    same(put, loss_of=both)


def test_a_value_that_is_read_before_it_is_hooked():
    def early(model: nn.Module, x: Tensor) -> Tensor:
        h = model.layers[0](x)
        first = h * 2
        h.register_hook(torch.tanh)
        return model.head(h + first).square().mean()

    same(lambda m: None, loss_of=early)


def graph_hooked(kind: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss that reaches for torch's graph."""

    def hooked(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if kind == "node":
            y.grad_fn.register_hook(lambda into, out: None)
        elif kind == "several":
            torch.autograd.graph.register_multi_grad_hook((y,), lambda grads: None)
        else:
            assert y.grad_fn is not None and x.grad_fn is None  # may be asked
        return y.square().mean()

    return hooked


@pytest.mark.parametrize(("kind", "words"), [("node", "grad_fn.register_hook"), ("several", "register_multi_grad_hook")])
def test_hooks_of_torchs_graph_are_refused(kind: str, words: str) -> None:
    model = Net().double()
    with pytest.raises(CaptureError, match="torch's graph of gradients is not there in a trace") as e:
        parallelize(model, graph_hooked(kind), torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 4, dtype=torch.float64))
    assert words in str(e.value) and "tensor.register_hook(f)" in str(e.value)


def test_whether_there_is_a_gradient_may_be_asked() -> None:
    model = Net().double()
    step = parallelize(model, graph_hooked("asked"), torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 4, dtype=torch.float64))
    assert step.verified is not None and step.verified.compared


def test_a_hook_of_several_parameters_is_refused_until_it_is_removed() -> None:
    model = Net().double()
    handle = torch.autograd.graph.register_multi_grad_hook(tuple(model.head.parameters()), lambda grads: None)
    given = model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"another object holds the node that accumulates the gradient of head\.(weight|bias)"):
        parallelize(*given)
    handle.remove()
    del handle
    gc.collect()
    kept = loss(model, given[3])  # a graph that is alive holds such nodes too, and hooks nothing
    parallelize(*given)
    assert kept.requires_grad


class Bounded(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Swaps(Net):
    """Puts another module in place of one as it runs, as BigBird does when sequences are too short for its sparse attention."""

    kind, nested = "first", False

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "first":
            self.kind, layer = "second", self.layers[1]
            self.layers[1] = Bounded(layer) if self.nested else Bounded(*layer)
        return super().forward(x)


def test_a_model_that_puts_another_module_in_place_as_it_runs():
    same(lambda m: setattr(m, "__class__", Swaps))


def test_parameters_that_come_under_other_names_are_refused():
    model, x = Swaps().double(), torch.randn(6, 4).double()
    model.nested = True
    words = r"holds a parameter in another place[\s\S]*layers\.1\.0\.weight[\s\S]*layers\.1\.0\.0\.weight[\s\S]*once, then parallelize"
    step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), x)
    step(x)
    with pytest.raises(RuntimeFault, match=words):
        step(x)
    model = Swaps().double()
    model.nested = True
    model(x)
    parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), x)(x)
