"""Packed documents split by work: rows of as many tokens differ in flops, since a token sees its own document alone.

A document of l tokens takes a * l + b * l * l flops, a and b being what the captured step does for a token and for a pair of tokens that see each other.
The samples of a batch are put in an order whose halves, their halves and so on have nearly equal flops; so have ranks and micro-batches, which
take stretches of it. The batch is the same set of samples under every plan, and so is their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from weft.api.program_facts import model_flops
from weft.core.errors import RuntimeFault
from weft.core.program import Program
from weft.ops.registry import flops


def work_of(program: Program, samples: Sequence[Iterable[int]], count: int) -> Tensor:
    """Flops of every sample, given the lengths of its documents."""
    if len(samples) != count:
        raise RuntimeFault("documents= has other samples than the data set", needed=f"the lengths of the documents of {count} samples", found=str(len(samples)))
    forward = [n for n in program.nodes if n.op.attends == 0]
    if not forward:
        raise RuntimeFault("documents= needs attention", needed="a model whose tokens see each other", found=f"no attention in {program.name}")
    rows, _, _, length, _ = forward[0].args[0].shape
    attention = [(flops(n) / (rows * length * length), int(n.attr("window") or 0)) for n in program.nodes if n.op.attends is not None]
    a = model_flops(program) / (rows * length) - sum(b for b, _ in attention) * length
    return torch.tensor([sum(a * n + sum(b * _seen(n, window) for b, window in attention) for n in map(int, documents)) for documents in samples])


def _seen(n: int, window: int) -> int:
    """Twice the pairs of tokens of a document of which the later sees the earlier, no further back than the window."""
    return n * n if not window or n <= window else 2 * window * n - window * window


def balanced(work: Tensor) -> Tensor:
    """An order of samples in which halves, and their halves, have nearly equal work: the largest first, each to the half with least to do that has room."""
    return torch.tensor(_halved(torch.argsort(work, descending=True, stable=True).tolist(), work.tolist()), dtype=torch.int64)


def _halved(falling: list[int], work: Sequence[float]) -> list[int]:
    if len(falling) < 2:
        return falling
    halves: tuple[list[int], list[int]] = ([], [])
    room, done = [(len(falling) + 1) // 2, len(falling) // 2], [0.0, 0.0]
    for i in falling:
        at = min((h for h in (0, 1) if len(halves[h]) < room[h]), key=lambda h: done[h])
        halves[at].append(i)
        done[at] += work[i]
    return [*_halved(halves[0], work), *_halved(halves[1], work)]
