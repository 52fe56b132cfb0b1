"""The plan: what was chosen and what is foreseen of it, as plain data: JSON with a version, parsed strictly, no times of day."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.core.errors import PlanError
from weft.core.files import BYTES, parse_json
from weft.core.picture import html_of
from weft.core.program import Program
from weft.core.role import Role
from weft.core.schema import LARGE, MOST, Listed, Mapped, Maybe, Record, Row, fit, flag, number, one_of, short, text, whole, word
from weft.core.text import parse as parse_program
from weft.cost.interval import bounds, kind_of
from weft.ops.source import input_node
from weft.plan.setting import AGAIN, Setting
from weft.plan.shares import dealt

VERSION = 1
TIMES = Mapped(number(0.0))
SHARE = Record({"kind": text(), "copies": whole(1), "micro_batch": whole(1, LARGE), "micro_batches": whole(1, LARGE)})
MOVE = Record({"rule": text(), "op": text(), "at": whole(), "way": whole(), "places": whole(), "forward": flag})
LIMITS = Record({"max_tp": whole(), "memory_gb": number(0.0), "pins": Mapped(text(), most=100), "layouts": Listed(text())}, ("layouts",))
SETTING = Record({
    f.name: flag if isinstance(f.default, bool) else whole(0, LARGE) if isinstance(f.default, int) else text() for f in fields(Setting)
})  # fmt: skip
FORESEEN = ("step_ms", "tokens_per_s", "mfu", "memory_gb", "gap")
_MORE = {
    "causes_ms": TIMES, "memory_parts_gb": TIMES, "batches_ms": TIMES, "noise": number(), "efficiency": number(), "useful_tokens_per_s": number(),
    "layouts_ms": number(), "equal_ms": TIMES,
}  # fmt: skip
FORESEEN_OF = Record({**dict.fromkeys(FORESEEN, number(0.0)), "step_ms": number(1e-9), **_MORE}, tuple(_MORE))
PLACED = {
    "mesh": Mapped(whole(1), word, most=16), "inputs": Mapped(Mapped(text(), word, most=16)), "again": Listed(text()), "rules": Listed(text()),
    "micro_batches": whole(1), "beside": Listed(text()), "program": text(BYTES),
}  # fmt: skip
LAYOUTS = Record({**PLACED, "moves": Maybe(Listed(MOVE)), "units": Listed(whole())}, (*PLACED, "moves", "units"))
SCHEMA = Record({
    "weft_plan": whole(), "model": text(), "cluster": text(), "seq": whole(0, LARGE), "objective": one_of("time", "memory", "cost", "goodput"),
    "origin": text(), "setting": SETTING, "layers": Listed(whole(), most=4096), "shares": Listed(SHARE, most=4096), "limits": LIMITS,
    "foreseen": FORESEEN_OF, "baselines_ms": Mapped(number(0.0), most=1000), "infeasible": Mapped(text(), most=1000),
    "stages": Listed(Listed(Row((text(), one_of("none", *AGAIN.values()), whole()))), most=4096), "layouts": LAYOUTS,
})  # fmt: skip
ZERO = ("everything whole on every copy", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and parameters")


@dataclass(frozen=True)
class Plan:
    """`layers` of each virtual stage, `shares` of the batch by kind of device where they are unequal.

    `stages` name what each virtual stage is made of, (block, what it runs again, how often), where layers differ. `layouts` of a
    captured program: the mesh of a stage, how every input is held on it, and the program so placed, as text; where rules of values rewrote it,
    the moves that did, made once products of matrices are written as such. Files of before have the names of the rules alone.
    """

    model: str
    cluster: str
    seq: int
    objective: str
    origin: str  # `weft`, or the baseline that was best
    setting: Setting
    layers: tuple[int, ...]
    shares: tuple[Mapping[str, Any], ...]
    limits: Mapping[str, Any]
    foreseen: Mapping[str, Any]
    baselines_ms: Mapping[str, float] = field(default_factory=dict)
    infeasible: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[tuple[tuple[str, str, int], ...], ...] = ()
    layouts: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """The plan in JSON's own types."""
        own = {"weft_plan": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        own |= {"setting": asdict(self.setting), "layers": list(self.layers), "shares": [dict(s) for s in self.shares]}
        own |= {k: dict(own[k]) for k in ("limits", "foreseen", "baselines_ms", "infeasible", "layouts")}
        own |= {"stages": [[list(piece) for piece in stage] for stage in self.stages]}
        return {key: own[key] for key in SCHEMA.of}

    def text(self) -> str:
        return json.dumps(self.data(), indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.text())

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def step_ms(self) -> float:
        return float(self.foreseen["step_ms"])

    @property
    def kind(self) -> str:
        """Which measured steps it is like, as `cost.interval` knows them."""
        from weft.plan.models import is_transformer, shape

        captured = "program" in self.layouts
        experts = self.setting.ep > 1 or (not captured and is_transformer(self.model) and shape(self.model).experts > 0)
        return kind_of(self.setting.kernels, experts, captured)

    def bounds(self) -> dict[str, float]:
        """Low and high of every figure that is foreseen."""
        return bounds(self.kind, self.foreseen)

    @property
    def is_stack(self) -> bool:
        """Whether it is of a stack of layers, whose degrees and stages say it all; else it is of a captured program, and has that program."""
        from weft.plan.models import is_transformer

        known = is_transformer(self.model)
        if known and (self.seq < 1 or "program" in self.layouts):
            raise PlanError(f"the plan is not one of {self.model}", needed="a sequence length, and no program of its own", found=f"seq {self.seq}")
        return known or not self.layouts

    def require_may_run(self, said: bool) -> None:
        """A plan may come from anywhere, and with it the name of a file: refused unless the user said that it may be run."""
        if ":" in self.model and not said:
            raise PlanError(
                f"the plan names {self.model}, which is not run unasked", needed="your word that the code it names may be run", found="none",
                try_="--run-model, if you know that file and the plan",
            )  # fmt: skip

    @property
    def named(self) -> str | None:
        """The words `parallelize(plan=...)` takes, where they can say it: equal shares, or on one stage such as torch.chunk's rule deals."""
        s, pieces = self.setting, self.pieces
        if pieces is None or (pieces and s.pp > 1):
            return None
        degrees = {"dp": s.dp // s.ep, "cp": s.cp, "ep": s.ep, "tp": s.tp, "pp": s.pp}  # a setting counts ep among dp
        words = [f"{a}{n}" for a, n in degrees.items() if n > 1]
        words += [f"{word}{n}" for word, n in (("zero", s.zero), ("pieces", pieces)) if n]
        if s.pp > 1:
            words += [s.schedule, f"micro{s.micro_batches}", *([f"virtual{s.virtual}"] if s.virtual > 1 else [])]
        words += ["sp"] * s.sequence_parallel + [word for word, way in AGAIN.items() if way == s.recompute]
        return ",".join(words) or "dp1"

    @property
    def pieces(self) -> int | None:
        """How many equal pieces of the batch give every copy its share, dealt by torch.chunk's rule: 0 of equal shares, None if none."""
        if not self.shares:
            return 0
        taken = [int(x["micro_batch"]) * int(x["micro_batches"]) for x in self.shares for _ in range(int(x["copies"]))]
        least = math.gcd(*taken)
        pieces = sum(taken) // least
        return pieces if [n * least for n in dealt(pieces, len(taken))] == taken else None


TIP = "weft plan MODEL --cluster SPEC --out FILE"


def load(path: str | Path) -> Plan:
    """Read a plan file."""
    try:
        with open(path, "rb") as f:
            text = f.read(BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}", needed="a file that weft plan wrote", found=str(error), try_=TIP) from error
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
        raise PlanError(f"{where} is not a plan", needed='a JSON object with "weft_plan"', found=type(data).__name__)
    if data["weft_plan"] != VERSION:
        raise PlanError(f"{where} is of another version", needed=f"version {VERSION}", found=short(data["weft_plan"]), try_="plan again")
    fit(SCHEMA, data, where)
    own = {k: data[k] for k in SCHEMA.of if k not in ("weft_plan", "setting", "layers", "shares", "stages")}
    stages = tuple(tuple((name, again, n) for name, again, n in stage) for stage in data["stages"])
    plan = Plan(**own, setting=Setting(**data["setting"]), layers=tuple(data["layers"]), shares=tuple(data["shares"]), stages=stages)
    plan.setting.check()
    _check_parts(where, plan)
    return plan


def _check_parts(where: str, plan: Plan) -> None:
    """What one field says must go with what another one does."""
    s, layouts = plan.setting, plan.layouts
    chunks = s.pp * s.virtual
    for name, found in (("layers", plan.layers), ("stages", plan.stages)):
        if len(found) not in (0, chunks):
            raise PlanError(f"{name} of {where} do not go with its setting", needed=f"one for each of {chunks} stages, or none", found=str(len(found)))
    if not all(plan.stages):
        raise PlanError(f"stages of {where} cannot be read", needed="a piece of the model on every stage", found="a stage of nothing")
    copies = sum(x["copies"] for x in plan.shares)
    samples = sum(x["copies"] * x["micro_batch"] * x["micro_batches"] for x in plan.shares)
    if plan.shares and (copies > MOST or samples != s.global_batch):
        raise PlanError(
            f"shares of {where} do not go with its setting", needed=f"{s.global_batch} samples on at most {MOST:,} copies",
            found=f"{samples} samples on {copies} copies",
        )  # fmt: skip
    lacking = [k for k in PLACED if k not in layouts] if "program" in layouts else []
    if lacking:
        raise PlanError(f"layouts of {where} cannot be read", needed=", ".join(lacking), found="a program without them", try_="plan again")
    _check_pins(plan.limits)


def _check_pins(limits: Mapping[str, Any]) -> None:
    from weft.plan.pins import parse_pin
    from weft.plan.space import parse_pins

    parse_pins([f"{name}={value}" for name, value in limits["pins"].items()])
    for pin in limits.get("layouts", ()):
        parse_pin(pin)


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
