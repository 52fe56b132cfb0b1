"""How each op of a fused group is written in each target, where its entry does not say so itself, and how values get readable names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from weft.codegen.expr import Level, Value, ordered
from weft.core.errors import KernelError
from weft.core.node import OPS

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/",
         "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}  # fmt: skip
PYTHON = {
    **{fn: f"({{0}} {op} {{1}})" for fn, op in INFIX.items()},
    "pow": "({0} ** {1})", "maximum": "np.maximum({0}, {1})", "minimum": "np.minimum({0}, {1})", "neg": "(-{0})", "abs": "abs({0})",
    "reciprocal": "(1.0 / {0})", "where": "({1} if {0} else {2})",
    "floor": "np.floor({0})", "sign": "np.sign({0})", "cast": "{0}",
    "low24": "float({0} % 16777216)", "high24": "float({0} // 16777216)",
}  # fmt: skip
CPP = {
    **{fn: f"({{0}} {op} {{1}})" for fn, op in INFIX.items()},
    "pow": "std::pow({0}, {1})", "maximum": "weft::larger({0}, {1})", "minimum": "weft::smaller({0}, {1})",
    "neg": "(-{0})", "abs": "std::abs({0})", "reciprocal": "(1 / {0})",
    "where": "({0} ? {1} : {2})", "floor": "std::floor({0})", "sign": "real(({0} > 0) - ({0} < 0))",
    "uniform": "weft::uniform({0}, int64_t({1}) + int64_t({2}) * 16777216, {3})",
}  # fmt: skip
TRITON = {
    **{fn: f"({{0}} {op} {{1}})" for fn, op in INFIX.items()},
    "pow": "tl.exp2({1} * tl.log2({0}))", "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "neg": "(-{0})", "abs": "tl.abs({0})",
    "reciprocal": "(1.0 / {0})", "where": "tl.where(({0}) != 0, {1}, {2})", "floor": "tl.floor({0})",
    "sign": "(({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype))",
    "uniform": "uniform({0}, ({1}).to(tl.int64) + ({2}).to(tl.int64) * 16777216, {3})",
}  # fmt: skip
TARGETS = [PYTHON, CPP, TRITON]


def python(value: Any) -> str:
    """A number, name or setting as Python and Triton read it: an infinity has no literal there."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{python(k)}: {python(v)}' for k, v in value.items())}}}"
    if type(value) in (tuple, list):
        inside = ", ".join(map(python, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def settings(attrs: Iterable[tuple[str, Any]]) -> list[str]:
    """Attributes as the keyword arguments of a call."""
    return [f"{name}={python(value)}" for name, value in attrs]


class Writer:
    """Turns values into text: a value with a name is that name, others are written out in place."""

    def __init__(
        self, table: dict[str, str], number: Callable[[float], str], cast: Callable[[str, str], str], entry: int | None = None
    ) -> None:
        self.table, self.number, self.cast = table, number, cast
        self.entry = TARGETS.index(table) if entry is None else entry  # which of the forms that an op's entry says
        self.names: dict[Value, str] = {}

    def name(self, value: Value, name: str) -> str:
        self.names[value] = name
        return name

    def form(self, fn: str) -> str | None:
        """How an op is written: by this target's table, or as its entry says."""
        own = OPS[fn].code if fn in OPS else None
        return self.table.get(fn) or (own[self.entry] if own is not None else None)

    def text(self, value: Value) -> str:
        if value in self.names:
            return self.names[value]
        if value.fn == "const":
            return self.number(value.const)
        if value.fn == "cast":
            return self.cast(self.text(value.args[0]), value.name)
        form = self.form(value.fn)
        if form is None:
            raise KernelError(f"{value.fn} has no text here", needed="a value that was read or named before",
                              found=value.fn)  # fmt: skip
        return form.format(*map(self.text, value.args), value.name)


def bare(text: str) -> str:
    """`text` without parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


def has_total(value: Value) -> bool:
    return any(v.fn == "total" for v in ordered([value]))


def host_scalars(roots: Iterable[Value]) -> list[Value]:
    """The largest values above constants that the host can work out before a call, in order of first use."""
    found: dict[Value, None] = {}
    for v in ordered(roots):
        if v.level < Level.ELEMENT and not has_total(v):
            continue
        for arg in v.args:
            if arg.level < Level.ELEMENT and arg.fn != "const" and not has_total(arg):
                found[arg] = None
    return list(found)


def totals_in(roots: Iterable[Value]) -> list[Value]:
    """The totals that `roots` refer to, not those that went into these."""
    found: dict[Value, None] = {}
    stack = list(roots)
    while stack:
        v = stack.pop()
        if v.fn == "total":
            found[v] = None
        else:
            stack.extend(v.args)
    return list(found)


def uses(values: Iterable[Value]) -> dict[Value, int]:
    """How often each value is an argument within `values`."""
    count: dict[Value, int] = {}
    for v in values:
        for a in v.args:
            count[a] = count.get(a, 0) + 1
    return count
