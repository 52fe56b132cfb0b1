"""Why a plan is as it is: for each decision the next best, what it would cost in time and memory, and what would flip it.

The next best of a decision is the best plan that decides it otherwise, everything else free again. What flips it is the first of a few other
sequence lengths, batches and network rates at which the best plan decides otherwise: everything is searched again there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.cluster.profile import Constant
from weft.cluster.spec import Cluster
from weft.core.errors import PlanError
from weft.core.picture import part_of_root
from weft.plan.baselines import EVERYTHING
from weft.plan.plan import Plan
from weft.plan.planner import PROGRAMS, search_of, settings_on_unequal
from weft.plan.search import Found, Search, describe
from weft.plan.setting import DECISIONS as NAMES
from weft.plan.setting import Setting
from weft.plan.space import Limits, PlanProblem
from weft.plan.spec import MIXED
from weft.plan.stages import shared

DECISIONS = ("tp", "pp", "cp", "ep", "zero", "micro_batch", "recompute", "schedule", "sequence_parallel")
FACTORS = (2, 4, 8, 16)
LONGER, LARGER, SLOWER = (4,), (4,), (4.0, 0.25)  # the changes that are asked for


@dataclass(frozen=True)
class Reason:
    """A decision, the next best for it, and what that costs. `why` names what grows most; `flips` when it would be decided otherwise, of which
    `factor` says how many times longer, larger, slower or (below 1) faster: 0 where no such change was found."""

    decision: str
    value: str
    other: str
    ms: float
    gb: float
    why: str
    flips: str
    factor: float = 0.0
    setting: Setting | None = None  # of the next best

    def data(self) -> dict[str, Any]:
        """The reason in JSON's own types."""
        own = None if self.setting is None else {name: self.setting.named(name) for name in NAMES}
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"setting": own}

    def __str__(self) -> str:
        name, value = self.decision.replace("_", " "), {"True": "yes", "False": "no"}.get(self.value, self.value)
        return f"{name} {value}: next best {self.other}\n    {signed(self.ms)} ms, {signed(self.gb)} GB ({self.why}); {self.flips}"


def signed(x: float) -> str:
    """A difference with its sign, to a tenth, or a hundredth where it is small; what rounds to nothing has none."""
    digits = 1 if abs(x) >= 1 else 2
    return f"{x:+,.{digits}f}" if abs(x) >= 0.5 * 10**-digits else "0"


@dataclass(frozen=True)
class _Not(Limits):
    """Limits of the user, and one decision that must come out otherwise. Mixed recompute is another plan's only if it is this one's:
    partitioning every other takes minutes."""

    decision: str = ""
    value: str = ""
    mixed: bool = False

    def allows(self, s: Setting, besides: tuple[str, ...] = ()) -> bool:
        free = self.decision in besides
        if s.recompute == MIXED and not self.mixed:
            return False
        return super().allows(s, besides) and (
            free or str(s.named(self.decision)) not in (self.value, MIXED)
        )  # a mix may come out as it


def explain(plan: Plan, progress: Callable[[str], None] = lambda _: None, run_model: bool = False) -> Iterator[Reason]:
    """Each decision of a plan with its next best; decisions without another choice are left out.

    Of a model in a Python file, that file is run to capture it: only where the caller says that it may be.
    """
    plan.require_may_run(run_model)
    if not plan.is_stack:
        yield from part_of_root(PROGRAMS).explain_program(plan, progress)
        return
    own = search_of(plan)
    limits = own.limits
    if plan.setting.shares:
        yield from explain_shares(own, plan, progress)
        return
    chosen = own.price(plan.setting)
    if chosen is None:
        raise PlanError("the plan does not run on its own cluster", needed="a plan of this version of weft", found=describe(plan.setting))
    mixed = plan.setting.recompute == MIXED
    asked = _Alternatives("memory" if plan.objective == "memory" else "time", own)
    for decision in DECISIONS:
        if decision in limits.pins:
            continue
        progress(decision)
        value = str(plan.setting.named(decision))
        other = own.narrowed(_Not(limits.max_tp, limits.memory, limits.pins, decision, value, mixed))
        found = other.best(EVERYTHING, asked.objective)
        if isinstance(found, Found):
            yield _reason(own, asked, decision, value, chosen, found)


def _reason(search: Search, asked: _Alternatives, decision: str, value: str, chosen: Found, found: Found) -> Reason:
    ms, gb = (found.seconds - chosen.seconds) * 1e3, (found.memory - chosen.memory) / 1e9
    when, factor = _flips(search.problem, asked, decision, chosen.setting)
    return Reason(decision, value, describe(found.setting), ms, gb, _why(search, chosen, found), when, factor, found.setting)


def _why(search: Search, chosen: Found, found: Found) -> str:
    """What the busiest stage does longer, with the same number of samples."""
    a, b = (_causes(search, f) for f in (chosen, found))
    grown = sorted(((b.get(k, 0.0) - a.get(k, 0.0), k) for k in {**a, **b}), reverse=True)
    top = [f"{k} {signed(d * 1e3)} ms" for d, k in grown[:2] if d > 1e-5]
    less = [f"{k} {signed(d * 1e3)} ms" for d, k in grown[::-1][:1] if d < -1e-5]
    return ", ".join(top + less) or "no difference in time"


def _causes(search: Search, found: Found) -> dict[str, float]:
    s = found.setting
    few = min(s.micro_batches, 4 * s.pp)
    step = search.step(s.in_micro_batches(few))
    once = ("dp", "optimizer", "bubble")
    return {k: v * (1 if k in once else s.micro_batches / few) for k, v in step.causes.items()}


@dataclass(frozen=True)
class Circumstance:
    """Another sequence, batch or network, in words, how many times longer, larger or slower it is, and as a problem of its own."""

    when: str
    factor: float
    problem: PlanProblem


def changes(p: PlanProblem) -> Iterator[Circumstance]:
    if p.shape.resized is not None:  # the length of a user's model is that of its example
        for n in LONGER:
            yield Circumstance(f"from sequence {p.shape.seq * n:,}", n, replace(p, shape=p.shape.resized(p.shape.seq * n)))
    for n in LARGER:
        yield Circumstance(f"from batch {p.batch * n:,}", n, replace(p, batch=p.batch * n))
    for rate in SLOWER if networked(p.cluster) else ():
        words = f"{rate:g}x slower" if rate > 1 else f"{1 / rate:g}x faster"
        yield Circumstance(f"on a network {words}", rate, replace(p, cluster=scaled(p.cluster, 1 / rate)))


@dataclass
class _Alternatives:
    """The best plans where something is otherwise, each searched for once."""

    objective: str
    own: Search
    found: dict[str, Found | None] = field(default_factory=dict)

    def best(self, change: Circumstance) -> Found | None:
        if change.when not in self.found:
            made = self.own.of(change.problem).best(EVERYTHING, self.objective)
            self.found[change.when] = made if isinstance(made, Found) else None
        return self.found[change.when]


def _flips(problem: PlanProblem, asked: _Alternatives, decision: str, chosen: Setting) -> tuple[str, float]:
    """The first change at which the best plan decides otherwise."""
    for change in changes(problem):
        best = asked.best(change)
        if best is not None and best.setting.named(decision) != chosen.named(decision):
            return f"{_decision_words(decision, best.setting.named(decision))} wins {change.when}", change.factor
    network = f", network x1/{SLOWER[0]:g} to x{SLOWER[0]:g}" if networked(problem.cluster) else ""
    return f"unchanged for sequence x{LONGER[-1]}, batch x{LARGER[-1]}{network}", 0.0


def _decision_words(decision: str, value: object) -> str:
    name = decision.replace("_", " ")
    return f"{'' if value else 'no '}{name}" if isinstance(value, bool) else f"{name} {value}"


def networked(cluster: Cluster) -> bool:
    """Whether anything is ever sent between its nodes."""
    return len(cluster.links) > 1 and cluster.members(1, cluster.devices)[0] < cluster.devices


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with another rate between its nodes."""
    groups = []
    for g in cluster.groups:
        links = list(g.profile.links)
        for i in range(1, len(links)):
            rate = links[i].constants["bandwidth"]
            changed = {**links[i].constants, "bandwidth": Constant(rate.value * factor, rate.origin)}
            links[i] = replace(links[i], constants=changed)
        groups.append(replace(g, profile=replace(g.profile, links=tuple(links))))
    return Cluster(cluster.text, tuple(groups))


# --- copies that take unequal shares


def explain_shares(search: Search, plan: Plan, progress: Callable[[str], None] = lambda _: None) -> Iterator[Reason]:
    """Against the best plan of equal shares first; then each decision against the best shares that decide it otherwise."""
    chosen = shared(search, plan.setting)
    if chosen is None:
        raise PlanError("the plan does not run on its own cluster", needed="a plan of this version of weft", found=describe(plan.setting))
    progress("shares")
    even = search.best(EVERYTHING)
    if isinstance(even, Found):
        yield _of_shares(search, "shares", shares_text(chosen), chosen, even, f"equal shares, {describe(even.setting)}")
    tried = [made for made in (shared(search, s) for s in settings_on_unequal(search)) if made is not None]
    for decision in DECISIONS:
        value = plan.setting.named(decision)
        others = [m for m in tried if m.setting.named(decision) != value]
        if others and decision not in search.limits.pins:
            progress(decision)
            other = min(others, key=lambda m: m.seconds)
            yield _of_shares(search, decision, str(value), chosen, other, f"{describe(other.setting)}, {shares_text(other)}")


def shares_text(found: Found) -> str:
    shares = found.setting.shares
    return " and ".join(f"{copies * micro * rounds} samples on {copies} replicas of {kind}" for kind, copies, micro, rounds in shares)


def _of_shares(search: Search, decision: str, value: str, chosen: Found, other: Found, text: str) -> Reason:
    ms, gb = (other.seconds - chosen.seconds) * 1e3, (other.memory - chosen.memory) / 1e9
    when, factor = _network_flips(search, chosen, other)
    why = "every copy waits for the slowest kind" if not other.setting.shares else "the slowest kind is later done"
    return Reason(decision, value, text, ms, gb, why, when, factor, other.setting)


def _network_flips(search: Search, chosen: Found, other: Found) -> tuple[str, float]:
    def wins(rate: float) -> bool:
        there = search.of(replace(search.problem, cluster=scaled(search.cluster, rate)))
        ours = shared(there, chosen.setting)
        theirs = shared(there, other.setting) if other.setting.shares else there.price(other.setting)
        return ours is not None and theirs is not None and theirs.seconds < ours.seconds

    return network_flips(wins)


def network_flips(wins: Callable[[float], bool]) -> tuple[str, float]:
    """The first network, by factors of two of its rate, on which another plan `wins`."""
    for factor in (f for n in FACTORS for f in (float(n), 1.0 / n)):
        if wins(1 / factor):
            return f"it is faster than this plan on a network {max(factor, 1 / factor):.0f} times {'slower' if factor > 1 else 'faster'}", factor
    return f"not found to win on any network up to {FACTORS[-1]} times slower or faster", 0.0
