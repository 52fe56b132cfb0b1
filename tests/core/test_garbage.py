"""Garbage is collected seldom where programs are made, and as before afterwards."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import weft
from weft.core.garbage import SELDOM, seldom_collected


def inside() -> None:
    with seldom_collected():
        raise LookupError(gc.get_threshold()[0])


@pytest.mark.parametrize("first", [0, 700, 2 * SELDOM])
def test_what_was_set_is_set_again(first: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(first, 5, 5)
    try:
        with pytest.raises(LookupError, match=f"^{first and max(first, SELDOM)}$"):
            inside()
        assert gc.get_threshold() == (first, 5, 5)
    finally:
        gc.set_threshold(*before)


def test_so_it_is_while_a_step_is_made(tmp_path: Path) -> None:
    before, model = gc.get_threshold(), torch.nn.Linear(2, 2)

    def loss(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        (tmp_path / "first").write_text(str(gc.get_threshold()[0]))
        return m(x).sum()

    weft.parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 2), check=False)
    assert int((tmp_path / "first").read_text()) >= SELDOM and gc.get_threshold() == before
