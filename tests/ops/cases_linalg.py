"""Products and reductions."""

from __future__ import annotations

import torch

from tests.ops.harness import Case, Input, case, distinct, index, normal
from weft.ops import leaves, linalg, low, pointwise, reduce
from weft.ops.comm import all_reduce_partials


def _einsum(equation: str, *shapes: tuple[int, ...]) -> Case:
    return case(
        f"einsum {equation}", lambda *xs: linalg.einsum(equation, *xs), lambda *xs: torch.einsum(equation, *xs),
        *(normal(*s) for s in shapes), inner=len(shapes) < 3,
    )  # fmt: skip


def _few(gen: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=gen).double()


CASES = [
    case("matmul", linalg.matmul, torch.matmul, normal(5, 4), normal(4, 3)),
    case("matmul of a batch and a matrix", linalg.matmul, torch.matmul, normal(2, 5, 4), normal(4, 3)),
    case("matmul of batches", linalg.matmul, torch.matmul, normal(4, 5, 3), normal(4, 3, 2)),
    case("matmul by itself", lambda x: x @ x, lambda x: x @ x, normal(4, 4)),
    _einsum("ik,kj->ij", (5, 4), (4, 3)),
    _einsum("bik,bjk->bji", (2, 5, 4), (2, 3, 4)),
    _einsum("ij->j", (5, 4)),
    _einsum("ij,k->ik", (5, 4), (3,)),
    _einsum("i,i->", (5,), (5,)),
    _einsum("ab,bc,ca->ab", (2, 4), (4, 3), (3, 2)),
    case(
        "product of 8-bit floats",
        lambda x, y, a, b: low.low_einsum(pointwise.cast(x, dtype="f8"), pointwise.cast(y, dtype="f8"), a, b, equation="ik,kj->ij", dtype="f64"),
        lambda x, y, a, b: (x.to(torch.float8_e4m3fn).double() @ y.to(torch.float8_e4m3fn).double()) * a * b,
        normal(5, 4), normal(4, 3), normal(5, 1), normal(1, 3), smooth=False,
    ),
    case(
        "matmul by leaves", lambda x, y: leaves.by_leaves(x, y, inner="matmul", leaves=(("i", 1), ("k", 2), ("j", 1))), torch.matmul,
        normal(4, 4), normal(4, 2), refused="shards between leaves",
    ),
    case("sum by a tree", lambda x: leaves.tree_sum(x, dims=(0, 2)), lambda x: x.sum((0, 2)), normal(4, 3, 6)),
    case(
        "product of 8-bit floats in blocks",
        lambda x, y, a, b: low.block_einsum(
            pointwise.cast(x, dtype="f8"), pointwise.cast(y, dtype="f8"), a, b, equation="iKk,jKk,iK,jK->ij", dtype="f64"
        ),
        lambda x, y, a, b: torch.einsum(
            "iKk,jKk,iK,jK->ij", x.to(torch.float8_e4m3fn).double(), y.to(torch.float8_e4m3fn).double(), a, b
        ),
        normal(4, 2, 3), normal(5, 2, 3), normal(4, 2), normal(5, 2), smooth=False,
    ),
    case("sum", lambda x: reduce.sum_(x, dims=1), lambda x: x.sum(1), normal(3, 4, 5)),
    case("sum of all", reduce.sum_, torch.sum, normal(3, 4)),
    case("sum kept", lambda x: reduce.sum_(x, dims=(0, 2), keepdim=True), lambda x: x.sum((0, 2), keepdim=True), normal(3, 4, 2)),
    case("sum of whole numbers", lambda x: reduce.sum_(x, dims=0), lambda x: x.sum(0), index(9, 3, 4), smooth=False),
    case(
        "squares about the mean",
        lambda x: reduce.squares_about(x, all_reduce_partials(reduce.mean(x, 1, keepdim=True)), dims=1) / 3.0,
        lambda x: x.var(1), normal(3, 4, 2),
    ),
    case(
        "squares about the mean of one",
        lambda x: reduce.squares_about(x, all_reduce_partials(reduce.sum_(x, dims=1, keepdim=True)) * 0.5, dims=1),
        lambda x: (x - (x * 0.5).detach()).square().sum(1), normal(3, 1, 2),
    ),
    case("var_mean", lambda x: reduce.var_mean(x, less=1, dims=1), lambda x: torch.var_mean(x, 1), normal(3, 4, 2)),
    case("logsumexp", lambda x: reduce.logsumexp(x, dims=1, keepdim=True), lambda x: x.logsumexp(1, True), normal(3, 4, 2)),
    case("max with what is no number", lambda x: reduce.amax(x, numbers=False), torch.max, distinct(3, 5)),
    case("amax", lambda x: reduce.amax(x, dims=1), lambda x: x.amax(1), distinct(3, 5)),
    case("amax kept", lambda x: reduce.amax(x, dims=(0, 1), keepdim=True), lambda x: x.amax((0, 1), keepdim=True), distinct(3, 4, 2)),
    case("amax of ties", lambda x: reduce.amax(x, dims=0), lambda x: x.amax(0), Input((4, 5), _few)),
    case("amax of one", lambda x: reduce.amax(x, dims=0), lambda x: x.amax(0), normal(1, 4), refused="of one value any sum is its own max"),
    case("amax of whole numbers", lambda x: reduce.amax(x, dims=0), lambda x: x.amax(0), index(5, 3, 4), smooth=False),
    case("amin", lambda x: reduce.amin(x, dims=0), lambda x: x.amin(0), distinct(4, 3)),
    case("mean", lambda x: reduce.mean(x, dims=1), lambda x: x.mean(1), normal(3, 5)),
]
