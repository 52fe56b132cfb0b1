"""The language: a function on values, traced into a program. Layouts are given per input; a type error shows the user's line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.core.errors import InvalidProgram, WeftError
from weft.core.layout import Layout, Mesh, Placement
from weft.core.node import Node, Type, dtype_of, listening, user_line
from weft.core.program import Program, new_program
from weft.ops.source import input_node


@dataclass(frozen=True)
class TensorSpec:
    """An input to be: dtype, shape, and what each mesh axis holds (replicated where nothing is said)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    placements: tuple[tuple[str, Placement], ...] = ()

    def type_on(self, mesh: Mesh) -> Type:
        return Type(self.dtype, Layout.of(mesh, self.shape, dict(self.placements)))


def tensor(dtype: str | torch.dtype, *shape: int, **placements: Placement) -> TensorSpec:
    """`tensor("f32", 1024, dp=P())`: what an input is."""
    return TensorSpec(dtype_of(dtype), tuple(shape), tuple(placements.items()))


def f32(*shape: int, **placements: Placement) -> TensorSpec:
    """A tensor of 32-bit floats, replicated along every axis that is not named."""
    return tensor("f32", *shape, **placements)


def f64(*shape: int, **placements: Placement) -> TensorSpec:
    """A tensor of 64-bit floats, replicated along every axis that is not named."""
    return tensor("f64", *shape, **placements)


def bf16(*shape: int, **placements: Placement) -> TensorSpec:
    """A tensor of bfloat16, replicated along every axis that is not named."""
    return tensor("bf16", *shape, **placements)


def i64(*shape: int, **placements: Placement) -> TensorSpec:
    """A tensor of 64-bit integers, replicated along every axis that is not named."""
    return tensor("i64", *shape, **placements)


def trace(fn: Callable[..., Any], mesh: Mesh, *, name: str | None = None, state: Mapping[str, str] | None = None, **inputs: Any) -> Program:
    """Trace `fn` on symbolic inputs into a program.

    `inputs` are tensor specs (`lang.f32(1024, dp=P())`), or dicts and lists of them. `fn` returns a dict of outputs, or one, called `out`.
    An output with the name and type of an input is its next value (state) unless `state` says otherwise.
    """
    _fits(fn, mesh, inputs)
    flat: dict[str, Node] = {}
    args = {key: _declare(key, spec, mesh, flat) for key, spec in inputs.items()}
    lines: dict[Node, str] = {}
    with listening(lambda n: lines.setdefault(n, user_line() or "")):
        result = fn(**args)
    outputs: dict[str, Node] = {}
    _collect("out" if not isinstance(result, (dict, list, tuple)) else "", result, outputs)
    return new_program(name or _name_of(fn), mesh, list(flat.values()), outputs, state=_state(flat, outputs, state), lines=lines)


def _fits(fn: Callable[..., Any], mesh: Any, inputs: Mapping[str, Any]) -> None:
    if not isinstance(mesh, Mesh):
        raise InvalidProgram("no mesh to trace for", needed="weft.Mesh(dp=4)", found=repr(mesh), where=user_line())
    try:
        inspect.signature(fn).bind(**inputs)
    except TypeError as e:
        found = ", ".join(inputs) or "none"
        raise InvalidProgram(
            f"the inputs are not those of {_name_of(fn)}", needed=str(inspect.signature(fn)), found=f"{found}: {e}", where=user_line()
        ) from None


def _name_of(fn: Callable[..., Any]) -> str:
    """A lambda has no name that could be read back."""
    name = getattr(fn, "__name__", "")
    return name if name.isidentifier() else "program"


def _declare(key: str, spec: Any, mesh: Mesh, flat: dict[str, Node]) -> Any:
    if isinstance(spec, dict):
        return {k: _declare(f"{key}.{k}", s, mesh, flat) for k, s in spec.items()}
    if isinstance(spec, (list, tuple)):
        return [_declare(f"{key}.{i}", s, mesh, flat) for i, s in enumerate(spec)]
    if not isinstance(spec, TensorSpec):
        raise WeftError(
            f"input {key!r} is not described", needed="tensor(dtype, *shape, axis=placement)", found=repr(spec), where=user_line()
        )
    try:
        flat[key] = input_node(key, spec.type_on(mesh))
    except WeftError as e:
        raise e.at(f"input {key!r}, {user_line()}") from None
    return flat[key]


def _collect(key: str, value: Any, out: dict[str, Node]) -> None:
    if isinstance(value, Node):
        out[key] = value
    elif isinstance(value, dict):
        for k, v in value.items():
            _collect(f"{key}.{k}" if key else str(k), v, out)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            _collect(f"{key}.{i}" if key else str(i), v, out)
    else:
        raise InvalidProgram(f"output {key!r} is no value of the program", needed="what an op gave", found=repr(value), where=user_line())


def _state(inputs: Mapping[str, Node], outputs: Mapping[str, Node], given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    if given is not None:
        return tuple(given.items())
    return tuple((name, name) for name, n in outputs.items() if name in inputs and inputs[name].type == n.type)
