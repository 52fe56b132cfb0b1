"""A program run in an exact domain: on every rank of its mesh, and erased, as one device would run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weft import interp
from weft.core.layout import Layout, P
from weft.core.node import Node, Type, toposort
from weft.ops.registry import Kind
from weft.ops.shape import optimization_barrier
from weft.rewrite.prove.domains import Codes, Domain

Held = list[Codes]  # what every rank holds


def spread(domain: Domain, node: Node) -> Held:
    """What the ranks hold of an input: slices of one tensor, or of one tensor per term of a Partial."""
    layout, name = node.layout, node.attr("name")
    pending = [axis for axis, p in layout.partials if isinstance(p, P)]
    full: dict[tuple[int, ...], torch.Tensor] = {}
    out: Held = []
    for at in layout.mesh.places():
        salt = tuple(at[a] for a in pending)
        if salt not in full:
            full[salt] = domain.draw(name, layout.shape, salt)
        out.append(interp.take_local(full[salt], layout, at) if layout.present(at) else None)
    return out


def run_node(domain: Domain, node: Node, args: Sequence[Held]) -> Held:
    if node.op.kind is Kind.COMM:
        return _exchange(domain, node, args)
    return [_on_rank(domain, node, at, [a[r] for a in args]) for r, at in enumerate(node.mesh.places())]


def _on_rank(domain: Domain, node: Node, at: Mapping[str, int], args: list[Codes]) -> Codes:
    if node.op is optimization_barrier:
        return tuple(args)
    if not node.types[0].layout.present(at) or any(a is None for a in args):
        return None
    return domain.compute(node, at, args)


def _exchange(domain: Domain, node: Node, args: Sequence[Held]) -> Held:
    axis, places = node.attr("axis"), list(node.mesh.places())
    parts: list[Held] = [[None] * len(places) for _ in node.args]
    for group in node.mesh.groups(axis):
        at = [places[r] for r in group]
        for k, (arg, type_) in enumerate(zip(node.args, node.types, strict=True)):
            mine = _reduced_first(domain, [args[k][r] for r in group], arg.layout, axis)
            gone = all(x is None for x in mine)
            out = mine if gone else node.op.exchange(mine, at, arg.layout, type_.layout, dict(node.attrs))
            for r, x in zip(group, out, strict=True):
                parts[k][r] = x
    return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))


def _reduced_first(domain: Domain, xs: Held, layout: Layout, axis: str) -> Held:
    """Codes cannot be added as numbers, so the reduction is done here: the collective then adds zeros, or compares equals."""
    place = layout.placement(axis)
    if not isinstance(place, P) or any(x is None for x in xs):
        return xs
    total = domain.reduce(xs, place.op)
    return [total, *(torch.zeros_like(total) for _ in xs[1:])] if place.op == "sum" else [total] * len(xs)


def denote(domain: Domain, values: Held, type_: Type) -> torch.Tensor:
    """The global value the ranks hold together; replicas that differ are an error."""
    layout = type_.layout
    for axis, place in layout.partials:
        if isinstance(place, P):
            values = list(values)
            for group in layout.mesh.groups(axis):
                xs = [values[r] for r in group]
                total = None if any(x is None for x in xs) else domain.reduce(xs, place.op)
                for r in group:
                    values[r] = total
            layout = layout.release(axis)
    return interp.denote(values, type_.with_layout(layout))


def run(domain: Domain, roots: Iterable[Node], known: Mapping[Node, Held] | None = None) -> dict[Node, Held]:
    """What the ranks hold of every node the roots need."""
    values = dict(known or {})
    for node in toposort(roots):
        if node not in values:
            values[node] = spread(domain, node) if node.op.is_input else run_node(domain, node, [values[a] for a in node.args])
    return values


def global_inputs(domain: Domain, inputs: Iterable[Node]) -> dict[str, torch.Tensor]:
    """The tensors that inputs denote, by name."""
    return {n.attr("name"): denote(domain, spread(domain, n), n.type) for n in inputs}


def run_alone(domain: Domain, roots: Iterable[Node], given: Mapping[str, torch.Tensor]) -> dict[Node, Any]:
    """Nodes of one device, from the global values of the inputs."""
    values: dict[Node, Held] = {}
    for node in toposort(roots):
        values[node] = [given[node.attr("name")]] if node.op.is_input else run_node(domain, node, [values[a] for a in node.args])
    return {n: v[0] for n, v in values.items()}
