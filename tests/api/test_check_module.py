"""`weft.compile` and `weft.shard` are compared with the user's own module in plain torch, as steps are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import weft
from tests.api.ranks import on_ranks
from tests.testing.plant import Facet, plant
from weft.api import check_cost
from weft.core.errors import CaptureError
from weft.core.program import Program


class Net(nn.Module):
    """It returns two results, drops some of its values and counts in a buffer; `fault` is what only the trace does."""

    def __init__(self, fault: Any = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop, self.fault = nn.Dropout(0.3), fault

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.drop(torch.tanh(self.norm(self.first(x))))
        if self.fault is not None and isinstance(x, FakeTensor):
            y = self.fault(self.training, y)
        return {"y": self.last(y), "best": self.last(y).argmax(-1)}


def example() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 6, dtype=torch.float64)


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = check_cost.fits

    def fits(program: Program, device: torch.device, count: int = 1) -> bool:
        return program.name.startswith(("block.", "around")) and program.name != "block." and plain(program, device, count)

    monkeypatch.setattr(check_cost, "fits", fits)


def made(model: nn.Module, **options: Any) -> Any:
    return weft.compile(model.double(), "dp1", example(), **options)


def trained(model: nn.Module, **options: Any) -> Any:
    return weft.shard(model.double(), example(), "dp1", **options).weft


def test_a_compiled_model_is_compared_with_torch() -> None:
    run = made(Net())
    assert run.verified.compared >= 2 and run.verified.worst < 1e-12 and "equal torch's on the example" in str(run.verified)
    first = run.verified
    run(example()[:4])
    assert run.verified is not first  # another shape is another program


def test_a_module_is_compared_with_torch_in_both_modes_with_gradients() -> None:
    own = trained(Net())
    assert own.verified[True].compared >= 11 and own.verified[False].compared >= 2 and own.verified[True].worst < 1e-9


def test_it_can_be_left_out() -> None:
    fault = lambda _, y: y * 2  # noqa: E731
    assert made(Net(fault), check=False).verified is None and trained(Net(fault), check=False).verified == {}


def test_another_result_is_refused() -> None:
    with pytest.raises(CaptureError, match="the captured pass of Net does not compute what torch does") as e:
        made(Net(lambda _, y: y * 1.0001))
    assert "the result y differs by" in str(e.value) and "last (Linear)" in str(e.value) and "check=False" in str(e.value)


@pytest.mark.parametrize("mode", [True, False])
def test_so_it_is_in_either_mode(mode: bool) -> None:
    with pytest.raises(CaptureError, match="the captured pass of Net does not compute what torch does"):
        trained(Net(lambda training, y: y * 1.0001 if training is mode else y))


def test_a_wrong_gradient_is_refused() -> None:
    with plant(Facet("tanh", "vjp", lambda n, ct: (ct,))), pytest.raises(CaptureError, match=r"the gradient of (first|norm)\.(weight|bias)"):
        trained(Net())


def test_what_is_too_large_is_compared_by_blocks(too_large: None) -> None:
    with pytest.warns(UserWarning, match="3 of 4 modules"):
        run, own = made(Net()), trained(Net())
    assert run.verified.compared > 5 and own.verified[True].compared > 15
    with pytest.raises(CaptureError, match="does not compute what torch does"):
        trained(Net(lambda _, y: y * 1.0001))


def test_every_rank_raises_alike(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        with pytest.raises(CaptureError, match="does not compute what torch does"):
            weft.compile(Net(lambda _, y: y * 1.01).double(), "dp2", example())
        with pytest.raises(CaptureError, match="does not compute what torch does"):
            weft.shard(Net(lambda _, y: y * 1.01).double(), example(), "dp2")

    on_ranks(2, job, tmp_path)
