"""The verbs: each takes a program and a place and gives a program that denotes the same.

A verb is a rule of `rewrite.communicate` applied at a place, or refused: with what was needed, what was found, and repairs
that were tried and work. Here are those that change collectives where they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.errors import InvalidTransform
from weft.core.layout import P, Within
from weft.core.node import Node
from weft.core.program import Program
from weft.ops import comm
from weft.ops.registry import nbytes
from weft.rewrite import communicate as rules
from weft.rewrite.engine import apply_rule
from weft.schedule.refusal import Place, expect, name_in, quoted, refuse, tried, with_repairs


def split(p: Program, at: Place, *, dim: int | None = None, within: Within = None, root: int | None = None) -> Program:
    """Split an all_reduce into a reduce_scatter and an all_gather, or a reduce and a broadcast.

        all_reduce(x)   ->   all_gather(reduce_scatter(x, dim))        with dim
        all_reduce(x)   ->   broadcast(reduce(x, root))                with root

    Valid for any dim that no later mesh axis shards.
    """
    node = expect(p, at, "split", comm.all_reduce, options=f", dim={dim}" if root is None else f", root={root}")
    if (dim is None) == (root is None):
        raise refuse(
            p,
            node,
            "split",
            "dim= (reduce_scatter and all_gather) or root= (reduce and broadcast), and one of them",
            "both" if dim is not None else "neither",
        )
    name = name_in(p, node)
    if root is not None:
        return apply_rule(p, rules.split_root(node, root), [node], f"split {name} at root {root}")
    assert dim is not None
    try:
        return apply_rule(p, rules.split_scatter(node, dim, within), [node], f"split {name} along dim {dim}")
    except InvalidTransform as e:
        others = [f'split(p, "{name}", dim={d})' for d in range(node.ndim) if d != dim]
        raise with_repairs(e, tried(p, [*others, f'split(p, "{name}", root=0)']) or e.repairs) from e


MERGEABLE = (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all, comm.broadcast, comm.reduce_, comm.send)


def merge(p: Program, *places: Place) -> Program:
    """Merge collectives of one kind over one axis into one call over several tensors.

        all_reduce(x), all_reduce(y)   ->   all_reduce(x, y)

    Valid when none of them waits for another.
    """
    nodes = _same_attributes(p, places, "merge", MERGEABLE)
    return apply_rule(p, rules.merge_all(nodes), nodes, f"merge {', '.join(name_in(p, n) for n in nodes)}")


def bucket(p: Program, *places: Place, max_bytes: int | None = None) -> Program:
    """Replace all_reduces of several tensors by all_reduces of flat buckets, each of at most `max_bytes`.

    all_reduce(x), all_reduce(y)   ->   pieces of all_reduce(concat(x, y))
    """
    nodes = _same_attributes(p, places, "bucket", (comm.all_reduce,))
    groups = [group for group in by_size(nodes, max_bytes) if len(group) > 1]
    if not groups:
        raise refuse(
            p,
            nodes[0],
            "bucket",
            "two tensors that fit one bucket",
            f"max_bytes={max_bytes}",
            tried(p, [f"bucket(p, {', '.join(quoted(p, nodes))})"]),
        )
    return apply_rule(p, rules.bucket_all(groups), [n for group in groups for n in group], f"bucket {', '.join(name_in(p, n) for n in nodes)}")


BUCKET = 8 << 20  # bytes of gradients summed in one call
FIRST = 1 << 20  # of the first call; the next ones double


def is_full(size: float, more: float, most: float) -> bool:
    """Whether a bucket of so many bytes is sent before it takes more: a half full one waits for no more."""
    return size > 0 and (size >= most / 2 or size + more > most)


def by_size(nodes: Sequence[Node], max_bytes: int | None, first: int | None = None) -> list[list[Node]]:
    """Runs of nodes within the bytes; with `first`, the first within so many and each up to twice as large as the one before it, and a
    half full one waits for no more: so the first starts early and the many are few."""
    groups: list[list[Node]] = [[]]
    size, most = 0, max_bytes if first is None or max_bytes is None else min(first, max_bytes)
    for n in nodes:
        full = most is not None and (size + nbytes(n.type) > most if first is None else is_full(size, nbytes(n.type), most))
        if groups[-1] and full:
            groups.append([])
            size, most = 0, most if first is None else min(2 * most, max_bytes)  # type: ignore[operator, type-var]
        groups[-1].append(n)
        size += nbytes(n.type)
    return groups


def _same_attributes(p: Program, places: Sequence[Place], verb: str, ops: Sequence[Any]) -> list[Node]:
    nodes = [expect(p, x, verb, *ops) for x in places]
    if len(set(nodes)) < 2:
        raise InvalidTransform(f"{verb} of {len(set(nodes))} collective", needed="two or more", found=str(len(set(nodes))))
    for n in nodes[1:]:
        if n.op is not nodes[0].op or n.attrs != nodes[0].attrs:
            raise refuse(
                p,
                n,
                f"{verb} with {name_in(p, nodes[0])}",
                f"{nodes[0].op.name} with {dict(nodes[0].attrs)}",
                f"{n.op.name} with {dict(n.attrs)}",
            )
    _one_reduction(p, nodes, verb)
    for a, before in p.waits(nodes).items():
        raise refuse(p, a, verb, "collectives that do not wait for one another", f"{name_in(p, a)} needs {name_in(p, before)}")
    return nodes


def _one_reduction(p: Program, nodes: Sequence[Node], verb: str) -> None:
    """A sum and a max cannot be one call."""
    axis = nodes[0].attr("axis")
    kinds = [n.args[0].type.on(axis) for n in nodes]
    for n, kind in zip(nodes, kinds, strict=True):
        if isinstance(kind, P) and kind != kinds[0]:
            raise refuse(p, n, f"{verb} with {name_in(p, nodes[0])}", f"one reduction, {axis}:{kinds[0]}", f"{axis}:{kind}")


def by_hierarchy(p: Program, at: Place, *, inside: str, dim: int = 0) -> Program:
    """Reduce over two axes hierarchically: inside the node first, then across nodes on slices.

    all_reduce(all_reduce(x, a), b)   ->   all_gather(all_reduce(reduce_scatter(x, inside), across), inside)
    """
    node = expect(p, at, "by_hierarchy", comm.all_reduce, options=f", inside={inside!r}, dim={dim}")
    inner = node.args[0]
    p.mesh.require(inside)
    if inner.op is not comm.all_reduce or len(inner.args) != 1 or inside not in (node.attr("axis"), inner.attr("axis")):
        after = [u for u in p.users[node] if u.op is comm.all_reduce]
        raise refuse(
            p,
            node,
            "by_hierarchy",
            f"an all_reduce of an all_reduce, one of them along {inside}",
            f"{node.op.name} along {node.attr('axis')} of {inner.op.name}",
            tried(p, (f'by_hierarchy(p, "{name_in(p, u)}", inside={inside!r}, dim={dim})' for u in after)),
        )
    return apply_rule(p, rules.hierarchy(node, inside, dim), [node], f"by_hierarchy {name_in(p, node)} inside {inside}")


def undo(p: Program) -> Program:
    """Return the program before the last step."""
    if p.parent is None:
        raise InvalidTransform(f"{p.name} has no step to undo", needed="a program made by a verb", found="one as it was written")
    return p.parent
