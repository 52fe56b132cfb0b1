"""Matmuls: matmul, linear, einsum, and their ATen forms."""

from __future__ import annotations

import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.node import Node
from weft.frontend.capture.aten.pointwise import promoted
from weft.frontend.capture.handlers import aten, function, to_dtype
from weft.frontend.capture.patterns import improved
from weft.frontend.capture.precision import lowered
from weft.frontend.capture.recorder import Recorder
from weft.ops import pointwise as w
from weft.ops.linalg import einsum, matmul
from weft.ops.shape import reshape


@aten("mm", "bmm")
def _mm(r: Recorder, a: Node, b: Node, *_: Any) -> Node:
    return matmul(a, b)


@aten("addmm", "baddbmm")
def _addmm(r: Recorder, c: Node, a: Node, b: Node, beta: float = 1, alpha: float = 1) -> Node:
    dtype = a.dtype
    if (alpha, beta) != (1, 1) and dtype.itemsize < 4 and not any(map(r.moves, (a, b, c))):  # torch rounds the scaled sum once, as Muon has it
        a, b, c = (to_dtype(x, torch.float32) for x in (a, b, c))
    out = matmul(a, b)
    out = out if alpha == 1 else w.mul(out, float(alpha))
    return to_dtype(w.add(out, c if beta == 1 else w.mul(c, float(beta))), dtype)


@aten("mv")
def _mv(r: Recorder, a: Node, b: Node) -> Node:
    return einsum("ik,k->i", a, b)


@aten("dot", "vdot")
def _dot(r: Recorder, a: Node, b: Node) -> Node:
    return einsum("k,k->", a, b)


@aten("outer", "ger")
def _outer(r: Recorder, a: Node, b: Node) -> Node:
    return einsum("i,j->ij", a, b)


@function(F.linear)
def linear(r: Recorder, x: Node, weight: Node, bias: Node | None = None) -> Node:
    """x @ weight.T + bias, the transpose kept out of the program."""
    x, weight, bias = lowered(r, x, weight, bias)
    rows = "abcdefgh"[: x.ndim - 1]
    y = einsum(f"{rows}k,nk->{rows}n" if weight.ndim == 2 else f"{rows}k,k->{rows}", x, weight)
    return y if bias is None else w.add(y, bias)


@function(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.mm, torch.Tensor.mm)
def _matmul(r: Recorder, a: Node, b: Node, **more: Any) -> Node:
    if more:
        return NotImplemented
    a, b = lowered(r, a, b)
    if a.ndim >= 2 and (b.ndim == 2 or (a.ndim == b.ndim and a.shape[:-2] == b.shape[:-2])):
        return matmul(a, b)
    return _contract(a, b)


def _contract(a: Node, b: Node) -> Node:
    """matmul with vectors and stretched batches: one einsum over the batch dims each operand really has."""
    cores = "ik" if a.ndim > 1 else "k", "kj" if b.ndim > 1 else "k"
    ranks = a.ndim - len(cores[0]), b.ndim - len(cores[1])
    letters = string.ascii_uppercase[: max(ranks)]
    (x, left), (y, right) = (_real_batch(v, letters, core) for v, core in zip((a, b), cores, strict=True))
    batch = [c for c in letters if c in left or c in right]
    rest = cores[0][:-1] + cores[1][1:]
    out = einsum(f"{left},{right}->{''.join(batch)}{rest}", x, y)
    sizes = torch.broadcast_shapes(a.shape[: ranks[0]], b.shape[: ranks[1]])
    return reshape(out, (*sizes, *out.shape[len(batch) :]))


def _real_batch(x: Node, letters: str, core: str) -> tuple[Node, str]:
    """The operand without batch dims of size 1, and its labels."""
    rank = x.ndim - len(core)
    kept = [i for i in range(rank) if x.shape[i] != 1]
    labels = letters[len(letters) - rank :]
    return reshape(x, (*(x.shape[i] for i in kept), *x.shape[rank:])), "".join(labels[i] for i in kept) + core


@function(F.bilinear)
def _bilinear(r: Recorder, x: Node, y: Node, weight: Node, bias: Node | None = None) -> Node:
    x, y, weight, bias = lowered(r, x, y, weight, bias)
    rows = "abcdefgh"[: x.ndim - 1]
    out = einsum(f"{rows}nj,{rows}j->{rows}n", einsum(f"{rows}i,nij->{rows}nj", x, weight), y)  # in torch's order: infinities meet as there
    return out if bias is None else w.add(out, bias)


@function(torch.cov, Tensor.cov, tensors=True)
def _cov(r: Recorder, x: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """Torch's formula for what has no weights, without the check that there are enough numbers."""
    if fweights is not None or aweights is not None or x.ndim > 2 or not x.is_floating_point():
        return torch.cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    off = rows - rows.mean(1, keepdim=True)
    return (off @ off.t() / max(rows.shape[1] - correction, 0)).squeeze()


@function(torch.corrcoef, Tensor.corrcoef, tensors=True)
def _corrcoef(r: Recorder, x: Tensor) -> Tensor:
    c = _cov(r, x)
    if not c.ndim:
        return c / c
    size = c.diagonal().sqrt()
    return (c / size[:, None] / size[None]).clip(-1, 1)


@function(torch.einsum)
def _einsum(r: Recorder, equation: str, *operands: Any) -> Node:
    """A plain einsum stays one op; ellipses and repeated labels go down to ATen."""
    xs = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    if not isinstance(equation, str):
        return NotImplemented
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    parts = left.split(",")
    if "." in text or any(len(set(p)) < len(p) for p in parts):
        return NotImplemented
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    return improved(r, einsum(f"{left}->{right}", *lowered(r, *promoted(r, *xs))))
