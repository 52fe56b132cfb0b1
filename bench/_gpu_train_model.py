"""One model of `bench.gpu_train` in a process of its own: ways to take a training step, their losses compared, then their times.

python -m bench._gpu_train_model NAME[:LAYERS][@WAY] tf32|bf16 ROUNDS FOLDER

With a way (weft or compile) its first step alone is timed, in a process in which next to nothing was compiled before.
"""

from __future__ import annotations

import copy
import fcntl
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench._gpu_rank import timed_row
from bench._gpu_time import in_a_row, in_turn, timeline

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 6, "batch": 8},
    "llama3-8b": {"layers": 2, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000, "seq": 1024, "batch": 4},
    "vit": {"layers": 6, "batch": 64},
    "resnext50": {"batch": 64},
    "dlrm": {"batch": 2048},
    "bert-large": {"layers": 6, "batch": 16},
    "wide-resnet": {"stages": (2, 2, 2, 2), "base": 64, "batch": 32},
}
_SMALL = {"max_position_embeddings": 2048, "vocab_size": 32000}
HUGGING_FACE: dict[str, tuple[str, dict[str, Any], int, int]] = {  # transformers' own modules: class, settings, batch, tokens (or pixels)
    "hf-llama": ("LlamaForCausalLM", {**_SMALL, "num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632,
                                      "num_attention_heads": 32, "num_key_value_heads": 4}, 4, 2048),
    "hf-mixtral": ("MixtralForCausalLM", {**_SMALL, "num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3584,
                                          "num_attention_heads": 16, "num_key_value_heads": 4}, 4, 2048),
    "hf-gpt2-medium": ("GPT2LMHeadModel", {"n_layer": 24, "n_embd": 1024, "n_head": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                                           "attn_pdrop": 0.0}, 8, 1024),
    "hf-bert": ("BertForMaskedLM", {"num_hidden_layers": 12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, 32, 512),
    "hf-vit": ("ViTForImageClassification", {"num_hidden_layers": 12, "num_labels": 1000}, 64, 224),
    "hf-resnet50": ("ResNetForImageClassification", {"num_labels": 1000}, 128, 224),
}  # fmt: skip
CLOSE = {"tf32": 2e-3, "bf16": 2e-2}  # relative, of losses; or three times what torch.compile is off by
SORTS = {"nchwToNhwc": "turned", "nhwcToNchw": "turned", "triton_red": "reductions", "triton_per": "reductions", "triton_poi": "elementwise",
         "Memcpy": "copies", "Memset": "copies", "multi_tensor": "update"}  # fmt: skip


class Ways:
    """A model, a batch, and steps that train copies of it."""

    def __init__(self, name: str, precision: str) -> None:
        import weft_zoo as zoo

        name, _, layers = name.partition(":")
        self.precision, self.pure = precision, name in HUGGING_FACE and precision == "bf16"
        if name in HUGGING_FACE:
            kind, settings, *sizes = HUGGING_FACE[name]
            fewer = {k: int(layers) for k in settings if layers and k in ("num_hidden_layers", "n_layer")}
            self.workload = HuggingFace(kind, settings | fewer, *sizes, dtype=torch.bfloat16 if self.pure else torch.float32)
            self.example = self.workload.example()
            self.batch = {k: v.cuda() for k, v in self.example.items()}
            return
        settings = SIZES[name] | ({"layers": int(layers)} if layers else {})
        batch = settings.pop("batch")
        if "dropout" in vars(zoo.entry(name).settings):
            settings["dropout"] = 0.0
        self.workload = zoo.get(name, device="cpu", **settings)
        self.example = self.workload.example(batch)
        self.batch = {k: v.cuda() for k, v in self.example.items()}

    def weft(self) -> Callable[[], Any]:
        from weft.api.parallelize import parallelize

        start, self.seconds = time.time(), {"weft": 0.0}
        model, low = copy.deepcopy(self.workload.model), torch.bfloat16 if self.precision == "bf16" and not self.pure else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step = parallelize(model, self.workload.loss, optimizer, self.example, device="cuda", precision=low)
        self.seconds["weft"] = time.time() - start
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
    """A model of transformers built from its configuration with random weights. Its attention is causal or not by the flag of torch's kernel,
    never by a mask written out, which transformers would hand over while compiling: so every way of running it can use the same kernel."""

    def __init__(self, kind: str, settings: dict[str, Any], batch: int, size: int, dtype: torch.dtype) -> None:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("by_flag", sdpa_attention_forward)
        config = getattr(transformers, kind).config_class(**settings)
        config._attn_implementation = "by_flag"
        torch.manual_seed(0)
        self.model = getattr(transformers, kind)(config).to(dtype)
        self.batch, self.size, self.vocab, self.dtype = batch, size, getattr(config, "vocab_size", 0), dtype

    def example(self, seed: int = 1) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        if not self.vocab:
            pixels = torch.randn(self.batch, 3, self.size, self.size, generator=random).to(self.dtype)
            return {"pixel_values": pixels, "labels": torch.randint(0, 1000, (self.batch,), generator=random)}
        tokens = torch.randint(0, self.vocab, (self.batch, self.size), generator=random)
        return {"input_ids": tokens, "labels": tokens.clone()}

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        cache = {"use_cache": False} if "CausalLM" in type(self.model).__name__ or "LMHead" in type(self.model).__name__ else {}
        return model(**batch, **cache).loss


def started(name: str, precision: str) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """The ways to run a step, warm, and what was compared."""
    from torch._dynamo.utils import compilation_time_metrics

    torch.set_float32_matmul_precision("high")
    made = Ways(name, precision)
    _start_compilers(made)
    ways = {"weft": made.weft(), "eager": made.torch(False), "compile": made.torch(True)}
    losses, seconds, phases = {}, {}, {}
    for key, way in ways.items():
        start = time.time()
        compilation_time_metrics.clear()
        losses[key] = [float(way().detach())]
        seconds[key] = round(time.time() - start + made.seconds.get(key, 0.0), 1)
        phases[key] = {name: round(sum(took), 1) for name, took in compilation_time_metrics.items() if sum(took) > 0.5}
        losses[key] += [float(way().detach()) for _ in range(3)]
        for _ in range(3):
            way()
    ours, theirs = (max(abs(a - b) / abs(b) for a, b in zip(losses[k], losses["eager"], strict=True)) for k in ("weft", "compile"))
    assert ours < max(CLOSE[precision], 3 * theirs), losses
    said = f"losses of 4 steps equal eager's to {ours:.1e} (torch.compile's to {theirs:.1e})"
    told = {"first_step_s": seconds, "parallelize_s": round(made.seconds["weft"], 1), "compiler_s": phases}
    return ways, {"correct": said, **told, "how": made.step.compiled.how}


def _start_compilers(made: Ways) -> None:
    """The device's libraries, Inductor and its processes are there before anything is timed, for whichever way comes first."""
    from weft.runtime.traced import warm_up

    made.torch(False)()
    warm_up(torch.device("cuda"))
    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.compile(lambda x: (x.sin() + 1).sum())(x).backward()


def kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """How often each sort of kernel ran in a step and its microseconds in all, and the same of those that take most of its time."""
    found, sorts = timeline(step), dict[str, list[float]]()
    for name, count, us in found["most"]:
        sort = next((sort for part, sort in SORTS.items() if part in name), "libraries")
        before = sorts.get(sort, [0, 0.0])
        sorts[sort] = [before[0] + count, round(before[1] + us, 1)]
    return {**found, "sorts": sorts, "most": {name: [count, us] for name, count, us in found["most"][:40]}}


def described(name: str) -> str:
    name, _, layers = name.partition(":")
    kind, sizes, batch, size = HUGGING_FACE.get(name, ("", SIZES.get(name, {}), 0, 0))
    sizes = sizes | {k: int(layers) for k in sizes if layers and k in ("num_hidden_layers", "n_layer", "layers")}
    return ", ".join([name, *(f"{k} {v}" for k, v in sizes.items() if v), *([kind, f"batch {batch}x{size}"] if kind else [])])


def first_step(name: str, precision: str) -> tuple[Any, dict[str, Any]]:
    """Seconds to the first loss, in a process that has run torch's own step already."""
    model, _, way = name.partition("@")
    torch.set_float32_matmul_precision("high")
    made = Ways(model, precision)
    _start_compilers(made)
    start = time.time()
    loss = float((made.weft() if way == "weft" else made.torch(True))().detach())
    return None, {"case": f"first step of {described(model)}, {way}", "seconds": round(time.time() - start, 1), "loss": loss}


def main() -> None:
    name, precision, rounds, folder = sys.argv[1:]
    if "@" in name:
        when_told(name, Path(folder), lambda: first_step(name, precision), lambda ways: {})
        return
    when_told(name, Path(folder), lambda: started(name, precision), lambda ways: timed(name, ways, int(rounds)))


def timed(name: str, ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    row = timed_row(described(name), in_turn(ways, rounds))
    row["in_a_row_ms"] = {key: round(in_a_row(lambda i, way=way: way(), 3 * rounds), 4) for key, way in ways.items()}  # type: ignore[misc]
    print(json.dumps(row), flush=True)
    return {**row, "kernels_us": {key: kernels(ways[key]) for key in ("weft", "compile")}}


def when_told(name: str, folder: Path, start: Callable[[], tuple[Any, dict[str, Any]]], time_it: Callable[[Any], dict[str, Any]]) -> None:
    """Get ready, wait until told to go on, time, and write the row of the result; a failure is a row too."""
    ready, go, out = (folder / f"{name}.{end}" for end in ("ready", "go", "json"))
    try:
        ways, said = start()
        ready.touch()
        while not go.exists():
            time.sleep(0.02)
        with (folder / "lock").open("w") as alone:  # one is timed at a time
            fcntl.flock(alone, fcntl.LOCK_EX)
            row = {**time_it(ways), **said}
        row["machine"] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__}
    except Exception as error:
        row = {"case": name, "failed": f"{type(error).__name__}: {error}"[:800], "where": traceback.format_exc()[-1500:]}
    whole = out.with_suffix(".part")
    whole.write_text(json.dumps(row))
    whole.rename(out)


if __name__ == "__main__":
    main()
