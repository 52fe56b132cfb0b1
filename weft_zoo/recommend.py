"""Recommenders: DLRM (Naumov 2019) and XDL (Jiang 2019): embedding tables, then dense layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, reals, register

CRITEO = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
    2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip


@dataclass(frozen=True)
class DLRMSettings:
    """`tables` rows per table; `bag` ids are summed per table; `interact` is "dot" (pairs) or "cat"."""

    tables: tuple[int, ...] = (1_000_000,) * 8
    width: int = 64
    bag: int = 1
    dense: int = 512
    bottom: tuple[int, ...] = (512, 512, 64)
    top: tuple[int, ...] = (1024, 1024, 1024, 1)
    interact: str = "dot"


@dataclass(frozen=True)
class XDLSettings:
    tables: tuple[int, ...] = (1_000_000,) * 4
    width: int = 64
    bag: int = 1
    top: tuple[int, ...] = (256, 256, 2)


def _tables(rows: tuple[int, ...], width: int) -> nn.ModuleList:
    tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
    for table in tables:
        nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
    return tables


def stack(inputs: int, widths: tuple[int, ...], bias: bool = True) -> nn.Sequential:
    """Linear layers with relu between them, none after the last."""
    layers: list[nn.Module] = []
    for n in widths:
        layers += [nn.Linear(inputs, n, bias=bias), nn.ReLU()]
        inputs = n
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self, s: DLRMSettings) -> None:
        super().__init__()
        self.interact = s.interact
        self.bottom = nn.Sequential(stack(s.dense, s.bottom), nn.ReLU())
        self.tables = _tables(s.tables, s.width)
        n = len(s.tables) + 1
        if s.bottom[-1] != s.width:
            raise ValueError(f"the last bottom width {s.bottom[-1]} must be the table width {s.width}")
        self.top = stack(s.width + n * (n - 1) // 2 if s.interact == "dot" else n * s.width, s.top)
        lower = [i * n + j for i in range(n) for j in range(i)]
        self.register_buffer("pairs", torch.tensor(lower, device="cpu").to(self.top[0].weight.device), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """dense [batch, dense]; sparse [tables, batch, bag] -> logit [batch]."""
        x = self.bottom(dense)
        rows = [x, *(table(sparse[i]) for i, table in enumerate(self.tables))]
        if self.interact == "cat":
            return self.top(torch.cat(rows, 1)).squeeze(1)
        t = torch.stack(rows, 1)
        pairs = (t @ t.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


class XDL(nn.Module):
    def __init__(self, s: XDLSettings) -> None:
        super().__init__()
        self.tables = _tables(s.tables, s.width)
        self.top = stack(len(s.tables) * s.width, s.top)

    def forward(self, sparse: Tensor) -> Tensor:
        return self.top(torch.cat([table(sparse[i]) for i, table in enumerate(self.tables)], 1))


def click(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["sparse"]), batch["clicked"])


def click_of_two(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["sparse"]), batch["clicked"])


def _picks(s: DLRMSettings | XDLSettings, batch: int) -> Field:
    return ids(len(s.tables), batch, s.bag, high=min(s.tables))


def dlrm_fields(s: DLRMSettings, batch: int) -> dict[str, Field]:
    return {"dense": reals(batch, s.dense), "sparse": _picks(s, batch), "clicked": Field((batch,), 2, torch.float32)}


def xdl_fields(s: XDLSettings, batch: int) -> dict[str, Field]:
    return {"sparse": _picks(s, batch), "clicked": ids(batch, high=2)}


_small = {"tables": (50, 40, 30), "width": 8, "bag": 3}
_small_dlrm = dict(_small, dense=13, bottom=(16, 8), top=(16, 1))

# The open benchmark's sizes; MLPerf's Criteo sizes; the large Summit run of FlexFlow's scripts.
register("dlrm", DLRMSettings(), DLRM, click, dlrm_fields, _small_dlrm, batch=1024)
register(
    "dlrm-criteo", DLRMSettings(CRITEO, 128, 1, 13, (512, 256, 128), (1024, 1024, 512, 256, 1)),
    DLRM, click, dlrm_fields, _small_dlrm, batch=1024,
)  # fmt: skip
register(
    "dlrm-summit",
    DLRMSettings((1_000_000,) * 24, 64, 100, 2048, (4096,) * 4 + (64,), (4096,) * 4 + (1,), "cat"),
    DLRM, click, dlrm_fields, _small_dlrm, batch=256,
)  # fmt: skip
register("xdl", XDLSettings(), XDL, click_of_two, xdl_fields, dict(_small, top=(16, 16, 2)), batch=1024)
