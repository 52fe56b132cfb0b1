"""Configurations of other systems, read: torchtitan's Python, TOML or options, Megatron's arguments, accelerate's YAML, Hugging Face's
TrainingArguments, DeepSpeed's JSON, and the FSDP2 code that `plan.export` writes.

A text becomes flat keys with values; a reader takes those it knows. What is blank is assumed, and said; keys that nothing took are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from weft.core.errors import PlanError
from weft.plan.config_text import keys_of
from weft.plan.schedules import CHUNKED, PLAIN, SCHEDULES
from weft.plan.setting import Setting
from weft.plan.spec import MIXED, Piece

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "no": "fp32", "fp8": "fp8"}


@dataclass(frozen=True)
class Read:
    """What a configuration decides, what was assumed where it says nothing, keys that were not used, and what it says of the model."""

    form: str
    setting: Setting
    seq: int = 0
    assumed: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()  # what it asks for that is priced as something else


@dataclass
class Keys:
    """Keys of a text, each taken once; what is not there is assumed."""

    of: Mapping[str, Any]
    devices: int = 0
    seq: int = 0
    depth: int = 0
    assumed: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    unmodelled: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any, *others: str) -> Any:
        """The value of a key or of one of its older names. It is of the default's kind, or refused."""
        for key in (name, *others):
            if key in self.of:
                self.taken.add(key)
                if self.of[key] != "auto":
                    return self._checked(key, self.of[key], default)
        self.assumed[name] = str(default)
        return default

    @staticmethod
    def _checked(key: str, value: Any, default: Any) -> Any:
        if isinstance(default, bool) and str(value).lower() in ("true", "false", "1", "0", "yes", "no"):
            return str(value).lower() in ("true", "1", "yes")
        if isinstance(default, int) and not isinstance(default, bool) and re.fullmatch(r"-?\d+", str(value)):
            return int(value)
        if isinstance(default, (bool, int)):
            raise PlanError(f"cannot read {key} = {value!r}", needed="true or false" if isinstance(default, bool) else "an integer", found=repr(value))
        return value

    def over(self, *degrees: int) -> int:
        """Copies: what is left of the devices."""
        each = 1
        for n in degrees:
            each *= n
        if self.devices and self.devices % each:
            raise PlanError("the degrees do not fill the cluster", needed=f"a multiple of {each} devices", found=str(self.devices))
        return max(1, self.devices // each)


def read(text: str, form: str = "", devices: int = 0, seq: int = 0, depth: int = 0) -> Read:
    """A configuration as a setting. `devices` fill what it leaves open; `seq` and `depth` are the model's, where the text has none."""
    keys = Keys(keys_of(text), devices, seq, depth)
    form = form or kind_of(keys.of)
    made = READERS[form](keys)
    unused = tuple(k for k in keys.of if k not in keys.taken)
    return replace(made, form=form, assumed=dict(keys.assumed), unused=unused, unmodelled=tuple(keys.unmodelled))


def kind_of(keys: Mapping[str, Any]) -> str:
    """Whose keys these are."""
    marks = {
        "torchtitan": ("parallelism.", "training."), "accelerate": ("distributed_type", "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"),
        "deepspeed": ("zero_optimization.", "train_micro_batch_size_per_gpu", "train_batch_size"),
        "huggingface": ("per_device_train_batch_size", "gradient_accumulation_steps"), "fsdp2": ("RESHARD_AFTER_FORWARD",),
        "megatron": ("tensor-model-parallel-size", "micro-batch-size", "pipeline-model-parallel-size", "global-batch-size", "num-layers"),
    }  # fmt: skip
    for form, starts in marks.items():
        if any(key.startswith(starts) for key in keys):
            return form
    raise PlanError(
        "not the configuration of a system that weft reads", needed=" or ".join(READERS), found=", ".join(list(keys)[:6]) or "no keys",
        try_="weft explain FILE" if "weft_plan" in keys
        else "weft price FILE with a torchtitan TOML or Python file, Megatron arguments, a DeepSpeed JSON or an accelerate YAML",
    )  # fmt: skip


# --- the systems


def _torchtitan(k: Keys) -> Read:
    """Of today's names, and of those before batches were counted in tokens (local_batch_size, seq_len, activation_checkpoint.mode)."""
    p = "parallelism."
    tp, pp = k.get(p + "tensor_parallel_degree", 1), k.get(p + "pipeline_parallel_degree", 1)
    cp, ep = k.get(p + "context_parallel_degree", 1), k.get(p + "expert_parallel_degree", 1)
    copies, shard = k.get(p + "data_parallel_replicate_degree", 1), k.get(p + "data_parallel_shard_degree", -1)
    shard = k.over(copies, tp, pp, cp) if shard < 0 else shard
    dp, seq = copies * shard, k.get("training.max_context_length", k.seq or 2048, "training.seq_len")
    reshard = str(k.get(p + "fsdp_reshard_after_forward", "default"))
    always = reshard == "always" or (reshard == "default" and pp == 1)
    zero, kept = (0, False) if shard * cp == 1 else (3, False) if always else (3, True) if pp > 1 else (2, False)
    _mixed_copies(k, copies, shard * cp)
    micro, batch = _titan_batch(k, dp, pp, seq)
    schedule, virtual, layers = _titan_stages(k, pp)
    compiled = k.get("compile.enable", False, "training.compile")
    again = str(k.get("activation_checkpoint", "SelectiveAC", "activation_checkpoint.mode"))
    for name, value in (("activation_checkpoint.selective_ac_option", "op"), ("compile.components", "")):
        if name in k.of:
            k.get(name, value)
    dtype = DTYPES[str(k.get("training.mixed_precision_param", "bfloat16"))]
    if any("float8" in str(k.of.get(x, "")) for x in ("model.converters", "model_spec.converters")):
        k.taken.add("model.converters")
        dtype = "fp8"
    _asked(k, "training.enable_cpu_offload", "CPU offload is not priced")
    setting = Setting.counted(
        batch, micro, dp, tp, pp, cp, ep, virtual, k.get(p + "enable_sequence_parallel", True) and tp > 1, zero, kept,
        _titan_recompute(k, again), schedule, kernels="compiled" if compiled else "eager", dtype=dtype, overlap_sends=True,
        overlap_tp=k.get("compile.enable_async_tensor_parallel", False, p + "enable_async_tensor_parallel"), ragged_ep=ep > 1,
        batch_first=tp > 1 and micro > 1, master=DTYPES[str(k.get("training.dtype", "float32"))] == "fp32",
    )  # fmt: skip
    return Read("torchtitan", setting.with_layers(layers), seq)


def _titan_recompute(k: Keys, again: str) -> str:
    """FullAC.Config, SelectiveAC.Config, None; or full, selective, none."""
    word = again.lower().removesuffix(".config").removesuffix("ac")
    if word == "memorybudget" or word == "memory_budget":
        k.unmodelled.append("activation_checkpoint by a memory budget, priced as selective")
    return {"full": "full", "none": "none"}.get(word, "per-op")


def _titan_batch(k: Keys, dp: int, pp: int, seq: int) -> tuple[int, int]:
    """Samples of a micro-batch, and of the full step."""
    if "training.local_batch_size" in k.of or "training.batch_size" in k.of:
        local = k.get("training.local_batch_size", 8, "training.batch_size")
        micro = k.get("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
        batch = k.get("training.global_batch_size", -1)
        return min(micro, local), dp * local if batch < 0 else batch
    micro = max(1, k.get("training.num_tokens_per_microbatch_per_dp_rank", 16384) // seq)
    rounds = k.get("parallelism.num_pp_microbatches", 1) if pp > 1 else 1
    tokens = k.get("training.num_tokens_per_train_step", -1)
    return micro, dp * micro * rounds if tokens < 0 else max(dp * micro, tokens // seq)


def _titan_stages(k: Keys, pp: int) -> tuple[str, int, tuple[int, ...]]:
    if pp == 1:
        return PLAIN, 1, ()
    name = str(k.get("parallelism.pipeline_parallel_schedule", "1F1B"))
    known = {s.titan.lower(): s.name for s in reversed(SCHEDULES.values())}
    schedule = known.get(name.lower(), PLAIN)
    if name.lower() not in known:
        k.unmodelled.append(f"the schedule {name}, priced as {schedule}")
    parts = k.get("parallelism.module_fqns_per_model_part", ())
    if parts:
        layers = tuple(sum(str(m).startswith("layers.") for m in part) for part in parts)
        return schedule, max(1, len(layers) // pp), layers
    virtual = 2 if SCHEDULES[schedule].takes_chunks else 1
    each = k.get("parallelism.pipeline_parallel_layers_per_stage", 0)
    if each and k.depth:
        ends = sum(k.get(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last"))
        virtual = max(1, -(-(k.depth + ends) // each) // pp)
    return schedule, virtual, ()


def _mixed_copies(k: Keys, copies: int, shard: int) -> None:
    if copies > 1 and shard > 1:
        k.unmodelled.append(f"HSDP, {copies} copies of {shard} shards: priced as if state were sharded over all {copies * shard}")


def _asked(k: Keys, name: str, words: str, *others: str) -> None:
    if any(key in k.of for key in (name, *others)) and k.get(name, False, *others):
        k.unmodelled.append(f"{name}: {words}")


MODEL_KEYS = {
    "num-layers": "layers", "hidden-size": "hidden", "num-attention-heads": "heads", "num-query-groups": "kv_heads", "ffn-hidden-size": "ffn",
    "kv-channels": "head", "vocab-size": "vocab", "padded-vocab-size": "vocab", "num-experts": "experts", "moe-router-topk": "chosen",
    "moe-ffn-hidden-size": "ffn",
}  # fmt: skip


def _megatron(k: Keys) -> Read:
    tp, pp, cp = (k.get(f"{name}-parallel-size", 1) for name in ("tensor-model", "pipeline-model", "context"))
    ep = k.get("expert-model-parallel-size", 1)
    dp, micro = k.over(tp, pp, cp), k.get("micro-batch-size", 1)
    batch, seq = k.get("global-batch-size", dp * micro), k.get("seq-length", k.seq or 2048, "encoder-seq-length")
    depth = k.get("num-layers", k.depth) if k.depth or "num-layers" in k.of else 0
    zero, virtual, layers = _megatron_zero(k), *_megatron_stages(k, pp, depth)
    fp8 = k.get("fp8-format", "") if "fp8-format" in k.of else ""
    half = "fp16" if "fp16" in k.of and k.get("fp16", False) else "bf16" if "bf16" in k.of and k.get("bf16", False) else "fp32"
    grads = "bf16" if "grad-reduce-in-bf16" in k.of and k.get("grad-reduce-in-bf16", False) else "fp32"
    recompute, full = _megatron_recompute(k)
    flag = partial(_flag, k)
    setting = Setting.counted(
        batch, micro, dp, tp, pp, cp, ep, virtual, flag("sequence-parallel") and tp > 1, zero, False, recompute, CHUNKED if virtual > 1 else PLAIN,
        dtype="fp8" if fp8 else half, grad_dtype=grads, overlap_grads=flag("overlap-grad-reduce"), overlap_params=flag("overlap-param-gather"),
        overlap_sends=virtual > 1 and not flag("no-overlap-p2p-communication"), overlap_tp=flag("tp-comm-overlap"),
    )  # fmt: skip
    k.assumed["kernels"] = "compiled (fused kernels of Transformer Engine)"
    if ep > 1:
        k.get("expert-tensor-parallel-size", tp)
        setting = replace(setting, ragged_ep=k.get("moe-token-dispatcher-type", "allgather") != "allgather")
    for name in ("optimizer-cpu-offload", "cpu-offloading"):
        _asked(k, name, "not priced")
    made = replace(setting, stages=_blocks(full, layers or (depth,))) if full and depth else setting.with_layers(layers)
    return Read("megatron", made, seq, model=_megatron_model(k))


def _flag(k: Keys, name: str) -> bool:
    return name in k.of and bool(k.get(name, False))


def _blocks(full: int, layers: Sequence[int]) -> tuple[tuple[Piece, ...], ...]:
    """Stages of which so many layers are recomputed in full."""
    ends: list[list[Piece]] = [[("layer", "full", min(full, n)), *([("layer", "none", n - full)] if n > full else [])] for n in layers]
    ends[0].insert(0, ("first", "none", 1))
    ends[-1].append(("last", "none", 1))
    return tuple(map(tuple, ends))


def _megatron_zero(k: Keys) -> int:
    if _flag(k, "use-torch-fsdp2"):
        return 2 if _flag(k, "torch-fsdp2-no-reshard-after-forward") else 3
    if _flag(k, "use-megatron-fsdp") or _flag(k, "use-custom-fsdp"):
        _flag(k, "use-distributed-optimizer")
        return {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(str(k.get("data-parallel-sharding-strategy", "optim_grads_params")), 3)
    return int(_flag(k, "use-distributed-optimizer"))


def _megatron_stages(k: Keys, pp: int, depth: int) -> tuple[int, tuple[int, ...]]:
    """Chunks of a stage, and layers of each where they are said."""
    if pp == 1:
        return 1, ()
    if "pipeline-model-parallel-layout" in k.of:
        text = _unfolded(str(k.get("pipeline-model-parallel-layout", "")))
        layers = tuple(part.count("t") for part in text.split("|"))
        return max(1, len(layers) // pp), layers
    if "num-layers-per-virtual-pipeline-stage" in k.of and depth:
        return max(1, depth // (pp * k.get("num-layers-per-virtual-pipeline-stage", 1))), ()
    ends = [k.get(f"decoder-{end}-pipeline-num-layers", 0) if f"decoder-{end}-pipeline-num-layers" in k.of else 0 for end in ("first", "last")]
    virtual = k.get("num-virtual-stages-per-pipeline-rank", 1)
    if any(ends) and depth and virtual == 1:
        between = (depth - sum(ends)) // max(1, pp - sum(map(bool, ends)))
        return 1, (ends[0] or between, *[between] * (pp - 2), ends[1] or between)
    return virtual, ()


def _unfolded(text: str) -> str:
    """Megatron's short form of a layout: `(tt|)*3` and `t*4` written out, commas dropped."""
    text = text.replace(",", "")
    while found := re.search(r"\(([^()]*)\)\*(\d+)|([A-Za-z])\*(\d+)", text):
        body, times = (found[1], found[2]) if found[2] else (found[3], found[4])
        text = text[: found.start()] + body * int(times) + text[found.end() :]
    return text.removesuffix("|")


def _megatron_recompute(k: Keys) -> tuple[str, int]:
    """What is recomputed, and of how many layers of each stage where not of all."""
    if _flag(k, "recompute-activations"):
        return "selective", 0
    kind = str(k.get("recompute-granularity", "none"))
    modules = str(k.get("recompute-modules", "core_attn")) if kind == "selective" else "core_attn"
    if kind == "selective" and modules != "core_attn":
        k.unmodelled.append(f"recompute of {modules}, priced as of attention and the activation")
    if kind != "full":
        return kind, 0
    method, n = str(k.get("recompute-method", "uniform")), k.get("recompute-num-layers", 1)
    if method == "uniform" and n > 1:
        k.unmodelled.append(f"recompute in units of {n} layers, priced as of each")
    return (MIXED, n) if method == "block" else ("full", 0)


def _megatron_model(k: Keys) -> dict[str, Any]:
    found = {ours: k.get(theirs, 0) for theirs, ours in MODEL_KEYS.items() if theirs in k.of}
    flags = {"gated": _flag(k, "swiglu"), "bias": not _flag(k, "disable-bias-linear"), "tied": not _flag(k, "untie-embeddings-and-output-weights")}
    rotary = str(k.get("position-embedding-type", "learned_absolute")) == "rope" or _flag(k, "use-rotary-position-embeddings")
    dropout = k.get("hidden-dropout", 0.1) > 0  # Megatron's default
    return {**found, **flags, "rotary": rotary, "dropout": dropout} if {"layers", "hidden", "heads"} <= set(found) else {}


def _accelerate(k: Keys) -> Read:
    kind = str(k.get("distributed_type", "FSDP"))
    if kind == "DEEPSPEED":
        return _accelerate_deepspeed(k)
    n = {name: k.get(f"parallelism_config.parallelism_config_{name}_size", 1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    devices = k.get("num_processes", k.devices or 1)
    k.devices = devices
    cp = n["cp"] * n["sp"]
    if not any(key.startswith("parallelism_config.") for key in k.of):
        n["dp_shard" if kind == "FSDP" else "dp_replicate"] = devices
    f = "fsdp_config.fsdp_"
    old = str(k.get(f + "sharding_strategy", "FULL_SHARD")).upper() if f + "sharding_strategy" in k.of else ""
    reshard = k.get(f + "reshard_after_forward", True) if not old else old in ("FULL_SHARD", "HYBRID_SHARD", "1", "4")
    zero = 0 if kind != "FSDP" or n["dp_shard"] * cp == 1 or old in ("NO_SHARD", "3") else 3 if reshard else 2
    _mixed_copies(k, n["dp_replicate"], n["dp_shard"] * cp)
    _asked(k, f + "offload_params", "offload is not priced")
    dp = n["dp_replicate"] * n["dp_shard"]
    compiled = str(k.get("dynamo_config.dynamo_backend", "NO")).upper() == "INDUCTOR"
    k.assumed["micro_batch"] = "1 sample a rank, and one micro-batch: the file does not say"
    setting = Setting.counted(
        dp, 1, dp, n["tp"], 1, cp, zero=zero, recompute="full" if k.get(f + "activation_checkpointing", False) else "none",
        kernels="compiled" if compiled else "eager", dtype=DTYPES[str(k.get("mixed_precision", "no"))], batch_first=n["tp"] > 1,
    )  # fmt: skip
    for name in ("compute_environment", f + "version", f + "auto_wrap_policy"):
        k.taken.add(name)
    return Read("accelerate", setting, seq=k.seq)


def _accelerate_deepspeed(k: Keys) -> Read:
    d = "deepspeed_config."
    dp = k.get("num_processes", k.devices or 1)
    rounds = k.get(d + "gradient_accumulation_steps", 1)
    for device in ("optimizer", "param"):
        if str(k.of.get(f"{d}offload_{device}_device", "none")) != "none":
            k.unmodelled.append(f"offload of {device}s to {k.get(f'{d}offload_{device}_device', '')}: not priced")
    k.assumed["micro_batch"] = "1 sample a rank: the file does not say"
    if d + "deepspeed_config_file" in k.of:
        k.unmodelled.append(f"{k.get(d + 'deepspeed_config_file', '')}, which holds the rest: price that file")
    setting = Setting.counted(dp * rounds, 1, dp, zero=k.get(d + "zero_stage", 2), kernels="eager", dtype=DTYPES[str(k.get("mixed_precision", "no"))])
    return Read("accelerate", setting, seq=k.seq)


def _huggingface(k: Keys) -> Read:
    n = {name: k.get(f"parallelism_config.{name}_size", 1) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    dp = n["dp_replicate"] * n["dp_shard"]
    sharded = "fsdp" in k.of and str(k.get("fsdp", "")).lower() not in ("", "false")
    if dp == 1 and not any(key.startswith("parallelism_config.") for key in k.of):
        dp = k.over(1)
        n["dp_shard" if sharded else "dp_replicate"] = dp
    micro, rounds = k.get("per_device_train_batch_size", 8), k.get("gradient_accumulation_steps", 1)
    reshard = k.get("fsdp_config.reshard_after_forward", True) if sharded else True
    _mixed_copies(k, n["dp_replicate"], n["dp_shard"])
    again = (_flag(k, "gradient_checkpointing")) or _flag(k, "fsdp_config.activation_checkpointing")
    half = next((name for name in ("bf16", "fp16", "tf32") if _flag(k, name)), "fp32")
    for name in ("output_dir", "fsdp_config.version", "bf16", "fp16", "tf32"):
        k.taken.add(name)
    setting = Setting.counted(
        dp * micro * rounds, micro, dp, n["tp"], 1, n["cp"], zero=(3 if reshard else 2) if sharded and n["dp_shard"] * n["cp"] > 1 else 0,
        recompute="full" if again else "none", kernels="compiled" if k.get("torch_compile", False) else "eager", dtype=half, batch_first=n["tp"] > 1,
    )  # fmt: skip
    return Read("huggingface", setting, seq=k.seq)


def _deepspeed(k: Keys) -> Read:
    tp, cp = k.get("tensor_parallel.autotp_size", 1), k.get("sequence_parallel_size", 1)
    dp, zero = k.over(tp, cp), k.get("zero_optimization.stage", 0)
    micro, rounds = k.get("train_micro_batch_size_per_gpu", 0), k.get("gradient_accumulation_steps", 0)
    batch = k.get("train_batch_size", 0)
    if not micro:
        micro = max(1, batch // (dp * max(1, rounds)))
    if not batch:
        batch = dp * micro * max(1, rounds)
    half = next((name for name in ("bf16", "fp16") if _flag(k, f"{name}.enabled")), "fp32")
    overlap = k.get("zero_optimization.overlap_comm", zero == 3)
    for name in ("offload_optimizer.device", "offload_param.device"):
        if str(k.of.get(f"zero_optimization.{name}", "none")) != "none":
            k.unmodelled.append(f"zero_optimization.{name} {k.get(f'zero_optimization.{name}', '')}: not priced")
    k.assumed["recompute"] = "none: the model's own code recomputes, not this file"
    own = _flag(k, "bf16.bf16_master_weights_and_grads")
    _flag(k, "bf16.bf16_optimizer_states")
    k.taken.add("_comment")
    setting = Setting.counted(
        batch, micro, dp, tp, 1, cp, zero=zero, kernels="compiled" if _flag(k, "compile.deepcompile") else "eager", dtype=half,
        grad_dtype=str(k.get("data_types.grad_accum_dtype", "fp32")), overlap_grads=overlap or zero == 3, overlap_params=overlap and zero == 3, master=not own,
    )  # fmt: skip
    return Read("deepspeed", setting, seq=k.seq)


def _fsdp2(k: Keys) -> Read:
    dp, tp, micro = k.get("DP", 1), k.get("TP", 1), k.get("MICRO_BATCH", 1)
    k.taken |= set(k.of)  # the rest is its code
    kept = k.get("KEEP_GATHERED", False)
    zero = 0 if k.get("REPLICATE", False) else 3 if kept or k.get("RESHARD_AFTER_FORWARD", True) else 2
    again = k.get("RECOMPUTE", "none")
    stages: tuple[tuple[Piece, ...], ...] = ()
    if not isinstance(again, str):
        stages = ((("first", "none", 1), *(("layer", mode, 1) for mode in again), ("last", "none", 1)),)
    setting = Setting.counted(
        dp * micro * k.get("MICRO_BATCHES", 1), micro, dp, tp, sequence_parallel=k.get("SEQUENCE_PARALLEL", False), zero=zero, keep_gathered=kept,
        recompute=again if isinstance(again, str) else MIXED, kernels="compiled" if k.get("COMPILE", False) else "eager",
        dtype=DTYPES[str(k.get("PARAM_DTYPE", "bfloat16"))], grad_dtype=DTYPES[str(k.get("REDUCE_DTYPE", "float32"))], batch_first=tp > 1 and micro > 1,
    )  # fmt: skip
    return Read("fsdp2", replace(setting, stages=stages), k.seq)


READERS: dict[str, Callable[[Keys], Read]] = {
    "torchtitan": _torchtitan, "megatron": _megatron, "fsdp2": _fsdp2, "accelerate": _accelerate, "huggingface": _huggingface, "deepspeed": _deepspeed,
}  # fmt: skip
