"""Elementwise ops: arithmetic, comparison, choice, casts, activations, dropout.

Their one equation gives every dim its own label; a dim of size 1, or a missing leading one, is stretched over the others.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from weft.core.errors import TypeMismatch
from weft.core.layout import P
from weft.core.node import DTYPE_NAMES, Attrs, Node, Op, constant, dtype_of, op_named, user_line
from weft.ops.registry import ONE, ArgSets, Equation, Kind, Linear, Local, Types, _common_dtype, define

EACH: ArgSets = (frozenset({0}), frozenset({1}))
FIRST: ArgSets = (frozenset({0}),)
BOTH: ArgSets = (*EACH, frozenset({0, 1}))


def elementwise(types: Types, attrs: Attrs) -> Equation:
    """Right-aligned dims share a label; `ONE` marks what is stretched."""
    rank = max((len(t.shape) for t in types), default=0)
    sizes = [max((t.shape[len(t.shape) - r] for t in types if len(t.shape) >= r), default=1) for r in range(rank, 0, -1)]
    if any(0 in t.shape for t in types):
        sizes = [
            0 if any(len(t.shape) > i and t.shape[len(t.shape) - rank + i] == 0 for t in types if len(t.shape) == rank) else s
            for i, s in enumerate(sizes)
        ]
    names = [f"d{rank - i}" for i in range(rank)]
    ins = tuple(
        tuple(ONE if n == 1 and sizes[rank - len(t.shape) + i] != 1 else names[rank - len(t.shape) + i] for i, n in enumerate(t.shape))
        for t in types
    )
    return Equation(ins, (tuple(names),))


def fit(ct: Node, arg: Node) -> Node:
    """A cotangent summed over the dims along which the operand was stretched."""
    extra = ct.ndim - arg.ndim
    dims = tuple(range(extra)) + tuple(extra + i for i, n in enumerate(arg.shape) if n == 1 and ct.shape[extra + i] != 1)
    if dims:
        ct = op_named("sum")(ct, dims=dims)
    return ct if ct.shape == arg.shape else op_named("reshape")(ct, shape=arg.shape)


def to_bool(types: Types, attrs: Attrs) -> torch.dtype:
    _same_dtype(types)
    return torch.bool


def floats(types: Types, attrs: Attrs) -> torch.dtype:
    """The one dtype of the operands, which must have fractions: torch would change it otherwise."""
    _same_dtype(types)
    if not types[0].dtype.is_floating_point:
        found = DTYPE_NAMES[types[0].dtype]
        raise TypeMismatch("integers have no fractions to give", needed="a floating-point dtype", found=found, try_="cast(x, 'f32')")
    return types[0].dtype


def _same_dtype(types: Types) -> None:
    if len({t.dtype for t in types}) > 1:
        raise TypeMismatch(
            "operands of several dtypes", needed="one dtype", found=" and ".join(DTYPE_NAMES[t.dtype] for t in types), try_="cast(x, dtype)"
        )


def numbers(types: Types, attrs: Attrs) -> torch.dtype:
    """The operands' one dtype, which is not bool: torch subtracts none, and a sum of bools over ranks is no bool."""
    dtype = _common_dtype(types, attrs)
    if dtype == torch.bool:
        raise TypeMismatch(
            "arithmetic on bools", needed="numbers", found="bool", try_=["weft.lang.cast(x, 'i64')", "weft.lang.logical_or, logical_and, logical_not"],
            where=user_line(),
        )  # fmt: skip
    return dtype


def _binary(name: str, run: Any, vjp: Any, **facets: Any) -> Any:
    return define(name, kind=Kind.POINTWISE, equation=elementwise, arity=2, run=run, vjp=vjp, **facets)


add = _binary(
    "add",
    torch.add,
    lambda n, ct: (fit(ct, n.args[0]), fit(ct, n.args[1])),
    linear=Linear.JOINTLY,
    monotone=EACH,
    field=lambda p, a, b: (a + b) % p,
)
sub = _binary(
    "sub",
    torch.sub,
    lambda n, ct: (fit(ct, n.args[0]), fit(-ct, n.args[1])),
    linear=Linear.JOINTLY,
    monotone=FIRST,
    dtype=numbers,
    field=lambda p, a, b: (a - b) % p,
)
mul = _binary(
    "mul",
    torch.mul,
    lambda n, ct: (fit(ct * n.args[1], n.args[0]), fit(ct * n.args[0], n.args[1])),
    linear=Linear.EACH,
    field=lambda p, a, b: (a * b) % p,
)
div = _binary(
    "div",
    torch.div,
    lambda n, ct: (fit(ct / n.args[1], n.args[0]), fit(-(ct * (n / n.args[1])), n.args[1])),
    linear=Linear.FIRST,
    dtype=floats,
)


def _keep(x: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    return torch.where(here, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _keep_dtype(types: Types, attrs: Attrs) -> torch.dtype:
    if types[1].dtype != torch.bool:
        raise TypeMismatch("keep_where chooses by a bool", needed="bool in operand 1", found=DTYPE_NAMES[types[1].dtype])
    return types[0].dtype


keep_where: Op = define(
    "keep_where",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=2,
    run=_keep,
    dtype=_keep_dtype,
    vjp=lambda n, ct: (fit(keep(ct, n.args[1]), n.args[0]), None),
    linear=Linear.FIRST,
    doc="(x, here) -> x where `here` holds, else 0, though x be infinite or NaN there, where a multiplication by 0 would not give 0",
)


def spread(ct: Node, like: Node) -> Node:
    """A cotangent that is one number, as a tensor of its dtype: generated code would lose that."""
    if not ct.op.is_number or not like.ndim:
        return ct
    return op_named("expand")(op_named("reshape")(ct, shape=(1,) * like.ndim), shape=like.shape, shards=())  # type: ignore[no-any-return]


def keep(ct: Node, here: Node) -> Node:
    """A cotangent where `here` holds, else 0."""
    return keep_where(spread(ct, here), here)  # type: ignore[no-any-return]


def _power(x: Node, number: float) -> Node:
    return x if number == 1 else square(x) if number == 2 else pow_(x, number)  # type: ignore[no-any-return]


def _pow_vjp(n: Node, ct: Node) -> Any:
    """Nothing flows through x**0, nor to the power of 0**e for e >= 0, as torch has it."""
    x, e = n.args
    if e.op.is_number:
        number = e.attr("value")
        return (fit(ct * (number * _power(x, number - 1.0)), x) if number else _nothing(n)), None
    slope = ct * (e * pow_(x, e - 1.0))
    steep = keep(n * log(x), logical_not(logical_and(eq(x, 0.0), ge(e, 0.0))))
    return fit(keep(slope, ne(e, 0.0)), x), fit(ct * steep, e)


pow_ = _binary("pow", torch.pow, _pow_vjp, transcendental=True, approximated=True)


def _extreme_vjp(beats: str) -> Any:
    """A tie is shared evenly; where one of the two is NaN, both get all."""

    def vjp(n: Node, ct: Node) -> Any:
        a, b = n.args
        shared = where(eq(a, b), ct * 0.5, ct)
        return fit(keep(shared, logical_not(op_named(beats)(b, a))), a), fit(keep(shared, logical_not(op_named(beats)(a, b))), b)

    return vjp


maximum = _binary("maximum", torch.maximum, _extreme_vjp("gt"), monotone={"max": BOTH, "min": EACH})
minimum = _binary("minimum", torch.minimum, _extreme_vjp("lt"), monotone={"max": EACH, "min": BOTH})

gt = _binary("gt", torch.gt, None, dtype=to_bool)
ge = _binary("ge", torch.ge, None, dtype=to_bool)
lt = _binary("lt", torch.lt, None, dtype=to_bool)
le = _binary("le", torch.le, None, dtype=to_bool)
eq = _binary("eq", torch.eq, None, dtype=to_bool)
ne = _binary("ne", torch.ne, None, dtype=to_bool)
logical_and = _binary("logical_and", torch.logical_and, None, dtype=to_bool)
logical_or = _binary("logical_or", torch.logical_or, None, dtype=to_bool)
logical_not = define("logical_not", kind=Kind.POINTWISE, equation=elementwise, arity=1, run=torch.logical_not, dtype=to_bool)


def _where_dtype(types: Types, attrs: Attrs) -> torch.dtype:
    if types[0].dtype != torch.bool:
        raise TypeMismatch("where chooses by a bool", needed="bool in operand 0", found=DTYPE_NAMES[types[0].dtype])
    _same_dtype(types[1:])
    return types[1].dtype


def _where_vjp(n: Node, ct: Node) -> Any:
    c, a, b = n.args
    return None, fit(keep(ct, c), a), fit(keep(ct, logical_not(c)), b)


where = define(
    "where",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=3,
    run=torch.where,
    dtype=_where_dtype,
    vjp=_where_vjp,
    linear=(frozenset({1, 2}),),
    monotone=(frozenset({1}), frozenset({2}), frozenset({1, 2})),
)


# -- one operand ---------------------------------------------------------------------------------------------------------


UNARY: dict[str, Op] = {}  # ops of one operand with fractions


def _unary(name: str, run: Any, slope: Any, pull: Any = None, **facets: Any) -> Any:
    """`slope(node)` is the derivative at the node's operand, as a node; `pull(node, ct)` where it is no factor; neither where there is none."""
    pull = pull or (None if slope is None else (lambda n, ct: ct * slope(n)))
    vjp = None if pull is None else (lambda n, ct: (pull(n, ct),))
    return define(name, kind=Kind.POINTWISE, equation=elementwise, arity=1, run=run, vjp=vjp, **facets)


def _float_unary(name: str, run: Any, slope: Any, **facets: Any) -> Any:
    """Of fractions. Captured and drawn by the fuzzer as it stands; where its name is not that of numpy, C++ and Triton too, `code` writes it."""
    code = facets.pop("code", (f"np.{name}({{0}})", f"std::{name}({{0}})", f"tl.{name}({{0}})"))
    UNARY[name] = made = _unary(name, run, slope, dtype=floats, code=code, **facets)
    return made


def _slope_op(name: str, run: Any, vjp: Any = None, **facets: Any) -> Any:
    """ct times a slope at x, as torch computes it in one pass; linear in ct."""
    return define(
        name, kind=Kind.POINTWISE, equation=elementwise, arity=2, run=run, linear=Linear.FIRST, dtype=floats, vjp=vjp,
        doc="(ct, x) -> ct * slope(x)", **facets,
    )  # fmt: skip


def _gelu_slope(ct: Node, x: Node, tanh: bool = False) -> Any:
    """torch's formula, by the normal distribution or its tanh."""
    if not tanh:
        return ct * (0.5 * (1.0 + erf(x * math.sqrt(0.5))) + x * (exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))))
    beta, kappa = math.sqrt(2 / math.pi), 0.044715
    t = op_named("tanh")(beta * (x + kappa * (x * x * x)))
    return ct * (0.5 * (1.0 + t) + 0.5 * x * ((1.0 - t * t) * (beta * (1.0 + 3.0 * kappa * (x * x)))))


def _silu_slope(ct: Node, x: Node) -> Any:
    s = sigmoid(x)
    return ct * (s * (1.0 + x * (1.0 - s)))


gelu_backward = _slope_op(
    "gelu_backward",
    lambda ct, x, tanh=False: torch.ops.aten.gelu_backward(ct, x, approximate="tanh" if tanh else "none"),
    written=_gelu_slope,
    transcendental=True, approximated=True,
)
silu_backward = _slope_op("silu_backward", torch.ops.aten.silu_backward, written=_silu_slope, transcendental=True, approximated=True)
relu_backward: Op = _slope_op(  # by the result, so that x need not be kept
    "relu_backward", lambda ct, y: torch.ops.aten.threshold_backward(ct, y, 0), lambda n, ct: (relu_backward(spread(ct, n), n.args[1]), None)
)


def _gelu(x: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none")


def _nothing(n: Node) -> Node:
    """The zeros that are the gradient of a staircase."""
    from weft.ops.shape import expand_like

    x = n.args[0]
    return expand_like(constant(0.0, x.dtype, x.mesh), x)  # type: ignore[no-any-return]


OF_POSITIVES = {"min": FIRST}  # a positive max may hide negative terms, and they give NaN; a positive min hides none

neg = define(
    "neg",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=1,
    run=torch.neg,
    linear=Linear.FIRST,
    dtype=numbers,
    vjp=lambda n, ct: (-ct,),
    field=lambda p, a: (-a) % p,
)
exp = _float_unary("exp", torch.exp, lambda n: n, monotone=FIRST, transcendental=True, approximated=True)
log = _float_unary("log", torch.log, None, monotone=OF_POSITIVES, pull=lambda n, ct: ct / n.args[0], transcendental=True, approximated=True)
sqrt = _float_unary(
    "sqrt", torch.sqrt, None, monotone=OF_POSITIVES, pull=lambda n, ct: ct / (2.0 * n), code=("np.sqrt({0})", "std::sqrt({0})", "tl.sqrt_rn({0})")
)
rsqrt = _float_unary(
    "rsqrt", torch.rsqrt, lambda n: -0.5 * (n * n * n),
    code=("(1.0 / np.sqrt({0}))", "(1 / std::sqrt({0}))", "(1.0 / tl.sqrt_rn({0}))"),
    approximated=True,
)  # fmt: skip
tanh = _float_unary(
    "tanh", torch.tanh, lambda n: 1.0 - n * n, monotone=FIRST, code=("np.tanh({0})", "std::tanh({0})", "(2.0 * tl.sigmoid(2.0 * {0}) - 1.0)"),
    transcendental=True, approximated=True,
)
sigmoid = _float_unary(
    "sigmoid", torch.sigmoid, lambda n: n * (1.0 - n), monotone=FIRST,
    code=("(1.0 / (1.0 + np.exp(-{0})))", "(1 / (1 + std::exp(-{0})))", "tl.sigmoid({0})"),
    transcendental=True, approximated=True,
)  # fmt: skip
relu = _unary("relu", torch.relu, None, monotone=FIRST, pull=lambda n, ct: relu_backward(spread(ct, n), n))
gelu = define(
    "gelu",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=1,
    run=_gelu,
    dtype=floats,
    vjp=lambda n, ct: (gelu_backward(ct, n.args[0], **dict(n.attrs)),),
    transcendental=True, approximated=True,
)
silu = define(
    "silu",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=1,
    run=torch.nn.functional.silu,
    dtype=floats,
    vjp=lambda n, ct: (silu_backward(ct, n.args[0]),),
    transcendental=True, approximated=True,
)
erf = _float_unary(
    "erf", torch.erf, lambda n: (2 / math.sqrt(math.pi)) * exp(-(n.args[0] * n.args[0])), monotone=FIRST,
    code=("erf({0})", "std::erf({0})", "tl.erf({0})"),
    transcendental=True, approximated=True,
)  # fmt: skip
sin = _float_unary("sin", torch.sin, lambda n: cos(n.args[0]), transcendental=True, approximated=True)
cos: Op = _float_unary("cos", torch.cos, lambda n: -sin(n.args[0]), transcendental=True, approximated=True)
abs_ = _unary("abs", torch.abs, lambda n: sign(n.args[0]))
sign: Op = _unary("sign", torch.sign, None, monotone=FIRST, pull=lambda n, ct: _nothing(n))
square = _unary("square", torch.square, lambda n: 2.0 * n.args[0], field=lambda p, a: (a * a) % p)
floor = _unary("floor", torch.floor, None, monotone=FIRST, pull=lambda n, ct: _nothing(n))
isfinite = _unary("isfinite", torch.isfinite, None, dtype=to_bool)


def _clamp_pull(n: Node, ct: Node) -> Node:
    x = n.args[0]
    inside = [test(x, bound) for bound, test in ((n.attr("lo"), ge), (n.attr("hi"), le)) if bound is not None]
    return keep(ct, inside[0] if len(inside) == 1 else logical_and(*inside))


def _clamp_normal(attrs: Attrs) -> Attrs:
    given = {k: v for k, v in attrs.items() if v is not None}
    if not given:
        raise TypeMismatch("clamp between nothing", needed="lo=, hi= or both", found="neither", where=user_line())
    return given


clamp = _unary(
    "clamp",
    lambda x, lo=None, hi=None: torch.clamp(x, lo, hi),
    None,
    pull=_clamp_pull,
    monotone=FIRST,
    normal=_clamp_normal,
)


def _cast_normal(attrs: Attrs) -> Attrs:
    return {"dtype": DTYPE_NAMES[dtype_of(attrs["dtype"])]}


def _wraps(wide: torch.dtype, small: torch.dtype) -> bool:
    """Whether numbers of the one dtype wrap around in the other, a smaller one of integers."""
    if small.is_floating_point or small == torch.bool:
        return False
    return (
        wide.is_floating_point and small.itemsize == 1 or not wide.is_floating_point and wide != small and wide.itemsize >= small.itemsize
    )


def _cast_dtype(types: Types, attrs: Attrs) -> torch.dtype:
    """A partial sum passes where the cast is additive up to rounding; none of a bool, nor from fractions to integers or to 8 bits."""
    here, to = types[0].dtype, dtype_of(attrs["dtype"])
    pending = {p.op for _, p in types[0].layout.partials if isinstance(p, P)}
    truncates = here.is_floating_point and (not to.is_floating_point or to.itemsize == 1)
    wraps = {"sum": _wraps(to, here), "max": _wraps(here, to), "min": _wraps(here, to)}  # a small sum wraps before, a large max after
    if pending and (torch.bool in (here, to) or (truncates and "sum" in pending) or any(wraps[op] for op in pending)):
        raise TypeMismatch(
            f"a partial {min(pending)} cannot be cast from {DTYPE_NAMES[here]} to {DTYPE_NAMES[to]}",
            needed="a reduced value, or a cast that keeps sums",
            found=str(types[0]),
            try_="all_reduce it first",
            where=user_line(),
        )
    return to


cast: Op = define(
    "cast",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=1,
    run=lambda x, dtype: x.to(dtype_of(dtype)),
    dtype=_cast_dtype,
    linear=Linear.FIRST,
    monotone=FIRST,
    vjp=lambda n, ct: (cast(ct, dtype=DTYPE_NAMES[n.args[0].dtype]) if n.args[0].dtype.is_floating_point else None,),
    field=lambda p, a, dtype: a,
    normal=_cast_normal,
    is_cast=True,
)


# -- dropout: the mask is a function of (seed, site, global element index), so every layout draws the same one ---------------
# Of one micro-batch it is that of the full batch: `of` says along which dim, in runs of how many, one of how many, an operand which.

Of: TypeAlias = tuple[int, int, int] | None


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit finaliser: neighbouring counters give unrelated bits."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform_at(index: torch.Tensor, seed: torch.Tensor | int, site: int) -> torch.Tensor:
    """Numbers in [0, 1), each drawn from its global index alone."""
    key = _mix(torch.as_tensor(seed, dtype=torch.int64) * -7046029254386353131 + site)
    return ((_mix(index + key) >> 40) & 0xFFFFFF).to(torch.float32) / 2**24


def _global_index(positions: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    index = torch.zeros((), dtype=torch.int64)
    for d, (at, n) in enumerate(zip(positions, shape, strict=True)):
        index = index * n + at.reshape([-1 if i == d else 1 for i in range(len(shape))])
    return index


def places_of(at: torch.Tensor, part: torch.Tensor, run: int, parts: int) -> torch.Tensor:
    """Where positions of one part of a dim stand in the full tensor of it, whose runs of `run` are given to the parts in turn."""
    return at.to(part.device) // run * (run * parts) + part * run + at.to(part.device) % run


def _drop(x: torch.Tensor, seed: torch.Tensor, index: torch.Tensor, p: float, site: int) -> torch.Tensor:
    """Dropped is times 0, as in torch: what is no finite number shows."""
    keep = uniform_at(index.to(x.device), seed.to(x.device), site) >= p
    return torch.where(keep, x / (1 - p), x * 0) if p < 1 else x * 0


def _drawn(positions: list[torch.Tensor], shape: tuple[int, ...], part: tuple[torch.Tensor, ...], of: Of) -> torch.Tensor:
    """The numbers that elements at some positions are drawn by: those in the full tensor where this is one part of it."""
    if of is not None:
        dim, run, parts = of
        positions = [places_of(at, part[0], run, parts) if d == dim else at.to(part[0].device) for d, at in enumerate(positions)]
        shape = tuple(n * parts if d == dim else n for d, n in enumerate(shape))
    return _global_index(positions, shape)


def _dropout(x: torch.Tensor, seed: torch.Tensor, *part: torch.Tensor, p: float, site: int, of: Of = None) -> torch.Tensor:
    return _drop(x, seed, _drawn([torch.arange(n) for n in x.shape], tuple(x.shape), part, of), p, site)


def _dropout_local(ctx: Local, x: torch.Tensor, seed: torch.Tensor, *part: torch.Tensor, p: float, site: int, of: Of = None) -> torch.Tensor:
    shape = ctx.node.args[0].shape
    return _drop(x, seed, _drawn([ctx.positions(0, d) for d in range(len(shape))], shape, part, of), p, site)


def _dropout_equation(types: Types, attrs: Attrs) -> Equation:
    numbers = 2 if attrs.get("of") else 1
    if len(types) != 1 + numbers or any(t.dtype != torch.int64 or t.shape for t in types[1:]):
        raise TypeMismatch(
            "dropout takes a value and a seed", needed="a seed of type i64[]" + ", and which part of the full tensor it is" * (numbers - 1),
            found=", ".join(map(str, types[1:])) or "no seed",
        )  # fmt: skip
    if not 0 <= attrs["p"] <= 1:
        raise TypeMismatch("dropout has no such probability", needed="p from 0 to 1", found=str(attrs["p"]))
    labels = tuple(f"d{i}" for i in range(len(types[0].shape)))
    return Equation((labels, *((),) * numbers), (labels,))


dropout_op: Op = define(
    "dropout",
    kind=Kind.POINTWISE,
    equation=_dropout_equation,
    run=_dropout,
    local=_dropout_local,
    dtype=lambda types, attrs: types[0].dtype,
    linear=Linear.FIRST,
    vjp=lambda n, ct: (dropout_op(ct, *n.args[1:], **dict(n.attrs)), *(None for _ in n.args[1:])),
    transcendental=True,
)


def dropout(x: Any, seed: Any, *, p: float, site: int) -> Any:
    """Zeroes an element with probability p and scales the rest; `site` tells two dropouts of one step apart."""
    if isinstance(seed, int):
        seed = constant(seed, torch.int64, x.mesh)
    return dropout_op(x, seed, p=float(p), site=site)
