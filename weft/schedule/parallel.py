"""Verbs that begin parallelism where there is none yet: `shard` a full value, `redistribute` a gather along another dim."""

from __future__ import annotations

from weft.core.errors import InvalidTransform
from weft.core.layout import Replicated, Within
from weft.core.program import Program
from weft.ops import comm
from weft.rewrite import communicate as rules
from weft.rewrite.engine import apply_rule
from weft.schedule.refusal import Place, expect, name_in, refuse, tried


def shard(p: Program, at: Place, *, axis: str, dim: int, within: Within = None) -> Program:
    """Shard a full value and gather it again, so that the gather may then sink.

    x   ->   all_gather(slice(x))
    """
    node = p.input_names[at] if isinstance(at, str) and at in p.input_names else p.at(at)
    p.mesh.require(axis)
    if not isinstance(node.type.on(axis), Replicated):
        raise refuse(p, node, f"shard {name_in(p, node)}", f"{axis}:R", str(node.type))
    return apply_rule(p, rules.shard_replicated(node, axis, dim, within), [node], f"shard {name_in(p, node)} along {axis}")


def redistribute(p: Program, at: Place, *, dim: int, within: Within = None) -> Program:
    """Redistribute what a gather reads: shard it along another dim first, by an all_to_all.

    all_gather(x)   ->   all_gather(all_to_all(x, dim))
    """
    node = expect(p, at, "redistribute", comm.all_gather, options=f", dim={dim}")
    step = f"redistribute {name_in(p, node)} to dim {dim}"
    now = rules.shard_of(node.args[0].layout, node.attr("axis"))
    if now is not None and now.dim == dim and now.within == within:
        raise refuse(p, node, step, "another dim than it is sharded along", f"dim {dim}")
    try:
        return apply_rule(p, rules.redistribute_gather(node, dim, within), [node], step)
    except InvalidTransform as e:
        others = (f'redistribute(p, "{name_in(p, node)}", dim={d})' for d in range(node.ndim) if d != dim)
        raise refuse(p, node, step, e.needed or "a dim that may be sharded", e.found or str(node.type), tried(p, others)) from e
