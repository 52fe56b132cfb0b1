"""Float32 products on tensor cores: as exact as float32, off where they are told to be, and never for other dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.dynamic import tree_lstm
from tests.ranks import ROOT, interpreted
from weft import dynamic
from weft.dynamic.engine import Plan
from weft.runtime import split_matmul

SCRIPT = """
import sys; sys.path.insert(0, {root!r})
import torch
from examples.dynamic import dag_rnn, tree_lstm
from tests.dynamic.graphs import by_hand, graphs
from weft.runtime import split_matmul
from weft.runtime import replay
torch.manual_seed(0)
replay.processors = lambda device: 8  # so that programs share products

def error(found, exact):
    print(float((found.detach().double() - exact.detach()).abs().max() / (1 + exact.detach().abs().max())))

for m, k, n in ((5, 40, 24), (70, 256, 64), (40, 200, 33)):
    a, w, out = torch.randn(m, k), torch.randn(n, k).t(), torch.empty(m, n)
    halves = split_matmul.Halves.of(w)
    assert torch.equal(halves.high + halves.low, w)
    plans = split_matmul._for_rows(m, k, n, a.device)
    assert k < 256 or any(p.shares > 1 for p in plans)
    for plan in plans:
        split_matmul._chosen["rows", split_matmul.size_of(m), k, n, a.device] = plan
        for _ in range(2):  # a shared product leaves its counts as they were
            split_matmul.rows(a, w, halves, out.fill_(7.0))
            error(out, a.double() @ w.double())
for r, m, n in ((300, 40, 24), (700, 130, 70)):
    x, y = torch.randn(r, m), torch.randn(r, n)
    error(split_matmul.over_rows(x, y), x.double().t() @ y.double())
split_matmul._chosen.clear()

made = [(tree_lstm.ChildSum, tree_lstm.model, "leaves", ("binary", "single")), (dag_rnn.DagRNN, lambda c, _: dag_rnn.model(c), "all", ("dag", "tree"))]
for kind, model_of, words, shapes in made:
    cell, exact = kind(3, 5), kind(3, 5).double()
    model = model_of(cell, 5)
    model.target, model.replay, model.split_matmuls = "triton", True, True
    for seed in (1, 2):
        exact.load_state_dict({{k: v.double() for k, v in cell.state_dict().items()}})
        s = graphs(seed, 4, shapes, words, largest=5)
        x = torch.randn(s.vertices, 3, requires_grad=True)
        xd = x.detach().double().requires_grad_()
        ours = model(s, x, at="all")
        theirs = torch.stack([h if isinstance(h, torch.Tensor) else h[0] for h in by_hand(s, xd, exact.alone)])
        error(ours, theirs)
        mine = torch.autograd.grad(ours.sum(), [x, *cell.parameters()])
        for a, b in zip(mine, torch.autograd.grad(theirs.sum(), [xd, *exact.parameters()])):
            error(a, b)
        with torch.no_grad():
            [p.mul_(0.9) for p in cell.parameters()]  # what was recorded splits the weights as they are
"""


def test_products_and_models_agree_with_float64_as_float32_does() -> None:
    """In Triton's interpreter, which multiplies the same parts."""
    printed = interpreted(SCRIPT.format(root=str(ROOT)))
    errors = [float(line) for line in printed.split()]
    assert len(errors) > 30 and max(errors) < 2e-6, max(errors)


def plan_of(**options: Any) -> Plan:
    """A Tree-LSTM compiled for Triton, without running it."""
    cell = tree_lstm.ChildSum(64, 64)
    model = dynamic.Model(cell, {"h": 64, "c": 64}, target="triton", **options)
    s, x = dynamic.trees([((0, 1), 2)]), torch.randn(3, 64)
    variant = model._variant({"x": x}, s)
    return model._plan(variant, dynamic.Schedule(s, variant.reads), {"x": x})


def test_they_stay_off_where_nobody_asks_for_them_and_for_other_dtypes() -> None:
    assert not plan_of().in_parts, "nothing to run them on here"
    assert not plan_of(split_matmuls=False).in_parts and plan_of(split_matmuls=True).in_parts
    assert not split_matmul.fits(torch.zeros(2, 2).double()) and not split_matmul.fits(torch.zeros(0, 2)) and split_matmul.fits(torch.zeros(2, 2))
    assert not split_matmul.fits(torch.zeros(2, 3).t())


def test_a_model_told_not_to_keeps_to_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_matmul, "rows", lambda *_: pytest.fail("ran in parts"))
    cell = tree_lstm.ChildSum(8, 8)
    out = dynamic.Model(cell, {"h": 8, "c": 8}, split_matmuls=False)(dynamic.trees([((0, 1), 2)]), torch.randn(3, 8))
    out.sum().backward()
    assert cell.below.weight.grad is not None


def test_the_fastest_plan_is_kept_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_matmul.replay, "is_accelerator", lambda device: True)
    monkeypatch.setattr(split_matmul.replay, "is_recording", lambda device: False)
    monkeypatch.setattr(split_matmul.replay, "time_recorded", lambda work, device: work())
    known: dict[tuple[object, ...], object] = {}
    times = {"slow": 3.0, "fast": 1.0, "torch": 2.0}
    assert split_matmul.best(known, ("a", "cpu"), lambda: ["slow", "fast"], times.__getitem__, lambda: times["torch"]) == "fast"
    assert split_matmul.best(known, ("a", "cpu"), lambda: pytest.fail("asked again"), times.__getitem__, lambda: 0.0) == "fast"
    assert split_matmul.best(known, ("b", "cpu"), lambda: ["slow"], times.__getitem__, lambda: times["torch"]) is None
    assert split_matmul.best(known, ("c", "cpu"), lambda: ["fast"], times.__getitem__, lambda: 1.01) is None, "torch wins a tie"
    assert split_matmul.best(known, ("d", "cpu"), lambda: ["missing"], times.__getitem__, lambda: 1.0) is None, "a kernel that does not run"


def ptx(function: Any, constants: dict[str, Any], types: dict[str, str], warps: int) -> str:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    every = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]] for n in names if every[n] == "*fp32" or n in ("N", "K", "a_row", "x_row", "y_row")
    }
    source = ASTSource(function, every, {(names.index(k),): c for k, c in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


@pytest.mark.parametrize(("name", "tile", "options"), [
    ("w_rows", split_matmul.ROWS[1][2], {"EVEN": True, "SHARED": True}), ("w_over_rows", split_matmul.OVER_ROWS[0], {"PRECISION": "bf16x6"}),
])  # fmt: skip
def test_products_compile_for_sm90_to_tensor_cores(name: str, tile: split_matmul.Tile, options: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    sizes = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "DEPTH": tile.DEPTH}
    pointers = dict.fromkeys(("a", "high", "low", "out", "parts", "x", "y"), "*fp32") | {"counts": "*i32"}
    text = ptx(getattr(split_matmul._module(), name), sizes | options, pointers, tile.warps)
    assert "wgmma.mma_async" in text
    shares = "SHARED" in options  # who adds up shares reads what others wrote
    assert ("atom.global.gpu.acq_rel" in text) == shares and ("ld.global.cg" in text) == shares
