"""Will it fit: the answer, the largest micro-batch that does, and changes that were tried and help.

Of a setting, changes are tried one at a time, then two and three together, and the fewest that help are reported; where none does, more nodes
are. Of a model alone, settings are tried from the simplest on: ZeRO before recompute before expert and tensor parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.cluster.spec import Cluster
from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import ClusterError, PlanError, WeftError
from weft.plan.blocks import Stack
from weft.plan.memory import Memory
from weft.plan.setting import Setting
from weft.plan.simulate import SimulatedStep, held, memory_of, simulate
from weft.plan.sizes import STATE, Model
from weft.plan.space import divisors
from weft.plan.spec import RECOMPUTE

TOGETHER = 3  # changes at once
FLAGS = ("tp", "pp", "cp", "dp", "zero", "recompute", "micro_batch", "sequence_parallel")
MORE = (2, 4, 8, 16, 32, 64)  # times the nodes


@dataclass(frozen=True)
class FittingChange:
    """What makes a setting fit, as options of the command, and the step it then takes. `cluster` is another where nodes were added."""

    says: str
    setting: Setting
    step: SimulatedStep
    cluster: Cluster


@dataclass(frozen=True)
class Fit:
    fits: bool
    needed: float  # bytes of the fullest device
    memory: float  # bytes it has
    largest: int  # micro-batch that fits with everything else kept; 0 if none does
    changes: tuple[FittingChange, ...]


def fit(shape: Stack, setting: Setting, cluster: Cluster, step: SimulatedStep | None = None) -> Fit:
    """Whether a setting fits the smallest memory of the cluster."""
    needed = step.peak_memory.total if step is not None else held(shape.work(setting), setting, cluster)
    memory = cluster.memory
    ok = needed <= memory
    changes = () if ok else tuple(sorted(_helpful(shape, setting, cluster, memory), key=lambda c: c.step.seconds))
    return Fit(ok, needed, memory, _largest(shape, setting, cluster, memory), changes)


def _fits(shape: Stack | Model, setting: Setting, cluster: Cluster, memory: float) -> bool:
    try:
        return held(shape.work(setting), setting, cluster) <= memory
    except WeftError:
        return False


def _largest(shape: Stack | Model, setting: Setting, cluster: Cluster, memory: float) -> int:
    """By doubling, then halving the span in between; the number of micro-batches stays."""

    def fits(size: int) -> bool:
        batch = size * setting.replicas * setting.micro_batches
        return _fits(shape, replace(setting, global_batch=batch), cluster, memory)

    if not fits(1):
        return 0
    low = 1
    while low < 2**14 and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- what to change


def _helpful(shape: Stack, setting: Setting, cluster: Cluster, memory: float) -> Iterator[FittingChange]:
    """The fewest changes that help; more nodes, begun with the most that can be saved, where none does."""
    found, where = _nearest(shape, setting, cluster, memory), cluster
    for times in MORE:
        if found:
            break
        where = cluster.with_nodes(*(g.count * times for g in cluster.groups))
        found = _nearest(shape, _leanest(setting, times), where, memory)
    words = [] if where is cluster else [f"--cluster {where.text}"]
    for s in found:
        yield FittingChange(" ".join([*words, options_text(setting, s)]), s, simulate(shape.work(s), s, where), where)


def _nearest(shape: Stack, setting: Setting, cluster: Cluster, memory: float) -> list[Setting]:
    """Settings that fit, as few changes away as any."""
    tried: set[Setting] = set()
    latest = [setting]
    for _ in range(TOGETHER + 1):
        if found := [s for s in latest if _fits(shape, s, cluster, memory)]:
            return found
        tried |= set(latest)
        latest = [s for s in dict.fromkeys(n for s in latest for n in _changes(s)) if s not in tried]
    return []


def _leanest(s: Setting, times: int) -> Setting:
    """On so many times the devices, with the least memory that needs no other degrees."""
    copies = s.replicas * times
    rounds = -(-s.global_batch // copies)
    return replace(s, global_batch=rounds * copies, dp=s.dp * times, micro=rounds, zero=3, sp=s.tp > 1).recomputing("full")


def _changes(s: Setting) -> Iterator[Setting]:
    """One thing at a time."""
    again = RECOMPUTE[RECOMPUTE.index(s.again) + 1 :] if s.again in RECOMPUTE else ()
    yield from (s.recomputing(name) for name in again)
    yield from (replace(s, zero=zero) for zero in range(s.zero + 1, 4) if s.size("data") > 1)
    yield from (s.of_samples(n) for n in (s.micro_batch // 2, 1) if 1 <= n < s.micro_batch and s.global_batch % (s.replicas * n) == 0)
    if s.tp > 1 and not s.sp:
        yield replace(s, sp=True)
    for axis in ("tp", "pp", "cp"):
        if s.dp % 2 == 0:
            yield replace(s, dp=s.dp // 2, micro=2 * s.micro_batches, **{axis: 2 * s.size(axis)})  # type: ignore[arg-type]


def options_text(a: Setting, b: Setting) -> str:
    """As options of the command, what turns a setting into another."""
    words = []
    for name in FLAGS:
        if (value := b.named(name)) != a.named(name):
            flag = "--" + name.replace("_", "-")
            words.append(flag if value is True else f"{flag} {value}")
    return " ".join([*words, *([f"--batch {b.global_batch}"] if b.global_batch != a.global_batch else [])])


# --- of a model alone


@dataclass(frozen=True)
class Answer:
    """The simplest setting that fits, or the leanest where none does; its bytes, the largest batch, and changes that would do."""

    fits: bool
    setting: Setting
    memory: Memory
    has: float
    largest: int
    changes: tuple[str, ...] = ()
    model: Model | None = None
    place: str = ""


def fits(model: str, gpu: str, *, gpus: int = 1, lora: int = 0, seq: int = 0, batch: int = 0, optimizer: str = "adamw") -> Answer:
    """Predict whether training a model fits in memory, and what to change where it does not.

    Args:
        model: A Hugging Face config.json, a folder that has one, or a known name such as "llama3-8b".
        gpu: Device kind, such as "H100".
        gpus: Number of devices.
        lora: Rank of LoRA adapters; all else is frozen then.
        seq: Sequence length. Default: the longest the model takes.
        batch: Global batch in samples. Default: one per device.
        optimizer: "adamw", "muon", "sgd", "momentum", "lion", "adafactor" or "adamw8bit".

    Returns:
        The answer: `.fits`, `.memory`, `.setting` (the plan that fits), `.largest` (batch), `.changes` (what would make it fit).
    """
    from weft.cluster.profile import load
    from weft.plan.planner import best_dtype
    from weft.plan.sizes import Trained, model_of

    for name, value, least in (("gpus", gpus, 1), ("lora", lora, 0), ("seq", seq, 0), ("batch", batch, 0)):
        if value < least:
            raise PlanError(f"{name} is {value}", needed=f"{least} or more", found=str(value))
    if optimizer.lower() not in STATE:
        raise PlanError(f"no optimizer named {optimizer!r}", needed=" or ".join(STATE), found=optimizer)
    kind = load(gpu)  # refused with the known ones
    place = read_cluster(f"{gpus}x{kind.name}")
    asked = replace(model_of(model, seq), how=Trained(STATE[optimizer.lower()], lora))
    return replace(will_fit(asked, place, batch or gpus, best_dtype(place), _larger(kind.device.memory)), model=asked, place=place.text)


def _larger(memory: float) -> list[str]:
    """Kinds of devices with more memory, the least first."""
    from weft.cluster.profile import load, names

    found = {name: load(name).device.memory for name in names()}
    return sorted((n for n, has in found.items() if has > memory * 1.05 and "-" not in n), key=lambda n: found[n])


def will_fit(model: Model, cluster: Cluster, batch: int, dtype: str, others: Sequence[str] = ()) -> Answer:
    """Whether some way of training fits. `others` are kinds of devices that may be named as a change."""
    found = _simplest(model, cluster, batch, dtype)
    if found.fits:
        return found
    return replace(found, changes=tuple(_single_changes(model, cluster, batch, dtype, others)))


def _simplest(model: Model, cluster: Cluster, batch: int, dtype: str) -> Answer:
    has = cluster.memory
    least: Answer | None = None
    for s in _ways(model, cluster, batch, dtype):
        memory = memory_of(model.work(s), s, cluster)
        if memory.total <= has:
            size = _largest(model, s, cluster, has)
            s = s.of_samples(max(n for n in divisors(s.global_batch // s.replicas) if n <= size))
            return Answer(True, s, memory_of(model.work(s), s, cluster), has, size * s.replicas)
        if least is None or memory.total < least.memory.total:
            least = Answer(False, s, memory, has, 0)
    assert least is not None
    return least


def _ways(model: Model, cluster: Cluster, batch: int, dtype: str) -> Iterator[Setting]:
    n = cluster.devices
    for tp in (t for t in divisors(cluster.node_size) if n % t == 0 and model.may_shard(t)):
        copies = n // tp
        rounds = -(-batch // copies)
        among = {math.gcd(model.experts, copies, n) for n in (1, cluster.node_size, copies)} if model.experts else {1}
        for ep, again in itertools.product(sorted(among), model.recompute):
            base = Setting(copies // ep, 1, ep, tp, sp=tp > 1, micro=rounds, global_batch=rounds * copies, dtype=dtype)
            yield from (replace(base, zero=zero, recompute=again) for zero in (range(4) if copies > 1 else (0,)))


def _single_changes(model: Model, cluster: Cluster, batch: int, dtype: str, others: Sequence[str]) -> Iterator[str]:
    """One change each: adapters, a leaner optimizer, shorter sequences, more devices, larger ones."""

    def fits(changed: Model, where: Cluster = cluster) -> bool:
        return _simplest(changed, where, batch, dtype).fits

    if not model.how.lora and fits(replace(model, how=replace(model.how, lora=16))):
        yield "--lora 16"
    leaner = [name for name in ("muon", "adamw8bit", "sgd") if STATE[name] < model.how.state]
    yield from (f"--optimizer {name}" for name in leaner if fits(replace(model, how=replace(model.how, state=STATE[name]))))
    length = model.seq if isinstance(model.seq, int) else 0
    shorter = [length // n for n in (2, 4, 8, 16) if length // n >= 128]
    if shorter and fits(model.with_seq(shorter[-1])):
        yield from (f"--seq {n}" for n in shorter if n == shorter[-1] or fits(model.with_seq(n)))
    own = cluster.groups[0].profile.name
    for more in filter(None, (_of(cluster.devices * times, own) for times in MORE)):
        if fits(model, more):
            yield f"--gpus {more.devices}"
            break
    for kind in others:
        if (larger := _of(cluster.devices, kind)) and fits(model, larger):
            yield f"--gpu {kind}"
            break


def _of(devices: int, kind: str) -> Cluster | None:
    """So many devices, in nodes filled first; None where they do not fill theirs."""
    try:
        return read_cluster(f"{devices}x{kind}")
    except ClusterError:
        return None
