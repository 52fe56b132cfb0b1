"""A plan as what people already run: torchtitan's and FSDP2's Python, Megatron's arguments, accelerate's YAML, Hugging Face's
TrainingArguments, DeepSpeed's JSON. The FSDP2 code stands alone: it needs torch and a model whose blocks are found by pattern.

Every text is read back as `plan.configs` would read anyone's, and each decision that does not come back is named in it as lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from weft.core.errors import PlanError, WeftError
from weft.frontend.catalog import few_layers
from weft.plan.configs import read
from weft.plan.partition import share
from weft.plan.plan import Plan
from weft.plan.setting import DECISIONS, Setting
from weft.plan.spec import MIXED, OFFLOADED, SIZES
from weft.plan.summaries import summary

TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32", "fp8": "bfloat16"}
TITAN_BASE = {"llama3-8b": "llama3_8b", "llama3-70b": "llama3_70b", "llama3-405b": "llama3_405b"}
WHY = {
    ("torchtitan", "schedule"): "torch has no such schedule with one chunk a stage",
    ("torchtitan", "recompute"): "its selective keeps attention and every second matmul, its full nothing, the same for all layers",
    ("torchtitan", "zero"): "fully_shard shards all state, and parameters too unless they are never resharded after the forward",
    ("torchtitan", "dtype"): "give the model_spec a Float8LinearConverter for fp8",
    ("torchtitan", "batch_first"): "it keeps the batch first, so slices of the sequence are copied",
    ("megatron", "recompute"): "it recomputes core attention, or entire layers, as many on every stage",
    ("megatron", "kernels"): "its layers are of fused kernels, whatever is asked",
    ("accelerate", "micro_batch"): "pass it to the DataLoader", ("accelerate", "global_batch"): "by gradient_accumulation_steps of the Accelerator",
    ("accelerate", "pp"): "it has no pipeline", ("huggingface", "pp"): "its Trainer has no pipeline",
    ("deepspeed", "pp"): "PipelineModule splits the model in code",
    ("deepspeed", "recompute"): "model.gradient_checkpointing_enable() recomputes entire layers",
    ("fsdp2", "pp"): "split the model with torch.distributed.pipelining first",
}  # fmt: skip
PIPELINE = ("schedule", "virtual", "layers", "overlap_sends")  # which go with it


def export(plan: Plan, form: str) -> str:
    """The plan in another form, with what is lost named in it."""
    known_form(form)
    made = write(plan, form)
    return write(plan, form, [*summary(plan), *(f"not expressed here: {words}" for words in unsaid(plan, form, made))])


def known_form(form: str) -> None:
    if form not in FORMS:
        raise PlanError(f"no system named {form!r}", needed=" or ".join(FORMS), found=form, try_=get_close_matches(form, FORMS, n=2))


def unsaid(plan: Plan, form: str, text: str = "") -> list[str]:
    """What of a plan a form cannot say, in words."""
    found = [f"unequal shares of the batch: {', '.join(kind for kind, *_ in plan.setting.shares)}"] if plan.setting.shares else []
    found += [f"how {len(held)} tensors are sharded, each by itself"] if (held := plan.layouts.get("inputs")) else []
    found += [f"the step rewritten by {', '.join(rules)}"] if (rules := plan.layouts.get("rules")) else []
    if form == "megatron" and plan.setting.kernels != "classic" and set(_recompute_of_layers(plan)) & {"selective", "activation"}:
        found.append("recompute of the activation next to that of core attention")
    gone = lost(plan, form, text)
    for name, (wanted, other) in gone.items():
        why = WHY.get((form, name), "")
        if name not in PIPELINE or "pp" not in gone:
            more = f" ({', '.join(f'{x} {_words(gone[x][0])}' for x in PIPELINE if x in gone)})" if name == "pp" else ""
            found.append(f"{name} {_words(wanted)}{more}, which reads back as {_words(other)}" + (f": {why}" if why else ""))
    return found


def lost(plan: Plan, form: str, text: str = "") -> dict[str, tuple[Any, Any]]:
    """Each decision that does not come back from the text of a form, with what comes back."""
    back = read(text or write(plan, form), form, plan.setting.devices, max(1, plan.seq), depth_of(plan))
    ours, theirs = (decisions(s, depth_of(plan)) for s in (plan.setting, back.setting))
    return {name: (value, theirs.get(name)) for name, value in ours.items() if theirs.get(name) != value}


def decisions(s: Setting, depth: int) -> dict[str, Any]:
    """What is decided, without what does not matter next to it; recompute of each stage where layers differ."""
    modes = [Counter() for _ in s.stages]  # type: list[Counter[str]]
    for ways_of, stage in zip(modes, s.stages, strict=True):
        for name, mode, n in stage:
            ways_of[mode] += SIZES.get(name, 0.0) * n  # type: ignore[assignment]
    kinds = {mode for stage in modes for mode, n in stage.items() if n}
    again: Any = s.named("recompute")
    if s.recompute == MIXED:
        again = min(kinds) if len(kinds) == 1 else tuple(tuple(sorted((w, n) for w, n in stage.items() if n)) for stage in modes)
    plain = _plain(s)
    made = {name: plain.named(name) for name in DECISIONS}
    return {**made, "recompute": again, "layers": _counts(s, depth)}


def _plain(s: Setting) -> Setting:
    """With what cannot matter left at its default."""
    base = Setting()
    free = [(s.tp == 1, ("sp", "async_tp")), (s.ep == 1, ("ragged_ep", "imbalance")), (s.pp == 1, ("virtual", "schedule", "overlap_sends"))]
    free += [(s.size("data") == 1, ("zero", "overlap_grads", "gather_once")), (not s.sp or s.tp == 1 or s.micro_batch == 1, ("batch_first",))]
    free += [(s.zero != 3 or s.micro_batches == 1, ("gather_once",)), (s.zero == 0 or s.size("data") == 1, ("overlap_params",))]
    free += [(s.dtype in ("fp32", "tf32"), ("master", "grad_dtype"))]
    return replace(s, **{name: getattr(base, name) for off, names in free if off for name in names})


def _counts(s: Setting, depth: int) -> tuple[float, ...]:
    """Layers of each virtual stage; nothing is known of an even split where the depth is not."""
    if s.pp == 1:
        return ()
    return s.layers or tuple(map(float, share(depth, s.virtual_stages) if depth else ()))


def _nearest_integers(counts: Sequence[float]) -> list[int]:
    """The nearest integers of layers that are as many in all."""
    ends = [round(sum(counts[: i + 1])) for i in range(len(counts))]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def _words(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return " | ".join(", ".join(f"{mode} in {n:g}" for mode, n in stage) for stage in value)
    return " ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)


def depth_of(plan: Plan) -> int:
    """Layers of the model, 0 where only its module tells."""
    counts = plan.setting.layers
    try:
        known = None if counts else few_layers(plan.model)
    except WeftError:
        return 0
    return int(sum(counts)) or (known.of if known else 0)


def _recompute_of_layers(plan: Plan) -> list[str]:
    """What each layer recomputes, in order; halves of a layer count for the one they begin. No form says what the host keeps: it is recomputed."""
    return ["full" if mode in OFFLOADED else mode for mode in _asked(plan)]


def _asked(plan: Plan) -> list[str]:
    if plan.setting.recompute != MIXED:
        return [plan.setting.again or "none"]
    found, at = [], 0.0
    for name, again, n in (piece for stage in plan.setting.stages for piece in stage):
        for _ in range(n if name in SIZES else 0):
            found += [again] if at == int(at) else []
            at += SIZES[name]
    return found or ["none"]


def _one_recompute(plan: Plan, known: Sequence[str]) -> str:
    """One way for all layers: theirs where it is one that is known, else the next of the known that keeps no more."""
    order = ("none", "activation", "selective", "ffn", "per-op", "full")
    leanest = max(_recompute_of_layers(plan), key=order.index)
    return next(w for w in order[order.index(leanest) :] if w in known)


# --- the forms


def write(plan: Plan, form: str, comments: Sequence[str] = ()) -> str:
    """The text of a form, under some comments."""
    return FORMS[form](plan, comments)


def _hashes(comments: Sequence[str]) -> str:
    return "".join(f"# {x}\n" for x in comments)


def _copies(s: Setting) -> tuple[int, int]:
    """Replicas, and ranks that share the state of one."""
    return (s.dp, 1) if s.zero == 0 and s.ep == 1 else (1, s.replicas)


def _torchtitan(plan: Plan, comments: Sequence[str]) -> str:
    """A configuration in Python, as torchtitan has them since it gave up TOML; the options mean the same on its command line."""
    s, seq = plan.setting, max(1, plan.seq)
    replicate, shard = _copies(s)
    options: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": replicate, "parallelism.data_parallel_shard_degree": shard,
        "parallelism.fsdp_reshard_after_forward": "always" if s.zero == 3 and not s.gather_once else "never",
        "parallelism.tensor_parallel_degree": s.tp, "parallelism.enable_sequence_parallel": s.sp,
        "parallelism.context_parallel_degree": s.cp, "parallelism.expert_parallel_degree": s.ep, "parallelism.pipeline_parallel_degree": s.pp,
        "training.num_tokens_per_microbatch_per_dp_rank": s.micro_batch * seq, "training.num_tokens_per_train_step": s.global_batch * seq,
        "training.max_context_length": seq, "training.dtype": "float32" if s.master or s.dtype != "bf16" else "bfloat16",
        "training.mixed_precision_param": "float32" if s.dtype in ("fp32", "tf32") else "bfloat16",
        "compile.enable": s.kernels == "compiled", "compile.enable_async_tensor_parallel": s.async_tp and s.kernels == "compiled",
    }  # fmt: skip
    if s.pp > 1:
        options |= {"parallelism.pipeline_parallel_schedule": s.pipeline.titan, "parallelism.num_pp_microbatches": s.micro_batches}
        parts = _parts(_nearest_integers(_counts(s, depth_of(plan))))
        options |= {"parallelism.module_fqns_per_model_part": parts} if parts else {}
    policy = {"none": "None", "per-op": "SelectiveAC.Config()", "full": "FullAC.Config()"}[_one_recompute(plan, ("none", "per-op", "full"))]
    base = TITAN_BASE.get(plan.model)
    where = f"from torchtitan.models.llama3.config_registry import {base} as base" if base else f"from my_configs import base  # yours of {plan.model}"
    lines = [f"    config.{key} = {value!r}" for key, value in options.items()]
    return (
        _hashes(comments) + f"from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC\n{where}\n\n\n"
        "def planned():\n    config = base()\n" + "\n".join([*lines, f"    config.activation_checkpoint = {policy}", "    return config\n"])
    )


def _parts(counts: Sequence[int]) -> list[list[str]]:
    """Modules of each chunk by torchtitan's names."""
    found, at = [], 0
    for n in counts:
        found.append([f"layers.{i}" for i in range(at, at + n)])
        at += n
    if found:
        found[0].insert(0, "tok_embeddings")
        found[-1] += ["norm", "lm_head"]
    return found


def _megatron(plan: Plan, comments: Sequence[str]) -> str:
    """Arguments of pretrain_gpt.py, as an array of a shell script."""
    s = plan.setting
    options: dict[str, Any] = {
        "tensor-model-parallel-size": s.tp, "pipeline-model-parallel-size": s.pp, "context-parallel-size": s.cp, "expert-model-parallel-size": s.ep,
        "micro-batch-size": s.micro_batch, "global-batch-size": s.global_batch,
    }  # fmt: skip
    if s.ep > 1:
        options |= {"expert-tensor-parallel-size": s.tp, "moe-token-dispatcher-type": "alltoall" if s.ragged_ep else "allgather"}
    if plan.seq:
        options["seq-length"] = plan.seq
    if depth_of(plan):
        options["num-layers"] = depth_of(plan)
    if s.pp > 1 and (counts := _nearest_integers(_counts(s, depth_of(plan)))):
        cells = [f"{'E' * (i == 0)}{'t' * n}{'L' * (i == len(counts) - 1)}" for i, n in enumerate(counts)]
        options["pipeline-model-parallel-layout"] = "'" + "|".join(cells) + "'"
    elif s.chunks > 1 and s.pp > 1:
        options["num-virtual-stages-per-pipeline-rank"] = s.chunks
    flags = {
        "sequence-parallel": s.sp and s.tp > 1, "tp-comm-overlap": s.async_tp, "use-distributed-optimizer": s.zero == 1,
        "use-megatron-fsdp": s.zero >= 2, "overlap-grad-reduce": s.overlap_grads, "overlap-param-gather": s.overlap_params and s.overlap_grads and s.zero > 0,
        "no-overlap-p2p-communication": not s.overlap_sends and s.chunks > 1, "bf16": s.dtype in ("bf16", "fp8"), "fp16": s.dtype == "fp16",
        "grad-reduce-in-bf16": s.grad_dtype == "bf16" and s.dtype in ("bf16", "fp8"),
    }  # fmt: skip
    if s.zero >= 2:
        options["data-parallel-sharding-strategy"] = "optim_grads" if s.zero == 2 else "optim_grads_params"
    if s.dtype == "fp8":
        options["fp8-format"] = "hybrid"
    options |= _megatron_recompute(plan)
    arguments = [f"--{key} {value}" for key, value in options.items()] + [f"--{key}" for key, on in flags.items() if on]
    return _hashes(comments) + "PLANNED_ARGS=(\n" + "".join(f"  {x}\n" for x in arguments) + ")\n"


def _megatron_recompute(plan: Plan) -> dict[str, Any]:
    block = {"recompute-granularity": "full", "recompute-method": "block"}
    if plan.setting.recompute == MIXED:
        full = {sum(int(SIZES.get(name, 0) * n) for name, again, n in stage if again in ("full", *OFFLOADED)) for stage in plan.setting.stages}
        modes = set(_recompute_of_layers(plan))
        if len(full) == 1 and modes == {"none", "full"} and min(full):
            return {**block, "recompute-num-layers": min(full)}
    mode = _one_recompute(plan, ("none", "selective", "full"))
    if mode == "selective":
        return {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    return {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1} if mode == "full" else {}


def _sharded(s: Setting) -> bool:
    return s.zero > 0 or s.tp > 1 or s.cp > 1  # neither library puts tp or cp next to plain copies


def _accelerate(plan: Plan, comments: Sequence[str]) -> str:
    """A file for accelerate launch --config_file."""
    s = plan.setting
    top: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP" if _sharded(s) else "MULTI_GPU",
        "mixed_precision": {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}.get(s.dtype, "no"), "num_processes": s.devices,
    }  # fmt: skip
    if _sharded(s):
        top["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": s.zero == 3 and not s.gather_once,
            "fsdp_activation_checkpointing": _one_recompute(plan, ("none", "full")) == "full",
        }  # fmt: skip
        top["parallelism_config"] = {f"parallelism_config_{k}": v for k, v in _hf_sizes(s).items()}
    if s.kernels == "compiled":
        top["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return _hashes([*comments, *_by_hand(s)]) + _yaml(top)


def _by_hand(s: Setting) -> list[str]:
    return [f"in the script: batches of {s.micro_batch} a rank, Accelerator(gradient_accumulation_steps={s.micro_batches})"]


def _hf_sizes(s: Setting) -> dict[str, int]:
    replicate, shard = _copies(s) if s.tp == 1 and s.cp == 1 else (1, s.replicas)
    return {"dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": s.tp, "cp_size": s.cp}


def _yaml(data: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in data.items():
        text = f"\n{_yaml(value, indent + '  ')}" if isinstance(value, Mapping) else f" {json.dumps(value)}\n"
        lines.append(f"{indent}{key}:{text}")
    return "".join(lines)


def _huggingface(plan: Plan, comments: Sequence[str]) -> str:
    s = plan.setting
    again = _one_recompute(plan, ("none", "full")) == "full"
    words: dict[str, Any] = {
        "per_device_train_batch_size": s.micro_batch, "gradient_accumulation_steps": s.micro_batches, "bf16": s.dtype in ("bf16", "fp8"),
        "fp16": s.dtype == "fp16", "tf32": s.dtype == "tf32", "torch_compile": s.kernels == "compiled",
    }  # fmt: skip
    if _sharded(s):
        words |= {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": s.zero == 3 and not s.gather_once, "activation_checkpointing": again}}
    else:
        words["gradient_checkpointing"] = again
    sizes = ", ".join(f"{k}={v}" for k, v in _hf_sizes(s).items())
    config = f"parallelism_config = ParallelismConfig({sizes})\n" if _sharded(s) else ""
    own = "".join(f"    {k}={v!r},\n" for k, v in words.items()) + "    parallelism_config=parallelism_config,\n" * _sharded(s)
    return (
        _hashes(comments) + "from accelerate.parallelism_config import ParallelismConfig\n" * _sharded(s) + "from transformers import TrainingArguments\n\n"
        + config + f"args = TrainingArguments(\n    output_dir=\"out\",\n{own})\n"
    )  # fmt: skip


def _deepspeed(plan: Plan, comments: Sequence[str]) -> str:
    s = plan.setting
    zero = {"stage": s.zero if s.size("data") > 1 else 0, "overlap_comm": s.overlap_params if s.zero == 3 else s.overlap_grads}
    data: dict[str, Any] = {
        "_comment": list(comments), "train_batch_size": s.global_batch, "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.micro_batches, "zero_optimization": zero, "data_types": {"grad_accum_dtype": s.grad_dtype},
    }  # fmt: skip
    if s.dtype in ("bf16", "fp16", "fp8"):
        full = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if s.dtype == "bf16" and not s.master else {}
        data["fp16" if s.dtype == "fp16" else "bf16"] = {"enabled": True, **full}
    if s.tp > 1:
        data["tensor_parallel"] = {"autotp_size": s.tp}
    if s.cp > 1:
        data["sequence_parallel_size"] = s.cp
    if s.kernels == "compiled":
        data["compile"] = {"deepcompile": True}
    return json.dumps({k: v for k, v in data.items() if v != []}, indent=2) + "\n"


def _fsdp2(plan: Plan, comments: Sequence[str]) -> str:
    s, modes = plan.setting, _recompute_of_layers(plan)
    replicate, _ = _copies(s)
    known = {"activation": "per-op", "selective": "per-op", "ffn": "full"}
    again = [known.get(w, w) for w in modes]
    constants = {
        "DP": s.replicas, "TP": s.tp, "SEQUENCE_PARALLEL": s.sp and s.tp > 1, "REPLICATE": replicate > 1,
        "RESHARD_AFTER_FORWARD": s.zero == 3 and not s.gather_once, "KEEP_GATHERED": s.gather_once,
        "RECOMPUTE": again[0] if len(set(again)) == 1 else again, "MICRO_BATCH": s.micro_batch, "MICRO_BATCHES": s.micro_batches,
        "PARAM_DTYPE": TORCH_DTYPE[s.dtype], "REDUCE_DTYPE": TORCH_DTYPE[s.grad_dtype], "COMPILE": s.kernels == "compiled",
    }  # fmt: skip
    return _hashes(comments) + _CODE.replace("@constants@", "\n".join(f"{k} = {v!r}" for k, v in constants.items()))


_CODE = '''"""Shard a transformer with FSDP2 and tensor parallelism. Import `parallelize`, or run under torchrun to see the mesh."""

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, PrepareModuleOutput
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

@constants@
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3", "c_fc")
ROWS = ("o_proj", "down_proj", "wo", "w2")
NORMS = ("input_layernorm", "post_attention_layernorm", "attention_norm", "ffn_norm", "norm1", "norm2")
PARTS = ("self_attn", "mlp", "attention", "feed_forward", "attn")  # what reads the full sequence


def mesh(device: str = "") -> DeviceMesh:
    device = device or (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    replicas = (DP, 1) if REPLICATE else (1, DP)
    return init_device_mesh(device, (*replicas, TP), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ValueError("needed a model with its layers in an nn.ModuleList; found none")
    return max(lists, key=len)


def tensor_plan(block: nn.Module) -> dict:
    """Column-wise for the first matmuls, row-wise for the second; between them the sequence is sharded if SEQUENCE_PARALLEL."""
    plan = {}
    for name, module in block.named_modules():
        last = name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Linear) and last in COLUMNS:
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in ROWS:
            plan[name] = RowwiseParallel(output_layouts=Shard(1)) if SEQUENCE_PARALLEL else RowwiseParallel()
        elif SEQUENCE_PARALLEL and last in NORMS:
            plan[name] = SequenceParallel()
    if not any(isinstance(style, (ColwiseParallel, RowwiseParallel)) for style in plan.values()):
        raise ValueError(f"no known linear layer in {type(block).__name__}; add its names to COLUMNS and ROWS")
    return plan


def gather_sequence(part: nn.Module, tp: DeviceMesh) -> None:
    """Gather the sequence before a module that reads all of it, whether its input is positional or a keyword."""

    def full(x):
        sharded = x if isinstance(x, DTensor) else DTensor.from_local(x, tp, (Shard(1),), run_check=False)
        return sharded.redistribute(placements=(Replicate(),))

    def hook(module, args, kwargs):
        if args:
            return (full(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: full(kwargs[first])}

    part.register_forward_pre_hook(hook, with_kwargs=True)


def selective_checkpoint():
    """Keep attention and every second matmul, recompute the rest."""
    seen = {"forward": 0, "recompute": 0}

    def policy(ctx, op, *args, **kwargs):
        if "attention" in str(op):
            return CheckpointPolicy.MUST_SAVE
        if op in (torch.ops.aten.mm.default, torch.ops.aten.linear.default):
            run = "recompute" if ctx.is_recompute else "forward"
            seen[run] += 1
            return CheckpointPolicy.MUST_SAVE if seen[run] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def begin_micro_batch(model: nn.Module, last: bool) -> None:
    """Call it before each of MICRO_BATCHES where KEEP_GATHERED: parameters and gradients stay gathered until the last."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and KEEP_GATHERED:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)


def parallelize(model: nn.Module, where: DeviceMesh) -> nn.Module:
    """Tensor parallelism, then activation checkpointing, then FSDP."""
    blocks = blocks_of(model)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, PARAM_DTYPE), reduce_dtype=getattr(torch, REDUCE_DTYPE))
    for i, block in enumerate(blocks):
        if TP > 1:
            parallelize_module(block, where["tp"], tensor_plan(block))
            for name, part in block.named_children():
                if SEQUENCE_PARALLEL and name in PARTS:
                    gather_sequence(part, where["tp"])
        recompute = RECOMPUTE if isinstance(RECOMPUTE, str) else RECOMPUTE[i]
        if recompute != "none":
            blocks[i] = checkpoint_wrapper(block, **({"context_fn": selective_checkpoint} if recompute == "per-op" else {}))
        if COMPILE:
            blocks[i].compile()
    if TP > 1 and SEQUENCE_PARALLEL:  # the sequence is sharded before the first block and gathered after the last
        shard = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        gather = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
        parallelize_module(blocks[0], where["tp"], shard)
        parallelize_module(blocks[-1], where["tp"], gather)
    data = where["dp_replicate", "dp_shard"]
    for module in (*blocks, model):
        fully_shard(module, mesh=data, mp_policy=policy, reshard_after_forward=RESHARD_AFTER_FORWARD)
    return model


if __name__ == "__main__":
    print(mesh())
'''

FORMS: dict[str, Callable[[Plan, Sequence[str]], str]] = {
    "torchtitan": _torchtitan, "megatron": _megatron, "fsdp2": _fsdp2, "accelerate": _accelerate, "huggingface": _huggingface,
    "deepspeed": _deepspeed,
}  # fmt: skip
