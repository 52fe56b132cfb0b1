"""Values from nothing: the inputs of a program, and numbers."""

from __future__ import annotations

from typing import Any

import torch

from weft.core.errors import InvalidProgram
from weft.core.layout import Layout, Mesh
from weft.core.node import DTYPE_NAMES, Attrs, Node, Type, dtype_of, make
from weft.core.role import Role
from weft.ops.registry import Kind, Types, define


def _input_type(types: Types, attrs: Attrs) -> Type:
    return Type(dtype_of(attrs["dtype"]), attrs["layout"])


def _unbound(**attrs: Any) -> torch.Tensor:
    raise InvalidProgram(f"input {attrs['name']!r} was never given a value", needed="a value", found="none")


input_op = define("input", kind=Kind.SOURCE, infer=_input_type, run=_unbound, vjp=lambda n, ct: (), is_input=True)


def input_node(name: str, type_: Type, role: Role | None = None) -> Node:
    given = {"name": name, "dtype": DTYPE_NAMES[type_.dtype], "layout": type_.layout}
    return make(input_op, (), given if role is None else {**given, "role": role})


def input_in_layout(node: Node, layout: Layout) -> Node:
    """The same input, held otherwise."""
    return input_node(node.attr("name"), Type(node.dtype, layout), node.role)


def _const_infer(types: Types, attrs: Attrs) -> Type:
    return Type(dtype_of(attrs["dtype"]), Layout.of(Mesh(**dict(attrs["mesh"])), ()))


def _residue(value: float, p: int) -> int:
    """A float is an integer over a power of two, and so has an exact place in the field."""
    over, under = float(value).as_integer_ratio()
    return over * pow(under, -1, p) % p


const = define(
    "const",
    kind=Kind.SOURCE,
    infer=_const_infer,
    run=lambda value, dtype, mesh: torch.tensor(value, dtype=dtype_of(dtype)),
    vjp=lambda n, ct: (),
    field=lambda p, value, dtype, mesh: torch.tensor(_residue(value, p), dtype=torch.int64),
    is_number=True,
)
