"""Accuracy of predictions on the accelerator at hand: step time and memory of zoo models, predicted on fake tensors and then measured.

    python -m bench.gpu_accuracy --out accuracy.json

Some timed cases at a time are predicted and compiled, each by processes of its own, then timed one by one with nothing beside them; last
comes memory, which others on the device do not change. A row goes to stderr as soon as it is there, and `--out` is written anew:
what was observed of each step, the kernels that ran and the code that was compiled, so that a prediction can be traced. One JSON
object on stdout. `--calibrate` measures the device first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from torch import nn

    from bench.inductor.observe import Observed
    from weft.cluster.profile import Device, Profile

LATE = "not done in time"
WAYS = ("weft", "weft nodes", "eager", "compiled")


@dataclass(frozen=True)
class Case:
    """A training step: torch's own, torch's compiled, or weft's (as it runs here, or node by node)."""

    model: str
    batch: int
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    way: str = "eager"
    recompute: bool = False

    @property
    def name(self) -> str:
        said = ",".join(f"{k}={v}" for k, v in self.changes.items() if k != "dropout")
        ways = f"{self.way}{' recompute' if self.recompute else ''}"
        return f"{self.model}{f'({said})' if said else ''} b{self.batch} {self.dtype} {ways}"

    @property
    def host(self) -> str:
        """How its ops are issued."""
        return "host.plain" if self.way.startswith("weft") else "host.launch"

    def make(self, device: str, compiler: Callable[..., Any]) -> Callable[[], Any]:
        """Build it and return its training step."""
        import torch

        import weft_zoo as zoo

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        work = zoo.get(self.model, device="cpu" if self.way.startswith("weft") else device, dtype=dtype, **self.changes)
        if self.recompute:
            _checkpoint(work.model)
        return (self._weft if self.way.startswith("weft") else self._torch)(work, dtype, device, compiler)

    def _example(self, work: Any, dtype: Any, device: str) -> dict[str, Any]:
        batch = work.example(self.batch, device=device)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

    def _torch(self, work: Any, dtype: Any, device: str, compiler: Callable[..., Any]) -> Callable[[], Any]:
        import torch

        batch = self._example(work, dtype, device)
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-5, fused=True)

        def forward() -> Any:
            return work.loss(work.model, batch)

        run = compiler(forward) if self.way == "compiled" else forward

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            run().backward()
            optimizer.step()

        return step

    def _weft(self, work: Any, dtype: Any, device: str, _: Callable[..., Any]) -> Callable[[], Any]:
        import torch

        from weft.api.parallelize import parallelize

        batch = self._example(work, dtype, device)
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-5)
        with _inductor(self.way == "weft"):
            made = parallelize(work.model, work.loss, optimizer, self._example(work, dtype, "cpu"), device=device, check=not _fake())
        if not _fake() or not hasattr(made.compiled._step, "_recorder"):
            return lambda: made(batch)
        made.compiled._step._recorder = None  # there is no device to record; the kernels are the same, and inputs are held twice
        held = {k: v.clone() for k, v in batch.items()}
        return lambda: (made(batch), held)[0]

    def recorded(self, place: str) -> bool:
        """Whether it runs as one graph of the device."""
        return self.way == "weft" and place == "cuda"


def _fake() -> bool:
    from torch._guards import detect_fake_mode

    return detect_fake_mode() is not None


@contextmanager
def _inductor(on: bool) -> Iterator[None]:
    """Whether `parallelize` may compile a step whole."""
    with patch.dict(os.environ, {} if on else {"WEFT_INDUCTOR": "0"}):
        yield


def _checkpoint(model: nn.Module) -> None:
    """Recompute each block of the model in its backward."""
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:  # type: ignore[union-attr]
        inner = block.forward
        block.forward = lambda *args, _inner=inner, **kw: checkpoint(_inner, *args, use_reentrant=False, **kw)


def _sizes() -> list[Case]:
    """Five models of three sizes."""
    short = {"layers": 6, "dropout": 0.0}
    return [
        *(Case(m, 8, short) for m in ("gpt2", "gpt2-medium", "gpt2-large")),
        *(Case("llama3-1b", 2, {"layers": n, "seq": 2048}) for n in (2, 4, 8)),
        *(Case(m, b, short) for m, b in (("bert-base", 32), ("bert-large", 16), ("bert-1.2b", 8))),
        *(Case(m, b, {"layers": 6}) for m, b in (("vit-b16", 128), ("vit-l16", 64), ("vit-h14", 32))),
        *(Case("mlp", 4096, {"layers": 8, "hidden": h, "inputs": h}) for h in (1024, 4096, 8192)),
    ]


def _settings() -> list[Case]:
    """Twelve settings of models, batch, precision and recompute, each as torch runs it and compiled; nine of them as weft runs them."""
    short = {"layers": 4, "dropout": 0.0}
    kept = [
        Case("gpt2", 8, short), Case("gpt2", 16, short), Case("gpt2", 8, short, "fp32"), Case("gpt2", 16, short, recompute=True),
        Case("llama3-1b", 2, {"layers": 2, "seq": 2048}), Case("llama3-1b", 4, {"layers": 4, "seq": 2048}, recompute=True),
        Case("bert-base", 32, short), Case("bert-large", 8, short, "fp32"), Case("vit-b16", 128, {"layers": 4}),
        Case("vit-l16", 64, {"layers": 6}, recompute=True), Case("vit-b16", 64, {"layers": 4}, "fp32"),
        Case("mlp", 4096, {"layers": 8, "hidden": 4096, "inputs": 4096}),
    ]  # fmt: skip
    ours = [c for c in kept if not c.recompute]
    return [replace(c, way="weft") for c in ours] + kept + [replace(c, way="compiled") for c in kept]


def _ten() -> list[Case]:
    """Ten models, small ones whose pace the host sets among them."""
    short = {"layers": 2, "dropout": 0.0}
    return [
        Case("mlp", 256, {"layers": 8, "hidden": 1024, "inputs": 1024}), Case("gpt2", 1, short), Case("dlrm", 2048),
        Case("gpt2-medium", 8, {**short, "layers": 4}), Case("bert-base", 32, {**short, "layers": 4}),
        Case("llama3-1b", 2, {"layers": 2, "seq": 2048}), Case("vit-b16", 64, {"layers": 4}), Case("vit-l16", 64, {"layers": 2}),
        Case("resnext50", 32, {"stages": (1, 1, 1, 1)}), Case("resnet50", 64, {"stages": (2, 2, 2, 2)}),
    ]  # fmt: skip


TEN = [replace(c, way=way) for way in ("eager", "compiled", "weft") for c in _ten()] + [
    Case("resnet50", 16),
    Case("resnet50", 64),
    Case("unet", 1),
]


def small(case: Case) -> Case:
    """The same with the smallest sizes of its model, to try a run on."""
    import weft_zoo as zoo

    return replace(case, batch=2, changes=dict(zoo.entry(case.model).small), dtype="fp32")


TIMES = [replace(c, way=way) for way in ("weft", "weft nodes") for c in _sizes()]
TIMES += [replace(c, way=way) for way in ("eager", "compiled") for c in _sizes()[::3]]
MEMORY = _settings()


def predict(case: Case, place: str, device: Device) -> Observed:
    """What a step does and holds, from fake tensors alone."""
    from bench.inductor.fusion import observe_compiled

    return observe_compiled(lambda compiler: case.make(place, compiler), device=device, host=case.host, place=place)


def prepare(case: Case, place: str, device: Any) -> Callable[[], Any]:
    """The step, compiled and past its first calls. Steps have the device to themselves: a lock keeps them off products that a compiler times."""
    import torch

    step = case.make(place, torch.compile)
    if case.way != "eager":
        with _timed_alone(device):
            step()
    with device:
        step()
        if place != "cpu":
            torch.cuda.reset_peak_memory_stats()  # compilers and weft's own comparison hold more than a step does
        for _ in range(3):
            step()
        _wait(place != "cpu")
    return step


@contextmanager
def _timed_alone(device: Any) -> Iterator[None]:
    """Whether to pad a product Inductor decides by timing it, so nothing else should run meanwhile."""
    from torch._inductor.fx_passes import pad_mm

    should_pad = pad_mm.should_pad

    def alone(*given: Any, **named: Any) -> bool:
        with device:
            return bool(should_pad(*given, **named))

    with patch.object(pad_mm, "should_pad", alone):
        yield


def clock(step: Callable[[], Any], on_device: bool, listed: bool = True, steps: int = 10, rounds: int = 3) -> dict[str, Any]:
    """Median seconds of a step among several, and the kernels of one step where they are to be listed."""
    taken = []
    for _ in range(rounds + 1):
        _wait(on_device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(on_device)
        taken.append((time.perf_counter() - began) / steps)
    return {"seconds": statistics.median(taken[1:]), "kernels": _kernels(step) if on_device and listed else {}}


def _wait(on_device: bool) -> None:
    import torch

    if on_device:
        torch.cuda.synchronize()


def _kernels(step: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """How often each kernel of a step ran, and its microseconds in all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        _wait(True)
    found = {e.key[:120]: (e.count, round(e.self_device_time_total, 1)) for e in seen.key_averages() if e.self_device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:60])


def _written() -> str:
    """The code a compiler wrote for what this process ran."""
    from torch._inductor.codecache import PyCodeCache

    return "\n".join(Path(m.__file__).read_text() for m in PyCodeCache.modules if m.__file__)


# --- what several processes do at once


def _predicted(link: Connection, case: Case, place: str, device: Device) -> None:
    link.send(predict(case, place, device))


def _measured(link: Connection, case: Case, place: str, device: Any) -> None:
    """The most bytes held and the code that was compiled; then, when told to, the time of a step."""
    import torch

    step = prepare(case, place, device)
    held = float(torch.cuda.max_memory_allocated()) if place != "cpu" else 0.0
    gc.collect()
    if place != "cpu":
        torch.cuda.empty_cache()  # others need it
    link.send((held, _written() if case.way == "compiled" else ""))
    if link.recv():
        link.send(clock(step, place != "cpu", case.way == "eager"))


def _serve(work: Callable[..., None], link: Connection, *args: Any) -> None:
    """One case in a process of its own; one that cannot run says why and must not lose the others."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are as many processes as cores
    try:
        work(link, *args)
    except Exception as error:
        link.send(f"{type(error).__name__}: {error}"[:600])


class Child:
    """A process, and the line to it."""

    def __init__(self, work: Callable[..., None], case: Case, *args: Any) -> None:
        spawn = get_context("spawn")
        self.case, self.work = case, work
        self.link, there = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(work, there, case, *args), daemon=True)
        self.process.start()
        there.close()

    def hear(self, ends: float) -> Any:
        """What it says; a text where it failed, died or is late."""
        try:
            return self.link.recv() if self.link.poll(max(0.0, ends - time.monotonic())) else LATE
        except EOFError:
            return "the process died"

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def in_turn(begin: Sequence[Callable[[], Child]], most: int, ends: float) -> Iterator[tuple[Child, Any]]:
    """Begin so many at once, the first ones first, and hear from each as it is done. It then waits for a word."""
    left, busy = list(begin), {}  # type: tuple[list[Callable[[], Child]], dict[Any, Child]]
    while left or busy:
        while left and len(busy) < most and time.monotonic() < ends:
            child = left.pop(0)()
            busy[child.link] = child
        done = wait(list(busy), max(0.0, ends - time.monotonic()))
        for link in done or list(busy):
            child = busy.pop(link)
            yield child, child.hear(ends)
        if time.monotonic() >= ends:
            left.clear()


# --- results


def timed(case: Case, seen: Observed | str, got: dict[str, Any] | str, held: float, device: Device, place: str) -> dict[str, Any]:
    from bench.inductor.observe import seconds

    row: dict[str, Any] = {"case": case.name, "way": case.way}
    if isinstance(got, str):
        return row | {"reason": got}
    row |= {"measured_ms": got["seconds"] * 1e3, "measured_gb": held / 1e9, "ran": got["kernels"]}
    if isinstance(seen, str):
        return row | {"reason": f"not observed: {seen}"}
    predicted = seconds(seen, device, case.recorded(place))
    row |= {"kernels": sum(seen.issued.values()), "predicted_ms": predicted * 1e3, "error": predicted / got["seconds"] - 1}
    return row | _memory(seen, held, device, case.recorded(place))


def filled(case: Case, seen: Observed | str, held: float, device: Device, place: str) -> dict[str, Any]:
    if isinstance(seen, str):
        return {"case": case.name, "way": case.way, "measured_gb": held / 1e9, "reason": f"not observed: {seen}"}
    return {"case": case.name, "way": case.way, **_memory(seen, held, device, case.recorded(place))}


def _memory(seen: Observed, held: float, device: Device, recorded: bool) -> dict[str, Any]:
    """Predicted and measured. A graph is recorded on a stream of its own, which has a workspace of its own."""
    if not held:
        return {}
    predicted = seen.peak + device.get("workspace.bytes", 0.0) * (2 if recorded else 1)
    return {"predicted_gb": predicted / 1e9, "measured_gb": held / 1e9, "memory_error": predicted / held - 1}


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """By the way a step ran: how far off."""
    found: dict[str, Any] = {}
    for way in dict.fromkeys(r["way"] for r in rows):
        errors = sorted(abs(r[key]) for r in rows if r["way"] == way and key in r)
        if errors:
            found[way] = {"count": len(errors), "median": statistics.median(errors), "worst": errors[-1]}
    return found


def _observed(case: Case, seen: Observed | str) -> dict[str, Any]:
    """Each distinct op once, with how often it runs."""
    if isinstance(seen, str):
        return {"case": case.name, "reason": seen}
    counts = Counter(seen.ops)
    ops = [{"count": n, "op": type(op).__name__, **asdict(op)} for op, n in counts.items()]
    return {"case": case.name, "peak": seen.peak, "held": seen.held, "issued": dict(seen.issued), "ops": ops}


@dataclass
class Run:
    """What is known so far, told as it comes."""

    profile: Profile
    place: str
    out: str
    processes: int
    ends: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    observed: list[dict[str, Any]] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)

    def tell(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "ran"}), file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        if self.out:
            Path(self.out).write_text(json.dumps({"rows": self.rows, "observed": self.observed, "code": self.code}))

    def gather(self, cases: Sequence[Case], ends: float) -> Iterator[tuple[Case, Child | None, Any, Observed | str]]:
        """Each case once it is both measured and predicted: its process, what it held, what was predicted."""
        lock, device = get_context("spawn").Lock(), self.profile.device
        begin = [partial(Child, work, case, *args) for case in cases
                 for work, args in ((_measured, (self.place, lock)), (_predicted, (self.place, device)))]  # fmt: skip
        known: dict[str, dict[Any, tuple[Child, Any]]] = {}
        for child, said in in_turn(begin, self.processes, ends):
            both = known.setdefault(child.case.name, {})
            both[child.work] = child, said
            if child.work is _predicted:
                child.end()
                self.observed.append(_observed(child.case, said))
            elif not isinstance(said, str) and said[1]:
                self.code[child.case.name] = said[1]
            if len(both) == 2:
                yield child.case, *both[_measured], both[_predicted][1]
        for case in cases:
            both = known.get(case.name, {})
            if len(both) < 2:
                yield case, *both.get(_measured, (None, LATE)), both.get(_predicted, (None, LATE))[1]

    def times(self, cases: Sequence[Case], ends: float) -> None:
        """Some cases at a time: compile them together, then time one after the other."""
        some = max(1, self.processes // 2)
        for first in range(0, len(cases), some):
            self.wave(cases[first : first + some], ends)

    def wave(self, cases: Sequence[Case], ends: float) -> None:
        found = list(self.gather(cases, ends))
        for _, child, got, _ in found:
            if child is not None and isinstance(got, str):
                child.end()  # one that is late must not run beside those that are timed
        for case, child, got, seen in found:
            held = 0.0
            if child is not None and not isinstance(got, str):
                held = got[0]
                child.link.send(True)
                got = child.hear(min(self.ends, time.monotonic() + 30))
            if child is not None:
                child.end()
            self.tell(timed(case, seen, got, held, self.profile.device, self.place))

    def memory(self, cases: Sequence[Case]) -> None:
        for case, child, got, seen in self.gather(cases, self.ends):
            if child is not None:
                child.end()
            if isinstance(got, str):
                self.tell({"case": case.name, "way": case.way, "reason": got})
            else:
                self.tell(filled(case, seen, got[0], self.profile.device, self.place))


def _profile(given: argparse.Namespace, place: str) -> Profile:
    from weft.cluster.calibrate import calibrate
    from weft.cluster.profile import dump, load

    if given.host:
        return _on_host(load(given.profile or "H200"), place, given.out)
    if not given.calibrate:
        return load(given.profile or "H200")
    profile = calibrate(place, progress=lambda what, n, of: print(f"{n}/{of} {what}", file=sys.stderr, flush=True))
    Path(given.profile or "calibrated.json").write_text(json.dumps(dump(profile), indent=1) + "\n")
    return profile


def _on_host(profile: Profile, place: str, out: str) -> Profile:
    """A known device with the host at hand, measured by a process of its own before others are there; kept beside `out` for later runs."""
    from weft.cluster.profile import Constant, dump

    with get_context("spawn").Pool(1) as pool:
        found = pool.apply(_host, (place,))
    print(json.dumps({"host": found}), file=sys.stderr, flush=True)
    host = {key: Constant(value, "measured: the host of this run") for key, value in found.items()}
    made = replace(profile, device=replace(profile.device, constants={**profile.device.constants, **host}))
    if out:
        Path(out).with_suffix(".profile.json").write_text(json.dumps(dump(made), indent=1) + "\n")
    return made


def _host(place: str) -> dict[str, float]:
    from weft.cluster import issue, measure

    return {"host.plain": measure._plain(place), **issue.costs(place)} if place != "cpu" else issue.costs(place)


def main(argv: list[str]) -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="", help="a profile by name or file; the shipped one of an H200 if not given")
    parser.add_argument("--calibrate", action="store_true", help="measure the device first; --profile is then where to write it")
    parser.add_argument("--host", action="store_true", help="measure first what its host needs to issue ops, and predict with that")
    parser.add_argument("--ten", action="store_true", help="time ten models in every way, and a few more as torch runs them")
    parser.add_argument("--small", action="store_true", help="in the smallest sizes there are, to try a run")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--stages", default="time,memory")
    parser.add_argument("--ways", default=",".join(WAYS), help="of the timed cases")
    parser.add_argument("--out", default="", help="also write what was observed, which kernels ran, and compiled code, here")
    parser.add_argument("--processes", type=int, default=min(14, len(os.sched_getaffinity(0))))
    parser.add_argument("--seconds", type=float, default=240.0, help="what is not done by then is left out")
    given = parser.parse_args(argv)
    began = time.monotonic()
    place = "cuda" if torch.cuda.is_available() else "cpu"
    laps = _Clock()
    run = Run(_profile(given, place), place, given.out, given.processes, began + given.seconds)
    laps.lap("calibrate")
    if "time" in given.stages:
        wanted = [
            small(c) if given.small else c for c in (TEN if given.ten else TIMES) if given.only in c.name and c.way in given.ways.split(",")
        ]
        run.times(wanted, began + given.seconds * (0.6 if "memory" in given.stages else 0.8))
        laps.lap("time")
    if "memory" in given.stages:
        run.memory([c for c in reversed(MEMORY) if given.only in c.name])  # compiled ones first
        laps.lap("memory")
    run.write()
    shown = [{k: v for k, v in r.items() if k != "ran"} for r in run.rows]
    result = {
        "bench": "gpu-accuracy", "machine": run.profile.name, "rows": shown, "time": summary(run.rows, "error"),
        "memory": summary(run.rows, "memory_error"), "seconds": laps.laps,
    }  # fmt: skip
    print(json.dumps(result), flush=True)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 1), now


if __name__ == "__main__":
    main(sys.argv[1:])
