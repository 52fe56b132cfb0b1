"""A latent-diffusion U-Net with cross-attention: the 860M one of Stable Diffusion 1 (Rombach 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, reals, register


@dataclass(frozen=True)
class Settings:
    """`attend` says at which levels, finest first, there is attention; `groups` is that of the group norms."""

    channels: int = 320
    levels: tuple[int, ...] = (1, 2, 4, 4)
    depth: int = 2
    attend: tuple[bool, ...] = (True, True, True, False)
    heads: int = 8
    context: int = 768
    words: int = 77
    latent: int = 4
    image: int = 64
    groups: int = 32
    steps: int = 1000


class Residual(nn.Module):
    """norm, silu, conv; the time is added; norm, silu, conv; a skip."""

    def __init__(self, inputs: int, out: int, s: Settings) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(s.groups, inputs, 1e-5), nn.Conv2d(inputs, out, 3, padding=1)
        self.time = nn.Linear(4 * s.channels, out)
        self.norm2, self.conv2 = nn.GroupNorm(s.groups, out, 1e-5), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(inputs, out, 1) if inputs != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Attention(nn.Module):
    """Attention of image positions to themselves, or to the words of the context."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, context), (self.v, context))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Self-attention, cross-attention and a gated feed-forward over the positions of an image."""

    def __init__(self, width: int, s: Settings) -> None:
        super().__init__()
        self.norm, self.enter = nn.GroupNorm(s.groups, width, 1e-6), nn.Conv2d(width, width, 1)
        self.norm1, self.self_attention = nn.LayerNorm(width), Attention(width, width, s.heads)
        self.norm2, self.cross_attention = nn.LayerNorm(width), Attention(width, s.context, s.heads)
        self.norm3, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.leave = nn.Conv2d(width, width, 1)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        _, _, h, w = image.shape
        x = self.enter(self.norm(image)).flatten(2).transpose(1, 2)
        y = self.norm1(x)
        x = x + self.self_attention(y, y)
        x = x + self.cross_attention(self.norm2(x), context)
        value, gate = self.up(self.norm3(x)).chunk(2, -1)
        x = x + self.down(value * F.gelu(gate))
        return image + self.leave(x.transpose(1, 2).unflatten(2, (h, w)))


class Step(nn.Module):
    """A residual block, and attention where the level has it."""

    def __init__(self, inputs: int, out: int, attend: bool, s: Settings) -> None:
        super().__init__()
        self.residual = Residual(inputs, out, s)
        self.transformer = Transformer(out, s) if attend else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.transformer is None else self.transformer(x, context)


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def wave(t: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding of the time step, cosines first."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000) / half * torch.arange(half, device=t.device))
    angle = t[:, None].float() * frequencies
    return torch.cat([angle.cos(), angle.sin()], -1)


class UNet(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.settings, c = s, s.channels
        self.time = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.enter = nn.Conv2d(s.latent, c, 3, padding=1)
        self.down, self.shrink, widths = self._downwards(s)
        wide = widths[-1]
        self.middle = nn.ModuleList([Step(wide, wide, True, s), Step(wide, wide, False, s)])
        self.up, self.grow = self._upwards(s, widths)
        self.norm, self.leave = nn.GroupNorm(s.groups, c, 1e-5), nn.Conv2d(c, s.latent, 3, padding=1)
        beta = torch.linspace(0.00085**0.5, 0.012**0.5, s.steps, dtype=torch.float64, device="cpu") ** 2
        kept = (1 - beta).cumprod(0).to(self.leave.weight.dtype)
        self.register_buffer("kept", kept.to(self.leave.weight.device), persistent=False)

    @staticmethod
    def _downwards(s: Settings) -> tuple[nn.ModuleList, nn.ModuleList, list[int]]:
        down, shrink, widths, width = nn.ModuleList(), nn.ModuleList(), [s.channels], s.channels
        for level, multiple in enumerate(s.levels):
            for _ in range(s.depth):
                down.append(Step(width, s.channels * multiple, s.attend[level], s))
                width = s.channels * multiple
                widths.append(width)
            if level + 1 < len(s.levels):
                shrink.append(nn.Conv2d(width, width, 3, 2, padding=1))
                widths.append(width)
        return down, shrink, widths

    @staticmethod
    def _upwards(s: Settings, skips: list[int]) -> tuple[nn.ModuleList, nn.ModuleList]:
        up, grow, width, skips = nn.ModuleList(), nn.ModuleList(), skips[-1], list(skips)
        for level, multiple in reversed(list(enumerate(s.levels))):
            for _ in range(s.depth + 1):
                up.append(Step(width + skips.pop(), s.channels * multiple, s.attend[level], s))
                width = s.channels * multiple
            if level:
                grow.append(Up(width))
        return up, grow

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        s, time = self.settings, self.time(wave(t, self.settings.channels).to(x))
        skips = [self.enter(x)]
        for i, step in enumerate(self.down):
            skips.append(step(skips[-1], time, context))
            if (i + 1) % s.depth == 0 and i + 1 < len(self.down):
                skips.append(self.shrink[i // s.depth](skips[-1]))
        x = self.middle[1](self.middle[0](skips[-1], time, context), time, context)
        for i, step in enumerate(self.up):
            x = step(torch.cat([x, skips.pop()], 1), time, context)
            if (i + 1) % (s.depth + 1) == 0 and i + 1 < len(self.up):
                x = self.grow[i // (s.depth + 1)](x)
        return self.leave(F.silu(self.norm(x)))


def denoise(model: nn.Module, batch: Batch) -> Tensor:
    """Mix noise into the latents at a random step and ask the model for it (Ho 2020, algorithm 1)."""
    kept = model.kept[batch["t"]][:, None, None, None]
    noisy = kept.sqrt() * batch["latents"] + (1 - kept).sqrt() * batch["noise"]
    return F.mse_loss(model(noisy, batch["t"], batch["context"]), batch["noise"])


def fields(s: Settings, batch: int) -> dict[str, Field]:
    image = batch, s.latent, s.image, s.image
    return {
        "latents": reals(*image), "noise": reals(*image), "t": ids(batch, high=s.steps),
        "context": reals(batch, s.words, s.context),
    }  # fmt: skip


SMALL = {
    "channels": 8, "levels": (1, 2), "attend": (True, False), "depth": 1, "heads": 2, "context": 12, "words": 5,
    "image": 8, "groups": 4,
}  # fmt: skip

register("unet", Settings(), UNet, denoise, fields, SMALL)
