"""A plan as what people already run: FSDP2 with parallelize_module, torchtitan's settings, accelerate's ParallelismConfig,
Hugging Face's DistributedConfig.

Each form says in comments what of the plan it cannot say. The FSDP2 code stands alone: it needs torch and a model whose blocks
are found by pattern, nothing of weft.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.core.errors import PlanError
from weft.plan.plan import Plan
from weft.plan.search import describe

TITAN_RECOMPUTE = {"none": "none", "selective": "selective", "per-op": "selective", "full": "full", "mixed": "full"}
TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}


def export(plan: Plan, form: str) -> str:
    """The plan in another form."""
    known_form(form)
    return FORMS[form](plan)


def known_form(form: str) -> None:
    if form not in FORMS:
        raise PlanError(f"no form {form!r}", needed=" or ".join(FORMS), found=form)


def unsaid(plan: Plan, form: str) -> list[str]:
    """What of a plan a form cannot say."""
    s = plan.setting
    found = [f"unequal shares of the batch: {', '.join(str(x['kind']) for x in plan.shares)}"] if plan.shares else []
    found += [f"how {len(held)} tensors are held, each by itself"] if (held := plan.layouts.get("inputs")) else []
    found += [f"the step rewritten by {', '.join(rules)}"] if (rules := plan.layouts.get("rules")) else []
    found += ["recompute layer by layer: given as full, which needs no more memory"] if s.recompute == "mixed" else []
    if form == "fsdp2":
        found += [f"pp {s.pp} with {s.schedule}: cut the model with torch.distributed.pipelining first"] if s.pp > 1 else []
        found += [f"{a} {getattr(s, a)}" for a in ("cp", "ep") if getattr(s, a) > 1]
        found += ["zero1: gradients are sharded too, as in zero2"] if s.zero == 1 else []
        found += [f"recompute {s.recompute}: every second layer is recomputed whole"] if s.recompute in ("selective", "per-op") else []
    if form == "torchtitan":
        found += [f"layers of the stages: {' '.join(map(str, plan.layers))}"] if plan.layers else []
        found += [f"zero{s.zero}: data_parallel_shard shards all state"] if s.zero in (1, 2) else []
        found += [s.pipeline.unsaid] if s.pipeline.unsaid and s.pp > 1 else []
    if form == "accelerate":
        found += [f"zero{s.zero}: dp_shard_size shards all state"] if s.zero in (1, 2) else []
        found += [f"pp {s.pp} with {s.schedule}"] if s.pp > 1 else []
        found += [f"ep {s.ep}"] if s.ep > 1 else []
        found += [f"recompute {s.recompute}"] if s.recompute not in ("none", "mixed") else []
        found += ["sequence parallelism beside tp"] if s.sequence_parallel else []
    if form == "huggingface":
        found += [f"zero{s.zero}: fsdp_size shards all state"] if s.zero in (1, 2) else []
        found += [f"zero0: {s.dp} whole copies"] if s.zero == 0 and s.dp > 1 else []
        found += [f"pp {s.pp}: the order {s.schedule} of {s.micro_batches} micro-batches"] if s.pp > 1 else []
        found += [f"layers of the stages: {' '.join(map(str, plan.layers))}"] if plan.layers else []
        found += [f"cp {s.cp}"] if s.cp > 1 else []
        found += [f"recompute {s.recompute}"] if s.recompute not in ("none", "full") else []
        found += ["sequence parallelism beside tp"] if s.sequence_parallel else []
    found += ["collectives of tp beside products"] if s.overlap_tp and form != "torchtitan" else []
    found += [f"recompute {s.recompute}: given as selective"] if s.recompute == "per-op" and form == "torchtitan" else []
    return found


def _comments(plan: Plan, form: str) -> str:
    lines = [f"{plan.model} on {plan.cluster}: {describe(plan.setting)}", f"foreseen {plan.step_ms:,.1f} ms a step"]
    return "".join(f"# {x}\n" for x in [*lines, *(f"not said here: {u}" for u in unsaid(plan, form))])


def _torchtitan(plan: Plan) -> str:
    """Command-line settings of torchtitan."""
    s = plan.setting
    options = {
        "parallelism.data_parallel_replicate_degree": s.dp if s.zero == 0 else 1,
        "parallelism.data_parallel_shard_degree": 1 if s.zero == 0 else s.dp,
        "parallelism.fsdp_reshard_after_forward": "always" if s.zero == 3 and not s.keep_gathered else "never",
        "parallelism.tensor_parallel_degree": s.tp,
        "parallelism.context_parallel_degree": s.cp,
        "parallelism.expert_parallel_degree": s.ep,
        "parallelism.pipeline_parallel_degree": s.pp,
        "activation_checkpoint.mode": TITAN_RECOMPUTE[s.recompute],
        "training.local_batch_size": s.micro_batch * (s.micro_batches if s.pp > 1 else 1),
        "training.global_batch_size": s.global_batch,
    }
    if plan.seq:
        options["training.seq_len"] = plan.seq
    if s.pp > 1:
        options["parallelism.pipeline_parallel_schedule"] = s.pipeline.titan
        options["parallelism.pipeline_parallel_microbatch_size"] = s.micro_batch
    return _comments(plan, "torchtitan") + "".join(f"--{key} {value}\n" for key, value in options.items())


def _accelerate(plan: Plan) -> str:
    s = plan.setting
    sizes = {
        "dp_replicate_size": s.dp if s.zero == 0 else 1, "dp_shard_size": 1 if s.zero == 0 else s.dp, "tp_size": s.tp, "cp_size": s.cp,
    }  # fmt: skip
    args = ", ".join(f"{k}={v}" for k, v in sizes.items())
    rounds = s.micro_batches
    return (
        _comments(plan, "accelerate")
        + "from accelerate import Accelerator\nfrom accelerate.parallelism_config import ParallelismConfig\n\n"
        + f"config = ParallelismConfig({args})\n"
        + f"accelerator = Accelerator(parallelism_config=config, gradient_accumulation_steps={rounds})\n"
        + f"micro_batch = {s.micro_batch}  # samples of one device's loader at a time\n"
    )


def _huggingface(plan: Plan) -> str:
    s = plan.setting
    sizes = {"tp_size": s.tp, "fsdp_size": s.dp if s.zero else 1, "pp_size": s.pp, "ep_size": s.ep}
    args = ", ".join(f"{k}={v}" for k, v in sizes.items() if v > 1)
    again = "model.gradient_checkpointing_enable()\n" if s.recompute == "full" else ""
    return (
        _comments(plan, "huggingface")
        + "from transformers import AutoModelForCausalLM\nfrom transformers.distributed import DistributedConfig\n\n"
        + f"config = DistributedConfig({args})\n"
        + f"model = AutoModelForCausalLM.from_pretrained(MODEL, distributed_config=config)  # MODEL: {plan.model}\n"
        + again
        + f"micro_batch, micro_batches = {s.micro_batch}, {s.micro_batches}  # of every copy, each step\n"
    )


def _fsdp2(plan: Plan) -> str:
    s = plan.setting
    filled = {
        "dp": s.dp, "tp": s.tp, "sp": s.sequence_parallel, "replicate": s.zero == 0, "reshard": s.zero == 3 and not s.keep_gathered,
        "recompute": s.recompute in ("full", "mixed"), "some": s.recompute in ("selective", "per-op"), "dtype": TORCH_DTYPE.get(s.dtype, "bfloat16"),
        "reduce": TORCH_DTYPE[s.grad_dtype], "micro_batch": s.micro_batch, "rounds": s.micro_batches,
    }  # fmt: skip
    text = _CODE
    for key, value in filled.items():
        text = text.replace(f"@{key}@", str(value))
    return _comments(plan, "fsdp2") + text


_CODE = '''"""Shard a transformer with FSDP2 and tensor parallelism. Import `parallelize`, or run under torchrun to see the mesh."""

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, PrepareModuleOutput
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

DP, TP, SEQUENCE_PARALLEL = @dp@, @tp@, @sp@
REPLICATE, RESHARD_AFTER_FORWARD = @replicate@, @reshard@
RECOMPUTE_LAYERS, RECOMPUTE_SOME = @recompute@, @some@
MICRO_BATCH, MICRO_BATCHES = @micro_batch@, @rounds@
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3", "c_fc")
ROWS = ("o_proj", "down_proj", "wo", "w2")
NORMS = ("input_layernorm", "post_attention_layernorm", "attention_norm", "ffn_norm", "norm1", "norm2")
PARTS = ("self_attn", "mlp", "attention", "feed_forward", "attn")  # what reads the whole sequence


def mesh(device: str = "") -> DeviceMesh:
    device = device or (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    copies = (DP, 1) if REPLICATE else (1, DP)
    return init_device_mesh(device, (*copies, TP), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ValueError("needed a model with its layers in an nn.ModuleList; found none")
    return max(lists, key=len)


def tensor_plan(block: nn.Module) -> dict:
    """Columns of the first products, rows of the second; between them tokens are cut if SEQUENCE_PARALLEL."""
    plan = {}
    for name, module in block.named_modules():
        last = name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Linear) and last in COLUMNS:
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in ROWS:
            plan[name] = RowwiseParallel(output_layouts=Shard(1)) if SEQUENCE_PARALLEL else RowwiseParallel()
        elif SEQUENCE_PARALLEL and last in NORMS:
            plan[name] = SequenceParallel()
    if not any(isinstance(way, (ColwiseParallel, RowwiseParallel)) for way in plan.values()):
        raise ValueError(f"no known product in {type(block).__name__}; add its names to COLUMNS and ROWS")
    return plan


def bring_tokens_together(part: nn.Module, tp: DeviceMesh) -> None:
    """Before a part that reads the whole sequence, whether its block hands the tokens over by place or by name."""

    def whole(x):
        cut = x if isinstance(x, DTensor) else DTensor.from_local(x, tp, (Shard(1),), run_check=False)
        return cut.redistribute(placements=(Replicate(),))

    def hook(module, args, kwargs):
        if args:
            return (whole(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: whole(kwargs[first])}

    part.register_forward_pre_hook(hook, with_kwargs=True)


def parallelize(model: nn.Module, where: DeviceMesh) -> nn.Module:
    """Tensor parallelism, then recompute, then sharding over copies."""
    blocks = blocks_of(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.@dtype@, reduce_dtype=torch.@reduce@)
    for i, block in enumerate(blocks):
        if TP > 1:
            parallelize_module(block, where["tp"], tensor_plan(block))
            for name, part in block.named_children():
                if SEQUENCE_PARALLEL and name in PARTS:
                    bring_tokens_together(part, where["tp"])
        if RECOMPUTE_LAYERS or RECOMPUTE_SOME and i % 2:  # every second layer where only a part is recomputed
            blocks[i] = checkpoint_wrapper(block)
    if TP > 1 and SEQUENCE_PARALLEL:  # tokens are cut before the first block and whole again after the last
        cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        whole = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
        parallelize_module(blocks[0], where["tp"], cut)
        parallelize_module(blocks[-1], where["tp"], whole)
    copies = where["dp_replicate", "dp_shard"]
    for module in (*blocks, model):
        fully_shard(module, mesh=copies, mp_policy=policy, reshard_after_forward=RESHARD_AFTER_FORWARD)
    return model


if __name__ == "__main__":
    print(mesh())
'''

FORMS: dict[str, Callable[[Plan], str]] = {
    "fsdp2": _fsdp2, "torchtitan": _torchtitan, "accelerate": _accelerate, "huggingface": _huggingface,
}  # fmt: skip

