"""From a model's name and a cluster to a plan: the full space and every baseline searched, uneven splits tried, the best taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from weft.cluster.spec import Cluster
from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import PlanError
from weft.core.picture import part_of_root
from weft.cost.interval import equal_within, kind_of, spread
from weft.cost.price import compiles
from weft.plan.baselines import BASELINES, EVERYTHING
from weft.plan.blocks import FEW, Stack
from weft.plan.partition import even_layers
from weft.plan.plan import Plan, rounded_ms
from weft.plan.search import Found, Nothing, Padded, Search, describe, plainness, rank
from weft.plan.setting import Setting, require_count, require_imbalance
from weft.plan.sizes import Shape
from weft.plan.space import Limits, PlanProblem, divisors
from weft.plan.spec import MIXED, Spec
from weft.plan.stages import shared, uneven
from weft.plan.workload import rounded

OBJECTIVES = ("time", "memory", "cost")  # goodput, which chooses the batch too, is `plan.goodput`
HALVES = ("bf16", "fp16")
TOKENS, MANY_TOKENS, LARGE = 2**22, 2**24, 1e11  # tokens of a step where no batch is given; more for models of LARGE parameters
EXACT = 4096  # passes of a step up to which all are simulated, not the first rounds alone
WORTH = 0.02  # of a step that a padded size must save to be named
CROWDED = 0.9  # of the memory, beyond which a plan may not fit after all
PROGRAMS = "api.plan_program"  # which plans what is no stack of blocks
TRIED = 6  # settings whose layers or shares are split unevenly
OVERLAPPED = ", overlapped"
Say = Callable[[str], None]
Adapt = Callable[[Any], None]  # changes a module


@dataclass(frozen=True)
class Request:
    """What a user asks for."""

    model: str
    cluster: str
    batch: int = 0
    seq: int = 0
    objective: str = "time"
    limits: Limits = field(default_factory=Limits)
    fastest: bool = False  # whether the fastest is taken even where a simpler plan is as fast within what predictions are off
    dtype: str = ""  # the faster 16-bit kind where none is said
    imbalance: float = 1.0  # picks of the busiest rank of ep over those of an average one
    layouts: tuple[str, ...] = ()  # of parameters of a stack, as `plan.pins` writes them

    def check(self) -> None:
        """Refuse by name what cannot be asked, before any work."""
        for name, value in (("--batch", self.batch), ("--seq", self.seq), ("--max-tp", self.limits.max_tp)):
            if value:
                require_count(name, value)
        require_imbalance(self.imbalance)
        if self.objective not in OBJECTIVES:
            known = " or ".join((*OBJECTIVES, "goodput"))
            raise PlanError(f"no objective {self.objective!r}", needed=known, found=self.objective)
        if ":" in self.model and not self.model.startswith("hf:"):
            self.check_length()

    def check_length(self) -> None:
        if self.seq:
            needed = "--seq of a model by name or of hf:FOLDER"
            raise PlanError(f"{self.model} has the length of its example", needed=needed, found=f"--seq {self.seq}", try_="without --seq")

    def stack(self) -> tuple[Stack, int]:
        """The model with its layouts, and the samples of its example."""
        stack, own = captured_stack(self.model, self.dtype or best_dtype(read_cluster(self.cluster)), self.seq)
        return stack.pinned(self.layouts), own

    def problem(self) -> PlanProblem:
        self.check()
        place = read_cluster(self.cluster)
        dtype = self.dtype or best_dtype(place)
        stack, own = self.stack()
        batch = self.batch or (usual_batch(stack.params, stack.seq) if stack.seq else own * place.devices)
        return PlanProblem(stack, place, batch, dtype, imbalance=self.imbalance)


@dataclass(frozen=True)
class Infeasible:
    """No setting fits: why, and the nearest change that would."""

    reason: str
    change: str
    infeasible: dict[str, str]


def usual_batch(params: float, seq: int) -> int:
    """A power of two of samples with about as many tokens as models of this size are trained with."""
    want = (MANY_TOKENS if params > LARGE else TOKENS) // seq
    return 1 << max(0, want.bit_length() - 1)


def best_dtype(cluster: Cluster) -> str:
    """The faster of the 16-bit kinds on the slowest device; bf16 where they are equal."""
    return max(HALVES, key=lambda d: min(g.profile.device.peak(d) for g in cluster.groups))


def captured_stack(model: str, dtype: str, seq: int = 0, adapt: Adapt | None = None, **sizes: Any) -> tuple[Stack, int]:
    """A model that was captured, in the dtype it is computed in, and the samples of its example; refused where it is no stack of blocks.

    Of one known by name, with some sizes changed, a few blocks are captured, and its settings say how many it has. `adapt` changes the module
    before that: adapters, frozen parameters."""
    from weft.frontend.source import stamp

    if seq:
        require_count("--seq", seq)
    made = _stack(model, stamp(model), dtype, seq, adapt, tuple(sorted(sizes.items())))
    if isinstance(made, PlanError):
        raise made
    return made


@lru_cache(maxsize=64)
def _stack(model: str, stamp: object, dtype: str, seq: int, adapt: Adapt | None, changed: tuple[tuple[str, Any], ...]) -> tuple[Stack, int] | PlanError:
    import torch

    from weft.frontend.capture import capture
    from weft.frontend.catalog import few_layers
    from weft.frontend.source import load

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp4": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
    sizes = dict(changed)
    few = few_layers(model, **sizes, **({"seq": seq} if seq else {}))
    given = {"seq": seq} if seq and model.startswith("hf:") else {}
    work = load(model, device="meta", dtype=kinds[dtype], **(few.settings if few else {**sizes, **given}))
    if adapt:
        adapt(work.model)
    stack = Stack(model, lambda n: capture(work.model, work.example(n, device="meta"), work.loss), dtype)
    try:
        stack.short(FEW)
    except PlanError as refused:
        return refused.with_traceback(None)
    if few:
        stack.seq, stack.repeats = few.tokens, stack.depth * few.of // few.layers
    elif given:
        stack.seq = seq
    if stack.seq:
        stack.resized = lambda tokens: captured_stack(model, dtype, tokens, adapt, **sizes)[0]
    return stack, int(work.batch)


def sized_stack(shape: Shape, dtype: str, adapt: Adapt | None = None) -> Stack:
    """A transformer known by its sizes alone, captured from a module of these sizes."""
    sizes = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "vocab": shape.vocab, "ffn": shape.inner, "tied": shape.tied}
    rotary = {"kv_heads": shape.kv, "head": shape.head}
    if shape.experts:
        return captured_stack("mixtral-8x7b", dtype, shape.seq, adapt, experts=shape.experts, chosen=shape.chosen, **rotary, **sizes)[0]
    if shape.gated:
        return captured_stack("llama3-8b", dtype, shape.seq, adapt, **rotary, **sizes)[0]
    return captured_stack("gpt2", dtype, shape.seq, adapt, dropout=0.1 if shape.dropout else 0.0, **sizes)[0]


def is_stack(model: str, cluster: str) -> bool:
    """Whether a model is a stack of equal blocks: captured and found to repeat one."""
    try:
        captured_stack(model, best_dtype(read_cluster(cluster)))
    except PlanError:
        return False
    return True


def runs_as_written(cluster: Cluster) -> bool:
    """Whether steps run node by node and nothing overlaps, so that blocks, priced as they are compiled, say little of them: on equal processors."""
    return len(cluster.groups) == 1 and not compiles(cluster.device)


def make_plan(request: Request, say: Say = lambda _: None) -> Plan | Infeasible:
    """The best plan found, or why there is none. No baseline is better: each is searched on its own and is in the pool."""
    request.check()
    if runs_as_written(read_cluster(request.cluster)) or not is_stack(request.model, request.cluster):
        return _program(request, say)
    return plan_stack(request, say)


def plan_stack(request: Request, say: Say = lambda _: None) -> Plan | Infeasible:
    """The best plan of a stack of equal blocks."""
    request.check()
    problem = request.problem()
    if request.objective == "cost":
        timed = replace(request, objective="time")
        return _cheapest(problem.cluster, lambda part: _plan(timed, replace(problem, cluster=part), say), say)
    return _plan(request, problem, say)


def _program(request: Request, say: Say) -> Plan | Infeasible:
    """What is no stack of blocks, or runs node by node, is planned as a program, by what would run."""
    place, programs = read_cluster(request.cluster), part_of_root(PROGRAMS)
    dtype = request.dtype or best_dtype(place)
    try:
        stack, own = captured_stack(request.model, dtype, request.seq)
    except PlanError:
        request.check_length()
        stack, own = None, programs.example_size(request.model)
    say(f"capturing {request.model}")
    seq = stack.seq if stack else 0
    full = request.batch or (usual_batch(stack.params, seq) if stack and seq else own * place.devices)

    def on(part: Cluster, batch: int = full, limits: Limits = request.limits) -> Plan | Infeasible:
        def by_blocks() -> Iterator[Spec]:
            made = plan_stack(replace(request, cluster=part.text, batch=batch, limits=limits.runnable()), say) if stack else None
            yield from [made.spec] if isinstance(made, Plan) else []

        objective = "time" if request.objective == "cost" else request.objective
        return programs.plan_program(request.model, part, batch, dtype, limits, objective, say, seq, by_blocks, request.imbalance)  # type: ignore[no-any-return]

    made = _cheapest(place, on, say) if request.objective == "cost" else on(place)
    return made if isinstance(made, Plan) else _nearest_program(made, request, place, full, on, say)


def _nearest_program(
    answer: Infeasible, request: Request, place: Cluster, batch: int, on: Callable[[Cluster, int, Limits], Plan | Infeasible], say: Say
) -> Infeasible:
    """The first of fewer limits and more nodes at which the program fits; it is planned there."""
    tries = [("without --memory", place, batch, replace(request.limits, memory=0.0))] if request.limits.memory else []
    for times in (2, 4, 8):
        more = place.with_nodes(*(g.count * times for g in place.groups))
        wanted = batch if batch % more.devices == 0 else batch * times
        tries.append((f"--cluster {more.text} --batch {wanted}", more, wanted, request.limits))
    for words, cluster, samples, limits in tries:
        say(f"does not fit; trying {words}")
        made = on(cluster, samples, limits)
        if isinstance(made, Plan):
            return replace(answer, change=f"{words}: {made.step_ms:,.4g} ms with {describe(made.setting)}")
    return replace(answer, change="none of: fewer limits, more nodes up to 8 times as many")


def _plan(request: Request, problem: PlanProblem, say: Say) -> Plan | Infeasible:
    search, objective = Search(problem, request.limits), request.objective
    pool: dict[str, Found] = {}
    lacking: dict[str, str] = {}
    least = math.inf
    for name, space in {"weft": EVERYTHING, **BASELINES}.items():
        say(f"{name}: searching")
        found = search.best(space, objective, progress=lambda text, name=name: say(f"{name}: {text}"))  # type: ignore[misc]
        if isinstance(found, Nothing):
            lacking[name], least = found.reason, min(least, found.least)
        else:
            pool[name] = found
            say(f"{name}: {found.seconds * 1e3:,.0f} ms, {describe(found.setting)}")
    names = list(pool)
    pool |= _unequal(search, request, pool, say)
    if not pool:
        return _infeasible(search, request, problem, lacking, least)
    exact = {name: _exactly(search, found) for name, found in pool.items()}
    exact |= _overlapped(search, exact)
    within = _known_difference(search, exact, objective)
    best, equal = choose(exact, objective, request.fastest, search.memory, within)
    others = {n: rounded_ms(exact[n].seconds) for n in names if n != "weft"}
    origin = "weft" if best.endswith(OVERLAPPED) else best
    made = _record(request, search, exact[best], origin, others, {k: v for k, v in lacking.items() if k != "weft"}, pool)
    equal_ms = {describe(exact[n].setting): rounded_ms(exact[n].seconds) for n in reversed(equal)}  # the fastest of those with equal words
    equal_ms.pop(describe(exact[best].setting), None)
    more: dict[str, Any] = {"equal_ms": dict(reversed(equal_ms.items()))} if equal_ms else {}
    more |= {"equal_within": within} if equal_ms and within != equal_within() else {}
    return replace(made, predicted={**made.predicted, **more, **_advice(search, exact, objective)})


def _advice(search: Search, exact: Mapping[str, Found], objective: str) -> dict[str, Any]:
    """The fastest of the plans found, were an odd size of the model's tables padded: what its user may do, and nobody else for them. That saves
    time, against the fastest as the model is, and no memory."""
    odd = search.problem.shape.odd
    if not odd or objective == "memory":
        return {}
    other = Padded(search.problem, search.limits)
    tried = [other.price(f.setting) for f in exact.values() if not f.setting.shares]
    fits = [_exactly(other, t) for t in tried if t is not None and t.memory <= other.memory]
    found = min(fits, key=lambda f: (f.seconds, plainness(f.setting)), default=None)
    if found is None or found.seconds > (1 - WORTH) * min(f.seconds for f in exact.values()):
        return {}
    within_error = [f for f in fits if f.seconds <= found.seconds * math.exp(equal_within())]
    found = min(within_error, key=lambda f: (_uneven(f), plainness(f.setting)))
    return {"padded_ms": {f"pad the vocabulary {odd} -> {rounded(odd)}, with {describe(found.setting)}": rounded_ms(found.seconds)}}


def _overlapped(search: Search, exact: Mapping[str, Found]) -> dict[str, Found]:
    """What a system of today does, with what it does not overlap overlapped: as simple, and no slower."""
    made: dict[str, Found] = {}
    for name, found in exact.items():
        s = replace(found.setting, overlap_grads=True, overlap_params=True, overlap_sends=True)
        if not found.setting.shares and s != found.setting:
            other = search.price(s)
            made |= {f"{name}{OVERLAPPED}": _exactly(search, other)} if other is not None and other.memory <= search.memory else {}
    return made


def _known_difference(search: Search, pool: Mapping[str, Found], objective: str) -> float:
    """How far apart (in ln) the times of two plans are known to differ. Measured steps tell it of those that compute; of one whose devices wait
    for the host, launches decide, which no measured step tells: there plans are known no better than any time is."""
    best = pool[min(pool, key=lambda n: rank(pool[n], objective))]
    causes = _breakdown(search, best)["causes_ms"]
    if causes.get("host", 0.0) <= causes.get("compute", 0.0):
        return equal_within()
    return spread(kind_of(best.setting.kernels, search.problem.shape.experts > 0, False)).high


def choose(
    pool: Mapping[str, Found], objective: str, fastest: bool = False, room: float = math.inf, within: float | None = None
) -> tuple[str, list[str]]:
    """The plan to take, by name, and those that are equal to it.

    Plans whose times differ by less than `within`, what two predictions are off against each other, are equal, and the simplest wins: those that do not
    nearly fill the memory there is `room` for before those that do, equal layers and shares before uneven ones, then `plainness`. Memory is what
    it is: by that objective nothing is equal.
    """
    order = sorted(pool, key=lambda n: (*rank(pool[n], objective), n != "weft"))
    if fastest or objective == "memory":
        return order[0], []
    within_error = pool[order[0]].seconds * math.exp(equal_within() if within is None else within)
    equal = [n for n in order if pool[n].seconds <= within_error]
    best = min(equal, key=lambda n: (pool[n].memory > CROWDED * room, _uneven(pool[n]), plainness(pool[n].setting)))
    return best, [n for n in equal if n != best]


def _uneven(found: Found) -> bool:
    return bool(found.setting.shares or found.setting.stages)


def _unequal(search: Search, request: Request, pool: dict[str, Found], say: Say) -> dict[str, Found]:
    """Layers split by the time of stages; on unequal devices also the batch by their speed."""
    made: list[Found] = []
    settings = [f.setting for f in pool.values() if f.setting.recompute != MIXED]  # those have stages of their own
    if not search.cluster.uniform:
        say("unequal devices: splitting layers and batch by speed")
        settings += settings_on_unequal(search)
    for s in dict.fromkeys(settings):
        tried = [uneven(search, s), *([shared(search, s)] if not search.cluster.uniform else [])]
        made += [t for t in tried if t is not None and t.memory <= _budget(search, t)]
    best = min(made, key=lambda f: rank(f, request.objective), default=None)
    return {"weft, uneven": best} if best is not None else {}


def _budget(search: Search, found: Found) -> float:
    return math.inf if found.setting.shares else search.memory  # shares were checked kind by kind


def settings_on_unequal(search: Search) -> list[Setting]:
    """The settings with the best bounds that fit, a few with one stage and a few with stages on full groups."""
    ranked = [c.setting for c in search.ranked(EVERYTHING) if c.setting.recompute != MIXED]
    found = []
    for wanted in (1, len(search.cluster.groups), 2 * len(search.cluster.groups), 4 * len(search.cluster.groups)):
        some = [replace(s, zero=z) for s in ranked if s.pp == wanted and s.chunks == 1 for z in (1, 3) if s.size("data") > 1]
        fits = (s for s in some if search.bound(s)[1] <= search.memory)
        found += [s for s, _ in zip(fits, range(TRIED), strict=False)]
    return found


def _exactly(search: Search, found: Found) -> Found:
    """With every micro-batch simulated, where only the first rounds were."""
    if found.setting.shares or _tasks(found.setting) > EXACT:
        return found
    step = search.step(found.setting)
    return replace(found, seconds=step.seconds, memory=step.peak_memory.total)


def _tasks(s: Setting) -> int:
    return s.virtual_stages * s.micro_batches


def _record(
    request: Request, search: Search, found: Found, origin: str, others: dict[str, float], lacking: dict[str, str],
    pool: dict[str, Found],
) -> Plan:  # fmt: skip
    p, s = search.problem, found.setting
    tokens = s.global_batch * max(1, p.shape.seq)
    peak = sum(g.devices * g.profile.device.peak(s.dtype) for g in p.cluster.groups)
    free = pool.get("weft")
    predicted = {
        "step_ms": rounded_ms(found.seconds), "tokens_per_s": float(f"{tokens / found.seconds:.6g}"),
        "mfu": float(f"{p.shape.flops_per_token * tokens / found.seconds / peak:.4g}"), "memory_gb": float(f"{found.memory / 1e9:.4g}"),
        "gap": float(f"{free.gap if free else 0.0:.3g}"), **_breakdown(search, found),
        **({"experts": p.shape.experts} if p.shape.experts else {}),
    }  # fmt: skip
    if s.pp > 1 and not s.stages:
        s = s.with_layers(even_layers(p.depth, s.virtual_stages))
    s = replace(s, pins=request.layouts)
    return Plan(
        request.model, p.cluster.text, p.shape.seq, request.objective, origin, s, request.limits.data(), predicted, others, lacking,
    )  # fmt: skip


def search_of(plan: Plan) -> Search:
    """The search that prices a plan of a stack, within the limits it was made in."""
    s = plan.setting
    request = Request(plan.model, plan.cluster, s.global_batch, plan.seq, dtype=s.dtype, imbalance=s.imbalance, layouts=s.pins)
    return Search(request.problem(), Limits.of(plan.limits))


def _breakdown(search: Search, found: Found) -> dict[str, Any]:
    """Where the time of the busiest stage goes; not told of unequal copies, whose kinds differ."""
    if found.setting.shares:
        return {"causes_ms": {}, "memory_parts_gb": {}}
    s = found.setting
    m = s.micro_batches
    few, more = (m, m) if _tasks(s) <= EXACT else (2 * s.pp, 3 * s.pp)
    a, b = (search.step(s.in_micro_batches(n)) for n in (few, more))
    left = (m - more) / max(1, more - few)  # what a round adds, it adds in every further round
    causes = {k: rounded_ms(v + (v - a.causes.get(k, 0.0)) * left) for k, v in b.causes.items() if v > 1e-6}
    return {"causes_ms": causes, "memory_parts_gb": {k: float(f"{v / 1e9:.4g}") for k, v in b.peak_memory.parts().items()}}


# --- the cheapest part of a cluster


def _cheapest(cluster: Cluster, plan_on: Callable[[Cluster], Plan | Infeasible], say: Say) -> Plan | Infeasible:
    """The number of nodes at which a token takes the least device time."""
    best: tuple[float, Plan] | None = None
    answer: Plan | Infeasible | None = None
    for part in parts(cluster):
        say(f"{part.text}: {part.devices} devices")
        answer = plan_on(part)
        if isinstance(answer, Plan):
            cost = answer.step_ms * part.devices
            if best is None or cost < best[0] * (1 - 1e-9):
                best = (cost, answer)
    if best is not None:
        return replace(best[1], objective="cost")
    assert isinstance(answer, Infeasible)
    return answer


def parts(cluster: Cluster) -> Sequence[Cluster]:
    """Full nodes of a cluster of one kind, by powers of two and all of them; the cluster alone where kinds differ."""
    if len(cluster.groups) > 1:
        return [cluster]
    group = cluster.groups[0]
    counts = [n for n in divisors(group.count) if n & (n - 1) == 0 or n == group.count]
    return [cluster.with_nodes(n) for n in counts]


# --- when nothing fits


def _infeasible(search: Search, request: Request, problem: PlanProblem, lacking: dict[str, str], least: float) -> Infeasible:
    reason = lacking["weft"]
    for change, other, limits in _changes(problem, request.limits, least):
        found = Search(other, limits).best(EVERYTHING)
        if isinstance(found, Found):
            return Infeasible(reason, f"{change}: {found.seconds * 1e3:,.0f} ms with {describe(found.setting)}", lacking)
    return Infeasible(reason, "none of: fewer limits, more nodes up to 64 times as many", lacking)


def _changes(problem: PlanProblem, limits: Limits, least: float) -> Iterator[tuple[str, PlanProblem, Limits]]:
    """From the smallest change to the largest. `least` are the bytes that some setting gets by with."""
    for pin in limits.pins:
        yield f"without --pin {pin}", problem, replace(limits, pins={k: v for k, v in limits.pins.items() if k != pin})
    if limits.max_tp:
        yield "without --max-tp", problem, replace(limits, max_tp=0)
    enough = math.ceil(least / 1e8) / 10 if math.isfinite(least) else 0.0
    if limits.memory and enough * 1e9 <= problem.cluster.memory:
        yield f"--memory {enough:g}GB", problem, replace(limits, memory=enough * 1e9)
        yield "without --memory", problem, replace(limits, memory=0.0)
    for times in (2, 4, 8, 16, 64):
        more = problem.cluster.with_nodes(*(g.count * times for g in problem.cluster.groups))
        batch = max(problem.batch, more.devices)
        yield f"--cluster {more.text} --batch {batch}", replace(problem, cluster=more, batch=batch), limits
