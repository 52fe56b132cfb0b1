"""A contraction of two operands as the torch matmul that needs no copy: linear, mm or a batched matmul."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.core.node import Node
from weft.ops.low import low_einsum
from weft.ops.registry import Kind, equation_of


@dataclass(frozen=True)
class Labels:
    """The labels of a contraction: in all three, only left, only right, summed."""

    batch: str
    left: str
    right: str
    summed: str


def _labels(a: str, b: str, out: str) -> Labels | None:
    """None where a label stands in one operand alone and is summed, where nothing is, or where an operand keeps nothing of its own."""
    found = Labels(
        "".join(c for c in a if c in b and c in out), "".join(c for c in a if c not in b),
        "".join(c for c in b if c not in a), "".join(c for c in a if c in b and c not in out),
    )  # fmt: skip
    kept = found.left and found.right and all(c in out for c in found.left + found.right)
    return found if found.summed and kept else None


def matmul_text(n: Node, args: Sequence[str], at: Mapping[str, int]) -> str | None:
    """The matmul as an expression over the operands' names; None where only einsum will do."""
    found = _read(n, at)
    if found is None:
        return None
    a, b, out, labels, sizes = found
    if _is_scaled(n):
        pair = _matrices(*found, args)
        scales = args[2:] if out == labels.left + labels.right else args[:1:-1]
        how = f"{n.dtype}, fast=True" if n.attr("fast") else str(n.dtype)
        return f"low_matmul({', '.join([*pair, *scales])}, {how}).reshape({tuple(sizes[c] for c in out)})" if pair else None
    return _batched(a, b, out, labels, args) if labels.batch else _plain(a, b, out, labels, sizes, args)


def matrices(n: Node, args: Sequence[str], at: Mapping[str, int]) -> tuple[str, str] | None:
    """The operands as two matrices whose matmul is the result as it lies; None where it is no matrix."""
    found = _read(n, at)
    if found is None or found[3].batch or n.ndim != 2 or _is_scaled(n):
        return None
    return _matrices(*found, args)


def _read(n: Node, at: Mapping[str, int]) -> tuple[str, str, str, Labels, dict[str, int]] | None:
    """The letters of a contraction of two operands, what each is, and its size on the rank."""
    eq = equation_of(n)
    if n.op.kind is not Kind.CONTRACT or len(n.args) != 2 and not _is_scaled(n) or eq is None:
        return None
    short = {label: chr(97 + i) for i, label in enumerate(dict.fromkeys(x for labels in eq.ins[:2] for x in labels))}
    a, b, out = ("".join(short[x] for x in labels) for labels in (*eq.ins[:2], eq.outs[0]))
    found = _labels(a, b, out)
    if found is None:
        return None
    sizes: dict[str, int] = {}
    for text, arg in zip((a, b), n.args[:2], strict=True):
        sizes |= dict(zip(text, arg.type.layout.local_shape(at), strict=True))
    return a, b, out, found, sizes


def _is_scaled(n: Node) -> bool:
    """Of 8-bit floats, with the scales of both as two more operands."""
    return n.op is low_einsum


def is_linear(n: Node) -> bool:
    """x [..., k] times a weight [n, k], giving [..., n]."""
    eq = equation_of(n)
    if n.op.kind is not Kind.CONTRACT or len(n.args) != 2 or eq is None or not eq.ins[0]:
        return False
    (*rows, k), w, out = eq.ins[0], eq.ins[1], eq.outs[0]
    return len(w) == 2 and w[1] == k and k not in out and out == (*rows, w[0]) and len(rows) > 0


def _plain(a: str, b: str, out: str, f: Labels, sizes: Mapping[str, int], args: Sequence[str]) -> str | None:
    if a == f.left + f.summed and out == f.left + f.right and len(f.summed) == len(f.right) == 1 and f.left:
        if b == f.right + f.summed:
            return f"torch.nn.functional.linear({args[0]}, {args[1]})"
        return f"{args[0]} @ {args[1]}"
    pair = _matrices(a, b, out, f, sizes, args)
    text = " @ ".join(pair) if pair else None
    return text if text is None or len(out) == 2 else f"({text}).reshape({tuple(sizes[c] for c in out)})"


def _matrices(a: str, b: str, out: str, f: Labels, sizes: Mapping[str, int], args: Sequence[str]) -> tuple[str, str] | None:
    m, n, k = (math.prod(sizes[c] for c in part) for part in (f.left, f.right, f.summed))
    left = _matrix(args[0], a, f.left, f.summed, m, k)
    right = _matrix(args[1], b, f.summed, f.right, k, n)
    if left is None or right is None or out not in (f.left + f.right, f.right + f.left):
        return None
    if out == f.left + f.right:
        return left, right
    # what can be had as a matrix can be had turned
    return _matrix(args[1], b, f.right, f.summed, n, k), _matrix(args[0], a, f.summed, f.left, k, m)  # type: ignore[return-value]


def _matrix(x: str, labels: str, rows: str, columns: str, r: int, c: int) -> str | None:
    """The operand as a matrix [rows, columns], turned if it lies the other way round."""
    if labels == rows + columns:
        return x if len(labels) == 2 else f"{x}.reshape({r}, {c})"
    if labels == columns + rows:
        return f"{x}.t()" if len(labels) == 2 else f"{x}.reshape({c}, {r}).t()"
    return None


def _batched(a: str, b: str, out: str, f: Labels, args: Sequence[str]) -> str | None:
    m, n, k, batch = f.left, f.right, f.summed, f.batch
    if max(len(m), len(n), len(k)) > 1 or not (m and n) or out != batch + m + n:
        return None
    left = {batch + m + k: args[0], batch + k + m: f"{args[0]}.mT"}.get(a)
    right = {batch + k + n: args[1], batch + n + k: f"{args[1]}.mT"}.get(b)
    return f"{left} @ {right}" if left and right else None
