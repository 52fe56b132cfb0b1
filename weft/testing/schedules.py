"""Random schedules: verb calls at places that look legal, as data that prints as the code which repeats it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import weft.schedule as verbs
from weft.core.layout import Replicated
from weft.core.node import Node
from weft.core.program import Program
from weft.core.text import node_names
from weft.ops.comm import all_gather, all_reduce
from weft.ops.registry import Kind

FUSED = ("all_reduce", "reduce_scatter", "all_gather")
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Step:
    """One call of a verb; places are printed names, so the call can be repeated on the parsed text."""

    verb: str
    places: tuple[str, ...] = ()
    options: Options = ()

    def apply(self, p: Program) -> Program:
        return getattr(verbs, self.verb)(p, *self.places, **dict(self.options))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        parts = ["p", *map(repr, self.places), *(f"{k}={v!r}" for k, v in self.options)]
        return f"p = {self.verb}({', '.join(parts)})"


class Scene:
    """A program about to be scheduled, and what is in it."""

    def __init__(self, p: Program, rng: random.Random) -> None:
        self.p, self.rng = p, rng
        self.names = node_names(p)

    def all(self, *ops: str) -> list[Node]:
        return [n for n in self.p.nodes if n.op.name in ops and len(n.args) == 1]

    def one(self, *ops: str) -> Node | None:
        found = self.all(*ops)
        return self.rng.choice(found) if found else None

    def readers(self, n: Node) -> list[Node]:
        return [u for u in self.p.users[n] if u in self.names]

    def dim(self, n: Node) -> int:
        return self.rng.randrange(max(1, len(n.types[0].shape)))

    def step(self, verb: str, *nodes: Node, **options: Any) -> Step:
        return Step(verb, tuple(self.names[n] for n in nodes), tuple(options.items()))


Proposal = Callable[[Scene], "Step | None"]


def _split(s: Scene) -> Step | None:
    n = s.one("all_reduce")
    if n is None:
        return None
    if s.rng.random() < 0.2:
        return s.step("split", n, root=s.rng.randrange(s.p.mesh.sizes[n.attr("axis")]))
    return s.step("split", n, dim=s.dim(n))


def _sink(s: Scene) -> Step | None:
    n = s.one("all_gather", "slice")
    if n is None:
        return None
    options: dict[str, Any] = {"summing": True} if s.rng.random() < 0.3 else {}
    readers = s.readers(n)
    if readers and s.rng.random() < 0.5:
        options["past"] = [s.names[r] for r in s.rng.sample(readers, s.rng.randint(1, len(readers)))]
    return s.step("sink", n, **options)


def _hoist(s: Scene) -> Step | None:
    n = s.one("all_gather", "slice")
    if n is None:
        return None
    above = [a for a in s.p.needs(n.args[0]) if a in s.names and a.op.kind is not Kind.SOURCE]
    if above and s.rng.random() < 0.3:
        order = [a for a in s.p.nodes if a in above]
        past = [n.args[0], *s.rng.sample(order, min(len(order), 2))]
        return s.step("hoist", n, past=[s.names[a] for a in dict.fromkeys(past)])
    return s.step("hoist", n)


def _delay(s: Scene) -> Step | None:
    n = s.one("all_reduce", "reduce_scatter")
    if n is None:
        return None
    readers = s.readers(n)
    return s.step("delay", n, past=s.names[s.rng.choice(readers)]) if readers and s.rng.random() < 0.7 else s.step("delay", n)


def _shard_state(s: Scene) -> Step | None:
    ready = [i for o, i in s.p.state if s.p.output_names[o].op is all_gather]
    names = ready or [i for _, i in s.p.state] or list(s.p.input_names)
    chosen = s.rng.sample(names, min(len(names), s.rng.choice((1, 1, 2)))) if names else []
    return Step("shard_state", tuple(chosen), (("gather", True),) if s.rng.random() < 0.4 else ()) if chosen else None


def _drop_dead(s: Scene) -> Step | None:
    out = [s.rng.choice(list(s.p.output_names))] if s.rng.random() < 0.5 else []
    return Step("drop_dead", tuple(out))


def _same_collectives(s: Scene, *ops: str) -> list[Node]:
    """Some collectives with the same attributes, as far as there are."""
    first = s.one(*ops)
    same = [n for n in s.all(*ops) if first is not None and (n.op, n.attrs) == (first.op, first.attrs)]
    return s.rng.sample(same, s.rng.randint(2, min(3, len(same)))) if len(same) > 1 else []


def _merge(s: Scene) -> Step | None:
    nodes = _same_collectives(s, "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send")
    return s.step("merge", *nodes) if nodes else None


def _bucket(s: Scene) -> Step | None:
    nodes = _same_collectives(s, "all_reduce")
    return s.step("bucket", *nodes, **({"max_bytes": 96} if s.rng.random() < 0.2 else {})) if nodes else None


def _by_hierarchy(s: Scene) -> Step | None:
    outer = [n for n in s.all("all_reduce") if n.args[0].op is all_reduce]
    n = s.rng.choice(outer) if outer else None
    return None if n is None else s.step("by_hierarchy", n, inside=s.rng.choice((n.attr("axis"), n.args[0].attr("axis"))), dim=s.dim(n))


def _shard(s: Scene) -> Step | None:
    nodes = [n for n in s.names if len(n.types) == 1 and n.ndim and any(isinstance(n.type.on(a), Replicated) for a in s.p.mesh.axes)]
    if not nodes:
        return None
    n = s.rng.choice(nodes)
    axes = [a for a in s.p.mesh.axes if isinstance(n.type.on(a), Replicated)]
    within = s.rng.choice((None, None, None, 1, 2))
    return s.step("shard", n, axis=s.rng.choice(axes), dim=s.dim(n), **({} if within is None else {"within": within}))


def _redistribute(s: Scene) -> Step | None:
    n = s.one("all_gather")
    return None if n is None or n.ndim < 2 else s.step("redistribute", n, dim=s.dim(n))


def _fuse(s: Scene) -> Step | None:
    """A walk along edges from a node, its members in the order met, so that holes and strangers get in too."""
    start = [n for n in s.names if n.op.kind in (Kind.POINTWISE, Kind.VIEW, Kind.REDUCE) or n.op.name in FUSED]
    if not start:
        return None
    group = {s.rng.choice(start)}
    for _ in range(s.rng.randint(1, 6)):
        neighbours = [x for n in group for x in (*n.args, *s.p.users[n]) if x in s.names and x not in group and not x.op.is_input]
        if not neighbours:
            break
        group.add(s.rng.choice(sorted(neighbours, key=s.p.nodes.index)))
    nodes = [n for n in s.p.nodes if n in group]
    return Step("fuse", (), (("places", [s.names[n] for n in nodes]),)) if len(nodes) > 1 else None


def _overlap(s: Scene) -> Step | None:
    """A collective with what it reads or what reads it."""
    comms = [n for n in s.names if n.op.kind is Kind.COMM and len(n.types) == 1]
    if not comms:
        return None
    n = s.rng.choice(comms)
    pairs = [(a, n) for a in n.args if a in s.names and not a.op.is_input] + [(n, u) for u in s.readers(n)]
    if not pairs:
        return None
    a, b = s.rng.choice(pairs)
    if s.rng.random() < 0.1:  # any stranger
        b = s.rng.choice([x for x in s.names if x is not a])
    more = s.readers(b) if s.rng.random() < 0.3 else []
    stages = [a, b, *([s.rng.choice(more)] if more else [])]
    return s.step("overlap", *stages, dim=s.dim(a), chunks=2)


def _undo(s: Scene) -> Step | None:
    return Step("undo")


PROPOSALS: dict[str, Proposal] = {
    "split": _split, "sink": _sink, "hoist": _hoist, "delay": _delay, "shard_state": _shard_state, "drop_dead": _drop_dead, "merge": _merge,
    "bucket": _bucket, "by_hierarchy": _by_hierarchy, "shard": _shard, "redistribute": _redistribute, "fuse": _fuse, "overlap": _overlap, "undo": _undo,
}  # fmt: skip


def weights(p: Program) -> dict[str, float]:
    """How gladly each verb is tried here."""
    gathers = len(p.find_all("all_gather"))
    sums = p.find_all("all_reduce")
    ready = any(p.output_names[o].op is all_gather for o, _ in p.state)
    twice = any(n.args[0].op is all_reduce for n in sums)
    return {
        "split": 2.0 if sums else 0, "delay": 2.0 if sums else 0.3, "bucket": 2.0 if len(sums) > 1 else 0,
        "by_hierarchy": 6.0 if twice else 0, "sink": 3.0 if gathers else 0.5, "redistribute": 1.5 if gathers else 0, "hoist": 1.5,
        "shard_state": 8.0 if ready else 0.2, "merge": 1.5, "shard": 1.0, "fuse": 1.0, "overlap": 1.0, "drop_dead": 0.5, "undo": 0.2,
    }  # fmt: skip


def propose(p: Program, rng: random.Random, only: Sequence[str] | None = None) -> Step | None:
    """A call to try next."""
    chances = {v: w for v, w in weights(p).items() if only is None or v in only}
    if not any(chances.values()):
        return None
    verb = rng.choices(list(chances), list(chances.values()))[0]
    return PROPOSALS[verb](Scene(p, rng))
