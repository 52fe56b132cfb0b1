"""Updates of optimizers: one op per parameter. `unfold` gives an update in simpler ops, for whoever fuses it.

The learning rate of each group and the step count are inputs of the program, so schedulers keep working; so is any other setting that has
changed once. What depends on these numbers alone is computed in float64, as torch's Python does, whatever the parameter's dtype is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from weft.core.evaluate import values_of
from weft.core.layout import Layout, Mesh
from weft.core.node import Attrs, Node, Type, constant, make, remade, toposort
from weft.core.program import Program, new_program
from weft.core.text import parse
from weft.ops import pointwise as w
from weft.ops.fill import full, full_op
from weft.ops.norm import to_dtype
from weft.ops.registry import Equation, Kind, Types, define
from weft.ops.shape import expand_op
from weft.ops.source import input_node

PIECE = 1 << 18  # elements that an update on a processor takes at a time
_STORED = (torch.Tensor, torch.nn.Parameter)

Values = tuple[Any, ...]
Arithmetic = Callable[..., Values]


def _numbers(attrs: Mapping[str, Any]) -> int:
    """How many numbers stand last among the operands: settings that change, the learning rate, the step; or as many as a body has."""
    return attrs["numbers"] if "numbers" in attrs else 2 + len(attrs.get("given", ()))


def _equation(types: Types, attrs: Attrs) -> Equation:
    """Parameter, gradient and state the same; then numbers. Out: parameter and state."""
    labels, last = tuple(f"d{i}" for i in range(len(types[0].shape))), _numbers(attrs)
    return Equation((labels,) * (len(types) - last) + ((),) * last, (labels,) * (len(types) - last - 1))


def _dtypes(types: Types, attrs: Attrs) -> tuple[torch.dtype, ...]:
    return (types[0].dtype, *(t.dtype for t in types[2 : -_numbers(attrs)]))


def state_inputs(n: Node) -> tuple[Node, ...]:
    """What an update gives the next value of: the parameter and its state."""
    return (n.args[0], *n.args[2 : -_numbers(dict(n.attrs))])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a parameter's elements are computed."""
    return torch.promote_types(dtype, torch.float32)


class _Torch:
    """The arithmetic of a body, on tensors."""

    sqrt, abs, maximum, where = map(staticmethod, (torch.sqrt, torch.abs, torch.maximum, torch.where))

    @staticmethod
    def to(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) else x

    @staticmethod
    def power(base: Any, e: torch.Tensor) -> torch.Tensor:
        return torch.pow(base, e)


class _Weft:
    """The same arithmetic, on nodes."""

    sqrt, abs, maximum, where = map(staticmethod, (w.sqrt, w.abs_, w.maximum, w.where))

    @staticmethod
    def to(x: Any, dtype: torch.dtype) -> Any:
        return to_dtype(x, dtype) if isinstance(x, Node) else x

    @staticmethod
    def power(base: Any, e: Node) -> Any:
        return w.pow_(base, e)


def _decayed(k: Any, p: Any, g: Any, lr: Any, decay: Any, decoupled: bool) -> tuple[Any, Any]:
    """The parameter and gradient after weight decay, mixed into the gradient or taken off the parameter."""
    if isinstance(decay, float) and not decay:
        return p, g
    return (p * k.to(1.0 - lr * decay, p.dtype), g) if decoupled else (p, g + p * k.to(decay, p.dtype))


def _adam(k: Any, p: Any, g: Any, m: Any, v: Any, *rest: Any,
          betas: Any, eps: Any, decay: Any, decoupled: bool) -> Values:  # fmt: skip
    """Kingma 2015; decoupled decay is AdamW; a fifth tensor is amsgrad's largest second moment."""
    *top, lr, step = rest
    p, g = _decayed(k, p, g, lr, decay, decoupled)
    m = m + (g - m) * k.to(1.0 - betas[0], p.dtype)
    v = v * k.to(betas[1], p.dtype) + (g * g) * k.to(1.0 - betas[1], p.dtype)
    seen = [k.maximum(top[0], v)] if top else []
    root = k.sqrt((seen or [v])[0]) / k.to(k.sqrt(1.0 - k.power(betas[1], step)), p.dtype)
    p = p - k.to(lr / (1.0 - k.power(betas[0], step)), p.dtype) * (m / (root + k.to(eps, p.dtype)))
    return (p, m, v, *seen)


def _sgd(k: Any, p: Any, g: Any, *rest: Any, momentum: Any, damping: Any, nesterov: bool, decay: Any) -> Values:
    """With momentum, the first step starts the buffer at the gradient itself."""
    *buffer, lr, step = rest
    _, g = _decayed(k, p, g, lr, decay, False)
    rate, momentum = k.to(lr, p.dtype), k.to(momentum, p.dtype)
    if not buffer:
        return (p - g * rate,)
    b = k.where(step > 1.5, buffer[0] * momentum + g * k.to(1.0 - damping, p.dtype), g)
    return p - (g + b * momentum if nesterov else b) * rate, b


def _adagrad(k: Any, p: Any, g: Any, total: Any, lr: Any, step: Any, *, decay: Any, lr_decay: Any, eps: Any) -> Values:
    rate = k.to(lr / ((step - 1.0) * lr_decay + 1.0), p.dtype)
    _, g = _decayed(k, p, g, lr, decay, False)
    total = total + g * g
    return p - g * rate / (k.sqrt(total) + k.to(eps, p.dtype)), total


def _rmsprop(k: Any, p: Any, g: Any, v: Any, *rest: Any,
             alpha: Any, eps: Any, decay: Any, momentum: Any, centered: bool = False) -> Values:  # fmt: skip
    """State: the mean square; then, with momentum, its buffer; then, centered, the mean."""
    *more, lr, _ = rest
    mean, buffer = (more[-1:], more[:-1]) if centered else ([], more)
    _, g = _decayed(k, p, g, lr, decay, False)
    rate, kept, new = (k.to(x, p.dtype) for x in (lr, alpha, 1.0 - alpha))
    v = v * kept + (g * g) * new
    mean = [a + (g - a) * new for a in mean]
    move = g / (k.sqrt(v - mean[0] * mean[0] if mean else v) + k.to(eps, p.dtype))
    if not buffer:
        return (p - move * rate, v, *mean)
    b = buffer[0] * k.to(momentum, p.dtype) + move
    return (p - b * rate, v, b, *mean)


def _stepped(k: Any, body: Arithmetic, xs: Any, attrs: Mapping[str, Any]) -> Values:
    """The body on wide elements and float64 numbers; results as parameter and state are kept."""
    last = _numbers(attrs)
    tensors, numbers = xs[:-last], [k.to(x, torch.float64) for x in xs[-last:]]
    wide = [k.to(x, _wide(xs[0].dtype)) for x in tensors]
    settings = {name: x for name, x in attrs.items() if name not in ("given", "sign")}
    for name, x in zip(attrs.get("given", ()), numbers, strict=False):
        put_setting(settings, name, x)
    wide[1] = wide[1] * float(attrs["sign"]) if attrs["sign"] != 1 else wide[1]
    out = body(k, *wide, *numbers[-2:], **settings)
    return tuple(k.to(x, like.dtype) for x, like in zip(out, (xs[0], *tensors[2:]), strict=True))


def put_setting(attrs: dict[str, Any], name: str, value: Any) -> None:
    """A setting by its name; one of several by the number it has among them."""
    key, _, at = name.partition("_at_")
    attrs[key] = tuple(value if i == int(at) else x for i, x in enumerate(attrs[key])) if at else value


def _in_pieces(run: Callable[..., Values], xs: Sequence[torch.Tensor]) -> Any:
    """What an update of each element alone gives, piece by piece where a processor has many: what it computes on its way, in wider numbers
    than are kept, is then as small as a piece. Bits stay: a piece is of entire vectors."""
    p, many = xs[0], [x for x in xs if x.dim()]
    if p.device.type != "cpu" or p.numel() <= PIECE or any(type(x) not in _STORED or x.shape != p.shape or not x.is_contiguous() for x in many):
        out = run(*xs)
        return out[0] if len(out) == 1 else out
    flat = [x.detach().view(-1) if x.dim() else x for x in xs]
    found: list[torch.Tensor] = []
    for at in range(0, p.numel(), PIECE):
        some = run(*(x[at : at + PIECE] if x.dim() else x for x in flat))
        found = found or [torch.empty(p.numel(), dtype=y.dtype) for y in some]
        for result, y in zip(found, some, strict=True):
            result[at : at + PIECE] = y
    return found[0].view(p.shape) if len(found) == 1 else tuple(result.view(p.shape) for result in found)


def _update(name: str, body: Arithmetic, **choices: Any) -> Any:
    """`choices` are values of its settings that rules about it are tried with."""

    def run(*xs: torch.Tensor, **attrs: Any) -> Any:
        return _in_pieces(lambda *some: _stepped(_Torch, body, some, attrs), xs)

    return define(
        name,
        kind=Kind.POINTWISE,
        equation=_equation,
        dtype=_dtypes,
        run=run,
        unfold=lambda n: _stepped(_Weft, body, n.args, dict(n.attrs)),
        flops=lambda n: 12.0 * math.prod(n.types[0].layout.largest_local),
        choices={"sign": (1,), **choices},
    )


adam = _update("adam", _adam, betas=((0.9, 0.99),), eps=(1e-8,), decay=(0.1,), decoupled=(True, False))
sgd = _update("sgd", _sgd, momentum=(0.9,), damping=(0.0,), nesterov=(False, True), decay=(0.1,))
adagrad = _update("adagrad", _adagrad, decay=(0.1,), lr_decay=(0.1,), eps=(1e-10,))
rmsprop = _update("rmsprop", _rmsprop, alpha=(0.9,), eps=(1e-8,), decay=(0.1,), momentum=(0.9,))


# -- an update of which no more is known than that it is elementwise ------------------------------------------------------------------


@dataclass(frozen=True)
class Body:
    """The arithmetic of one element, as a program's text over `x0` (the parameter), `x1` (its gradient), state, and then numbers."""

    text: str
    numbers: tuple[Node, ...]  # what stands for those numbers where it was traced


def body_of(inputs: Mapping[str, Node], outputs: Mapping[str, Node], states: Sequence[str]) -> Body | None:
    """The body of an update, if it is elementwise: all but numbers is pointwise, and of the parameter's own shape."""
    param = inputs["param"]
    big = [param, inputs["grad"], *(inputs[s] for s in states if s in inputs and inputs[s].shape == param.shape)]
    results = [outputs["param"], *(outputs[s] for s in states if outputs[s].shape == param.shape)]
    if not param.shape or len(big) != len(results) + 1:
        return None
    made: dict[Node, Node] = {n: _one(f"x{i}", n.dtype, (2,)) for i, n in enumerate(big)}
    numbers: dict[Node, Node] = {}
    of_elements = {*big}
    for n in toposort(results):
        if n in made:
            continue
        of_elements |= {n} if any(a in of_elements for a in n.args) else set()
        if n not in of_elements and n.shape == ():
            continue
        if n.shape != param.shape:
            return None
        if n.op is full_op:
            made[n] = constant(n.attr("value"), n.dtype, n.mesh) if not isinstance(n.attr("value"), str) else full((), n.attr("value"), n.mesh, n.dtype)
        elif n.op is expand_op and n.args[0].shape == ():
            made[n] = _number(n.args[0], numbers, len(big))
        elif n.op.kind is not Kind.POINTWISE:
            return None
        else:
            made[n] = make(n.op, tuple(made[a] if a in made else _number(a, numbers, len(big)) for a in n.args), dict(n.attrs))
    if any(made[n].shape != (2,) for n in results):
        return None
    named = {f"y{i}": made[n] for i, n in enumerate(results)}
    return Body(new_program("update", param.mesh, [*(made[n] for n in big), *numbers.values()], named).text, tuple(numbers))


def _one(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Node:
    return input_node(name, Type(dtype, Layout.of(Mesh(), shape)))


def _number(n: Node, numbers: dict[Node, Node], first: int) -> Node:
    """A number that the body reads: itself if it is a constant, else an operand."""
    if n.op.is_number:
        return n
    return numbers.setdefault(n, _one(f"x{first + len(numbers)}", n.dtype, ()))


@lru_cache(maxsize=1024)
def _parsed(body: str) -> Program:
    return parse(body)


def _run_body(*xs: torch.Tensor, body: str, numbers: int) -> Any:
    return _in_pieces(lambda *some: _body_of(some, _parsed(body)), xs)


def _body_of(xs: Sequence[torch.Tensor], program: Program) -> Values:
    found: dict[Node, torch.Tensor] = {n: xs[int(n.attr("name")[1:])] for n in program.inputs}
    for n in program.nodes:
        if n.op.is_number:
            found[n] = torch.full((), n.attr("value"), dtype=n.dtype, device=xs[0].device)
        elif n not in found:
            found[n] = n.op.run(*(found[a] for a in n.args), **dict(n.attrs))
    return tuple(found[n] for _, n in program.outputs)


def _unfold_body(n: Node) -> Values:
    program = _parsed(n.attr("body"))
    swap = {x: n.args[int(x.attr("name")[1:])] for x in program.inputs}
    swap |= {x: constant(x.attr("value"), x.dtype, n.mesh) for x in program.nodes if x.op.is_number}
    made = remade([y for _, y in program.outputs], swap)
    return tuple(made[y] for _, y in program.outputs)


update = define(
    "update",
    kind=Kind.POINTWISE,
    equation=_equation,
    dtype=_dtypes,
    run=_run_body,
    unfold=_unfold_body,
    flops=lambda n: float(len(_parsed(n.attr("body")).nodes)) * math.prod(n.types[0].layout.largest_local),
    doc="an optimizer's update that is elementwise, as its own step() says",
)


def aligned(gradient: Node, state: Node) -> Node:
    """A gradient laid out as the state that it meets is: an update that is not of each element alone reads it in pieces, or sums it, from there."""
    if gradient.shape != state.shape or gradient.dtype != state.dtype or not gradient.shape:
        return gradient
    made: Node = update(state, gradient, body=_identity(gradient.dtype), numbers=0)
    return made


@lru_cache(maxsize=16)
def _identity(dtype: torch.dtype) -> str:
    x, y = _one("x0", dtype, (2,)), _one("x1", dtype, (2,))
    return new_program("update", Mesh(), [x, y], {"y0": y}).text


# -- which of the updates above one is -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """An update that has an op: the state it keeps, and the settings of a group that its attributes are."""

    op: Any
    states: tuple[str, ...]
    settings: Mapping[str, str]  # attribute -> key of the group
    flags: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # attributes that only trying tells

    def fits(self, group: Mapping[str, Any]) -> bool:
        return "lr" in group and all(key in group for key in self.settings.values())

    def attributes(self, group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        numbers = {a: tuple(map(float, x)) if isinstance(x := group[key], (tuple, list)) else float(x) for a, key in self.settings.items()}
        for chosen in product(*self.flags.values()):
            for sign in (1, -1):
                yield {**numbers, **dict(zip(self.flags, chosen, strict=True)), "sign": sign}

    def given(self, names: Collection[str]) -> dict[str, str]:
        """Those attributes that are operands, and the settings they are."""
        keys = {key: a for a, key in self.settings.items()}
        split = {n: n.partition("_at_") for n in names}
        return {f"{keys[k]}{sep}{at}": n for n, (k, sep, at) in split.items() if k in keys}

    def with_given(self, attrs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """The attributes where some settings are operands; their values here would be others tomorrow."""
        mine, out = self.given(names), dict(attrs)
        for a in mine:
            put_setting(out, a, 0.0)
        return {**out, "given": tuple(mine)} if mine else out


_ADAM = {"betas": "betas", "eps": "eps", "decay": "weight_decay"}
_SGD = {"momentum": "momentum", "damping": "dampening", "decay": "weight_decay"}
_RMSPROP = {"alpha": "alpha", "eps": "eps", "decay": "weight_decay", "momentum": "momentum"}
KNOWN = (
    Known(adam, ("exp_avg", "exp_avg_sq"), _ADAM, {"decoupled": (False, True)}),
    Known(adam, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _ADAM, {"decoupled": (False, True)}),
    Known(sgd, (), _SGD, {"nesterov": (False,)}),
    Known(sgd, ("momentum_buffer",), _SGD, {"nesterov": (False, True)}),
    Known(adagrad, ("sum",), {"decay": "weight_decay", "lr_decay": "lr_decay", "eps": "eps"}),
    Known(rmsprop, ("square_avg",), _RMSPROP),
    Known(rmsprop, ("square_avg", "momentum_buffer"), _RMSPROP),
    Known(rmsprop, ("square_avg", "grad_avg"), _RMSPROP, {"centered": (True,)}),
    Known(rmsprop, ("square_avg", "momentum_buffer", "grad_avg"), _RMSPROP, {"centered": (True,)}),
)


def runs_the_same(known: Known, attrs: Mapping[str, Any], body: Body, settings: Mapping[Node, tuple[str, float]], counts: Mapping[Node, int]) -> bool:
    """Whether a body in float64 gives what the op gives: on numbers of either sign, zeros among them, in the first update and later.

    `settings` are inputs of its numbers, with the names and values they have; `counts` are those that say which update it is, this or the one before.
    """
    random = torch.Generator().manual_seed(0)
    program = _parsed(body.text)
    many = len(program.inputs) - len(body.numbers)
    given = known.given([name for name, _ in settings.values()])
    by_name = dict(settings.values())
    for count in (1.0, 2.0, 7.0, 1000.0):
        p, g = (torch.randn(16, generator=random, dtype=torch.float64) for _ in range(2))
        g[:3] = 0
        states = [torch.rand(16, generator=random, dtype=torch.float64) + (1.0 if k == 0 else 0.0) for k in range(many - 2)]
        values = {n: torch.tensor(x, dtype=n.dtype) for n, (_, x) in settings.items()} | {n: torch.tensor(count + k, dtype=n.dtype) for n, k in counts.items()}
        numbers = values_of(body.numbers, {**values})
        got = _run_body(p, g, *states, *numbers, body=body.text, numbers=len(numbers))
        operands = [torch.tensor(by_name[name], dtype=torch.float64) for name in given.values()]
        rate, step = torch.tensor(by_name["lr"], dtype=torch.float64), torch.tensor(count)
        want = known.op.run(p, g, *states, *operands, rate, step, **known.with_given(attrs, list(given.values())))
        pairs = zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True)
        if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-13, equal_nan=True) for a, b in pairs):
            return False
    return True
