"""Updates of tables by the rows a batch looked up, against torch.optim on the whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ops.cases_capture import THIRD, torch_step
from tests.ops.harness import Case, case, index, normal, positive
from weft.ops import optimizers, rowwise
from weft.ops.fill import indices

Step = Callable[..., Any]


def looked_up(update: Any, **how: Any) -> Step:
    return lambda p, x, i, *rest: rowwise.AT[update](p, x, i, indices(p, 0), *rest, dim=0, **how)


def whole(step: Step) -> Step:
    """The same step of the gradient that the rows make; rows of equal index are added."""

    def run(p: torch.Tensor, x: torch.Tensor, i: torch.Tensor, *rest: torch.Tensor) -> Any:
        g = torch.zeros_like(p).index_add(0, i.reshape(-1), x.reshape(-1, p.shape[1]))
        return step(p, g, *rest)

    return run


def rows(name: str, update: Step, step: Step, *states: Any, at: tuple[int, ...] = (6,)) -> Case:
    return case(
        name, update, whole(step), normal(5, 3), normal(*at, 3), index(5, *at), *states, *THIRD,
        smooth=False, partial=False, roots=False, inner=False, local=True,
    )  # fmt: skip


_ADAM = {"betas": (0.9, 0.99), "eps": 1e-8, "decay": 0.1, "decoupled": True, "sign": 1}
_PLAIN = {"momentum": 0.0, "damping": 0.0, "nesterov": False, "decay": 0.0, "sign": 1}
_adamw = torch_step(torch.optim.AdamW, ("exp_avg", "exp_avg_sq"), betas=(0.9, 0.99), weight_decay=0.1)

CASES = [
    rows("adamw by rows", looked_up(optimizers.adam, **_ADAM), _adamw, normal(5, 3), positive(5, 3)),
    rows("adamw by rows of bags", looked_up(optimizers.adam, **_ADAM), _adamw, normal(5, 3), positive(5, 3), at=(2, 3)),
    rows("sgd by rows", looked_up(optimizers.sgd, **_PLAIN), torch_step(torch.optim.SGD, ())),
    rows(
        "momentum by rows",
        looked_up(optimizers.sgd, **{**_PLAIN, "momentum": 0.9, "decay": 0.1}),
        torch_step(torch.optim.SGD, ("momentum_buffer",), momentum=0.9, weight_decay=0.1),
        normal(5, 3),
    ),
    rows(
        "adagrad by rows",
        looked_up(optimizers.adagrad, decay=0.0, lr_decay=0.3, eps=1e-10, sign=1),
        torch_step(torch.optim.Adagrad, ("sum",), lr_decay=0.3),
        positive(5, 3),
    ),
    rows(
        "rmsprop by rows",
        looked_up(optimizers.rmsprop, alpha=0.9, eps=1e-8, decay=0.1, momentum=0.8, sign=1),
        torch_step(torch.optim.RMSprop, ("square_avg", "momentum_buffer"), alpha=0.9, weight_decay=0.1, momentum=0.8),
        positive(5, 3),
        normal(5, 3),
    ),
]
