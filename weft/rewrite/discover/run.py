"""The whole search: worlds, pairs, rules, the fewest of them, proofs. The same input gives the same rules.

Verdicts are kept in a state file as they come, so that a search that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.rewrite.discover.closure import Clause, Closure, Grounder
from weft.rewrite.discover.enumerate import Enumerator, Universe
from weft.rewrite.discover.generalise import candidates
from weft.rewrite.discover.worlds import World, worlds
from weft.rewrite.pattern import Hole, calls_of, holes_of
from weft.rewrite.prove.forms import usual_forms
from weft.rewrite.prove.ladder import Effort, prove
from weft.rewrite.prove.shapes import infer_shapes
from weft.rewrite.rulefile import show
from weft.rewrite.schema import Form, Schema, only_moves

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A rule, the rung it reached, and how many pairs waited for it when it was taken up."""

    schema: Schema
    rung: int
    derivation: dict[str, Any] | None
    pairs: int = 0


@dataclass
class Discovery:
    """Rules, the pairs they account for (as text, one per line), and pairs that share too few inputs to be rules."""

    rules: list[Found]
    pairs: list[str]
    ops: list[str]
    expressions: int
    seconds: float
    unbound: int = 0


@dataclass
class State:
    """Verdicts known from an earlier run, by the rule's text."""

    path: Path | None
    verdicts: dict[str, tuple[int, Any]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path | None) -> State:
        state = State(path)
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                text, rung, derivation = json.loads(line)
                state.verdicts[text] = (rung, derivation)
        return state

    def verdict(self, schema: Schema, forms: Sequence[Form], effort: Effort) -> tuple[int, Any]:
        text = show(schema)
        if text not in self.verdicts:
            found = prove(schema, effort, forms)
            self.verdicts[text] = (found.rung, found.derivation)
            if self.path is not None:
                with self.path.open("a") as f:
                    f.write(json.dumps([text, found.rung, found.derivation]) + "\n")
        return self.verdicts[text]


class Search:
    """Takes up pairs from the smallest on; a pair that does not follow from the rules so far brings a new rule."""

    def __init__(self, given: Sequence[World], max_ops: int, state: State, effort: Effort, tell: Tell) -> None:
        self.state, self.effort, self.tell = state, effort, tell
        self.universes = [Enumerator(w, max_ops, tell).run() for w in given]
        self.grounders = [Grounder(u) for u in self.universes]
        self.closures = [Closure(u) for u in self.universes]
        extra = {f for w in given for f in w.forms if f.op.kind.name != "COMM"}
        self.forms = list(dict.fromkeys([*usual_forms(), *sorted(extra, key=lambda f: f.name)]))
        self.rules: list[Found] = []
        self.clauses: list[list[list[Clause]]] = []
        self.pairs = [[p for p in u.pairs() if _orient(u, p) is not None] for u in self.universes]
        self.unbound = sum(len(u.pairs()) - len(p) for u, p in zip(self.universes, self.pairs, strict=True))

    def run(self) -> None:
        queue = sorted((*_weight(self.universes[w], t, r), w, t, r) for w, pairs in enumerate(self.pairs) for t, r in pairs)
        for k, (*_, w, t, r) in enumerate(queue):
            if not self.closures[w].known((t, r)):
                self._take_up(w, (t, r))
                self.tell(f"pair {k + 1} of {len(queue)}: {len(self.rules)} rules, the last {self.rules[-1].schema}")

    def _take_up(self, w: int, pair: tuple[int, int]) -> None:
        left, right = _orient(self.universes[w], pair) or pair
        u = self.universes[w]
        best: tuple[int, Schema, Any, list[list[Clause]]] | None = None
        for schema in candidates(u.expr(left), u.expr(right)):
            schema = _with_shapes(schema, u)
            clauses = self._ground(schema)
            if clauses is None:
                continue
            rung, derivation = self.state.verdict(schema, self.forms, self.effort)
            if rung and (best is None or rung > best[0]):
                best = (rung, schema, derivation, clauses)
            if rung == 3:
                break
        if best is None:
            raise AssertionError(f"equal on every mesh, yet refuted: {show(schema)}")
        rung, schema, derivation, clauses = best
        self.rules.append(Found(named(schema), rung, derivation))
        self.clauses.append(clauses)
        for closure, new in zip(self.closures, clauses, strict=True):
            closure.add(new)
        self.closures[w].add([(*pair, ())])

    def _ground(self, schema: Schema) -> list[list[Clause]] | None:
        """The rule's instances in every universe, or None if one of them is false."""
        out = []
        for u, grounder in zip(self.universes, self.grounders, strict=True):
            found = []
            for clause in grounder.clauses(schema):
                if u.rep[clause[0]] != u.rep[clause[1]]:
                    return None
                found.append(clause)
            out.append(found)
        return out

    def prune(self) -> None:
        """Drops every rule whose instances follow from the other rules, the last found first."""
        for k in reversed(range(len(self.rules))):
            others = [c for i, c in enumerate(self.clauses) if i != k]
            if self._all_known(others):
                self.tell(f"follows from the others: {self.rules[k].schema}")
                del self.rules[k], self.clauses[k]

    def _all_known(self, clauses: Sequence[list[list[Clause]]]) -> bool:
        for w, u in enumerate(self.universes):
            closure = Closure(u)
            closure.add(c for each in clauses for c in each[w])
            if not all(closure.known(p) for p in self.pairs[w]):
                return False
        return True

    def texts(self) -> list[str]:
        """Every pair as a line, once up to the names of inputs."""
        lines: dict[str, None] = {}
        for w, pairs in enumerate(self.pairs):
            u = self.universes[w]
            for pair in pairs:
                left, right = _orient(u, pair) or pair
                *_, exact = candidates(u.expr(left), u.expr(right))
                lines[pair_text(u, left, right)] = None
                del exact
        return list(lines)


def _weight(u: Universe, t: int, r: int) -> tuple[int, int]:
    """Small pairs first, and of those the ones with more inputs, which say more."""
    return u.size[t] + u.size[r], -len(u.leaves[t])


def pair_text(u: Universe, left: int, right: int) -> str:
    """`relu(all_gather(x, axis='m')) == ... for x[4, 4] m:S(0)`: the pair itself, inputs renamed in order."""
    names: dict[str, str] = {}
    for h in (*holes_of(u.expr(left)), *holes_of(u.expr(right))):
        names.setdefault(h, "xyzwuv"[len(names)])
    by_name = {leaf.name: leaf for leaf in u.world.leaves}
    sides = " == ".join(str(_rename(u.expr(t), names)) for t in (left, right))
    types = " ".join(f"{new}{list(by_name[old].shape)}" + "".join(f"{a}:{p}" for a, p in by_name[old].places) for old, new in names.items())
    return f"{sides} for {types}"


def _rename(expr: Any, names: dict[str, str]) -> Any:
    from weft.rewrite.discover.generalise import _map

    return _map(expr, names)


def _orient(u: Universe, pair: tuple[int, int]) -> tuple[int, int] | None:
    """The pair with every input of the right side on the left; None where neither side has all."""
    t, r = pair
    if u.leaves[r] <= u.leaves[t]:
        return t, r
    return (r, t) if u.leaves[t] <= u.leaves[r] else None


def _with_shapes(schema: Schema, u: Universe) -> Schema:
    """A rule of named ops carries the shapes it has in general."""
    if schema.op_holes or only_moves(schema):
        return schema
    rank = len(u.world.leaves[0].shape)
    from weft.rewrite.schema import erased

    ranks = dict.fromkeys(schema.holes, (rank, False))
    shapes = infer_shapes([erased(e) for e in (*schema.left, *schema.right)], ranks)
    return schema if shapes is None else replace(schema, shapes=shapes)


def named(schema: Schema) -> Schema:
    """Named after its ops and its own text, so that a name never moves to another rule."""
    blank = show(replace(schema, name="found"))
    ops = dict.fromkeys(c.op.name for e in schema.left for c in calls_of(e))
    heads = "_".join(list(ops)[:2]) if ops else "any"
    return replace(schema, name=f"{heads}_{hashlib.sha256(blank.encode()).hexdigest()[:5]}", family="discovered")


def discover(max_ops: int = 3, *, extra: Sequence[Form] = (), only: Sequence[str] = (), state: Path | None = None, tell: Tell = lambda _: None, effort: Effort | None = None) -> Discovery:
    """Rules over the usual worlds, or those named, with more ops if given."""
    start = time.perf_counter()
    given = [w for w in worlds(extra) if not only or w.name in only]
    search = Search(given, max_ops, State.read(state), effort or Effort(per_mesh=4, symbolic=4), tell)
    search.run()
    search.prune()
    from weft.rewrite.discover.worlds import op_names

    total = sum(len(u) for u in search.universes)
    return Discovery(search.rules, search.texts(), op_names(given), total, time.perf_counter() - start, search.unbound)


__all__ = ["Discovery", "Found", "Hole", "Search", "discover"]
