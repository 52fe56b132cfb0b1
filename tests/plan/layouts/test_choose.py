"""Layouts chosen for whole training steps: known optima, the same meaning, memory, pins and ties."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft_zoo as zoo
from bench._alpha_beta import AlphaBeta
from weft import interp
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.layout import Mesh, R, S
from weft.frontend.capture import Captured, capture
from weft.plan.layouts import Chosen, OnCluster, choose
from weft.plan.layouts.model import parts
from weft.rewrite.engine import same_erased


class Layers(nn.Module):
    """Linear layers of one width, ReLU between."""

    def __init__(self, layers: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=bias, device="meta") for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 0 else layer(torch.relu(x))
        return x


def squared(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


@cache
def step(layers: int, width: int, batch: int, adam: bool = False, bias: bool = False) -> Captured:
    model = Layers(layers, width, bias)
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.1)
    example = tuple(torch.empty(batch, width, device="meta") for _ in range(2))
    return capture(model, example, squared, optimizer)


def alpha_beta(mesh: Mesh, beta: tuple[float, ...] = (1, 1)) -> AlphaBeta:
    return AlphaBeta(mesh, dict.fromkeys(mesh.axes, 1.0), dict(zip(mesh.axes, beta, strict=False)))


SCALARS = 20.0  # the loss is summed too, which published objectives leave out


@pytest.mark.parametrize(
    ("layers", "mesh", "beta", "objective"),
    [
        (2, Mesh(x=4, y=1), (1, 1), 196610.02),
        (2, Mesh(x=1, y=4), (1, 1), 196610.02),
        (12, Mesh(x=4, y=1), (1, 1), 1179660.12),
        (2, Mesh(x=4, y=8), (1, 0.01), 26872.03),
    ],
)
def test_published_optima_of_small_programs(layers: int, mesh: Mesh, beta: tuple[float, float], objective: float) -> None:
    chosen = choose(step(layers, 128, 1024).program, mesh, alpha_beta(mesh, beta), gap=1e-9)
    assert chosen.answer.optimal
    assert objective * 0.99 < chosen.cost < objective + SCALARS


def test_a_norm_without_gain_and_shift_is_laid_out_too() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64, elementwise_affine=False), nn.GroupNorm(4, 64), nn.Linear(64, 64)).to("meta")
    example = tuple(torch.empty(32, 64, device="meta") for _ in range(2))
    captured, mesh = capture(model, example, squared, torch.optim.SGD(model.parameters(), lr=0.1)), Mesh(dp=4)
    assert same_erased(captured.program, choose(captured.program, mesh, alpha_beta(mesh)).program)


def test_wide_layers_and_a_small_batch_are_cut_by_columns_then_rows() -> None:
    mesh = Mesh(x=4)
    chosen = choose(step(6, 256, 32, adam=True, bias=True).program, mesh, alpha_beta(mesh), gap=1e-9)
    assert chosen.cost < 245765.05 + SCALARS
    cuts = [chosen.inputs[f"param.layers.{i}.weight"]["x"] for i in range(6)]
    assert all(isinstance(cut, S) for cut in cuts)
    assert {c.dim for c in cuts[::2]} != {c.dim for c in cuts[1::2]}


def inputs_of(captured: Captured, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, node in captured.program.input_names.items():
        if node.dtype.is_floating_point:
            values[name] = torch.rand(node.shape, generator=generator, dtype=torch.float64).to(node.dtype) * 0.2 + 0.01
        else:
            values[name] = torch.randint(0, 2, node.shape, generator=generator, dtype=node.dtype) + 1
    return values


def assert_means_the_same(captured: Captured, chosen: Chosen) -> None:
    given = inputs_of(captured)
    truth = interp.run_global(captured.program, given)
    found = interp.run(chosen.program, given, tolerance=1e-3)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("mesh", [Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=2, z=2)], ids=str)
def test_the_program_means_what_it_did(mesh: Mesh) -> None:
    captured = step(2, 16, 32, adam=True, bias=True)
    assert_means_the_same(captured, choose(captured.program, mesh, alpha_beta(mesh, (1, 0.5, 0.2)), work=3e8))


@cache
def transformer(layers: int = 2) -> Captured:
    work = zoo.small("llama3-8b", device="meta", layers=layers)
    return capture(work.model, work.example(), work.loss, torch.optim.AdamW(work.model.parameters()))


def test_a_transformer_means_what_it_did() -> None:
    captured, mesh = transformer(), Mesh(dp=2, tp=2)
    chosen = choose(captured.program, mesh, OnCluster(cluster("4xA100"), mesh), blocks=captured.blocks, work=5e8)
    assert_means_the_same(captured, chosen)


def peak(chosen: Chosen) -> float:
    return float(chosen.model.problem.profile(chosen.answer.x).max())


def test_little_memory_cuts_state() -> None:
    """Weights and their two moments take 3 MiB whole, so that half of it forces cuts."""
    mesh, captured = Mesh(x=8), step(4, 256, 1024, adam=True)
    pins = {f"batch.{i}": [{"x": S(0)}] for i in range(2)}
    free = choose(captured.program, mesh, alpha_beta(mesh), memory=1e12, pins=pins, gap=1e-9)
    assert all(free.inputs[f"param.layers.{i}.weight"]["x"] == R for i in range(4))
    tight = choose(captured.program, mesh, alpha_beta(mesh), memory=2.5 * 2**20, pins=pins, gap=1e-9)
    assert peak(tight) <= 2.5 * 2**20 < peak(free)
    assert tight.cost > free.cost
    assert any(isinstance(tight.inputs[f"exp_avg.layers.{i}.weight"]["x"], S) for i in range(4))
    assert_means_the_same(captured, tight)


def test_too_little_memory_is_an_error_with_its_reason() -> None:
    mesh = Mesh(x=2)
    with pytest.raises(PlanError, match=r"no layouts for Layers on Mesh(.|\n)*at most 1000 bytes(.|\n)*the least that can be in use"):
        choose(step(2, 16, 32).program, mesh, alpha_beta(mesh), memory=1000)


def test_pins_are_kept_and_never_cheaper() -> None:
    mesh, captured = Mesh(x=4), step(2, 128, 1024)
    free = choose(captured.program, mesh, alpha_beta(mesh), gap=1e-9)
    pinned = choose(captured.program, mesh, alpha_beta(mesh), pins={"param.layers.0.weight": [{"x": S(1)}]}, gap=1e-9)
    assert pinned.inputs["param.layers.0.weight"] == {"x": S(1)}
    assert pinned.cost >= free.cost


def test_a_pin_on_nothing_is_refused() -> None:
    mesh = Mesh(x=4)
    with pytest.raises(PlanError, match=r"has no input 'param\.nowhere' to pin"):
        choose(step(2, 16, 32).program, mesh, alpha_beta(mesh), pins={"param.nowhere": [{"x": R}]})


def test_a_pin_that_cannot_be_held_is_refused() -> None:
    mesh = Mesh(x=3)
    with pytest.raises(PlanError, match=r"layers\.0\.weight cannot have the layout it is pinned to(.|\n)*even shards of \[16, 16\](.|\n)*x:S\(1\)"):
        choose(step(2, 16, 32).program, mesh, alpha_beta(mesh), pins={"param.layers.0.weight": [{"x": S(1)}]})


def test_parts_repeat_with_the_blocks() -> None:
    sizes = {n: len(set(parts(transformer(n).program, transformer(n).blocks).values())) for n in (6, 8)}
    assert sizes[6] == sizes[8]


def test_alike_blocks_are_laid_out_alike() -> None:
    captured, mesh = transformer(4), Mesh(dp=2, tp=2)
    chosen = choose(captured.program, mesh, OnCluster(cluster("4xA100"), mesh), blocks=captured.blocks, work=5e8)
    for name, places in chosen.inputs.items():
        if name.startswith("param.blocks.0."):
            others = [chosen.inputs[name.replace("blocks.0", f"blocks.{i}")] for i in range(1, 4)]
            assert all(p == places for p in others)


def test_tying_only_forgoes_choices() -> None:
    captured, mesh = transformer(2), Mesh(x=2)
    prices = alpha_beta(mesh)
    free = choose(captured.program, mesh, prices, work=1e9)
    tied = choose(captured.program, mesh, prices, blocks=captured.blocks, work=1e9)
    assert tied.cost >= free.answer.bound - 1e-6


def test_the_same_input_gives_the_same_plan() -> None:
    captured, mesh = transformer(), Mesh(dp=2, tp=2)
    texts = {
        choose(captured.program, mesh, OnCluster(cluster("4xA100"), mesh), blocks=captured.blocks, work=2e8).program.text for _ in range(2)
    }
    assert len(texts) == 1


def test_a_third_axis_never_costs_more_than_joining_two() -> None:
    captured = transformer()
    joined, fine = Mesh(dp=2, tp=4), Mesh(dp=2, sp=2, tp=2)
    two, three = (choose(captured.program, m, OnCluster(cluster("8xA100"), m), blocks=captured.blocks, work=5e8) for m in (joined, fine))
    assert three.cost <= two.cost * 1.02  # the joined axis is one collective where two axes are two
    assert math.isinf(three.gap)  # the search is not complete, so no bound is claimed
    assert_means_the_same(captured, three)


def test_gathers_are_paid_once() -> None:
    """One gather of x serves three products that each need it whole."""
    mesh = Mesh(x=4)

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, 64, bias=False, device="meta") for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.b(x) * self.c(x)

    example = tuple(torch.empty(16, 64, device="meta") for _ in range(2))
    captured = capture(Three(), example, lambda m, b: m(b[0]).sum() + b[1].sum())
    cut = {f"param.{k}.weight": [{"x": S(0)}] for k in "abc"} | {"batch.0": [{"x": S(0)}]}
    chosen = choose(captured.program, mesh, alpha_beta(mesh), pins=cut, gap=1e-9)
    once = 1 + 0.75 * 16 * 64 * 4 + 0.1
    assert math.floor(chosen.cost / once) <= 1
    assert chosen.communication["all_gather"] <= 1
