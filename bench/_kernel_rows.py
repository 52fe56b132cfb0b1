"""Tables of measured kernels, read into arrays: products, collectives, attention, layers of experts, tokens sent to them. Each can be predicted from a profile.

The columns are those of aiconfigurator's tables as restated in the folder that `weft bench kernels --rows` is given, and of openxla's.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster import collectives, kernels
from weft.cluster.collectives import Ranks
from weft.cluster.profile import Constant, Profile, load
from weft.cluster.spec import Cluster, Nodes
from weft.core.errors import UnknownName

Cells = Mapping[str, str]
KB64, MB16 = 1 << 16, 1 << 24
BURST = Constant(1.0, "measured: single kernels keep their clocks")
SKEW = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
NOT_GATED = {("2688", "1856")}  # hidden and inner size of experts of two products; latent experts are of inner size 2688


@dataclass(frozen=True)
class Table:
    """Rows of one kind, device and dtype."""

    kind: str
    device: str
    dtype: str
    rows: Sequence[Cells]
    predict: Callable[[Profile, Sequence[Cells]], Any]  # seconds of every row
    seconds: Callable[[Cells], float]
    label: Callable[[Cells], str]

    @property
    def measured(self) -> Any:
        return np.array([self.seconds(r) for r in self.rows])

    def only(self, rows: Sequence[Cells]) -> Table:
        return dataclasses.replace(self, rows=rows)

    def halves(self) -> tuple[Table, Table]:
        """By hash, so that the cut does not depend on the order of a file: one to fit on, one that is held out."""
        odd = [hashlib.sha1(repr(sorted(r.items())).encode()).digest()[0] % 2 for r in self.rows]
        return tuple(self.only([r for r, o in zip(self.rows, odd, strict=True) if o == part]) for part in (0, 1))  # type: ignore[return-value]


def tables(folder: Path) -> Iterator[Table]:
    """Every table of a folder that is there."""
    for name, read in READERS.items():
        if (folder / name).exists():
            with open(folder / name, newline="") as file:
                yield from read(list(csv.DictReader(file)))


def profile_of(device: str) -> Profile | None:
    try:
        profile = load({"sm_90": "H100", "sm_80": "A100"}.get(device, device.removeprefix("sm_100_")))
    except UnknownName:
        return None
    return in_a_burst(profile)


def in_a_burst(profile: Profile) -> Profile:
    """As tables of single kernels see it: they say nothing of the clocks a device keeps through a training step."""
    constants = {name: BURST if name.startswith("gemm.sustained") else c for name, c in profile.device.constants.items()}
    return dataclasses.replace(profile, device=dataclasses.replace(profile.device, constants=constants))


def _by(rows: Sequence[Cells], *columns: str) -> Iterator[tuple[tuple[str, ...], list[Cells]]]:
    for key in sorted({tuple(r[c] for c in columns) for r in rows}):
        yield key, [r for r in rows if tuple(r[c] for c in columns) == key]


def _numbers(rows: Sequence[Cells], *columns: str) -> list[Any]:
    return [np.array([float(r[c]) for r in rows]) for c in columns]


def _microseconds(row: Cells) -> float:
    return float(row["us"]) * 1e-6


# --- products


def _products(rows: list[Cells]) -> Iterator[Table]:
    for (device, dtype), some in _by(rows, "device", "dtype"):
        yield Table("GEMM", device, dtype, some, _product, _microseconds, _size_of_product)


def _product(profile: Profile, rows: Sequence[Cells]) -> Any:
    (m, n, k), dtype = _numbers(rows, "m", "n", "k"), rows[0]["dtype"]
    found = kernels.matmul(profile.device, m, n, k, 1, dtype)
    return found + kernels.quantise(profile.device, m, k) if dtype == "fp8" else found


def _size_of_product(row: Cells) -> str:
    m, n, k = (int(row[c]) for c in ("m", "n", "k"))
    if m <= 64:
        return "at most 64 rows"
    return "odd rows" if m % 2 else "large" if min(m, n, k) >= 1024 else "middle"


RATES = {"bf16xbf16->bf16": "bf16", "f32xf32->f32": "tf32", "f8e4m3fnxf8e4m3fn->bf16": "fp8"}


def _rates(rows: list[Cells]) -> Iterator[Table]:
    for (device, name), some in _by(rows, "device", "dtype"):
        if name in RATES and profile_of(device):
            dtype = RATES[name]
            yield Table("GEMM (openxla)", device, dtype, some, lambda p, r, dtype=dtype: _rate(p, r, dtype), _of_rate, _size_of_product)


def _rate(profile: Profile, rows: Sequence[Cells], dtype: str) -> Any:
    """Single calls, with the gap before each."""
    gap = profile.device.get("kernel.launch")
    return np.array([gap + kernels.matmul(profile.device, *(int(r[c]) for c in ("m", "n", "k", "b")), dtype) for r in rows])


def _of_rate(row: Cells) -> float:
    return 2 * float(row["b"]) * float(row["m"]) * float(row["n"]) * float(row["k"]) / float(row["flops"])


# --- collectives


def _collectives(rows: list[Cells]) -> Iterator[Table]:
    for (device,), some in _by(rows, "device"):
        yield Table("collective", device, "any", some, _collective, _microseconds, lambda r: _size_of_message(float(r["bytes"])))


def _collective(profile: Profile, rows: Sequence[Cells]) -> Any:
    place = Cluster("node", (Nodes(1, profile.node_size, profile),))
    ranks = {n: Ranks((n,) * len(profile.links)) for n in {int(r["gpus"]) for r in rows}}
    return np.array([collectives.seconds(place, r["op"], float(r["bytes"]), ranks[int(r["gpus"])]) for r in rows])


def _size_of_message(size: float) -> str:
    return "up to 64 KB" if size <= KB64 else "64 KB to 16 MB" if size <= MB16 else "above 16 MB"


# --- attention


def _context(rows: list[Cells]) -> Iterator[Table]:
    for (device, dtype), some in _by(rows, "device", "kv_cache_dtype"):
        yield Table("attention", device, dtype, some, _attention, _microseconds, lambda r: "window" if int(r["window_size"]) else "causal")


def _attention(profile: Profile, rows: Sequence[Cells]) -> Any:
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "window_size")
    batch, length, heads, shared, width, window = _numbers(rows, *names)
    kept = rows[0]["kv_cache_dtype"]
    size = batch * length * width * (4 * heads + 4 * shared * (1 + kernels.WIDTH[kept]))  # queries and results; keys and values read, kept and read again
    found = kernels.attention(profile.device, batch, heads, length, length, width, size, "bf16", window=window, kind="context", kept=kept)
    return np.where(length > 1, found, np.minimum(found, kernels.decode(profile.device, batch, heads, shared, length, width, kept)))  # the better


def _generation(rows: list[Cells]) -> Iterator[Table]:
    for (device, dtype), some in _by(rows, "device", "kv_cache_dtype"):
        yield Table("attention, one token", device, dtype, some, _one_token, _microseconds, lambda r: "window" if int(r["window_size"]) else "all keys")


def _one_token(profile: Profile, rows: Sequence[Cells]) -> Any:
    names = ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "window_size")
    batch, step, heads, shared, width, window = _numbers(rows, *names)
    keys = np.where(window > 0, np.minimum(window, step + 1), step + 1)
    return kernels.decode(profile.device, batch, heads, shared, keys, width, rows[0]["kv_cache_dtype"])


# --- experts


def _layers_of_experts(rows: list[Cells]) -> Iterator[Table]:
    for (device, dtype), some in _by(rows, "device", "dtype"):
        yield Table("experts", device, dtype, some, _experts, _microseconds, lambda r: r["distribution"])


def _experts(profile: Profile, rows: Sequence[Cells]) -> Any:
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    tokens, hidden, inner, top, count, tp, ep = _numbers(rows, *names)
    gated = np.array([(r["hidden_size"], r["inter_size"]) not in NOT_GATED and r["inter_size"] != "2688" for r in rows])
    skew = np.array([SKEW[r["distribution"]] for r in rows])
    return kernels.experts(profile.device, tokens, hidden, inner / tp, top, count, ep, rows[0]["dtype"], gated, skew)


# --- tokens sent to experts


def _sent_tokens(rows: list[Cells]) -> Iterator[Table]:
    """Each by as many multiprocessors as serve it best; modes for few tokens at once, which send one for each expert, are left out."""
    for (device,), some in _by([r for r in rows if r["mode"] == "normal"], "device"):
        best = [min(same, key=lambda r, way=way: float(r[f"{way}_us"])) | {"way": way} for way in ("dispatch", "combine")
                for _, same in _by(some, "num_token", "hidden_size", "num_topk", "num_experts")]  # fmt: skip
        yield Table("tokens to experts", device, "any", best, _tokens, lambda r: float(r[f"{r['way']}_us"]) * 1e-6, lambda r: r["way"])


def _tokens(profile: Profile, rows: Sequence[Cells]) -> Any:
    place = Cluster("node", (Nodes(1, profile.node_size, profile),))
    ranks = Ranks((int(rows[0]["gpus"]),) * len(profile.links))
    each = zip(*_numbers(rows, "num_token", "hidden_size", "num_topk"), (1 if r["way"] == "dispatch" else 2 for r in rows), strict=True)
    return np.array([collectives.seconds(place, "all_to_all", n * h * k * width, ranks, int(k)) for n, h, k, width in each])


READERS: dict[str, Callable[[list[Cells]], Iterator[Table]]] = {
    "kernels_gemm.csv": _products,
    "matmul_rates.csv": _rates,
    "kernels_nccl.csv": _collectives,
    "kernels_attention_context.csv": _context,
    "kernels_attention_generation.csv": _generation,
    "kernels_moe.csv": _layers_of_experts,
    "kernels_deepep.csv": _sent_tokens,
}
