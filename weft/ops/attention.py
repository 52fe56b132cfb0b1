"""Scaled dot-matmul attention with grouped queries, and its backward. Batch, heads and query rows may be sharded.

Labels: b batch, g key heads, r query heads per key head, s query rows, n blocks of keys, t keys in a block, d and e features.
With blocks, every block of keys gives its own result and log-sum-exp; sharded n, and they merge by two reductions over it.
With dropout (attributes `p` and `site`, the seed as last operand) a weight is dropped by its global place in the scores; in a part of
the batch, by its place in the full tensor (`of`, and which part it is as one more operand, as in `dropout`).
Gradients take the weights from the log-sum-exp and the result, as torch's kernels do; with `written_out`, from the scores, as torch does
where it has no kernel. They differ in rounding, and in rows that see far keys alone: of these a log-sum-exp keeps no digits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch

from weft.core.errors import TypeMismatch
from weft.core.node import Attrs, Node, constant, user_line
from weft.ops.comm import all_reduce_partials
from weft.ops.fill import full, stop_gradient, zeros_like
from weft.ops.norm import need_float, to_dtype, wide, wide_dtype
from weft.ops.pointwise import exp, log, maximum, places_of, uniform_at, where
from weft.ops.reduce import amax, sum_
from weft.ops.registry import ONE, Equation, Kind, Linear, Local, Types, define
from weft.ops.shape import reshape

SCORES = ("b", "g", "r", "s", "n", "t")
Drawn: TypeAlias = tuple[torch.Tensor, ...]  # the seed and, in a part of the batch, which it is; nothing without dropout


class Where(NamedTuple):
    """Global places of query rows, of every block's keys, and of batch and heads that a rank holds; the sizes of g, r, s and keys."""

    rows: torch.Tensor
    keys: torch.Tensor
    heads: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]


# -- labels --------------------------------------------------------------------------------------------------------------------


def _labels(blocks: bool, *names: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(c for c in name if blocks or c != "n") for name in names)


def _mask_labels(types: Types, mask: int, blocks: bool) -> tuple[str, ...]:
    """Of a mask over the scores; a dim of size 1 is stretched."""
    (labels,) = _labels(blocks, "".join(SCORES))
    shape = types[mask].shape
    if len(shape) != len(labels):
        needed = f"[{', '.join(labels)}]"
        raise TypeMismatch("attention takes a mask over its scores", needed=needed, found=str(types[mask]), where=user_line())
    return tuple(ONE if n == 1 else x for n, x in zip(shape, labels, strict=True))


def _numbers(attrs: Attrs) -> int:
    """How many of the last operands say what is dropped: the seed and, in a part of the batch, which it is."""
    return 0 if not attrs.get("p") else 2 if attrs.get("of") else 1


def _seeded(types: Types, attrs: Attrs) -> tuple[Types, tuple[tuple[str, ...], ...]]:
    """The operands without the seed, and the seed's labels where there is one."""
    at = len(types) - _numbers(attrs)
    if any(t.shape or t.dtype != torch.int64 or not 0 < attrs["p"] < 1 for t in types[at:]):
        found = f"{types[-1]} and p={attrs['p']}"
        needed = "i64[], and p between 0 and 1"
        raise TypeMismatch("attention with dropout takes a seed last", needed=needed, found=found, where=user_line())
    return types[:at], ((),) * (len(types) - at)


def _forward_equation(types: Types, attrs: Attrs) -> Equation:
    types, seed = _seeded(types, attrs)
    need_float("attention", types)
    blocks = len(types[1].shape) == 5
    q, k, v, out, lse = _labels(blocks, "bgrsd", "bgntd", "bgnte", "bgrsne", "bgrsn")
    mask = (_mask_labels(types, 3, blocks),) if len(types) > 3 else ()
    return Equation((q, k, v, *mask, *seed), (out, lse), unsharded=frozenset("tde"))


def _forward_dtype(types: Types, attrs: Attrs) -> tuple[torch.dtype, torch.dtype]:
    _one_dtype(types[:3])
    return types[0].dtype, wide_dtype(types[0].dtype)


def _one_dtype(types: Types) -> None:
    if len({t.dtype for t in types}) > 1:
        found = " and ".join(str(t) for t in types)
        raise TypeMismatch("attention takes one dtype", needed="q, k and v of one dtype", found=found, try_="cast(x, dtype)", where=user_line())


def _backward_equation(first: str, results: Any) -> Any:
    """ct of the result (and of the lse, by `first`), q, k, v, result, lse, mask -> what `results` picks of dq, dk, dv, dmask."""

    def equation(types: Types, attrs: Attrs) -> Equation:
        types, seed = _seeded(types, attrs)
        at = len(first.split())
        blocks = len(types[at + 1].shape) == 5
        cts = _labels(blocks, *first.split())
        q, k, v, out, lse = _labels(blocks, "bgrsd", "bgntd", "bgnte", "bgrsne", "bgrsn")
        mask = _mask_labels(types, at + 5, blocks) if len(types) > at + 5 else ()
        ins = (*cts, q, k, v, out, lse, *((mask,) if mask else ()), *seed)
        return Equation(ins, results(q, k, v, mask), unsharded=frozenset("tde"))

    return equation


def _mask_result(mask: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"one{i}" if x == ONE else x for i, x in enumerate(mask))


# -- meaning -------------------------------------------------------------------------------------------------------------------


def _global_places(q: torch.Tensor, k: torch.Tensor) -> Where:
    n, t = k.shape[2:4]
    heads = tuple(torch.arange(size) for size in q.shape[:3])
    return Where(torch.arange(q.shape[3]), torch.arange(n * t).reshape(n, t), heads, (*q.shape[1:4], n * t))


def _local_places(ctx: Local, arg: int) -> Where:
    """Of q, operand `arg`, and k, the next one."""
    q, k = ctx.node.args[arg : arg + 2]
    t = k.shape[-2]
    blocks = ctx.positions(arg + 1, 2) if k.ndim == 5 else torch.zeros(1, dtype=torch.int64)
    heads = tuple(ctx.positions(arg, d) for d in range(3))
    return Where(ctx.positions(arg, 3), blocks[:, None] * t + torch.arange(t), heads, (*q.shape[1:4], math.prod(k.shape[2:-1])))


def _gains(at: Where, drawn: Drawn, like: torch.Tensor, attrs: Attrs) -> torch.Tensor | float:
    """[b, g, r, s, n, t]: 0 where a weight is dropped, else what makes up for it."""
    if not drawn:
        return 1.0
    seed, *part = (x.to(like.device) for x in drawn)
    index = places_of(at.heads[0], part[0], *attrs["of"][1:]) if part else at.heads[0].to(like.device)
    for place, size in zip((*at.heads[1:], at.rows), at.sizes[:3], strict=True):
        index = index[..., None] * size + place.to(like.device)
    index = index[..., None, None] * at.sizes[3] + at.keys.to(like.device)
    keep = uniform_at(index, seed, attrs.get("site", 0)) >= attrs["p"]
    return keep.to(like.dtype) / (1 - attrs["p"])


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, at: Where, attrs: Attrs) -> torch.Tensor:
    """[b, g, r, s, n, t], minus infinity where a row does not look."""
    x = torch.einsum("bgrsd,bgntd->bgrsnt", wide(q), wide(k)) * attrs["scale"]
    x = x if mask is None else x + mask.to(x.dtype)
    return x.masked_fill(~_seen(at, attrs, x.device), -math.inf)


def _seen(at: Where, attrs: Attrs, device: torch.device) -> torch.Tensor:
    """[s, n, t]: which keys a row looks at by their order."""
    rows, keys = at.rows[:, None, None].to(device) + attrs.get("offset", 0), at.keys.to(device)
    seen = torch.ones((1, *keys.shape), dtype=torch.bool, device=device)
    if attrs.get("causal"):
        seen = seen & (keys <= rows)
    if attrs.get("window"):
        seen = seen & (keys > rows - attrs["window"])
    return seen


def _blind(mask: torch.Tensor | None, at: Where, attrs: Attrs, device: torch.device) -> torch.Tensor:
    """[b, g, r, s, n]: rows that look at nothing and give 0; with infinite operands instead a row gives NaN."""
    seen = _seen(at, attrs, device)
    return ~(seen if mask is None else seen & (mask != -math.inf)).any(-1)


def _weights(x: torch.Tensor, mask: torch.Tensor | None, at: Where, attrs: Attrs) -> torch.Tensor:
    """[b, g, r, s, n, t]: a softmax over keys, 0 in a row that looks at nothing."""
    return torch.softmax(x, -1).masked_fill(_blind(mask, at, attrs, x.device).unsqueeze(-1), 0.0)


def _blocked(x: torch.Tensor | None, dim: int, rank: int) -> Any:
    """With a dim of one block where the op has none."""
    return x if x is None or x.ndim == rank else x.unsqueeze(dim)


def _extras(rest: tuple[Any, ...], attrs: Attrs) -> tuple[Any, Drawn]:
    """The mask, if there is one, and what says which weights are dropped."""
    at = len(rest) - _numbers(attrs)
    return (rest[0] if at else None), rest[at:]


def _forward(at: Where | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: tuple[Any, ...], attrs: Attrs) -> Any:
    blocks, (mask, drawn) = k.ndim == 5, _extras(rest, attrs)
    k, v, mask = _blocked(k, 2, 5), _blocked(v, 2, 5), _blocked(mask, 4, 6)
    at = at or _global_places(q, k)
    x = _scores(q, k, mask, at, attrs)
    lse = torch.logsumexp(x, -1)
    p = _weights(x, mask, at, attrs) * _gains(at, drawn, x, attrs)
    out = torch.einsum("bgrsnt,bgnte->bgrsne", p, wide(v)).to(q.dtype)
    return (out, lse) if blocks else (out.squeeze(4), lse.squeeze(4))


class Kept(NamedTuple):
    """What the backward has of the forward: operands, results, the mask and the seed of what is dropped. Every tensor with a dim of blocks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None
    drawn: Drawn


def _kept(xs: tuple[Any, ...], attrs: Attrs) -> Kept:
    (q, k, v, out, lse), (mask, drawn) = xs[:5], _extras(xs[5:], attrs)
    return Kept(q, _blocked(k, 2, 5), _blocked(v, 2, 5), _blocked(out, 4, 6), _blocked(lse, 4, 5), _blocked(mask, 4, 6), drawn)


def _score_grads(at: Where | None, do: torch.Tensor, dlse: Any, kept: Kept, attrs: Attrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that met the values, and the cotangent of the scores."""
    at = at or _global_places(kept.q, kept.k)
    x = _scores(kept.q, kept.k, kept.mask, at, attrs)
    gains = _gains(at, kept.drawn, x, attrs)
    p = _weights(x, kept.mask, at, attrs) if attrs.get("written_out") else _recompute_weights(x, kept, at, attrs)
    dp = torch.einsum("bgrsne,bgnte->bgrsnt", wide(do), wide(kept.v)) * gains
    delta = (p * dp).sum(-1) if attrs.get("written_out") else (wide(do) * wide(kept.out)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    return p * gains, p * (dp - delta.unsqueeze(-1))


def _recompute_weights(x: torch.Tensor, kept: Kept, at: Where, attrs: Attrs) -> torch.Tensor:
    """The weights from their log-sum-exp."""
    lse = kept.lse.masked_fill(_blind(kept.mask, at, attrs, x.device), 0.0)
    lse = lse.masked_fill(lse == math.inf, math.nan)  # as the softmax of a row that holds an infinity
    return torch.exp(x - lse.unsqueeze(-1))


def _to_qkv(blocks: bool, p: torch.Tensor, ds: torch.Tensor, do: torch.Tensor, kept: Kept, scale: float) -> Any:
    dq = torch.einsum("bgrsnt,bgntd->bgrsd", ds, wide(kept.k)) * scale
    dk = torch.einsum("bgrsnt,bgrsd->bgntd", ds, wide(kept.q)) * scale
    dv = torch.einsum("bgrsnt,bgrsne->bgnte", p, wide(do))
    return tuple(x.to(kept.q.dtype) for x in ((dq, dk, dv) if blocks else (dq, dk.squeeze(2), dv.squeeze(2))))


def _to_mask(blocks: bool, p: torch.Tensor, ds: torch.Tensor, do: torch.Tensor, kept: Kept, scale: float) -> Any:
    assert kept.mask is not None
    dims = [i for i, n in enumerate(kept.mask.shape) if n == 1]
    dm = (ds.sum(dims, keepdim=True) if dims else ds).to(kept.mask.dtype)
    return dm if blocks else dm.squeeze(4)


# -- the entries -----------------------------------------------------------------------------------------------------------------


def _score_flops(n: Node, q: int, each: float) -> float:
    """`each` flops per score and feature; half where the mask is causal."""
    b, g, r, s, d = n.args[q].type.layout.largest_local
    keys = math.prod(n.args[q + 1].type.layout.largest_local[2:-1])
    total = each * b * g * r * s * keys * (d + n.args[q + 2].shape[-1])
    return total / 2 if n.attr("causal") else total


def _define_backward(name: str, first: str, results: Any, finish: Any, dtype: int, linear: Any) -> Any:
    """`first` are the labels of the cotangents; `dtype` the operand whose dtype the results have."""
    cts = len(first.split())

    def run(at: Where | None, xs: tuple[Any, ...], attrs: Attrs) -> Any:
        do, dlse = _blocked(xs[0], 4, 6), _blocked(xs[1], 4, 5) if cts > 1 else None
        kept = _kept(xs[cts:], attrs)
        p, ds = _score_grads(at, do, dlse, kept, attrs)
        return finish(xs[cts + 1].ndim == 5, p, ds, do, kept, attrs["scale"])

    return define(
        name,
        kind=Kind.COMPOSITE,
        equation=_backward_equation(first, results),
        run=lambda *xs, **attrs: run(None, xs, attrs),
        local=lambda ctx, *xs, **attrs: run(_local_places(ctx, cts), xs, attrs),
        dtype=lambda types, attrs: types[dtype].dtype,
        linear=linear,
        flops=lambda n: _score_flops(n, cts, 5.0),
        attends=cts,
    )


def _qkv(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return q, k, v


BOTH = (frozenset({0, 1}),)
attention_backward = _define_backward("attention_backward", "bgrsne", _qkv, _to_qkv, 1, Linear.FIRST)
attention_lse_backward = _define_backward("attention_lse_backward", "bgrsne bgrsn", _qkv, _to_qkv, 2, BOTH)
attention_mask_backward = _define_backward(
    "attention_mask_backward", "bgrsne bgrsn", lambda q, k, v, mask: (_mask_result(mask),), _to_mask, 7, BOTH
)


def _vjp(n: Node, do: Node | None, dlse: Node | None) -> Any:
    out, lse = n
    q, k, v, *rest = n.args
    attrs = dict(n.attrs)
    do = zeros_like(out) if do is None else do
    back = attention_backward(do, q, k, v, out, lse, *rest, **attrs) if dlse is None else None
    back = attention_lse_backward(do, dlse, q, k, v, out, lse, *rest, **attrs) if back is None else back
    to_seed = (None,) * _numbers(attrs)
    if len(rest) == len(to_seed):
        return *back, *to_seed
    dlse = zeros_like(lse) if dlse is None else dlse
    return *back, attention_mask_backward(do, dlse, q, k, v, out, lse, *rest, **attrs), *to_seed


def _normal(attrs: Attrs) -> Attrs:
    return {k: v for k, v in attrs.items() if k == "scale" or v}


attention_op = define(
    "attention",
    kind=Kind.COMPOSITE,
    equation=_forward_equation,
    run=lambda q, k, v, *rest, **attrs: _forward(None, q, k, v, rest, attrs),
    local=lambda ctx, q, k, v, *rest, **attrs: _forward(_local_places(ctx, 0), q, k, v, rest, attrs),
    dtype=_forward_dtype,
    vjp=_vjp,
    normal=_normal,
    flops=lambda n: _score_flops(n, 0, 2.0),
    attends=0,
    sparse_cotangents=True,
    streams=frozenset({"t"}),  # keys may come piece by piece: partial results merge by log-sum-exp
)


# -- the functions ---------------------------------------------------------------------------------------------------------------


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    scale: float | None = None,
    window: int = 0,
    offset: int = 0,
    dropout: tuple[float, Any, int] | None = None,
    written_out: str = "",
) -> tuple[Any, Any]:
    """q [b, h, s, d], k [b, g, t, d], v [b, g, t, e], h a multiple of g -> result [b, h, s, e] and log-sum-exp [b, h, s].

    Row i sees key j where j <= i + offset if causal, and j > i + offset - window if there is a window. A mask [b, h, s, t]
    (sizes of 1 are stretched) is added to the scores or, being bool, says which keys are seen. A row that sees no key is 0.
    `dropout` is (probability, seed, site): weights are dropped after the softmax, and those left scaled up.
    `written_out`: gradients as of matmuls and a softmax, and no kernel on a "cpu" or on "any" device.
    """
    _check_shapes(q, k, v)
    (b, h, s, d), g = q.shape, k.shape[1]
    q5 = reshape(q, (b, g, h // g, s, d))
    masks = [] if mask is None else [_grouped_mask(_additive(mask, q), g, h)]
    seed, drops = ([dropout[1]], {"p": float(dropout[0]), "site": dropout[2]}) if dropout else ([], {})
    how = {"scale": _scale(scale, d), "causal": causal, "window": window, "offset": offset, "written_out": written_out, **drops}
    out, lse = attention_op(q5, k, v, *masks, *seed, **how)
    return reshape(out, (b, h, s, v.shape[-1])), reshape(lse, (b, h, s))


def attention_over_keys(
    q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, scale: float | None = None, window: int = 0, offset: int = 0
) -> tuple[Any, Any]:
    """`attention` where the keys are sharded: each rank attends to the keys it holds, and the parts merge by log-sum-exp.

    One all_reduce of a maximum and two of sums, of the size of the result; the keys never move.
    """
    _check_shapes(q, k, v)
    (b, h, s, d), g, t, e = q.shape, k.shape[1], k.shape[2], v.shape[-1]
    n = _blocks(k)
    q5, k5, v5 = reshape(q, (b, g, h // g, s, d)), reshape(k, (b, g, n, t // n, d)), reshape(v, (b, g, n, t // n, e))
    masks = [] if mask is None else [_blocked_mask(_grouped_mask(_additive(mask, q), g, h), n)]
    out, lse = attention_op(q5, k5, v5, *masks, scale=_scale(scale, d), causal=causal, window=window, offset=offset)
    out, lse = merge_blocks(out, lse)
    return reshape(out, (b, h, s, e)), reshape(lse, (b, h, s))


def merge_blocks(out: Any, lse: Any) -> tuple[Any, Any]:
    """Results [..., n, e] and log-sum-exps [..., n] of n blocks of keys, merged into those of all keys."""
    peak = all_reduce_partials(amax(stop_gradient(lse), dims=-1, keepdim=True))
    peak = maximum(peak, torch.finfo(lse.dtype).min / 2)  # a row that sees no key at all
    w = exp(lse - peak)
    total = all_reduce_partials(sum_(w, dims=-1, keepdim=True))
    parts = to_dtype(out, lse.dtype) * reshape(w, (*w.shape, 1))
    result = all_reduce_partials(sum_(parts, dims=-2)) / maximum(total, torch.finfo(lse.dtype).tiny)
    return to_dtype(result, out.dtype), reshape(peak + log(total), lse.shape[:-1])


def _check_shapes(q: Node, k: Node, v: Node) -> None:
    fits = all(x.ndim == 4 for x in (q, k, v)) and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % k.shape[1]:
        needed = "q [b, h, s, d], k [b, g, t, d], v [b, g, t, e], h a multiple of g"
        found = f"q {q.type}, k {k.type}, v {v.type}"
        raise TypeMismatch("attention does not fit its operands", needed=needed, found=found, where=user_line())


def _scale(scale: float | None, d: int) -> float:
    return 1 / math.sqrt(d) if scale is None else float(scale)


def _blocks(k: Node) -> int:
    """How many pieces the keys are split into; they must be equal."""
    n = math.prod(k.mesh.sizes[axis] for atom in k.layout.dims[2] for axis in atom.axes)
    if k.shape[2] % n:
        needed = f"a number of keys divisible by {n}, the pieces they are split into"
        repair = "pad the keys and mask them, or all_gather them"
        raise TypeMismatch("attention_over_keys shards keys evenly", needed=needed, found=str(k.type), try_=repair, where=user_line())
    return n


def _additive(mask: Node, q: Node) -> Any:
    """A bool mask as numbers to add."""
    if mask.dtype != torch.bool:
        return mask
    return where(mask, constant(0.0, q.dtype, q.mesh), full((), -math.inf, q.mesh, q.dtype))


def _grouped_mask(mask: Node, g: int, h: int) -> Any:
    """[b|1, h|1, s|1, t|1] (or fewer dims) as [b, g, r, s, t]."""
    b, heads, s, t = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if heads not in (1, h):
        raise TypeMismatch("the mask has other heads", needed=f"1 or {h} in dim 1", found=str(mask.type), where=user_line())
    return reshape(mask, (b, 1, 1, s, t) if heads == 1 else (b, g, h // g, s, t))


def _blocked_mask(mask: Node, n: int) -> Any:
    *left, t = mask.shape
    return reshape(mask, (*left, 1, 1) if t == 1 else (*left, n, t // n))


__all__ = ["attention", "attention_over_keys", "merge_blocks"]
