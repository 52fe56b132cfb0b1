"""`weft bench physics`: random settings of a step, each simulated as it is and with something made better: it must never get slower.

More bandwidth, more flops or overlap switched on must not slow a step, picks of experts that fall unevenly must neither speed it up nor save memory, and
no step is shorter than its flops at the peak.
"""

from __future__ import annotations

import dataclasses
import platform
import random
from collections.abc import Callable, Iterator
from typing import Any

import typer

from weft.cli.output import console, emit
from weft.cluster.profile import Constant
from weft.cluster.spec import Cluster, cluster
from weft.core.errors import WeftError
from weft.plan.planner import sized_stack
from weft.plan.setting import Setting
from weft.plan.simulate import SimulatedStep, simulate
from weft.plan.sizes import Shape

CLUSTERS = ("1x8xA100", "2x8xH100", "4x8xH100", "1x8xV100", "2x8xB200", "8x8xH200", "1x8xRTX4090", "2x8xMI300X")
OVERLAPS = ("overlap_grads", "overlap_params", "overlap_sends")
SLACK = 1e-6  # relative: sums of floats in another order


def register(app: typer.Typer) -> None:
    app.command("physics")(physics)


def physics(
    count: int = typer.Option(200, "--count", min=1, help="Settings to draw."),
    seed: int = typer.Option(0, "--seed"),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Draw settings and look for one that a better device, link or overlap makes slower."""
    found = [broken for shape, setting, place in draw(count, random.Random(seed)) for broken in check(shape, setting, place)]
    console.print(f"{count} settings, {len(found)} broken")
    for broken in found[:20]:
        console.print(broken)
    if json:
        emit({"bench": "physics", "machine": platform.processor() or platform.machine(), "settings": count, "broken": len(found), "rows": found})


def draw(count: int, rng: random.Random) -> Iterator[tuple[Shape, Setting, Cluster]]:
    """Settings that fill their cluster."""
    while count:
        place = cluster(rng.choice(CLUSTERS))
        tp, pp, cp = rng.choice((1, 1, 2, 4, 8)), rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 1, 2))
        if place.devices % (tp * pp * cp):
            continue
        dp, heads = place.devices // (tp * pp * cp), rng.choice((16, 32))
        shape = Shape(rng.choice((8, 16, 24)), heads * 64, heads, rng.choice((32000, 50257)), rng.choice((512, 1024, 2047, 4096)), gated=rng.random() < 0.5)
        zero, micro, ep = rng.randrange(4), rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 4, 8))
        shape = dataclasses.replace(shape, experts=8 * (ep > 1), chosen=2 if ep > 1 else shape.chosen)
        try:
            setting = Setting.counted(
                dp * micro * rng.choice((1, 2, 4, 8)) * pp, micro, dp, tp, pp, cp, ep, zero=zero, ragged_ep=ep > 1 and rng.random() < 0.5,
                keep_gathered=zero == 3 and rng.random() < 0.3,
                recompute=rng.choice(("none", "selective", "full")), sequence_parallel=tp > 1 and rng.random() < 0.5,
                dtype="fp16" if "V100" in place.text else "bf16", schedule=rng.choice(("1f1b", "gpipe")) if pp > 1 else "1f1b",
                **{name: rng.random() < 0.5 for name in OVERLAPS},
            )  # fmt: skip
        except WeftError:
            continue
        count -= 1
        yield shape, setting, place


def check(shape: Shape, setting: Setting, place: Cluster) -> Iterator[dict[str, Any]]:
    """What a setting breaks."""
    step = _step(shape, setting, place)
    for name in OVERLAPS:
        off, on = (_step(shape, dataclasses.replace(setting, **{name: flag}), place).seconds for flag in (False, True))
        if on > off * (1 + SLACK):
            yield _told(setting, place, f"{name} switched on", off, on)
    for name, better in BETTER.items():
        faster = _step(shape, setting, better(place)).seconds
        if faster > step.seconds * (1 + SLACK):
            yield _told(setting, place, name, step.seconds, faster)
    uneven = _step(shape, dataclasses.replace(setting, imbalance=1.3), place)
    if uneven.seconds < step.seconds * (1 - SLACK) or uneven.peak_memory.total < step.peak_memory.total * (1 - SLACK):
        yield _told(setting, place, "picks that fall unevenly", step.seconds, uneven.seconds)
    if step.seconds < step.model_flops / step.peak_flops:
        yield _told(setting, place, "faster than its flops", step.model_flops / step.peak_flops, step.seconds)


def _step(shape: Shape, setting: Setting, place: Cluster) -> SimulatedStep:
    return simulate(sized_stack(shape, setting.dtype).work(setting), setting, place)


def _told(setting: Setting, place: Cluster, why: str, before: float, after: float) -> dict[str, Any]:
    return {"why": why, "cluster": place.text, "setting": str(setting), "before_ms": before * 1e3, "after_ms": after * 1e3}


def _device(*beginnings: str) -> Callable[[Cluster], Cluster]:
    """A cluster whose devices have more of what begins so."""

    def better(place: Cluster) -> Cluster:
        groups = []
        for group in place.groups:
            device = group.profile.device
            more = {k: Constant(1.3 * c.value, c.origin) for k, c in device.constants.items() if k.startswith(beginnings)}
            device = dataclasses.replace(device, constants={**device.constants, **more})
            groups.append(dataclasses.replace(group, profile=dataclasses.replace(group.profile, device=device)))
        return dataclasses.replace(place, groups=tuple(groups))

    return better


def _links(place: Cluster) -> Cluster:
    groups = []
    for group in place.groups:
        links = tuple(
            dataclasses.replace(x, constants={**x.constants, "bandwidth": Constant(1.3 * x.get("bandwidth"), "assumed")}) for x in group.profile.links
        )
        groups.append(dataclasses.replace(group, profile=dataclasses.replace(group.profile, links=links)))
    return dataclasses.replace(place, groups=tuple(groups))


BETTER = {"more flops": _device("peak."), "more memory bandwidth": _device("memory.bandwidth"), "more bandwidth of links": _links}
