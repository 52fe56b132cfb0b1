"""A configuration of another system, judged: priced as it is by the simulator of plans, and next to the best plan found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.cluster.spec import Cluster
from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import PlanError
from weft.cost.interval import bounds, equal_within, kind_of, spread
from weft.plan.baselines import EVERYTHING
from weft.plan.blocks import Stack
from weft.plan.config_text import keys_of
from weft.plan.configs import Read, read
from weft.plan.export import unsaid, write
from weft.plan.plan import Plan
from weft.plan.planner import sized_stack
from weft.plan.search import Found, Search, describe
from weft.plan.setting import Setting
from weft.plan.sizes import Shape, Stacked, model_of
from weft.plan.space import Limits, PlanProblem

VOCAB = 51200  # Megatron's padded words of GPT-2, where arguments leave them to a tokenizer


@dataclass(frozen=True)
class PricedConfiguration:
    """What a configuration takes, and what would be better: `changes` of its keys lead there."""

    read: Read
    model: str
    cluster: str
    text: str
    figures: Mapping[str, float]
    bounds: Mapping[str, float]
    interval: str
    fits: bool
    has: float
    searched: bool = False
    better: Mapping[str, Any] | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)


def price_configuration(
    text: str, cluster: str, model: str = "", seq: int = 0, batch: int = 0, better: bool = True, imbalance: float = 1.0
) -> PricedConfiguration:
    """Price a configuration, and search for a better one of the same batch."""
    place = read_cluster(cluster)
    first = read(text, "", place.devices, seq)
    stated = 0 if {"seq-length", "training.max_context_length"} & set(first.assumed) else first.seq
    stack = _stack(model, first, seq or stated)
    found = read(text, first.form, place.devices, stack.seq, stack.depth)
    if not model and "vocab" not in found.model:
        found = replace(found, assumed={**found.assumed, "vocab-size": f"{VOCAB} (the tokenizer's, which is not read)"})
    setting = replace(_batched(found.setting, batch, place), imbalance=imbalance)
    if setting.ep > 1:
        found = replace(found, assumed={**found.assumed, "imbalance": f"{imbalance:g} (picks of the busiest rank of ep over those of an average one)"})
    search = Search(PlanProblem(stack, place, setting.global_batch, setting.dtype, setting.kernels, imbalance))
    setting.check()
    step = search.step(setting)
    figures = {"step_ms": step.seconds * 1e3, "tokens_per_s": step.tokens_per_second, "mfu": step.mfu, "memory_gb": step.peak_memory.total / 1e9}
    kind, fits = kind_of(setting.kernels, stack.experts > 0, False), step.peak_memory.total <= search.memory
    made = PricedConfiguration(
        replace(found, setting=setting), model or "the model of the arguments", place.text, describe(setting), figures, bounds(kind, figures),
        str(spread(kind)), fits, search.memory, better,
    )  # fmt: skip
    return _with_better(made, stack, place, setting) if better else made


def _stack(model: str, found: Read, seq: int) -> Stack:
    """The blocks of the model by name or config; else of one with the sizes that the configuration itself states."""
    if model:
        made = model_of(model, seq)
        if isinstance(made, Stacked):
            return made.stack(found.setting.dtype)
        raise PlanError(f"{model} is not priced by its sizes", needed="a stack of transformer layers", found=model, try_="weft plan, which captures any model")
    if not found.model:
        raise PlanError("the configuration does not say the model", needed="--model, or Megatron arguments with --num-layers and the like", found=found.form)
    sizes = {k: v for k, v in found.model.items() if k in {f.name for f in fields(Shape)}}
    return sized_stack(Shape(**{"vocab": VOCAB, **sizes}, seq=seq or found.seq), found.setting.dtype)


def _batched(s: Setting, batch: int, place: Cluster) -> Setting:
    """With a batch the user gives, and copies on all devices."""
    if s.devices != place.devices:
        raise PlanError(
            "the configuration does not fill the cluster", needed=f"dp x tp x pp x cp = {place.devices} devices of {place.text}",
            found=f"{s.replicas} x {s.tp} x {s.pp} x {s.cp} = {s.devices}", try_=f"--cluster {s.devices}x{place.device.name}",
        )  # fmt: skip
    return s.of_batch(batch) if batch else s


def _with_better(made: PricedConfiguration, stack: Stack, place: Cluster, setting: Setting) -> PricedConfiguration:
    """The searched plan with the same batch, where it gains more than predictions are off against each other, or fits where this does not."""
    dtype = setting.dtype if setting.dtype in ("bf16", "fp16") else "bf16"
    found = Search(PlanProblem(stack, place, setting.global_batch, dtype, imbalance=setting.imbalance)).best(EVERYTHING)
    if not isinstance(found, Found):
        return made
    gain = made.figures["step_ms"] / (found.seconds * 1e3)
    if made.fits and gain < 1 + equal_within():
        return made
    plan = _plan(made, stack, found)
    better = {
        "setting": describe(found.setting), "step_ms": found.seconds * 1e3, "memory_gb": found.memory / 1e9, "gain": gain,
        "not_said": unsaid(plan, made.read.form),
    }  # fmt: skip
    return replace(made, better=better, changes=changes(made.read, plan))


def _plan(made: PricedConfiguration, stack: Stack, found: Found) -> Plan:
    figures = {"step_ms": found.seconds * 1e3, "tokens_per_s": 0.0, "mfu": 0.0, "memory_gb": 0.0, "gap": 0.0}
    return Plan(made.model, made.cluster, stack.seq, "time", "weft", found.setting, Limits().data(), figures)


def changes(now: Read, plan: Plan) -> list[dict[str, Any]]:
    """Keys of the configuration's own system that a plan sets otherwise. Older names are said by the new one."""
    then = keys_of(write(plan, now.form))
    before = keys_of(write(replace(plan, setting=now.setting), now.form))
    keys = [k for k in {**before, **then} if before.get(k) != then.get(k)]
    return [{"key": k, "now": _short(before.get(k)), "then": _short(then.get(k))} for k in keys]


def _short(value: Any) -> Any:
    if value is None:
        return "not set"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return " ".join(f"{sum(str(m).startswith('layers.') for m in part)}" for part in value) + " layers"
    return value

