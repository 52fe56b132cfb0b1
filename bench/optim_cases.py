"""Every setting of every optimizer that torch's own tests try:
`weft bench wild --cases bench/optim_cases.py --plans "dp2;dp2,zero1;dp2,zero3;tp2"`.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

from bench._wild.tools import Table, cross_entropy, mlp, vectors

CASES = Table()


def add(kind: type[torch.optim.Optimizer], words: str, options: dict[str, Any]) -> None:
    def make() -> tuple[Any, ...]:
        matrices = kind.__name__ == "Muon"  # takes no vectors
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)) if matrices else mlp()
        return model, cross_entropy, vectors(), lambda m: kind(m.parameters(), **copy.deepcopy(options))

    CASES.add(re.sub(r"\W+", "_", f"{kind.__name__}_{words}".lower()), make)


for info in optim_db:
    for given in info.optim_inputs_func(device="cpu"):
        add(info.optim_cls, given.desc, given.kwargs)
