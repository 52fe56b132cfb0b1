"""A run: what training writes about itself, as plain data next to the plan: times, memory, one traced step, what was predicted.

A run is a folder with `run.json`, or that file. It is written anew each time, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from weft.core.errors import PlanError, reason
from weft.core.files import read_json
from weft.core.picture import html_of
from weft.core.schema import Listed, Mapped, Maybe, Record, Row, fit, flag, integer, number, short, text
from weft.cost.timeline import Seen, Task, Timeline

VERSION = 1
BYTES = 1 << 30
FILE = "run.json"
WARM = 2  # steps that load kernels and fill caches, and are not counted
TRY = 'weft.parallelize(..., record="run/"), or weft.dynamic.Recorder(model, "run/")'


@dataclass(frozen=True)
class Run:
    """`tensors` are laid out as `places` say; `steps` has a list each of ms, wait_ms and loss; `unit` is what a step takes so many of."""

    name: str
    kind: str  # "training", or "dynamic" for models of graphs
    plan: str
    program: str  # a hash of its text
    machine: str
    cluster: str
    mesh: Mapping[str, int]
    unit: str
    per_step: float
    flops: float  # of the model in one step, over all ranks
    peak_flops: float  # per second, over all ranks; 0 where it is not known
    steps: Mapping[str, Sequence[float]]
    predicted: Seen | None
    measured: Seen | None
    tensors: Sequence[Mapping[str, Any]] = ()
    communication: Sequence[Mapping[str, Any]] = ()
    verbs: Sequence[Mapping[str, Any]] = ()  # a `step`, whether one device would run the `same` nodes after it, and by what `rule`
    alternatives: Sequence[Mapping[str, Any]] = ()
    schedule: Mapping[str, Any] = field(default_factory=dict)
    says: Sequence[str] = ()

    @property
    def rules(self) -> list[str]:
        """By which the step was rewritten before it was placed."""
        return list(dict.fromkeys(str(v["rule"]) for v in self.verbs if v.get("rule")))

    @property
    def step_ms(self) -> float:
        """The median of steps past the first few; 0 before there are any."""
        return median(self.steps.get("ms", ())[WARM:] or self.steps.get("ms", ()))

    @property
    def wait_ms(self) -> float:
        """The median time between two steps, in which input was made."""
        return median(self.steps.get("wait_ms", ())[WARM:] or self.steps.get("wait_ms", ()))

    @property
    def per_second(self) -> float:
        return self.per_step / (self.step_ms + self.wait_ms) * 1e3 if self.step_ms else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of the peak that the model's own work reached, input waits included; None where the peak is not known."""
        if not (self.peak_flops and self.flops and self.step_ms):
            return None
        return self.flops / ((self.step_ms + self.wait_ms) / 1e3) / self.peak_flops

    def _repr_html_(self) -> str:
        return html_of(self)

    def data(self) -> dict[str, Any]:
        """The run in JSON's own types."""
        own = {"weft_run": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        own = {k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}
        return own | {"predicted": _pack(self.predicted), "measured": _pack(self.measured)}

    def save(self, folder: str | Path) -> Path:
        """Write `folder/run.json` in one move."""
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        half = where / f".{FILE}.{os.getpid()}"
        half.write_text(json.dumps(self.data(), separators=(",", ":"), allow_nan=False) + "\n")
        half.replace(where / FILE)
        return where / FILE


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2 if ordered else 0.0


_NAMES, _MS = Listed(text()), Mapped(number())
_LINE = Record({"names": _NAMES, "streams": _NAMES, "causes": _NAMES, "rows": Listed(Row((integer(), integer(), integer(), number(), number())))})
_SEEN = Record({"step_ms": number(), "memory_gb": number(), "causes_ms": _MS, "line": _LINE, "memory": Listed(Row((number(), number())))})
_SIZES = Listed(integer(0, 1 << 60), most=64)
_TENSOR = {"name": text(), "role": text(), "shape": _SIZES, "local": _SIZES, "dtype": text(), "places": Mapped(text(), most=64)}
_VERB = {"step": text(1 << 20), "same": flag, "rule": text(), "said": text(1 << 20)}
_OTHER = {"plan": text(), "step_ms": number(), "memory_gb": number(), "causes_ms": _MS, "reason": text(1 << 20)}
_BATCHES = {
    **dict.fromkeys(("samples", "vertices", "edges", "batches", "least"), integer(0, 1 << 60)), "policy": text(),
    "rounds": Listed(Row((text(), integer(0, 1 << 60), integer(0, 1 << 60)))),
}  # fmt: skip
SCHEMA = Record({
    "weft_run": integer(), **dict.fromkeys(("name", "kind", "plan", "program", "machine", "cluster", "unit"), text()), "mesh": Mapped(integer(1), most=64),
    **dict.fromkeys(("per_step", "flops", "peak_flops"), number(0.0, 1e30)), "steps": Mapped(Listed(number(), most=1 << 26), most=64),
    "predicted": Maybe(_SEEN), "measured": Maybe(_SEEN), "tensors": Listed(Record(_TENSOR, open=True)),
    "communication": Listed(Record({"kind": text(), "axis": text(), "count": number(), "bytes": number(0.0, 1e30)}, open=True)),
    "verbs": Listed(Record(_VERB, ("rule", "said"), open=True)), "alternatives": Listed(Record(_OTHER, open=True)),
    "schedule": Record(_BATCHES, tuple(_BATCHES), open=True), "says": Listed(text(1 << 20)),
})  # fmt: skip


def load(path: str | Path) -> Run:
    """Read a run from its folder or file."""
    where = Path(path)
    where = where / FILE if where.is_dir() else where
    try:
        data = read_json(where, BYTES)
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read the run {path}", needed=f"a folder with {FILE}, or that file", found=reason(error), try_=TRY) from error
    return parse(data, str(path))


def parse(data: Any, where: str = "run") -> Run:
    """A run of its data; another version and missing or unknown fields are refused by name."""
    if not isinstance(data, dict) or "weft_run" not in data:
        raise PlanError(f"{where} is not a run", needed='a JSON object with "weft_run"', found=type(data).__name__, try_=TRY)
    if data["weft_run"] != VERSION:
        raise PlanError(f"{where} is of another version", needed=f"version {VERSION}", found=str(data["weft_run"]), try_="train again")
    fit(SCHEMA, data, where)
    for key in ("predicted", "measured"):
        _check_line(data[key] and data[key]["line"], f"{key}.line of {where}")
    if data["schedule"] and not all(k in data["schedule"] for k in _BATCHES):
        raise PlanError(f"schedule of {where} cannot be read", needed=", ".join(_BATCHES), found=", ".join(map(short, data["schedule"])))
    own = {f.name: data[f.name] for f in fields(Run)}
    return Run(**own | {"predicted": _unpack(data["predicted"]), "measured": _unpack(data["measured"])})


def _check_line(line: Mapping[str, Any] | None, where: str) -> None:
    """Rows name what is in the lists next to them."""
    for name, stream, cause, *_ in line["rows"] if line else ():
        assert line is not None
        if name >= len(line["names"]) or stream >= len(line["streams"]) or cause >= len(line["causes"]):
            raise PlanError(f"{where} cannot be read", needed="rows that name what is listed", found=short([name, stream, cause]))


# --- a timeline in few bytes: names once, microseconds as integers where they are long


def _pack(seen: Seen | None) -> dict[str, Any] | None:
    if seen is None:
        return None
    own = asdict(Seen(seen.step_ms, seen.memory_gb, seen.causes_ms))
    return own | {"line": pack(seen.line), "memory": [[_micro(t), round(b)] for t, b in seen.memory]}


def pack(line: Timeline) -> dict[str, Any]:
    """Names, streams and causes once each; a row is (name, stream, cause, start, length), in microseconds."""
    kinds = [list(dict.fromkeys(getattr(t, what) for t in line.tasks)) for what in ("name", "stream", "cause")]
    names, streams, causes = ({x: i for i, x in enumerate(kind)} for kind in kinds)
    rows = [
        [names[t.name], streams[t.stream], causes[t.cause], _micro(start), _micro(end - start)]
        for t, start, end in zip(line.tasks, line.start, line.end, strict=True)
        if end > start
    ]
    return {"names": kinds[0], "streams": kinds[1], "causes": kinds[2], "rows": rows}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _unpack(data: Mapping[str, Any] | None) -> Seen | None:
    if data is None:
        return None
    memory = [(t / 1e6, float(b)) for t, b in data["memory"]]
    return Seen(data["step_ms"], data["memory_gb"], data["causes_ms"], unpack(data["line"]), memory)


def unpack(data: Mapping[str, Any]) -> Timeline:
    rows = data["rows"]
    tasks = [Task(data["names"][n], data["streams"][s], d / 1e6, (), data["causes"][c]) for n, s, c, _, d in rows]
    return Timeline(tuple(tasks), tuple(r[3] / 1e6 for r in rows), tuple((r[3] + r[4]) / 1e6 for r in rows))
