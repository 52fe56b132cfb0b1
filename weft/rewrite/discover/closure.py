"""What follows from a set of rules within a universe.

A rule's ground instance is a Horn clause over expressions: two expressions are equal if the inner ones it passes through are already
known to equal their group's representative. A pair is derivable when the clauses of the rules, closed under union-find, join it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.ops.registry import Kind
from weft.rewrite.discover.enumerate import Universe
from weft.rewrite.pattern import AttrHole, Call, Hole
from weft.rewrite.schema import Condition, OpHole, Schema, attrs_fit, form_fits

Clause = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Env:
    """Holes filled so far, and the expressions passed through that are not representatives."""

    bound: dict[str, int] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    through: tuple[int, ...] = ()


class Grounder:
    """Finds the ground instances of schemas in one universe."""

    def __init__(self, universe: Universe) -> None:
        self.u = universe
        self.by_op: dict[Any, list[int]] = {}
        for f, form in enumerate(universe.world.forms):
            self.by_op.setdefault(form.op, []).append(f)
        self.computing = [f for f, form in enumerate(universe.world.forms) if form.op.kind is not Kind.COMM]

    def clauses(self, schema: Schema) -> Iterator[Clause]:
        """Every instance both of whose sides are in the universe and have one type."""
        left, right = schema.left[0], schema.right[0]
        for t, env in self._everywhere(left, schema.conditions):
            for other, done in self._find(right, env, schema.conditions):
                if t != other and self.u.type[t] == self.u.type[other] and attrs_fit(done.attrs, schema.conditions):
                    yield t, other, done.through

    def _everywhere(self, expr: Any, conditions: Sequence[Condition]) -> Iterator[tuple[int, Env]]:
        if isinstance(expr, Hole):
            yield from ((t, Env({expr.name: t})) for t, r in enumerate(self.u.rep) if t == r)
            return
        for f in self._forms(expr, Env()):
            for t in self.u.by_form.get(f, ()):
                yield from ((t, env) for env in self._match(expr, t, Env(), conditions))

    def _forms(self, expr: Call, env: Env) -> Iterable[int]:
        if not isinstance(expr.op, OpHole):
            return self.by_op.get(expr.op, ())
        return [env.ops[expr.op.name]] if expr.op.name in env.ops else self.computing

    def _head(self, expr: Call, f: int, env: Env, conditions: Sequence[Condition]) -> Env | None:
        """The environment in which a form is the expression's op."""
        form = self.u.world.forms[f]
        operands = [a for a in expr.args if isinstance(a, Hole | Call)]
        if isinstance(expr.op, OpHole):
            name = expr.op.name
            if form.arity != len(expr.args) or env.ops.get(name, f) != f or not form_fits(form, name, conditions):
                return None
            return Env(env.bound, {**env.ops, name: f}, env.attrs, env.through)
        if form.op is not expr.op or form.arity != len(operands) or form.fixed != tuple(expr.args[len(operands) :]):
            return None
        attrs, have = dict(env.attrs), dict(form.attrs)
        for key, want in expr.attrs:
            if isinstance(want, AttrHole):
                if attrs.setdefault(want.name, have.get(key)) != have.get(key):
                    return None
            elif have.get(key) != want:
                return None
        return Env(env.bound, env.ops, attrs, env.through)

    def _match(self, expr: Call, t: int, env: Env, conditions: Sequence[Condition]) -> Iterator[Env]:
        after = self._head(expr, self.u.form[t], env, conditions)
        if after is None or not self._keeps(expr, self.u.form[t], self.u.args[t], after, conditions):
            return
        yield from self._match_args(expr.args, self.u.args[t], after, conditions)

    def _match_args(self, exprs: Sequence[Any], reps: Sequence[int], env: Env, conditions: Sequence[Condition]) -> Iterator[Env]:
        if not reps:
            yield env
            return
        for after in self._match_group(exprs[0], reps[0], env, conditions):
            yield from self._match_args(exprs[1:], reps[1:], after, conditions)

    def _match_group(self, expr: Any, rep: int, env: Env, conditions: Sequence[Condition]) -> Iterator[Env]:
        if isinstance(expr, Hole):
            if env.bound.get(expr.name, rep) == rep:
                yield Env({**env.bound, expr.name: rep}, env.ops, env.attrs, env.through)
            return
        for t in self.u.members[rep]:
            if self.u.form[t] >= 0:
                passed = env.through if t == rep else (*env.through, t)
                yield from self._match(expr, t, Env(env.bound, env.ops, env.attrs, passed), conditions)

    def _find(self, expr: Any, env: Env, conditions: Sequence[Condition]) -> Iterator[tuple[int, Env]]:
        """The expressions an instance of `expr` is, from the inside out."""
        if isinstance(expr, Hole):
            yield env.bound[expr.name], env
            return
        for reps, after in self._find_all([a for a in expr.args if isinstance(a, Hole | Call)], env, conditions):
            for f in self._forms(expr, after):
                full = self._head(expr, f, after, conditions)
                t = self.u.number.get((f, reps)) if full is not None else None
                if t is not None and full is not None and self._keeps(expr, f, reps, full, conditions):
                    yield t, full

    def _find_all(self, exprs: Sequence[Any], env: Env, conditions: Sequence[Condition]) -> Iterator[tuple[tuple[int, ...], Env]]:
        if not exprs:
            yield (), env
            return
        for t, after in self._find(exprs[0], env, conditions):
            rep = self.u.rep[t]
            passed = Env(after.bound, after.ops, after.attrs, after.through if t == rep else (*after.through, t))
            for reps, done in self._find_all(exprs[1:], passed, conditions):
                yield (rep, *reps), done

    def _keeps(self, expr: Call, f: int, reps: Sequence[int], env: Env, conditions: Sequence[Condition]) -> bool:
        if not isinstance(expr.op, OpHole):
            return True
        wanted = [c for c in conditions if c.kind == "keeps" and c.who[0] == expr.op.name]
        form = self.u.world.forms[f]
        if not wanted or form.op.equation is None:
            return not wanted
        eq = form.op.equation(tuple(self.u.type[r] for r in reps), dict(form.attrs))
        for c in wanted:
            d, k, e = (env.attrs.get(v, v) for v in c.args)
            if d >= len(eq.ins[k]) or e >= len(eq.outs[0]) or eq.ins[k][d] != eq.outs[0][e] or eq.ins[k][d] in eq.unsharded:
                return False
            if sum(eq.ins[k][d] in labels for labels in eq.ins) > 1:
                return False
        return True


class Closure:
    """Union-find over the expressions of a universe, closed under clauses as they are added."""

    def __init__(self, universe: Universe) -> None:
        self.u = universe
        self.up = list(range(len(universe)))
        self.waiting: list[Clause] = []

    def top(self, t: int) -> int:
        while self.up[t] != t:
            self.up[t] = self.up[self.up[t]]
            t = self.up[t]
        return t

    def same(self, a: int, b: int) -> bool:
        return self.top(a) == self.top(b)

    def add(self, clauses: Iterable[Clause]) -> None:
        """New clauses, and whatever then follows from those that waited."""
        self.waiting += clauses
        changed = True
        while changed:
            changed, left = False, []
            for clause in self.waiting:
                a, b, through = clause
                if all(self.same(t, self.u.rep[t]) for t in through):
                    changed |= self._join(a, b)
                else:
                    left.append(clause)
            self.waiting = left

    def _join(self, a: int, b: int) -> bool:
        a, b = self.top(a), self.top(b)
        self.up[max(a, b)] = min(a, b)
        return a != b

    def known(self, pair: tuple[int, int]) -> bool:
        return self.same(*pair)


def follows(universe: Universe, rules: Iterable[Schema], left: Any, right: Any) -> bool:
    """Whether an equality of two expressions of the universe, its inputs as holes, can be derived from the rules within it."""
    grounder, closure = Grounder(universe), Closure(universe)
    closure.add(c for rule in rules if len(rule.left) == 1 for c in grounder.clauses(rule))
    inputs = {leaf.name: k for k, leaf in enumerate(universe.world.leaves)}
    env = Env({name: universe.number[-1 - k, ()] for name, k in inputs.items()})
    sides = [next(iter(grounder._find(e, env, ())), None) for e in (left, right)]
    if sides[0] is None or sides[1] is None:
        return False
    through = (t for side in sides if side is not None for t in side[1].through)
    return all(closure.same(t, universe.rep[t]) for t in through) and closure.same(sides[0][0], sides[1][0])
