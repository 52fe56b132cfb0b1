"""Cases of losses: torch's own in every reduction, those that compare samples with each other, and those that a mean over samples is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench._wild.tools import CLASSES, LENGTH, SAMPLES, WORDS, Table, batches, ints, mlp, reals, vectors

CASES = Table()


def on_output(name: str, loss: Callable[[Tensor, Tensor], Tensor], target: Callable[[int], Tensor], out: int = CLASSES) -> None:
    """A perceptron's output against targets."""

    def make() -> tuple[Any, ...]:
        data = batches(lambda k: {"x": reals(k, SAMPLES, 8), "y": target(k + 1)})
        return mlp(out=out), lambda model, batch: loss(model(batch["x"]), batch["y"]), data

    CASES.add(f"loss_{name}", make)


def labels(k: int) -> Tensor:
    return ints(k, CLASSES, SAMPLES)


def numbers(k: int) -> Tensor:
    return reals(k, SAMPLES, CLASSES)


def chances(k: int) -> Tensor:
    return torch.rand(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(k))


def bits(k: int) -> Tensor:
    return ints(k, 2, SAMPLES, CLASSES).float()


def some_ignored(k: int) -> Tensor:
    """-100 in the first samples: a part of the batch may have no label at all."""
    return torch.where(torch.arange(SAMPLES) < 3 + k % 3, -100, labels(k))


on_output("cross_entropy_sum", lambda out, y: F.cross_entropy(out, y, reduction="sum"), labels)
on_output("cross_entropy_none", lambda out, y: (F.cross_entropy(out, y, reduction="none") ** 2).mean(), labels)
on_output("cross_entropy_ignored", lambda out, y: F.cross_entropy(out, y), some_ignored)
on_output("cross_entropy_smooth", lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), some_ignored)
on_output("cross_entropy_weighted", lambda out, y: F.cross_entropy(out, y, weight=torch.arange(1, 5).to(out.dtype)), labels)
on_output("cross_entropy_soft", lambda out, y: F.cross_entropy(out, y.softmax(-1)), numbers)
on_output("nll_of_log_softmax", lambda out, y: F.nll_loss(out.log_softmax(-1), y, ignore_index=2), labels)
on_output("binary", lambda out, y: F.binary_cross_entropy(out.sigmoid(), y), bits)
on_output("binary_logits_weighted", lambda out, y: F.binary_cross_entropy_with_logits(out, y, pos_weight=out.new_full((4,), 3.0)), bits)
on_output("mse", F.mse_loss, numbers)
on_output("mse_sum", lambda out, y: F.mse_loss(out, y, reduction="sum"), numbers)
on_output("l1", F.l1_loss, numbers)
on_output("smooth_l1", lambda out, y: F.smooth_l1_loss(out, y, beta=0.5), numbers)
on_output("huber_sum", lambda out, y: F.huber_loss(out, y, reduction="sum", delta=0.3), numbers)
on_output("kl_batchmean", lambda out, y: F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="batchmean"), numbers)
on_output("kl_of_logs", lambda out, y: F.kl_div(out.log_softmax(-1), y.log_softmax(-1), reduction="sum", log_target=True), numbers)
on_output("poisson", lambda out, y: F.poisson_nll_loss(out, y, full=True), chances)
on_output("gaussian", lambda out, y: F.gaussian_nll_loss(out[:, :2], y[:, :2], F.softplus(out[:, 2:])), numbers)
on_output("soft_margin", lambda out, y: F.soft_margin_loss(out, 2 * y - 1), bits)
on_output("multilabel_soft_margin", F.multilabel_soft_margin_loss, bits)
on_output("multi_margin", lambda out, y: F.multi_margin_loss(out, y, margin=0.7), labels)
on_output("hinge_embedding", lambda out, y: F.hinge_embedding_loss(out, 2 * y - 1), bits)
on_output("margin_ranking", lambda out, y: F.margin_ranking_loss(out[:, 0], out[:, 1], 2 * y[:, 0] - 1, margin=0.2), bits)
on_output("cosine_embedding", lambda out, y: F.cosine_embedding_loss(out, y, torch.ones(len(y))), numbers)
on_output("largest", lambda out, y: (out - y).square().amax(), numbers)
on_output("worst_samples", lambda out, y: F.cross_entropy(out, y, reduction="none").topk(3).values.mean(), labels)
on_output("logsumexp", lambda out, y: torch.logsumexp((out - y).abs().flatten(), 0), numbers)
on_output("standard_deviation", lambda out, y: (out - y).std() + (out - y).var(0, unbiased=False).sum(), numbers)
on_output("product_of_means", lambda out, y: out.mean() * y.mean() + out.square().mean().sqrt(), numbers)
on_output("focal", lambda out, y: ((1 - (p := out.softmax(-1).gather(1, y[:, None]))) ** 2 * -p.log()).mean(), labels)
on_output("dice", lambda out, y: 1 - (2 * (out.sigmoid() * y).sum() + 1) / (out.sigmoid().sum() + y.sum() + 1), bits)
on_output("quantile", lambda out, y: torch.maximum(0.3 * (y - out), -0.7 * (y - out)).mean(), numbers)
on_output("correlation", lambda out, y: -F.cosine_similarity(out - out.mean(0), y - y.mean(0), dim=0).mean(), numbers)


@CASES.case
def loss_contrastive() -> tuple[Any, ...]:
    """Every sample against every other: in parts of a batch it would be another loss."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.scale = mlp(), mlp(), nn.Parameter(torch.tensor(1.0))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return F.normalize(self.left(a), dim=-1) @ F.normalize(self.right(b), dim=-1).T * self.scale.exp()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores, target = model(batch["a"], batch["b"]), torch.arange(SAMPLES)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    return Net(), loss, batches(lambda k: {"a": reals(k, SAMPLES, 8), "b": reals(k + 1, SAMPLES, 8)})


@CASES.case
def loss_triplet() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.triplet_margin_loss(*(model(batch[name]) for name in ("anchor", "positive", "negative")), swap=True)

    def one(k: int) -> Any:
        return {name: reals(k + i, SAMPLES, 8) for i, name in enumerate(("anchor", "positive", "negative"))}

    return mlp(), loss, batches(one)


@CASES.case
def loss_ctc() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        log_probs = model(batch["x"]).log_softmax(-1)
        return F.ctc_loss(log_probs, batch["y"], torch.full((SAMPLES,), LENGTH), torch.full((SAMPLES,), 4), zero_infinity=True)

    return mlp(out=6), loss, batches(lambda k: {"x": reals(k, LENGTH, SAMPLES, 8), "y": ints(k + 1, 6, SAMPLES, 4, low=1)})


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, 8), mlp(8, 16, 8), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x)))


def tokens(k: int) -> dict[str, Tensor]:
    """Sequences of different lengths; what is behind the end has no label."""
    x = ints(k, WORDS, SAMPLES, LENGTH)
    mask = torch.arange(LENGTH) < ints(k + 1, LENGTH + 1, SAMPLES, 1, low=1)
    return {"x": x, "y": torch.where(mask, x.roll(-1, 1), -100), "mask": mask}


@CASES.case
def loss_mean_over_tokens() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return Tokens(), loss, batches(tokens)


@CASES.case
def loss_masked_by_hand() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"].clamp(min=0), reduction="none")
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    return Tokens(), loss, batches(tokens)


@CASES.case
def loss_mean_of_means() -> tuple[Any, ...]:
    """Tokens of a sequence first, then sequences: not the mean over tokens."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"], reduction="none")
        return (each.sum(1) / batch["mask"].sum(1)).mean()

    return Tokens(), loss, batches(tokens)


@CASES.case
def loss_shifted() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"])[:, :-1].reshape(-1, WORDS), batch["x"][:, 1:].reshape(-1))

    return Tokens(), loss, batches(tokens)


@CASES.case
def loss_z_regularised() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()

    return Tokens(), loss, batches(tokens)


@CASES.case
def loss_with_decay_in_it() -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"]) + 1e-2 * sum(p.square().sum() for p in model.parameters())

    return mlp(), loss, vectors()


@CASES.case
def loss_of_several_heads() -> tuple[Any, ...]:
    """Losses of three kinds, weighted by parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = mlp(8, 16, 8), nn.ModuleList([nn.Linear(8, CLASSES), nn.Linear(8, 1), nn.Linear(8, 8)])
            self.log_vars = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            h = self.body(x)
            return [head(h) for head in self.heads]

    def loss(model: Any, batch: Any) -> Tensor:
        kind, size, same = model(batch["x"])
        target = batch["x"].sum(1, keepdim=True)
        parts = torch.stack([F.cross_entropy(kind, batch["y"]), F.mse_loss(size, target, reduction="sum"), F.l1_loss(same, batch["x"])])
        return (parts * torch.exp(-model.log_vars) + model.log_vars).sum()

    return Net(), loss, vectors()


@CASES.case
def loss_preferences() -> tuple[Any, ...]:
    """Direct preferences against a frozen reference."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.reference = Tokens(), Tokens().requires_grad_(False)

        def log_prob(self, inner: nn.Module, x: Tensor) -> Tensor:
            return inner(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1).sum(-1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                base = self.log_prob(self.reference, x)
            return self.log_prob(self.policy, x) - base

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return -F.logsigmoid(0.1 * (model(batch["chosen"]) - model(batch["rejected"]))).mean()

    return Net(), loss, batches(lambda k: {"chosen": ints(k, WORDS, SAMPLES, 6), "rejected": ints(k + 1, WORDS, SAMPLES, 6)})


@CASES.case
def loss_policy_gradient() -> tuple[Any, ...]:
    """Advantages standardised over the batch, ratios clipped, and an entropy."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logs = model(batch["x"]).log_softmax(-1)
        ratio = torch.exp(logs.gather(1, batch["y"][:, None]).squeeze(1) - batch["old"])
        gain = (batch["reward"] - batch["reward"].mean()) / (batch["reward"].std() + 1e-6)
        clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -clipped.mean() + 0.01 * (logs.exp() * logs).sum(1).mean()

    return mlp(), loss, [{**b, "old": -reals(i, SAMPLES).abs() - 1, "reward": reals(i + 50, SAMPLES)} for i, b in enumerate(vectors())]


@CASES.case
def loss_diffusion() -> tuple[Any, ...]:
    """Noise predicted at a step that is embedded; the noise comes with the batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.when, self.body = nn.Embedding(10, 8), mlp(8, 16, 8)
            self.register_buffer("kept", torch.linspace(0.99, 0.05, 10))

        def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
            kept = self.kept[t][:, None]
            return self.body(kept.sqrt() * x + (1 - kept).sqrt() * noise + self.when(t))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"], batch["noise"], batch["t"]), batch["noise"])

    return Net(), loss, batches(lambda k: {"x": reals(k, SAMPLES, 8), "noise": reals(k + 1, SAMPLES, 8), "t": ints(k + 2, 10, SAMPLES)})
