"""A dynamic model's batch, samples or hands cut, against a recursion over the trees in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from tests.ops.harness import Input, case, normal
from weft import dynamic
from weft.dynamic.packed import pack
from weft.dynamic.part import Rounds
from weft.ops.rounds import HANDS, RUNNERS, rounds, rounds_backward

TREES: list[Any] = [((0, 1), 2), (3, (4, (0, 2))), (1,), (2, 2, 2, 3)]
GRAPHS = pack(dynamic.trees(TREES))
GIVES = (("f64", (2,)),)
WEIGHT = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))


def vertex(v: Any) -> None:
    h = torch.tanh(v.pull("x", optional=True) @ WEIGHT + v.gather("h", reduce="sum"))
    v.scatter(h=h)
    v.push(h=h)


def runner() -> str:
    made = Rounds(dynamic.Model(vertex, states={"h": 2}), ("vertex",), {"x": torch.empty(0, 3, dtype=torch.float64)}, set())
    RUNNERS[made.name] = made
    return made.name


ATTRS = {"runner": runner(), "wants": (0, 1), "gives": GIVES}


def by_hand(graphs: torch.Tensor, hands: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def tree(t: Any) -> torch.Tensor:
        return torch.tanh(x[t] @ w) if isinstance(t, int) else torch.tanh(sum(tree(c) for c in t) + 0 * w[0])

    return torch.stack([tree(t) for t in TREES])


def gradients(ct: torch.Tensor, graphs: torch.Tensor, hands: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.enable_grad():
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(by_hand(graphs, hands, x, w), (x, w), ct)


graphs = Input(tuple(GRAPHS.shape), lambda g, s: GRAPHS)
hands = Input((HANDS,), lambda g, s: torch.arange(HANDS))

CASES = [
    case("rounds", lambda g, r, x, w: rounds(g, r, x, w, **ATTRS), by_hand, graphs, hands, normal(5, 3), normal(3, 2), partial=False, roots=False, local=True),
    case(
        "rounds backward", lambda ct, g, r, x, w: rounds_backward(ct, g, r, x, w, **ATTRS), gradients,
        normal(4, 2), graphs, hands, normal(5, 3), normal(3, 2), smooth=False, partial=False, roots=False, local=True,
    ),
]  # fmt: skip
