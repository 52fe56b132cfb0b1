"""Cases of what training code does besides calling layers: hooks, state in Python, odd batches, tied and frozen parts, wrapped weights."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, UserDict, namedtuple
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from bench._wild.tools import (
    CLASSES,
    LENGTH,
    SAMPLES,
    WORDS,
    Table,
    batches,
    cross_entropy,
    ints,
    mlp,
    reals,
    squares,
    vectors,
)

CASES = Table()


class Wrapped(nn.Module):
    """A perceptron whose forward is given."""

    def __init__(self, forward: Any, **more: Any) -> None:
        super().__init__()
        self.inner, self.given = mlp(), forward
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self, x)


# -- what Python holds --------------------------------------------------------------------------------------------------------------


@CASES.case
def feature_number_in_batch() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * batch["scale"] + batch["shift"]

    return mlp(), loss, [{**b, "scale": 1.0 + i, "shift": i} for i, b in enumerate(vectors())]


@CASES.case
def feature_flag_in_batch() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        return F.cross_entropy(out, batch["y"]) if batch["hard"] else out.square().mean()

    return mlp(), loss, [{**b, "hard": i % 2 == 0} for i, b in enumerate(vectors())]


@CASES.case
def feature_text_in_batch() -> tuple[Any, ...]:
    heads = {"low": 0.5, "high": 2.0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * heads[batch["task"]]

    return mlp(), loss, [{**b, "task": "high" if i % 2 else "low", "id": f"sample {i}"} for i, b in enumerate(vectors())]


@CASES.case
def feature_constant_beside_tensors() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) / batch["temperature"] if batch["name"] is None else model(batch["x"]).sum()

    return mlp(), loss, [{**b, "temperature": 2.0, "name": None} for b in vectors()]


@CASES.case
def feature_counter() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 - 0.1 * self.calls)

    return Wrapped(forward, calls=0), cross_entropy, vectors()


@CASES.case
def feature_closure_annealed() -> tuple[Any, ...]:
    beta = [0.0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + beta[0] * model(batch["x"]).square().mean()

    def after(i: int, optimizer: Any, model: nn.Module) -> None:
        beta[0] = 0.2 * (i + 1)

    return mlp(), loss, vectors(), None, after


@CASES.case
def feature_attribute_set_between_steps() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x) / self.temperature

    def after(i: int, optimizer: Any, model: nn.Module) -> None:
        model.temperature = 1.0 + i

    return Wrapped(forward, temperature=1.0), cross_entropy, vectors(), None, after


@CASES.case
def feature_draws_of_python() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x) if random.random() < 0.5 else self.inner(-x)

    return Wrapped(forward), cross_entropy, vectors()


@CASES.case
def feature_draws_of_numpy() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x) * float(np.random.uniform(0.5, 1.5))

    return Wrapped(forward), cross_entropy, vectors()


@CASES.case
def feature_tensor_attribute() -> tuple[Any, ...]:
    """A tensor that is no buffer, changed by every forward."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.inner(x) + self.last
        self.last = self.last + out.detach().mean()
        return out

    return Wrapped(forward, last=torch.zeros(())), squares, vectors()


@CASES.case
def feature_constant_kept_by_the_first_call() -> tuple[Any, ...]:
    """Positions that are made when they are first needed, and again when a batch is longer: what they are depends on the call that made them."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.positions is None or len(self.positions) < x.shape[1]:
            self.positions = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return self.inner(x * self.positions[: x.shape[1], None]).mean(1)

    lengths = iter((5, 4, 7, 5, 7))
    return Wrapped(forward, positions=None), cross_entropy, batches(lambda k: {"x": reals(k, SAMPLES, next(lengths), 8), "y": ints(k + 1, CLASSES, SAMPLES)})


@CASES.case
def feature_losses_in_a_list() -> tuple[Any, ...]:
    """Layers that are alike put a loss of their own into a list, which the loss empties."""
    bag: list[Tensor] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = mlp(8, 8, 8)

        def forward(self, x: Tensor) -> Tensor:
            bag.append(self.linear(x).square().mean())
            return x + self.linear(x)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = cross_entropy(model, batch) + sum((k + 1) * x for k, x in enumerate(bag))
        bag.clear()
        return out

    return nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(8, CLASSES)), loss, vectors()


@CASES.case
def feature_context_variable() -> tuple[Any, ...]:
    weight = ContextVar("weight", default=1.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * weight.get()

    def after(i: int, optimizer: Any, model: nn.Module) -> None:
        weight.set(1.0 / (i + 2))

    return mlp(), loss, vectors(), None, after


@CASES.case
def feature_tensor_constant() -> tuple[Any, ...]:
    table = reals(3, CLASSES)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + table

    return Wrapped(forward, scale=torch.tensor(1.5)), cross_entropy, vectors()


@CASES.case
def feature_data_decides() -> tuple[Any, ...]:
    """An `if` on a value of the batch: the branch taken changes from step to step."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(x).tanh()

    return Wrapped(forward), cross_entropy, vectors()


@CASES.case
def feature_item() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = cross_entropy(model, batch)
        return value / max(value.item(), 1.0)

    return mlp(), loss, vectors()


@CASES.case
def feature_eval_inside() -> tuple[Any, ...]:
    """A part that stays in evaluation mode, and a look at `training`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(self.norm(x)) * (2.0 if self.training else 1.0)

    model = Wrapped(forward, norm=nn.BatchNorm1d(8))
    model.norm.eval()
    return model, cross_entropy, vectors()


@CASES.case
def feature_batch_norm_over_ranks() -> tuple[Any, ...]:
    """Under data parallelism torch's own has the statistics of the full batch; on one process it is a plain one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model), cross_entropy, vectors()


# -- hooks --------------------------------------------------------------------------------------------------------------------------


@CASES.case
def feature_forward_hooks() -> tuple[Any, ...]:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 1.1)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    return model, cross_entropy, vectors()


@CASES.case
def feature_hook_collects() -> tuple[Any, ...]:
    """Activations that a hook puts aside and the loss takes up."""
    model, seen = mlp(), {}
    model[1].register_forward_hook(lambda module, args, out: seen.update(h=out))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + 0.01 * seen["h"].abs().mean()

    return model, loss, vectors()


@CASES.case
def feature_backward_hook() -> tuple[Any, ...]:
    model = mlp()
    model[2].register_full_backward_hook(lambda module, into, out: tuple(g * 0.5 for g in into))
    return model, cross_entropy, vectors(), torch.optim.SGD


@CASES.case
def feature_parameter_hook() -> tuple[Any, ...]:
    model = mlp()
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return model, cross_entropy, vectors(), torch.optim.SGD


@CASES.case
def feature_activation_hook() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.inner[0](x)
        h.register_hook(lambda g: g * 3.0)
        return self.inner[2](self.inner[1](h))

    return Wrapped(forward), cross_entropy, vectors(), torch.optim.SGD


@CASES.case
def feature_hook_after_gradient() -> tuple[Any, ...]:
    model = mlp()

    def halve(p: Tensor) -> None:
        p.grad.mul_(0.5)

    model[2].bias.register_post_accumulate_grad_hook(halve)
    return model, cross_entropy, vectors(), torch.optim.SGD


# -- parameters, buffers ------------------------------------------------------------------------------------------------------------


@CASES.case
def feature_tied_weights() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(WORDS, 8), mlp(8, 16, 8), nn.Linear(8, WORDS, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.words(x))).flatten(0, 1)

    data = batches(lambda k: {"x": ints(k, WORDS, SAMPLES, LENGTH), "y": ints(k + 1, WORDS, SAMPLES * LENGTH)})
    return Net(), cross_entropy, data


@CASES.case
def feature_one_block_many_times() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + self.block(x)
        return self.inner(x)

    return Wrapped(forward, block=mlp(8, 16, 8)), cross_entropy, vectors()


@CASES.case
def feature_frozen_part() -> tuple[Any, ...]:
    model = mlp()
    model[0].requires_grad_(False)
    return model, cross_entropy, vectors()


@CASES.case
def feature_unused_part() -> tuple[Any, ...]:
    return Wrapped(lambda self, x: self.inner(x), spare=nn.Linear(3, 3)), cross_entropy, vectors()


@CASES.case
def feature_part_not_optimized() -> tuple[Any, ...]:
    model = mlp()
    return model, cross_entropy, vectors(), torch.optim.Adam(model[2].parameters(), lr=1e-2)


@CASES.case
def feature_low_rank_adapter() -> tuple[Any, ...]:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear, rank: int = 2) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2.0 * self.up(self.down(x))

    model = mlp()
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    return model, cross_entropy, vectors()


@CASES.case
def feature_buffers() -> tuple[Any, ...]:
    """A running mean, a counter of steps and a table, kept in buffers; one of them is not saved."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.steps += 1
            return self.inner((x - self.mean) * self.table) / self.steps

    return Net(), cross_entropy, vectors()


@CASES.case
def feature_buffer_assigned() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x / self.scale)
            self.scale = 0.9 * self.scale + 0.1 * x.abs().max()
            return out

    return Net(), cross_entropy, vectors()


@CASES.case
def feature_moving_average_teacher() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = mlp()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
                wanted = self.teacher(x + 0.1)
            return F.mse_loss(self.student(x), wanted)

    return Net(), lambda model, batch: model(batch["x"]), vectors()


@CASES.case
def feature_weight_norm() -> tuple[Any, ...]:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    return model, cross_entropy, vectors()


@CASES.case
def feature_spectral_norm() -> tuple[Any, ...]:
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[2])
    return model, cross_entropy, vectors()


@CASES.case
def feature_orthogonal() -> tuple[Any, ...]:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, CLASSES)), cross_entropy, vectors()


@CASES.case
def feature_own_parametrization() -> tuple[Any, ...]:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(x)

    model = mlp()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Positive())
    return model, cross_entropy, vectors()


@CASES.case
def feature_pruned() -> tuple[Any, ...]:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    return model, cross_entropy, vectors()


@CASES.case
def feature_zero_head() -> tuple[Any, ...]:
    """Every logit is 0 at the first step."""
    model = mlp(out=1)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], (batch["y"] % 2).to(batch["x"].dtype))

    return model, loss, vectors()


@CASES.case
def feature_zero_rows() -> tuple[Any, ...]:
    """Norms of rows that are wholly zero."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"] * (batch["y"] > 1)[:, None])
        return F.normalize(out, dim=-1).sum(-1).square().mean() + out.norm(dim=1).mean()

    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.ReLU()), loss, vectors()


@CASES.case
def feature_complex_parameter() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner((torch.complex(x, x.flip(1)) * torch.view_as_complex(self.turn)).abs())

    return Wrapped(forward, turn=nn.Parameter(torch.randn(8, 2))), cross_entropy, vectors()


# -- autograd -----------------------------------------------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """Rounds forward, and lets the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Scaled(torch.autograd.Function):
    """Keeps what it needs, and gives a gradient that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.by * g * x, None


@CASES.case
def feature_straight_through() -> tuple[Any, ...]:
    return Wrapped(lambda self, x: self.inner(Straight.apply(x) + self.shift), shift=nn.Parameter(torch.zeros(8))), cross_entropy, vectors()


@CASES.case
def feature_own_gradient() -> tuple[Any, ...]:
    return Wrapped(lambda self, x: Scaled.apply(self.inner(x), 0.7)), cross_entropy, vectors()


@CASES.case
def feature_detach_trick() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        soft = self.inner(x).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), CLASSES).to(x.dtype)
        return hard - soft.detach() + soft + self.inner(x)

    return Wrapped(forward), cross_entropy, vectors()


@CASES.case
def feature_gradient_penalty() -> tuple[Any, ...]:
    """A derivative inside the loss, as gradient penalties and energy models have it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_(True)
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch["y"]) + 0.1 * (g.norm(dim=1) - 1).square().mean()

    return mlp(), loss, vectors()


@CASES.case
def feature_checkpoint() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(checkpoint(self.block, x, use_reentrant=False))

    return Wrapped(forward, block=mlp(8, 16, 8)), cross_entropy, vectors()


@CASES.case
def feature_checkpoint_reentrant() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(checkpoint(self.block, self.first(x), use_reentrant=True))

    return Wrapped(forward, first=nn.Linear(8, 8), block=mlp(8, 16, 8)), cross_entropy, vectors()


@CASES.case
def feature_autocast() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch["x"])
        return F.cross_entropy(out.float(), batch["y"])

    return mlp(), loss, vectors()


@CASES.case
def feature_bfloat16() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"].bfloat16()).float(), batch["y"])

    return mlp().bfloat16(), loss, vectors()


@CASES.case
def feature_no_grad_part() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.features(x)
        return self.inner(x)

    return Wrapped(forward, features=mlp(8, 8, 8)), cross_entropy, vectors()


@CASES.case
def feature_inplace() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.inner(x)
        h[:, 0] = 0.5
        h[:, 1:3].mul_(2.0)
        h += 1
        out = torch.empty_like(h)
        out[:, ::2] = h[:, 1::2]
        out[:, 1::2] = h[:, ::2]
        return out.mul_(0.5).clamp_(max=3.0)

    return Wrapped(forward), cross_entropy, vectors()


@CASES.case
def feature_batch_changed_in_place() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch = dict(batch)
        batch["x"] = batch["x"].clone()
        batch["x"][batch["x"] < 0] = 0.0
        batch.pop("y")
        return model(batch["x"]).square().mean()

    return mlp(), loss, vectors()


@CASES.case
def feature_indexing() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        order = torch.argsort(x[:, 0])
        h = self.inner(x)[order].gather(1, torch.arange(4).expand(len(x), 4).flip(1))
        h = torch.where(h > 0, h, h * 0.1).roll(1, 0)
        return h[torch.argsort(order)]

    return Wrapped(forward), cross_entropy, vectors()


@CASES.case
def feature_boolean_selection() -> tuple[Any, ...]:
    """A shape that depends on data."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        keep = batch["y"] > 0
        return F.cross_entropy(model(batch["x"])[keep], batch["y"][keep])

    return mlp(), loss, vectors()


@CASES.case
def feature_vmap() -> tuple[Any, ...]:
    """Two members of an ensemble by torch.func."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, CLASSES, 8) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda w: x @ w.T)(self.weight).mean(0)

    return Net(), cross_entropy, vectors()


@CASES.case
def feature_functional_call() -> tuple[Any, ...]:
    def forward(self: Any, x: Tensor) -> Tensor:
        soft = {name: p * 0.9 for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, soft, (x,))

    return Wrapped(forward), cross_entropy, vectors()


@CASES.case
def feature_compiled_part() -> tuple[Any, ...]:
    model = mlp()
    model[0] = torch.compile(model[0], backend="eager")
    return model, cross_entropy, vectors()


@CASES.case
def feature_scripted_part() -> tuple[Any, ...]:
    model = mlp()
    model[1] = torch.jit.script(nn.SiLU())
    return model, cross_entropy, vectors()


@CASES.case
def feature_thousand_terms() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        return sum(out[i % SAMPLES, i % CLASSES] * (i % 7) for i in range(300)) / 300 + out.square().mean()

    return mlp(), loss, vectors()


# -- batches ------------------------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    weight: float = 1.0


class Encoded(UserDict):  # type: ignore[type-arg]
    """As a tokenizer gives it."""


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def of_fields(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


CASES.add("batch_tuple", lambda: (mlp(), of_pair, [(b["x"], b["y"]) for b in vectors()]))
CASES.add("batch_list", lambda: (mlp(), of_pair, [[b["x"], b["y"]] for b in vectors()]))
CASES.add("batch_tensor", lambda: (mlp(), lambda m, b: m(b).square().mean(), [b["x"] for b in vectors()]))
CASES.add("batch_named_tuple", lambda: (mlp(), of_fields, [Pair(b["x"], b["y"]) for b in vectors()]))
CASES.add("batch_dataclass", lambda: (mlp(), of_fields, [Sample(b["x"], b["y"]) for b in vectors()]))
CASES.add("batch_user_dict", lambda: (mlp(), cross_entropy, [Encoded(b) for b in vectors()]))
CASES.add("batch_ordered", lambda: (mlp(), cross_entropy, [OrderedDict(b) for b in vectors()]))
CASES.add("batch_fewer_than_steps", lambda: (mlp(), cross_entropy, vectors()[:2]))
CASES.add("batch_odd_samples", lambda: (mlp(), cross_entropy, vectors(samples=7)))
CASES.add("batch_of_one", lambda: (mlp(), cross_entropy, vectors(samples=1)))
CASES.add("batch_ragged_last", lambda: (mlp(), cross_entropy, [*vectors()[:4], vectors(samples=6)[0]]))


@CASES.case
def batch_nested() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        (left, right), labels = batch["views"], batch["of"]["labels"]
        return F.cross_entropy(model(left), labels[0]) + F.cross_entropy(model(right), labels[1])

    def one(k: int) -> Any:
        labels = [ints(k + 2, CLASSES, SAMPLES), ints(k + 3, CLASSES, SAMPLES)]
        return {"views": (reals(k, SAMPLES, 8), reals(k + 1, SAMPLES, 8)), "of": {"labels": labels}}

    return mlp(), loss, batches(one)


@CASES.case
def batch_keys_alike() -> tuple[Any, ...]:
    """Keys that differ in punctuation only, or in being text."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["user-id"]) - model(batch["user_id"]) * batch["a"]["b"] + batch["a.b"] * batch[0] - batch["0"]).square().mean()

    def one(k: int) -> Any:
        narrow = {name: reals(k + i, SAMPLES, CLASSES) for i, name in enumerate(["a.b", 0, "0"])}
        return {
            "user-id": reals(k + 5, SAMPLES, 8),
            "user_id": reals(k + 6, SAMPLES, 8),
            "a": {"b": reals(k + 7, SAMPLES, CLASSES)},
            **narrow,
        }

    return mlp(), loss, batches(one)


@CASES.case
def batch_modules_alike() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"user-id": nn.Linear(8, 4), "user_id": nn.Linear(8, 4), "user id": nn.Linear(8, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return self.heads["user-id"](x) * self.heads["user_id"](x).tanh() + self.heads["user id"](x)

    return Net(), cross_entropy, vectors()


@CASES.case
def batch_other_lengths() -> tuple[Any, ...]:
    """Every batch is padded to a length of its own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x).mean(1))

    data = [{"x": ints(k, WORDS, SAMPLES, 6 + k % 3), "y": ints(k, CLASSES, SAMPLES)} for k in range(5)]
    return Net(), cross_entropy, data


@CASES.case
def batch_masks_and_integers() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch["x"].to(model[0].weight.dtype) / 255), batch["y"].long(), reduction="none")
        return (each * batch["keep"]).sum() / batch["keep"].sum()

    def one(k: int) -> Any:
        keep = torch.arange(SAMPLES) % 3 != k % 3
        return {"x": ints(k, 256, SAMPLES, 8).to(torch.uint8), "y": ints(k + 1, CLASSES, SAMPLES).int(), "keep": keep}

    return mlp(), loss, batches(one)


@CASES.case
def batch_strided() -> tuple[Any, ...]:
    """Tensors that do not lie in memory as their dims go."""
    data = [{"x": reals(k, 8, SAMPLES).T, "y": ints(k, CLASSES, 2 * SAMPLES)[::2]} for k in range(5)]
    return mlp(), cross_entropy, data


@CASES.case
def batch_expanded() -> tuple[Any, ...]:
    data = [{"x": reals(k, 1, 8).expand(SAMPLES, 8), "y": ints(k, CLASSES, SAMPLES)} for k in range(5)]
    return mlp(), cross_entropy, data
