"""Modules that `weft bench planner` plans as a user brings them: the own classes of transformers, torchvision and timm, and where one of the
last two is not installed, since neither is needed otherwise, an architecture of the same kind written out here. Weights are never made."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LIBRARIES = {  # of each module: whose it is, and what it is called there
    "resnet50": ("torchvision", "resnet50"), "vgg16": ("torchvision", "vgg16_bn"), "vit_b16": ("torchvision", "vit_b_16"),
    "mixer": ("timm", "mixer_b16_224"), "efficientnet": ("timm", "efficientnet_b0"),
}  # fmt: skip
MAKERS = {"torchvision": ("torchvision.models", "get_model"), "timm": ("timm", "create_model")}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
Made = tuple[nn.Module, Any, dict[str, Tensor]]


def _words(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    return F.cross_entropy(getattr(out, "logits", out), batch["y"])


def _text(samples: int, length: int) -> dict[str, Tensor]:
    return {k: torch.zeros(samples, length, dtype=torch.long) for k in ("input_ids", "labels")}


def _images(samples: int, size: int = 224) -> dict[str, Tensor]:
    return {"x": torch.empty(samples, 3, size, size), "y": torch.zeros(samples, dtype=torch.long)}


def library(module: str) -> str:
    """Whose class a module is: transformers' where nothing else is said, and nobody's where the library is not installed."""
    name, _ = LIBRARIES.get(module, ("transformers", ""))
    return name if name not in MAKERS or _maker(name) is not None else "written out"


def _maker(name: str) -> Callable[[str], nn.Module] | None:
    where, function = MAKERS[name]
    try:
        return getattr(import_module(where), function)  # type: ignore[no-any-return]
    except (ImportError, RuntimeError):  # not installed, or built for another torch
        return None


def _own_or(module: str, written: Callable[[], nn.Module]) -> nn.Module:
    """The library's own module, or one written out."""
    name, called = LIBRARIES[module]
    make = _maker(name)
    with torch.device("meta"):
        return make(called) if make is not None else written()


def _hugging_face(kind: str, head: str, **sizes: Any) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**sizes))  # type: ignore[no-any-return]


def llama() -> Made:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 4}
    return _hugging_face("Llama", "LlamaForCausalLM", vocab_size=32000, use_cache=False, **sizes), _words, _text(4, 2048)


def gpt2() -> Made:
    return _hugging_face("GPT2", "GPT2LMHeadModel", n_embd=1024, n_layer=24, n_head=16, use_cache=False), _words, _text(8, 1024)


def qwen3() -> Made:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    return _hugging_face("Qwen3", "Qwen3ForCausalLM", vocab_size=151936, head_dim=128, use_cache=False, **sizes), _words, _text(2, 2048)


def bert() -> Made:
    return _hugging_face("Bert", "BertForMaskedLM", **LARGE), _words, _text(16, 512)


def vit() -> Made:
    return _hugging_face("ViT", "ViTForImageClassification", num_labels=1000, **LARGE), _classes, _images(32)


def opt() -> Made:
    sizes = {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "word_embed_proj_dim": 2048}
    return _hugging_face("OPT", "OPTForCausalLM", use_cache=False, **sizes), _words, _text(4, 2048)


def convnext() -> Made:
    return _hugging_face("ConvNext", "ConvNextForImageClassification", num_labels=1000), _classes, _images(32)


def _block(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


class _Bottleneck(nn.Module):
    def __init__(self, a: int, width: int, b: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(a, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), _block(width, width, stride),
            nn.Conv2d(width, b, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip
        self.side = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if a != b or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.side(x))


def _resnet50() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for i in range(count):
            out = 256 << stage
            parts.append(_Bottleneck(width, out // 4, out, 2 if i == 0 and stage else 1))
            width = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def resnet50() -> Made:
    return _own_or("resnet50", _resnet50), _classes, _images(32)


def _vgg16() -> nn.Module:
    parts: list[nn.Module] = []
    width = 3
    for out in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        parts.append(_block(width, out) if out else nn.MaxPool2d(2))
        width = out or width
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*parts, nn.Flatten(), *head)


def vgg16() -> Made:
    return _own_or("vgg16", _vgg16), _classes, _images(32)


class _Mixed(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(tokens, width // 2), nn.GELU(), nn.Linear(width // 2, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class _Mixer(nn.Module):
    """timm's mixer_b16."""

    def __init__(self, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, width, 16, 16), nn.LayerNorm(width), nn.Linear(width, 1000)
        self.layers = nn.ModuleList(_Mixed(196, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def mixer() -> Made:
    return _own_or("mixer", _Mixer), _classes, _images(64)


class _Separable(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(a, 4 * a, 1, bias=False), nn.BatchNorm2d(4 * a), nn.SiLU(),
            nn.Conv2d(4 * a, 4 * a, 3, stride, 1, groups=4 * a, bias=False), nn.BatchNorm2d(4 * a), nn.SiLU(),
            nn.Conv2d(4 * a, b, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip
        self.adds = a == b and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if self.adds else self.inner(x)


def _efficientnet() -> nn.Module:
    parts: list[nn.Module] = [_block(3, 32, 2)]
    width = 32
    for out, count, stride in ((16, 1, 1), (24, 2, 2), (40, 2, 2), (80, 3, 2), (112, 3, 1), (192, 4, 2), (320, 1, 1)):
        for i in range(count):
            parts.append(_Separable(width, out, stride if i == 0 else 1))
            width = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def efficientnet() -> Made:
    return _own_or("efficientnet", _efficientnet), _classes, _images(64)


class _Encoded(nn.Module):
    """A pre-norm layer of torch's own transformer, as torchvision's ViT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class _Vision(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, width, 16, 16), nn.LayerNorm(width), nn.Linear(width, 1000)
        self.places = nn.Parameter(torch.zeros(1, 196, width))
        self.layers = nn.ModuleList(_Encoded(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def vit_b16() -> Made:
    return _own_or("vit_b16", _Vision), _classes, _images(64)
