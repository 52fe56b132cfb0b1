"""7. Real processes: one rank of many does the same walk, with torch.distributed as `communicate`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from .layouts import Mesh, collect, shards_of
from .meaning import compute, groups, walk
from .nodes import Node, Program
from .ops import all_gather, reduce_scatter, slice_


def on_real_ranks(p: Program, values: Mapping[str, Tensor], steps: int = 1) -> dict[str, Tensor]:
    """Each rank is a process that is given its own part, runs some steps, and hands its part of the outputs back."""
    locals_ = {name: shards_of(values[name], node.type) for name, node in p.inputs.items()}
    context = mp.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_main, args=(r, p, locals_, steps, folder, answers), daemon=True) for r in range(mesh_of(p).ranks)]
        for process in ranks:
            process.start()
        message = dict(answers.get(timeout=100) for _ in ranks)
        for process in ranks:
            process.join()
    return {name: collect([torch.from_numpy(message[r][name]) for r in range(len(ranks))], node.type) for name, node in p.outputs.items()}


def mesh_of(p: Program) -> Mesh:
    return next(iter(p.outputs.values())).type.mesh


def rank_main(rank: int, p: Program, locals_: Mapping[str, list[Tensor]], steps: int, folder: str, answers: Any) -> None:
    torch.set_num_threads(1)  # the parent's threads were not forked with it
    m = mesh_of(p)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=m.ranks)
    along = {axis: [(g, dist.new_group(g)) for g in groups(m, axis)] for axis, _ in m.axes}
    mine = {axis: next((g.index(rank), group) for g, group in found if rank in g) for axis, found in along.items()}
    values = {name: parts[rank] for name, parts in locals_.items()}
    for _ in range(steps):
        out = walk(p, values, compute, lambda node, x: collective(node, x, *mine[node.attrs[0]]))
        values |= {name: x for name, x in out.items() if name in values}
    answers.put((rank, {name: x.numpy() for name, x in out.items()}))
    dist.barrier()
    dist.destroy_process_group()


def collective(node: Node, x: Tensor, index: int, group: Any) -> Tensor:
    """What `exchange` says, between processes."""
    axis, *dim = node.attrs
    n = node.type.mesh.size(axis)
    if node.op is slice_:
        return x.chunk(n, *dim)[index].contiguous()
    if node.op is all_gather:
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, *dim)
    if node.op is reduce_scatter:
        terms = [c.contiguous() for c in x.chunk(n, *dim)]
        dist.reduce_scatter(out := torch.empty_like(terms[0]), terms, group=group)
        return out
    dist.all_reduce(out := x.clone(), group=group)
    return out
