"""The verbs: each takes a program and a place and gives a program that denotes the same.

A verb is a rule of `rewrite.communicate` applied at a place, or refused: with what was needed, what was found, and repairs
that were tried and work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from weft.core.errors import InvalidTransform, LayoutError, TypeMismatch
from weft.core.layout import P, S, Within
from weft.core.node import Node
from weft.core.program import Program
from weft.core.text import excerpt, node_names
from weft.ops import comm
from weft.ops.registry import Kind, equation_of, nbytes
from weft.ops.source import input_node
from weft.rewrite import communicate as rules
from weft.rewrite.engine import apply_rule

Place = Node | str


def name_in(p: Program, node: Node) -> str:
    return node_names(p).get(node, node.op.name)


def refuse(p: Program, node: Node, what: str, needed: str, found: str, repairs: Iterable[str] = ()) -> InvalidTransform:
    return InvalidTransform(
        f"{what} is not valid here",
        needed=needed,
        found=found,
        try_=list(repairs),
        program=excerpt(p, node),
        where=p.lines.get(node) or None,
    )


_trying: ContextVar[bool] = ContextVar("trying", default=False)  # while a repair is tried, no repairs of it are sought


def quoted(p: Program, nodes: Iterable[Node]) -> list[str]:
    """Printed names as they are written in a call."""
    return [f'"{name_in(p, n)}"' for n in nodes]


def works(attempt: Callable[[], Any]) -> bool:
    """Whether a repair really passes."""
    before = _trying.set(True)
    try:
        attempt()
    except (InvalidTransform, TypeMismatch, LayoutError):
        return False
    finally:
        _trying.reset(before)
    return True


def tried(p: Program, texts: Iterable[str], most: int = 2) -> list[str]:
    """Of these repairs, written as calls on `p`, the first few that pass when run as written."""
    if _trying.get():
        return []
    return list(islice((text for text in texts if works(lambda text=text: _run(p, text))), most))


def _run(p: Program, text: str) -> Any:
    from weft import schedule

    return eval(text, {name: getattr(schedule, name) for name in schedule.__all__}, {"p": p})


def expect(p: Program, place: Place, verb: str, *ops: Any, options: str = "") -> Node:
    """The node at a place, which must be a single-tensor use of one of the ops; `options` are what else the verb was told."""
    node = p.at(place)
    names = " or ".join(op.name for op in ops)
    if node.op not in ops:
        others = (f'{verb}(p, "{name_in(p, n)}"{options})' for op in ops for n in p.find_all(op.name))
        raise refuse(p, node, f"{verb} of {node.op.name}", f"a node of {names}", node.op.name, tried(p, others))
    if len(node.args) != 1:
        raise refuse(p, node, f"{verb} of a merged {node.op.name}", f"{names} of one tensor", f"{len(node.args)} tensors")
    return node


# -- split ---------------------------------------------------------------------------------------------------------------------


def split(p: Program, at: Place, *, dim: int | None = None, within: Within = None, root: int | None = None) -> Program:
    """An all_reduce in two halves.

        all_reduce(x)   ->   all_gather(reduce_scatter(x, dim))        with dim
        all_reduce(x)   ->   broadcast(reduce(x, root))                with root

    Valid for any dim that no later mesh axis cuts.
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


def with_repairs(e: InvalidTransform, repairs: Sequence[str]) -> InvalidTransform:
    """The same refusal, with other advice."""
    return InvalidTransform(e.message, needed=e.needed, found=e.found, program=e.program, where=e.where, try_=repairs)


# -- sink and hoist ------------------------------------------------------------------------------------------------------------


def sink(p: Program, at: Place, *, past: Place | Iterable[Place] | None = None, summing: bool = False) -> Program:
    """A gather, or a slice, moved after the ops that read it.

        f(all_gather(x), y)      ->   all_gather(f(x, slice(y)))       f treats each slice alone
        sum(all_gather(x))       ->   all_reduce(sum(x))               a reduction of the cut dim brings its own
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
    return _as_one_step(p, q, f"{verb} {name_in(p, node)} past {moved} op{'s' if moved > 1 else ''}")


def _readers(p: Program, alive: Sequence[Node], op: Any) -> list[Node]:
    found = [f for g in alive if g in p.node_set and g.op is op for f in p.users[g] if _passable(f, g)]
    order = {n: i for i, n in enumerate(p.nodes)}
    return sorted(dict.fromkeys(found), key=order.__getitem__)


def _passable(f: Node, comm_node: Node) -> bool:
    """Computation, or communication along another axis."""
    return f.op.name != "together" and (f.op.kind is not Kind.COMM or len(f.types) == 1 and f.attr("axis") != comm_node.attr("axis"))


def results(p: Program, f: Node) -> list[Node]:
    """What others read of a node: itself, or those of its items that are read."""
    return [f] if len(f.types) == 1 else [u for u in p.users[f] if u.op.name == "item"]


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


def _as_one_step(p: Program, q: Program, step: str) -> Program:
    """The steps between two programs told as one."""
    moved = {n: after for n in p.nodes if (after := _through(q, p, n)) is not None}
    return replace(q, parent=p, step=step, moved=moved)


def _through(q: Program, p: Program, node: Node) -> Node | None:
    if q is p:
        return node
    before = _through(q.parent, p, node) if q.parent is not None else None
    return None if before is None else q.moved.get(before)


def _sink_gather(p: Program, f: Node, axis: str, summing: bool = False) -> Program:
    gathered = [k for k, a in enumerate(f.args) if a.op is comm.all_gather and a.attr("axis") == axis and len(a.args) == 1]
    first = f.args[gathered[0]]
    cut = rules.cut_of(first.args[0].layout, axis)
    assert cut is not None
    what = f"sink {name_in(p, first)} past {f.op.name}"
    eq = equation_of(f)
    if eq is not None:
        label = rules.label_of(eq, gathered[0], cut)
        lost = any(label not in out for out in eq.outs)
        if label in eq.whole or lost and f.op.kind is not Kind.REDUCE and not summing:
            verb = "sums over" if label not in eq.whole else "needs the whole of"
            raise refuse(
                p,
                f,
                what,
                f"{f.op.name} to treat each slice of dim {cut.dim} of {name_in(p, first)} alone",
                f"{f.op.name} {verb} dim {cut.dim} of {name_in(p, first)}",
                _other_dims(p, first, f, axis),
            )
        gathered = [k for k in gathered if _cut_alike(f, eq, k, axis, label)]
    items = [] if len(f.types) == 1 else results(p, f)
    return apply_rule(p, rules.sink_gather(f, gathered, axis, items), items or [f], what)


def _cut_alike(f: Node, eq: Any, k: int, axis: str, label: str) -> bool:
    cut = rules.cut_of(f.args[k].args[0].layout, axis)
    return cut is not None and rules.label_of(eq, k, cut) == label


def _other_dims(p: Program, gather: Node, f: Node, axis: str) -> list[str]:
    """Splits along another dim after which the gather does pass."""
    scatter = gather.args[0]
    if scatter.op is not comm.reduce_scatter or _trying.get():
        return []

    def attempt(d: int) -> Program:
        whole = apply_rule(p, rules.unsplit(gather), [gather], "unsplit")
        reduced = whole.moved[gather]
        q = apply_rule(whole, rules.split_scatter(reduced, d), [reduced], "split")
        return _sink_gather(q, q.at(whole.moved[f]), axis)

    fits = [d for d in range(gather.ndim) if d != scatter.attr("dim") and works(partial(attempt, d))]
    return [f"split(p, ..., dim={d})   # tried: the gather then sinks past this {f.op.name}" for d in fits[:2]]


def _sink_slice(p: Program, f: Node, axis: str) -> Program:
    first = next(a for a in f.args if a.op is comm.slice_ and a.attr("axis") == axis)
    what = f"sink {name_in(p, first)} past {f.op.name}"
    if len(f.types) > 1:
        raise refuse(p, f, what, "an op of one result", f"{f.op.name} gives {len(f.types)}")
    whole = [k for k, a in enumerate(f.args) if isinstance(a.type.on(axis), S) and not (a.op is comm.slice_ and a.attr("axis") == axis)]
    if whole:
        raise refuse(
            p, f, what, f"every operand cut along {axis} to be a slice", f"operand {whole[0]} is {f.args[whole[0]].op.name}, cut already"
        )
    if not isinstance(f.types[0].on(axis), S):
        raise refuse(p, f, what, f"{f.op.name} to keep the cut along {axis}", f"its result is {axis}:{f.types[0].on(axis)}")
    return apply_rule(p, rules.sink_slice(f, axis), [f], what)


def hoist(p: Program, at: Place, *, past: Place | Iterable[Place] | None = None) -> Program:
    """A gather, or a slice, moved before the op it reads.

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
        q = _hoist_one(q, g)
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
    return _as_one_step(p, q, f"hoist {name_in(p, node)} past {moved} op{'s' if moved > 1 else ''}")


def _hoist_one(p: Program, node: Node) -> Program:
    f = node.args[0]
    what = f"hoist {name_in(p, node)} past {f.op.name}"
    if f.op.kind in (Kind.COMM, Kind.SOURCE) or len(f.types) != 1 or f.op.name == "item":
        raise refuse(p, node, what, "an op that computes one value from others", f"{f.op.name}")
    try:
        r = rules.hoist_slice(node) if node.op is comm.slice_ else rules.hoist_gather(node)
    except LayoutError as e:
        raise refuse(p, node, what, e.needed or "a cut that can be made above it", e.found or str(node.type)) from e
    return apply_rule(p, r, [node], what)


# -- delay ---------------------------------------------------------------------------------------------------------------------


def delay(p: Program, at: Place, *, past: Place | None = None) -> Program:
    """A reduction moved after an op that reads it: a sum past what is linear, a max or min past what keeps the order.

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
        f"{f.op.name} to {_must(node)} {name_in(p, node)} with its other operands whole along {axis}",
        _why_not_linear(p, f, node, bool(sets)),
    )


def _must(reduction: Node) -> str:
    """What lets a pending reduction pass."""
    place = reduction.args[0].type.on(reduction.attr("axis"))
    return "be linear in" if isinstance(place, P) and place.op == "sum" else f"keep the order of the pending {getattr(place, 'op', '')}"


def _why_not_linear(p: Program, f: Node, node: Node, some: bool) -> str:
    if some:
        return f"another operand of {f.op.name} is cut along {node.attr('axis')}"
    if _must(node) != "be linear in":
        return f"{f.op.name} may change it"
    others = [name_in(p, a) if a.op.name != "const" else repr(a.attr("value")) for a in f.args if a is not node]
    return f"{f.op.name} is not linear in it alone" + (
        f": {', '.join(others)} would be counted once per rank" if f.op.name in ("add", "sub") else ""
    )


# -- state ---------------------------------------------------------------------------------------------------------------------


def shard_state(p: Program, *names: str, gather: bool = False) -> Program:
    """State that is only ever used in slices, stored in slices. Inputs that are no state, as weights to be read, likewise.

        m: R;  slice(m) ... m' = all_gather(u)     ->     m: S;  m ... m' = u
        w: R;  f(w) ...     w' = all_gather(u)     ->     w: S;  f(all_gather(w)) ... w' = u       with gather=True

    Valid when every use of the input is the same slice, or an elementwise op that is only read in such slices, and its next
    value is the gather of a value cut alike.
    """
    if not names:
        raise InvalidTransform("shard_state of nothing", needed=f"inputs, of {', '.join(p.input_names)}", found="none")
    q = p
    for name in names:
        if name not in p.input_names:
            raise InvalidTransform(f"shard_state of {name!r}", needed=f"an input, one of {', '.join(p.input_names)}", found=name)
        q = _slices_up(q, name)
        q = _shard_one(_gather_at_use(q, name) if gather else q, name)
    return _as_one_step(p, q, f"shard_state {', '.join(names)}")


def _gather_at_use(p: Program, name: str) -> Program:
    """The input cut as its next value is, and gathered where it is read; slices of it then are the cut itself."""
    m = p.input_names[name]
    cuts = [n for n in (*_next_value(p, name), *p.users[m]) if n.op in (comm.all_gather, comm.slice_)]
    if not cuts:
        raise refuse(
            p, m, f"shard_state {name}", f"a slice of {name}, or a gather that makes its next value, to say how it is cut", "neither"
        )
    axis = cuts[0].attr("axis")
    cut = rules.cut_of(cuts[0].layout if cuts[0].op is comm.slice_ else cuts[0].args[0].layout, axis)
    assert cut is not None
    return _cancel_pairs(apply_rule(p, rules.cut_whole(m, axis, cut.dim, cut.within), [m], f"cut {name}"), _PAIRS[:1])


def _next_value(p: Program, name: str) -> list[Node]:
    return [p.output_names[o] for o, i in p.state if i == name]


def _slices_up(p: Program, name: str) -> Program:
    """Slices of what is computed from the input hoisted until they slice the input itself, as far as that goes."""
    while True:
        m = p.input_names[name]
        whole = [u for u in p.users[m] if u.op.kind in (Kind.POINTWISE, Kind.VIEW)]
        near = [s for u in whole for s in p.users[u] if s.op is comm.slice_] or [
            s
            for s in p.find_all("slice")
            if s.args[0] not in p.inputs and m in p.needs(s.args[0]) and s.args[0].op.kind in (Kind.POINTWISE, Kind.VIEW)
        ]
        q = next((q for s in near if (q := _try_hoist(p, s)) is not None), None)
        if q is None:
            return p
        p = q


def _try_hoist(p: Program, node: Node) -> Program | None:
    try:
        return _hoist_one(p, node)
    except (InvalidTransform, TypeMismatch, LayoutError):
        return None


def _shard_one(p: Program, name: str) -> Program:
    m, outs = p.input_names[name], [o for o, i in p.state if i == name]
    what = f"shard_state {name}"
    cut = _the_slice(p, m, name, what)
    small = input_node(name, cut.type)
    for out in _next_value(p, name):
        if out.op is not comm.all_gather or out.args[0].type != cut.type:
            raise refuse(
                p,
                out,
                what,
                f"the next value of {name} to be gathered from {cut.type}",
                f"{out.op.name} of {', '.join(str(a.type) for a in out.args)}",
            )
    q = p.rewrite({cut: small}, what, inputs={m: small})
    outputs = [(o, q.moved[p.output_names[o].args[0]] if o in outs else n) for o, n in q.outputs]
    return _as_one_step(p, q.with_outputs(outputs, what), what)


def _the_slice(p: Program, m: Node, name: str, what: str) -> Node:
    """The one slice through which the input is read."""
    uses = p.users[m]
    whole = [u for u in uses if u.op is not comm.slice_]
    if p.outputs_of(m):
        raise refuse(p, m, what, f"{name} to be read in slices only", f"it is an output as it is: {', '.join(p.outputs_of(m))}")
    if not uses or whole or len(set(uses)) != 1:
        needed = f"every use of {name} to be one and the same slice"
        found = f"{name_in(p, whole[0])} reads the whole of it" if whole else f"{len(uses)} different slices" if uses else "no use"
        after = (f'shard_state(sink(p, "{name_in(p, g)}"), {name!r})' for g in p.find_all("all_gather"))
        raise refuse(p, whole[0] if whole else m, what, needed, found, tried(p, after, most=1) if whole else ())
    return uses[0]


# -- drop_dead -----------------------------------------------------------------------------------------------------------------


def drop_dead(p: Program, *outputs: str) -> Program:
    """What nothing reads, dropped: the outputs named, inverse pairs of layout changes, inputs no longer used.

    slice(all_gather(x))   ->   x            all_gather(slice(x))   ->   x
    """
    unknown = [o for o in outputs if o not in p.output_names]
    if unknown or (outputs and len(outputs) == len(p.outputs)):
        raise InvalidTransform(
            f"drop_dead of {', '.join(outputs)}",
            needed=f"some, not all, of the outputs {', '.join(p.output_names)}",
            found=unknown[0] if unknown else "all of them",
        )
    q = p
    if outputs:
        state = [(o, i) for o, i in p.state if o not in outputs]
        q = p.with_outputs([(o, n) for o, n in p.outputs if o not in outputs], "drop outputs", state=state)
    q = _cancel_pairs(q)
    kept_state = {i for _, i in q.state}
    dead = [n for n in q.inputs if not q.users[n] and not q.outputs_of(n) and n.attr("name") not in kept_state]
    if dead:
        q = q.with_outputs(q.outputs, "drop inputs", inputs=[n for n in q.inputs if n not in dead])
    if q is p:
        raise InvalidTransform(
            f"drop_dead has nothing to drop in {p.name}", needed="an output to drop, an inverse pair, or an unread input", found="none"
        )
    return _as_one_step(p, q, "drop_dead" + (f" {', '.join(outputs)}" if outputs else ""))


_PAIRS = ((comm.slice_, comm.all_gather, rules.cancel_slice_gather), (comm.all_gather, comm.slice_, rules.cancel_gather_slice))


def _cancel_pairs(p: Program, pairs: Sequence[Any] = _PAIRS) -> Program:
    """Every inverse pair taken out, one after the other."""
    while True:
        for node in p.nodes:
            rule = next((r for outer, inner, r in pairs if node.op is outer and len(node.args) == 1 and node.args[0].op is inner), None)
            if rule is not None and len(node.args[0].args) == 1 and node.args[0].args[0].types == node.types:
                p = apply_rule(p, rule(node), [node], "cancel")
                break
        else:
            return p


# -- several collectives at once -----------------------------------------------------------------------------------------------------

MERGEABLE = (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all, comm.broadcast, comm.reduce_, comm.send)


def merge(p: Program, *places: Place) -> Program:
    """Collectives of one kind over one axis, made one call over several tensors.

        all_reduce(x), all_reduce(y)   ->   all_reduce(x, y)

    Valid when none of them waits for another.
    """
    nodes = _alike(p, places, "merge", MERGEABLE)
    return apply_rule(p, rules.merge_all(nodes), nodes, f"merge {', '.join(name_in(p, n) for n in nodes)}")


def bucket(p: Program, *places: Place, max_bytes: int | None = None) -> Program:
    """All_reduces of several tensors, made one over their flattened concatenation; `max_bytes` bounds each bucket.

    all_reduce(x), all_reduce(y)   ->   pieces of all_reduce(concat(x, y))
    """
    nodes = _alike(p, places, "bucket", (comm.all_reduce,))
    q = p
    for group in _by_size(nodes, max_bytes):
        here = [q.at(n) for n in group]
        if len(here) > 1:
            q = apply_rule(q, rules.bucket_all(here), here, "bucket")
    if q is p:
        raise refuse(
            p,
            nodes[0],
            "bucket",
            "two tensors that fit one bucket",
            f"max_bytes={max_bytes}",
            tried(p, [f"bucket(p, {', '.join(quoted(p, nodes))})"]),
        )
    return _as_one_step(p, q, f"bucket {', '.join(name_in(p, n) for n in nodes)}")


def _by_size(nodes: Sequence[Node], max_bytes: int | None) -> list[list[Node]]:
    groups: list[list[Node]] = [[]]
    size = 0
    for n in nodes:
        if groups[-1] and max_bytes is not None and size + nbytes(n.type) > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(n)
        size += nbytes(n.type)
    return groups


def _alike(p: Program, places: Sequence[Place], verb: str, ops: Sequence[Any]) -> list[Node]:
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
    for a, waits in p.waits(nodes).items():
        if waits:
            raise refuse(p, a, verb, "collectives that do not wait for one another", f"{name_in(p, a)} needs {name_in(p, waits[0])}")
    return nodes


def _one_reduction(p: Program, nodes: Sequence[Node], verb: str) -> None:
    """A sum and a max cannot be one call."""
    axis = nodes[0].attr("axis")
    kinds = [n.args[0].type.on(axis) for n in nodes]
    for n, kind in zip(nodes, kinds, strict=True):
        if isinstance(kind, P) and kind != kinds[0]:
            raise refuse(p, n, f"{verb} with {name_in(p, nodes[0])}", f"one reduction, {axis}:{kinds[0]}", f"{axis}:{kind}")


def by_hierarchy(p: Program, at: Place, *, inside: str, dim: int = 0) -> Program:
    """A sum over two axes, done inside the node first and across nodes on slices.

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
    """The program before the last step."""
    if p.parent is None:
        raise InvalidTransform(f"{p.name} has no step to undo", needed="a program made by a verb", found="one as it was written")
    return p.parent


__all__ = ["bucket", "by_hierarchy", "delay", "drop_dead", "hoist", "merge", "shard_state", "sink", "split", "undo"]
