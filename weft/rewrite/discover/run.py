"""The full search: worlds, pairs, rules, the fewest of them, proofs. The same input gives the same rules.

Verdicts are kept in a state file as they are found, so that a search that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import RuleError, UnknownName, WeftError
from weft.core.layout import Layout, Mesh
from weft.core.node import Node, Op, Type, apply
from weft.ops.registry import Kind
from weft.ops.source import input_node
from weft.rewrite.certificate import Certificate, Pair, write
from weft.rewrite.discover.closure import Clause, Closure, Grounder
from weft.rewrite.discover.enumerate import Enumerator, Universe
from weft.rewrite.discover.generalise import candidates, renamed
from weft.rewrite.discover.worlds import World, op_names, worlds
from weft.rewrite.pattern import calls_of, holes_of
from weft.rewrite.prove.forms import form, usual_forms
from weft.rewrite.prove.general import derive
from weft.rewrite.prove.ladder import Effort, needless, prove
from weft.rewrite.prove.shapes import infer_shapes
from weft.rewrite.rulefile import show
from weft.rewrite.schema import Form, Schema, erased
from weft.rewrite.second.z3_check import check_by_z3

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A rule, the rung it reached, how, and on how many instances it was tried."""

    schema: Schema
    rung: int
    derivation: dict[str, Any] | None
    tried: int = 0
    needs: dict[str, str] = field(default_factory=dict)  # per condition, what fails without it


@dataclass
class Discovery:
    """Rules, the pairs they account for, and how many pairs share too few inputs to be rules."""

    rules: list[Found]
    pairs: list[Pair]
    ops: list[str]
    expressions: int
    seconds: float
    unbound: int = 0

    def as_file(self, most_pairs: int = 2500) -> str:
        """The rules with their certificates, and the smallest pairs."""
        sealed = [Certificate(r.schema, r.rung, r.derivation, r.tried, r.needs, check_by_z3(r.schema).as_json()).sealed() for r in self.rules]
        facts = {"ops": self.ops, "expressions": self.expressions, "pairs_found": len(self.pairs)}
        return write(sealed, sorted(self.pairs, key=lambda p: len(p.left) + len(p.right))[:most_pairs], **facts)


@dataclass
class State:
    """Verdicts known from an earlier run, by the rule's text."""

    path: Path | None
    verdicts: dict[str, tuple[int, Any, int]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path | None) -> State:
        state = State(path)
        if path is not None and path.exists():
            try:
                for line in path.read_text().splitlines():
                    text, rung, derivation, tried = json.loads(line)
                    state.verdicts[str(text)] = (int(rung), derivation, int(tried))
            except (OSError, ValueError, TypeError) as error:
                raise RuleError(
                    f"{path} holds no verdicts", needed="a file that weft discover --state wrote, or a new one", found=str(error), try_="the name of a new file"
                ) from error
        return state

    def verdict(self, schema: Schema, forms: Sequence[Form], effort: Effort) -> tuple[int, Any, int]:
        text = show(schema)
        if text not in self.verdicts:
            found = prove(schema, effort, forms)
            self.verdicts[text] = (found.rung, found.derivation, found.tried)
            if self.path is not None:
                with self.path.open("a") as f:
                    f.write(json.dumps([text, *self.verdicts[text]]) + "\n")
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
        best: tuple[Found, list[list[Clause]]] | None = None
        for schema in candidates(u.expr(left), u.expr(right)):
            schema = _with_shapes(schema, u)
            clauses = self._ground(schema)
            if clauses is None:
                continue
            if schema.op_holes and derive(schema) is None:
                continue  # true of the ops at hand is not true of every op
            rung, derivation, tried = self.state.verdict(schema, self.forms, self.effort)
            if rung and (best is None or rung > best[0].rung):
                best = (Found(named(schema), rung, derivation, tried), clauses)
            if rung == 3:
                break
        if best is None:
            raise RuleError("a pair that is equal on every mesh reaches no rung", needed="a proof", found=show(schema))
        self.rules.append(best[0])
        self.clauses.append(best[1])
        for closure, new in zip(self.closures, best[1], strict=True):
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
            touched = [w for w, clauses in enumerate(self.clauses[k]) if clauses]
            if self._all_known([c for i, c in enumerate(self.clauses) if i != k], touched):
                self.tell(f"follows from the others: {self.rules[k].schema}")
                del self.rules[k], self.clauses[k]

    def show_needs(self) -> None:
        """For every condition of every rule, a counterexample to the rule without it."""
        for k, r in enumerate(self.rules):
            if r.schema.conditions:
                needs = {str(c): text for c, text in needless(r.schema, self.effort, self.forms)}
                self.rules[k] = replace(r, needs=needs)

    def _all_known(self, clauses: Sequence[list[list[Clause]]], where: Sequence[int]) -> bool:
        for w in sorted(where, key=lambda w: len(self.universes[w])):
            closure = Closure(self.universes[w])
            closure.add(c for each in clauses for c in each[w])
            if not all(closure.known(p) for p in self.pairs[w]):
                return False
        return True

    def found_pairs(self) -> list[Pair]:
        """Every pair, once up to the names of inputs."""
        out: dict[str, Pair] = {}
        for u, pairs in zip(self.universes, self.pairs, strict=True):
            for pair in pairs:
                made = _as_pair(u, *(_orient(u, pair) or pair))
                out[f"{made.left} {made.right} {sorted(made.types.items())}"] = made
        return list(out.values())


def _weight(u: Universe, t: int, r: int) -> tuple[int, int]:
    """Small pairs first, and of those the ones with more inputs, which say more."""
    return u.size[t] + u.size[r], -len(u.leaves[t])


def _as_pair(u: Universe, left: int, right: int) -> Pair:
    """The pair as text, its inputs renamed in order."""
    names = dict(zip(dict.fromkeys([*holes_of(u.expr(left)), *holes_of(u.expr(right))]), "xyzwuv", strict=False))
    leaves, mesh = {leaf.name: leaf for leaf in u.world.leaves}, u.world.meshes[0]
    types = {new: str(leaves[old].node(mesh).type) for old, new in names.items()}
    return Pair(str(renamed(u.expr(left), names)), str(renamed(u.expr(right), names)), types, dict(mesh.key))


def _orient(u: Universe, pair: tuple[int, int]) -> tuple[int, int] | None:
    """The pair with every input of the right side on the left; None where neither side has all."""
    t, r = pair
    if u.leaves[r] <= u.leaves[t]:
        return t, r
    return (r, t) if u.leaves[t] <= u.leaves[r] else None


def _with_shapes(schema: Schema, u: Universe) -> Schema:
    """A rule of named ops carries the shapes it has in general."""
    if schema.op_holes or all(c.op.kind is Kind.COMM for c in schema.calls):
        return schema
    ranks = dict.fromkeys(schema.holes, (len(u.world.leaves[0].shape), False))
    shapes = infer_shapes([erased(e) for e in (*schema.left, *schema.right)], ranks)
    return schema if shapes is None else replace(schema, shapes=shapes)


def named(schema: Schema) -> Schema:
    """Named after its ops and its own text, so that a name never moves to another rule."""
    blank = show(replace(schema, name="found"))
    ops = dict.fromkeys(c.op.name for e in schema.left for c in calls_of(e))
    heads = "_".join(list(ops)[:2]) if ops else "any"
    return replace(schema, name=f"{heads}_{hashlib.sha256(blank.encode()).hexdigest()[:5]}", family="discovered")


def discover(
    max_ops: int = 3,
    *,
    extra: Sequence[Form] = (),
    only: Sequence[str] = (),
    given: Sequence[World] | None = None,
    state: Path | None = None,
    tell: Tell = lambda _: None,
    effort: Effort | None = None,
) -> Discovery:
    """Rules over the usual worlds with more ops if given, over those named only, or over worlds of one's own."""
    start = time.perf_counter()
    given = _chosen(worlds(extra), only) if given is None else given
    search = Search(given, max_ops, State.read(state), effort or Effort(per_mesh=4, symbolic=4), tell)
    search.run()
    search.prune()
    search.show_needs()
    total = sum(len(u) for u in search.universes)
    return Discovery(search.rules, search.found_pairs(), op_names(given), total, time.perf_counter() - start, search.unbound)


def forms_of(op: Op) -> list[Form]:
    """The op as it stands in expressions: of one, two or three matrices, without attributes."""
    square = [input_node(f"x{k}", Type(torch.float64, Layout.of(Mesh(), (4, 4)))) for k in range(3)]
    found = [n for n in (1, 2, 3) if _takes(op, square[:n])]
    if not found:
        raise RuleError(f"{op.name} takes no matrices", needed="an op of one to three matrices, without attributes", found=op.name)
    return [form(op.name, n) for n in found]


def _takes(op: Op, args: Sequence[Node]) -> bool:
    """Whether its equation and its meanings take so many operands."""
    try:
        op.run(*(torch.zeros(4, 4, dtype=torch.float64) for _ in args))
        if op.field is not None:
            op.field(7, *(torch.zeros(4, 4, dtype=torch.int64) for _ in args))
        return len(apply(op, tuple(args), {}).types) == 1
    except (WeftError, KeyError, TypeError, IndexError, RuntimeError):
        return False


def about(found: Discovery, ops: Sequence[Op]) -> Discovery:
    """Only the rules that name one of the ops."""
    return replace(found, rules=[r for r in found.rules if any(c.op in ops for c in r.schema.calls)])


def _chosen(known: Sequence[World], only: Sequence[str]) -> list[World]:
    odd = [name for name in only if name not in {w.name for w in known}]
    if odd:
        raise UnknownName(f"no world named {odd[0]!r}", needed=" or ".join(w.name for w in known), found=odd[0])
    return [w for w in known if not only or w.name in only]


__all__ = ["Discovery", "Found", "Search", "about", "discover", "forms_of"]
