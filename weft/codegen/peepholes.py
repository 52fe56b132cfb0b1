"""Several nodes that torch does in one call: a matmul with its bias, pieces laid side by side, both gradients of a
convolution, the updates of many parameters. Each form is one step of a rank, found in its program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from weft.codegen.library_calls import LIBRARY, documents, library_call
from weft.codegen.matmul import is_linear
from weft.codegen.peephole import Peephole, Text
from weft.codegen.text import settings
from weft.codegen.updates import updates
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.comm import all_gather
from weft.ops.conv import conv2d_input_grad, conv2d_weight_grad
from weft.ops.experts import Sending, experts, left_out, sent
from weft.ops.experts import _back as experts_back
from weft.ops.experts import _through as experts_through
from weft.ops.pointwise import add
from weft.ops.registry import Kind
from weft.ops.shape import concat_op, narrow_op, pad_op, reshape_op


def peepholes_of(program: Program, busy: Collection[Node], coords: Mapping[str, int], donate: bool, device: str) -> list[Peephole]:
    """The forms in a program, none sharing a node with another or with `busy`."""
    taken, found = set(busy), []
    plain = (*_buckets(program), *_convolutions(program), *_sides(program), *_linears(program))
    for form in (*updates(program, donate, device), *plain, *_documents(program, device), *_sent(program, coords, device)):
        present = all(t.layout.present(coords) for n in form.nodes for t in n.types)
        if present and not taken & set(form.nodes):
            taken |= set(form.nodes)
            found.append(form)
    return found


def _only_read_by(p: Program, n: Node, user: Node) -> bool:
    return list(p.users[n]) == [user] and not p.outputs_of(n)


# -- x w^T + b ---------------------------------------------------------------------------------------------------------------------


def _linears(p: Program) -> Iterator[Peephole]:
    for n in p.nodes:
        if n.op is add:
            for y, bias in (n.args, n.args[::-1]):
                if is_linear(y) and _only_read_by(p, y, n) and bias.shape == y.shape[-1:] and bias.dtype == y.dtype:
                    x, w = y.args
                    yield Peephole(
                        (y, n), (x, w, bias), (n,), lambda v, x=x, w=w, b=bias: f"torch.nn.functional.linear({v(x)}, {v(w)}, {v(b)})"
                    )
                    break


# -- attention inside documents, by their numbers and not by a mask -----------------------------------------------------------------


def _documents(p: Program, device: str) -> Iterator[Peephole]:
    for n in p.nodes:
        found = documents(n, device) if n.op.attends is not None and n.op.name in LIBRARY else None
        if found is not None:
            inputs = (*n.args[:-1], *found)
            how = ", ".join(settings((k, v) for k, v in n.attrs if k in ("scale", "causal")))
            yield Peephole((n,), inputs, (n,), lambda v, n=n, xs=inputs, how=how: f"library.document_{n.op.name}({', '.join(map(v, xs))}, {how})")


# -- experts whose tokens are sent to the ranks they picked, where they would be gathered ---------------------------------------------


def _sent(p: Program, coords: Mapping[str, int], device: str) -> Iterator[Peephole]:
    for n, way in sent(p):
        k, made = len(way.gathers), way.made
        inputs = (*(g.args[0] for g in way.gathers), *n.args[k:])
        outputs = (made[-1], n) if len(n.types) > 1 else made[-1:]
        text = _sent_text(n, inputs, way, coords, device)
        yield Peephole((n, *made), inputs, outputs, text, names={f"{n.op.name}_on": _EXPERTS[n.op.name]})
    for gather in (n for n in left_out(p) if n.op is all_gather):
        yield Peephole((gather,), (), (), lambda v: "pass")


def _sent_text(n: Node, inputs: Sequence[Node], way: Sending, coords: Mapping[str, int], device: str) -> Text:
    up = n.args[3 if n.op is experts else 4]
    experts_here = up.layout.positions(0, coords)
    on_gpu = library_call(n, [], device, False, coords) is not None
    run = f"library.{n.op.name}" if on_gpu else f"{n.op.name}_on"
    how = f"first={int(experts_here[0])}" if on_gpu else f"slots=torch.arange({int(experts_here[0])}, {int(experts_here[0]) + len(experts_here)})"
    columns = "" if way.columns is None else f"columns=slice({way.columns[0]}, {way.columns[1]}), "
    more = f"group=on.{n.attr('sent')}, shape={way.made[-1].layout.local_shape(coords)}, {columns}"
    return lambda v: f"sent.{n.op.name}({', '.join(map(v, inputs))}, {more}through=lambda *xs: {run}(*xs, act={n.attr('act')!r}, {how}))"


_EXPERTS = {
    "experts": lambda *xs, act, slots: experts_through(slots, *xs, act=act),
    "experts_backward": lambda *xs, act, slots: experts_back(slots, *xs, act=act),
}


# -- pieces side by side: a sum of pads that do not overlap --------------------------------------------------------------------------


def _sides(p: Program) -> Iterator[Peephole]:
    sums = _sums_of_pads(p)
    for n in sums:
        if any(u in sums and _only_read_by(p, n, u) for u in p.users[n]):
            continue  # part of a longer sum
        inner, pads = _leaves(n, sums)
        dim, at = pads[0].attr("dim"), 0
        for x in sorted(pads, key=lambda x: x.attr("before")):
            at = at + x.args[0].shape[dim] if x.attr("before") == at and x.attr("dim") == dim else -1
        if at != n.shape[dim]:
            continue
        pieces = tuple(x.args[0] for x in sorted(pads, key=lambda x: x.attr("before")))
        yield Peephole((*inner, *pads, n), pieces, (n,), lambda v, xs=pieces, d=dim: f"torch.cat([{', '.join(map(v, xs))}], {d})")


def _sums_of_pads(p: Program) -> set[Node]:
    """The adds under which nothing but pads is summed, each read by the one above it alone."""
    found: set[Node] = set()
    for n in p.nodes:
        if n.op is add and all((a.op is pad_op or a in found) and _only_read_by(p, a, n) for a in n.args):
            found.add(n)
    return found


def _leaves(n: Node, sums: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """The adds below a sum of pads, and the pads."""
    inner, pads, stack = [], [], [*n.args]
    while stack:
        a = stack.pop()
        (inner if a in sums else pads).append(a)
        stack += a.args if a in sums else ()
    return inner, pads


# -- many tensors summed as one --------------------------------------------------------------------------------------------------------


def _buckets(p: Program) -> Iterator[Peephole]:
    """An all_reduce of flat tensors laid end to end, and the pieces of its result: the tensors themselves, each summed."""
    for n in p.find_all("all_reduce"):
        joined = n.args[0]
        flat = len(n.args) == 1 and joined.op is concat_op and joined.ndim == 1 and _only_read_by(p, joined, n)
        ends = {end: k for k, end in reversed([*enumerate(accumulate(a.shape[0] for a in joined.args))])} if flat else {}
        pieces = [_taken_piece(p, u, joined, ends) for u in p.users[n]] if flat and n.mesh.size(n.attr("axis")) > 1 else [None]
        if None in pieces or p.outputs_of(n):
            continue
        full = [a.args[0] if a.op is reshape_op and _only_read_by(p, a, joined) else a for a in joined.args]
        inside = tuple(a for a, x in zip(joined.args, full, strict=True) if a is not x)
        reader = [joined if x is a else a for a, x in zip(joined.args, full, strict=True)]
        own = [_only_read_by(p, x, u) and x.op.kind not in (Kind.VIEW, Kind.SOURCE) for x, u in zip(full, reader, strict=True)]
        op, axis = joined.type.on(n.attr("axis")).op, n.attr("axis")  # type: ignore[attr-defined]
        yield Peephole(
            (*inside, joined, n), tuple(full), (n,),
            lambda v, xs=full, a=axis, op=op, own=own: f"comm.all_reduce_list([{', '.join(map(v, xs))}], on.{a}, {op!r}, own={own})",
            starts=True,
        )  # fmt: skip
        for piece in pieces:
            nodes, k, shape = piece  # type: ignore[misc]
            same = shape == tuple(full[k].shape)
            yield Peephole(
                nodes, (n,), nodes[-1:], lambda v, n=n, k=k, s=shape, same=same: f"{v(n)}[{k}]" if same else f"{v(n)}[{k}].reshape({s})"
            )


def _taken_piece(p: Program, u: Node, joined: Node, ends: Mapping[int, int]) -> tuple[tuple[Node, ...], int, tuple[int, ...]] | None:
    """Which of the joined tensors, by where they end, a reader takes out again, and in which shape; None if it takes anything else."""
    if u.op is not narrow_op or u.attr("step") != 1 or p.outputs_of(u):
        return None
    k = ends.get(u.attr("stop"), -1)
    if k < 0 or u.attr("start") != u.attr("stop") - joined.args[k].shape[0]:
        return None
    users = p.users[u]
    if len(users) == 1 and users[0].op is reshape_op:
        return (u, users[0]), k, tuple(users[0].shape)
    return (u,), k, tuple(u.shape)


# -- both gradients of a convolution -------------------------------------------------------------------------------------------------


def _convolutions(p: Program) -> Iterator[Peephole]:
    """Where one needs the other they are no pair: a transposed convolution is an input gradient itself, forward."""
    how = ("stride", "padding", "dilation")
    by_input = {(n.args[0], *map(n.attr, how)): n for n in p.nodes if n.op is conv2d_input_grad}
    for n in p.nodes:
        other = by_input.pop((n.args[1], *map(n.attr, how)), None) if n.op is conv2d_weight_grad else None
        if other is not None and _same_local_shape(other, n.args[0]) and _same_local_shape(n, other.args[1]) and other not in p.needs(n):
            (x, ct), w = n.args, other.args[1]
            keywords = ", ".join(settings((k, n.attr(k)) for k in how))
            yield Peephole(
                (other, n),
                (ct, x, w),
                (other, n),
                lambda v, xs=(ct, x, w), s=keywords: f"library.conv2d_backward({', '.join(map(v, xs))}, {s})",
            )


def _same_local_shape(grad: Node, of: Node) -> bool:
    """Whether a gradient measures on every rank what the tensor does: one call makes both of the same image and kernel."""
    return grad.shape == of.shape and grad.layout.dims == of.layout.dims


__all__ = ["Peephole", "peepholes_of"]
