"""Overlapped linear layers equal torch's whole layers, forward and backward, in every way to run them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft.nn as wn
from tests.ranks import run_ranks
from weft.core.errors import TypeMismatch
from weft.runtime.pipeline import Chunks, run_staggered

WAYS = [
    wn.Strategy(),
    wn.Strategy("group", 2),
    wn.Strategy("group", 4),
    wn.Strategy("group", 4, taper=0.5),
    wn.Strategy("peers"),
    wn.Strategy("peers", 4),
    wn.Strategy("peers", 2, 2, "kernel"),
    wn.Strategy("peers", 1, 2, "persistent"),
    wn.Strategy("peers", 2, 2, "flow", streams=2),
    wn.Strategy("peers", 2, by="matmul"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_a_block_of_two_layers_and_its_gradients(world: int, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        for way in WAYS:
            torch.manual_seed(0)
            first, second = nn.Linear(24, 48), nn.Linear(48, 24)
            whole = torch.randn(16 * world, 24, requires_grad=True)
            want = second(torch.nn.functional.gelu(first(whole)))
            seed = torch.randn_like(want)
            want.backward(seed)
            a, b = wn.AllGatherLinear.of(first, strategy=way), wn.LinearReduceScatter.of(second, strategy=way)
            x = whole.detach().chunk(world)[rank].clone().requires_grad_()
            for _ in range(2):  # the second time on memory that was used before
                x.grad = None
                a.zero_grad(), b.zero_grad()
                y = b(torch.nn.functional.gelu(a(x)))
                y.backward(seed.chunk(world)[rank])
            near = {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(y, want.chunk(world)[rank], **near)
            torch.testing.assert_close(x.grad, whole.grad.chunk(world)[rank], **near)
            torch.testing.assert_close(a.weight.grad, first.weight.grad.chunk(world)[rank], **near)
            torch.testing.assert_close(b.weight.grad, second.weight.grad.chunk(world, 1)[rank], **near)

    run_ranks(world, job, tmp_path)


def test_a_layer_that_ends_in_a_sum(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        for way in WAYS:
            torch.manual_seed(0)
            layer = nn.Linear(30, 7)
            x = torch.randn(4, 12, 30)
            want = layer(x)
            mine = wn.LinearAllReduce.of(layer, strategy=way)
            part = x.chunk(3, -1)[rank].clone().requires_grad_()
            got = mine(part)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            got.sum().backward()
            torch.testing.assert_close(part.grad, layer.weight.sum(0).chunk(3)[rank].expand(4, 12, -1), rtol=1e-4, atol=1e-5)

    run_ranks(3, job, tmp_path)


def test_rows_that_cannot_be_cut_are_refused_or_run_plainly(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        w = torch.randn(5, 6)
        with pytest.raises(TypeMismatch, match="rows of x over 2 ranks") as e:
            wn.linear_reduce_scatter(torch.randn(7, 6), w)
        assert "a multiple of 2" in str(e.value)
        with pytest.raises(TypeMismatch, match="LinearReduceScatter of 5 features"):
            wn.LinearReduceScatter(5, 4)
        x = torch.randn(6, 6)
        plain = wn.linear_all_reduce(x, w)
        torch.testing.assert_close(wn.linear_all_reduce(x, w, strategy=wn.Strategy("group", 4)), plain)
        packed = wn.Strategy("group", 4, taper=0.7, packed=True)
        assert str(packed) == "group, 4 chunks, each 0.7 of the last, packed"
        for dtype in (torch.float32, torch.float64):  # the second has no such product, and takes torch's own
            torch.testing.assert_close(wn.linear_all_reduce(x.to(dtype), w.to(dtype), strategy=packed), plain.to(dtype), rtol=1e-5, atol=1e-5)
        weight = w.clone().requires_grad_()
        wn.linear_all_reduce(x, weight, strategy=packed).sum().backward()
        torch.testing.assert_close(weight.grad, x.sum(0).expand(5, 6))

    run_ranks(2, job, tmp_path)


def test_chunks_take_every_slice_alike_and_join_again() -> None:
    x = torch.arange(2 * 24 * 3).reshape(2, 24, 3)
    for parts in (1, 2, 4):
        how = Chunks(1, parts)
        pieces = [how.take(x, c, 3) for c in range(3)]
        assert torch.equal(how.join(pieces), x)
    assert Chunks(0, 2).take(torch.arange(8), 0, 2).tolist() == [0, 1, 4, 5]


def test_chunks_run_in_turn() -> None:
    said: list[str] = []

    def work(k: int):
        said.append(f"compute {k}")
        yield
        said.append(f"take {k}")
        return k

    assert run_staggered([work(k) for k in range(3)]) == [0, 1, 2]
    assert said == ["compute 0", "compute 1", "take 0", "compute 2", "take 1", "take 2"]


def test_the_choice_for_a_shape_is_used(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        from weft.nn.strategies import choose, key_of

        key = key_of("matmul_all_reduce", 8, 4, 6, torch.float32, None)
        assert choose(key) == wn.Strategy()
        wn.set_strategy(key, wn.Strategy("group", 2))
        x, w = torch.randn(8, 6), torch.randn(4, 6)
        got = wn.linear_all_reduce(x, w)
        want = x @ w.T
        dist.all_reduce(want)
        torch.testing.assert_close(got, want)
        assert choose(key).chunks == 2

    run_ranks(2, job, tmp_path)


def test_chunks_taper_and_none_is_empty():
    from weft.nn.over_group import _tapered

    assert _tapered(2048, 4, 1.0) == [512, 512, 512, 512]
    shrinking, growing = _tapered(2048, 6, 0.6), _tapered(2048, 6, 1.5)
    assert sum(shrinking) == sum(growing) == 2048
    assert shrinking == sorted(shrinking, reverse=True) and growing == sorted(growing)
    assert min(_tapered(5, 8, 0.1)) == 1 and len(_tapered(5, 8, 0.1)) == 5
    assert _tapered(0, 4, 1.0) == [0]


def test_odd_columns_are_padded_where_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of results begin on 16 bytes; what comes back has the columns that were asked for."""
    from weft.nn import over_peers
    from weft.nn.strategies import Strategy

    monkeypatch.setattr(over_peers, "_pays", lambda space: True)

    def job(rank: int) -> None:
        gen = torch.Generator().manual_seed(0)
        xs, ws = torch.randn(2, 8, 6, generator=gen), torch.randn(2, 5, 6, generator=gen)
        assert over_peers._aligned(ws[0], over_peers.space_of(None, torch.device("cpu"))).shape == (8, 6)
        want = sum(x @ w.T for x, w in zip(xs, ws, strict=True))
        for chunks in (1, 2):
            way = Strategy("peers", chunks=chunks)
            torch.testing.assert_close(over_peers.matmul_all_reduce(xs[rank], ws[rank], None, way), want)
            torch.testing.assert_close(over_peers.matmul_reduce_scatter(xs[rank], ws[rank], None, way), want[4 * rank : 4 * rank + 4])
            got, rows = over_peers.gather_matmul(xs[rank], ws[rank], None, way)
            torch.testing.assert_close(got, xs.flatten(0, 1) @ ws[rank].T)
            torch.testing.assert_close(rows, xs.flatten(0, 1))
            assert got.is_contiguous()

    run_ranks(2, job, tmp_path)


def test_calls_alike_are_recorded_and_their_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder of GPUs is replaced by one that runs into the same memory again."""
    from weft.runtime.recorded import WARM_UP, Recordings

    class Again(Recordings):
        asked = 0

        def _record(self, run, given):
            self.asked += 1
            out = run(given)
            return lambda: [y.copy_(new) for y, new in zip(out, run(given), strict=True)], out

    w, home, calls = torch.randn(3, 4), torch.empty(2, 4), Again()
    for _ in range(WARM_UP + 4):
        xs = [torch.randn(2, 4) for _ in range(2)]
        got = [calls(key, lambda x: (x @ w.T, x * 2), x, lambda key=key: home if key else None) for key, x in enumerate(xs)]
        again = [calls(key, lambda x: (x @ w.T, x * 2), torch.ones(2, 4), lambda key=key: home if key else None) for key in range(2)]
        for x, (product, twice) in zip([*xs, torch.ones(2, 4), torch.ones(2, 4)], [*got, *again], strict=True):
            torch.testing.assert_close(product, x @ w.T)
            torch.testing.assert_close(twice, x * 2)
    assert calls.asked == 2
    full = Again()
    full._left = 0
    for _ in range(WARM_UP + 2):
        full(0, lambda x: (x,), w, lambda: None)
    assert full.asked == 0
