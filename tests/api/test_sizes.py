"""Batches of other sizes: one compilation for a range of them, the mean of one process for a last small one, and torch's values always."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.api.ranks import on_ranks
from weft.api.compiled import Compiled
from weft.api.parallelize import parallelize
from weft.api.ranges import Unexplained, explained

SIZES = [(4, 6), (4, 9), (4, 7), (4, 11), (4, 5), (4, 20), (3, 6), (1, 9)]
COMPILES = [False, True, True, False, False, True, True, True]
NEAR = [(4, 12), (4, 9), (4, 14), (4, 8), (4, 15), (4, 10), (4, 13), (4, 9), (4, 16), (4, 8), (4, 30), (4, 4), (4, 21), (4, 5)]
NEAR_COMPILES = [at in (1, 2, 4, 10, 11) for at in range(len(NEAR))]


class Words(nn.Module):
    """A causal model of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            q, k, v = layer(h).chunk(3, -1)
            h = h + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return self.out(h)


class Large(Words):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, 8)


class Near(Words):
    """Has about as many rows as a batch has tokens: its table is updated by rows for short batches, all of it for long ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 8)


class Placed(Words):
    """Takes no more than 23 words."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.randn(23, 11))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.at[: x.shape[1]]


class Odd(Words):
    """Does something else where the length is odd, and something that is no product of sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1) * x.shape[1] if x.shape[1] % 2 else super().forward(x)


def loss(m: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten())


def batch(n: int, length: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 11, (n, length), generator=draw)
    y[0, :2] = -100  # so that the mean is not that of the samples' means
    return {"x": torch.randint(0, 11, (n, length), generator=draw), "y": y}


def by_torch(model: nn.Module, sizes: list[tuple[int, int]] = SIZES) -> tuple[list[float], list[Tensor]]:
    model = copy.deepcopy(model)
    optimizer, out = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for i, size in enumerate(sizes):
        optimizer.zero_grad()
        value = loss(model, batch(*size, i))
        value.backward()
        optimizer.step()
        out.append(value.item())
    return out, [p.detach() for p in model.parameters()]


def made(kind: type[Words]) -> Words:
    torch.manual_seed(0)
    return kind().double()


def trained(
    kind: type[Words], plan: str, monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, int]] = SIZES
) -> tuple[list[float], list[Tensor], list[int], Any]:
    """Losses, parameters, and how many programs were compiled for each step."""
    model, counts = made(kind), [0]
    compile_ = Compiled.__init__

    def counted(self: Any, *args: Any, **more: Any) -> None:
        counts[-1] += 1
        compile_(self, *args, **more)

    step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(*sizes[0], 9), plan=plan)
    monkeypatch.setattr(Compiled, "__init__", counted)
    out = []
    for i, size in enumerate(sizes):
        out.append(step(batch(*size, i)).item())
        counts.append(0)
    monkeypatch.undo()
    step.sync_model()
    return out, [p.detach() for p in model.parameters()], counts[:-1], step


def test_sizes_between_compiled_ones_are_not_compiled(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    want = by_torch(made(Words))
    losses, parameters, counts, step = trained(Words, "dp1", monkeypatch)
    torch.testing.assert_close((losses, parameters), want, rtol=1e-9, atol=1e-9)
    assert [count > 0 for count in counts] == COMPILES
    told = capfd.readouterr().err
    assert "weft: a batch of another shape (x [4, 9], y [4, 9]): another program is compiled for it" in told
    assert "weft: compiled for batches of x [4, 4 to 16], y [4, 4 to 16]" in told
    assert "compiled for batches of x [4, 4 to 32], y [4, 4 to 32]; x [4, 20], y [4, 20] is outside x [4, 4 to 16]" in told
    assert step.shapes.startswith("x [4, 4 to 32], y [4, 4 to 32]; x [3, 6], y [3, 6]; ")
    step(batch(4, 13, 5))
    assert step.check(batch(4, 13, 5)) < 1e-9


def test_a_large_table_is_of_a_range_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch reads few of its rows, these are updated by a call of their own."""
    losses, parameters, counts, step = trained(Large, "dp1", monkeypatch)
    torch.testing.assert_close((losses, parameters), by_torch(made(Large)), rtol=1e-9, atol=1e-9)
    assert [count > 0 for count in counts] == COMPILES and "by_rows.update_(" in step.compiled.code.text


@pytest.mark.parametrize("plan", ["dp2", "dp2,zero3", "tp2", "pp2"])
def test_every_plan_takes_other_sizes(plan: str, tmp_path: Path) -> None:
    want = by_torch(made(Words))

    def job(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            losses, parameters, counts, step = trained(Words, plan, patch)
        torch.testing.assert_close((losses, parameters), want, rtol=1e-9, atol=1e-9)
        if plan != "tp2":  # how a head this small is cut depends on how many tokens there are, so that each size is compiled
            assert [count > 0 for count in counts] == COMPILES
        assert step.check(batch(4, 13, 5)) < 1e-9

    on_ranks(2, job, tmp_path)


def test_there_is_a_range_on_each_side_of_a_choice(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """How a table of about as many rows as a batch has tokens is updated depends on the size: lengths of both sides come in turn."""
    losses, parameters, counts, step = trained(Near, "dp1", monkeypatch, NEAR)
    torch.testing.assert_close((losses, parameters), by_torch(made(Near), NEAR), rtol=1e-9, atol=1e-9)
    assert [count > 0 for count in counts] == NEAR_COMPILES
    told = capfd.readouterr().err
    beyond = "; programs of sizes beyond differ in code of another form"
    assert f"weft: compiled for batches of x [4, 8 to 14], y [4, 8 to 14]{beyond}" in told
    assert f"compiled for batches of x [4, 15 to 16], y [4, 15 to 16]; x [4, 15], y [4, 15] is outside x [4, 8 to 14], y [4, 8 to 14]{beyond}" in told
    assert step.shapes == "x [4, 15 to 32], y [4, 15 to 32]; x [4, 4 to 14], y [4, 4 to 14]"
    for length, by_rows in ((11, True), (23, False), (6, True), (29, False)):
        step(batch(4, length, 5))
        assert ("by_rows.update_(" in step.compiled.code.text) == by_rows
        assert step.check(batch(4, length, 5)) < 1e-9


@pytest.mark.parametrize("plan", ["dp2", "dp2,zero3"])
def test_ranks_have_a_range_on_each_side_of_a_choice(plan: str, tmp_path: Path) -> None:
    want = by_torch(made(Near), NEAR)

    def job(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            losses, parameters, counts, _ = trained(Near, plan, patch, NEAR)
        torch.testing.assert_close((losses, parameters), want, rtol=1e-9, atol=1e-9)
        assert [count > 0 for count in counts] == NEAR_COMPILES

    on_ranks(2, job, tmp_path)


def test_a_range_ends_where_the_model_takes_no_longer_batches(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = [(4, 14), (4, 18), (4, 22), (4, 20), (4, 15), (4, 9)]
    losses, parameters, counts, step = trained(Placed, "dp1", monkeypatch, sizes)
    torch.testing.assert_close((losses, parameters), by_torch(made(Placed), sizes), rtol=1e-9, atol=1e-9)
    assert [count > 0 for count in counts] == [False, True, True, False, False, False]
    assert step.shapes == "x [4, 8 to 22], y [4, 8 to 22]"
    assert "compiled for batches of x [4, 8 to 22], y [4, 8 to 22]; programs of sizes beyond differ in what sizes they take (" in capfd.readouterr().err


def test_a_model_that_asks_for_its_sizes_is_traced_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between compiled sizes need not be like them: the trace decides."""
    sizes = [(4, 6), (4, 10), (4, 8), (4, 12), (4, 11)]
    losses, parameters, counts, _ = trained(Odd, "dp1", monkeypatch, sizes)
    torch.testing.assert_close((losses, parameters), by_torch(made(Odd), sizes), rtol=1e-9, atol=1e-9)
    assert [count > 0 for count in counts] == [False, True, True, False, True]


def test_numbers_are_explained_by_sizes() -> None:
    at = [(4,), (6,), (16,)]
    assert explained(at, [(8, "a", 5.0), (12, "a", 5.0), (32, "a", 5.0)])((9,)) == (18, "a", 5.0)
    assert explained(at, [1 / 8, 1 / 12, 1 / 32])((7,)) == 1 / 14
    two = [(4, 2), (6, 2), (4, 8), (6, 8)]
    assert explained(two, [a * b + 1 for a, b in two])((5, 3)) == 16
    with pytest.raises(Unexplained, match="the number 1, then 7"):
        explained(at, [1, 0, 7])
    with pytest.raises(Unexplained, match="not an integer"):
        explained(at, [2, 3, 8])((5,))


def test_steps_of_many_sizes_are_recorded(tmp_path: Path) -> None:
    """The fourth and fifth step, which are traced, run by the code of many sizes."""
    torch.manual_seed(0)
    model = Words()
    mine = copy.deepcopy(model)
    step = parallelize(mine, loss, torch.optim.SGD(mine.parameters(), 0.1), batch(4, 6, 0), record=str(tmp_path), progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed, length in enumerate((6, 9, 7, 5, 8, 6)):
        b = batch(4, length, seed)
        optimizer.zero_grad()
        value = loss(model, b)
        value.backward()
        optimizer.step()
        assert float(step(b).detach()) == pytest.approx(float(value.detach()), rel=1e-5)
    assert step.recorder is not None and step.recorder.measured is not None


def test_a_last_batch_is_fewer_micro_batches() -> None:
    sizes = [(8, 5), (6, 5), (7, 5)]
    model = made(Words)
    want = by_torch(model, sizes)
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(*sizes[0], 9), accumulate=4)
    losses = [step(batch(*size, i)).item() for i, size in enumerate(sizes)]
    torch.testing.assert_close((losses, [p.detach() for p in step.sync_model().parameters()]), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("plan", ["dp2", "dp2,zero3"])
def test_a_part_of_the_same_size_may_be_of_another_batch(plan: str, tmp_path: Path) -> None:
    """Four rows are half of eight, and of seven on the first rank: ranks say at every call whether theirs is as before. So do evaluations."""
    sizes = [(8, 6), (7, 6), (8, 6), (9, 6), (5, 6)]
    want, parameters = by_torch(made(Words), sizes)

    def job(rank: int) -> None:
        model, plain = made(Words), made(Words)
        step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(8, 6, 9), plan=plan, check=False)
        for i, size in enumerate(sizes):
            half = slice(-(-size[0] // 2)) if rank == 0 else slice(-(-size[0] // 2), None)
            part = {n: x[half] for n, x in batch(*size, i).items()}
            plain.load_state_dict({n: step.full(f"param.{n}") for n, _ in plain.named_parameters()})
            expected = [loss(plain, b).item() for b in (batch(*size, i), batch(7, 6, 1))]
            assert [step.eval(part).item(), step.eval(batch(7, 6, 1)).item()] == pytest.approx(expected, rel=1e-9)
            assert step(part).item() == pytest.approx(want[i], rel=1e-9)
        step.sync_model()
        torch.testing.assert_close([p.detach() for p in model.parameters()], parameters, rtol=1e-9, atol=1e-9)

    on_ranks(2, job, tmp_path)
