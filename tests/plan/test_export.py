"""Exported code runs on its own and trains as one process does; what a form cannot say is listed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from weft.core.errors import PlanError
from weft.plan.export import export, unsaid
from weft.plan.plan import Plan
from weft.plan.setting import Setting

FORESEEN = {"step_ms": 1.0, "tokens_per_s": 1.0, "mfu": 0.5, "memory_gb": 1.0, "gap": 0.0}


def plan(**changes) -> Plan:
    limits = {"max_tp": 0, "memory_gb": 0.0, "pins": {}}
    return Plan("toy", "1x2xA100", 8, "time", "weft", replace(Setting(global_batch=4), **changes), (), (), limits, FORESEEN)


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
    ],
    ids=["sequence", "tensor", "sharded", "replicated"],
)  # fmt: skip
def test_fsdp2_trains_as_one_process(tmp_path, changes: dict) -> None:
    made = plan(dtype="fp32", **changes)
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


def test_torchtitan_settings() -> None:
    text = export(plan(dp=1, tp=2, pp=2, schedule="interleaved", virtual=2), "torchtitan")
    assert "--parallelism.tensor_parallel_degree 2\n" in text and "--parallelism.pipeline_parallel_schedule Interleaved1F1B\n" in text


def test_accelerate_says_what_it_cannot() -> None:
    text = export(plan(dp=2, zero=3, pp=2), "accelerate")
    assert "dp_shard_size=2" in text and "# not said here: pp 2 with 1f1b" in text
    assert unsaid(plan(dp=2, zero=3), "accelerate") == []


def test_huggingface_settings_are_taken_by_the_library() -> None:
    text = export(plan(dp=2, tp=2, zero=3, sequence_parallel=True), "huggingface")
    assert "# not said here: sequence parallelism beside tp\n" in text and "zero0: 2 whole copies" in export(plan(dp=2), "huggingface")
    distributed = pytest.importorskip("transformers.distributed")
    line = next(x for x in text.splitlines() if x.startswith("config = "))
    known = {}
    try:
        exec(line, {"DistributedConfig": distributed.DistributedConfig}, known)
    except TypeError as e:
        pytest.skip(f"another version of the library: {e}")
    assert (known["config"].tp_size, known["config"].fsdp_size) == (2, 2)


def test_what_a_program_has_beside_degrees_is_listed() -> None:
    layouts = {"inputs": {"param.a": {"tp": "S(1)"}, "param.b": {"tp": "S(0)"}}, "rules": ["stack_columns"]}
    made = replace(plan(tp=2), layouts=layouts, seq=0)
    for form in ("fsdp2", "torchtitan", "accelerate", "huggingface"):
        assert {"how 2 tensors are held, each by itself", "the step rewritten by stack_columns"} <= set(unsaid(made, form))
        assert "not said here: how 2 tensors" in export(made, form)
    assert "seq_len" not in export(made, "torchtitan")


def test_unknown_form() -> None:
    with pytest.raises(PlanError, match="no form 'yaml'"):
        export(plan(), "yaml")
