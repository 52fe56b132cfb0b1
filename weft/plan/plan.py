"""The plan: what was chosen and what is predicted of it, as plain data: JSON with a version, parsed strictly, no times of day.

A file of version 2 is a Spec, what it was made for (`given`), and where its numbers come from. Files of version 1 had a setting instead.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import PlanError, WeftError, reason
from weft.core.files import BYTES, parse_json
from weft.core.layout import S, chunk
from weft.core.names import bare
from weft.core.picture import html_of, run_by_root
from weft.core.program import Program
from weft.core.role import Role
from weft.core.schema import LARGE, MOST, Listed, Mapped, Maybe, Record, Row, fit, flag, integer, number, one_of, short, text, word
from weft.core.text import parse as parse_program
from weft.cost.interval import bounds, kind_of
from weft.cost.price import compiles
from weft.ops.source import input_node
from weft.plan.pins import parse_pin
from weft.plan.setting import Setting
from weft.plan.spec import AGAIN, DECIDED, OFFLOADED, Share, Spec

VERSION = 2
TIMES = Mapped(number(0.0))
SHARE = Record({"kind": text(), "copies": integer(1), "micro_batch": integer(1, LARGE), "micro_batches": integer(1, LARGE)})
MOVE = Record({"rule": text(), "op": text(), "at": integer(), "way": integer(), "places": integer(), "forward": flag})
LIMITS = Record({"max_tp": integer(), "memory_gb": number(0.0), "pins": Mapped(text(), most=100), "layouts": Listed(text())}, ("layouts",))
_KIND_OF = {bool: flag, int: integer(0, LARGE), float: number(1.0, LARGE)}
KINDS = {f.name: _KIND_OF.get(type(f.default), text()) for f in fields(Setting)}
NEW = ("imbalance",)  # what files of earlier versions lack
MADE_FOR = tuple(f.name for f in fields(Setting) if f not in fields(Spec))
_COUNTED = ("global_batch", "micro_batch", "dp", "tp", "pp", "cp", "ep", "virtual", "zero")
_BEFORE = {  # a setting of version 1, which counted experts' copies among those of data, and samples of a micro-batch
    **dict.fromkeys(_COUNTED, integer(0, LARGE)), **dict.fromkeys(("sequence_parallel", "keep_gathered", "overlap_tp"), flag),
    **dict.fromkeys(("recompute", "schedule"), text()), **{k: KINDS[k] for k in MADE_FOR},
}  # fmt: skip
STAGES = Listed(Listed(Row((text(), one_of("none", *AGAIN.values(), *OFFLOADED), integer()))), most=4096)
_SPEC = {
    **{f.name: flag if isinstance(f.default, bool) else integer(0, LARGE) for f in fields(Spec) if isinstance(f.default, int)},
    "schedule": text(), "recompute": text(), "groups": Listed(Row((text(), integer(0, 3)))), "stages": STAGES, "splits": Listed(text(), most=4096),
    "pins": Listed(text()), "shares": Listed(Row((text(), integer(1), integer(1, LARGE), integer(1, LARGE))), most=4096), "moves": Listed(MOVE),
    "open": Listed(one_of(*DECIDED)),
}  # fmt: skip
PREDICTED_KEYS = ("step_ms", "tokens_per_s", "mfu", "memory_gb", "gap")
_MORE = {
    "causes_ms": TIMES, "memory_parts_gb": TIMES, "batches_ms": TIMES, "noise": number(), "efficiency": number(), "useful_tokens_per_s": number(),
    "layouts_ms": number(), "equal_ms": TIMES, "equal_within": number(), "padded_ms": TIMES, "experts": integer(),
}  # fmt: skip
PREDICTED = Record({**dict.fromkeys(PREDICTED_KEYS, number(0.0)), "step_ms": number(1e-9), **_MORE}, tuple(_MORE))
PLACED = {
    "mesh": Mapped(integer(1), word, most=16), "inputs": Mapped(Mapped(text(), word, most=16)), "again": Listed(text()), "rules": Listed(text()),
    "micro_batches": integer(1), "beside": Listed(text()), "program": text(BYTES),
}  # fmt: skip
LAYOUTS = Record({**PLACED, "moves": Maybe(Listed(MOVE)), "units": Listed(integer())}, (*PLACED, "moves", "units"))
_FROM = {
    "weft_plan": integer(), "model": text(), "cluster": text(), "seq": integer(0, LARGE), "objective": one_of("time", "memory", "cost", "goodput"),
    "origin": text(), "limits": LIMITS, "baselines_ms": Mapped(number(0.0), most=1000), "infeasible": Mapped(text(), most=1000), "layouts": LAYOUTS,
}  # fmt: skip
SCHEMA = Record({**_FROM, "spec": Record(_SPEC, tuple(_SPEC)), "given": Record({k: KINDS[k] for k in MADE_FOR}, NEW), "predicted": PREDICTED})
OF_BEFORE = Record({
    **_FROM, "setting": Record(_BEFORE, NEW), "foreseen": PREDICTED, "layers": Listed(integer(), most=4096), "shares": Listed(SHARE, most=4096),
    "stages": STAGES, })  # fmt: skip
ZERO = ("everything replicated", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and parameters")


@dataclass(frozen=True)
class Bound:
    """The step that a plan was asked for."""

    model: Any
    loss: Any
    optimizer: Any
    batch: Any


class Listing(list[Any]):
    """Rows that print one below the other."""

    def __str__(self) -> str:
        return "\n".join("  ".join(x) if isinstance(x, tuple) else str(x) for x in self)


def rounded_ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.6g}")


def nine_digits(x: float) -> float:
    """Steps and bytes that are equal so far are equal."""
    return float(f"{x:.9g}")


@dataclass(frozen=True)
class Plan:
    """A plan: every decision, what it was made for, and what is predicted of it.

    Print it, `save` it, `export` it to another system, `explain` it, or pass it to `parallelize`. `spec` holds the decisions, `predicted` the
    figures (`step_ms`, `tokens_per_s`, `mfu`, `memory_gb`), `baselines_ms` what other systems would take. Of a captured model `layouts` has the
    layout of every input and the placed program as text, and the rewrites where rules changed the program.
    """

    model: str
    cluster: str
    seq: int
    objective: str
    origin: str  # `weft`, or the baseline that was best
    setting: Setting
    limits: Mapping[str, Any]
    predicted: Mapping[str, Any]
    baselines_ms: Mapping[str, float] = field(default_factory=dict)
    infeasible: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, Any] = field(default_factory=dict)
    bound: Bound | None = field(default=None, repr=False, compare=False)

    @property
    def spec(self) -> Spec:
        """All that is decided."""
        from weft.plan.rewritten import moves_of

        return replace(self.setting.spec, moves=moves_of(self.layouts))

    def data(self) -> dict[str, Any]:
        """The plan in JSON's own types."""
        own: dict[str, Any] = {"weft_plan": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        own |= {"spec": self.spec.data(), "given": {k: getattr(self.setting, k) for k in MADE_FOR}, "predicted": self.predicted}
        own |= {k: dict(own[k]) for k in ("limits", "predicted", "baselines_ms", "infeasible", "layouts")}
        if own["layouts"].get("moves") is not None:
            del own["layouts"]["moves"]  # the spec has them
        return {key: own[key] for key in SCHEMA.of}

    def text(self) -> str:
        return json.dumps(self.data(), indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.text())

    def _repr_html_(self) -> str:
        return html_of(self)

    def __str__(self) -> str:
        from weft.plan.summaries import plan_text

        return plan_text(self)

    def explain(self, run_model: bool = False) -> Listing:
        """Why it is as it is: for each decision the next best, what that costs, and what would flip it. `run_model` lets a file that the
        plan names be run."""
        from weft.plan.explain import explain

        return Listing(explain(self, run_model=run_model or self.model.startswith("module:")))

    def diff(self, other: Plan) -> Listing:
        """What another plan decides or predicts differently: (what, here, there)."""
        from weft.plan.summaries import differences

        return Listing(differences(self, other))

    def export(self, form: str) -> str:
        """The plan as another system's configuration: torchtitan, megatron, fsdp2, accelerate, huggingface or deepspeed."""
        from weft.plan.export import export, known_form

        known_form(form)
        return export(self, form)

    def parallelize(self, model: Any = None, loss: Any = None, optimizer: Any = None, batch: Any = None, **settings: Any) -> Any:
        """The training step under this plan, by `weft.parallelize`; what is not given is what the plan was asked for."""
        own = self.bound or Bound(None, None, None, None)
        given = (model, loss, optimizer, batch)
        step = [g if g is not None else b for g, b in zip(given, (own.model, own.loss, own.optimizer, own.batch), strict=True)]
        lacking = [name for name, x in zip(("model", "loss", "optimizer", "batch"), step, strict=True) if x is None]
        if lacking:
            needed = ", ".join(f"{n}=" for n in lacking)
            raise PlanError("this plan has no model bound to it", needed=needed, found="none", try_="plan.parallelize(model, loss, optimizer, batch)")
        return run_by_root(*step, plan=self, **settings)

    @property
    def step_ms(self) -> float:
        return float(self.predicted["step_ms"])

    @property
    def kind(self) -> str:
        """Which measured steps it is like, as `cost.interval` knows them."""
        experts = self.setting.ep > 1 or self.predicted.get("experts", 0) > 0
        return kind_of(self.setting.kernels, experts, bool(self.layouts), bool(self.layouts) and _on_processors(self.cluster))

    def bounds(self) -> dict[str, float]:
        """Low and high of every figure that is predicted."""
        return bounds(self.kind, self.predicted)

    @property
    def is_stack(self) -> bool:
        """Whether it is of a stack of layers, whose degrees and stages say it all; else it is of a captured program, and has that program."""
        from weft.frontend.catalog import few_layers

        if self.seq < 1 and few_layers(self.model):
            raise PlanError(f"the plan is not one of {self.model}", needed="a sequence length", found=f"seq {self.seq}")
        return not self.layouts

    def require_may_run(self, allowed: bool) -> None:
        """A plan may come from anywhere, and with it the name of a file: refused unless the user said that it may be run."""
        if ":" in self.model and not self.model.startswith("hf:") and not allowed:  # of a Hugging Face folder only config.json is read
            raise PlanError(
                f"the plan names {self.model}, which is code that runs only if you allow it", needed="leave to run it", found="none",
                try_="--run-model, if you know that file and the plan",
            )  # fmt: skip


TIP = "weft plan MODEL --cluster SPEC --out FILE"


def _on_processors(cluster: str) -> bool:
    """Whether its devices run steps node by node; not known of one whose file is not here."""
    try:
        return not compiles(read_cluster(cluster).device)
    except WeftError:
        return False


def load(path: str | Path) -> Plan:
    """Read a plan file."""
    try:
        with open(path, "rb") as f:
            text = f.read(BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}", needed="a file that weft plan wrote", found=reason(error), try_=TIP) from error
    return parse(text, str(path))


def parse(text: str | bytes, where: str = "plan") -> Plan:
    """A plan of its JSON text; whatever is missing, unknown, of the wrong kind or beyond all limits is refused by name."""
    if len(text) > BYTES:
        raise PlanError(f"{where} is too long for a plan", needed=f"at most {BYTES:,} bytes", found="more", try_=TIP)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise PlanError(f"{where} is not JSON", needed="a plan", found=str(error), try_=TIP) from error
    if not isinstance(data, dict) or "weft_plan" not in data:
        raise PlanError(f"{where} is not a plan", needed='a JSON object with "weft_plan"', found=short(data), try_=TIP)
    if data["weft_plan"] not in (1, VERSION) or isinstance(data["weft_plan"], bool):
        raise PlanError(f"{where} is of another version", needed=f"version {VERSION}", found=short(data["weft_plan"]), try_="plan again")
    plan = _of_before(data, where) if data["weft_plan"] == 1 else _of_data(data, where)
    plan.setting.check()
    return plan


def _of_before(data: Mapping[str, Any], where: str) -> Plan:
    """A plan of version 1: layers of each stage and what stages are made of were separate, shares were records, and pins were limits."""
    fit(OF_BEFORE, data, where)
    warnings.warn(f"{where} is a plan file of version 1, read as version {VERSION}; save it again to keep it", stacklevel=4)
    own = {k: data[k] for k in _FROM if k != "weft_plan"} | {"predicted": data["foreseen"]}
    own["limits"], pins = {**data["limits"]}, tuple(data["limits"].get("layouts", ()))
    own["limits"].pop("layouts", None)
    setting = Setting.counted(**data["setting"], pins=pins)
    stages = tuple(tuple((name.replace(" ", ""), again, n) for name, again, n in stage) for stage in data["stages"])
    setting = replace(setting, stages=stages) if stages else setting.with_layers(data["layers"])
    if data["shares"]:
        setting = with_batch_shares(setting, [tuple(x[k] for k in SHARE.of) for x in data["shares"]])
    plan = Plan(**own, setting=with_groups(setting, data["layouts"]))
    if len(data["layers"]) not in (0, setting.virtual_stages):
        raise _wrong_number("layers", where, setting, data["layers"])
    _check_parts(where, plan)
    return plan


def _of_data(data: Mapping[str, Any], where: str) -> Plan:
    """A plan of version 2."""
    fit(SCHEMA, data, where)
    spec = Spec.of_data(data["spec"])
    spec.checked()
    if spec.open:
        raise PlanError(f"{where} leaves decisions open", needed="a plan", found=", ".join(sorted(spec.open)), try_="weft plan, which fills them in")
    setting = Setting.of(replace(spec, moves=None), **data["given"])
    own = {k: data[k] for k in _FROM if k != "weft_plan"} | {"predicted": data["predicted"]}
    own["layouts"] = {**data["layouts"], **({"moves": [m.data() for m in spec.moves]} if spec.moves is not None else {})}
    plan = Plan(**own, setting=setting)
    _check_parts(where, plan)
    meant = with_groups(with_batch_shares(setting, spec.shares), data["layouts"])
    if meant != setting:
        raise PlanError(f"spec of {where} does not go with what it was made for", needed=str(meant.spec), found=str(spec), try_="plan again")
    return plan


def dealt(pieces: int, ranks: int) -> list[int]:
    """Pieces of every rank, by torch.chunk's rule."""
    return [hi - lo for lo, hi in (chunk(pieces, ranks, r) for r in range(ranks))]


def with_batch_shares(setting: Setting, shares: Sequence[Share]) -> Setting:
    """With shares of the batch, and the number of equal pieces that give every copy its share by torch.chunk's rule, where some do."""
    taken = [micro * rounds for _, copies, micro, rounds in shares for _ in range(copies)]
    least = math.gcd(*taken) or 1
    pieces = sum(taken) // least
    dealt_so = setting.pp == 1 and [n * least for n in dealt(pieces, len(taken))] == taken if taken else False
    return replace(setting, shares=tuple(shares), shards=pieces if dealt_so else 0 if shares else setting.shards)


def with_groups(setting: Setting, layouts: Mapping[str, Any]) -> Setting:
    """With the ZeRO of parameters that a placed program, where there is one, shards otherwise than most."""
    text = layouts.get("program")
    levels = zero_levels(step_of(text)) if text and setting.size("data") > 1 else {}
    return replace(setting, groups=tuple((bare(n), z) for n, z in levels.items() if z != setting.zero)) if text else setting


def _wrong_number(name: str, where: str, s: Setting, found: Sequence[Any]) -> PlanError:
    return PlanError(
        f"{name} of {where} do not go with its setting", needed=f"one for each of {s.virtual_stages} stages, or none", found=str(len(found)),
    )  # fmt: skip


def _check_parts(where: str, plan: Plan) -> None:
    """What one field says must go with what another one does."""
    s, layouts = plan.setting, plan.layouts
    if len(s.stages) not in (0, s.virtual_stages):
        raise _wrong_number("stages", where, s, s.stages)
    if not all(s.stages):
        raise PlanError(f"stages of {where} cannot be read", needed="a piece of the model on every stage", found="a stage of nothing")
    copies = sum(copies for _, copies, *_ in s.shares)
    samples = sum(copies * micro * rounds for _, copies, micro, rounds in s.shares)
    if s.shares and (copies > MOST or samples != s.global_batch):
        raise PlanError(
            f"shares of {where} do not go with its setting", needed=f"{s.global_batch} samples on at most {MOST:,} copies",
            found=f"{samples} samples on {copies} copies",
        )  # fmt: skip
    lacking = [k for k in PLACED if k not in layouts] if "program" in layouts else []
    if lacking:
        raise PlanError(f"layouts of {where} cannot be read", needed=", ".join(lacking), found="a program without them", try_="plan again")
    from weft.plan.space import parse_pins

    parse_pins([f"{name}={value}" for name, value in plan.limits["pins"].items()])
    for pin in s.pins:
        parse_pin(pin)


def zero_levels(program: Program) -> dict[str, int]:
    """The ZeRO stage of every parameter of a placed step: 3 where it is sharded along dp or cp, 1 where its optimizer state is."""
    axes = [a for a in ("dp", "cp") if a in program.mesh.sizes]
    sharded = {n for n, x in program.input_names.items() if any(isinstance(x.layout.placement(a), S) for a in axes)}
    states = {n.partition(".")[2] for n in program.inputs_for(Role.STATE) if n in sharded}
    return {n: 3 if n in sharded else int(n.removeprefix("param.") in states) for n in program.inputs_for(Role.PARAMETER)}


OLD_NAMES = {"param": Role.PARAMETER, "buffer": Role.BUFFER, "constant": Role.CONSTANT, "batch": Role.BATCH, "seed": Role.SEED, "step": Role.SETTING}


@lru_cache(maxsize=8)
def step_of(program: str) -> Program:
    """The step a plan file holds. Where it was written before inputs said what they are for, their names say so."""
    p = parse_program(program)
    if any(n.role is not None for n in p.inputs):
        return p
    kept = set(p.next_of.values())
    roles = {n: OLD_NAMES.get(name.partition(".")[0]) or (Role.STATE if name in kept else Role.SETTING) for name, n in p.input_names.items()}
    return replace(p.rewrite({}, "", inputs={n: input_node(n.attr("name"), n.type, role) for n, role in roles.items()}), parent=None)
