"""Rows of measured and published runs, read into a model, a setting and a cluster. What a row leaves out is assumed, and said.

Two formats: iteration times of GPT models (`# GPUs`, `hidden size`, ...), and published throughput (`source`, `gpu`, ...).
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench._blanks import Blanks, Cells, device_kind, stated_size
from bench._experts import recomputed, with_experts
from bench._hybrid import hybrid
from bench._layers import Counted, Sized
from bench._lora import adapters
from weft.cluster.profile import Constant, Profile, load
from weft.cluster.spec import Cluster, Nodes, _with_network
from weft.core.errors import UnknownName, WeftError
from weft.cost.memory import RESIDENT
from weft.plan.blocks import Stack
from weft.plan.planner import sized_stack
from weft.plan.search import Search
from weft.plan.setting import Setting
from weft.plan.simulate import SimulatedStep, held, simulate
from weft.plan.space import PlanProblem


@dataclass(frozen=True)
class Row:
    """One run: what was run, where, what was measured, and how a predicted step is turned into the same measure."""

    case: str
    group: str
    shape: Counted
    setting: Setting
    cluster: Cluster
    measured: float
    metric: Callable[[SimulatedStep], float]
    unit: str
    assumed: Mapping[str, str]
    lacks: str = ""  # why there is nothing to compare with
    faster: bool = False  # whether the measure grows as the step gets shorter
    held: float = 0.0  # bytes of the fullest device, where they were measured
    beside: tuple[str, ...] = ()  # what the run had that is not modelled
    stages: tuple[int, ...] = ()  # layers of each, where the run says
    rerun: int = 0  # layers that are recomputed, where the run says that some are
    lora: tuple[int, str] = (0, "")  # rank of adapters and the layers that have them, where only these are trained

    def predict(self) -> float:
        return self.metric(self.step())

    def step(self) -> SimulatedStep:
        if self.stages:
            problem = PlanProblem(self.stack, self.cluster, self.setting.global_batch, self.setting.dtype, self.setting.kernels)
            return Search(problem).step(self.setting.with_layers(self.stages))
        work = self.stack.work(self.setting)
        if self.rerun:
            work = dataclasses.replace(work, others=(*work.others, (dataclasses.replace(work.layer, again="full"), self.rerun)))
        return simulate(work, self.setting, self.cluster)

    @property
    def stack(self) -> Stack | Sized:
        adapt = adapters(*self.lora) if self.lora[0] else None
        return self.shape if isinstance(self.shape, Sized) else sized_stack(self.shape, self.setting.dtype, adapt)


@dataclass(frozen=True)
class Unreadable:
    case: str
    reason: str


def read(path: str | Path) -> list[Row | Unreadable]:
    """Every row of a file, in order."""
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        lines = csv.reader(file)
        names = [name.strip() for name in next(lines, [])]
        return [_row(dict(zip(names, cells, strict=False)), f"{Path(path).stem}:{lines.line_num}") for cells in lines if cells]


def _row(cells: Cells, case: str) -> Row | Unreadable:
    """A row by the columns it has."""
    try:
        if not cells.keys() & {"source", "gpus", "# GPUs", "iteration time (ms)"}:
            raise ValueError(f"neither format has the columns {', '.join(cells)}")
        if "peak_mem_bytes" in cells:
            return _measured_with_memory(cells, case)
        return _published(cells, case) if cells.keys() & {"source", "gpus"} else _iteration(cells, case)
    except (ValueError, WeftError) as error:
        return Unreadable(_case(cells, case), str(error).splitlines()[0])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        return Unreadable(_case(cells, case), f"{type(error).__name__}: {error}")


def _case(cells: Cells, case: str) -> str:
    return f"{case} {(cells.get('source') or '').strip()}".strip()


# --- iteration times of GPT models


def _iteration(cells: Cells, case: str) -> Row:
    b = Blanks(cells, {"kernels": "Megatron of 2021: scores in memory, fused pointwise, fp16"})
    tp, pp = b.integer("tensor parallelism", 1), b.integer("pipeline parallelism", 1)
    gpus = b.devices("# GPUs", ("tensor parallelism", "pipeline parallelism", "data parallelism"))
    layers, hidden = b.sizes("# layers", "hidden size", f"{cells.get('Parameters (billion)') or ''}B")
    micro, dp = b.integer("micro batch", 1), b.copies("data parallelism", gpus, tp * pp)
    shape = Counted(layers, hidden, b.heads("attention heads", hidden, tp), WORDS, b.integer("sequence length", 2048), dropout=True)
    setting = Setting.counted(b.batch("global batch", dp, micro, pp), micro, dp, tp, pp, **CLASSIC)
    profile = _iterated_on(b, gpus)
    if gpus > profile.node_size:
        shape = dataclasses.replace(shape, vocab=_padded(WORDS, setting.tp))
        b.assumed["vocab"] = f"{WORDS} padded to a multiple of 128 x tp: {shape.vocab}"
    else:
        shape = dataclasses.replace(shape, vocab=WORDS // setting.tp * setting.tp)
        b.assumed["vocab"] = f"{WORDS}, not padded, {WORDS // setting.tp} on each rank: as the publisher's own model shards it"
    setting, b.assumed["recompute"] = _with_recompute(shape, setting, profile)
    cluster = Cluster(f"{gpus}x{profile.name}", (_nodes(gpus, profile),))
    group = f"{shape.layers}x{shape.hidden} s{shape.seq} on {gpus}"
    measured, lacks = b.measured("iteration time (ms)")
    return Row(case, group, shape, setting, cluster, measured, lambda step: step.seconds * 1e3, "ms per step", b.assumed, lacks)


def _iterated_on(b: Blanks, gpus: int) -> Profile:
    """The device of iteration rows: where they name none, A100 of a cluster, or of the server that rows of one node come from."""
    if (b.cells.get("gpu") or "").strip():
        return _device(b.text("gpu"), b.assumed)
    b.assumed |= {"gpu": "A100 of 80 GB", "network": "800 Gb/s per node"}
    alone = gpus <= load("A100").node_size
    if alone:
        b.assumed["host"] = "that of the server these rows were traced on, which is slower than the cluster's"
    return _with_network(load("A100-server" if alone else "A100"), 100)


WORDS = 50257
CLASSIC = {"kernels": "classic", "dtype": "fp16", "grad_dtype": "fp16", "overlap_grads": False, "overlap_params": False}


def _padded(words: int, tp: int) -> int:
    unit = 128 * tp
    return -(-words // unit) * unit


def _with_recompute(shape: Counted, setting: Setting, profile: Profile) -> tuple[Setting, str]:
    """A model that trains on one device needs no recompute; larger ones of that time were trained with all of it."""
    alone = dataclasses.replace(setting, dp=1, ep=1, tp=1, pp=1, micro=1, global_batch=setting.micro_batch)
    step = simulate(sized_stack(shape, alone.dtype).work(alone), alone, Cluster("one", (Nodes(1, 1, profile),)))
    if step.peak_memory.total <= profile.device.memory:
        return setting, "none: the model with this micro-batch fits on one device"
    return dataclasses.replace(setting, recompute="full"), "full: the model with this micro-batch does not fit on one device"


# --- steps with their peak memory


def _measured_with_memory(cells: Cells, case: str) -> Row:
    """Megatron-DeepSpeed over stages of one kind of device, in fp32 that products round to tf32; the fullest device was looked at."""
    kinds = {part.split(":")[0] for part in cells["gpus_by_kind"].split("+")}
    if kinds != {"GH-96"}:
        raise WeftError("devices of this row are not described", needed="GH-96 alone", found=cells["gpus_by_kind"])
    b = Blanks(cells, {"kernels": "Megatron-DeepSpeed: scores in memory, tf32", "dropout": "none: two more copies of the scores would not fit what was held"})
    n = {k: b.integer(k) for k in ("layers", "hidden", "heads", "vocab", "seq", "tp", "pp", "dp", "micro_batch", "global_batch", "gpus")}
    stages = [int(x) for x in cells["layers_per_stage"].split("|")]
    stages[0], stages[-1] = stages[0] - 1, stages[-1] - 1  # embedding and head count as a layer each
    shape = Counted(n["layers"], n["hidden"], n["heads"], n["vocab"], n["seq"])
    setting = Setting.counted(n["global_batch"], n["micro_batch"], n["dp"], n["tp"], n["pp"], **{**CLASSIC, "dtype": "tf32", "grad_dtype": "fp32"})
    profile = load("GH200-server")
    b.assumed["host"] = "that of the cluster these rows were measured on: Python on Grace issues an op in 57 us"
    place = Cluster(f"{n['gpus']}x{profile.name}", (_nodes(n["gpus"], profile),))
    measured, lacks = b.measured("step_s")
    return Row(
        _case(cells, case), f"{shape.layers}x{shape.hidden} s{shape.seq}", shape, setting, place, measured, lambda step: step.seconds, "s per step", b.assumed,
        lacks, held=b.number("peak_mem_bytes", 0.0), stages=tuple(stages) if n["pp"] > 1 else (),
    )  # fmt: skip


# --- published throughput


def _published(cells: Cells, case: str) -> Row:
    b, source = Blanks(cells), (cells.get("source") or "").strip()
    dtype = b.word("dtype", DTYPES, "bf16", "not stated")
    modern = dtype != "fp16"
    usual = "H100" if modern else "A100"
    profile = _device(b.text("gpu", usual), b.assumed)
    profile = _with_network(profile, b.rate("network_gbps_per_gpu", _usual(profile), "usual for this device"))
    if "precision_recipe" not in cells and modern:
        profile = _of_its_time(profile, b.assumed)
    gpus, tp = b.devices("gpus", ("tp", "pp", "dp", "cp")), b.integer("tp", 1)
    layers, hidden = b.sizes("layers", "hidden", source)
    heads = b.heads("heads", hidden, tp)
    kv, ffn = b.integer("kv_heads", heads), b.integer("ffn", 4 * hidden)
    vocab, seq = b.integer("vocab", 51200, "Megatron's padded GPT-2 words"), b.integer("seq", 4096 if modern else 2048, "usual of its time")
    shape = Counted(layers, hidden, heads, vocab, seq, kv, ffn, case, bias=not modern, dropout=not modern, head=b.integer("head_dim", hidden // heads))
    shape = _with_experts(b, shape, profile) if (cells.get("experts") or "").strip() else _of_size(shape, source, b.assumed) if modern else shape
    if "hybrid" in (cells.get("attention") or ""):
        shape = hybrid(shape, cells["attention"], *(int(b.number(key, 0)) for key in ("shared_expert_ffn", "mtp_layers")))
    setting = _setting(b, _known(dtype, profile, b.assumed), shape, profile, gpus)
    cluster = Cluster(f"{gpus}x{profile.name}", (_nodes(setting.devices, profile),))
    group = f"{shape.layers}x{shape.hidden} s{shape.seq} on {gpus}x{profile.name}"
    metric = _metric(b.text("metric"), shape, setting, gpus)
    measured, lacks = b.measured("value")
    held = b.number("reserved_gib", 0.0) * 2**30 + (RESIDENT if (cells.get("reserved_gib") or "").strip() else 0.0)
    return Row(
        _case(cells, case), group, shape, setting, cluster, measured, metric, unit_of(b.text("metric")), b.assumed, lacks,
        faster="iteration" not in b.text("metric"), held=held, beside=tuple(_beside(b)), lora=_lora(b), rerun=_rerun(b),
    )  # fmt: skip


def _with_experts(b: Blanks, shape: Counted, profile: Profile) -> Counted:
    own = {key: int(b.number(column, 0)) if (b.cells.get(column) or "").strip() else 0 for key, column in BESIDE_EXPERTS.items()}
    more = {"experts": b.integer("experts"), "chosen": b.integer("experts_per_token", 2), "ffn": b.integer("expert_ffn", shape.inner)}
    made = with_experts(shape, b.cells.get("attention") or "", **more, **own, plain=shape.inner if own["dense"] else 0)
    ranks, chunks = b.integer("ep", 1) * b.integer("tp", 1), _virtual(b, shape.layers, b.integer("pp", 1))
    crosses = ranks > profile.node_size and b.integer("pp", 1) > 1 and chunks > 1
    if crosses:
        b.assumed["tokens of experts"] = "sent overlapped with the compute of another micro-batch, as interleaved pipelines offer where experts cross nodes"
    return dataclasses.replace(made, again=recomputed((b.cells.get("recompute") or "").lower()), beside=crosses)


BESIDE_EXPERTS = {"shared": "shared_expert_ffn", "dense": "dense_layers", "ahead": "mtp_layers"}


def _lora(b: Blanks) -> tuple[int, str]:
    said = (b.cells.get("lora_rank") or "").strip()
    return (int(said), b.text("lora_targets", "qkv proj", "attention's layers")) if said not in ("", "0") else (0, "")


def _rerun(b: Blanks) -> int:
    """Of `full in 21 layers`."""
    found = re.search(r"full in (\d+) layers", b.cells.get("recompute") or "")
    return int(found[1]) if found else 0


def _beside(b: Blanks) -> Iterator[str]:
    """What of a row is read as something else, or not at all."""
    yield from (f"{key}: {b.assumed[key]}" for key in ("gpu", "dtype") if key in b.assumed)
    if "offload" in (b.cells.get("attention") or ""):
        yield "attention: offload"


FLASH_2 = {  # shares of an H100's peak
    "attention.forward": Constant(0.42, "table: FlashAttention-3 paper, FlashAttention-2 forward, causal, head 128, about 415 TF/s of 989"),
    "attention.backward": Constant(0.35, "table: FlashAttention-3 paper, FlashAttention-2 backward, causal, head 128, about 350 TF/s of 989"),
}


def _of_its_time(profile: Profile, assumed: dict[str, str]) -> Profile:
    """Runs published up to 2024 had FlashAttention-2, which leaves much of a Hopper device unused."""
    if profile.device.name not in ("H100", "H200", "H800"):
        return profile
    assumed["attention"] = "FlashAttention-2"
    return dataclasses.replace(profile, device=dataclasses.replace(profile.device, constants={**profile.device.constants, **FLASH_2}))


DTYPES = {
    "fp4": "fp4", "nvfp4": "fp4", "fp8": "fp8", "float8": "fp8", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "tf32": "tf32", "fp32": "fp32", "float32": "fp32",
}  # fmt: skip


def _known(dtype: str, profile: Profile, assumed: dict[str, str]) -> str:
    """The row's dtype where its device has a rate of it."""
    if f"peak.{dtype}" in profile.device.constants:
        return dtype
    assumed["dtype"] = f"bf16 ({profile.name} has no {dtype})"
    return "bf16"


def _of_size(shape: Counted, source: str, assumed: dict[str, str]) -> Counted:
    """Gated or plain feed-forward, words shared or not: whichever gives the size the source names, else as Llama."""
    forms = [dataclasses.replace(shape, gated=g, rotary=g, tied=t) for g in (True, False) for t in (False, True)]
    size = stated_size(source)
    if size is None:
        assumed["feed-forward"] = "gated, words not shared (no size stated)"
        return forms[0]
    best = min(forms, key=lambda form: abs(form.params - size))
    words = "shared" if best.tied else "not shared"
    assumed["feed-forward"] = f"{'gated' if best.gated else 'plain'}, words {words}, for a size of {size / 1e9:g}B"
    return best


def _nodes(devices: int, profile: Profile) -> Nodes:
    """Whole nodes, of fewer devices each where they do not divide."""
    size = next(n for n in range(min(devices, profile.node_size), 0, -1) if devices % n == 0)
    return Nodes(devices // size, size, profile)


def _usual(profile: Profile) -> float:
    return profile.links[-1].get("bandwidth") * 8 / 1e9


def _device(text: str, assumed: dict[str, str]) -> Profile:
    """`H100-96 HBM2e 500W`: a kind, and what differs from its profile."""
    try:
        return load(text)
    except UnknownName:
        profile = device_kind(text)
    changes: dict[str, Constant] = {}
    if size := re.search(r"(\d+)(?=\s*GB?\b)|(?<=-)\d+", text):
        changes["memory.bytes"] = Constant(float(size.group()) * 1.07e9, "datasheet: memory of the row's device")
    if "HBM2e" in text and profile.device.get("memory.bandwidth") > 2.4e12:
        changes["memory.bandwidth"] = Constant(2.4e12, "datasheet: HBM2e in place of HBM3")
    if power := re.search(r"(\d+)\s*W", text):
        usual = profile.device.get("power", float(power.group(1)))
        slower = (float(power.group(1)) / usual) ** 0.5
        changes |= {k: Constant(c.value * slower, c.origin) for k, c in profile.device.constants.items() if k.startswith("peak.")}
        assumed["power"] = f"rates scaled by {slower:.2f}, the square root of the share of power"
    device = dataclasses.replace(profile.device, constants={**profile.device.constants, **changes})
    return dataclasses.replace(profile, device=device)


def _setting(b: Blanks, dtype: str, shape: Counted, profile: Profile, gpus: int) -> Setting:
    cells, assumed, modern = b.cells, b.assumed, dtype != "fp16"
    tp, pp, cp = b.integer("tp", 1), b.integer("pp", 1), b.integer("cp", 1)
    dp, micro = b.copies("dp", gpus, tp * pp * cp, some=True), b.integer("micro_batch", 1)
    batch = b.batch("global_batch", dp, micro, pp)
    zero = b.text("zero", "1" if modern and dp > 1 else "0", "usual of its time")
    virtual = _virtual(b, shape.layers, pp) if pp > 1 else 1
    ep = math.gcd(b.integer("ep", 1), dp) if shape.experts else 1
    setting = Setting.counted(
        batch, micro, dp, tp, pp, cp, ep, virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b",
        zero=_zero(zero), keep_gathered="without reshard" in zero.lower(),
        **({"kernels": b.text("kernels", "compiled"), "dtype": dtype} if modern else CLASSIC),
    )  # fmt: skip
    if modern:
        if "zero" in assumed and "precision_recipe" in cells and not _lora(b)[0]:
            setting = _sharded_where_needed(setting, shape, profile, assumed)
        setting = _overlapped(setting, "precision_recipe" in cells, assumed)
        if "kernels" in assumed:
            assumed["kernels"] = "attention in one kernel, pointwise chains fused"
        if tp > 1:
            assumed["sequence parallel"] = "yes, usual since 2022"
            setting = dataclasses.replace(setting, sp=True)
    recompute = (cells.get("recompute") or "").lower() if not _rerun(b) else "none"
    if "sequence parallel" in recompute:
        setting = dataclasses.replace(setting, sp=True)
    return _recomputed(setting, recompute, shape, profile, modern, assumed)


def _sharded_where_needed(setting: Setting, shape: Counted, profile: Profile, assumed: dict[str, str]) -> Setting:
    """Parameters and gradients sharded too where they must be, as far as a row leaves that open: the least that fits."""
    work = (shape if isinstance(shape, Sized) else sized_stack(shape, setting.dtype)).work(setting)
    if held(work, setting, Cluster("", (_nodes(setting.devices, profile),))) <= profile.device.memory:
        return setting
    assumed["zero"] = "3 (not stated; less does not fit)"
    return dataclasses.replace(setting, zero=3)


def _zero(text: str) -> int:
    """A stage by the name of what does the same (`fsdp2` is the second FSDP, not stage 2), or by number."""
    stages = {"fsdp": 3, "hsdp": 3, "optimizer": 1, "ddp": 0, "none": 0, "no": 0}
    named = next((stage for name, stage in stages.items() if name in text.lower()), None)
    digit = re.search(r"[0-3]", text)
    return named if named is not None else int(digit.group()) if digit else 0


def _overlapped(setting: Setting, recipe: bool, assumed: dict[str, str]) -> Setting:
    """What runs beside compute: with ZeRO-3 parameters and gradients; with narrow kernels, made for it, and under the recipes of today, all that
    can, and these sum gradients in 16 bits."""
    sharded, latest = setting.zero == 3, recipe or setting.dtype in ("fp8", "fp4")
    beside = sharded or latest
    if recipe and not sharded:
        assumed["gradients"] = "summed in bf16, as recipes of today have it"
        setting = dataclasses.replace(setting, grad_dtype="bf16")
    assumed["overlap"] = f"parameters and gradients {'beside' if beside else 'apart from'} compute"
    if sharded and setting.pp > 1 and not setting.gather_once:
        assumed["gathering"] = "once a step, as is usual of ZeRO-3 with a pipeline"
        setting = dataclasses.replace(setting, gather_once=True)
    return dataclasses.replace(
        setting, overlap_grads=beside, overlap_params=beside, batch_first=sharded,
        async_tp=latest and not sharded, overlap_sends=latest and setting.chunks > 1,
    )  # fmt: skip


def _recomputed(setting: Setting, text: str, shape: Counted, profile: Profile, modern: bool, assumed: dict[str, str]) -> Setting:
    if "selective" in text and setting.zero == 3:
        assumed["recompute"] = "per op: attention, reductions and every second product are kept"
        return dataclasses.replace(setting, recompute="per-op")
    for word, name in AGAIN.items():
        if word in text:
            return dataclasses.replace(setting, recompute=name)
    if modern:
        assumed["recompute"] = "none (not stated)" if not text.strip() else f"none (no meaning known of {text!r})"
        return setting
    setting, assumed["recompute"] = _with_recompute(shape, setting, profile)
    return setting


AGAIN = {"full": "full", "selective": "selective", "none": "", "no": "", "off": "", "false": "", "yes": "full", "true": "full"}


def _virtual(b: Blanks, layers: int, pp: int) -> int:
    """Chunks per stage, of layers per chunk. Embedding and head may be chunks of their own; if there are still more chunks than layers, fewer
    are taken."""
    key = "layers_per_virtual_stage"
    each = b.number(key, 0, "stages are not interleaved")
    chunks = max(1, round(layers / (pp * each))) if each > 0 else 1
    if chunks == 1 or pp * chunks <= layers or pp * chunks == layers + 2:
        return chunks
    b.assumed[key] = f"{max(1, layers // pp)} chunks on each stage ({pp} x {chunks} would be more than {layers} layers)"
    return max(1, layers // pp)


UNITS = {
    "iteration_s": "s per step", "iteration_ms": "ms per step", "tokens_per_s_per_gpu": "tokens/s per GPU", "tokens_per_s": "tokens/s", "mfu_percent": "MFU, %",
    "mfu": "MFU",
}  # fmt: skip


def unit_of(metric: str) -> str:
    return "TFLOP/s per GPU" if metric.startswith("TFLOPs_per_gpu") else UNITS.get(metric.lower(), metric)


def _metric(name: str, shape: Counted, setting: Setting, gpus: int) -> Callable[[SimulatedStep], float]:
    tokens = setting.global_batch * shape.seq
    model = shape.flops_per_token * tokens
    s, h, n, v = shape.seq, shape.hidden, shape.layers, shape.vocab
    megatron = 96 * tokens * n * h * h * (1 + s / (6 * h) + v / (16 * n * h))
    known: dict[str, Callable[[SimulatedStep], float]] = {
        "iteration_s": lambda step: step.seconds,
        "iteration_ms": lambda step: step.seconds * 1e3,
        "tokens_per_s_per_gpu": lambda step: tokens / step.seconds / gpus,
        "tokens_per_s": lambda step: tokens / step.seconds,
        "MFU_percent": lambda step: 100 * model / step.seconds / step.peak_flops,
        "MFU": lambda step: model / step.seconds / step.peak_flops,
        "TFLOPs_per_gpu(model)": lambda step: model / step.seconds / gpus / 1e12,
    }
    if name.startswith("TFLOPs_per_gpu(96"):
        return lambda step: megatron / step.seconds / gpus / 1e12
    name = next((k for k in known if k.lower() == name.lower()), name)
    if name not in known:
        raise ValueError(f"no metric named {name!r}; known are {', '.join(known)} and TFLOPs_per_gpu(96BslH^2(...))")
    return known[name]
