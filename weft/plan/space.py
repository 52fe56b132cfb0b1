"""The settings a search may choose from: degrees that divide the devices, and for each what is sharded, kept and overlapped.

A space is a set of allowed values per decision. A named system is a smaller space (`plan.baselines`); a user's limits make any
space smaller. What cannot divide is never built, so every candidate can be simulated.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from weft.cluster.spec import Cluster
from weft.core.errors import PlanError
from weft.plan.schedules import PLAIN, SCHEDULES
from weft.plan.setting import NAMED, Setting
from weft.plan.spec import MIXED, RECOMPUTE
from weft.plan.stage_partitioner import Measure

if TYPE_CHECKING:
    from weft.plan.blocks import Stack

AXES = ("dp", "tp", "pp", "cp", "ep")
CHUNKS = (2, 3, 4, 6, 8)  # of layers per stage, where a schedule takes several
MOST = 64  # samples of a micro-batch
LARGEST = {"tp": 64, "cp": 64, "pp": 32}
NODE = 8  # devices that share a matmul even where nodes have fewer
LATER = ("zero", "keep_gathered")  # the ZeRO stage, which is chosen for each candidate by itself
CUT_TO_MEASURE = Measure()


@dataclass(frozen=True)
class Space:
    """Allowed values. `axes` may be larger than one; `inside_node` are axes that must not leave the fastest links."""

    axes: tuple[str, ...] = AXES
    inside_node: tuple[str, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    gather_once: tuple[bool, ...] = (False, True)
    sp: tuple[bool, ...] = (False, True)
    recompute: tuple[str, ...] = (MIXED, *RECOMPUTE)
    measure: Measure = CUT_TO_MEASURE  # what may be mixed, and whether stages may differ
    schedules: tuple[str, ...] = tuple(s.name for s in SCHEDULES.values() if s.searched)
    async_tp: tuple[bool, ...] = (False, True)
    ragged_ep: tuple[bool, ...] = (False, True)
    overlap_grads: bool = True
    overlap_params: bool = True
    overlap_sends: bool = True


PINNED = (
    "dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "recompute", "schedule", "virtual", "sequence_parallel", "overlap_tp", "keep_gathered",
    "ragged_ep", "copies", "micro_batches",
)  # fmt: skip


RUN = {"overlap_tp": "false", "keep_gathered": "false"}  # what parallelize does not do, or does in chunks that nobody has timed on GPUs


@dataclass(frozen=True)
class Limits:
    """What a user fixes: the largest tp, bytes of a device that may be used, and decisions that are already made."""

    max_tp: int = 0
    memory: float = 0.0
    pins: Mapping[str, str] = field(default_factory=dict)

    def allows(self, s: Setting, besides: tuple[str, ...] = ()) -> bool:
        if self.max_tp and s.tp > self.max_tp:
            return False
        return all(_decision_text(s.named(key)) == value for key, value in self.pins.items() if key not in besides)

    def runnable(self) -> Limits:
        """The same without what parallelize does not do."""
        return replace(self, pins={**RUN, **self.pins})

    def room(self, cluster: Cluster) -> float:
        """Bytes a device may use."""
        return min(cluster.memory, self.memory or math.inf)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Limits:
        return Limits(int(data["max_tp"]), float(data["memory_gb"]) * 1e9, dict(data["pins"]))

    def data(self) -> dict[str, Any]:
        return {"max_tp": self.max_tp, "memory_gb": self.memory / 1e9, "pins": dict(self.pins)}


def bytes_of(text: str | float) -> float:
    """70GB, 64e9, 80GiB."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\+?\d+)?)\s*(GB|GiB|G|MB|MiB|B|)\s*", str(text), re.IGNORECASE)
    if found is None:
        raise PlanError(f"cannot read the memory {text!r}", needed="a number with GB or GiB", found=str(text), try_="70GB")
    if isinstance(text, str) and not found.group(2) and re.fullmatch(r"[\d.]+", found.group(1)) and len(found.group(1)) < 7:
        raise PlanError(f"cannot read the memory {text!r}", needed="a number with GB or GiB", found=f"{text} without a unit", try_=f"{text.strip()}GB")
    units = {"gb": 1e9, "g": 1e9, "gib": 2.0**30, "mb": 1e6, "mib": 2.0**20, "b": 1.0, "": 1.0}
    try:
        size = float(found.group(1)) * units[found.group(2).lower()]
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise PlanError(f"cannot use the memory {text!r}", needed="more than 0 bytes", found=str(text), try_="70GB")
    return size


def _decision_text(value: object) -> str:
    return str(value).lower()


def parse_pins(texts: tuple[str, ...] | list[str]) -> dict[str, str]:
    """`tp=4` and the like. Layouts of single tensors are no decision of this level."""
    pins = {}
    for text in texts:
        key, _, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if key not in PINNED or not value:
            kinds = "layouts of single tensors are not chosen here, so they cannot be pinned" if ":" in value else text
            raise PlanError(f"cannot pin {text!r}", needed=f"NAME=VALUE with a name of {', '.join(PINNED)}", found=kinds, try_="--pin tp=4")
        pins[key] = _decision_text(value.strip())
        _check_value(key, pins[key])
    return pins


def _check_value(key: str, value: str) -> None:
    kind = {f.name: f.type for f in fields(Setting)}.get(NAMED.get(key, key), "int")
    known = {"int": value.isdigit(), "bool": value in ("true", "false")}
    if not known.get(str(kind), True):
        raise PlanError(f"cannot pin {key} to {value!r}", needed={"int": "a number", "bool": "true or false"}[str(kind)], found=value)
    if str(kind) == "str" or key == "zero":
        own: Any = int(value) if key == "zero" else value
        (Setting().recomputing(own) if key == "recompute" else replace(Setting(), **{key: own})).check()
    elif str(kind) == "int" and not int(value):
        raise PlanError(f"cannot pin {key} to 0", needed="1 or more", found=value)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class PlanProblem:
    """What is planned: a model at a batch on a cluster, in a dtype."""

    shape: Stack
    cluster: Cluster
    batch: int
    dtype: str
    kernels: str = "compiled"
    imbalance: float = 1.0

    @property
    def depth(self) -> int:
        return self.shape.depth

    def chunk(self, stages: int) -> int:
        """Layers of each of `stages` chunks where they come out even, or would if embedding and head were a layer each; else 0. Two chunks more than
        layers are embedding and head alone."""
        if stages > self.depth and stages != self.depth + 2:
            return 0
        return next((n // stages for n in (self.depth, self.depth + 2) if n % stages == 0), 0)


def candidates(problem: PlanProblem, space: Space, limits: Limits) -> Iterator[Setting]:
    """Every setting of the space that divides, in a fixed order; the ZeRO stage is left to `shardings`."""
    for degrees in _degrees(problem, space, "tp" in limits.pins):
        for micro in _micro_batches(problem, degrees["dp"] * degrees["ep"]):
            base = Setting(
                global_batch=problem.batch, micro=micro, **degrees,  # type: ignore[arg-type]
                kernels=problem.kernels, dtype=problem.dtype, imbalance=problem.imbalance,
                overlap_grads=space.overlap_grads, overlap_params=space.overlap_params, overlap_sends=space.overlap_sends,
            )  # fmt: skip
            yield from (s for s in _choices(problem, space, base) if limits.allows(s, LATER))


def _degrees(problem: PlanProblem, space: Space, pinned: bool) -> Iterator[dict[str, int]]:
    """Degrees that divide. Only where a user pins it does tp leave a node of eight or more, or share less than half of a block, as next to experts."""
    n, shape = problem.cluster.devices, problem.shape
    largest = {**LARGEST, "tp": LARGEST["tp"] if pinned else min(LARGEST["tp"], max(NODE, problem.cluster.node_size))}
    for tp, pp, cp in itertools.product(divisors(n), repeat=3):
        rest, over = divmod(n, tp * pp * cp)
        if over or not rest or not _cuts(problem, largest, pinned, tp=tp, pp=pp, cp=cp) or problem.batch % rest:
            continue
        sizes = {"dp": rest, "tp": tp, "pp": pp, "cp": cp}
        for ep in divisors(shape.experts) if shape.experts else [1]:
            if rest % ep == 0 and _inside({**sizes, "ep": ep}, problem.cluster.node_size, space):
                yield {**sizes, "dp": rest // ep, "ep": ep}


def _cuts(problem: PlanProblem, largest: Mapping[str, int], pinned: bool, tp: int, pp: int, cp: int) -> bool:
    small = tp <= largest["tp"] and pp <= min(largest["pp"], problem.depth) and cp <= largest["cp"]
    return small and problem.shape.may_shard(tp, cp, pinned)


def _inside(sizes: Mapping[str, int], node: int, space: Space) -> bool:
    if any(sizes[a] > 1 for a in AXES if a not in space.axes):
        return False
    return all(sizes[a] <= node and node % sizes[a] == 0 for a in space.inside_node)


def _micro_batches(problem: PlanProblem, replicas: int) -> list[int]:
    """Numbers of micro-batches of whatever divides the samples of a replica, up to MOST."""
    own = problem.batch // replicas
    return [own // samples for samples in divisors(own) if samples <= MOST]


def _choices(problem: PlanProblem, space: Space, base: Setting) -> Iterator[Setting]:
    sent = space.ragged_ep if base.ep > 1 else (False,)
    for (sp, overlap), ragged in itertools.product(_tensor_strategies(space, base), sent):
        for recompute in space.recompute:
            for schedule, chunks in _schedules(problem, space, base):
                yield replace(base, sp=sp, async_tp=overlap, ragged_ep=ragged, recompute=recompute, schedule=schedule, virtual=chunks)


def shardings(space: Space, limits: Limits, s: Setting) -> Iterator[Setting]:
    """A candidate with each way its copies may share state."""
    for zero in space.zero if s.size("data") > 1 else (min(space.zero),):
        for keep in space.gather_once if zero == 3 and s.micro_batches > 1 else (False,):
            made = replace(s, zero=zero, gather_once=keep)
            if limits.allows(made):
                yield made


def _tensor_strategies(space: Space, base: Setting) -> list[tuple[bool, bool]]:
    if base.tp == 1:
        return [(False, False)]
    best = max(space.async_tp)  # a collective in pieces overlapped with its matmul is never later than one before it
    options = space.sp if base.cp == 1 else space.sp[-1:]  # where tokens are sharded anyway, they are between matmuls too
    return [(sp, sp and best) for sp in options]


def _schedules(problem: PlanProblem, space: Space, base: Setting) -> Iterator[tuple[str, int]]:
    if base.pp == 1:
        yield PLAIN, 0
        return
    for name in space.schedules:
        if not SCHEDULES[name].takes_chunks:
            yield name, 0
        elif SCHEDULES[name].may_take(base.pp, base.micro_batches):
            even = [v for v in CHUNKS if problem.chunk(base.pp * v)]
            yield from ((name, v) for v in even or CHUNKS if base.pp * v <= problem.depth + 2 * bool(even))
