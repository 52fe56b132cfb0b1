"""Recomputed blocks: the same losses to the last bit, the same dropout, and fewer live bytes in the code that really runs."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.core.errors import PlanError
from weft.runtime import comm
from weft.transform import gathers


class Peak(TorchDispatchMode):
    """The most bytes of storage made inside that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, list[int]] = {}  # address -> size, tensors
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                at = x.untyped_storage().data_ptr()
                if at in self.live or at not in known:
                    self._note(x, at)
        return out

    def _note(self, x: torch.Tensor, at: int) -> None:
        entry = self.live.setdefault(at, [x.untyped_storage().nbytes(), 0])
        self.now += entry[0] if entry[1] == 0 else 0
        entry[1] += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(x, self._gone, at)

    def _gone(self, at: int) -> None:
        entry = self.live[at]
        entry[1] -= 1
        if entry[1] == 0:
            self.now -= entry[0]
            del self.live[at]


def build(plan: str, **settings: Any) -> tuple[Any, Any]:
    w = zoo.small("gpt2", dtype=torch.float64, **{"layers": 4, "dropout": 0.1, **settings})
    return parallelize(w.model, w.loss, torch.optim.SGD(w.model.parameters(), lr=1e-2), w.example(32), plan=plan), w


def losses(plan: str) -> list[float]:
    step, w = build(plan)
    return [step(w.example(32, seed=i)).item() for i in range(3)]


def peak(plan: str, layers: int = 4) -> int:
    step, w = build(plan, layers=layers)
    batch = w.example(32)
    step(batch)
    with Peak() as seen:
        step(batch)
    return seen.peak


@pytest.mark.parametrize("plan", ["dp1", "micro2"])
def test_losses_are_the_same_to_the_last_bit(plan: str) -> None:
    assert losses(f"{plan},recompute") == losses(plan)


def test_what_is_live_grows_by_a_blocks_input_not_by_the_block() -> None:
    least, most = 2, 6
    a_block = [(peak(plan, most) - peak(plan, least)) / (most - least) for plan in ("dp1", "dp1,recompute")]
    its_input = 32 * 16 * 32 * 8  # batch, sequence, hidden, bytes of a double
    assert a_block[1] < 1.5 * its_input
    assert a_block[0] > 10 * its_input


def test_parts_of_blocks_free_part_of_what_blocks_do() -> None:
    (want, most), (_, least) = two_steps("dp1"), two_steps("dp1,recompute")
    for way in ("activation", "ffn", "selective", "per-op"):
        got, held = two_steps(f"dp1,recompute:{way}")
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert least < held < most, way


def two_steps(plan: str) -> tuple[list[float], int]:
    """Losses, and the most bytes of the second step."""
    step, w = build(plan, layers=2)
    first = step(w.example(32)).item()
    with Peak() as seen:
        second = step(w.example(32, seed=1)).item()
    return [first, second], seen.peak


def test_a_part_that_no_block_has_is_refused() -> None:
    w = zoo.small("mixtral-8x7b", layers=2)
    with pytest.raises(PlanError, match="nothing can be recomputed") as e:
        parallelize(w.model, w.loss, torch.optim.SGD(w.model.parameters(), lr=0.1), w.example(8), plan="recompute:activation")
    assert "blocks with no activation between two matmuls with weights" in str(e.value)


def test_a_pipeline_keeps_less_of_every_micro_batch(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        assert losses("pp2,recompute") == losses("pp2")
        assert peak("pp2,gpipe,micro4,recompute") < 0.6 * peak("pp2,gpipe,micro4")

    on_ranks(2, job, tmp_path)


def test_with_sharded_parameters(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        assert losses("dp2,zero3,recompute") == losses("dp2,zero3")

    on_ranks(2, job, tmp_path)


def deep(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    made = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)) for _ in range(layers)]
    return torch.nn.Sequential(*made).double()


def squares(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("more", ["", ",recompute"])
def test_parameters_in_slices_are_gathered_for_each_pass(more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer more costs its activations, not its weights; the losses are torch's."""
    monkeypatch.setattr(gathers, "MESSAGE", 1 << 16)
    monkeypatch.setattr(comm, "message_bytes", lambda device: 1 << 16)
    x, rates = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), {"lr": 1e-2}
    model, want = deep(6), []
    optimizer = torch.optim.AdamW(model.parameters(), **rates)
    for _ in range(3):
        optimizer.zero_grad()
        want.append(squares(model, x))
        want[-1].backward()
        optimizer.step()
    lost = [v.item() for v in want]

    def job(rank: int) -> None:
        live = []
        for layers in (6, 14):
            model = deep(layers)
            step = parallelize(model, squares, torch.optim.AdamW(model.parameters(), **rates), x, f"dp2,zero3{more}", check=layers == 6)
            got = [step(x).item() for _ in range(3)]
            if layers == 6:
                torch.testing.assert_close(got, lost, rtol=1e-12, atol=0)
            with Peak() as seen:
                step(x)
            live.append(seen.peak)
        weights = 2 * 64 * 256 * 8
        assert live[1] - live[0] < 0.5 * 8 * weights, (live, weights)

    on_ranks(2, job, tmp_path)


def test_a_model_without_repeated_blocks_is_recomputed_in_segments() -> None:
    """Layers of different sizes, against torch by itself."""
    sizes, batch = (8, 64, 48, 96, 32, 80, 40, 16), torch.randn(256, 8, dtype=torch.float64)

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(m for a, b in itertools.pairwise(sizes) for m in (torch.nn.Linear(a, b), torch.nn.Tanh()))).double()

    def squares(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x).square().mean()

    model, want = made(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    peaks = []
    for plan in ("dp1", "recompute"):
        model = made()
        step = parallelize(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), batch, plan=plan)
        torch.testing.assert_close([step(batch).item() for _ in range(3)], want, rtol=1e-12, atol=0)
        with Peak() as seen:
            step(batch)
        peaks.append(seen.peak)
    assert peaks[1] < 0.8 * peaks[0], peaks


def test_a_model_of_one_op_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(PlanError, match="nothing can be recomputed") as e:
        parallelize(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(8, 4), plan="recompute")
    assert "no block that repeats, and no value that passes alone" in str(e.value)
