"""What a program means: its global value, and every rank of its mesh in one process. This is the judge.

Global meaning ignores layouts. Rank meaning gives each rank its slice, runs each op as a rank would, and lets collectives
exchange what ranks really hold; `denote` puts the ranks' values back into one global tensor and refuses unequal replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from weft.core.errors import InvalidProgram, WeftError
from weft.core.layout import Layout, O, P, R
from weft.core.node import Node, Type
from weft.core.program import Program
from weft.ops.comm import REDUCE
from weft.ops.registry import Kind, Local
from weft.ops.shape import optimization_barrier

Value = Any  # a tensor, or a tuple of them
PRIME = 2**31 - 1


# -- the global value ----------------------------------------------------------------------------------------------------------


def run_global(
    program: Program, inputs: Mapping[str, torch.Tensor], *, prime: int | None = None, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """The outputs as one device would compute them; with `prime`, exactly, over integers mod that prime. On `device` is made what is made
    of nothing."""
    values: dict[Node, Value] = {}
    last = {a: node for node in program.nodes for a in node.args} | {n: None for _, n in program.outputs}
    for node in program.nodes:
        values[node] = _full(inputs, node) if node.op.is_input else _meaning(node, [values[a] for a in node.args], prime)
        if device is not None and not node.args and isinstance(values[node], torch.Tensor):
            values[node] = values[node].to(device)
        for a in {a for a in node.args if last[a] is node}:
            del values[a]  # nobody reads it any more
    return {name: values[n] for name, n in program.outputs}


def _take(inputs: Mapping[str, Any], node: Node) -> Any:
    name = node.attr("name")
    if name not in inputs:
        raise InvalidProgram(f"no value for input {name!r}", needed=str(node.type), found=f"values for {', '.join(inputs) or 'none'}")
    return inputs[name]


def _full(inputs: Mapping[str, Any], node: Node) -> Any:
    value = _take(inputs, node)
    shape = getattr(value, "shape", None)
    if shape is None or tuple(shape) != node.shape:
        found = type(value).__name__ if shape is None else str(list(shape))
        raise InvalidProgram(f"input {node.attr('name')!r} has another shape", needed=f"a tensor of {node.type}", found=found)
    return value


def _meaning(node: Node, args: list[Value], prime: int | None) -> Value:
    attrs = dict(node.attrs)
    if prime is None:
        return node.op.run(*args, **attrs)
    if node.op.is_item:
        return args[0][attrs["index"]]
    _require_field(node)
    return node.op.field(prime, *args, **attrs)


def _require_field(node: Node) -> None:
    if node.op.field is None:
        needed = "an op with a meaning over a prime field"
        raise WeftError(f"{node.op.name} is no polynomial", needed=needed, found=node.op.name, try_="run it in floats")


# -- the same, rank by rank ----------------------------------------------------------------------------------------------------


def run_ranks(program: Program, inputs: Mapping[str, list[Any]], *, prime: int | None = None) -> dict[str, list[Any]]:
    """Per output, the local value of every rank; inputs likewise. A rank that holds nothing has None."""
    values: dict[Node, list[Value]] = {}
    for node in program.nodes:
        if node.op.is_input:
            values[node] = _take(inputs, node)
        elif node.op.kind is Kind.COMM:
            values[node] = _communicate(node, [values[a] for a in node.args], prime)
        else:
            values[node] = _compute(node, [values[a] for a in node.args], prime)
    return {name: values[n] for name, n in program.outputs}


def _compute(node: Node, args: list[list[Value]], prime: int | None) -> list[Value]:
    return [_on_rank(node, at, [a[r] for a in args], prime) for r, at in enumerate(node.mesh.places())]


def _on_rank(node: Node, at: Mapping[str, int], args: list[Value], prime: int | None) -> Value:
    if node.op is optimization_barrier:  # each value has its own ranks
        return tuple(args)
    if not node.types[0].layout.present(at) or any(a is None for a in args):
        return None
    attrs = dict(node.attrs)
    if node.op.local is not None:
        if prime is not None:
            _require_field(node)
        return node.op.local(Local(node, at), *args, **attrs)
    return _meaning(node, args, prime)


def _communicate(node: Node, args: list[list[Value]], prime: int | None) -> list[Value]:
    axis = node.attr("axis")
    places = list(node.mesh.places())
    parts: list[list[Value]] = [[None] * len(places) for _ in node.args]
    for group in node.mesh.groups(axis):
        at = [places[r] for r in group]
        for k, (arg, type_) in enumerate(zip(node.args, node.types, strict=True)):
            mine = [args[k][r] for r in group]
            gone = all(x is None for x in mine)
            out = mine if gone else node.op.exchange(mine, at, arg.type.layout, type_.layout, dict(node.attrs))
            for r, x in zip(group, out, strict=True):
                parts[k][r] = x if x is None or prime is None else x % prime
    return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))


# -- between global values and what ranks hold -----------------------------------------------------------------------------------


def take_local(value: torch.Tensor, layout: Layout, at: Mapping[str, int]) -> torch.Tensor:
    """The rank's slice of a global value."""
    for d in range(layout.rank):
        if any(a.axes for a in layout.dims[d]):
            value = value.index_select(d, layout.positions(d, at).to(value.device))
    return value


def distribute(value: torch.Tensor, type_: Type, seed: int = 0, prime: int | None = None) -> list[Any]:
    """One local tensor per rank that together denote the value; terms of a Partial are drawn at random."""
    layout = type_.layout
    places = list(layout.mesh.places())
    locals_: list[Any] = [take_local(value, layout, at).clone() if layout.present(at) else None for at in places]
    gen = torch.Generator().manual_seed(seed)
    for axis, place in layout.partials:
        drawn: dict[Any, list[torch.Tensor]] = {}
        for group in layout.mesh.groups(axis) if isinstance(place, P) else ():
            x = locals_[group[0]]
            if x is not None:
                coordinates = tuple(c for a, c in places[group[0]].items() if layout.placement(a) != R)
                if coordinates not in drawn:  # replicas hold the same terms
                    drawn[coordinates] = _terms(x, len(group), place.op, gen, prime)
                for r, term in zip(group, drawn[coordinates], strict=True):
                    locals_[r] = term
    return locals_


def _terms(x: torch.Tensor, n: int, op: str, gen: torch.Generator, prime: int | None) -> list[torch.Tensor]:
    """n tensors whose sum (max, min) is x."""
    if x.dtype == torch.bool:
        return _bool_terms(x, n, op, gen)
    if op == "sum":
        draw = [torch.randint(0, prime, x.shape, generator=gen) if prime else _noise(x, gen) for _ in range(n - 1)]
        rest = functools.reduce(torch.sub, draw, x)
        return [*draw, rest % prime if prime else rest]
    sign = -1 if op == "max" else 1
    owner = torch.randint(0, n, x.shape, generator=gen)
    return [torch.where(owner == r, x, x + sign * torch.randint(1, 9, x.shape, generator=gen).to(x.dtype)) for r in range(n)]


def _bool_terms(x: torch.Tensor, n: int, op: str, gen: torch.Generator) -> list[torch.Tensor]:
    """The same of truth values, whose sum and max are an or, whose min is an and."""
    if op == "min":
        return [~term for term in _bool_terms(~x, n, "max", gen)]
    draw = [x & (torch.rand(x.shape, generator=gen) < 0.5) for _ in range(n - 1)]
    return [*draw, functools.reduce(lambda left, term: left & ~term, draw, x)]


def _noise(x: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    return (
        torch.randn(x.shape, generator=gen, dtype=torch.float64).to(x.dtype)
        if x.dtype.is_floating_point
        else torch.randint(-9, 9, x.shape, generator=gen).to(x.dtype)
    )


def denote(locals_: list[Any], type_: Type, *, tolerance: float = 0.0, prime: int | None = None) -> torch.Tensor:
    """The global value the ranks hold together; replicas that differ by more than the tolerance are an error."""
    layout = type_.layout
    mesh, placements = layout.mesh, dict(layout.partials)
    values: dict[tuple[int, ...], Any] = {tuple(mesh.coords(r).values()): x for r, x in enumerate(locals_)}
    for i in range(len(mesh.axes) - 1, -1, -1):  # fold the held axes away, innermost first
        axis = mesh.axes[i]
        if layout.where_sharded(axis) is not None:
            continue
        merged: dict[tuple[int, ...], Any] = {}
        for key in sorted({(*k[:i], 0, *k[i + 1 :]) for k in values}):
            group = [values[(*key[:i], j, *key[i + 1 :])] for j in range(mesh.sizes[axis])]
            merged[key] = _fold(group, placements.get(axis), tolerance, prime, axis)
        values = merged
    return _joined(values, layout)


def _fold(group: list[Any], place: Any, tolerance: float, prime: int | None, axis: str) -> Any:
    if isinstance(place, O):
        return group[place.root]
    if any(x is None for x in group):
        return None
    if isinstance(place, P):
        total = functools.reduce(REDUCE[place.op], group)
        return total % prime if prime and place.op == "sum" else total
    for r, x in enumerate(group[1:], 1):
        if x.shape != group[0].shape or not same_values(x, group[0], tolerance):
            raise InvalidProgram(
                f"replicas along {axis} differ",
                needed="equal values on all ranks",
                found=f"ranks 0 and {r} apart by {_distance(x, group[0])}",
            )
    return group[0]


def same_values(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.dtype.is_floating_point:
        return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(a, b)


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"shapes {list(a.shape)} and {list(b.shape)}" if a.shape != b.shape else f"{(a.double() - b.double()).abs().max():.3g}"


def _joined(values: Mapping[tuple[int, ...], Any], layout: Layout) -> torch.Tensor:
    first = next(x for x in values.values() if x is not None)
    out = first.new_zeros(layout.shape)
    for key, x in values.items():
        at = dict(zip(layout.mesh.axes, key, strict=True))
        expected = layout.local_shape(at)
        if tuple(x.shape) != expected:
            raise InvalidProgram(f"a rank holds the wrong shape at {at}", needed=str(list(expected)), found=str(list(x.shape)))
        index = [layout.positions(d, at) for d in range(layout.rank)]
        if index:
            out[torch.meshgrid(*index, indexing="ij")] = x
        else:
            out = x.clone()
    return out


# -- both at once ----------------------------------------------------------------------------------------------------------------


def run(
    program: Program, inputs: Mapping[str, torch.Tensor], *, seed: int = 0, prime: int | None = None, tolerance: float = 1e-9
) -> dict[str, torch.Tensor]:
    """Global inputs in, global outputs out, through every rank of the mesh."""
    spread = {name: distribute(_full(inputs, n), n.type, seed + i, prime) for i, (name, n) in enumerate(program.input_names.items())}
    outs = run_ranks(program, spread, prime=prime)
    return {name: denote(outs[name], n.type, tolerance=tolerance, prime=prime) for name, n in program.outputs}
