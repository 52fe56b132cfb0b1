"""Whether a program's groups can be run as what they are called, judged by values and not by the rules that made them.

A kernel must be able to run at one go. Stages overlap if a chunk of the first one's result decides one chunk of every later
result and nothing else: the other chunks are replaced by noise, and must not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.core.layout import chunk
from weft.core.node import Node
from weft.core.program import Group, Program
from weft.ops.registry import Kind
from weft.testing.same import MeaningChanged, close

Values = Mapping[Node, Any]
SUMS = ("all_reduce", "reduce_scatter")


def check_groups(p: Program, inputs: Mapping[str, torch.Tensor]) -> None:
    if not p.groups:
        return
    values = _all_values(p, inputs)
    for g in p.groups:
        if g.kind == "fuse":
            _check_kernel(g)
        else:
            _check_pipeline(p, g, values)


def _all_values(p: Program, inputs: Mapping[str, torch.Tensor]) -> dict[Node, Any]:
    values: dict[Node, Any] = {}
    for n in p.nodes:
        values[n] = inputs[n.attr("name")] if n.op.is_input else n.op.run(*[values[a] for a in n.args], **dict(n.attrs))
    return values


def _check_kernel(g: Group) -> None:
    comms = [n for n in g.nodes if n.op.kind is Kind.COMM]
    if len({n.attr("axis") for n in comms}) > 1:
        raise MeaningChanged(f"kernel {g.name} talks along several axes")
    tensors = [n for n in comms if n.op.name in SUMS and any(size != 1 for t in n.types for size in t.shape)]
    if len(tensors) > 1:
        raise MeaningChanged(f"kernel {g.name} sums {len(tensors)} tensors")
    if any(n.op.kind in (Kind.CONTRACT, Kind.COMPOSITE) for n in g.nodes):
        raise MeaningChanged(f"kernel {g.name} holds {', '.join(n.op.name for n in g.nodes)}")


def _check_pipeline(p: Program, g: Group, values: Values) -> None:
    first, size = g.nodes[0], g.nodes[0].types[0].shape[g.option("dim")]
    reached = {first}
    for n in g.nodes[1:]:
        if any(a in reached for a in n.args):
            reached.add(n)
    if g.nodes[-1] not in reached:
        raise MeaningChanged(f"the last stage of {g.name} does not follow from its first")
    if len(first.types) == 1 and first.dtype.is_floating_point:
        for k in range(g.option("chunks")):
            _check_chunk(g, values, chunk(size, g.option("chunks"), k))


def _check_chunk(g: Group, values: Values, span: tuple[int, int]) -> None:
    first, dim = g.nodes[0], g.option("dim")
    noisy: dict[Node, Any] = {first: _noise_outside(values[first], dim, span)}
    for n in g.nodes[1:]:
        if any(a in noisy for a in n.args):
            noisy[n] = n.op.run(*[noisy.get(a, values[a]) for a in n.args], **dict(n.attrs))
            if isinstance(noisy[n], torch.Tensor) and not _keeps_a_chunk(values[n], noisy[n], values[first].shape[dim], span):
                raise MeaningChanged(f"{n.op.name} in {g.name} mixes the chunks of dim {dim} of {first.op.name}")


def _noise_outside(x: torch.Tensor, dim: int, span: tuple[int, int]) -> torch.Tensor:
    at = torch.arange(x.shape[dim]).reshape([-1 if i == dim else 1 for i in range(x.ndim)])
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype) + x.abs() + 0.5
    return torch.where((at >= span[0]) & (at < span[1]), x, noise)


def _keeps_a_chunk(value: torch.Tensor, noisy: torch.Tensor, size: int, span: tuple[int, int]) -> bool:
    """Whether, along some dim of the chunked size, the chunk is as it was."""
    dims = [d for d in range(value.ndim) if value.shape[d] == size]
    shards = [(d, slice(*span)) for d in dims]
    return any(close(noisy.narrow(d, s.start, s.stop - s.start), value.narrow(d, s.start, s.stop - s.start), 1e-9) for d, s in shards)
