"""Cases of what once went wrong at a border: leaves and their gradients, weights made of others, hooks that come late, batches of other sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from bench._wild.tools import CLASSES, SAMPLES, WORDS, Table, batches, cross_entropy, images, ints, mlp, reals, vectors, words

CASES = Table()


class Given(nn.Module):
    """Parts, and a forward that is given."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        self.given = forward
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)

    def forward(self, *given: Tensor) -> Any:
        return self.given(self, *given)


# -- leaves, and gradients of gradients -----------------------------------------------------------------------------------------------


@CASES.case
def border_penalty_of_a_detached_leaf() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch["y"]) + 5 * slope.square().sum(1).mean()

    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, CLASSES)), loss, vectors()


@CASES.case
def border_two_leaves_of_one_tensor() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        a, b = batch["x"].clone().requires_grad_(), batch["x"].detach().requires_grad_()
        out = model(a).tanh().sum() + (model(b) * model(batch["x"])).sum()
        grads = torch.autograd.grad(out, [a, b], create_graph=True)
        return cross_entropy(model, batch) + sum((i + 1) * g.square().mean() for i, g in enumerate(grads))

    return mlp(), loss, vectors()


@CASES.case
def border_inner_step_with_a_learnt_rate() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        own = dict(self.net.named_parameters())
        grads = torch.autograd.grad(F.cross_entropy(functional_call(self.net, own, (x,)), y), list(own.values()), create_graph=True)
        return functional_call(self.net, {k: p - self.rate * g for (k, p), g in zip(own.items(), grads, strict=True)}, (x,))

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    model = Given(forward, net=net, rate=nn.Parameter(torch.tensor(0.1)))
    return model, lambda m, b: F.cross_entropy(m(b["x"], b["y"]), b["y"]), vectors()


@CASES.case
def border_quantized_codes() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        return self.decoder(z + (code - z).detach()), z, code

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out, z, code = model(batch["x"])
        return F.mse_loss(out, batch["x"]) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())

    return Given(forward, encoder=nn.Linear(8, 6), codes=nn.Embedding(10, 6), decoder=nn.Linear(6, 8)), loss, vectors()


# -- weights made of others -----------------------------------------------------------------------------------------------------------


class Beside(nn.Module):
    """A low-rank term beside a frozen weight."""

    def __init__(self, rows: int, columns: int, rank: int = 2) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(0.1 * reals(1, rank, columns)), nn.Parameter(0.1 * reals(2, rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@CASES.case
def border_low_rank_beside_frozen() -> tuple[Any, ...]:
    net = mlp()
    for layer in (net[0], net[2]):
        parametrize.register_parametrization(layer, "weight", Beside(*layer.weight.shape))
        layer.parametrizations.weight.original.requires_grad_(False)
    return net, cross_entropy, vectors()


@CASES.case
def border_orthogonal_and_normed_weights() -> tuple[Any, ...]:
    first, last = parametrizations.orthogonal(nn.Linear(8, 8)), parametrizations.weight_norm(nn.Linear(8, CLASSES), dim=None)
    return nn.Sequential(first, nn.Tanh(), last), cross_entropy, vectors()


@CASES.case
def border_encoder_read_backwards() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.code(x)), self.code.weight.t(), self.bias))

    return Given(forward, code=nn.Linear(8, 6, bias=False), bias=nn.Parameter(torch.zeros(8)), head=nn.Linear(8, CLASSES)), cross_entropy, vectors()


# -- what comes late ------------------------------------------------------------------------------------------------------------------


@CASES.case
def border_hooks_of_the_first_call() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not getattr(self, "hooked", False):
            self.net[0].register_forward_hook(lambda _m, _a, out: self.put(out))
            self.hooked = True
        seen: list[Tensor] = []
        self.put = seen.append
        out = self.net(x)
        del self.put
        return out + len(seen) * seen[0][:, :CLASSES]

    return Given(forward, net=mlp()), cross_entropy, vectors()


@CASES.case
def border_layer_trained_later() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x) + (self.late(x) if self.step > 1 else 0)

    def after(i: int, _: Any, model: Any) -> None:
        model.step = i

    model = Given(forward, net=mlp(), late=nn.Linear(8, CLASSES), unused=nn.Linear(8, 8), step=0)
    return model, cross_entropy, vectors(), lambda m: torch.optim.Adam(m.parameters(), lr=1e-2), after


@CASES.case
def border_buffers_written_only() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.net(x)
        with torch.no_grad():
            self.inputs.copy_(x.mean(0))
            self.outputs.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return out

    return Given(forward, net=mlp(), inputs=torch.zeros(8), outputs=torch.zeros(CLASSES)), cross_entropy, vectors()


# -- sizes ----------------------------------------------------------------------------------------------------------------------------


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


@CASES.case
def border_batches_of_every_size() -> tuple[Any, ...]:
    """One of them is as large as a rank's half of the first."""
    return mlp(), summed, [vectors(samples=n)[i] for i, n in enumerate((SAMPLES, SAMPLES // 2, 5, SAMPLES, 1))]


@CASES.case
def border_size_decides() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.net(x)
        return (out * 2 if x.shape[0] > 3 else out) / x.size(0)

    return Given(forward, net=mlp()), cross_entropy, vectors()


@CASES.case
def border_odd_everywhere() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.out(F.gelu(self.up(x)))
        h = self.norm(h + self.mix(h, h, h, need_weights=False)[0])
        return self.head(h[:, 0])

    parts = {"up": nn.Linear(7, 13), "out": nn.Linear(13, 9), "mix": nn.MultiheadAttention(9, 3, batch_first=True), "norm": nn.LayerNorm(9)}
    many = batches(lambda k: {"x": reals(k, 5, 3, 7), "y": ints(k + 1, 5, 5)})
    return Given(forward, **parts, head=nn.Linear(9, 5)), cross_entropy, many


# -- gathers and scatters -------------------------------------------------------------------------------------------------------------


@CASES.case
def border_sparse_embedding() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))

    model = Given(forward, table=nn.Embedding(WORDS, 8, sparse=True), head=nn.Linear(8, CLASSES))
    return model, cross_entropy, words(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)


@CASES.case
def border_sampled_at_learnt_places() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        lines = [torch.linspace(-1, 1, n, dtype=x.dtype) for n in x.shape[2:]]
        grid = torch.stack(torch.meshgrid(*lines, indexing="ij")[::-1], -1)
        moved = grid + 0.1 * torch.tanh(self.offsets(x)).permute(0, 2, 3, 1)
        return self.head(F.grid_sample(self.features(x), moved, align_corners=True).mean((2, 3)))

    parts = {"features": nn.Conv2d(3, 4, 3, padding=1), "offsets": nn.Conv2d(3, 2, 3, padding=1)}
    return Given(forward, **parts, head=nn.Linear(4, CLASSES)), cross_entropy, images()


@CASES.case
def border_scattered_back() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        top, at = h.topk(5, -1)
        return self.head(torch.zeros_like(h).scatter(-1, at, top.softmax(-1)) + torch.zeros_like(h).scatter_add(-1, at.flip(-1), h.gather(-1, at)))

    return Given(forward, up=nn.Linear(8, 16), head=nn.Linear(16, CLASSES)), cross_entropy, vectors()
