"""Products beside their collective, in bf16 on ranks that share a GPU: weft's ways, torch's fused ops, and one after the other.

    python -m bench.gpu_matmuls [--stages sums,gather] [--ranks 4] [--shapes "4096,3072,8192;..."] [--few] [--quick] [--json]

`sums`: a product whose terms are summed over the ranks, scattered or whole (K / ranks each). `gather`: rows are gathered and multiplied
(N / ranks each), with a trace of the fastest way. Every way is compared with float32 products before it is timed and after.

unfused      the collective and the product one after the other, over the same symmetric memory
gemm_alone   the product without its collective
torch_fused  torch's own fused op over symmetric memory

All are replayed from graphs. Beside them weft's fastest way and torch's op called from Python, in turn: `called_ms`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from bench import _gpu
from bench._gpu_rank import Call, Rank, rounded, timed_row

STAGES = {"sums": _gpu.Stage("sums", limit=150), "gather": _gpu.Stage("gather", limit=150)}
SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")
SHAPES = [(512, 4096, 14336), (2048, 8192, 8192), (8192, 8192, 8192), (8192, 4096, 28672)]  # M, N, K of all ranks together
AWKWARD = ((136, 264, 72), (128, 8, 64), (512, 8, 8), (64, 1032, 1000), (1000, 520, 4104))
FEW: dict[str, list[tuple[Any, ...]]] = {
    "gather_matmul": [("peers", 1, 16, "matmul"), ("peers", 1), ("peers", 2), ("peers", 2, 8, "persistent"), ("peers", 2, 8, "flow", 1.0, False, 2)],
    "matmul_reduce_scatter": [("peers", 1, 128), ("peers", 2, 128), ("peers", 4, 128)],
    "matmul_all_reduce": [("peers", 1, 32), ("peers", 2, 32)],
}
CLOSE = 0.02  # relative to the largest result
Shape = tuple[int, int, int]


def register(app: typer.Typer) -> None:
    app.command("gpu-matmuls")(matmuls)


def matmuls(
    stages: str = typer.Option(",".join(STAGES)), ranks: int = _gpu.RANKS, quick: bool = _gpu.QUICK, json: bool = _gpu.JSON,
    shapes: str = typer.Option("", help="M,N,K of all ranks together, with semicolons between."),
    few: bool = typer.Option(False, help="Only ways that were ever the fastest, and only ops that torch has too."),
) -> None:  # fmt: skip
    """GEMM + reduce_scatter, GEMM + all_reduce and all_gather + GEMM on one GPU; --quick: the largest shape alone."""
    wanted = [tuple(map(int, one.split(","))) for one in shapes.split(";")] if shapes else SHAPES[-1:] if quick else SHAPES
    _gpu.report("gpu-matmuls", _gpu.run_stages("bench.gpu_matmuls", STAGES, stages, ranks, shapes=wanted, few=few), json)


def sums(me: Rank, shapes: list[list[int]], few: bool) -> None:
    for m, n, k in reversed(shapes):
        for op in SUMS[:1] if few else SUMS:
            me.tried(f"{op} {(m, n, k)}", lambda op=op, m=m, n=n, k=k: fastest(me, op, (m, n, k), few))
        torch.cuda.empty_cache()


def gather(me: Rank, shapes: list[list[int]], few: bool) -> None:
    from bench import _gpu_overlap

    if not few:
        check_carrying(me)
    for m, n, k in reversed(shapes):
        shape = m, n, k
        way = me.tried(f"gather_matmul {shape}", lambda shape=shape: fastest(me, "gather_matmul", shape, few))
        if shape == SHAPES[-1] and way is not None and not few:
            x, w = Case(me, "gather_matmul", shape).operands
            _gpu_overlap.trace(me, x, w, way)
            if way.by == "matmul":
                _gpu_overlap.cost_of_carrying(me, x, w, way)
        torch.cuda.empty_cache()


# -- one op at one shape -------------------------------------------------------------------------------------------------------


class Case:
    """An op and this rank's operands, x [rows, k] and w [n, k]; all ranks' operands can be made anywhere, from their seeds."""

    def __init__(self, me: Rank, op: str, shape: Shape) -> None:
        self.me, self.op, self.shape, self.gathers = me, op, shape, op == "gather_matmul"
        x, w = self.made_by(me.rank)
        if self.gathers:  # the rows are in symmetric memory to begin with, for the plain way too
            x = self.space.rows(*x.shape, x.dtype)[me.rank].copy_(x)
        self.operands = x, w

    @property
    def space(self) -> Any:
        from weft.nn.over_peers import space_of

        return space_of(None, self.me.device)

    def made_by(self, rank: int) -> tuple[Tensor, Tensor]:
        m, n, k = self.shape
        rows, cols, deep = (m // self.me.world, n // self.me.world, k) if self.gathers else (m, n, k // self.me.world)
        gen = torch.Generator(self.me.device).manual_seed(5 + rank)
        make = functools.partial(torch.randn, generator=gen, device=self.me.device, dtype=torch.bfloat16)
        return make(rows, deep), make(cols, deep) / deep**0.5

    def run(self, way: Any) -> Any:
        from weft.nn import over_peers

        return getattr(over_peers, self.op)(*self.operands, None, way, *((False,) if self.gathers else ()))

    def called(self, way: Any) -> Any:
        """As a user calls it."""
        from weft.nn import functional

        return getattr(functional, self.op)(*self.operands, None, way, *((False,) if self.gathers else ()))

    def error(self, got: Any) -> float:
        """The largest relative error over all ranks, of 32 rows each, against float32 products of every rank's operands."""
        me, w, m = self.me, self.operands[1], self.shape[0]
        scattered = self.op == "matmul_reduce_scatter"
        first, count = (me.rank * m // me.world, m // me.world) if scattered else (0, m)
        rows = torch.arange(0, count, max(1, count // 32), device=me.device)
        parts = [self.made_by(r) for r in range(me.world)]
        if self.gathers:
            want, have = torch.cat([a for a, _ in parts])[rows].float() @ w.float().T, got[0][rows].float()
        else:
            want, have = sum(a[first + rows].float() @ b.float().T for a, b in parts), got[rows].float()
        return me.worst(((have - want).abs().max() / want.abs().max()).item())


def candidates(op: str) -> list[Any]:
    """Ways over peer memory that are worth timing for an op, those without overlap first."""
    from weft.nn.strategies import Strategy

    if op == "gather_matmul":
        by_driver = [Strategy("peers", c, 16, "copy", streams=n) for c in (1, 2, 3) for n in (1, 2)]
        by_kernel = [Strategy("peers", c, b, by) for c in (1, 2, 3) for by in ("persistent", "flow") for b in (8, 12, 16, 24)]
        carried = [Strategy("peers", by="matmul")]
        return carried + by_driver + by_kernel + [Strategy("peers", c, b, "flow", streams=2) for c in (1, 2) for b in (8, 12, 16)]
    if op == "matmul_all_reduce":
        return [Strategy("peers", c, b) for c in (1, 2, 4) for b in (16, 32)]
    return [Strategy("peers", c, b) for c in (1, 2, 4, 8) for b in (8, 32, 128)]


def fastest(me: Rank, op: str, shape: Shape, few: bool) -> Any:
    """The fastest of the candidates. Those on one line come first; the best of them is timed again beside those on two."""
    from weft.nn.strategies import Strategy

    some = [Strategy(*how) for how in FEW[op]] if few else candidates(op)
    case, best, tried = Case(me, op, shape), list[Any](), dict[str, float]()
    for lines in (1, 2):
        ways = [way for way in some if way.streams == lines]
        ways = [way for way in ways if case.gathers or shape[0] % (way.chunks * me.world) == 0]
        if ways:
            ms, error = time_ways(case, best + ways)
            best = [min(best + ways, key=lambda way: ms[way])]
            tried |= rounded(ms)
    unfused = ms.get("unfused") or min(t for way, t in ms.items() if way != "gemm_alone" and way.chunks == 1)
    how = str(best[0]) if ms[best[0]] < unfused else "left alone"
    peer, called = torch_fused(case, best[0])
    times = {"weft": min(ms[best[0]], unfused), "unfused": unfused, "gemm_alone": ms["gemm_alone"], **peer}
    correct = f"largest relative error {error:.1e}"
    me.say(**timed_row(f"{op} {shape}".replace("_", " "), times, way=how, called_ms=called, tried=tried, correct=correct))
    return best[0]


def time_ways(case: Case, ways: list[Any]) -> tuple[dict[Any, float], float]:
    """Milliseconds of each, of the product alone and of gathering first; and the largest error before or after."""
    x, w = case.operands
    errors = [case.error(case.run(way)) for way in ways]
    assert max(errors) < CLOSE, dict(zip(ways, errors, strict=True))
    whole = torch.randn(case.shape[0], x.shape[1], device=x.device, dtype=x.dtype) if case.gathers else x
    calls: dict[Any, Call] = {way: functools.partial(case.run, way) for way in ways}
    calls["gemm_alone"] = lambda: whole @ w.T
    if case.gathers:
        calls["unfused"] = lambda: unfused_gather(case)
    ms = case.me.time_graphs(calls)
    again = [case.error(case.run(way)) for way in ways]
    assert max(again) < CLOSE, dict(zip(ways, again, strict=True))
    return ms, max(errors + again)


def unfused_gather(case: Case) -> Tensor:
    """Gather all rows, then one product."""
    (x, w), space, me = case.operands, case.space, case.me
    shards = space.rows(*x.shape, x.dtype)
    gathered = torch.empty(me.world, *x.shape, dtype=x.dtype, device=x.device)
    space.meet()
    for turn in range(me.world):
        gathered[(me.rank + turn) % me.world].copy_(shards[(me.rank + turn) % me.world])
    space.meet()
    return gathered.view(-1, x.shape[1]) @ w.T


def torch_fused(case: Case, way: Any) -> tuple[dict[str, float], dict[str, float]]:
    """torch's own fused op replayed from a graph, where there is one; and it and weft's way called."""
    assert dist.group.WORLD is not None
    (x, w), group, ops = case.operands, dist.group.WORLD.group_name, torch.ops.symm_mem
    calls: dict[str, Callable[[], Any]] = {
        "matmul_reduce_scatter": lambda: ops.fused_matmul_reduce_scatter(x, w.T, "sum", 0, group),
        "gather_matmul": lambda: ops.fused_all_gather_matmul(x, [w.T], 0, group),
    }
    call = calls.get(case.op)
    if call is None or case.me.tried(f"torch's {case.op}", call) is None:
        return {}, {}
    ways: dict[Any, Call] = {"weft": functools.partial(case.called, way), "torch_fused": call}
    assert case.error(case.called(way)) < CLOSE
    return case.me.time_graphs({"torch_fused": call}), rounded(case.me.time_calls(ways, rounds=5, calls=20))


def check_carrying(me: Rank) -> None:
    """Products that carry, at sizes of which no tile, stage or piece is a divisor: every row arrives, every product is right."""
    from weft.nn import over_peers
    from weft.nn.strategies import Strategy

    for m, n, k in AWKWARD:
        gen = torch.Generator(me.device).manual_seed(m)
        whole = torch.randn(me.world, m, k, generator=gen, device=me.device, dtype=torch.bfloat16)
        w = torch.randn(n, k, generator=gen, device=me.device, dtype=torch.bfloat16)
        for _ in range(2):  # the second time on memory that was used before
            got, kept = over_peers.gather_matmul(whole[me.rank].clone(), w, None, Strategy("peers", by="matmul"))
        want = whole.flatten(0, 1).float() @ w.float().T
        error = me.worst(((got.float() - want).abs().max() / want.abs().max()).item())
        arrived = all(me.all(torch.equal(kept, whole.flatten(0, 1))))
        me.say(case=f"check carrying {(m, n, k)}", error=error, arrived=arrived)
        assert error < CLOSE and arrived, (m, n, k, error, arrived)


if __name__ == "__main__":
    typer.run(matmuls)
