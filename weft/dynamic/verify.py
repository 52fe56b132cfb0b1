"""Does a vertex function treat every vertex alone? It is tried on three vertices together and on each by itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.core.errors import StructureError
from weft.core.node import Node
from weft.dynamic import sizes
from weft.dynamic.lower import evaluate, lowered
from weft.dynamic.trace import VertexProgram
from weft.dynamic.vertex import Source

ROWS, PER_ROW = 3, 2


def check_rows(f: VertexProgram) -> None:
    """Refuse a function in which a vertex's result depends on other vertices of its batch."""
    _require_rows(f)
    if f.is_random or f.at is not None:
        return  # not the same twice, or in need of other ranks
    device = next((w.device for w in f.weights.values() if w.ndim), torch.device("cpu"))
    if device.type == "meta":
        return
    given = {n: _example(s, f.inputs[s], device) for n, s in f.sources.items() if s in f.inputs}
    here, names = lowered(f), {**f.states, **f.outputs}
    with torch.no_grad(), _full_precision():
        try:
            batched = evaluate(here, {**f.weights, **given}, sizes=(ROWS, ROWS * PER_ROW), device=device)
        except (IndexError, RuntimeError) as e:  # what a trace has of rows is no such number elsewhere
            raise _mixed(f, next(iter(names.values())), f"{type(e).__name__} with another number of rows: {e}") from e
        for row in range(ROWS):
            mine = {n: _one(f.sources[n], x, row) for n, x in given.items()}
            alone = evaluate(here, {**f.weights, **mine}, sizes=(1, PER_ROW), device=device)
            for n, name in names.items():
                if not torch.allclose(batched[n][row], alone[n][0], rtol=1e-3, atol=1e-4, equal_nan=True):
                    by = float((batched[n][row].double() - alone[n][0].double()).abs().max())
                    raise _mixed(f, name, f"a difference of {by:.2g} between together and alone")


def _require_rows(f: VertexProgram) -> None:
    """Nothing that is computed of rows is without them."""
    lost, of_rows = dict[Node, str](), set(f.inputs.values())
    for n in f.program.nodes:
        if any(a in of_rows for a in n.args):
            of_rows.add(n)
        before = next((lost[a] for a in n.args if a in lost), None)
        if before is not None or (n in of_rows and not any(sizes.unit_of(size) for t in n.types for size in t.shape)):
            lost[n] = before or n.op.name
    for names in (f.states, f.outputs):
        for output, name in names.items():
            if f.program.output_names[output] in lost:
                raise _mixed(f, name, f"{lost[f.program.output_names[output]]} over the rows of all vertices")
    if any(n.op.is_number and _is_count(n.attr("value")) for n in f.program.nodes):
        raise _mixed(f, next(iter([*f.states.values(), *f.outputs.values()])), "the number of vertices or edges read as a number")


def _is_count(value: object) -> bool:
    """Whether a number is how many rows or edges there are, a multiple of that or a part of one over it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value or not math.isfinite(value):
        return False
    return any(abs(v) >= sizes.ROWS - 1 and abs(v - round(v)) < 1e-6 and sizes.unit_of(abs(round(v))) for v in (value, 1 / value))


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matmuls of few and of many rows may round differently where torch is allowed to be coarse."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _example(source: Source, node: Node, device: torch.device) -> Tensor:
    """Numbers for an input: every row different."""
    if source.role == "at":
        return torch.arange(ROWS, device=device).repeat_interleave(PER_ROW)
    shape = (ROWS * PER_ROW if source.role == "edge" else ROWS, *node.shape[1:])
    if not node.dtype.is_floating_point:
        return torch.zeros(shape, dtype=node.dtype, device=device)
    generator = torch.Generator().manual_seed(zlib.crc32(str(source).encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, node.dtype)


def _one(source: Source, value: Tensor, row: int) -> Tensor:
    """The part of an input that belongs to one vertex."""
    if source.role in ("at", "edge"):
        part = value[row * PER_ROW : (row + 1) * PER_ROW]
        return part - row if source.role == "at" else part
    return value[row : row + 1]


def _mixed(f: VertexProgram, name: str, found: str) -> StructureError:
    return StructureError(
        f"vertex function {f.name!r} mixes vertices: {name!r} of one depends on the others in its batch",
        needed="every row treated alone, so that batches may be sharded anyhow", found=found,
        try_="work along dims 1 and up; what spans vertices belongs outside, on the pushed outputs",
    )  # fmt: skip
