"""Pre-train a small language model with a plain loop on packed documents of changing length: `weft run -n 2 examples/pretrain_packed.py --plan dp2`.

Documents lie one behind another in a row; none attends to another, and no token is predicted from the document before. Rows of every call are
as long as its longest: three lengths are compiled, and the lengths between them run by the same code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft

VOCABULARY, WIDTH, HEADS, ROWS = 61, 32, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(WIDTH, dtype=self.norm.weight.dtype) * (-math.log(1e4) / WIDTH))
        x = self.embed(tokens) + torch.sin(positions[..., None] * rates)
        length = tokens.shape[1]
        own = documents[:, None, :, None] == documents[:, None, None, :]
        mask = own & torch.ones(length, length, dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all tokens that are predicted, however many rows and ranks they lie on."""
    out = model(batch["tokens"], batch["documents"], batch["positions"])
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def packed(length: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Rows of documents; where one ends, nothing is predicted."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=draw)
    starts = (torch.rand(ROWS, length, generator=draw) < 0.15).long()
    starts[:, 0] = 1
    documents = starts.cumsum(1)
    at = torch.arange(length).expand(ROWS, length)
    positions = at - (at * starts).cummax(1).values
    labels = tokens[:, 1:].clone()
    labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = -100
    return {"tokens": tokens[:, :-1].clone(), "documents": documents, "positions": positions, "labels": labels}


def batches(steps: int) -> Iterator[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for length in [24, 40, 29, 33, 60, 17, 24, 37][:steps]:
        yield packed(length, draw)


def made() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="dp2")
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    model, optimizer = made()
    step = weft.parallelize(model, loss, optimizer, next(batches(1)), asked.plan, clip=1.0)
    logged: list[dict[str, Any]] = []
    step.on_step(lambda k, values: logged.append(values))  # wandb.log(values, step=k), or writer.add_scalar(name, value, k) for each
    for batch in batches(asked.steps):
        step(batch)
    step.sync_model()
    if not dist.is_initialized() or dist.get_rank() == 0:
        norms = [p.detach().norm().item() for p in model.parameters()]
        print(json.dumps({"losses": [values["loss"] for values in logged], "norms": norms, "shapes": step.shapes}))


if __name__ == "__main__":
    main()
