"""The plan: what was chosen and what is foreseen of it, as plain data: JSON with a version, parsed strictly, no times of day."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from weft.core.errors import PlanError
from weft.core.picture import html_of
from weft.plan.setting import AGAIN, Setting
from weft.plan.shares import dealt

VERSION = 1
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "weft_plan": int, "model": str, "cluster": str, "seq": int, "objective": str, "origin": str, "setting": dict, "layers": list,
    "shares": list, "limits": dict, "foreseen": dict, "baselines_ms": dict, "infeasible": dict, "stages": list, "layouts": dict,
}  # fmt: skip
LAYOUTS: dict[str, type | tuple[type, ...]] = {
    "mesh": dict, "inputs": dict, "again": list, "rules": list, "moves": (list, type(None)), "micro_batches": int, "beside": list, "program": str,
    "units": list,
}  # fmt: skip
MOVE: dict[str, type | tuple[type, ...]] = {"rule": str, "op": str, "at": int, "way": int, "places": int, "forward": bool}
ZERO = ("everything whole on every copy", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and parameters")
FORESEEN = ("step_ms", "tokens_per_s", "mfu", "memory_gb", "gap")


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
        return {key: own[key] for key in SCHEMA}

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


def load(path: str | Path) -> Plan:
    """Read a plan file."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        tip = "weft plan MODEL --cluster SPEC --out FILE"
        raise PlanError(f"cannot read the plan {path}", needed="a file that weft plan wrote", found=str(error), try_=tip) from error
    return parse(text, str(path))


def parse(text: str, where: str = "plan") -> Plan:
    """A plan of its JSON text; whatever is missing, unknown or of the wrong kind is refused by name."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        tip = "weft plan MODEL --cluster SPEC --out FILE"
        raise PlanError(f"{where} is not JSON", needed="a plan", found=str(error), try_=tip) from error
    if not isinstance(data, dict) or "weft_plan" not in data:
        raise PlanError(f"{where} is not a plan", needed='a JSON object with "weft_plan"', found=type(data).__name__)
    if data["weft_plan"] != VERSION:
        raise PlanError(f"{where} is of another version", needed=f"version {VERSION}", found=str(data["weft_plan"]), try_="plan again")
    _same_keys(where, SCHEMA, data)
    for key, kind in SCHEMA.items():
        _is(where, key, data[key], kind)
    setting = _setting(where, data["setting"])
    for key in FORESEEN:
        _is(where, f"foreseen.{key}", data["foreseen"].get(key), (int, float))
    for n in data["layers"]:
        _is(where, "layers", n, int)
    _check_layouts(where, data["layouts"])
    own = {k: data[k] for k in SCHEMA if k not in ("weft_plan", "setting", "layers", "shares", "stages")}
    stages = tuple(tuple(_piece(where, p) for p in stage) for stage in data["stages"])
    return Plan(**own, setting=setting, layers=tuple(data["layers"]), shares=tuple(data["shares"]), stages=stages)


def _check_layouts(where: str, data: Mapping[str, Any]) -> None:
    """What is there must be known and of its kind; files of before have less."""
    _same_keys(f"layouts of {where}", {k: kind for k, kind in LAYOUTS.items() if k in data}, data)
    for key in data:
        _is(where, f"layouts.{key}", data[key], LAYOUTS[key])
    for end in data.get("units", ()):
        _is(where, "layouts.units", end, int)
    for k, move in enumerate(data.get("moves") or ()):
        _is(where, f"layouts.moves[{k}]", move, dict)
        _same_keys(f"layouts.moves[{k}] of {where}", MOVE, move)
        for key, kind in MOVE.items():
            _is(where, f"layouts.moves[{k}].{key}", move[key], kind)
            if kind is int and move[key] < 0:
                raise PlanError(f"layouts.moves[{k}].{key} of {where} is of the wrong kind", needed="0 or more", found=str(move[key]))


def _piece(where: str, data: Any) -> tuple[str, str, int]:
    """A block by name, what it runs again, and how often it comes."""
    _is(where, "stages", data, list)
    for value, kind in zip(data, (str, str, int), strict=False):
        _is(where, "stages", value, kind)
    if len(data) != 3 or data[1] not in ("none", *AGAIN.values()) or data[2] < 0:
        raise PlanError(f"stages of {where} are of the wrong kind", needed="[block, what it runs again, how often]", found=str(data))
    return data[0], data[1], data[2]


def _setting(where: str, data: Mapping[str, Any]) -> Setting:
    known = {f.name: f.default for f in fields(Setting)}
    _same_keys(f"setting of {where}", known, data)
    for key, default in known.items():
        _is(where, f"setting.{key}", data[key], type(default))
    made = Setting(**data)
    made.check()
    return made


def _same_keys(where: str, known: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    lacking, odd = [k for k in known if k not in data], [k for k in data if k not in known]
    if lacking or odd:
        found = f"unknown {', '.join(odd)}" if odd else "not there"
        raise PlanError(f"{where} cannot be read", needed=", ".join(lacking or known), found=found)


def _is(where: str, key: str, value: Any, kind: Any) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise PlanError(f"{key} of {where} is of the wrong kind", needed=" or ".join(k.__name__ for k in kinds), found=repr(value))
