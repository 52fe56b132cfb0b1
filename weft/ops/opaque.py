"""Torch ops without an entry of their own: kept in one piece, or sharded in any way where torch is elementwise."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.layout import Layout, Mesh, O, Placement
from weft.core.node import Attrs, Node, Type, dtype_of, user_line
from weft.ops.pointwise import elementwise, fit, spread
from weft.ops.registry import Kind, Linear, Types, define

# -- a torch op without an entry: kept in one piece, never sharded -----------------------------------------------------------------


def _torch_op(target: str) -> Any:
    """`aten.cdist.default` as the callable it names."""
    return functools.reduce(getattr, target.split("."), torch.ops)


def _fill(template: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """The op's arguments: ("tensor", i) is the i-th operand, ("dtype", name) a dtype, ("float", text) inf or nan; lists go down."""
    if isinstance(template, tuple) and len(template) == 2 and template[0] in _FILLS:
        return _FILLS[template[0]](template[1], tensors)
    if isinstance(template, tuple):
        return [_fill(x, tensors) for x in template]
    return template


_FILLS: dict[Any, Any] = {
    "tensor": lambda i, tensors: tensors[i],
    "pairs": lambda i, tensors: torch.view_as_complex(tensors[i].contiguous()),
    "dtype": lambda name, _: getattr(torch, name) if name.startswith("complex") else dtype_of(name),
    "float": lambda text, _: float(text),
    "complex": lambda parts, _: complex(*parts),
}


def _call(tensors: tuple[torch.Tensor, ...], target: str, call: Any, keys: Any) -> tuple[Any, ...]:
    given = {k: _fill(v, tensors) for k, v in keys}
    out = _torch_op(target)(*[_fill(a, tensors) for a in call], **given)
    found = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    return tuple(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found)


APART = (  # torch's ops that take what stands along the first dim each by itself, and from how many dims on
    (1, r"_?upsample_\w+|grid_sampler_[23]d|im2col|col2im|_?adaptive_(avg|max)_pool[23]d|(reflection|replication)_pad[123]d|(avg|max)_pool[23]d\w*"),
    (3, r"_?linalg_(svd|qr|eigh|cholesky_ex|inv_ex|det|slogdet|solve_ex|lu_factor_ex|matrix_exp|solve_triangular|householder_product)|_cdist_forward"),
)


def independent_operands(node: Node) -> int:
    """How many first operands an opaque op is known to read so that along their first dim, and its results', each stands by itself."""
    target = str(node.attr("target"))
    name, read = target.split(".")[1], node.args[:1] if target.startswith("aten.convolution.") else node.args
    shapes = [a.shape for a in read] + [shape for _, shape in node.attr("gives")]
    if not read or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        return 0
    same_rank = torch.Tag.pointwise in _torch_op(target).tags and len({len(shape) for shape in shapes}) == 1
    known = name == "convolution" or any(re.fullmatch(names, name) and min(len(a.shape) for a in read) >= n for n, names in APART)
    return len(read) if same_rank or known else 0


def _opaque_infer(types: Types, attrs: Attrs) -> Types:
    at = _owner_ranks(types, attrs["target"])
    mesh = types[0].mesh if types else Mesh(**dict(attrs["mesh"]))
    return tuple(Type(dtype_of(d), Layout.of(mesh, shape, at)) for d, shape in attrs["gives"])


def _owner_ranks(types: Types, target: str) -> dict[str, Placement]:
    """The one rank of each axis that has the operands, where not all have them; none may be sharded or partial."""
    at: dict[str, Placement] = {}
    for k, t in enumerate(types):
        placements = dict(t.layout.partials)
        if t.layout != Layout.of(t.mesh, t.shape, {a: p for a, p in placements.items() if isinstance(p, O) and at.setdefault(a, p) == p}):
            raise TypeMismatch(
                f"weft does not know {target}, so it is never sharded",
                needed=f"operand {k} replicated on every rank, or on the one that has the others",
                found=str(t),
                try_="gather it first, or register a lowering of the op",
                where=user_line(),
            )
    return at


def _opaque_run(*tensors: torch.Tensor, target: str, call: Any, keys: Any, gives: Any, **_: Any) -> Any:
    """Some torch leaves a summed dim of 1 where no gradient is wanted; what nobody reads may be of another size than it said."""
    found = _call(tuple(t.contiguous() for t in tensors), target, call, keys)
    out = tuple(x.reshape(shape) if x.numel() == math.prod(shape) else x for x, (_, shape) in zip(found, gives, strict=True))
    return out[0] if len(gives) == 1 else out


def _opaque_vjp(n: Node, *cts: Node | None) -> Any:
    """One node that runs torch's own gradient; only float operands get one, of those that may want it."""
    floats = tuple(i for i, a in enumerate(n.args) if a.dtype.is_floating_point and i in n.attr("moves", range(len(n.args))))
    there = tuple(i for i, ct in enumerate(cts) if ct is not None)
    if not floats or not there:
        return (None,) * len(n.args)
    grads = opaque_grad(*n.args, *[cts[i] for i in there], **dict(n.attrs), of=there, to=floats, operands=len(n.args))
    items = [grads] if len(floats) == 1 else list(grads)
    return tuple(items[floats.index(i)] if i in floats else None for i in range(len(n.args)))


opaque = define(
    "opaque",
    kind=Kind.COMPOSITE,
    infer=_opaque_infer,
    run=_opaque_run,
    vjp=_opaque_vjp,
    sparse_cotangents=True,
    doc="A torch op without an entry: correct, and replicated on every rank.",
)


def _opaque_grad_infer(types: Types, attrs: Attrs) -> Types:
    at = _owner_ranks(types, attrs["target"])
    return tuple(Type(types[i].dtype, Layout.of(types[i].mesh, types[i].shape, at)) for i in attrs["to"])


def _opaque_grad_run(
    *tensors: torch.Tensor, target: str, call: Any, keys: Any, of: Any, to: Any, operands: int, **_: Any
) -> Any:
    with torch.enable_grad():
        args = tuple(t.detach().contiguous().requires_grad_(i in to) for i, t in enumerate(tensors[:operands]))
        out = _call(args, target, call, keys)
        wrt = [args[i] for i in to]
        return _one_or_all(_filled(_grads([out[i] for i in of], wrt, tensors[operands:]), wrt))


def _grads(outs: Sequence[torch.Tensor], wrt: Sequence[torch.Tensor], cts: Sequence[torch.Tensor], **how: Any) -> Sequence[torch.Tensor | None]:
    """Torch's gradients; None where one does not depend on what it is asked of."""
    kept = [(o, ct) for o, ct in zip(outs, cts, strict=True) if o.requires_grad]
    return torch.autograd.grad([o for o, _ in kept], wrt, [c for _, c in kept], allow_unused=True, **how) if kept else [None] * len(wrt)


def _filled(found: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, like, strict=True)]


def _one_or_all(found: list[torch.Tensor]) -> Any:
    return found[0] if len(found) == 1 else tuple(found)


def _opaque_grad_vjp(n: Node, *backs: Node) -> Any:
    """Torch's own gradient of its gradient, in the operands that get one and in the cotangents."""
    out = opaque_grad_again(*n.args, *backs, **dict(n.attrs))
    items, to, operands = iter(out), n.attr("to"), n.attr("operands")
    return tuple(next(items) if i in to or i >= operands else None for i in range(len(n.args)))


opaque_grad = define(
    "opaque_grad",
    kind=Kind.COMPOSITE,
    infer=_opaque_grad_infer,
    run=_opaque_grad_run,
    vjp=_opaque_grad_vjp,
    doc="The gradient of an opaque op.",
)


def _recomputed_infer(types: Types, attrs: Attrs) -> Types:
    at = _owner_ranks(types, attrs["target"])
    places = (*attrs["to"], *range(attrs["operands"], attrs["operands"] + len(attrs["of"])))
    return tuple(Type(types[i].dtype, Layout.of(types[i].mesh, types[i].shape, at)) for i in places)


def _recomputed_run(*tensors: torch.Tensor, target: str, call: Any, keys: Any, of: Any, to: Any, operands: int, **_: Any) -> Any:
    given, backs = tensors[: operands + len(of)], tensors[operands + len(of) :]
    with torch.enable_grad():
        made = [t.detach().contiguous().requires_grad_(i in to or i >= operands) for i, t in enumerate(given)]
        out = _call(tuple(made[:operands]), target, call, keys)
        wrt, cts = [made[i] for i in to], made[operands:]
        first = _grads([out[i] for i in of], wrt, cts, create_graph=True)
        kept = [(g, back) for g, back in zip(first, backs, strict=True) if g is not None]
        return tuple(_filled(_grads([g for g, _ in kept], [*wrt, *cts], [b for _, b in kept]), [*wrt, *cts]))


opaque_grad_again = define(
    "opaque_grad_again", kind=Kind.COMPOSITE, infer=_recomputed_infer, run=_recomputed_run, doc="The gradient of the gradient of an opaque op."
)


# -- a torch op on each element: torch's own function and derivative, sharded in any way -----------------------------------------


def _given_dtype(types: Types, attrs: Attrs) -> torch.dtype:
    return dtype_of(attrs["gives"])


def _each_vjp(n: Node, ct: Node) -> Any:
    """Torch's formula, by the op that torch has for it or by its autograd, for every float operand."""
    ct, attrs = spread(ct, n), dict(n.attrs)
    back = BACKWARDS.get(attrs["target"])
    if back is not None:
        return back(n, ct)
    return tuple(
        fit(each_slope(ct, *n.args, **attrs, to=(i,)), a) if a.dtype.is_floating_point else None
        for i, a in enumerate(n.args)
    )


each = define(
    "each",
    kind=Kind.POINTWISE,
    equation=elementwise,
    run=lambda *tensors, target, call, keys, gives: _call(tensors, target, call, keys)[0],
    dtype=_given_dtype,
    vjp=_each_vjp,
    doc="a torch op that is elementwise",
    approximated=True,
)


def _slope_run(ct: torch.Tensor, *tensors: torch.Tensor, target: str, call: Any, keys: Any, to: tuple[int, ...], **_: Any) -> torch.Tensor:
    """ct times the derivative in one operand after another. Operands are stretched first: a gradient at each element, not yet summed."""
    shape = torch.broadcast_shapes(ct.shape, *(t.shape for t in tensors))
    with torch.enable_grad():
        made = tuple(t.detach().expand(shape).requires_grad_() if i in to else t for i, t in enumerate(tensors))
        value = _call(made, target, call, keys)[0].expand(shape)
        for at, i in enumerate(to):
            value = _derivative(value, made[i], None if at + 1 < len(to) else ct.expand(shape), create_graph=at + 1 < len(to))
    return value


def _derivative(y: torch.Tensor, x: torch.Tensor, ct: torch.Tensor | None, create_graph: bool) -> torch.Tensor:
    if not y.requires_grad:
        return torch.zeros_like(x)
    ct = torch.ones_like(y) if ct is None else ct
    (grad,) = torch.autograd.grad(y, x, ct, allow_unused=True, create_graph=create_graph)
    return torch.zeros_like(x) if grad is None else grad


def _slope_vjp(n: Node, ct: Node) -> Any:
    """In ct it is the same op; in an operand, the derivative in that one as well."""
    back, attrs = spread(ct, n), dict(n.attrs)
    given = n.args[0]
    slopes = [
        fit(each_slope(back * given, *n.args[1:], **{**attrs, "to": (*attrs["to"], i)}), a) if a.dtype.is_floating_point else None
        for i, a in enumerate(n.args[1:])
    ]
    return fit(each_slope(back, *n.args[1:], **attrs), given), *slopes


each_slope = define(
    "each_slope",
    kind=Kind.POINTWISE,
    equation=elementwise,
    run=_slope_run,
    dtype=_given_dtype,
    linear=Linear.FIRST,
    vjp=_slope_vjp,
    doc="(ct, operands) -> ct times torch's own derivative in the operands `to`",
    approximated=True,
)


def _backward_vjp(n: Node, ct: Node) -> Any:
    """Linear in ct; in x, the forward op's second derivative."""
    back, (given, *args), attrs = spread(ct, n), n.args, dict(n.attr("of"))
    twice = each_slope(back * given, *args, **{**attrs, "to": (0, 0)})
    return fit(each_backward(back, *args, **dict(n.attrs)), given), fit(twice, args[0]), *[None] * (len(args) - 1)


each_backward = define(
    "each_backward",
    kind=Kind.POINTWISE,
    equation=elementwise,
    run=lambda *tensors, target, call, gives, of: _call(tensors, target, call, ())[0],
    dtype=_given_dtype,
    linear=Linear.FIRST,
    vjp=_backward_vjp,
    doc="(ct, operands) -> torch's own backward op of one that is elementwise",
    approximated=True,
)


def _float(x: float) -> float:
    """As torch rounds a number that it keeps in 4 bytes."""
    return float(torch.tensor(x, dtype=torch.float32))


def _by_op(target: str, arguments: Any) -> Any:
    """A gradient in the first operand alone, by a backward op: `arguments(call)` puts ct, 0, and x, 1, among the numbers."""

    def back(n: Node, ct: Node) -> Any:
        numbers = n.attr("call")[1:]
        call = arguments(("tensor", 0), ("tensor", 1), *numbers)
        return (each_backward(ct, *n.args, target=f"aten.{target}", call=tuple(call), gives=n.attr("gives"), of=n.attrs),)

    return back


BACKWARDS: dict[str, Any] = {
    "aten.elu.default": _by_op("elu_backward.default", lambda ct, x, alpha=1.0, scale=1.0, inner=1.0: (ct, alpha, scale, inner, False, x)),
    "aten.celu.default": _by_op("elu_backward.default", lambda ct, x, alpha=1.0: (ct, alpha, 1.0, 1.0 / _float(alpha), False, x)),
    "aten.softplus.default": _by_op("softplus_backward.default", lambda ct, x, beta=1.0, threshold=20.0: (ct, x, beta, threshold)),
    "aten.hardtanh.default": _by_op("hardtanh_backward.default", lambda ct, x, lo=-1.0, hi=1.0: (ct, x, lo, hi)),
    "aten.hardswish.default": _by_op("hardswish_backward.default", lambda ct, x: (ct, x)),
    "aten.hardsigmoid.default": _by_op("hardsigmoid_backward.default", lambda ct, x: (ct, x)),
    "aten.mish.default": _by_op("mish_backward.default", lambda ct, x: (ct, x)),
    "aten.leaky_relu.default": _by_op("leaky_relu_backward.default", lambda ct, x, slope=0.01: (ct, x, slope, False)),
    "aten.threshold.default": _by_op("threshold_backward.default", lambda ct, x, least, value: (ct, x, least)),
    "aten.hardshrink.default": _by_op("hardshrink_backward.default", lambda ct, x, limit=0.5: (ct, x, limit)),
    "aten.softshrink.default": _by_op("softshrink_backward.default", lambda ct, x, limit=0.5: (ct, x, limit)),
}
