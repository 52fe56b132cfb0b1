"""The verbs that only regroup: `fuse` makes one kernel, `overlap` one chunked pipeline. The nodes stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from weft.core.errors import InvalidTransform
from weft.core.node import Node
from weft.core.program import Group, Program
from weft.core.spec import leaves_and_returns
from weft.ops import comm
from weft.ops.registry import Kind, equation_of
from weft.ops.shape import expand_op, reshape_op
from weft.schedule.refusal import Place, name_in, quoted, refuse, tried

REDUCING = (comm.all_reduce, comm.reduce_scatter)
FUSIBLE_COMM = (*REDUCING, comm.all_gather, comm.slice_, comm.send, comm.keep)
FUSIBLE = (Kind.POINTWISE, Kind.REDUCE, Kind.VIEW, Kind.SOURCE)


def fuse(p: Program, places: Iterable[Place] | str, *, name: str | None = None) -> Program:
    """Fuse nodes into one kernel.

    Members: elementwise ops, reductions and views; at most one reduction collective over tensors (scalars may bring more),
    the gathers and slices around it, all along one axis. Nothing outside may stand between two members.
    """
    wanted = {p.at(x) for x in ([places] if isinstance(places, (str, Node)) else places)}
    nodes = [n for n in p.nodes if n in wanted]
    if len(nodes) < 2:
        raise InvalidTransform("fuse of fewer than two nodes", needed="two or more nodes", found=str(len(nodes)))
    _check_members(p, nodes)
    _check_collectives(p, nodes)
    _check_closed(p, nodes, "fuse")
    _check_disjoint(p, nodes, "fuse")
    group = Group("fuse", name or _new_name(p, "k"), tuple(nodes))
    return _with_group(p, group, f"fuse {group.name}: {len(nodes)} nodes")


def _new_name(p: Program, letter: str) -> str:
    taken = {g.name for g in p.groups}
    return next(name for k in count() if (name := f"{letter}{k}") not in taken)


def _with_group(p: Program, group: Group, step: str) -> Program:
    if any(g.name == group.name for g in p.groups):
        raise InvalidTransform(f"a group {group.name!r} exists", needed="a new name", found=group.name)
    return replace(p, groups=(*p.groups, group), parent=p, step=step, moved={n: n for n in p.nodes})


def _check_members(p: Program, nodes: Sequence[Node]) -> None:
    for n in nodes:
        if n.op.kind is Kind.COMM and n.op not in FUSIBLE_COMM:
            raise refuse(p, n, f"fuse with {n.op.name}", f"collectives among {', '.join(o.name for o in FUSIBLE_COMM)}", n.op.name)
        if n.op.kind is not Kind.COMM and n.op.kind not in FUSIBLE:
            raise refuse(
                p,
                n,
                f"fuse with {n.op.name}",
                "elementwise ops, reductions and views around one collective",
                f"{n.op.name}, which {n.op.kind.value}",
                tried(p, _as_overlap(p, n, nodes), most=1),
            )


def _as_overlap(p: Program, n: Node, nodes: Sequence[Node]) -> Iterator[str]:
    """Pipelines of the node with a collective next to it."""
    pairs = [(n, c) for c in nodes if n in c.args] + [(a, n) for a in n.args if a in nodes]
    for a, b in pairs:
        for d in range(len(a.types[0].shape)):
            yield f'overlap(p, "{name_in(p, a)}", "{name_in(p, b)}", dim={d}, chunks=2)'


def with_inner(p: Program, members: Iterable[Node], terms: Collection[Node]) -> dict[Node, None]:
    """The members of a kernel and what only they read, which is computed inside it, but for the terms it sums."""
    found = dict.fromkeys(members)
    for n in reversed(p.nodes):
        inside = n not in terms and p.users[n] and all(u in found for u in p.users[n]) and not p.outputs_of(n)
        if n not in found and inside and n.args and (n.op.kind in FUSIBLE or n.op is comm.slice_):
            found[n] = None
    return found


def is_scalar(n: Node) -> bool:
    return all(t.shape == () or all(s == 1 for s in t.shape) for t in n.types)


def _check_collectives(p: Program, nodes: Sequence[Node]) -> None:
    axes = dict.fromkeys(n.attr("axis") for n in nodes if n.op.kind is Kind.COMM)
    if len(axes) > 1:
        raise refuse(p, next(n for n in nodes if n.attr("axis") == list(axes)[1]), "fuse", "collectives along one axis", " and ".join(axes))
    big = [n for n in nodes if n.op in REDUCING and not is_scalar(n)]
    if len(big) > 1:
        repair = tried(p, [f"merge(p, {', '.join(quoted(p, big))})"])
        raise refuse(
            p,
            big[1],
            "fuse",
            "at most one reduction of tensors in a kernel",
            f"{len(big)}: {', '.join(name_in(p, n) for n in big)}",
            repair,
        )


def _check_closed(p: Program, nodes: Sequence[Node], verb: str) -> None:
    through = leaves_and_returns(p, set(nodes))
    if through is not None:
        more = [n for n in p.nodes if n in set(nodes) or _between(p, set(nodes), n)]
        repair = tried(p, [f"fuse(p, [{', '.join(quoted(p, more))}])"]) if verb == "fuse" else ()
        around = next((f" with the rest of {g.name}" for g in p.groups if through in g.nodes and not p.needs(through) & set(nodes)), "")
        raise refuse(
            p,
            through,
            verb,
            "no node outside between two members",
            f"{name_in(p, through)} is computed from the group{around} and needed by it",
            repair,
        )


def _between(p: Program, group: set[Node], node: Node) -> bool:
    return bool(p.needs(node) & group) and any(node in p.needs(g) for g in group)


def _check_disjoint(p: Program, nodes: Sequence[Node], kind: str) -> None:
    for g in p.groups:
        inside = set(g.nodes)
        both = [n for n in nodes if n in inside]
        if g.kind == kind and both:
            raise refuse(p, both[0], kind, "nodes in no other kernel", f"{name_in(p, both[0])} is in {g.name}")


# -- overlap ---------------------------------------------------------------------------------------------------------------------


def overlap(p: Program, *stages: Place, dim: int, chunks: int = 4, name: str | None = None) -> Program:
    """Overlap stages in chunks along dim `dim` of the first one's result: while one chunk is sent, the next is computed.

    A stage is a node, or the name of a fused group. Each must read one before it, every node must treat the chunks alone,
    and both computation and communication must be among them.
    """
    groups = {g.name: g for g in p.groups if g.kind == "fuse"}
    parts = [list(groups[s].nodes) if isinstance(s, str) and s in groups else [p.at(s)] for s in stages]
    nodes = [n for n in p.nodes if any(n in part for part in parts)]
    what = "overlap"
    if len(parts) < 2 or chunks < 2:
        raise InvalidTransform(
            "overlap of one stage or one chunk", needed="two or more stages and chunks", found=f"{len(parts)} stages, {chunks} chunks"
        )
    for k, after in enumerate(parts[1:], 1):
        before = [n for part in parts[:k] for n in part]
        if not any(a in before for n in after for a in n.args):
            reads = ", ".join(name_in(p, a) for a in after[0].args) or "nothing"
            raise refuse(p, after[0], what, f"{name_in(p, after[0])} to read a stage before it", f"it reads {reads}")
    _check_resources(p, nodes)
    _check_closed(p, nodes, what)
    _check_disjoint(p, nodes, what)
    _check_chunks(p, nodes, dim, chunks, [f'"{s}"' if isinstance(s, str) else f'"{name_in(p, p.at(s))}"' for s in stages])
    group = Group("overlap", name or _new_name(p, "o"), tuple(nodes), (("chunks", chunks), ("dim", dim)))
    return _with_group(p, group, f"overlap {', '.join(n.op.name for n in nodes[:3])}... in {chunks} chunks along dim {dim}")


def _check_resources(p: Program, nodes: Sequence[Node]) -> None:
    """Overlap pays only where two resources work at once: computation and a link, or links of two axes."""
    resources = dict.fromkeys(
        f"axis {n.attr('axis')}" if n.op.kind is Kind.COMM else "computation"
        for n in nodes
        if n.op.kind is not Kind.COMM or n.op.wire(2) > 0
    )
    if len(resources) < 2:
        raise refuse(
            p,
            nodes[0],
            "overlap",
            "computation and communication, or communication along two axes",
            f"only {', '.join(resources) or 'slices'}",
        )


def _check_chunks(p: Program, nodes: Sequence[Node], dim: int, chunks: int, stages: Sequence[str]) -> None:
    """Follows the chunked dim through every node."""
    first = nodes[0]
    if not 0 <= dim < len(first.types[0].shape) or first.types[0].shape[dim] < chunks:
        raise refuse(p, first, "overlap", f"a dim of at least {chunks} indices", f"dim {dim} of {list(first.types[0].shape)}")
    where: dict[Node, int] = {}
    for n in nodes:
        if not any(a in where for a in n.args):
            where[n] = dim
            if any(t.shape[dim : dim + 1] != first.types[0].shape[dim : dim + 1] for t in n.types):
                raise refuse(p, n, "overlap", f"chunks of one size along dim {dim} of {n.op.name}", ", ".join(map(str, n.types)))
            if n.op.kind is not Kind.COMM and not _can_start(n, dim):
                again = [f"overlap(p, {', '.join(stages)}, dim={d}, chunks={chunks})" for d in range(len(n.types[0].shape)) if d != dim]
                raise refuse(
                    p,
                    n,
                    "overlap",
                    f"{n.op.name} to make chunks of dim {dim} one at a time",
                    f"it needs all of its operands for each, or shards dim {dim} otherwise",
                    tried(p, again),
                )
            continue
        if n is nodes[-1] and _streams(n, where):
            continue
        out = _follow_dim(n, where)
        if out is None:
            raise refuse(p, n, "overlap", f"{n.op.name} to treat each chunk alone", f"{n.op.name} needs the full chunked dim")
        where[n] = out


def _can_start(n: Node, dim: int) -> bool:
    eq = equation_of(n)
    if eq is None:
        return n.op in (reshape_op, expand_op)
    label = eq.outs[0][dim]
    return bool(eq.dims_of(label)) and label not in eq.unsharded


def _streams(n: Node, where: dict[Node, int]) -> bool:
    """Whether the op can take the chunked dim piece by piece and merge its partial results; only the last stage may."""
    eq = equation_of(n)
    labels = n.op.streams
    return eq is not None and all(eq.label(k, where[a]) in labels for k, a in enumerate(n.args) if a in where)


def _follow_dim(n: Node, where: dict[Node, int]) -> int | None:
    """The dim along which the node's result comes in chunks, given its operands'."""
    k = next(i for i, a in enumerate(n.args) if a in where)
    d = where[n.args[k]]
    if n.op.kind is Kind.COMM or n.op.is_item:
        return d if all(where.get(a) == d for a in n.args) else None
    eq = equation_of(n)
    if eq is None:
        same = n.args[k].shape[: d + 1] == n.types[0].shape[: d + 1]
        return d if same else None
    label = eq.label(k, d)
    if label in eq.unsharded or any(label not in out for out in eq.outs):
        return None
    agree = all(eq.ins[i][where[a]] == label for i, a in enumerate(n.args) if a in where)
    dims = {out.index(label) for out in eq.outs}
    return dims.pop() if agree and len(dims) == 1 else None


__all__ = ["fuse", "is_scalar", "overlap"]
