"""A step that cannot be run whole is compared with torch block by block: each distinct one once, and what stands around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import weft_zoo as zoo
from tests.testing.plant import Facet, plant
from weft.api import check_cost
from weft.api.check_step import Case, Verdict, check_against_torch
from weft.api.eager import How
from weft.api.module_blocks import ModuleBlocks
from weft.api.parallelize import parallelize
from weft.core.errors import CaptureError
from weft.core.node import make, op_named, remade
from weft.core.program import Program
from weft.frontend.capture import Captured, capture
from weft.ops import attention

CPU = torch.device("cpu")


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step fits in no memory; a block does."""
    plain = check_cost.fits

    def fits(program: Program, device: torch.device, count: int = 1) -> bool:
        return program.name.startswith(("block.", "around")) and program.name != "block." and plain(program, device, count)

    monkeypatch.setattr(check_cost, "fits", fits)


class Layer(nn.Module):
    """Runs on real values are counted, and `fault` is what only the trace does."""

    runs = 0

    def __init__(self, number: int, fault: Callable[[int, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.number, self.fault = number, fault
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        if not isinstance(x, FakeTensor):
            Layer.runs += 1
        elif self.fault is not None:
            y = self.fault(self.number, y)
        return x + y


class Deep(nn.Module):
    def __init__(self, depth: int = 4, fault: Any = None) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(3, 6), nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList(Layer(i, fault) for i in range(depth))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def judged(model: nn.Module | None = None, change: Callable[[Captured], Captured] = lambda c: c, loss: Any = squares, **how: Any) -> Verdict:
    torch.manual_seed(0)
    model = (Deep() if model is None else model).double()
    example, optimizer = torch.randn(8, 3, dtype=torch.float64), torch.optim.AdamW(model.parameters())
    captured = change(capture(model, example, loss, optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check_against_torch(captured, Case(model, loss, optimizer, How(**how), CPU), example)


# -- what is equal ---------------------------------------------------------------------------------------------------------------------


def test_each_distinct_block_is_run_once(too_large: None) -> None:
    Layer.runs = 0
    verdict = judged()
    assert Layer.runs == 1 and verdict.compared > 25 and verdict.worst < 1e-12
    assert "3 of 6 modules, which the others repeat, on the example" in str(verdict)
    assert "module by module because the full step would take" in str(verdict) and "not compared" not in str(verdict)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_without_values_are_given_some_block_by_block(dtype: torch.dtype) -> None:
    w = zoo.small("gpt2", dtype=dtype, dropout=0.1)
    model = w.model.to("meta")
    with pytest.warns(UserWarning, match="GPT was compared with torch in parts: .* tensors equal torch's on .* because its parameters are on the meta device"):
        step = parallelize(model, w.loss, torch.optim.AdamW(model.parameters()), w.example(8))
    assert step.verified is not None and step.verified.compared > 20 and all(p.is_meta and p.grad is None for p in model.parameters())


def test_no_rank_holds_more_than_its_share_of_a_model_without_values() -> None:
    """The largest block that fits the machine would be all of the model but its ends."""
    w = zoo.small("gpt2", layers=6)
    model = w.model.to("meta")
    captured = capture(model, w.example(8), w.loss, optimizer := torch.optim.SGD(model.parameters()))
    cut = ModuleBlocks(captured, Case(model, w.loss, optimizer, How(), CPU))
    assert len(cut.blocks) > 6
    for block in cut.blocks:
        assert not block.call.inside or not check_cost.exceeds_share(cut.programs[block.key], captured)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "vit-l16"])
def test_models_of_the_zoo_by_blocks(name: str, too_large: None) -> None:
    w = zoo.small(name, dtype=torch.float64)
    with pytest.warns(UserWarning, match="which the others repeat"):
        step = parallelize(w.model, w.loss, torch.optim.SGD(w.model.parameters(), 0.1, 0.9), w.example(8))
    assert step.verified is not None and step.verified.compared > 20 and step.verified.worst < 1e-9 and len(step.verified.left) == 1


def test_fewer_samples_where_blocks_take_too_long(too_large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(program: Program, _: Any) -> float:
        return 4.0 * max((n.shape[0] for n in program.inputs if str(n.attr("name")).startswith(("x.", "batch.")) and n.shape[1:] == (3,)), default=0)

    monkeypatch.setattr(check_cost, "seconds", seconds)
    assert "2 of the example's 8 samples" in str(judged())


def test_what_cannot_be_run_by_itself_is_told(too_large: None) -> None:
    class Reads(Deep):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + self.layers[0].seen.sum()

    class Keeps(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.tanh(self.up(x))
            return super().forward(x)

    model = Reads()
    model.layers[0] = Keeps(0)
    verdict = judged(model)
    assert verdict.compared > 20 and "what stands around the blocks was not compared" in str(verdict)


def test_hooks_of_the_backward_pass_are_told(too_large: None) -> None:
    model = Deep()
    model.layers[1].register_full_backward_hook(lambda m, a, b: (b[0] * 1.0,))
    assert "the backward pass, of which Python is a part, was not compared" in str(judged(model))


def test_nothing_of_it_is_noticed(too_large: None) -> None:
    model = Deep()
    tensors = dict(model.named_parameters())
    before = {k: v.clone() for k, v in model.double().state_dict().items()}
    judged(model)
    assert all(p.grad is None for p in model.parameters()) and dict(model.named_parameters()) == tensors
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# -- what is not -----------------------------------------------------------------------------------------------------------------------


def test_a_lost_causal_mask_is_found_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *xs, **how: plain(*xs, **{**how, "causal": False}))
    w = zoo.small("gpt2")
    model = w.model.to("meta")
    with pytest.raises(CaptureError, match="the captured step of GPT does not compute what torch does"):
        parallelize(model, w.loss, torch.optim.AdamW(model.parameters()), w.example(8))


def test_one_layer_that_differs_is_named(too_large: None) -> None:
    with pytest.raises(CaptureError, match=r"layers\.2 \(Layer\), run by itself, differs by .* of its largest value"):
        judged(Deep(fault=lambda number, y: y * 1.001 if number == 2 else y))


def test_a_wrong_gradient_in_a_block_is_refused(too_large: None) -> None:
    with plant(Facet("tanh", "vjp", lambda n, ct: (ct,))), pytest.raises(CaptureError, match=r"the gradient of .* of layers\.0 \(Layer\), run by itself"):
        judged()


@pytest.mark.parametrize("which", [0, 3])
def test_a_program_altered_in_one_block_is_refused(which: int, too_large: None) -> None:
    def alter(captured: Captured) -> Captured:
        p = captured.program
        node = [n for n in p.nodes if n.op.name == "tanh"][which]
        roots = [*(n for _, n in p.outputs), *captured.gradients.values()]
        made = remade(roots, {node: make(op_named("sigmoid"), node.args, {})})
        program = p.with_outputs([(k, made[n]) for k, n in p.outputs], "fault")
        return replace(captured, program=program, gradients={k: made[g] for k, g in captured.gradients.items()})

    with pytest.raises(CaptureError, match="does not compute what torch does"):
        judged(change=alter)


def test_a_gradient_altered_alone_is_refused(too_large: None) -> None:
    def alter(captured: Captured) -> Captured:
        grads = dict(captured.gradients)
        grads["param.layers.1.up.weight"] = grads["param.layers.1.up.weight"] * 2
        return replace(captured, gradients=grads)

    with pytest.raises(CaptureError, match=r"the gradient of layers\.1\.up\.weight is another node than weft's rules make"):
        judged(change=alter)


def test_what_stands_around_the_blocks_is_compared(too_large: None) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = squares(model, batch)
        return out * 2 if isinstance(out, FakeTensor) else out

    with pytest.raises(CaptureError, match=r"the loss differs by|the gradient of what last returns differs by"):
        judged(loss=loss)


def test_a_wrong_update_is_refused(too_large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.frontend.capture import optimizers

    monkeypatch.setattr(optimizers, "_TRACED", {})
    monkeypatch.setattr(optimizers, "runs_the_same", lambda *_: True)  # so that the first op that is tried, Adam with decay in the gradient, is taken
    with pytest.raises(CaptureError, match=r"(after the update|exp_avg_sq of .*) differs"):
        judged()


def test_clipping_is_told(too_large: None) -> None:
    assert "clipping was not compared" in str(judged(clip=1.0))
