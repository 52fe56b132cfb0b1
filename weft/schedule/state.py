"""State stored in slices, and what nothing reads dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.errors import InvalidTransform, LayoutError, TypeMismatch
from weft.core.node import Node
from weft.core.program import Program
from weft.ops import comm
from weft.ops.registry import Kind
from weft.ops.source import input_in_layout
from weft.rewrite import communicate as rules
from weft.rewrite.engine import apply_rule
from weft.schedule.moves import hoist_one
from weft.schedule.refusal import as_one_step, name_in, refuse, tried


def shard_state(p: Program, *names: str, gather: bool = False) -> Program:
    """Store state that is only used in slices as shards; inputs that are no state, such as weights that are only read, likewise.

        m: R;  slice(m) ... m' = all_gather(u)     ->     m: S;  m ... m' = u
        w: R;  f(w) ...     w' = all_gather(u)     ->     w: S;  f(all_gather(w)) ... w' = u       with gather=True

    Valid when every use of the input is the same slice, or an elementwise op that is only read in such slices, and its next
    value is the gather of a value sharded the same way.
    """
    if not names:
        raise InvalidTransform("shard_state of nothing", needed=f"inputs, of {', '.join(p.input_names)}", found="none")
    q = p
    for name in names:
        if name not in p.input_names:
            raise InvalidTransform(f"shard_state of {name!r}", needed=f"an input, one of {', '.join(p.input_names)}", found=name)
        q = _slices_up(q, name)
        q = _shard_one(_gather_at_use(q, name) if gather else q, name)
    return as_one_step(p, q, f"shard_state {', '.join(names)}")


def _gather_at_use(p: Program, name: str) -> Program:
    """The input sharded as its next value is, and gathered where it is read; slices of it then are the sharding itself."""
    m = p.input_names[name]
    slices = [n for n in (*_next_value(p, name), *p.users[m]) if n.op in (comm.all_gather, comm.slice_)]
    if not slices:
        raise refuse(
            p, m, f"shard_state {name}", f"a slice of {name}, or a gather that makes its next value, to say how it is sharded", "neither"
        )
    axis = slices[0].attr("axis")
    shard = rules.shard_of(slices[0].layout if slices[0].op is comm.slice_ else slices[0].args[0].layout, axis)
    assert shard is not None
    return _cancel_pairs(apply_rule(p, rules.shard_replicated(m, axis, shard.dim, shard.within), [m], f"cut {name}"), _PAIRS[:1])


def _next_value(p: Program, name: str) -> list[Node]:
    return [p.output_names[o] for o, i in p.state if i == name]


def _slices_up(p: Program, name: str) -> Program:
    """Slices of what is computed from the input hoisted until they slice the input itself, as far as that goes."""
    while True:
        m = p.input_names[name]
        full = [u for u in p.users[m] if u.op.kind in (Kind.POINTWISE, Kind.VIEW)]
        slices = [s for u in full for s in p.users[u] if s.op is comm.slice_] or [
            s
            for s in p.find_all("slice")
            if s.args[0] not in p.inputs and m in p.needs(s.args[0]) and s.args[0].op.kind in (Kind.POINTWISE, Kind.VIEW)
        ]
        q = next((q for s in slices if (q := _try_hoist(p, s)) is not None), None)
        if q is None:
            return p
        p = q


def _try_hoist(p: Program, node: Node) -> Program | None:
    try:
        return hoist_one(p, node)
    except (InvalidTransform, TypeMismatch, LayoutError):
        return None


def _shard_one(p: Program, name: str) -> Program:
    m, outs = p.input_names[name], [o for o, i in p.state if i == name]
    what = f"shard_state {name}"
    shard = _the_slice(p, m, name, what)
    small = input_in_layout(m, shard.layout)
    for out in _next_value(p, name):
        if out.op is not comm.all_gather or out.args[0].type != shard.type:
            raise refuse(
                p,
                out,
                what,
                f"the next value of {name} to be gathered from {shard.type}",
                f"{out.op.name} of {', '.join(str(a.type) for a in out.args)}",
            )
    q = p.rewrite({shard: small}, what, inputs={m: small})
    outputs = [(o, q.moved[p.output_names[o].args[0]] if o in outs else n) for o, n in q.outputs]
    return as_one_step(p, q.with_outputs(outputs, what), what)


def _the_slice(p: Program, m: Node, name: str, what: str) -> Node:
    """The one slice through which the input is read."""
    uses = p.users[m]
    full = [u for u in uses if u.op is not comm.slice_]
    if p.outputs_of(m):
        raise refuse(p, m, what, f"{name} to be read in slices only", f"it is an output as it is: {', '.join(p.outputs_of(m))}")
    if not uses or full or len(set(uses)) != 1:
        needed = f"every use of {name} to be one and the same slice"
        found = f"{name_in(p, full[0])} reads all of it" if full else f"{len(uses)} different slices" if uses else "no use"
        after = (f'shard_state(sink(p, "{name_in(p, g)}"), {name!r})' for g in p.find_all("all_gather"))
        raise refuse(p, full[0] if full else m, what, needed, found, tried(p, after, most=1) if full else ())
    return uses[0]


def drop_dead(p: Program, *outputs: str) -> Program:
    """Drop the named outputs, inverse pairs of layout changes, and inputs that nothing reads.

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
    return as_one_step(p, q, "drop_dead" + (f" {', '.join(outputs)}" if outputs else ""))


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
