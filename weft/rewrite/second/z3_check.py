"""The verdict: for each case, Z3 is asked for real numbers at which the sides differ, on some rank or from one device; none may exist."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from weft.core.node import Node
from weft.rewrite.generic import step, unrolled
from weft.rewrite.schema import Schema
from weft.rewrite.second.cases import Case, cases
from weft.rewrite.second.meaning import Array, Inexpressible, Meaning

LIMIT = 40_000_000  # of Z3's own count of work a query; a rule that takes more is not agreed to


@dataclass(frozen=True)
class Second:
    """agreed; or refuted, unknown (Z3 gave up), no case (nothing has types on both sides), inexpressible, absent (no Z3); and why."""

    status: str
    cases: int = 0
    why: str = ""
    judge: str = ""

    @property
    def agreed(self) -> bool:
        return self.status == "agreed"

    @property
    def disputes(self) -> bool:
        """Whether the judge looked at the rule and does not accept it."""
        return self.status not in ("agreed", "inexpressible", "absent")

    def as_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v}


def available() -> str:
    """Z3's name and version, or nothing where it is not installed."""
    try:
        import z3
    except ImportError:
        return ""
    return f"z3 {z3.get_version_string()}"


def check_by_z3(schema: Schema, seed: int = 0) -> Second:
    """The rule by Z3, for all real values in every case tried."""
    name, count = available(), 0
    if not name:
        return Second("absent", why="Z3 is not installed")
    for case in itertools.chain.from_iterable(cases(s, seed) for s in _ordinary(schema)):
        try:
            status, why = decide(*pairs(case))
        except Inexpressible as e:
            return Second("inexpressible", count, str(e), name)
        if status != "agreed":
            return Second(status, count, f"{case}{why}", name)
        count += 1
    return Second("agreed" if count else "no case", count, "", name)


def _ordinary(schema: Schema) -> list[Schema]:
    """The rule itself; of one of any number of operands, those of two and three, and that which leads from any number to one more."""
    return [unrolled(schema, 2), unrolled(schema, 3), step(schema)] if schema.lists else [schema]


def pairs(case: Case) -> tuple[Meaning, list[tuple[Any, Any]]]:
    """All that must be equal: the sides on every rank, and the left side against one device."""
    m, out = Meaning(), []
    for left, right in zip(case.left, case.right, strict=True):
        for x, y in zip(_values(m, left), _values(m, right), strict=True):
            out += _same(x, y)
        if left.mesh.axes:
            out += _against_one(m, left)
    return m, out


def _values(m: Meaning, node: Node) -> list[Array]:
    values = m.reduced_values(node) if len(node.types) == 1 else m.local_values(node)
    return [v for x in values for v in (x if isinstance(x, tuple) else (x,))]


def _same(x: Array, y: Array) -> list[tuple[Any, Any]]:
    if x is None or y is None:
        if x is not y:
            raise Inexpressible("a rank holds one side and not the other")
        return []
    return list(zip(x.reshape(-1), y.reshape(-1), strict=True))


def _against_one(m: Meaning, node: Node) -> Iterator[tuple[Any, Any]]:
    if len(node.types) > 1:
        return
    full = m.alone(node)
    for at, x in zip(node.mesh.places(), m.reduced_values(node), strict=True):
        if x is not None:
            where = [node.layout.positions(d, at).tolist() for d in range(node.ndim)]
            yield from _same(x, full[_mesh_of(where)])


def _mesh_of(where: list[list[int]]) -> Any:
    import numpy as np

    return np.ix_(*where) if where else ...


def decide(m: Meaning, equal: list[tuple[Any, Any]]) -> tuple[str, str]:
    z3 = m.z3
    left = [(x, y) for x, y in equal if not x.eq(y) and not _is_zero(z3, x - y)]
    if not left:
        return "agreed", ""
    known: dict[Any, Any] = {}
    plain = [tuple(_linear(z3, z3.simplify(t, som=True), known) for t in pair) for pair in left]
    if _ask(z3, plain)[0] == z3.unsat:
        return "agreed", ""  # whatever the products are
    found, solver = _ask(z3, left)
    if found == z3.unsat:
        return "agreed", ""
    if found == z3.unknown:
        return "unknown", f"; {solver.reason_unknown()}"
    return "refuted", f"; {_shown(solver.model())}"


def _ask(z3: Any, equal: list[Any]) -> tuple[Any, Any]:
    solver = z3.Solver()
    solver.set("rlimit", LIMIT)
    solver.add(z3.Or([x != y for x, y in equal]))
    return solver.check(), solver


def _linear(z3: Any, term: Any, known: dict[Any, Any]) -> Any:
    """The term with every product of unknowns as an unknown of its own: what holds of it holds of these."""
    if term.get_id() in known:
        return known[term.get_id()][1]
    factors = [c for c in term.children() if not z3.is_rational_value(c)]
    if z3.is_mul(term) and len(factors) > 1:
        number = functools.reduce(lambda a, b: a * b, (c for c in term.children() if z3.is_rational_value(c)), z3.RealVal(1))
        made = number * z3.Real("*".join(sorted(map(str, factors))))
    else:
        made = term.decl()(*(_linear(z3, c, known) for c in term.children())) if term.children() else term
    known[term.get_id()] = (term, made)  # the term is kept, so that its number stays its own
    return made


def _is_zero(z3: Any, term: Any) -> bool:
    """Whether Z3 multiplies the difference out to nothing."""
    return bool(z3.simplify(term, som=True).eq(z3.RealVal(0)))


def _shown(model: Any, most: int = 12) -> str:
    return ", ".join(f"{d.name()} = {model[d]}" for d in list(model.decls())[:most])
