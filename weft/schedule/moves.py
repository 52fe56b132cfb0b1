"""Communication moved along the program: `sink` and `hoist` for gathers and slices, `delay` for reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from weft.core.errors import InvalidTransform, LayoutError, TypeMismatch
from weft.core.layout import P, S
from weft.core.node import Node
from weft.core.program import Program
from weft.ops import comm
from weft.ops.pointwise import add, sub
from weft.ops.registry import Kind, equation_of
from weft.rewrite import communicate as rules
from weft.rewrite.engine import apply_rule
from weft.schedule.refusal import Place, as_one_step, expect, name_in, refuse, tried, trying, works

# -- sink and hoist ------------------------------------------------------------------------------------------------------------


def sink(p: Program, at: Place, *, past: Place | Iterable[Place] | None = None, summing: bool = False) -> Program:
    """Move a gather, or a slice, after the ops that read it.

        f(all_gather(x), y)      ->   all_gather(f(x, slice(y)))       f treats each slice alone
        sum(all_gather(x))       ->   all_reduce(sum(x))               a reduction of the sharded dim brings its own
        all_gather(x) @ y        ->   all_reduce(x @ slice(y))         likewise, where `summing` allows it
        f(slice(x), slice(y))    ->   slice(f(x, y))

    `past` are the ops to pass, or all that can be passed when it is left out. A gather still read elsewhere stays there too.
    """
    node = expect(p, at, "sink", comm.all_gather, comm.slice_)
    step = _sink_slice if node.op is comm.slice_ else partial(_sink_gather, summing=summing)
    return _move(p, node, past, step, "sink")


def _move(p: Program, node: Node, past: Any, step: Callable[[Program, Node, str], Program], verb: str) -> Program:
    """One op after the other, in program order, as long as something moves."""
    axis = node.attr("axis")
    asked = None if past is None else [p.at(x) for x in (past if isinstance(past, (list, tuple, set)) else [past])]
    q, moved, alive = p, 0, [node]
    while True:
        todo = [f for f in _readers(q, alive, node.op) if asked is None or any(q._follow(a) is f for a in asked)]
        done = None
        for f in todo:
            try:
                done = step(q, f, axis)
                alive = [n for n in (*(done._follow(a) for a in alive), *(done.moved.get(r) for r in results(q, f))) if n is not None]
                break
            except (InvalidTransform, TypeMismatch, LayoutError):
                if asked is not None and not moved and len(asked) == 1:
                    raise
        if done is None:
            break
        q, moved = done, moved + 1
    if not moved:
        _nothing_moved(p, node, asked, step, axis, verb)
    return as_one_step(p, q, f"{verb} {name_in(p, node)} past {moved} op{'s' if moved > 1 else ''}")


def _readers(p: Program, alive: Sequence[Node], op: Any) -> list[Node]:
    found = [f for g in alive if g in p.node_set and g.op is op for f in p.users[g] if _passable(f, g)]
    order = {n: i for i, n in enumerate(p.nodes)}
    return sorted(dict.fromkeys(found), key=order.__getitem__)


def _passable(f: Node, comm_node: Node) -> bool:
    """Computation, or communication along another axis."""
    return not f.op.is_tuple and (f.op.kind is not Kind.COMM or len(f.types) == 1 and f.attr("axis") != comm_node.attr("axis"))


def results(p: Program, f: Node) -> list[Node]:
    """What others read of a node: itself, or those of its items that are read."""
    return [f] if len(f.types) == 1 else [u for u in p.users[f] if u.op.is_item]


def _nothing_moved(p: Program, node: Node, asked: Any, step: Any, axis: str, verb: str) -> None:
    readers = [f for f in p.users[node] if _passable(f, node)]
    if asked is not None and not any(f in readers for f in asked):
        raise refuse(
            p,
            node,
            f"{verb} {name_in(p, node)}",
            "an op in `past` that reads it",
            f"none of {', '.join(name_in(p, f) for f in asked) or 'nothing'} does",
            tried(p, (f'{verb}(p, "{name_in(p, node)}", past="{name_in(p, f)}")' for f in readers)),
        )
    if not readers:
        raise refuse(p, node, f"{verb} {name_in(p, node)}", "an op after it to pass", "only outputs or communication read it")
    step(p, readers[0], axis)  # raises its own reason


def _sink_gather(p: Program, f: Node, axis: str, summing: bool = False) -> Program:
    gathered = [k for k, a in enumerate(f.args) if a.op is comm.all_gather and a.attr("axis") == axis and len(a.args) == 1]
    first = f.args[gathered[0]]
    shard = rules.shard_of(first.args[0].layout, axis)
    assert shard is not None
    what = f"sink {name_in(p, first)} past {f.op.name}"
    eq = equation_of(f)
    if eq is not None:
        label = rules.label_of(eq, gathered[0], shard)
        lost = any(label not in out for out in eq.outs)
        if label in eq.unsharded or lost and f.op.kind is not Kind.REDUCE and not summing:
            verb = "sums over" if label not in eq.unsharded else "needs all of"
            raise refuse(
                p,
                f,
                what,
                f"{f.op.name} to treat each slice of dim {shard.dim} of {name_in(p, first)} alone",
                f"{f.op.name} {verb} dim {shard.dim} of {name_in(p, first)}",
                _other_dims(p, first, f, axis),
            )
        gathered = [k for k in gathered if _same_shard(f, eq, k, axis, label)]
    items = [] if len(f.types) == 1 else results(p, f)
    return apply_rule(p, rules.sink_gather(f, gathered, axis, items), items or [f], what)


def _same_shard(f: Node, eq: Any, k: int, axis: str, label: str) -> bool:
    shard = rules.shard_of(f.args[k].args[0].layout, axis)
    return shard is not None and rules.label_of(eq, k, shard) == label


def _other_dims(p: Program, gather: Node, f: Node, axis: str) -> list[str]:
    """Splits along another dim after which the gather does pass."""
    scatter = gather.args[0]
    if scatter.op is not comm.reduce_scatter or trying():
        return []

    def attempt(d: int) -> Program:
        full = apply_rule(p, rules.unsplit(gather), [gather], "unsplit")
        reduced = full.moved[gather]
        q = apply_rule(full, rules.split_scatter(reduced, d), [reduced], "split")
        return _sink_gather(q, q.at(full.moved[f]), axis)

    fits = [d for d in range(gather.ndim) if d != scatter.attr("dim") and works(partial(attempt, d))]
    return [f"split(p, ..., dim={d})   # tried: the gather then sinks past this {f.op.name}" for d in fits[:2]]


def _sink_slice(p: Program, f: Node, axis: str) -> Program:
    first = next(a for a in f.args if a.op is comm.slice_ and a.attr("axis") == axis)
    what = f"sink {name_in(p, first)} past {f.op.name}"
    if len(f.types) > 1:
        raise refuse(p, f, what, "an op of one result", f"{f.op.name} gives {len(f.types)}")
    full = [k for k, a in enumerate(f.args) if isinstance(a.type.on(axis), S) and not (a.op is comm.slice_ and a.attr("axis") == axis)]
    if full:
        raise refuse(
            p, f, what, f"every operand sharded along {axis} to be a slice", f"operand {full[0]} is {f.args[full[0]].op.name}, sharded already"
        )
    if not isinstance(f.types[0].on(axis), S):
        raise refuse(p, f, what, f"{f.op.name} to keep the shards along {axis}", f"its result is {axis}:{f.types[0].on(axis)}")
    return apply_rule(p, rules.sink_slice(f, axis), [f], what)


def hoist(p: Program, at: Place, *, past: Place | Iterable[Place] | None = None) -> Program:
    """Move a gather, or a slice, before the op it reads.

        all_gather(f(x, y))      ->   f(all_gather(x), all_gather(y))
        slice(f(x, y))           ->   f(slice(x), slice(y))

    `past` names how far: the ops to pass, or just the one it reads when it is left out.
    """
    node = expect(p, at, "hoist", comm.all_gather, comm.slice_)
    asked = [node.args[0]] if past is None else [p.at(x) for x in (past if isinstance(past, (list, tuple, set)) else [past])]
    q, todo, moved = p, [node], 0
    while todo:
        g = q._follow(todo.pop())
        if g is None or g.op is not node.op or not any(q._follow(a) is g.args[0] for a in asked):
            continue
        q = hoist_one(q, g)
        moved += 1
        new = q.moved[g]
        todo += [a for a in new.args if a.op is node.op and a.attr("axis") == node.attr("axis")]
    if not moved:
        raise refuse(
            p,
            node,
            f"hoist {name_in(p, node)}",
            "`past` to name the op it reads",
            f"it reads {name_in(p, node.args[0])}",
            tried(p, [f'hoist(p, "{name_in(p, node)}")']),
        )
    return as_one_step(p, q, f"hoist {name_in(p, node)} past {moved} op{'s' if moved > 1 else ''}")


def hoist_one(p: Program, node: Node) -> Program:
    f = node.args[0]
    what = f"hoist {name_in(p, node)} past {f.op.name}"
    if f.op.kind in (Kind.COMM, Kind.SOURCE) or len(f.types) != 1 or f.op.is_item:
        raise refuse(p, node, what, "an op that computes one value from others", f"{f.op.name}")
    try:
        r = rules.hoist_slice(node) if node.op is comm.slice_ else rules.hoist_gather(node)
    except LayoutError as e:
        raise refuse(p, node, what, e.needed or "shards that can be made above it", e.found or str(node.type)) from e
    return apply_rule(p, r, [node], what)


# -- delay ---------------------------------------------------------------------------------------------------------------------


def delay(p: Program, at: Place, *, past: Place | None = None) -> Program:
    """Move a reduction after an op that reads it: a sum past linear ops, a max or min past ops that keep the order.

    f(all_reduce(x), w)                  ->   all_reduce(f(x, w))             f linear in x
    all_reduce(x) + all_reduce(y)        ->   all_reduce(x + y)
    f(reduce_scatter(x), slice(y))       ->   reduce_scatter(f(x, y))         f slice-wise too
    """
    node = expect(p, at, "delay", comm.all_reduce, comm.reduce_scatter)
    readers = [f for f in p.users[node] if len(f.types) == 1]
    f = p.at(past) if past is not None else next(iter(readers), None)
    what = f"delay {name_in(p, node)}"
    if f is None or f not in readers:
        raise refuse(
            p,
            node,
            what,
            "an op that reads it",
            "none" if f is None else f"{name_in(p, f)} does not",
            tried(p, (f'delay(p, "{name_in(p, node)}", past="{name_in(p, r)}")' for r in readers)),
        )
    axis = node.attr("axis")
    sets = rules.reducible_sets(f, axis, node.op)
    make = rules.delay_sum if node.op is comm.all_reduce else rules.delay_scatter
    for chosen in sets:
        if works(lambda chosen=chosen: apply_rule(p, make(f, chosen), [f], what)):
            return apply_rule(p, make(f, chosen), [f], f"{what} past {f.op.name}")
    raise refuse(
        p,
        f,
        f"{what} past {f.op.name}",
        f"{f.op.name} to {_must(node)} {name_in(p, node)} with its other operands replicated along {axis}",
        _why_not_linear(p, f, node, bool(sets)),
    )


def _must(reduction: Node) -> str:
    """What lets a partial reduction pass."""
    place = reduction.args[0].type.on(reduction.attr("axis"))
    return "be linear in" if isinstance(place, P) and place.op == "sum" else f"keep the order of the partial {getattr(place, 'op', '')}"


def _why_not_linear(p: Program, f: Node, node: Node, some: bool) -> str:
    if some:
        return f"another operand of {f.op.name} is sharded along {node.attr('axis')}"
    if _must(node) != "be linear in":
        return f"{f.op.name} may change it"
    others = [name_in(p, a) if not a.op.is_number else repr(a.attr("value")) for a in f.args if a is not node]
    return f"{f.op.name} is not linear in it alone" + (
        f": {', '.join(others)} would be counted once per rank" if f.op in (add, sub) else ""
    )
