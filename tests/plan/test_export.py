"""Exported code runs on its own and trains as one process does; what a form cannot say is listed."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from weft.core.errors import PlanError
from weft.plan.configs import read
from weft.plan.export import FORMS, decisions, export, lost, unsaid
from weft.plan.plan import Plan
from weft.plan.schedules import SCHEDULES
from weft.plan.setting import Setting
from weft.plan.spec import RECOMPUTE

PREDICTED_KEYS = {"step_ms": 1.0, "tokens_per_s": 1.0, "mfu": 0.5, "memory_gb": 1.0, "gap": 0.0}


def plan(**changes) -> Plan:
    limits = {"max_tp": 0, "memory_gb": 0.0, "pins": {}}
    return Plan("toy.py:make", "1x2xA100", 8, "time", "weft", Setting.counted(**{"global_batch": 4, **changes}), limits, PREDICTED_KEYS)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(x))) * scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.self_attn = nn.LayerNorm(16), Mlp()
        self.norm2, self.mlp = nn.LayerNorm(16), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x=self.norm1(x), scale=0.5)  # by name, as transformers' blocks call theirs
        return x + self.mlp(self.norm2(x))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def losses(model: nn.Module, x: torch.Tensor) -> list[float]:
    opt, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        found.append(loss.detach())
    return found


def worker(rank: int, path: str, store: str, copies: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    spec = importlib.util.spec_from_file_location("exported", path)
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16)
    alone, shared = Toy(), Toy()
    shared.load_state_dict(alone.state_dict())
    shared = code.parallelize(shared, code.mesh("cpu"))
    own = x.chunk(copies)[rank] if copies > 1 else x
    expected, found = losses(alone, x), losses(shared, own)
    for a, b in zip(expected, found, strict=True):
        if copies > 1:
            dist.all_reduce(b)
            b = b / copies
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2, "zero": 3, "sequence_parallel": True, "micro_batch": 4}, {"tp": 2, "micro_batch": 4},
        {"dp": 2, "zero": 3, "micro_batch": 2, "recompute": "full"}, {"dp": 2, "zero": 0, "micro_batch": 2},
        {"dp": 2, "zero": 2, "micro_batch": 2, "recompute": "per-op"},
    ],
    ids=["sequence", "tensor", "sharded", "replicated", "per op"],
)  # fmt: skip
def test_fsdp2_trains_as_one_process(tmp_path, changes: dict) -> None:
    made = plan(dtype="fp32", kernels="eager", **changes)
    (tmp_path / "exported.py").write_text(export(made, "fsdp2"))
    assert "weft" not in "".join(line for line in export(made, "fsdp2").splitlines() if "import" in line)
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    args = (str(tmp_path / "exported.py"), str(tmp_path / "store"), made.setting.dp)
    ranks = [context.Process(target=worker, args=(rank, *args), daemon=True) for rank in range(2)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(60)
        if p.is_alive():
            p.kill()
    assert [p.exitcode for p in ranks] == [0, 0]


DEPTH = 32


def drawn(rng: random.Random) -> Plan:
    """A plan with any decisions that go together."""
    pp = rng.choice((1, 1, 2, 4))
    tp, cp, ep, copies = rng.choice((1, 2, 8)), rng.choice((1, 1, 2)), rng.choice((1, 1, 2)), rng.choice((1, 2, 4))
    dp, micro, rounds = copies * ep, rng.choice((1, 2, 4)), pp * rng.choice((1, 2, 4))
    schedule = rng.choice(list(SCHEDULES)) if pp > 1 else "1f1b"
    virtual = rng.choice((2, 4)) if schedule == "interleaved" else 1
    dtype = rng.choice(("bf16", "bf16", "bf16", "fp16", "fp32", "tf32", "fp8"))
    zero = rng.choice((0, 1, 2, 3))
    stages, layers, recompute = (), (), rng.choice(RECOMPUTE) or "none"
    if rng.random() < 0.3:
        recompute, ways = "mixed", rng.choice((("none", "full"), ("none", "full"), ("none",), ("none", "activation"), ("full", "ffn", "per-op")))
        cuts = pp * virtual
        each = [DEPTH // cuts] * cuts
        rows = [[("layer", rng.choice(ways), 1) for _ in range(n)] for n in each]
        if pp == 2 and virtual == 1 and rng.random() < 0.5:  # half a layer to the other side
            rows[0].append(("attention", "none", 1))
            rows[1][0] = ("ffn", "none", 1)
        rows[0].insert(0, ("first", "none", 1))
        rows[-1].append(("last", "none", 1))
        stages = tuple(tuple((name, way, 1) for name, way, _ in row) for row in rows)
        layers = tuple(sum(name == "layer" for name, _, _ in row) for row in stages) if pp > 1 else ()
    elif pp > 1 and rng.random() < 0.5:
        cuts = pp * virtual
        layers = [DEPTH // cuts] * cuts
        layers[0], layers[-1] = layers[0] - 1, layers[-1] + 1
        layers = tuple(layers)
    setting = Setting.counted(
        dp * micro * rounds, micro, dp, tp, pp, cp, ep, virtual, tp > 1 and rng.random() < 0.5, zero, zero == 3 and rng.random() < 0.3, recompute,
        schedule, kernels=rng.choice(("compiled", "compiled", "eager", "classic")), dtype=dtype, grad_dtype=rng.choice(("fp32", "fp32", "bf16")),
        overlap_grads=rng.random() < 0.8, overlap_params=rng.random() < 0.8, overlap_sends=rng.random() < 0.5,
        overlap_tp=tp > 1 and rng.random() < 0.5, master=rng.random() < 0.8,
    )  # fmt: skip
    setting.check()
    setting = replace(setting, stages=stages) if stages else setting.with_layers(layers)
    return replace(plan(), model="llama3-8b", seq=8192, setting=setting)


ALWAYS = {  # what a form never loses
    "torchtitan": {"dp", "tp", "pp", "cp", "ep", "virtual", "micro_batch", "global_batch", "sequence_parallel"},
    "megatron": {"dp", "tp", "pp", "cp", "ep", "virtual", "micro_batch", "global_batch", "sequence_parallel", "zero", "overlap_grads"},
    "fsdp2": {"micro_batch", "dp", "tp", "sequence_parallel"}, "accelerate": {"tp", "cp"}, "huggingface": {"tp", "cp", "dp", "micro_batch"},
    "deepspeed": {"tp", "cp", "zero", "global_batch", "micro_batch"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_back_is_the_plan_but_for_what_is_named(form: str) -> None:
    rng = random.Random(7)
    for _ in range(150):
        made = drawn(rng)
        text = export(made, form)
        back = read(text, "", made.setting.devices, made.seq, DEPTH)
        assert back.form == form and not back.unused, back.unused
        ours, theirs = decisions(made.setting, DEPTH), decisions(back.setting, DEPTH)
        pipeline = {"virtual", "schedule", "layers", "overlap_sends"} if "not expressed here: pp " in text else set()
        for name, value in ours.items():
            if name not in pipeline and f"not expressed here: {name} " not in text:
                assert theirs[name] == value, (name, made.setting, text)
        if made.setting.pp == 1 or "pp" in ALWAYS[form]:
            assert not ALWAYS[form] & set(lost(made, form)), text


def test_what_was_written_wrongly_once() -> None:
    """Halves of layers, layers that recompute unlike each other, chunks, async tp, compile and what selective means."""
    halves = ((("first", "none", 1), ("layer", "none", 8), ("attention", "none", 1)), (("ffn", "none", 1), ("layer", "none", 8)),
              (("layer", "none", 8), ("attention", "none", 1)), (("ffn", "none", 1), ("layer", "none", 6), ("last", "none", 1)))  # fmt: skip
    made = replace(plan(pp=4, dp=1, global_batch=32, recompute="mixed", stages=halves), model="llama3-8b", seq=8192)
    text = export(made, "torchtitan")
    assert "not expressed here: layers 8.5 8.5 8.5 6.5, which reads back as 8 9 9 6" in text, "no layer is dropped"
    assert "config.activation_checkpoint = None" in text, "a mix in which nothing is recomputed is no recompute"
    assert read(text, seq=8192).setting.layers == (8, 9, 9, 6)
    other = export(replace(plan(tp=2, overlap_tp=True, sequence_parallel=True, recompute="selective", micro_batch=4), model="llama3-8b"), "torchtitan")
    assert "config.compile.enable = True" in other and "config.compile.enable_async_tensor_parallel = True" in other
    assert "not expressed here: recompute selective, which reads back as per-op" in other
    stages = tuple(tuple((n, "full" if i == 1 else w, c) for i, (n, w, c) in enumerate(s)) for s in halves)
    some = replace(made, setting=replace(made.setting, stages=stages))
    assert "not expressed here: recompute" in export(some, "torchtitan") and "not expressed here: recompute" in export(some, "megatron")


def test_megatron_layout_as_its_own_parser_reads_it() -> None:
    text = export(replace(plan(pp=2, virtual=2, schedule="interleaved", global_batch=8, overlap_sends=True), model="llama3-8b", seq=4096), "megatron")
    assert "--pipeline-model-parallel-layout 'E" + "|".join(["t" * 8] * 4) + "L'" in text and text.endswith(")\n")
    assert read("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|(tt|)*2,t*4L --micro-batch-size 1").setting.layers == (3, 2, 2, 4)


def test_names_are_those_of_the_libraries() -> None:
    """Keys of what is installed here are looked up; of the others, they were read off their sources in 2026."""
    args = pytest.importorskip("transformers").TrainingArguments.__dataclass_fields__
    text = export(plan(dp=2, tp=2, zero=3), "huggingface")
    words = {w.strip().partition("=")[0] for w in text.partition("TrainingArguments(")[2].splitlines() if "=" in w}
    assert words and words <= set(args)


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        ("[training]\nlocal_batch_size = 4\nseq_len = 4096\n[parallelism]\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = 'full'\n"
         "[compile]\nenable = true\n", "torchtitan", {"tp": 2, "dp": 4, "micro_batch": 4, "zero": 3, "recompute": "full", "kernels": "compiled"}),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 64 --bf16 \\\n"
         " --use-distributed-optimizer --recompute-activations --sequence-parallel", "megatron",
         {"tp": 4, "dp": 2, "zero": 1, "recompute": "selective", "sequence_parallel": True, "dtype": "bf16"}),
        ('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}',
         "deepspeed", {"zero": 3, "micro_batch": 2, "global_batch": 64, "dtype": "fp16", "overlap_params": True}),
        ("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n",
         "accelerate", {"zero": 3, "dp": 8, "dtype": "bf16"}),
        ("args = TrainingArguments(output_dir='x', per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True, gradient_checkpointing=True)",
         "huggingface", {"dp": 8, "micro_batch": 2, "global_batch": 64, "recompute": "full", "zero": 0}),
        ("def mine():\n    return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=2), "
         "training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192), activation_checkpoint=FullAC.Config())",
         "torchtitan", {"tp": 2, "dp": 4, "micro_batch": 2, "recompute": "full", "kernels": "eager"}),
    ],
    ids=["titan toml", "megatron line", "deepspeed", "accelerate", "huggingface", "titan python"],
)  # fmt: skip
def test_configurations_others_wrote(text: str, form: str, expected: dict) -> None:
    found = read(text, "", 8, 8192, DEPTH)
    assert found.form == form and {k: found.setting.named(k) for k in expected} == expected


def test_what_is_not_understood_is_named() -> None:
    found = read('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 8, "wall_clock_breakdown": true}', "", 8)
    assert found.unused == ("wall_clock_breakdown",) and "offload_optimizer" in found.unmodelled[0] and "train_micro_batch_size_per_gpu" in found.assumed
    hybrid = read("--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 4", "", 8)
    assert hybrid.setting.dp == 8 and "HSDP, 2 copies of 4 shards" in hybrid.unmodelled[0]
    with pytest.raises(PlanError, match="a system that weft reads"):
        read('{"a": 1}')
    with pytest.raises(PlanError, match="cannot read micro-batch-size = 'many'"):
        read("--micro-batch-size many")
    with pytest.raises(PlanError, match="do not fill the cluster"):
        read("--tensor-model-parallel-size 3 --micro-batch-size 1", "", 8)


def test_what_a_program_has_beside_degrees_is_listed() -> None:
    layouts = {"inputs": {"param.a": {"tp": "S(1)"}, "param.b": {"tp": "S(0)"}}, "rules": ["stack_columns"]}
    made = replace(plan(tp=2), layouts=layouts, seq=0)
    for form in FORMS:
        assert {"how 2 tensors are sharded, each by itself", "the step rewritten by stack_columns"} <= set(unsaid(made, form))
        assert "not expressed here: how 2 tensors" in export(made, form)


def test_unknown_form() -> None:
    with pytest.raises(PlanError, match="no system named 'yaml'"):
        export(plan(), "yaml")
