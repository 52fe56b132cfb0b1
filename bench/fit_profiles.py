"""Fit the constants of the shipped profiles to tables of others: `python -m bench.fit_profiles KIND --truth FOLDER`.

Rows are cut in two by hash: constants are fitted on one half, errors are printed for both; a table of few rows is fitted whole.
`--leave-out` fits anew on half of the models and clusters and tests on the others, which are then new to it. Logarithms of the
ratio of predicted to measured are made small under a robust loss, with a weak pull towards where the search began.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bench._kernel_rows import in_a_burst
from bench._rows import Row, read
from weft.cluster import collectives
from weft.cluster.collectives import Ranks
from weft.cluster.kernels import matmul
from weft.cluster.profile import FOLDER, Constant, Device, Profile, load
from weft.cluster.spec import Cluster, Nodes

Change = Callable[[Profile, Mapping[str, float]], Profile]
Predict = Callable[[Profile, Any], float]


@dataclasses.dataclass(frozen=True)
class Task:
    """Fit `names` (device constants, or link:constant) so that `predict` meets `measured` on half of the samples."""

    names: tuple[str, ...]
    samples: Sequence[Any]
    measured: Callable[[Any], float]
    predict: Predict
    origin: str
    key: Callable[[Any], str] = str
    most: int = 10**6
    whole: bool = False  # too few samples to be cut in two
    outliers: bool = False  # some samples are not to be met at all
    group: Callable[[Any], str] | None = None


# --- tasks


def gemm_task(truth: Path, code: str, dtype: str, names: tuple[str, ...], kind: str = "bf16") -> Task:
    with open(truth / "matmul_rates.csv") as file:
        rows = [r for r in csv.DictReader(file) if r["device"] == code and r["dtype"] == dtype]

    def sizes(row: Mapping[str, str]) -> tuple[int, int, int, int]:
        return int(row["m"]), int(row["n"]), int(row["k"]), int(row["b"])

    return Task(
        names, rows, lambda r: 2 * prod(sizes(r)) / float(r["flops"]), lambda p, r: matmul(in_a_burst(p).device, *sizes(r), kind),
        f"fitted: half of the rows of openxla's matmul table for {code}, {dtype}",
    )  # fmt: skip


def link_task(truth: Path, code: str, names: tuple[str, ...]) -> Task:
    with open(truth / "collective_rates.csv") as file:
        rows = [r for r in csv.DictReader(file) if r["device"] == code and r["ranks_per_group"] and int(r["bytes"]) >= 65536]

    def size(row: Mapping[str, str]) -> int:
        return int(row["bytes"]) * (int(row["ranks_per_group"]) if row["opcode"] == "reduce-scatter" else 1)

    def predict(profile: Profile, row: Mapping[str, str]) -> float:
        ranks = int(row["ranks_per_group"])
        cluster = Cluster("node", (Nodes(1, profile.node_size, profile),))
        members = (ranks,) + (ranks,) * (len(profile.links) - 1)
        return collectives.seconds(cluster, row["opcode"].replace("-", "_"), size(row), Ranks(members))

    return Task(
        names, rows, lambda r: size(r) / float(r["throughput_Bps"]), predict,
        f"fitted: half of the rows of openxla's collective table for {code}",
    )  # fmt: skip


def row_task(
    file: Path, kind: str, names: tuple[str, ...], origin: str, most: int, whole: bool = False, outliers: bool = False, dense: bool = False
) -> Task:
    rows = [r for r in read(file) if isinstance(r, Row) and r.cluster.device.name == kind and not (dense and (r.shape.experts or r.lora[0]))]
    return Task(names, rows, lambda r: r.measured, lambda p, r: _on(p, r, names), origin, _key, most, whole, outliers, lambda r: r.group)


def pair_task(file: Path, names: tuple[str, ...], origin: str, most: int) -> Task:
    """Rows that differ in data parallelism alone: what they differ by in time is the reduction of gradients."""
    rows = [r for r in read(file) if isinstance(r, Row)]
    alone = {_work(r): r for r in rows if r.setting.replicas == 1}
    pairs = [(alone[_work(r)], r) for r in rows if r.setting.replicas > 1 and _work(r) in alone]
    pairs = [(one, many) for one, many in pairs if many.measured > one.measured]

    def predict(profile: Profile, pair: tuple[Row, Row]) -> float:
        return max(1e-3, _on(profile, pair[1], names) - _on(profile, pair[0], names))

    return Task(names, pairs, lambda p: p[1].measured - p[0].measured, predict, origin, key=lambda p: _key(p[1]), most=most)


def _key(row: Row) -> str:
    s = row.setting
    return f"{row.group} {s.tp} {s.replicas} {s.pp} {s.micro_batch} {s.global_batch}"


def _work(row: Row) -> Any:
    s = row.setting
    return row.shape, s.tp, s.pp, s.micro_batch, s.micro_batches


def _on(profile: Profile, row: Row, names: tuple[str, ...]) -> float:
    """The row predicted with another profile, but with what the row's own device and network differ in."""
    (group,) = row.cluster.groups
    given = load(row.cluster.device.name).device.constants
    own = {k: c for k, c in group.profile.device.constants.items() if k not in names and c != given.get(k)}
    device = Device(profile.name, {**profile.device.constants, **own})
    links = tuple(
        dataclasses.replace(new, constants={**new.constants, "bandwidth": old.constants["bandwidth"]})
        for new, old in zip(profile.links, group.profile.links, strict=True)
    )
    nodes = Nodes(group.count, group.size, dataclasses.replace(profile, device=device, links=links))
    return dataclasses.replace(row, cluster=Cluster(row.cluster.text, (nodes,))).predict()


# --- fitting


def fit(profile: Profile, task: Task) -> tuple[Profile, dict[str, str]]:
    """The profile with the task's constants fitted, and the errors on both halves in words."""
    ours, _ = _halves(task)
    best = fit_to(profile, task, ours)
    return best, both(best, task)


def fit_to(profile: Profile, task: Task, samples: Sequence[Any], pull: float = 0.02) -> Profile:
    """The profile with the task's constants fitted to some of these samples."""
    from scipy.optimize import least_squares

    some = samples[:: max(1, len(samples) // task.most)]
    start = np.log([value(profile, name) for name in task.names])

    def residual(x: Any) -> Any:
        changed = change(profile, dict(zip(task.names, np.exp(x), strict=True)), task.origin)
        errors = [np.log(task.predict(changed, s) / task.measured(s)) for s in some]
        return np.concatenate([errors, pull * (x - start)])

    most = [np.log(min((bound for part, bound in LIMITS.items() if part in name), default=np.inf)) for name in task.names]
    inside = np.minimum(start, np.array(most) - 1e-3)
    loss, scale = ("cauchy", 0.04) if task.outliers else ("soft_l1", 0.1)
    found = least_squares(residual, inside, bounds=(-np.inf, most), loss=loss, f_scale=scale, max_nfev=12)
    return change(profile, dict(zip(task.names, np.exp(found.x), strict=True)), task.origin)


def both(profile: Profile, task: Task) -> dict[str, str]:
    """Errors on the half that was fitted and on the half that was not."""
    return {name: errors(profile, task, part) for name, part in zip(("fitted", "held out"), _halves(task), strict=True) if part}


def _halves(task: Task) -> tuple[list[Any], list[Any]]:
    return (list(task.samples), []) if task.whole else halves(task.samples, task.key)


def left_out(profile: Profile, task: Task) -> list[str]:
    """Fitted on half of the groups, tested on the other half, and the other way round."""
    assert task.group is not None
    names = sorted({task.group(s) for s in task.samples})
    parts = [[s for s in task.samples if names.index(task.group(s)) % 2 == odd] for odd in (0, 1)]
    said = []
    for ours, others in (parts, parts[::-1]):
        best = fit_to(profile, task, ours)
        said.append(f"fitted on {errors(best, task, ours)}; on other models and clusters: {errors(best, task, others)}")
    return said


def halves(samples: Sequence[Any], key: Callable[[Any], str]) -> tuple[list[Any], list[Any]]:
    """By hash, so that the cut does not depend on the order of a file."""
    odd = [int(hashlib.sha1(key(s).encode()).hexdigest(), 16) % 2 for s in samples]
    return [s for s, o in zip(samples, odd, strict=True) if not o], [s for s, o in zip(samples, odd, strict=True) if o]


def errors(profile: Profile, task: Task, samples: Sequence[Any]) -> str:
    found = sorted(abs(task.predict(profile, s) / task.measured(s) - 1) for s in samples)
    return f"{len(found)} rows, median {statistics.median(found):.1%}, 90th percentile {found[int(0.9 * len(found))]:.1%}"


def value(profile: Profile, name: str) -> float:
    link, _, key = name.rpartition(":")
    owner = profile.device if not link else next(x for x in profile.links if x.name == link)
    return owner.get(key) if key in owner.constants else owner.get(key.rpartition(".")[0])  # of a dtype, as of all until it has its own


def change(profile: Profile, values: Mapping[str, float], origin: str) -> Profile:
    """The profile with constants replaced."""
    for name, new in values.items():
        link, _, key = name.rpartition(":")
        made = {key: Constant(float(new), origin)}
        if link:
            links = tuple(dataclasses.replace(x, constants={**x.constants, **made}) if x.name == link else x for x in profile.links)
            profile = dataclasses.replace(profile, links=links)
        else:
            device = dataclasses.replace(profile.device, constants={**profile.device.constants, **made})
            profile = dataclasses.replace(profile, device=device)
    return profile


def save(profile: Profile, path: Path, names: Sequence[str]) -> None:
    """Write fitted constants into the profile's own file, leaving the rest of it as it is."""
    data = json.loads(path.read_text())
    links = {link.name: link for link in profile.links}
    for name in names:
        link, _, key = name.rpartition(":")
        constant = (links[link] if link else profile.device).constants[key]
        plain = {"value": float(f"{constant.value:.4g}"), "origin": constant.origin}
        if not link:
            data["device"][key] = plain
        elif "links" in data:  # else those of the profile it extends
            next(item for item in data["links"] if item["name"] == link)["constants"][key] = plain
    path.write_text(json.dumps(data, indent=1) + "\n")


# --- which constants of which kind are fitted to what

ROWS = "fitted: the A100 iteration times of several nodes (vTrain)"
TRACES = "fitted: half, chosen by hash, of the A100 iteration times of one node (vTrain)"
PAIRS = "fitted: pairs of A100 iteration times (vTrain) that differ in data parallelism alone, half of them by hash"
PUBLISHED = "fitted: half, chosen by hash, of the published H100 steps"
NEWER = "fitted: half, chosen by hash, of the newer published steps of dense models on {}"
LINK = ("nvlink:launch", "nvlink:low_step", "nvlink:bulk", "nvlink:bulk_step", "nvlink:efficiency", "nvlink:small")
# beyond which a constant makes no sense
LIMITS = {"efficiency": 0.97, "small": 0.97, "misaligned": 1.0, "sustained": 1.0, "kernel.launch": 3e-5, "gemm.tile": 1e-5}
SURFACE = ("gemm.efficiency", "gemm.launch", "gemm.tile", "gemm.half")
STEPS = ("memory.efficiency", "gemm.sustained", "network:efficiency")
SUSTAINED = {"H100-steps": "gemm.sustained.fp8", "H200-steps": "gemm.sustained.fp8"}  # of the kinds whose 16 bits have been measured
SERVER = ("gemm.launch", "gemm.misaligned", "kernel.launch", "host.launch", "memory.efficiency")


def tasks(kind: str, truth: Path) -> list[Task]:
    one, several = (truth / f"a100_{n}_node_iterations.csv" for n in ("single", "multi"))
    if kind == "A100":
        return [row_task(several, kind, STEPS, ROWS, most=60, whole=True, outliers=True)]
    if kind == "A100-server":
        return [row_task(one, kind, SERVER, TRACES, most=100, outliers=True)]
    if kind == "A100-links":
        return [pair_task(one, ("nvlink:efficiency", "nvlink:small"), PAIRS, most=60)]
    if kind == "H100":
        return [
            gemm_task(truth, "sm_90", "bf16xbf16->bf16", SURFACE),
            link_task(truth, "sm_90", LINK),
        ]
    if kind == "B200":
        return [gemm_task(truth, "sm_100_B200", "bf16xbf16->bf16", SURFACE), link_task(truth, "sm_100_B200", LINK)]
    if kind == "GB200":
        return [link_task(truth, "sm_100_GB200", (*LINK, "nvlink:low_share"))]
    if kind.endswith("-steps"):
        device = kind.removesuffix("-steps")
        older = [row_task(truth / "published_steps.csv", device, ("gemm.sustained",), PUBLISHED, most=20)] if device == "H100" else []
        newer = row_task(truth / "published_steps_2.csv", device, (SUSTAINED.get(kind, "gemm.sustained"),), NEWER.format(device), most=20, dense=True)
        return [*older, newer]
    raise SystemExit(f"no fit is known for {kind}: A100, A100-server, A100-links, H100, B200, GB200, or a device whose steps were published, as H200-steps")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--truth", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--save", action="store_true", help="write the constants into the shipped profile")
    parser.add_argument("--check", action="store_true", help="fit nothing: errors of the shipped constants on both halves")
    parser.add_argument("--leave-out", action="store_true", help="fit on half of the models and clusters, test on the others")
    given = parser.parse_args(argv)
    profile, names = load(given.kind.removesuffix("-links").removesuffix("-steps")), list[str]()
    for task in tasks(given.kind, given.truth):
        if given.leave_out:
            print(*(left_out(profile, task) if task.group else ()), sep="\n", flush=True)
            continue
        profile, said = (profile, both(profile, task)) if given.check else fit(profile, task)
        names += task.names
        for name in task.names:
            print(f"  {name:22} {value(profile, name):.4g}")
        print(f"  {task.origin}\n    {said}", flush=True)
    if given.save:
        save(profile, FOLDER / f"{profile.name}.json", names)


if __name__ == "__main__":
    main(sys.argv[1:])
