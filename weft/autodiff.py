"""Reverse mode: the gradient of a program is a program, made of the ops' vjps, its layouts and communication explicit.

A cotangent denotes a global tensor like any value. Where the value is sharded it is sharded the same; where the value is a partial sum it
is replicated; where the value is replicated it may itself be a partial sum, which is how gradients stay unreduced
until someone asks. So the gradient of all_gather is reduce_scatter for a Partial cotangent, and slice for a replicated one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weft.core.errors import NotDifferentiable, TypeMismatch, UnknownName
from weft.core.layout import Layout, O, P, Placement, R, Replicated
from weft.core.node import Node, Type, constant, make, remade, toposort
from weft.core.program import Program, new_program
from weft.ops.comm import all_reduce_partials, is_comm, reshard
from weft.ops.pointwise import add
from weft.ops.registry import Kind
from weft.ops.shape import expand_like
from weft.ops.source import input_node

Slot = tuple[Node, int]  # one output of a node


def grad(program: Program, of: str | None = None, wrt: Sequence[str] | None = None, *, reduce: bool = False) -> Program:
    """The program with `d.NAME` added for every input in `wrt`: the gradient of the scalar output `of`.

    A gradient comes in the layout it is born in, mostly Partial along the data axis; `reduce=True` brings it to its input's.
    """
    name = of or _only_output(program)
    loss = _known(program.output_names, name, "output")
    if loss.shape != () or not loss.dtype.is_floating_point:
        raise NotDifferentiable(
            f"the gradient of {name!r} needs a number",
            needed="a floating-point output of shape []",
            found=str(loss.type),
            try_="sum it first, or vjp(program)",
        )
    one = _dual(constant(1.0, loss.dtype, program.mesh), loss.type)
    names = list(wrt) if wrt is not None else [n for n, node in program.input_names.items() if node.dtype.is_floating_point]
    grads = backward({loss: one}, [_known(program.input_names, n, "input") for n in names])
    outputs = dict(program.outputs)
    for n in names:
        outputs[f"d.{n}"] = _finish(grads.get(program.input_names[n]), program.input_names[n], reduce)
    return new_program(f"{program.name}_grad", program.mesh, program.inputs, outputs, state=program.state, lines=program.lines)


def vjp(program: Program, wrt: Sequence[str] | None = None) -> Program:
    """Only the cotangents: inputs `ct.OUT` for every float output are added, outputs are `d.NAME`."""
    seeds: dict[Node, Node] = {}
    inputs = list(program.inputs)
    for name, node in program.outputs:
        if node.dtype.is_floating_point:
            ct = input_node(f"ct.{name}", Type(node.dtype, dual_layout(node.type)))
            inputs.append(ct)
            seeds[node] = add(seeds[node], ct) if node in seeds else ct
    names = list(wrt) if wrt is not None else [n for n, node in program.input_names.items() if node.dtype.is_floating_point]
    grads = backward(seeds, [_known(program.input_names, n, "input") for n in names])
    outputs = {f"d.{n}": _finish(grads.get(program.input_names[n]), program.input_names[n], False) for n in names}
    return new_program(f"{program.name}_vjp", program.mesh, inputs, outputs)


def _known(nodes: Mapping[str, Node], name: str, what: str) -> Node:
    if name not in nodes:
        raise UnknownName(f"no {what} {name!r} to differentiate", needed=f"one of {', '.join(nodes)}", found=name)
    return nodes[name]


def _only_output(program: Program) -> str:
    if len(program.outputs) != 1:
        raise NotDifferentiable(
            f"{program.name} has {len(program.outputs)} outputs",
            needed="the name of one",
            found=", ".join(n for n, _ in program.outputs),
            try_="grad(program, of=...)",
        )
    return program.outputs[0][0]


def _finish(ct: Node | None, arg: Node, reduce: bool) -> Node:
    if ct is None:
        ct = expand_like(constant(0.0, arg.dtype, arg.mesh), arg)
    if reduce:
        ct = all_reduce_partials(ct) if any(isinstance(p, P) for _, p in arg.layout.partials) else reshard(ct, arg.layout)
    return ct


# -- layouts of cotangents -----------------------------------------------------------------------------------------------------


def dual_layout(value: Type, ct: Layout | None = None) -> Layout:
    """The layout a cotangent of the value must have; along axes where both replicated and partial will do, what `ct` has."""
    layout = Layout(value.mesh, value.layout.dims)
    for axis in value.mesh.axes:
        place: Placement = value.on(axis)
        if isinstance(place, O):
            layout = layout.hold(axis, place)
        elif isinstance(place, Replicated) and ct is not None and isinstance(ct.placement(axis), P):
            layout = layout.hold(axis, ct.placement(axis))
    return layout


def _dual(ct: Node, value: Type) -> Node:
    return reshard(ct, dual_layout(value, ct.layout))  # type: ignore[no-any-return]


# -- the sweep -----------------------------------------------------------------------------------------------------------------


def backward(seeds: Mapping[Node, Node], wrt: Iterable[Node]) -> dict[Node, Node]:
    """Cotangents of `wrt` from cotangents of some nodes."""
    targets = set(wrt)
    order = toposort(seeds)
    active = _depends_on(order, targets)
    pending: dict[Slot, list[Node]] = {}
    for node, ct in seeds.items():
        pending.setdefault((node, 0), []).append(_dual(ct, node.type))
    done: dict[Node, Node] = {}
    for node in reversed(order):
        if node not in active:
            continue
        cts = [_total(pending.pop((node, i), []), t) for i, t in enumerate(node.types)]
        if all(ct is None for ct in cts):
            continue
        if node in targets:
            done[node] = cts[0]  # type: ignore[assignment]
        for slot, ct in _push(node, cts, active):
            pending.setdefault(slot, []).append(_dual(ct, slot[0].types[slot[1]]))
    return done


def _depends_on(order: Sequence[Node], targets: set[Node]) -> set[Node]:
    active: set[Node] = set()
    for node in order:
        if node in targets or any(a in active for a in node.args):
            active.add(node)
    return active


def _total(cts: list[Node], value: Type) -> Node | None:
    """The sum of what came back; a replicated and a partial one are first brought together.

    Matmuls are added among themselves first: once placed they may be partial sums, which then are sent as one."""
    if not cts:
        return None
    by_layout: dict[Layout, Node] = {}
    for ct in (*_summed(cts, False), *_summed(cts, True)):
        by_layout[ct.layout] = add(by_layout[ct.layout], ct) if ct.layout in by_layout else ct
    if len(by_layout) == 1:
        return next(iter(by_layout.values()))
    full = dual_layout(value)
    for axis in value.mesh.axes:
        if all(isinstance(layout.placement(axis), P) for layout in by_layout):
            full = full.hold(axis, P())
    total: Node | None = None
    for ct in by_layout.values():
        ct = reshard(ct, full)
        total = ct if total is None else add(total, ct)
    return total


def _summed(cts: Sequence[Node], matmuls: bool) -> list[Node]:
    """The matmuls of some cotangents, or what else there is, added up layout by layout."""
    sums: dict[Layout, Node] = {}
    for ct in cts:
        if (ct.op.kind is Kind.CONTRACT) == matmuls:
            sums[ct.layout] = add(sums[ct.layout], ct) if ct.layout in sums else ct
    return list(sums.values())


def _push(node: Node, cts: list[Node | None], active: set[Node]) -> list[tuple[Slot, Node]]:
    if node.op.is_item:
        (ct,) = cts
        return [((node.args[0], node.attr("index")), ct)] if ct is not None else []
    if not any(a in active for a in node.args):
        return []
    if node.op.vjp is None and node.op.written is not None:
        return [((a, 0), back) for a, back in zip(node.args, _through_parts(node, cts), strict=True) if back is not None and a in active]
    if node.op.vjp is None:
        raise NotDifferentiable(
            f"{node.op.name} has no gradient",
            needed="an op with a vjp",
            found=node.op.name,
            try_="leave what depends on it out of `wrt`, or give the op a vjp",
        )
    backs = _pull(node, cts)
    return [((a, 0), back) for a, back in zip(node.args, backs, strict=True) if back is not None and a in active]


def _through_parts(node: Node, cts: list[Node | None]) -> list[Node | None]:
    """Cotangents of the operands of an op that has no vjp but is written in ops that have one."""
    slots = [input_node(f"operand.{i}", a.type) for i, a in enumerate(node.args)]
    back = {i: input_node(f"cotangent.{i}", ct.type) for i, ct in enumerate(cts) if ct is not None}
    parts = node.op.written(*slots, **dict(node.attrs))
    parts = parts if isinstance(parts, tuple) else (parts,)
    found = backward({parts[i]: ct for i, ct in back.items()}, slots)
    made = remade(found.values(), {**dict(zip(slots, node.args, strict=True)), **{slot: cts[i] for i, slot in back.items()}})
    return [made[found[s]] if s in found else None for s in slots]


def _pull(node: Node, cts: list[Node | None]) -> Sequence[Node | None]:
    """The op's vjp, on operands whose partial max or min is done; where it cannot take a partial cotangent, on reduced ones."""
    node = _with_extremes_done(node)
    full = (
        cts
        if len(cts) == 1 or node.op.sparse_cotangents
        else [_or_zero(ct, t) for ct, t in zip(cts, node.types, strict=True)]
    )
    try:
        return node.op.vjp(node, *full)  # type: ignore[no-any-return]
    except TypeMismatch:
        if all(ct is None or not any(isinstance(p, P) for _, p in ct.layout.partials) for ct in full):
            raise
        return node.op.vjp(node, *[all_reduce_partials(ct) if ct is not None else None for ct in full])  # type: ignore[no-any-return]


def _with_extremes_done(node: Node) -> Node:
    """A slope at a partial max is not the max of slopes, so the vjp sees the values themselves."""
    pending = [len(a.types) == 1 and any(isinstance(p, P) and p.op != "sum" for _, p in a.layout.partials) for a in node.args]
    if is_comm(node) or not any(pending):
        return node
    return make(node.op, tuple(all_reduce_partials(a) if wait else a for a, wait in zip(node.args, pending, strict=True)), dict(node.attrs))


def _or_zero(ct: Node | None, type_: Type) -> Node | None:
    """Outputs nobody used have a zero cotangent; integers have none."""
    if ct is not None or not type_.dtype.is_floating_point:
        return ct
    like = input_node("like", Type(type_.dtype, dual_layout(type_)))
    return expand_like(constant(0.0, type_.dtype, type_.mesh), like)  # type: ignore[no-any-return]


__all__ = ["R", "backward", "dual_layout", "grad", "vjp"]
