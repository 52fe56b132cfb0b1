"""Updates of tables by rows: an update of what a put made reads the put's operands instead, and its result need not exist.

The rules are lines of weft as all others (`algebra`); the ops on their right are defined by their left sides, which is the proof.
"""

from __future__ import annotations

from functools import lru_cache

from weft.core.node import Node
from weft.core.program import Program
from weft.ops.embed import put_op
from weft.ops.registry import memory_traffic
from weft.ops.rowwise import AT, at_rows
from weft.rewrite.rulefile import parse_rules
from weft.rewrite.schema import Schema

TEXT = """
[updates]
adam_by_rows: adam(p, put(x, k, r, dim=d), m, v, lr, t, betas=a, eps=b, decay=c, decoupled=e, sign=s)
    == adam_at(p, x, k, r, m, v, lr, t, betas=a, eps=b, decay=c, decoupled=e, sign=s, dim=d)
    for p[i, j] x[n, j] k[int: n] r[int: i] m[i, j] v[i, j] lr[] t[]
amsgrad_by_rows: adam(p, put(x, k, r, dim=d), m, v, w, lr, t, betas=a, eps=b, decay=c, decoupled=e, sign=s)
    == adam_at(p, x, k, r, m, v, w, lr, t, betas=a, eps=b, decay=c, decoupled=e, sign=s, dim=d)
    for p[i, j] x[n, j] k[int: n] r[int: i] m[i, j] v[i, j] w[i, j] lr[] t[]
sgd_by_rows: sgd(p, put(x, k, r, dim=d), lr, t, momentum=a, damping=b, nesterov=c, decay=e, sign=s)
    == sgd_at(p, x, k, r, lr, t, momentum=a, damping=b, nesterov=c, decay=e, sign=s, dim=d)
    for p[i, j] x[n, j] k[int: n] r[int: i] lr[] t[]
momentum_by_rows: sgd(p, put(x, k, r, dim=d), m, lr, t, momentum=a, damping=b, nesterov=c, decay=e, sign=s)
    == sgd_at(p, x, k, r, m, lr, t, momentum=a, damping=b, nesterov=c, decay=e, sign=s, dim=d)
    for p[i, j] x[n, j] k[int: n] r[int: i] m[i, j] lr[] t[]
adagrad_by_rows: adagrad(p, put(x, k, r, dim=d), v, lr, t, decay=a, lr_decay=b, eps=c, sign=s)
    == adagrad_at(p, x, k, r, v, lr, t, decay=a, lr_decay=b, eps=c, sign=s, dim=d)
    for p[i, j] x[n, j] k[int: n] r[int: i] v[i, j] lr[] t[]
rmsprop_by_rows: rmsprop(p, put(x, k, r, dim=d), v, lr, t, alpha=a, eps=b, decay=c, momentum=e, sign=s)
    == rmsprop_at(p, x, k, r, v, lr, t, alpha=a, eps=b, decay=c, momentum=e, sign=s, dim=d)
    for p[i, j] x[n, j] k[int: n] r[int: i] v[i, j] lr[] t[]
rmsprop_with_momentum_by_rows: rmsprop(p, put(x, k, r, dim=d), v, m, lr, t, alpha=a, eps=b, decay=c, momentum=e, sign=s)
    == rmsprop_at(p, x, k, r, v, m, lr, t, alpha=a, eps=b, decay=c, momentum=e, sign=s, dim=d)
    for p[i, j] x[n, j] k[int: n] r[int: i] v[i, j] m[i, j] lr[] t[]
"""


@lru_cache(maxsize=1)
def rules() -> tuple[Schema, ...]:
    return tuple(parse_rules(TEXT))


def by_rows(program: Program) -> Program:
    """The program with those updates by rows that move fewer bytes so: on the busiest rank, where it is placed."""
    program = by_definition(program)
    swap = {n: at_rows(n) for n in better_by_rows(program)}
    return program.rewrite(swap, "updates by rows") if swap else program


def better_by_rows(program: Program) -> list[Node]:
    """Updates of what a put made that would move fewer bytes by rows."""
    return [n for n in program.nodes if n.op in AT and n.args[1].op is put_op and _has_a_rule(n) and _pays(program, n)]


def _has_a_rule(n: Node) -> bool:
    """Settings that are operands, and a centered mean, stand in no rule."""
    return not n.attr("given") and not n.attr("centered")


def by_definition(program: Program) -> Program:
    """The program with every such update written as what it stands for."""
    swap = {n: n.op.defined(*n.args, **dict(n.attrs)) for n in program.nodes if n.op in AT.values()}
    return program.rewrite(swap, "full gradients") if swap else program


def rules_of(program: Program) -> tuple[str, ...]:
    """The rules by which its updates came to read rows."""
    names = {(rule.right[0].op, len(rule.right[0].args)): rule.name for rule in rules()}
    return tuple(dict.fromkeys(names[n.op, len(n.args)] for n in program.nodes if n.op in AT.values()))


def _pays(program: Program, update: Node) -> bool:
    """Whether reading rows saves more than it costs; a gradient that others read is made all the same."""
    saved = memory_traffic(update.args[1]) if reads_alone(program, update) else 0
    return memory_traffic(at_rows(update)) < memory_traffic(update) + saved


def reads_alone(program: Program, update: Node) -> bool:
    """Whether nothing but the update reads its gradient."""
    gradient = update.args[1]
    return list(program.users[gradient]) == [update] and not program.outputs_of(gradient)
