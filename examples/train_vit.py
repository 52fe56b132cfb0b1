"""Train a vision transformer on a data set that batches do not divide: `weft run -n 2 examples/train_vit.py --plan dp2`.

Every rank reads its own rows. The last batch of an epoch has fewer samples, here fewer than there are ranks: nothing is dropped or padded, and
the step is the one a single process would take.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft

CLASSES, SIZE, PATCH, WIDTH, HEADS, BATCH, SAMPLES = 5, 16, 4, 24, 3, 8, 25


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """As timm has it: patches, a class token, learnt positions, blocks with the norm first."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2 + 1, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Images(Dataset[Any]):
    def __init__(self, samples: int = SAMPLES) -> None:
        draw = torch.Generator().manual_seed(2)
        self.x = torch.randn(samples, 3, SIZE, SIZE, generator=draw, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (samples,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "y": self.y[i]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)


def made() -> tuple[VisionTransformer, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = VisionTransformer().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="dp2")
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    model, optimizer, scheduler = made()
    data = Images()
    example = {"x": data.x[:BATCH], "y": data.y[:BATCH]}
    step = weft.parallelize(model, loss, optimizer, example, asked.plan)
    losses = []
    for batch in DataLoader(data, batch_sampler=step.rows(len(data), seed=3)):
        losses.append(step(batch).item())
        scheduler.step()
        if step.steps == asked.steps:
            break
    step.sync_model()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "norms": [p.detach().norm().item() for p in model.parameters()]}))


if __name__ == "__main__":
    main()
