"""All rules at once: certificates read and re-checked, refutation tried again on fresh numbers, or everything proved from nothing."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from weft.core.layout import Mesh
from weft.core.text import read_type
from weft.ops.source import input_node
from weft.rewrite import algebra, parallel, updates
from weft.rewrite.certificate import Certificate, Pair, shipped
from weft.rewrite.degrees import Sharded, check_foreign
from weft.rewrite.prove import ranks
from weft.rewrite.prove.domains import Field
from weft.rewrite.prove.forms import usual_forms
from weft.rewrite.prove.ladder import Effort, Verdict, needless, prove, refute, without
from weft.rewrite.rulefile import parse_rule, show
from weft.rewrite.schema import Schema, make_node
from weft.rewrite.second.z3_check import Second, available, check_by_z3
from weft.rewrite.taso import Foreign

BRIEF = Effort(per_mesh=3, symbolic=0)
FULL = Effort(per_mesh=10, symbolic=8, inner=True, every=True)
Tell = Callable[[str], None]
NOT_ASKED = Second("absent")
Job = TypeVar("Job")
Found = TypeVar("Found")


@dataclass
class Audit:
    """Counts, and what was found of every rule."""

    verdicts: list[tuple[str, str, str]] = field(default_factory=list)  # name, status, counterexample
    pairs: int = 0
    general: int = 0
    bounded: int = 0
    refuted: int = 0
    second: int = 0  # rules the second judge agrees to
    disputed: int = 0  # rules only one judge accepts
    judge: str = field(default_factory=lambda: available())
    others: dict[str, int] = field(default_factory=dict)  # counts of rules of other systems
    seconds: float = 0.0
    seed: int = 0

    @property
    def rules(self) -> int:
        return len(self.verdicts)

    def add(self, name: str, found: Verdicts) -> None:
        self.verdicts.append((name, found.summary, found.example))
        self.general += found.rung == 3
        self.bounded += found.rung == 2
        self.refuted += found.status.startswith("refuted")
        self.second += found.second.agreed
        self.disputed += bool(found.rung) and found.second.disputes


@dataclass(frozen=True)
class Verdicts:
    """What both judges say of a rule."""

    text: str
    rung: int
    status: str
    counterexample: str = ""
    second: Second = NOT_ASKED

    @property
    def summary(self) -> str:
        return f"{self.status}; {self.second.judge}: {self.second.status}" if self.second.judge else self.status

    @property
    def example(self) -> str:
        return self.counterexample or (f"  {self.second.judge}: {self.second.why}" if self.second.disputes and self.rung else "")


def builtin_rules() -> tuple[Schema, ...]:
    return (*parallel.rules(), *algebra.rules(), *updates.rules())


def verify(*, full: bool = False, seed: int | None = None, workers: int = 2, tell: Tell = lambda _: None) -> Audit:
    """Built-in and shipped discovered rules: by certificate and fresh refutation, or (`full`) from nothing."""
    start = time.perf_counter()
    audit = Audit(seed=random.SystemRandom().randrange(2**31) if seed is None else seed)
    known = {show(c.schema): c for name in ("builtin.json", "discovered.json") for c in shipped(name)[0]}
    rules = {show(s): s for s in (*builtin_rules(), *(c.schema for c in known.values()))}
    jobs = [(text, known[text].rung if text in known and known[text].is_complete and not full else 0, audit.seed, full) for text in rules]
    for found in _spread(_check_rule, jobs, workers):
        audit.add(rules[found.text].name, found)
        tell(f"{rules[found.text].name}: {found.summary}")
    pairs = shipped("discovered.json")[1]
    wrong = sum(_spread(_wrong_pairs, [(chunk, audit.seed) for chunk in _chunks(pairs, 2 * workers)], workers))
    audit.pairs, audit.refuted = len(pairs) - wrong, audit.refuted + wrong
    audit.seconds = time.perf_counter() - start
    return audit


def _spread(work: Callable[[Job], Found], jobs: Sequence[Job], workers: int) -> Iterable[Found]:
    """The jobs over processes; results in order."""
    if workers <= 1 or len(jobs) < 4:
        return map(work, jobs)
    torch.set_num_threads(1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(work, jobs, chunksize=max(1, min(4, len(jobs) // (4 * workers)))))


def _check_rule(job: tuple[str, int, int, bool]) -> Verdicts:
    """A rule by text: refuted again if it has a certificate, else proved; then by the second judge."""
    text, rung, seed, full = job
    schema = parse_rule(text)
    if rung:
        done, wrong = refute(schema, Effort(BRIEF.per_mesh, 0, seed), usual_forms())
        if wrong:
            return Verdicts(text, 0, "refuted", wrong)
        status = ("proved" if rung == 3 else "proved up to size") + f", {len(done)} fresh instances"
        return Verdicts(text, rung, status, second=check_by_z3(schema, seed))
    found = prove(schema, Effort(FULL.per_mesh if full else 8, FULL.symbolic, seed, full, full))
    return Verdicts(text, found.rung, found.status, found.counterexample, check_by_z3(schema, seed) if found.rung else NOT_ASKED)


def audit_schemas(given: Sequence[Schema], workers: int = 2, seed: int = 0) -> Audit:
    """Rules someone else wrote, each proved from nothing."""
    start = time.perf_counter()
    audit = Audit(seed=seed)
    texts = {show(s): None for s in given}
    checked = {found.text: found for found in _spread(_check_rule, [(t, 0, seed, False) for t in texts], workers)}
    for schema in given:
        audit.add(schema.name, checked[show(schema)])
    audit.seconds = time.perf_counter() - start
    return audit


def audit_foreign(given: Sequence[Foreign], workers: int = 2, seed: int = 0) -> Audit:
    """Rules of TASO and FlexFlow: in their own meaning on one device and under shardings, and for all sizes where weft can say the same."""
    start = time.perf_counter()
    audit = Audit(seed=seed, others=dict.fromkeys(("refused", "unsound_sharded", "other_sharding"), 0))
    for foreign, (found, sharded) in zip(given, _spread(_check_foreign_rule, [(f, seed) for f in given], workers), strict=True):
        audit.add(foreign.name, found)
        audit.others["refused"] += found.status.startswith("refused")
        audit.others["unsound_sharded"] += sharded == "unsound"
        audit.others["other_sharding"] += sharded == "other degrees"
    audit.seconds = time.perf_counter() - start
    return audit


def _check_foreign_rule(job: tuple[Foreign, int]) -> tuple[Verdicts, str]:
    foreign, seed = job
    own = check_foreign(foreign.rule, seed) if foreign.rule is not None else Sharded("refused", foreign.why)
    status, rung = (f"refused: {own.why}" if own.alone == "refused" else own.alone), 2 if own.alone == "proved up to size" else 0
    why = "\n".join(f"  {x}" for x in (own.why, own.example) if x)
    if foreign.schema is not None and own.alone != "refuted":
        general = prove(foreign.schema, Effort(BRIEF.per_mesh, 2, seed))
        if general.rung == 3 or own.alone == "refused" and not own.sharded:  # for all sizes; or of ops only weft has a meaning for
            status, rung, why = general.status, general.rung, general.counterexample or why
    sharded = f"; under sharding: {own.sharded}" if own.sharded not in ("", "sound") else ""
    return Verdicts("", rung, status + sharded, why), own.sharded


def _chunks(pairs: Sequence[Pair], n: int) -> list[list[Pair]]:
    return [list(pairs[k::n]) for k in range(n)] if pairs else []


def _wrong_pairs(job: tuple[list[Pair], int]) -> int:
    pairs, seed = job
    return sum(not pair_holds(p, seed + k) for k, p in enumerate(pairs))


def pair_holds(pair: Pair, seed: int) -> bool:
    """The pair on every rank of its mesh, at fresh random numbers."""
    mesh, domain = Mesh(**dict(pair.mesh)), Field(seed)
    bound = {h: input_node(h, read_type(t, mesh)) for h, t in pair.types.items()}
    rule = parse_rule(f"pair: {pair.left} == {pair.right}")
    nodes = [make_node(side[0], bound) for side in (rule.left, rule.right)]
    values = ranks.run(domain, nodes)
    x, y = (ranks.denote(domain, values[n], n.type) for n in nodes)
    return nodes[0].type == nodes[1].type and torch.equal(x, y)


def certify(schema: Schema, effort: Effort = FULL) -> tuple[Certificate, Verdict]:
    """A rule proved from nothing, with the counterexamples that show its conditions are needed."""
    verdict = prove(schema, effort)
    shown = needless(schema, effort, usual_forms()) if verdict.rung else []
    needs = {str(c): text or f"  left and right differ where {check_by_z3(without(schema, k)).why}" for k, (c, text) in enumerate(shown)}
    second = check_by_z3(schema).as_json()
    return Certificate(schema, verdict.rung, verdict.derivation, verdict.tried, needs, second).sealed(), verdict


def certify_all(schemas: Sequence[Schema], workers: int = 2, tell: Tell = lambda _: None) -> list[Certificate]:
    """Certificates for many rules; those that reach no rung are left out."""
    out = []
    for data in _spread(_certified, [(show(s), s.family) for s in schemas], workers):
        certificate = Certificate.of_json(data)
        tell(f"{certificate.schema.name}: rung {certificate.rung}")
        out.append(certificate)
    return out


def _certified(job: tuple[str, str]) -> dict[str, Any]:
    return certify(parse_rule(*job))[0].as_json()
