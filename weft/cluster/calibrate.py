"""Measure the machine at hand and write what was found as a profile.

A known device keeps its datasheet constants; for others the best rate seen stands in for the peak. Constants of the matmul
surface and of the links are fitted to the samples by going round the logarithms of one constant after another.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.cluster import collectives as cost
from weft.cluster import kernels, local, measure, passes
from weft.cluster.collectives import Ranks
from weft.cluster.local import Calls, Sent, torch_calls
from weft.cluster.measure import MatmulTime
from weft.cluster.profile import Constant, Device, Link, Profile, load, names
from weft.cluster.spec import Cluster, Nodes, crowded
from weft.core.errors import ClusterError

Progress = Callable[[str, int, int], None]
SURFACE = ("gemm.efficiency", "gemm.launch", "gemm.tile", "gemm.half")
LINK = ("launch", "low_step", "bulk", "bulk_step", "efficiency", "small")
LOCAL = ("launch", "low_step", "bulk", "efficiency", "cost.all_gather", "cost.reduce_scatter", "cost.all_to_all")  # over gloo


def calibrate(
    device: str = "", name: str = "", ranks: Sequence[int] = (), progress: Progress = lambda *_: None, calls: Calls = torch_calls
) -> Profile:
    """The profile of this machine. `ranks` are the numbers of processes between which collectives are timed, `calls` how they are made."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    usable = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if device not in usable:
        raise ClusterError("this kind of device cannot be measured here", needed=" or ".join(usable), found=device)
    base = known(device)
    counts = tuple(ranks) or _usual_ranks(device)
    steps = len(list(measure.samples(device))) + len(counts)
    taken = []
    for n, count in enumerate(counts):  # first, while this process has no context on the device yet
        progress(f"collectives of {count}", n, steps)
        taken += local.collectives(device, count, calls)
    seen = _measure_concurrently(device, progress, len(counts), steps)
    progress("fitting", steps, steps)
    found = _device(device, base, name or _name(device), seen)
    node = max(counts, default=base.node_size if base else 1)
    return Profile(found.name, found, node, _links(base, taken, node))


def _usual_ranks(device: str) -> tuple[int, ...]:
    if device == "cpu":
        return (2, 4)
    count = torch.cuda.device_count()
    return tuple(n for n in (2, 4, 8) if n <= count)


def _measure_concurrently(device: str, progress: Progress, done: int, steps: int) -> list[Any]:
    """Samples of one device; on CPUs taken by as many processes at once as there are cores, as ranks will run."""
    if device == "cpu":
        progress("kernels on every core", done, steps)
        return local.run_ranks(min(2, local.cores()), "cpu", _AllSamples())[0]
    seen = []
    for n, (what, sample) in enumerate(measure.samples(device)):
        progress(what, done + n, steps)
        seen.append(sample())
    return seen


class _AllSamples:
    def __call__(self, rank: int) -> list[Any]:
        return [sample() for _, sample in measure.samples("cpu")]


def known(device: str) -> Profile | None:
    """The shipped profile of this device, if there is one."""
    if device == "cpu":
        return None
    device_name = torch.cuda.get_device_name().upper()
    return next((load(n) for n in sorted(names(), key=len, reverse=True) if n.upper() in device_name), None)


def _name(device: str) -> str:
    return torch.cuda.get_device_name().replace(" ", "-") if device != "cpu" else f"cpu-{platform.machine()}-{local.cores()}"


# --- the device


def _device(device: str, base: Profile | None, name: str, seen: list[Any]) -> Device:
    timed = [s for s in seen if isinstance(s, MatmulTime)]
    got: dict[str, float] = {k: v for s in seen if not isinstance(s, MatmulTime) for k, v in s.items()}
    by = f"measured: weft calibrate, torch {torch.__version__.split('+')[0]}"
    constants = dict(base.device.constants) if base else _unknown(device, timed, by)
    main = "bf16" if device != "cpu" else "fp32"
    peak = constants[f"peak.{main}"].value
    if not base:
        constants["memory.bandwidth"] = Constant(got["rate.memory"], by)
    kernel, step = got["kernel.launch"], got.pop("step.seconds", 0.0)
    stored = {key: got.pop(key) for key in list(got) if key.startswith("scores.")}
    memory = got.pop("rate.memory")
    if "rate.in_place" in got:
        got["memory.in_place"] = min(2.0, max(1.0, got.pop("rate.in_place") / memory))  # a fetch saved of three, and a little
    found = {
        "memory.efficiency": memory / constants["memory.bandwidth"].value,
        "cache.bytes": measure.cached(device), "cache.bandwidth": _less_launch(device, got.pop("rate.cache"), kernel),
        "gemm.misaligned": min(v for k, v in got.items() if k.startswith("gemm.misaligned")),
        **_attention(got, peak, device), **{k: v for k, v in got.items() if not k.startswith("attention")},
    }  # fmt: skip
    constants |= {key: Constant(float(f"{value:.5g}"), by) for key, value in found.items()}
    constants |= {} if device == "cpu" else {"attention.start": START}
    constants |= {key: Constant(start, by) for key, start in zip(SURFACE, (0.8, kernel, 0.2 * kernel, 500.0), strict=True)}
    made = _fit_matmuls(Device(name, constants), timed, main, by)
    made = _with_scores(made, stored, by)
    return _in_a_step(made, step, by) if step else made


def _with_scores(device: Device, stored: Mapping[str, float], by: str) -> Device:
    """With scores a second that attention passes over in memory, besides its matmuls and exponentials."""
    heads = passes.SAMPLES * passes.HEADS
    count = heads * passes.KEYS**2
    one = kernels.matmul(device, passes.KEYS, passes.KEYS, passes.WIDTH, heads, "fp32")
    rates = {}
    for key, seconds in stored.items():
        matmuls, hard = (5, 1) if key.endswith("backward") else (2, 2)
        rates[f"rate.{key}"] = count / max(seconds - matmuls * one - hard * count / device.get("rate.exp"), 0.1 * seconds)
    return Device(device.name, {**device.constants, **{k: Constant(float(f"{v:.4g}"), by) for k, v in rates.items()}})


def _in_a_step(device: Device, step: float, by: str) -> Device:
    """With what matmuls lose among other ops, of a step whose other ops are priced: cold caches, new memory, the calls themselves."""
    rows, width = measure.ROWS, measure.WIDTH
    large, small = 4 * width * rows, width * rows
    sizes = ((rows, 4 * width, width), (rows, width, 4 * width), (4 * width, width, rows))
    matmuls = measure.DEPTH * 2 * sum(kernels.matmul(device, *shape, 1, "fp32") for shape in sizes)
    rates = {"gelu": large, "gelu_backward": large, "layer_norm": small, "layer_norm_backward": small, "sum": large + small}
    others = sum(elements / device.get(f"rate.{op}") for op, elements in rates.items())
    others += 2 * kernels.memory_bound(device, 12.0 * small, 1)  # residuals
    others += kernels.memory_bound(device, 28.0 * 8 * width * width, 1)  # the update
    share = matmuls / max(step - measure.DEPTH * others, matmuls)
    return Device(device.name, {**device.constants, "gemm.sustained": Constant(float(f"{max(0.5, share):.4g}"), by)})


START = Constant(2.0, "assumed: as seen of cuDNN's attention on an H200, tiles of keys that a tile of queries costs before its first")


def _attention(got: Mapping[str, float], peak: float, device: str) -> dict[str, float]:
    """Shares of the peak with wide heads, and how the rate falls with narrow ones."""
    wide, narrow = got["attention.forward.128"], got["attention.forward.64"]
    tiles = Device("tiles", {"units": Constant(1.0 if device == "cpu" else 2.0, START.origin), "attention.start": START})
    met = float(kernels.tiles_of_keys(tiles, measure.KEYS, measure.KEYS, True, 0)[1]) + (0.0 if device == "cpu" else START.value)
    more = met / (measure.KEYS / kernels.TILE / 2)
    halves = {direction: _half(got[f"attention.{direction}.64"], got.get(f"attention.{direction}.short", 0.0)) for direction in ("forward", "backward")}
    shares = {f"attention.{direction}": got[f"attention.{direction}.128"] / peak * more * (1 + half / measure.LONG) for direction, half in halves.items()}
    known = {f"attention.{direction}.half": half for direction, half in halves.items() if half}
    return {**shares, **known, "attention.narrow": math.log2(max(1e-3, wide / max(narrow, 1.0)))}


def _half(long: float, short: float) -> float:
    """Keys over which attention runs at half its rate, from the rates over many and over few: rate ~ keys / (keys + half)."""
    if not 0 < short < long:
        return 0.0
    each = (1 / short - 1 / long) / (1 / measure.SHORT - 1 / measure.LONG)
    return each / max(1 / long - each / measure.LONG, 0.1 / long)


def _less_launch(device: str, rate: float, kernel: float) -> float:
    """The rate of a cached pass without the launch it was timed with."""
    size = measure.cached(device)
    return size / max(size / rate - kernel, 0.2 * size / rate)


def _unknown(device: str, timed: Sequence[MatmulTime], by: str) -> dict[str, Constant]:
    """What a datasheet would say, from the best that was seen."""
    rates = {d: max((p.flops / p.seconds for p in timed if p.dtype == d), default=0.0) for d in measure.DTYPES}
    best = max(rates.values())
    how = f"{by}; the best matmul seen is taken for nine tenths"
    constants = {f"peak.{d}": Constant((r or best) / 0.9, how) for d, r in rates.items()}
    size = torch.cuda.get_device_properties(0).total_memory if device != "cpu" else _memory() / local.cores()
    units = torch.cuda.get_device_properties(0).multi_processor_count if device != "cpu" else 1
    return constants | {
        "memory.bytes": Constant(float(size), by), "units": Constant(float(units), by), "cores": Constant(float(local.cores()), by),
    }  # fmt: skip


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _fit_matmuls(device: Device, timed: Sequence[MatmulTime], main: str, by: str) -> Device:
    """The surface on the main dtype; one efficiency for each other."""
    burst = {"gemm.sustained": Constant(1.0, by)}

    def predict(values: Mapping[str, float], p: MatmulTime) -> float:
        made = Device(device.name, {**device.constants, **burst, **{k: Constant(v, by) for k, v in values.items()}})
        return kernels.matmul(made, p.m, p.n, p.k, p.batch, p.dtype)

    ours = [p for p in timed if p.dtype == main]
    found = descend({k: device.get(k) for k in SURFACE}, ours, predict, lambda p: p.seconds)
    for dtype in {p.dtype for p in timed} - {main}:
        key = f"gemm.efficiency.{dtype}"
        some = [p for p in timed if p.dtype == dtype]
        only = descend({key: 0.8}, some, lambda v, p: predict({**found, **v}, p), lambda p: p.seconds)  # noqa: B023
        found |= only
    fitted = {k: Constant(float(f"{v:.4g}"), by.replace("measured", "fitted", 1)) for k, v in found.items()}
    return Device(device.name, {**device.constants, **fitted})


# --- the links


def _links(base: Profile | None, taken: Sequence[Sent], node: int) -> tuple[Link, ...]:
    if not taken:
        return base.links if base else (_first_guess(1e9, node),)
    own = node if base else local.cores()  # ranks that share cores take turns, which is not the link's doing
    fastest = max(s.size * cost.wire(s.kind, s.ranks) / s.seconds * max(1.0, s.ranks / own) for s in taken)
    start = base.links[0] if base else _first_guess(fastest, node)
    start = dataclasses.replace(start, span=node)
    by = "fitted: weft calibrate, collectives between local ranks"
    cores = {} if base else {"cores": Constant(float(local.cores()), "measured: what this process may run on")}

    def predict(values: Mapping[str, float], sent: Sent) -> float:
        link = dataclasses.replace(start, constants={**start.constants, **{k: Constant(v, by) for k, v in values.items()}})
        profile = crowded(Profile("local", Device("local", cores), node, (link,)), sent.ranks)
        return cost.seconds(Cluster("local", (Nodes(1, node, profile),)), sent.kind, sent.size, Ranks((sent.ranks,)))

    found = descend({k: start.get(k) for k in (LINK if base else LOCAL)}, taken, predict, lambda s: s.seconds)
    fitted = {k: Constant(float(f"{v:.4g}"), by) for k, v in found.items()}
    link = dataclasses.replace(start, constants={**start.constants, **fitted})
    return (link, *base.links[1:]) if base else (link,)


def _first_guess(bandwidth: float, node: int) -> Link:
    guess = "assumed: where the fit began"
    values = {
        "efficiency": 0.8, "small": 0.0, "launch": 1e-4, "low": 0.0, "low_step": 1e-5, "low_share": 0.5, "bulk": 1e-5, "bulk_step": 0.0,
        "cost.all_gather": 1.0, "cost.reduce_scatter": 1.0, "cost.all_to_all": 1.0,
    }  # fmt: skip
    constants = {key: Constant(value, guess) for key, value in values.items()}
    best = Constant(bandwidth / 0.8, "measured: the fastest collective seen, taken for eight tenths")
    return Link("local", node, {**constants, "bandwidth": best})


# --- fitting without a solver


def descend(
    start: Mapping[str, float], samples: Sequence[Any], predict: Callable[[Mapping[str, float], Any], float],
    measured: Callable[[Any], float], rounds: int = 40,
) -> dict[str, float]:  # fmt: skip
    """Make the mean absolute logarithm of predicted over measured small, one constant at a time, in shrinking steps."""
    best = dict(start)

    def loss(values: Mapping[str, float]) -> float:
        return sum(abs(math.log(predict(values, s) / measured(s))) for s in samples) / len(samples)

    least, step = loss(best), 0.7
    for _ in range(rounds):
        before = least
        for key in best:
            for factor in (math.exp(step), math.exp(-step)):
                tried = {**best, key: min(best[key] * factor, 0.97) if "efficiency" in key or key == "small" else best[key] * factor}
                found = loss(tried)
                if found < least:
                    best, least = tried, found
        if least > before - 1e-5:
            step *= 0.6
        if step < 1e-3:
            break
    return best
