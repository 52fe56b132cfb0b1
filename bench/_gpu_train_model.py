"""One model of `bench.gpu_train` in a process of its own: ways to take a training step, their losses compared, then their times.

python -m bench._gpu_train_model NAME tf32|bf16 ROUNDS FOLDER
"""

from __future__ import annotations

import copy
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench._gpu_rank import timed_row
from bench._gpu_time import in_turn, kernels_of

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 6, "batch": 8},
    "llama3-8b": {"layers": 2, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000, "seq": 1024, "batch": 4},
    "vit": {"layers": 6, "batch": 64},
    "resnext50": {"batch": 64},
    "dlrm": {"batch": 2048},
    "bert-large": {"layers": 6, "batch": 16},
    "wide-resnet": {"stages": (2, 2, 2, 2), "base": 64, "batch": 32},
}
HUGGING_FACE: dict[str, dict[str, Any]] = {  # transformers' own modules, parameters in the precision's dtype
    "hf-llama": {"kind": "Llama", "layers": 16, "hidden": 2048, "ffn": 5632, "heads": 32, "kv_heads": 4, "vocab": 32000, "seq": 2048, "batch": 4},
    "hf-mixtral": {"kind": "Mixtral", "layers": 4, "hidden": 1024, "ffn": 3584, "heads": 16, "kv_heads": 4, "vocab": 32000, "seq": 2048,
                   "batch": 4},
}
CLOSE = {"tf32": 2e-3, "bf16": 2e-2}  # relative, of losses; or three times what torch.compile is off by
SORTS = {"nchwToNhwc": "turned", "nhwcToNchw": "turned", "triton_red": "reductions", "triton_per": "reductions", "triton_poi": "elementwise",
         "Memcpy": "copies", "Memset": "copies", "multi_tensor": "update"}  # fmt: skip


class Ways:
    """A model, a batch, and steps that train copies of it."""

    def __init__(self, name: str, precision: str) -> None:
        import weft_zoo as zoo

        self.precision, self.pure = precision, name in HUGGING_FACE and precision == "bf16"
        if name in HUGGING_FACE:
            self.workload = HuggingFace(**HUGGING_FACE[name], dtype=torch.bfloat16 if self.pure else torch.float32)
            self.example = self.workload.example()
            self.batch = {k: v.cuda() for k, v in self.example.items()}
            return
        settings = dict(SIZES[name])
        batch = settings.pop("batch")
        if "dropout" in vars(zoo.entry(name).settings):
            settings["dropout"] = 0.0
        self.workload = zoo.get(name, device="cpu", **settings)
        self.example = self.workload.example(batch)
        self.batch = {k: v.cuda() for k, v in self.example.items()}

    def weft(self) -> Callable[[], Any]:
        from weft.api.parallelize import parallelize

        model, low = copy.deepcopy(self.workload.model), torch.bfloat16 if self.precision == "bf16" and not self.pure else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step = parallelize(model, self.workload.loss, optimizer, self.example, device="cuda", precision=low)
        return lambda: self.step(self.batch)

    def torch(self, compiled: bool) -> Callable[[], Any]:
        model = copy.deepcopy(self.workload.model).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def loss_of(m: Any, batch: Any) -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16" and not self.pure):
                return self.workload.loss(m, batch)

        run = torch.compile(loss_of) if compiled else loss_of

        def step() -> Any:
            optimizer.zero_grad()
            loss = run(model, self.batch)
            loss.backward()
            optimizer.step()
            return loss

        return step


class HuggingFace:
    """A model of transformers for next-token prediction, built from its configuration with random weights."""

    def __init__(self, kind: str, dtype: torch.dtype, seq: int, batch: int, **sizes: int) -> None:
        import transformers

        words = {"layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size", "heads": "num_attention_heads",
                 "kv_heads": "num_key_value_heads", "vocab": "vocab_size"}  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**{words[k]: v for k, v in sizes.items()}, max_position_embeddings=seq)
        torch.manual_seed(0)
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
        self.shape, self.vocab = (batch, seq), sizes["vocab"]

    def example(self) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, self.vocab, self.shape, generator=torch.Generator().manual_seed(1))
        return {"input_ids": tokens, "labels": tokens.clone()}

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return model(**batch, use_cache=False).loss


def started(name: str, precision: str) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """The ways to run a step, warm, and what was compared."""
    torch.set_float32_matmul_precision("high")
    made = Ways(name, precision)
    ways = {"weft": made.weft(), "eager": made.torch(False), "compile": made.torch(True)}
    losses, seconds = {}, {}
    for key, way in ways.items():
        start = time.time()
        losses[key] = [float(way().detach()) for _ in range(4)]
        seconds[key] = round(time.time() - start, 1)
        for _ in range(3):
            way()
    ours, theirs = (max(abs(a - b) / abs(b) for a, b in zip(losses[k], losses["eager"], strict=True)) for k in ("weft", "compile"))
    assert ours < max(CLOSE[precision], 3 * theirs), losses
    said = f"losses of 4 steps equal eager's to {ours:.1e} (torch.compile's to {theirs:.1e})"
    return ways, {"correct": said, "first_calls_s": seconds, "how": made.step.compiled.how}


def kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """How often each sort of kernel ran in a step and its microseconds in all, and the same of those that take most of its time."""
    found, sorts = kernels_of(step), dict[str, list[float]]()
    for name, count, us in found:
        sort = next((sort for part, sort in SORTS.items() if part in name), "libraries")
        before = sorts.get(sort, [0, 0.0])
        sorts[sort] = [before[0] + count, round(before[1] + us, 1)]
    return {"sorts": sorts, "most": {name: [count, us] for name, count, us in found[:30]}}


def main() -> None:
    name, precision, rounds, folder = sys.argv[1:]
    ready, go, out = (Path(folder, f"{name}.{end}") for end in ("ready", "go", "json"))
    try:
        ways, said = started(name, precision)
        ready.touch()
        while not go.exists():
            time.sleep(0.02)
        sizes = {**SIZES, **HUGGING_FACE}[name]
        row = timed_row(", ".join([name, *(f"{k} {v}" for k, v in sizes.items())]), in_turn(ways, int(rounds)), **said)
        row["machine"] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        row["kernels_us"] = {key: kernels(ways[key]) for key in ("weft", "compile")}
    except Exception as error:
        row = {"case": name, "failed": f"{type(error).__name__}: {error}"[:800], "where": traceback.format_exc()[-1500:]}
    whole = out.with_suffix(".part")
    whole.write_text(json.dumps(row))
    whole.rename(out)


if __name__ == "__main__":
    main()
