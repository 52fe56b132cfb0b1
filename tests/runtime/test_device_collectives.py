"""Collectives by kernels over peer memory, interpreted with four real processes, give what gloo's give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_interpreted_ranks

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def collectives(rank: int) -> None:
    """Every collective in every dtype; one reduction is large enough for each rank to sum only its share."""
    from weft.api.compiled import _intra_host_group
    from weft.runtime.peers import connect

    near = _intra_host_group(dist.group.WORLD, connect(None, "cpu"))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        near.peers.sharing = 1 if dtype == torch.float32 else 4  # ranks on one device meet before their kernels, not in them
        torch.manual_seed(rank)
        for count in (5, 70001) if dtype == torch.float32 else (300,):
            xs = [torch.randn(shape).mul(10).to(dtype) for shape in ((count,), (3, 2), ())]
            for op in OPS if count < 1000 else ("sum",):
                for got, x in zip(near.all_reduce_list(xs, op, [False] * 3), xs, strict=True):
                    _same(got, _reduced(x, op))
        x = torch.randn(4, 3).add(rank).to(dtype)
        pieces = [torch.empty_like(x) for _ in range(near.world)]
        dist.all_gather(pieces, x)
        _same(near.all_gather(x), torch.stack(pieces))
        parts = torch.randn(near.world, 2, 7).mul(5).to(dtype).transpose(1, 2)
        _same(near.reduce_scatter(parts), _reduced(parts.contiguous(), "sum")[rank])
        more = [parts, torch.randn(near.world, 3).to(dtype)]
        _same(near.reduce_scatter_list(more), torch.cat([_reduced(p.contiguous(), "sum")[rank].reshape(-1) for p in more]))
        got = torch.empty(parts.shape, dtype=dtype)
        dist.all_to_all_single(got, parts.contiguous())
        _same(near.all_to_all(parts), got)


def slices(rank: int) -> None:
    """A step that gathers what its inputs make, twice, and a value it computes: the inputs are laid out once, whatever they were before."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from weft.api.compiled import _intra_host_group
    from weft.runtime.gather_once import gather_once
    from weft.runtime.peers import connect

    near = _intra_host_group(dist.group.WORLD, connect(None, "cpu"))

    def step(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = p.to(torch.bfloat16)
        first, other = near.all_gather(low), near.all_gather(q.reshape(3, 2))
        made = near.all_gather(q * first.sum())
        return first, other, made, near.all_gather(p.to(torch.bfloat16)) * 2

    given = [torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)), torch.full((6,), rank + 1.0)]
    graph = make_fx(step, tracing_mode="fake")(*given)
    gather_once(graph.graph)
    graph.recompile()
    names = [str(n.target) for n in graph.graph.nodes if "intra_host_" in str(n.target)]
    assert names == [f"weft.intra_host_{n}.default" for n in ("place", "take", "take", "gather", "take")], names
    for _ in range(2):
        for got, want in zip(graph(*given), step(*given), strict=True):
            assert torch.equal(got, want), (got, want)
        given = [x + 1 for x in given]


def _reduced(x: torch.Tensor, op: str) -> torch.Tensor:
    wide = x.double()
    dist.all_reduce(wide, OPS[op])
    return wide


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    near = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want.double(), rtol=near, atol=10 * near)


@pytest.mark.timeout(200)
def test_collectives_by_kernels_equal_gloo_on_four_ranks(tmp_path: Path) -> None:
    run_interpreted_ranks(4, collectives, tmp_path, seconds=150)


@pytest.mark.timeout(200)
def test_slices_that_a_step_begins_with_are_laid_out_once(tmp_path: Path) -> None:
    run_interpreted_ranks(2, slices, tmp_path, seconds=150)
