"""The ladder a rule climbs: refuted over finite fields (1), proved for all values at small sizes (2), proved for all sizes (3)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.errors import WeftError
from weft.rewrite.generic import unrolled
from weft.rewrite.prove import twofields
from weft.rewrite.prove.compare import Difference, differ, differ_in_numbers
from weft.rewrite.prove.domains import Field, Symbolic, Unsuitable
from weft.rewrite.prove.example import explain, explain_types
from weft.rewrite.prove.forms import mixed, usual_forms
from weft.rewrite.prove.general import Derivation, derive
from weft.rewrite.prove.instances import Instance, sample
from weft.rewrite.schema import Form, Schema


@dataclass(frozen=True)
class Effort:
    """How many instances are tried per mesh, and how many of them also as polynomials."""

    per_mesh: int = 8
    symbolic: int = 6
    seed: int = 0
    inner: bool = False
    every: bool = False  # all layouts of one filling on each mesh, not some


@dataclass(frozen=True)
class Verdict:
    """What is known of a rule. Rung 0 is refuted or ill-typed."""

    schema: Schema
    status: str  # proved, proved up to size, refuted, ill-typed
    rung: int
    tried: int = 0
    counterexample: str = ""
    derivation: Derivation | None = None
    meshes: tuple[str, ...] = field(default=())

    @property
    def line(self) -> str:
        return f"{self.schema.name}: {self.status}" + (f"\n{self.counterexample}" if self.counterexample else "")


def refute(schema: Schema, effort: Effort, forms: Sequence[Form]) -> tuple[list[Instance], str]:
    """Instances tried without finding fault, or the first fault found as text; of a rule of any number of operands, with two and three."""
    if schema.lists:
        two, fault = refute(unrolled(schema, 2), effort, forms)
        three, fault = ([], fault) if fault else refute(unrolled(schema, 3), effort, forms)
        return [*two, *three], fault
    rng = random.Random(effort.seed)
    done: list[Instance] = []
    for k, instance in enumerate(sample(schema, forms, rng, effort.per_mesh, inner=effort.inner, every=effort.every)):
        wrong = _fault(instance, effort.seed + k)
        if wrong is not None:
            return done, explain(schema, instance, wrong, effort.seed + k)
        done.append(instance)
    return done, ""


def _fault(instance: Instance, seed: int) -> Difference | None:
    """A difference mod a prime; where only an unknown function's table differs, integers decide."""
    try:
        wrong = differ(instance, Field(seed + 1))
    except Unsuitable:
        wrong = Difference("value", "out0", (), None, None)
    if wrong is None:
        return None
    if _exact(instance):
        return wrong
    left, right = instance.program("left"), instance.program("right")
    if twofields.speaks_of(left) and twofields.equal(left, right, seed):
        return None
    return wrong if differ_in_numbers(instance, seed) is not None else None


def _exact(instance: Instance) -> bool:
    """Whether every op is a polynomial or moves elements, so that the field's word is final."""
    nodes = [n for s in ("left", "right") for n in instance.program(s).nodes]
    return all(n.op.field is not None or n.op.is_input or n.op.is_item for n in nodes)


def bounded(instances: Sequence[Instance], most: int) -> bool:
    """Whether the two sides are the same polynomials, with gradients, in the instances that are small enough."""
    small = sorted(instances, key=_work)[:most]
    for instance in small:
        try:
            if differ(instance, Symbolic()) is not None:
                return False
        except Unsuitable:
            return False
    return bool(small)


def _work(instance: Instance) -> int:
    return instance.mesh.ranks * sum(math.prod(n.shape) for n in instance.inputs)


def prove(schema: Schema, effort: Effort | None = None, forms: Sequence[Form] | None = None) -> Verdict:
    """The highest rung a rule reaches, or why it reaches none."""
    effort, forms = effort or Effort(), usual_forms() if forms is None else forms
    done, wrong = refute(schema, effort, forms)
    if wrong:
        return Verdict(schema, "refuted", 0, len(done), wrong)
    if not done:
        return Verdict(schema, "ill-typed", 0, 0, explain_types(unrolled(schema, 2), forms))
    meshes = tuple(sorted({str(i.mesh) for i in done}))
    verdict = Verdict(schema, "not refuted", 1, len(done), meshes=meshes)
    if not bounded(_spread(done, effort.symbolic), effort.symbolic):
        return verdict
    known = ", for the ops tried" if schema.op_holes else ""
    verdict = replace(verdict, status=f"proved up to size{known}", rung=2)
    derivation = _derived(schema)
    return verdict if derivation is None else replace(verdict, status="proved", rung=3, derivation=derivation)


def _spread(instances: list[Instance], most: int) -> list[Instance]:
    """Some from every part of the list."""
    step = max(1, len(instances) // max(1, most * 2))
    return instances[::step]


def _derived(schema: Schema) -> Derivation | None:
    try:
        return derive(schema)
    except WeftError:
        return None


def without(schema: Schema, k: int) -> Schema:
    """The rule with one condition dropped."""
    kept = tuple(c for i, c in enumerate(schema.conditions) if i != k)
    return replace(schema, conditions=kept)


def needless(schema: Schema, effort: Effort, forms: Sequence[Form]) -> list[tuple[Any, str]]:
    """Every condition, with the counterexample that shows it is needed; empty text where none was found."""
    return [(c, _shown_needed(without(schema, k), effort, forms)) for k, c in enumerate(schema.conditions)]


def _shown_needed(weaker: Schema, effort: Effort, forms: Sequence[Form]) -> str:
    """A counterexample by a usual op, or by one made up that has the same shapes."""
    found = refute(weaker, effort, forms)[1]
    return found or refute(weaker, effort, [mixed(f) for f in forms if f.op.equation is not None and not f.fixed])[1]
