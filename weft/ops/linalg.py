"""Matmuls: matmul, and einsum for every other contraction."""

from __future__ import annotations

from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.node import Attrs, Node, user_line
from weft.ops.registry import Equation, Kind, Linear, Types, define
from weft.ops.shape import expand_like, reshape


def einsum_mod(p: int, text: str, *xs: torch.Tensor) -> torch.Tensor:
    """einsum over integers mod p < 2^31: matmuls are reduced before they are summed, so nothing overflows."""
    left, right = text.replace(" ", "").split("->")
    ins = left.split(",")
    order = list(dict.fromkeys("".join(ins)))
    total = torch.ones((), dtype=torch.int64)
    for labels, x in zip(ins, xs, strict=True):
        x = x.permute([labels.index(c) for c in order if c in labels])
        total = total * x.reshape([x.shape[[c for c in order if c in labels].index(c)] if c in labels else 1 for c in order]) % p
    gone = [i for i, c in enumerate(order) if c not in right]
    total = total.sum(gone) % p if gone else total
    kept = [c for c in order if c in right]
    return total.permute([kept.index(c) for c in right])


def einsum_equation(types: Types, attrs: Attrs) -> Equation:
    left, arrow, right = attrs["equation"].replace(" ", "").partition("->")
    ins = tuple(tuple(part) for part in left.split(","))
    if not arrow or any(len(set(x)) < len(x) for x in (*ins, right)) or not set(right) <= set(left):
        raise TypeMismatch(
            "not an einsum weft takes",
            needed="labels once per operand, and an output made of them, as 'ik,kj->ij'",
            found=repr(attrs["equation"]),
            where=user_line(),
        )
    return Equation(ins, (tuple(right),))


def _einsum_vjp(n: Node, ct: Node) -> Any:
    left, right = n.attr("equation").split("->")
    ins = left.split(",")
    return tuple(_einsum_to(k, ins, right, n, ct) for k in range(len(ins)))


def _einsum_to(k: int, ins: list[str], right: str, n: Node, ct: Node) -> Node:
    others = [x for i, x in enumerate(ins) if i != k]
    known = "".join(c for c in ins[k] if c in right or any(c in x for x in others))
    args = [a for i, a in enumerate(n.args) if i != k]
    out = einsum(",".join([right, *others]) + "->" + known, ct, *args)
    if known == ins[k]:
        return out  # type: ignore[no-any-return]
    shape = tuple(n.args[k].shape[i] if c in known else 1 for i, c in enumerate(ins[k]))
    return expand_like(reshape(out, shape), n.args[k])  # type: ignore[no-any-return]


einsum_op = define(
    "einsum",
    kind=Kind.CONTRACT,
    equation=einsum_equation,
    run=lambda *xs, equation: torch.einsum(equation, *xs),
    linear=Linear.EACH,
    vjp=_einsum_vjp,
    field=lambda p, *xs, equation: einsum_mod(p, equation, *xs),
    normal=lambda attrs: {"equation": attrs["equation"].replace(" ", "")},
)


def einsum(equation: str, *xs: Any) -> Any:
    """torch.einsum's meaning; every label may be sharded, and a sharded label that is summed leaves the result Partial."""
    return einsum_op(*xs, equation=equation)


def _letters(a: int, b: int) -> tuple[str, str, str]:
    """Labels of matmul's operands and result: a batch on the left with a plain matrix, or equal batches on both sides."""
    batch = "abcdefgh"[: a - 2]
    return batch + "ik", ("" if b == 2 else batch) + "kj", batch + "ij"


def _matmul_equation(types: Types, attrs: Attrs) -> Equation:
    a, b = (len(t.shape) for t in types)
    if a < 2 or b not in (2, a):
        raise TypeMismatch(
            "matmul takes [..., i, k] and [k, j], or equal batches",
            needed="two or more dims, and a plain matrix or the same batch on the right",
            found=f"{a} and {b} dims",
            where=user_line(),
        )
    x, y, out = _letters(a, b)
    return Equation((tuple(x), tuple(y)), (tuple(out),))


def _matmul_vjp(n: Node, ct: Node) -> Any:
    x, y = n.args
    a, b, out = _letters(x.ndim, y.ndim)
    return einsum(f"{out},{b}->{a}", ct, y), einsum(f"{a},{out}->{b}", x, ct)


def _matmul_field(p: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b, out = _letters(x.ndim, y.ndim)
    return einsum_mod(p, f"{a},{b}->{out}", x, y)


matmul = define(
    "matmul", kind=Kind.CONTRACT, equation=_matmul_equation, run=torch.matmul, linear=Linear.EACH, vjp=_matmul_vjp, field=_matmul_field
)
