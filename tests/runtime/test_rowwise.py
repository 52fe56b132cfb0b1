"""Updates by rows as accelerators run them, op by op on the host, against the op's own meaning."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from weft.ops import optimizers
from weft.ops.rowwise import AT
from weft.runtime import rowwise

ADAM = {"betas": (0.9, 0.99), "eps": 1e-8, "decay": 0.1, "decoupled": True, "sign": 1}
SGD = {"momentum": 0.0, "damping": 0.0, "nesterov": False, "decay": 0.0, "sign": 1}
ADAGRAD = {"decay": 0.0, "lr_decay": 0.3, "eps": 1e-10, "sign": 1}
CASES = {"adam": (ADAM, 2, False), "sgd": (SGD, 0, True), "adagrad": (ADAGRAD, 1, True)}
ROWS, WIDTH = 57, 3


def drawn(name: str, first: int, count: int) -> Any:
    """A table and its state, rows looked up (some often, and of a cut table some that are not held), and what they should become."""
    settings, states, still = CASES[name]
    g = torch.Generator().manual_seed(0)
    kept = [torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64) for _ in range(1 + states)]
    x, rows = torch.randn(count, WIDTH, generator=g, dtype=torch.float64), torch.arange(first, first + ROWS)
    at = torch.randint(0, ROWS + 2 * first, (count,), generator=g)
    at[: count // 2] = first + at[: count // 2] % 4
    update = getattr(optimizers, name)
    numbers = torch.tensor(0.1, dtype=torch.float64), torch.tensor(3)
    want = AT[update].run(kept[0], x, at, rows, *kept[1:], *numbers, dim=0, **settings)
    given = (partial(update.run, **settings), kept, x, at, rows if first else None, *numbers)
    return given, still, want if isinstance(want, tuple) else (want,)


@pytest.mark.parametrize("count", [40, 0])
@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("name", CASES)
def test_every_row_asks_its_slot(name: str, first: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_INDUCTOR", "0")
    given, still, want = drawn(name, first, count)
    rowwise._on_device(*given, still)
    for found, expected in zip(given[1], want, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [40, 0])
@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_rows(name: str, first: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "BLOCK", 5 * WIDTH * 8)
    given, still, want = drawn(name, first, count)
    rowwise.update_(*given, still=still)
    for found, expected in zip(given[1], want, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_inductor_refuses_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile", refuse)
    given, still, want = drawn("adam", 0, 40)
    with pytest.warns(UserWarning, match="tables are updated op by op: Inductor refused it .*no compiler here"):
        rowwise._on_device(*given, still)
    torch.testing.assert_close(given[1][0], want[0], rtol=1e-12, atol=1e-12)
