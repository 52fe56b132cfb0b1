"""Numbers of Python that a program computes: an optimizer's settings and counts, what `.item()` gives.

Torch takes them wherever it takes a number, since they are its own SymFloat; arithmetic on them makes 0-d float64 nodes. A question about one
(`if step > 5`) is answered by what is known now, and noted, where only settings are in it; else both answers are followed, and joined.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from weft.core.errors import CaptureError
from weft.core.evaluate import values_of
from weft.core.node import Node, constant, toposort, user_line
from weft.frontend.capture.constants import number_from_batch, through, unheard
from weft.frontend.capture.handlers import function, to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.ops import pointwise as w
from weft.ops.fill import stop_gradient
from weft.ops.shape import reshape

MOST = 64  # questions on one way through an optimizer's step, and such ways
WIDE = torch.float64


@dataclass(frozen=True, eq=False)
class Value:
    """What stands behind a number; torch asks it for the number itself where it can take no other."""

    node: Node

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False

    def guard_float(self, *_: Any) -> float:
        found = _asking[-1].number(self.node) if _asking else None
        if found is not None:
            return found
        raise CaptureError(
            "Python needs the value of a number that the program computes",
            needed="arithmetic, comparisons, math.sqrt and the like on step counts, settings and .item()",
            found="float(x), int(x), or an op of torch that takes no other",
            try_="compute on the tensor, without .item() or float()",
            where=user_line(),
        )


class Number(torch.SymFloat):
    """A number that is computed; Python's arithmetic on it is the program's."""

    def __float__(self) -> float:
        return self.node.guard_float()

    def __int__(self) -> int:
        return int(self.node.guard_float())

    __index__ = __int__

    def __bool__(self) -> bool:
        return _decide(w.ne(self.node.node, _like(self, 0)))

    def __hash__(self) -> int:
        return hash(self._now())

    def __repr__(self) -> str:
        return f"Number({self.node.node})"

    def __neg__(self) -> Any:
        return number_of(w.neg(self.node.node))

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return number_of(w.abs_(self.node.node))

    def __floor__(self) -> Any:
        return number_of(w.floor(self.node.node))

    def __ceil__(self) -> Any:
        return number_of(w.neg(w.floor(w.neg(self.node.node))))

    def __trunc__(self) -> Any:
        return self.__ceil__() if self < 0 else self.__floor__()

    def _now(self) -> Any:
        """The number at hand, asked of the state and batch before each step: another one means another program."""
        found = self.node.guard_float()
        return int(found) if self._is_integer() else found

    def _is_integer(self) -> bool:
        n = self.node.node
        return n.op.is_cast and not n.args[0].dtype.is_floating_point

    def __str__(self) -> str:
        return str(self._now()) if self._is_integer() else repr(self)  # what is only printed decides nothing

    def __format__(self, spec: str) -> str:
        return format(self._now(), spec) if self._is_integer() else super().__format__(spec)

    def __round__(self, *digits: Any) -> Any:
        return round(self._now(), *digits)


class Condition:
    """A comparison of numbers; Python's `if` asks it."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def __bool__(self) -> bool:
        return _decide(self.node)

    def __and__(self, other: Any) -> Any:
        return Condition(w.logical_and(self.node, other.node)) if isinstance(other, Condition) else self if other else False

    def __or__(self, other: Any) -> Any:
        return Condition(w.logical_or(self.node, other.node)) if isinstance(other, Condition) else True if other else self

    def __invert__(self) -> Any:
        return Condition(w.logical_not(self.node))

    __rand__, __ror__ = __and__, __or__


def number_of(node: Node) -> Number:
    return Number(Value(to_dtype(reshape(node, ()), WIDE)))


def _like(x: torch.SymFloat, value: float) -> Node:
    return constant(value, WIDE, x.node.node.mesh)


def _operand(mine: torch.SymFloat, other: Any) -> Node | None:
    if isinstance(other, torch.SymFloat):
        return other.node.node  # type: ignore[no-any-return]
    if isinstance(other, Condition):
        return to_dtype(other.node, WIDE)
    return _like(mine, float(other)) if isinstance(other, (bool, int, float)) else None


def _modulo(a: Node, b: Node) -> Node:
    return w.sub(a, w.mul(w.floor(w.div(a, b)), b))


_ARITHMETIC: dict[str, Callable[[Node, Node], Node]] = {
    "add": w.add, "sub": w.sub, "mul": w.mul, "truediv": w.div, "pow": lambda a, b: _power(a, b),
    "mod": _modulo, "floordiv": lambda a, b: w.floor(w.div(a, b)),
}  # fmt: skip
_COMPARED = {"lt": w.lt, "le": w.le, "gt": w.gt, "ge": w.ge, "eq": w.eq, "ne": w.ne}


def _power(a: Node, b: Node) -> Node:
    return w.sqrt(a) if b.op.is_number and b.attr("value") == 0.5 else w.pow_(a, b)


def _infix(name: str, op: Callable[[Node, Node], Node], made: Any, swapped: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        given = _operand(self, other)
        if given is None:
            return NotImplemented
        pair = (given, self.node.node) if swapped else (self.node.node, given)
        return made(op(*pair))

    method.__name__ = name
    return method


for _name, _op in _ARITHMETIC.items():
    setattr(Number, f"__{_name}__", _infix(_name, _op, number_of, False))
    setattr(Number, f"__r{_name}__", _infix(_name, _op, number_of, True))
for _name, _op in _COMPARED.items():
    setattr(Number, f"__{_name}__", _infix(_name, _op, Condition, False))


# -- questions -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Questions:
    """What Python asks of numbers while a step is traced. `settings` are inputs whose value is known now."""

    settings: Mapping[str, float]
    answers: list[bool] = field(default_factory=list)  # the first answers to give
    asked: list[tuple[Node, bool]] = field(default_factory=list)
    guards: dict[Node, bool] = field(default_factory=dict)  # questions about settings alone, and the answers now
    both: bool = True  # whether both answers are followed
    open: bool = False  # whether a question was asked that only the program can answer
    runs: int = 0

    def decide(self, condition: Node) -> bool:
        names = [n.attr("name") for n in toposort([condition]) if n.op.is_input]
        if all(n in self.settings for n in names):
            answer = bool(evaluate(condition, self.settings))
            if names:
                self.guards[condition] = answer
            return answer
        for known, answer in self.asked:
            if known is condition:
                return answer
        self.open = True
        if len(self.asked) >= MOST or self.runs > MOST:
            raise CaptureError(
                "an optimizer branches too often on numbers that the program computes",
                needed=f"{MOST} questions or fewer, such as `if step > 5`",
                found="more, perhaps in a loop",
                where=user_line(),
            )
        answer = self.answers[len(self.asked)] if len(self.asked) < len(self.answers) else True
        self.asked.append((condition, answer))
        return answer

    def number(self, node: Node) -> None:
        """What Python needs itself, of numbers that settings and counts decide: nothing, for they change."""

    def joined(self, run: Callable[[], dict[Any, Node]], join: Callable[[Node, Any, Any], Any], answers: list[bool] | None = None) -> Any:
        """What `run` gives, every question answered both ways; a way that ends in an error is not taken."""
        self.answers, self.asked, self.runs = answers or [], [], self.runs + 1
        try:
            out: Any = run()
        except CaptureError:
            raise
        except Exception as error:
            out = error
        asked = list(self.asked)
        if not self.both:
            return out
        for i in reversed(range(len(answers or []), len(asked))):
            other = self.joined(run, join, [a for _, a in asked[:i]] + [False])
            if isinstance(out, Exception) or isinstance(other, Exception):
                out = other if isinstance(out, Exception) else out
            else:
                out = join(asked[i][0], out, other)
        return out


class NumberNeeded(Exception):
    """A model takes a number out of what it computes."""


class OfModel:
    """Numbers of a model: Python may compute with them; what it asks of them, batch and state answer, where these can be looked at."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def decide(self, condition: Node) -> bool:
        found = number_from_batch(self.recorder, through(self.recorder, condition, look=True), state=True)
        if found is None:
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        return bool(found)

    def number(self, node: Node) -> float | None:
        return number_from_batch(self.recorder, through(self.recorder, node, look=True), state=True)


def of_model(wanted: bool) -> Callable[[Node], Number | None]:
    """What `.item()` gives a model, a count too; a trace that has no such numbers yet is begun again."""

    def number(node: Node) -> Number | None:
        if node.dtype == torch.bool:
            return None
        if not wanted:
            raise NumberNeeded
        return number_of(stop_gradient(node) if node.dtype.is_floating_point else node)

    return number


_asking: list[Questions | OfModel] = []


def _decide(condition: Node) -> bool:
    if not _asking:
        raise CaptureError("a number of another trace is asked for", needed="numbers of the step that is traced", found=str(condition))
    return _asking[-1].decide(condition)


def evaluate(node: Node, values: Mapping[str, Any]) -> Any:
    """A node of numbers alone, where inputs have these values."""
    with unheard():
        return values_of([node], {}, lambda n: torch.as_tensor(values[n.attr("name")], dtype=n.dtype))[0].item()


# -- where Python would compute with them --------------------------------------------------------------------------------------------------


@contextmanager
def asking(questions: Questions | OfModel) -> Iterator[None]:
    """Inside, math's functions, min and max take numbers that are computed."""
    kept = {(m, n): getattr(m, n) for m, names in ((math, [*_MATH, "pow"]), (builtins, ["min", "max"])) for n in names}
    for name, op in _MATH.items():
        setattr(math, name, _or_plain(kept[math, name], op))
    math.pow = lambda a, b: a**b if _any((a, b)) else kept[math, "pow"](a, b)  # type: ignore[assignment]
    builtins.min = _extreme(kept[builtins, "min"], w.minimum)  # type: ignore[assignment]
    builtins.max = _extreme(kept[builtins, "max"], w.maximum)  # type: ignore[assignment]
    _asking.append(questions)
    try:
        yield
    finally:
        _asking.pop()
        for (module, name), plain in kept.items():
            setattr(module, name, plain)


def _any(xs: Any) -> bool:
    return any(isinstance(x, torch.SymFloat) for x in xs)


_MATH: dict[str, Callable[[Node], Node]] = {
    "sqrt": w.sqrt, "exp": w.exp, "log": w.log, "sin": w.sin, "cos": w.cos, "tanh": w.tanh, "fabs": w.abs_, "floor": w.floor,
    "ceil": lambda x: w.neg(w.floor(w.neg(x))),
}  # fmt: skip


def _or_plain(plain: Any, op: Callable[[Node], Node]) -> Any:
    return lambda x, *more: number_of(op(x.node.node)) if isinstance(x, torch.SymFloat) and not more else plain(x, *more)


def _extreme(plain: Any, op: Callable[[Node, Node], Node]) -> Any:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        some = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or not _any(some) or not all(isinstance(x, (bool, int, float, torch.SymFloat)) for x in some):
            return plain(*args, **kwargs)
        mine = next(x for x in some if isinstance(x, torch.SymFloat))
        nodes: list[Any] = [_operand(mine, x) for x in some]
        for n in nodes[1:]:
            nodes[0] = op(nodes[0], n)
        return number_of(nodes[0])

    return extreme


@function(Tensor.item, tensors=True)
def _item(r: Recorder, x: Tensor) -> Any:
    """What torch gives, with arithmetic of its own where it is computed."""
    found = Tensor.item(x)
    return Number(found.node) if isinstance(found, torch.SymFloat) else found


@function(Tensor.__bool__, tensors=True)
def _truth(r: Recorder, x: Tensor) -> bool:
    """`if x.norm() > 1`: a question as any other, where such questions may be asked."""
    if not _asking or x.numel() != 1 or all(not n.op.is_input for n in toposort([r.node(x)])):
        return Tensor.__bool__(x)
    node = reshape(r.node(x), ())
    return _decide(node if node.dtype == torch.bool else w.ne(node, constant(0, node.dtype, node.mesh)))


def _tensor(plain: Any) -> Any:
    def made(r: Recorder, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, torch.SymFloat):
            return plain(data, *args, **kwargs)
        return r.wrap(to_dtype(data.node.node, kwargs.get("dtype") or torch.get_default_dtype()))

    return made


for _plain in (torch.tensor, torch.as_tensor, torch.scalar_tensor):
    function(_plain, tensors=True)(_tensor(_plain))
