"""Ops that only captured programs need: rotary tables, random sources, and torch ops weft has no entry for."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.layout import Layout, Mesh, O, Placement
from weft.core.node import Attrs, Node, Type, dtype_of, user_line
from weft.ops.pointwise import elementwise, fit, uniform_at
from weft.ops.registry import Equation, Kind, Linear, Types, define

# -- random numbers, each a function of (seed, site, global index) ------------------------------------------------------


def _random_infer(types: Types, attrs: Attrs) -> Type:
    (seed,) = types
    return Type(dtype_of(attrs["dtype"]), Layout.of(seed.mesh, attrs["shape"], dict(seed.layout.held)))


def _index(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(functools.reduce(operator.mul, shape, 1)).reshape(shape)


def _uniform(seed: torch.Tensor, shape: tuple[int, ...], dtype: str, site: int) -> torch.Tensor:
    return uniform_at(_index(shape), seed, site).to(dtype_of(dtype))


def _normal(seed: torch.Tensor, shape: tuple[int, ...], dtype: str, site: int) -> torch.Tensor:
    """Box-Muller on two streams of the same site."""
    at = _index(shape)
    radius = torch.sqrt(-2 * torch.log1p(-uniform_at(2 * at, seed, site)))
    return (radius * torch.cos(2 * torch.pi * uniform_at(2 * at + 1, seed, site))).to(dtype_of(dtype))


uniform = define("uniform", kind=Kind.SOURCE, infer=_random_infer, run=_uniform, vjp=lambda n, ct: (None,))
normal = define("normal", kind=Kind.SOURCE, infer=_random_infer, run=_normal, vjp=lambda n, ct: (None,))


# -- a torch op without an entry: kept whole, never cut -----------------------------------------------------------------


def _torch_op(target: str) -> Any:
    """`aten.cdist.default` as the callable it names."""
    return functools.reduce(getattr, target.split("."), torch.ops)


def _fill(template: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """The op's arguments: ("tensor", i) is the i-th operand, ("dtype", name) a dtype, lists and tuples go down."""
    if isinstance(template, tuple) and len(template) == 2 and template[0] == "tensor":
        return tensors[template[1]]
    if isinstance(template, tuple) and len(template) == 2 and template[0] == "pairs":
        return torch.view_as_complex(tensors[template[1]].contiguous())
    if isinstance(template, tuple) and len(template) == 3 and template[0] == "complex":
        return complex(*template[1:])
    if isinstance(template, tuple) and len(template) == 2 and template[0] == "dtype":
        return getattr(torch, template[1]) if template[1].startswith("complex") else dtype_of(template[1])
    if isinstance(template, tuple):
        return [_fill(x, tensors) for x in template]
    return template


def _call(tensors: tuple[torch.Tensor, ...], target: str, call: Any, keys: Any) -> tuple[Any, ...]:
    given = {k: _fill(v, tensors) for k, v in keys}
    out = _torch_op(target)(*[_fill(a, tensors) for a in call], **given)
    found = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    return tuple(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found)


def _opaque_infer(types: Types, attrs: Attrs) -> Types:
    at = _where_whole(types, attrs["target"])
    mesh = types[0].mesh if types else Mesh(**dict(attrs["mesh"]))
    return tuple(Type(dtype_of(d), Layout.of(mesh, shape, at)) for d, shape in attrs["gives"])


def _where_whole(types: Types, target: str) -> dict[str, Placement]:
    """The one rank of each axis that has the operands, where not all have them; none may be cut or pending."""
    at: dict[str, Placement] = {}
    for k, t in enumerate(types):
        held = dict(t.layout.held)
        if t.layout != Layout.of(t.mesh, t.shape, {a: p for a, p in held.items() if isinstance(p, O) and at.setdefault(a, p) == p}):
            raise TypeMismatch(
                f"weft does not know {target}, so it is never cut",
                needed=f"operand {k} whole on every rank, or on the one that has the others",
                found=str(t),
                try_="gather it first, or teach weft the op",
                where=user_line(),
            )
    return at


def _opaque_run(*tensors: torch.Tensor, target: str, call: Any, keys: Any, gives: Any, **_: Any) -> Any:
    out = _call(tensors, target, call, keys)
    return out[0] if len(gives) == 1 else out


def _opaque_vjp(n: Node, *cts: Node | None) -> Any:
    """One node that runs torch's own gradient; only float operands get one."""
    floats = tuple(i for i, a in enumerate(n.args) if a.dtype.is_floating_point)
    there = tuple(i for i, ct in enumerate(cts) if ct is not None)
    if not floats or not there:
        return (None,) * len(n.args)
    grads = opaque_grad(*n.args, *[cts[i] for i in there], **dict(n.attrs), of=there, to=floats, operands=len(n.args))
    items = [grads] if len(floats) == 1 else list(grads)
    return tuple(items[floats.index(i)] if i in floats else None for i in range(len(n.args)))


opaque = define(
    "opaque",
    kind=Kind.WHOLE,
    infer=_opaque_infer,
    run=_opaque_run,
    vjp=_opaque_vjp,
    sparse_cotangents=True,
    doc="A torch op without an entry: correct, and whole on every rank.",
)


def _opaque_grad_infer(types: Types, attrs: Attrs) -> Types:
    at = _where_whole(types, attrs["target"])
    return tuple(Type(types[i].dtype, Layout.of(types[i].mesh, types[i].shape, at)) for i in attrs["to"])


def _opaque_grad_run(
    *tensors: torch.Tensor, target: str, call: Any, keys: Any, of: Any, to: Any, operands: int, **_: Any
) -> Any:
    with torch.enable_grad():
        args = tuple(t.detach().requires_grad_(i in to) for i, t in enumerate(tensors[:operands]))
        out = _call(args, target, call, keys)
        kept = [(out[i], ct) for i, ct in zip(of, tensors[operands:], strict=True) if out[i].requires_grad]
        wrt = [args[i] for i in to]
        grads = torch.autograd.grad([o for o, _ in kept], wrt, [c for _, c in kept], allow_unused=True) if kept else [None] * len(wrt)
    full = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wrt, strict=True)]
    return full[0] if len(full) == 1 else tuple(full)


opaque_grad = define(
    "opaque_grad", kind=Kind.WHOLE, infer=_opaque_grad_infer, run=_opaque_grad_run, doc="The gradient of an opaque op."
)


# -- rotary embedding by tables of cosines and sines -----------------------------------------------------------------------


def _rope_equation(types: Types, attrs: Attrs) -> Equation:
    """x [..., d] and tables stretched over it; the last dim, whose halves meet, stays whole."""
    eq = elementwise(types, attrs)
    return Equation(eq.ins, eq.outs, whole=frozenset({eq.outs[0][-1]}))


def _other_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _rope_run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    return x * cos - _other_half(x * sin) if inverse else x * cos + _other_half(x) * sin


def _rope_vjp(n: Node, ct: Node) -> Any:
    turned = rope(ct, *n.args[1:], **({} if n.attr("inverse") else {"inverse": True}))
    return fit(turned, n.args[0]), None, None


rope = define(
    "rope",
    kind=Kind.WHOLE,
    equation=_rope_equation,
    run=_rope_run,
    linear=Linear.FIRST,
    vjp=_rope_vjp,
    flops=lambda n: 3.0 * _elements(n.type),
    doc="x cos + (-x2, x1) sin; the tables are data and get no gradient",
)


def _elements(type_: Type) -> float:
    return float(functools.reduce(operator.mul, type_.layout.largest_local, 1))
