"""Fit the constants of kernels of the shipped profiles to tables of others: `python -m bench.fit_kernels DEVICE --rows FOLDER [--save]`.

Rows are cut in two by hash: constants are fitted on one half, errors are printed for both. What is made small is the mean absolute logarithm of
predicted over measured, large errors counting half as much again, classes of rows counting alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from bench._kernel_rows import Table, profile_of, tables
from bench.fit_profiles import change, save
from bench.kernels import summary
from weft.cluster.profile import FOLDER, Profile

GEMM = {
    "launch": 2.5e-6, "tile": 3e-7, "efficiency": 0.83, "half": 400.0, "memory": 0.85, "unit": 1.3e11, "cache": 1e14, "split": 2.5e-6,
    "whole": 0.8, "joined": 3.0,
}  # fmt: skip
FP8 = {
    "launch": 5e-6, "tile": 1e-7, "efficiency": 0.8, "half": 200.0, "memory": 0.9, "unit": 1.7e11, "cache": 8e12, "write": 0.7, "whole": 0.75,
    "joined": 3.0,
}  # fmt: skip
TF32 = {"efficiency": 0.8, "half": 400.0, "tile": 4e-7, "launch": 4e-6, "memory": 0.8, "unit": 1.5e11}
QUANTISE = {"quantise.row": 7e-9, "quantise.memory": 0.45, "quantise.length": 2.6e-10}
CONTEXT = {
    "context.launch": 9e-6, "context.forward": 0.6, "context.narrow": 0.5, "context.wide": 0.05, "context.start": 0.5,
    "context.memory": 0.35, "context.latency": 1e-6,
}  # fmt: skip
DECODE = {"decode.launch": 9e-6, "decode.memory": 0.6, "decode.key": 1e-9, "decode.row": 1e-9}
EXPERTS = {
    "launch": 3e-5, "tile": 5e-7, "efficiency": 0.65, "half": 1000.0, "memory": 0.85, "unit": 1e11, "cache": 1e14, "whole": 0.8, "joined": 3.0, "row": 1e-9,
}  # fmt: skip
LINK = {
    "launch": 5e-6, "low_step": 8e-7, "low_share": 0.1, "mid": 2e-6, "mid_step": 8e-7, "mid_share": 0.5, "bulk": 1.5e-5, "bulk_step": 1e-6,
    "efficiency": 0.8, "small": 0.4, "all_to_all": 1.7e-6, "all_to_all_step": 4e-7, "in_switch": 1.02, "cost.all_reduce": 1.0,
}  # fmt: skip
TOKENS = {"nvlink:tokens": 3e-5, "nvlink:tokens.share": 0.6}
SHARES = ("efficiency", "memory", "share", "small", "whole", "write", "forward")  # at most 1


def start_of(table: Table) -> dict[str, float] | None:
    """Constants to fit to a table, from where the search begins."""
    if table.kind == "GEMM":
        return {f"gemm.{k}": v for k, v in GEMM.items()} if table.dtype == "bf16" else {f"gemm.{k}.fp8": v for k, v in FP8.items()} | QUANTISE
    if table.kind == "GEMM (openxla)":
        return {f"gemm.{k}.tf32": v for k, v in TF32.items()} if table.dtype == "tf32" else None
    if table.kind == "experts":
        return {f"experts.{k}.{table.dtype}": v for k, v in EXPERTS.items()} | ({"experts.skew": 0.3} if table.dtype == "bf16" else {})
    if table.kind == "collective":
        return {f"nvlink:{k}": v for k, v in LINK.items()}
    if table.kind == "tokens to experts":
        return TOKENS
    found = {"attention": CONTEXT, "attention, one token": DECODE}.get(table.kind)
    return {f"{k}.fp8": v for k, v in found.items()} if found and table.dtype == "fp8" else found  # of a cache in 8 bits


def fit(profile: Profile, table: Table, start: Mapping[str, float], rounds: int = 2, steps: int = 900) -> Profile:
    """The profile with the constants that fit the first half of a table best."""
    ours, _ = table.halves()
    labels = np.array([table.label(r) for r in ours.rows])
    share = {name: (labels == name).mean() for name in set(labels)}
    weights = np.array([1 / (share[x] * len(share)) for x in labels])
    names, measured = list(start), ours.measured
    most = np.array([0.0 if name.removesuffix(f".{table.dtype}").endswith(SHARES) or ".memory" in name or ".efficiency" in name else np.inf for name in names])
    owner = "openxla" if "openxla" in table.kind else "aiconfigurator"
    origin = f"fitted: half, by hash, of {owner}'s table of {table.kind.removesuffix(' (openxla)')} kernels on {table.device}, {table.dtype}"

    def made(x: Any) -> Profile:
        return change(profile, dict(zip(names, np.exp(np.minimum(x, most)), strict=True)), origin)

    def loss(x: Any) -> float:
        error = np.abs(np.log(table.predict(made(x), ours.rows) / measured))
        return float((weights * (error + 0.5 * np.maximum(error - 0.1, 0))).mean()) + 1e-3 * float(np.maximum(x - most, 0).sum())

    x = np.log(list(start.values()))
    for _ in range(rounds):
        x = minimize(loss, x, method="Nelder-Mead", options={"maxiter": steps, "maxfev": steps, "adaptive": True}).x
    return made(x)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("--rows", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--kind", default="", help="only tables of this kind")
    parser.add_argument("--save", action="store_true", help="write the constants into the shipped profile")
    given = parser.parse_args(argv)
    profile, fitted = profile_of(given.device), list[str]()
    assert profile is not None
    for table in tables(given.rows):
        start = start_of(table) if table.device == given.device and (not given.kind or table.kind == given.kind) else None
        if start is None:
            continue
        profile = fit(profile, table, start)
        fitted += start
        for part, half in zip(("fitted", "held out"), table.halves(), strict=True):
            for r in summary(half, profile):
                print(f"  {part:9} {r['kind']} {r['dtype']} {r['class']}: {r['count']} rows, {r['median']:.1%} / {r['p90']:.1%} / {r['bias']:+.1%}", flush=True)
    if given.save:
        save(profile, FOLDER / f"{profile.name}.json", fitted)


if __name__ == "__main__":
    main(sys.argv[1:])
