"""Stages cut from a step, run one after another, are the step; programs cut in turns are the program."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from weft import interp
from weft.core.layout import Layout, Mesh, O, P, S
from weft.core.node import Type
from weft.core.role import Role
from weft.frontend.capture import Captured, capture
from weft.plan.spec import Spec
from weft.plan.split import Forward, balanced, chosen_ends, split
from weft.transform.phases import split_phases
from weft.transform.pipeline import border
from weft.transform.recompute import recomputed, regions_of


def captured(name: str, **settings: Any) -> tuple[Captured, Any]:
    w = zoo.small(name, dtype=torch.float64, **settings)
    return capture(w.model, w.example(4), w.loss, torch.optim.AdamW(w.model.parameters()), clip=1.0), w.example(4)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_heaviest_part_is_as_light_as_can_be(parts: int) -> None:
    weights = [5.0, 1.0, 1.0, 7.0, 2.0, 2.0, 4.0]
    every = itertools.combinations(range(len(weights) - 1), parts - 1)
    assert _heaviest(weights, balanced(weights, parts)) == min(_heaviest(weights, cuts) for cuts in every)


def _heaviest(weights: list[float], cuts: tuple[int, ...]) -> float:
    ends = [0, *(c + 1 for c in cuts), len(weights)]
    return max(sum(weights[a:b]) for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(("name", "stages"), [("gpt2", 4), ("mixtral-8x7b", 4), ("mlp", 3), ("resnext50", 3), ("unet", 3)])
def test_stages_together_are_the_step(name: str, stages: int) -> None:
    cap, batch = captured(name, **({"layers": 4} if name in ("gpt2", "mixtral-8x7b") else {}))
    _are_the_step(cap, batch, stages)


class _Crossed(torch.nn.Module):
    """Nowhere but at its beginning and end does one value pass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.w
        for _ in range(3):
            h = h * (h.sin() + x @ self.w.t())
        return (h * h.cos()).sum()


def test_several_values_pass_where_one_alone_does_not() -> None:
    model, x = _Crossed().double(), torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    cap = capture(model, x, lambda m, b: m(b), torch.optim.AdamW(model.parameters()))
    assert len(Forward(cap).ends) < 5 and max(map(len, chosen_ends(cap, 6))) > 1
    _are_the_step(cap, x, 6)


def _are_the_step(cap: Captured, batch: Any, stages: int) -> None:
    values = cap.inputs(batch)
    made = split(cap, stages, chosen_ends(cap, stages))
    acts: dict[str, Any] = {}
    for s in made:
        acts |= interp.run_global(s.forward, {n: {**values, **acts}[n] for n in s.forward.input_names})
    want = interp.run_global(cap.program, values)
    torch.testing.assert_close(acts["loss"], want["loss"], rtol=1e-12, atol=1e-12)
    grads: dict[str, Any] = {}
    for s in reversed(made):
        out = interp.run_global(s.step, {n: {**values, **acts, **grads}[n] for n in s.step.input_names})
        for n in s.gives("d."):
            grads[n] = grads[n] + out[n] if n in grads and n.startswith("d.param.") else out[n]
    whole = interp.run_global(_gradients(cap), {n: values[n] for n in _gradients(cap).input_names})
    for n in cap.gradients:
        torch.testing.assert_close(grads[f"d.{n}"], whole[f"d.{n}"], rtol=1e-9, atol=1e-11)


def test_a_decoder_that_begins_before_its_encoder_is_cut_behind_it() -> None:
    """The decoder's own attention reads nothing of the encoder: its blocks begin first, and end last."""
    torch.manual_seed(0)
    model = torch.nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True).double()
    batch = {k: torch.randn(4, n, 8, dtype=torch.float64) for k, n in (("src", 5), ("tgt", 6))}
    cap = capture(model, batch, lambda m, b: m(b["src"], b["tgt"]).square().mean(), torch.optim.SGD(model.parameters()))
    values, acts = cap.inputs(batch), dict[str, Any]()
    for s in split(cap, 4, chosen_ends(cap, 4)):
        acts |= interp.run_global(s.forward, {n: {**values, **acts}[n] for n in s.forward.input_names})
    torch.testing.assert_close(acts["loss"], model(batch["src"], batch["tgt"]).square().mean().detach(), rtol=1e-12, atol=1e-12)


def _gradients(cap: Captured) -> Any:
    from weft.plan.split import program_of

    return program_of("gradients", {f"d.{n}": g for n, g in cap.gradients.items()}, cap.program, {})


def test_a_stage_reads_no_parameter_of_another_and_the_work_is_even() -> None:
    cap, _ = captured("llama3-8b", layers=6)
    chosen = chosen_ends(cap, 3)
    made = split(cap, 3, chosen)
    read = [{n for n in s.forward.input_names if n.startswith("param.blocks.")} for s in made]
    assert not any(a & b for a, b in itertools.combinations(read, 2))
    weights = Forward(cap).weights()
    assert _heaviest(weights, tuple(Forward(cap).ends.index(cut) for cut in chosen)) < sum(weights) / 2


def test_turns_run_one_after_another() -> None:
    cap, batch = captured("gpt2")
    (stage,) = split(cap, 1, ())
    groups = [["loss"], stage.gives("d.param.")[:5], stage.gives("d.param.")[5:]]
    turns = split_phases(stage.step, groups, [Role.PARAMETER])
    values, out = cap.inputs(batch), dict[str, Any]()
    for p in turns:
        out |= interp.run_global(p, {n: {**values, **out}[n] for n in p.input_names})
    want = interp.run_global(stage.step, {n: values[n] for n in stage.step.input_names})
    for n in want:
        torch.testing.assert_close(out[n], want[n], rtol=0, atol=0)
    kept = [n for n in turns[1].input_names if n.startswith("kept.")]
    assert kept and not any(n.startswith("kept.") for n in turns[0].input_names)


def test_recomputation_changes_no_value_and_keeps_no_inner_one() -> None:
    cap, batch = captured("gpt2", layers=3, dropout=0.2)
    again = recomputed(cap, regions_of(cap, "full"))
    values = cap.inputs(batch, seed=5)
    want, got = (interp.run_global(c.program, values) for c in (cap, again))
    for n in want:
        torch.testing.assert_close(got[n], want[n], rtol=0, atol=0)
    forward = Forward(again)
    inner = {n for group in cap.blocks for b in group for n in b.nodes} - {b.outputs[0] for group in cap.blocks for b in group}
    ahead = set(forward.order)
    late = {u for n in inner for u in again.program.users.get(n, ())} - ahead
    assert not late


def test_a_border_is_cut_for_the_way() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    layout = Layout.of(mesh, (4, 16, 32), {"pp": O(0), "dp": S(0), "tp": P()})
    b = border(Type(torch.float32, layout), {"pp": O(0)})
    assert b.home == Layout.of(mesh, (4, 16, 32), {"pp": O(0), "dp": S(0)})
    assert b.way == Layout.of(mesh, (4, 16, 32), {"pp": O(0), "dp": S(0), "tp": S(1)})


def test_plans_print_as_they_are_read() -> None:
    for text in ("dp2,tp2,zero1", "pp4,zero-bubble,micro8", "pp2,interleaved,virtual4,recompute", "micro4", "pp2,dp2,sp"):
        assert str(Spec.parse(str(Spec.parse(text)))) == str(Spec.parse(text))
    assert Spec.parse("pp2,micro=8") == Spec.parse("pp2,micro8,1f1b")
    assert list(Spec.parse("tp2,pp2,dp2").mesh.axes) == ["pp", "dp", "tp"]
