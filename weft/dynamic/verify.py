"""Does a vertex function treat every vertex alone? It is tried on three vertices together and on each by itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from weft.core.errors import StructureError
from weft.dynamic.collective import exchange
from weft.dynamic.phases import fill_in, is_sized
from weft.dynamic.trace import Traced
from weft.dynamic.vertex import Source

ROWS, PER_ROW = 3, 2


def check_rows(traced: Traced) -> None:
    """Refuse a function in which a vertex's result depends on other vertices of its batch."""
    if any(is_random(n) or n.target is exchange for n in traced.graph.nodes):
        return  # not the same twice, or in need of other ranks
    values = {s: _example(s, n, traced) for s, n in traced.sources.items()}
    module = fx.GraphModule(torch.nn.Module(), traced.graph)
    with torch.no_grad(), _full_precision():
        together = _Sized(module, ROWS, ROWS * PER_ROW).run(*values.values())
        for row in range(ROWS):
            alone = _Sized(module, 1, PER_ROW).run(*(_one(s, v, row) for s, v in values.items()))
            for name, all_rows, one in zip([*traced.states, *traced.outputs], together, alone, strict=True):
                if not torch.allclose(all_rows[row], one[0], rtol=1e-3, atol=1e-4, equal_nan=True):
                    raise _mixed(traced, name, float((all_rows[row].double() - one[0].double()).abs().max()))


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matmuls of few and of many rows may round differently where torch is allowed to be coarse."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Sized(fx.Interpreter):
    """Runs a traced function for some number of rows and edges."""

    def __init__(self, module: fx.GraphModule, rows: int, edges: int) -> None:
        super().__init__(module)
        self.rows, self.edges = rows, edges

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or not is_sized(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return n.target(*(fill_in(a, self.rows, self.edges) for a in args), **kwargs)


def _example(source: Source, node: fx.Node, traced: Traced) -> Tensor:
    """Numbers for an input: every row different."""
    like = node.meta["val"]
    if source.role == "weight":
        return traced.weights[int(source.name)].detach()
    if source.role == "at":
        return torch.arange(ROWS, device=like.device).repeat_interleave(PER_ROW)
    rows = ROWS * PER_ROW if source.role == "edge" else ROWS
    shape = (rows, *like.shape[1:])
    if not like.dtype.is_floating_point:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    generator = torch.Generator().manual_seed(zlib.crc32(str(source).encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def _one(source: Source, value: Tensor, row: int) -> Tensor:
    """The part of an input that belongs to one vertex."""
    if source.role == "weight":
        return value
    if source.role in ("at", "edge"):
        part = value[row * PER_ROW : (row + 1) * PER_ROW]
        return part - row if source.role == "at" else part
    return value[row : row + 1]


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _mixed(traced: Traced, name: str, by: float) -> StructureError:
    return StructureError(
        f"vertex function {traced.name!r} mixes vertices: {name!r} of one depends on the others in its batch",
        needed="every row treated alone, so that batches may be sharded anyhow", found=f"a difference of {by:.2g} between together and alone",
        try_="work along dims 1 and up; what spans vertices belongs outside, on the pushed outputs",
    )  # fmt: skip
