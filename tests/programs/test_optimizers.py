"""The optimizers against torch.optim, and every schedule of every program against its unscheduled meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft import interp
from weft.core.layout import Mesh
from weft.core.program import Program
from weft.core.text import parse
from weft.programs.catalog import EXAMPLES, line_counts
from weft.programs.optimizers import UPDATES, Hyper, optimizer
from weft.rewrite.engine import same_erased
from weft.schedule import recipes

SHAPES = [(10, 3), (7,), (2, 5)]
RANKS = 4


def random_inputs(p: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, n in p.input_names.items():
        draw = torch.randn(n.shape, generator=gen, dtype=torch.float32)
        out[name] = draw.to(n.dtype) if n.shape else torch.tensor(3.0 if name in ("t", "scale") else 0.01, dtype=torch.float32).to(n.dtype)
        if name.startswith("v."):
            out[name] = out[name].abs()
    return out


def run_steps(
    p: Program, grads: list[list[torch.Tensor]], params: list[torch.Tensor], lr: float, **extra: torch.Tensor
) -> list[torch.Tensor]:
    """Several steps through every rank, state carried over."""
    values = {n: torch.zeros(node.shape, dtype=node.dtype) for n, node in p.input_names.items()}
    values |= {f"x.{i}": w.clone() for i, w in enumerate(params)} | {"t": torch.tensor(1.0), "lr": torch.tensor(lr), **extra}
    for step in grads:
        values |= {f"g.{i}": g for i, g in enumerate(step)}
        out = interp.run(p, values, tolerance=1e-6)
        values |= {inp: out[o] for o, inp in p.state}
    return [values[f"x.{i}"] for i in range(len(params))]


def reference(make: Any, grads: list[list[torch.Tensor]], params: list[torch.Tensor], clip: float | None = None) -> list[torch.Tensor]:
    leaves = [torch.nn.Parameter(w.clone()) for w in params]
    opt = make(leaves)
    for step in grads:
        for leaf, g in zip(leaves, step, strict=True):
            leaf.grad = g / RANKS
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        opt.step()
    return [leaf.detach() for leaf in leaves]


def case(seed: int = 0) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    gen = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=gen) for s in SHAPES] for _ in range(4)], [torch.randn(s, generator=gen) for s in SHAPES]


TORCH = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, weight_decay=0.05),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.05),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_equals_torch_over_several_steps(name: str, clip: float | None) -> None:
    grads, params = case()
    p = optimizer(name, Mesh(dp=RANKS), SHAPES, hyper=Hyper(weight_decay=0.05, clip=clip))
    want = reference(TORCH[name], grads, params, clip)
    for schedule in (lambda q: q, recipes.zero1, recipes.zero3, lambda q: recipes.one_kernel(recipes.zero1(q))):
        for a, b in zip(run_steps(schedule(p), grads, params, 0.1), want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_lamb_scales_each_tensor_by_its_trust_ratio() -> None:
    (grads, params), h = case(), Hyper(weight_decay=0.05)
    p = optimizer("lamb", Mesh(dp=RANKS), SHAPES, hyper=h)
    got = run_steps(recipes.zero1(p), grads[:1], params, 0.1)
    for g, w, after in zip(grads[0], params, got, strict=True):
        g = g / RANKS
        u = g / (g.abs() + 1e-8) + 0.05 * w  # at the first step the corrected moments are g and g squared
        torch.testing.assert_close(after, w - 0.1 * (w.norm() / u.norm()) * u, rtol=1e-4, atol=1e-5)


def test_lamb_of_zeros_is_a_plain_step() -> None:
    p = optimizer("lamb", Mesh(dp=RANKS), [(6,)])
    (after,) = run_steps(p, [[torch.ones(6) * RANKS]], [torch.zeros(6)], 0.1)
    torch.testing.assert_close(after, torch.full((6,), -0.1), rtol=1e-5, atol=1e-6)


def test_an_overflow_changes_nothing_and_does_not_count_as_a_step() -> None:
    p = recipes.zero1(optimizer("adamw", Mesh(dp=RANKS), SHAPES, hyper=Hyper(scaled=True)))
    values = random_inputs(p) | {"g.1": torch.tensor([1.0, torch.inf, 1, 1, 1, 1, 1])}
    spread = {n: interp.distribute(values[n], node.type, 1) for n, node in p.input_names.items() if n != "g.1"}
    spread["g.1"] = [torch.where(torch.arange(7) == 1, torch.inf, 1.0) for _ in range(RANKS)]
    out = interp.run_ranks(p, spread)
    for o, i in p.state:
        got = interp.denote(out[o], p.output_names[o].type)
        torch.testing.assert_close(got, values[i])


def test_gradient_scaling_is_undone_exactly() -> None:
    grads, params = case()
    scaled = [[g * 64 for g in step] for step in grads]
    plain = optimizer("adamw", Mesh(dp=RANKS), SHAPES)
    p = optimizer("adamw", Mesh(dp=RANKS), SHAPES, hyper=Hyper(scaled=True))
    want = run_steps(plain, grads, params, 0.1)
    for a, b in zip(run_steps(p, scaled, params, 0.1, scale=torch.tensor(64.0)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_low_precision_parameters_have_an_f32_master() -> None:
    p = recipes.zero1(optimizer("adamw", Mesh(dp=2), [(6, 4)], grads="bf16", params="bf16"))
    assert str(p.output_names["low.0"].type) == "bf16[6, 4] dp:R"
    assert str(p.input_names["m.0"].type) == "f32[6, 4] dp:S(0)"
    values = random_inputs(p)
    out = interp.run(p, values, tolerance=1e-2)
    torch.testing.assert_close(out["low.0"].float(), out["x.0"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_schedule_means_the_same(name: str) -> None:
    ex = EXAMPLES[name]
    p = ex.make()
    values = random_inputs(p)
    want = interp.run_global(p, values)
    for schedule, fn in ex.schedules.items():
        q = fn(p)
        got = interp.run(q, values, tolerance=1e-4)
        for out in want:
            torch.testing.assert_close(got[out], want[out], rtol=1e-4, atol=1e-4, msg=lambda m, s=schedule, o=out: f"{s}, {o}: {m}")
        assert same_erased(p, q), schedule
        assert parse(q.text).text == q.text


def test_the_table_of_line_counts_is_short_programs_and_shorter_schedules() -> None:
    rows = line_counts()
    assert {r[0] for r in rows} == set(EXAMPLES)
    assert all(1 <= lines <= 25 and 1 <= sched <= 60 for _, lines, _, sched, _ in rows)
    counts = {name: lines for name, lines, *_ in rows}
    assert counts["adamw"] > counts["adam"]  # what it calls is counted too


def test_updates_are_about_ten_lines() -> None:
    from weft.programs.catalog import line_count

    assert {name: line_count(fn) for name, fn in UPDATES.items()}["adam"] <= 10
