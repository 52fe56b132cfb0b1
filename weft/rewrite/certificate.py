"""Certificates: what was proved of a rule, kept as data next to it and bound to its text and to the op entries it rests on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from weft.core.errors import RuleError
from weft.core.node import OPS
from weft.ops.registry import arg_sets
from weft.rewrite.rulefile import parse_rule, show
from weft.rewrite.schema import OpHole, Schema

VERSION = 2
FILES = ("builtin.json", "discovered.json")


@dataclass(frozen=True)
class Certificate:
    """A rule, the rung it reached and how; `needs` shows for each condition what fails without it, `second` what the second judge says."""

    schema: Schema
    rung: int
    derivation: Mapping[str, Any] | None = None
    tried: int = 0
    needs: Mapping[str, str] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=dict)
    seal: str = ""

    def sealed(self) -> Certificate:
        return replace(self, seal=self.content())

    def content(self) -> str:
        """A hash of all that is claimed and of the op entries it rests on."""
        ops = sorted({c.op.name for c in self.schema.calls if not isinstance(c.op, OpHole)})
        claim = [show(self.schema), self.rung, self.derivation, dict(self.second), [[n, entry_digest(n)] for n in ops]]
        return hashlib.sha256(json.dumps(claim, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def is_complete(self) -> bool:
        return self.seal == self.content()

    @property
    def may_be_used(self) -> bool:
        """Whether both judges accept the rule, or one does and the other has no words for it."""
        return self.rung >= 2 and self.second.get("status") in ("agreed", "inexpressible")

    def as_json(self) -> dict[str, Any]:
        return {
            "rule": show(self.schema), "family": self.schema.family, "rung": self.rung, "derivation": self.derivation,
            "tried": self.tried, "needs": dict(self.needs), "second": dict(self.second), "seal": self.seal,
        }  # fmt: skip

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> Certificate:
        schema = parse_rule(data["rule"], data["family"])
        return Certificate(schema, data["rung"], data["derivation"], data["tried"], data["needs"], data["second"], data["seal"])


def entry_digest(name: str) -> str:
    """What a proof takes from an op's entry: its kind, in what it is linear or keeps order, and which facets it has."""
    op = OPS[name]
    linear = sorted(sorted(s) for s in arg_sets(op.linear, 3))
    order = (
        sorted((k, sorted(sorted(s) for s in v)) for k, v in op.monotone.items())
        if isinstance(op.monotone, Mapping)
        else sorted(sorted(s) for s in op.monotone)
    )
    facets = [op.kind.name, linear, order, op.equation is not None, op.field is not None, op.local is not None, op.vjp is not None]
    return hashlib.sha256(json.dumps(facets).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Pair:
    """An equal pair as found: two expressions and the types of their inputs on a mesh."""

    left: str
    right: str
    types: Mapping[str, str]
    mesh: Mapping[str, int]


def write(certificates: Iterable[Certificate], pairs: Iterable[Pair] = (), **facts: Any) -> str:
    """A file of certificates, one per line so that changes show."""
    rules = ",\n".join(json.dumps(c.as_json()) for c in certificates)
    rows = ",\n".join(json.dumps([p.left, p.right, dict(p.types), dict(p.mesh)]) for p in pairs)
    head = json.dumps({"version": VERSION, **facts})[:-1]
    return f'{head}, "rules": [\n{rules}\n], "pairs": [\n{rows}\n]}}\n'


def read(text: str, name: str = "the file") -> tuple[list[Certificate], list[Pair]]:
    data = json.loads(text)
    if data.get("version") != VERSION:
        raise RuleError(
            f"{name} has certificates of another version",
            needed=f"version {VERSION}",
            found=str(data.get("version")),
            try_="weft verify --full --write",
        )
    return [Certificate.of_json(r) for r in data["rules"]], [Pair(*row) for row in data["pairs"]]


@lru_cache(maxsize=4)
def shipped(name: str) -> tuple[tuple[Certificate, ...], tuple[Pair, ...]]:
    """A file that comes with weft."""
    found = resources.files("weft.rewrite").joinpath("rules", name)
    if not found.is_file():
        return (), ()
    rules, pairs = read(found.read_text(), name)
    return tuple(rules), tuple(pairs)


def proved_rules() -> tuple[Schema, ...]:
    """Every rule of rung 2 or 3 that no judge disputes: what searches may use."""
    return tuple(c.schema for name in FILES for c in shipped(name)[0] if c.may_be_used)
