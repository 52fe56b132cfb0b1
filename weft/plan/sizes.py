"""Models for a question of memory alone: by the sizes of a Hugging Face config where its kind is known, else built on `meta` and watched.

Of a model that is watched, one sample runs forward without values: what torch keeps for the backward is counted block by block, each tensor
once, parameters apart. It is replicated and sharded only, since nothing is known of how its matmuls could be shared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.core.errors import PlanError, UnknownName, reason
from weft.core.schema import short
from weft.frontend.catalog import few_layers
from weft.plan.blocks import Stack
from weft.plan.setting import Setting
from weft.plan.workload import Block, Workload

STATE = {  # bytes a parameter next to its copy in fp32
    "adamw": 8.0, "adam": 8.0, "adamax": 8.0, "nadam": 8.0, "radam": 8.0, "adamw8bit": 2.0, "muon": 4.0, "lion": 4.0, "momentum": 4.0, "rmsprop": 4.0,
    "adagrad": 4.0, "adadelta": 8.0, "sgd": 0.0, "adafactor": 0.01,
}  # fmt: skip
LLAMA = {"gated": True, "rotary": True, "bias": False}
KINDS: dict[str, dict[str, Any]] = {  # what the sizes of a config do not say
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "smollm3", "mixtral", "qwen3_moe", "ministral"), LLAMA),
    "gpt2": {"gated": False, "rotary": False, "bias": True},
}  # fmt: skip
NAMES = {
    "layers": ("num_hidden_layers", "n_layer"), "hidden": ("hidden_size", "n_embd"), "heads": ("num_attention_heads", "n_head"), "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",), "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner"), "head": ("head_dim",),
    "experts": ("num_local_experts", "num_experts"), "chosen": ("num_experts_per_tok",), "seq": ("max_position_embeddings", "n_positions"),
}  # fmt: skip
NEEDED = ("layers", "hidden", "heads", "vocab")


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer. `chosen` of `experts` feed-forwards serve a token, in every `moe_every`-th layer."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    ffn: int = 0
    name: str = "transformer"
    gated: bool = False
    causal: bool = True
    rotary: bool = False
    bias: bool = True
    tied: bool = True
    dropout: bool = False
    experts: int = 0
    chosen: int = 1
    moe_every: int = 1
    head: int = 0  # width of a head, where it is not hidden / heads

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden


@dataclass(frozen=True)
class Trained:
    """How it is trained: the optimizer's bytes, and the rank of adapters where only these learn."""

    state: float = 8.0
    lora: int = 0

    def on(self, block: Block, wide: float) -> Block:
        """`wide`: inputs and outputs of the matmuls of a block, which adapters of rank r have r times."""
        block = replace(block, state=self.state)
        return replace(block, trained=self.lora * wide) if self.lora else block


@dataclass(frozen=True)
class Stacked:
    """A model that is counted by its captured blocks: of a name or a Hugging Face folder, or of a module that has these sizes."""

    name: str
    length: int = 0
    shape: Shape | None = None
    how: Trained = field(default_factory=Trained)

    def stack(self, dtype: str = "bf16") -> Stack:
        from weft.plan.planner import captured_stack, sized_stack

        return sized_stack(self.shape, dtype) if self.shape is not None else captured_stack(self.name, dtype, self.length)[0]

    @property
    def seq(self) -> int:
        return self.shape.seq if self.shape is not None else self.length or self.stack().seq

    def with_seq(self, seq: int) -> Stacked:
        return replace(self, length=seq, shape=replace(self.shape, seq=seq) if self.shape is not None else None)

    @property
    def params(self) -> float:
        return self.stack().params

    @property
    def experts(self) -> int:
        return self.stack().experts

    def may_shard(self, tp: int) -> bool:
        return self.stack().may_shard(tp, 1)

    @property
    def recompute(self) -> tuple[str, ...]:
        return ("", "selective", "full")

    def work(self, s: Setting) -> Workload:
        stack = self.stack(s.dtype)
        made = stack.work(s)
        return replace(made, first=self.how.on(made.first, 0), layer=self.how.on(made.layer, stack.wide / s.tp), last=self.how.on(made.last, 0))


@dataclass(frozen=True)
class WatchedPart:
    """Of a model that was watched: parameters, bytes kept for the backward of one sample, bytes that go in, the largest tensor, widths of matmuls."""

    name: str
    params: float
    kept: float
    entered: float
    largest: float
    wide: float = 0.0


@dataclass(frozen=True)
class Watched:
    """A model by what it was seen to keep."""

    name: str
    parts: tuple[WatchedPart, ...]
    seq: int
    remake: Any = None  # with another length
    experts: int = 0  # not told apart
    how: Trained = field(default_factory=Trained)

    @property
    def params(self) -> float:
        return sum(p.params for p in self.parts)

    @property
    def recompute(self) -> tuple[str, ...]:
        return ("", "full")

    def with_seq(self, seq: int) -> Watched:
        made: Watched = self.remake(seq)
        return replace(made, how=self.how)

    def may_shard(self, tp: int) -> bool:
        return tp == 1

    def work(self, s: Setting) -> Workload:
        n = s.micro_batch
        blocks = tuple(
            (self.how.on(Block(p.name, (), p.params, kept=n * p.entered, work=n * p.largest, saved=n * p.kept), p.wide), 1) for p in self.parts
        )
        empty = Block("nothing", ())
        return Workload(self.name, empty, empty, len(blocks), empty, n, 0.0, 0.0, stages=(blocks,))


Model = Stacked | Watched


def model_of(source: str, seq: int = 0) -> Model:
    """A config.json, a folder with one, or a name that is known."""
    path = Path(source.removeprefix("hf:"))
    if path.is_dir() or path.suffix == ".json":
        return _of_config(path / "config.json" if path.is_dir() else path, seq)
    try:
        known = few_layers(source)
    except UnknownName as error:
        needed = "a config.json of Hugging Face, a folder with one, or a known name such as llama3-8b"
        raise UnknownName(f"no config and no model named {source!r}", needed=needed, found=repr(source), try_="download the config.json first") from error
    if known:
        return Stacked(source, seq)
    return _watched_source(source, seq)


def _of_config(path: Path, seq: int) -> Model:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnknownName(f"no Hugging Face config at {path}", needed="a config.json", found=reason(error)) from error
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise UnknownName(f"{path} is no config of Hugging Face", needed="a config.json with a model_type", found=short(config))
    made = shape_of(config, seq)
    return Stacked(made.name, shape=made) if made is not None else _of_folder(f"hf:{path.parent}", seq)


def _of_folder(source: str, seq: int) -> Model:
    """A model of an unknown kind as it runs without values or, where it asks for one, as it is captured."""
    try:
        return _watched_source(source, seq)
    except PlanError as refused:
        captured = Stacked(source, seq)
        try:
            captured.stack()
        except Exception:  # as it said in words when it ran without values
            raise refused from None
        return captured


def shape_of(config: Mapping[str, Any], seq: int = 0) -> Shape | None:
    """The sizes of a config whose kind is known by them; nothing of any other."""
    flags = KINDS.get(str(config["model_type"]))
    found = {ours: next((config[n] for n in names if config.get(n)), 0) for ours, names in NAMES.items()}
    odd = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1 or config.get("quantization_config")
    if flags is None or odd or not all(found[name] for name in NEEDED) or not (found["ffn"] or flags["bias"]):
        return None
    tied = config.get("tie_word_embeddings", not flags["gated"])
    sizes: dict[str, Any] = {k: int(v) for k, v in found.items()}
    longest = sizes.pop("seq") or 2048
    if not sizes["experts"]:
        sizes.pop("chosen")
    return replace(Shape(1, 1, 1, 1, seq or longest, tied=bool(tied), name=str(config["model_type"]), **flags), **sizes)


# --- models that are watched


def _watched_source(source: str, seq: int) -> Watched:
    import torch

    from weft.frontend.source import load, longest

    settings = {"seq": seq} if seq and source.startswith("hf:") else {}
    work = load(source, device="meta", dtype=torch.bfloat16, **settings)
    length = seq or longest(work.settings)
    return watch(work.name, work.model, work.loss, work.example(1, device="meta"), length, lambda n: _watched_source(source, n))


def watch(name: str, model: Any, loss: Any, batch: Any, seq: int = 0, remake: Any = None) -> Watched:
    """Run one sample forward on `meta` and count what is kept, block by block."""
    import torch

    blocks = _blocks(model)
    inside: list[str] = ["the rest"]
    seen = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    alive: list[Any] = []
    kept = dict.fromkeys([*blocks, "the rest"], 0.0)
    entered, largest = dict(kept), dict(kept)

    def pack(x: Any) -> Any:
        storage = x.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(x)
            kept[inside[-1]] += storage.nbytes()
            largest[inside[-1]] = max(largest[inside[-1]], float(storage.nbytes()))
        return x

    def enter(module: Any, args: Any, kwargs: Any, block: str) -> None:
        inside.append(block)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad]
        entered[block] += sum(x.numel() * x.element_size() for x in tensors)

    hooks = []
    for block, module in blocks.items():
        hooks.append(module.register_forward_pre_hook(lambda m, a, k, b=block: enter(m, a, k, b), with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda m, a, o: inside.pop() and None))
    model.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            alive.append(loss(model, batch))
    except Exception as error:
        raise PlanError(
            f"{name} does not run without values", needed="a forward pass whose shapes do not depend on values", found=str(error).splitlines()[0][:200],
        ) from error  # fmt: skip
    finally:
        for hook in hooks:
            hook.remove()
    own = {block: sum(p.numel() for p in module.parameters()) for block, module in blocks.items()}
    wide = {block: sum(sum(p.shape) for p in module.parameters() if p.ndim == 2) for block, module in blocks.items()}
    rest = sum(p.numel() for p in model.parameters()) - sum(own.values())
    parts = [WatchedPart(b, own[b], kept[b], entered[b], largest[b], wide[b]) for b in blocks]
    return Watched(name, (*parts, WatchedPart("the rest", rest, kept["the rest"], 0.0, largest["the rest"])), seq, remake)


def _blocks(model: Any) -> dict[str, Any]:
    """Modules of the outermost lists, which is what is recomputed and gathered at a time."""
    from torch import nn

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        listed = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
        if listed and not any(name.startswith(f"{outer}.") for outer in found):
            found |= {f"{name}.{i}" if name else str(i): m for i, m in enumerate(module) if any(True for _ in m.parameters())}
    return found
