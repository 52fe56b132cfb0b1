"""Cases of torch.nn: recurrent, attending, convolving, pooling and normalising modules, embeddings, activations, and models made of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench._wild.tools import (
    CLASSES,
    LENGTH,
    SAMPLES,
    WORDS,
    Make,
    Table,
    batches,
    cross_entropy,
    images,
    ints,
    mlp,
    reals,
    squares,
    vectors,
    words,
)

CASES = Table()


def plain(name: str, model: Any, data: Any = vectors, loss: Any = cross_entropy) -> Make:
    """A case whose model, loss and batches stand by themselves."""
    return CASES.add(name, lambda: (model(), loss, data()))


# -- layers, one after another ------------------------------------------------------------------------------------------------------

plain("nn_mlp", mlp)
plain("nn_linear_without_bias", lambda: nn.Linear(8, CLASSES, bias=False))
plain("nn_bilinear", lambda: Both(nn.Bilinear(8, 8, CLASSES)))
plain("nn_batchnorm1d", lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)))
plain("nn_batchnorm_eval", lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16).eval(), nn.Linear(16, CLASSES)))
plain(
    "nn_batchnorm_without_stats",
    lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, CLASSES)),
)
plain("nn_batchnorm_cumulative", lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, CLASSES)))
plain("nn_layernorm", lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, CLASSES)))
plain("nn_layernorm_plain", lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, CLASSES)))
plain("nn_rmsnorm", lambda: nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16, eps=1e-6), nn.Mish(), nn.Linear(16, CLASSES)))


class Both(nn.Module):
    """A module of two inputs, given the same one twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.flip(0))


ACTIVATIONS = {
    "relus": [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.RReLU(0.2, 0.2), nn.Hardtanh(), nn.Threshold(0.1, 0.0)],
    "exponentials": [nn.ELU(), nn.CELU(0.7), nn.SELU(), nn.Softplus(beta=2.0), nn.LogSigmoid(), nn.Softsign()],
    "gates": [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Sigmoid()],
    "shrinks": [nn.Tanh(), nn.Tanhshrink(), nn.Softshrink(0.1), nn.Hardshrink(0.1), nn.Softmin(-1), nn.Softmax(-1), nn.LogSoftmax(-1)],
}


def activated(inner: list[nn.Module]) -> nn.Sequential:
    layers = [layer for one in inner for layer in (one, nn.Linear(8, 8))]
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, CLASSES))


for name, inner in ACTIVATIONS.items():
    plain(f"nn_{name}", lambda inner=inner: activated(inner))
plain(
    "nn_prelu_and_glu",
    lambda: nn.Sequential(nn.Linear(8, 16), nn.PReLU(16), nn.Linear(16, 16), nn.GLU(), nn.PReLU(), nn.Linear(8, CLASSES)),
)


# -- images -------------------------------------------------------------------------------------------------------------------------


def net(*layers: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


plain(
    "nn_conv2d",
    lambda: net(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), width=8),
    images,
)
plain("nn_conv_depthwise", lambda: net(nn.Conv2d(3, 6, 3, groups=3, padding="same"), nn.GELU(), nn.Conv2d(6, 8, 1), width=8), images)
plain("nn_conv_dilated", lambda: net(nn.Conv2d(3, 8, 3, stride=2, dilation=2, padding=2, padding_mode="reflect"), width=8), images)
plain("nn_conv_circular", lambda: net(nn.Conv2d(3, 8, (3, 1), padding=(1, 0), padding_mode="circular"), nn.Tanh(), width=8), images)
plain(
    "nn_conv_transpose",
    lambda: net(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 4, 2, 1, output_padding=1), width=4),
    images,
)
plain("nn_groupnorm", lambda: net(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.InstanceNorm2d(8, affine=True), width=8), images)
plain("nn_local_response", lambda: net(nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(3), nn.ReLU(), width=8), images)
plain("nn_avgpool", lambda: net(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2, padding=1, count_include_pad=False), nn.ReLU(), width=8), images)
plain("nn_lppool", lambda: net(nn.Conv2d(3, 8, 3), nn.LPPool2d(2, 2), width=8), images)
plain(
    "nn_adaptive_maxpool", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)), images
)
plain("nn_pixelshuffle", lambda: net(nn.Conv2d(3, 16, 3), nn.PixelShuffle(2), nn.PixelUnshuffle(4), nn.ChannelShuffle(4), width=64), images)
plain("nn_upsample", lambda: net(nn.Conv2d(3, 8, 3, 2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(size=5), width=8), images)
plain("nn_unfold_fold", lambda: net(nn.Conv2d(3, 4, 1), nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2), width=4), images)
plain(
    "nn_paddings",
    lambda: net(nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.ConstantPad2d(1, 0.5), nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3), width=8),
    images,
)
plain("nn_dropout_of_zero", lambda: net(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.0), nn.Dropout(0.0), nn.AlphaDropout(0.0), width=8), images)


@CASES.case
def nn_conv1d_and_3d() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.space = nn.Conv1d(3, 8, 3, padding=1), nn.Conv3d(1, 4, 3, padding=1)
            self.norm, self.pool, self.head = nn.BatchNorm3d(4), nn.MaxPool3d(2), nn.LazyLinear(CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.line(x)).reshape(x.shape[0], 1, 4, 2, -1)
            return self.head(self.pool(self.norm(self.space(h))).flatten(1))

    net = Net()
    net(reals(0, 2, 3, 8))  # the lazy layer takes its shape
    return net, cross_entropy, batches(lambda k: {"x": reals(k, SAMPLES, 3, 8), "y": ints(k + 1, CLASSES, SAMPLES)})


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norms[1](self.two(F.relu(self.norms[0](self.one(x)), inplace=True))))


plain("nn_resnet", lambda: net(nn.Conv2d(3, 8, 3), Residual(8), Residual(8), width=8), images)


class Squeeze(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


plain("nn_squeeze_excite", lambda: net(nn.Conv2d(3, 8, 3), Squeeze(8), nn.Hardswish(), width=8), images)


@CASES.case
def nn_unet() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.up, self.head = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, CLASSES, 1)

        def forward(self, x: Tensor) -> Tensor:
            first = F.silu(self.down(x))
            deep = F.silu(self.mid(F.max_pool2d(first, 2)))
            return self.head(torch.cat([first, self.up(deep)], 1))

    return Net(), cross_entropy, batches(lambda k: {"x": reals(k, SAMPLES, 3, 8, 8), "y": ints(k + 1, CLASSES, SAMPLES, 8, 8)})


@CASES.case
def nn_grid_sample() -> tuple[Any, ...]:
    class Net(nn.Module):
        """A spatial transformer."""

        def __init__(self) -> None:
            super().__init__()
            self.where, self.head = nn.Linear(192, 6), nn.Linear(192, CLASSES)
            nn.init.normal_(self.where.weight, std=0.01)
            self.where.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

        def forward(self, x: Tensor) -> Tensor:
            grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
            return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    return Net(), cross_entropy, images()


@CASES.case
def nn_patches() -> tuple[Any, ...]:
    class Net(nn.Module):
        """A small vision transformer with a class token and positions, by torch's own layers."""

        def __init__(self) -> None:
            super().__init__()
            self.cut, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
            self.place = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False), nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.cut(x).flatten(2).transpose(1, 2)
            return self.head(self.body(torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.place)[:, 0])

    return Net(), cross_entropy, images()


# -- sequences ----------------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **how: Any) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 8), kind(8, 12, batch_first=True, **how)
        self.head = nn.Linear((how.get("proj_size") or 12) * (2 if how.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.words(x))[0][:, -1])


plain("nn_rnn", lambda: Recurrent(nn.RNN, nonlinearity="relu"), words)
plain("nn_lstm", lambda: Recurrent(nn.LSTM), words)
plain("nn_gru", lambda: Recurrent(nn.GRU, bias=False), words)
plain("nn_lstm_both_ways", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), words)
plain("nn_lstm_projected", lambda: Recurrent(nn.LSTM, proj_size=6), words)


@CASES.case
def nn_cells() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm, self.gru = nn.Embedding(WORDS, 8), nn.LSTMCell(8, 12), nn.GRUCell(12, 12)
            self.head = nn.Linear(12, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = c = g = x.new_zeros(x.shape[0], 12, dtype=self.head.weight.dtype)
            for token in self.words(x).unbind(1):
                h, c = self.lstm(token, (h, c))
                g = self.gru(h, g)
            return self.head(g)

    return Net(), cross_entropy, words(length=5)


@CASES.case
def nn_lstm_given_state() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.start = nn.LSTM(8, 8), nn.Parameter(torch.zeros(2, 1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            state = self.start.expand(-1, -1, x.shape[1], -1).contiguous()
            out, (h, c) = self.inner(x, (state[0], state[1]))
            return out.mean(0) + h[0] * c[0].tanh()

    return Net(), squares, batches(lambda k: {"x": reals(k, 6, SAMPLES, 8)})


@CASES.case
def nn_packed() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, CLASSES)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.inner(packed)[1][-1])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["y"])

    return Net(), loss, [{**b, "lengths": torch.arange(SAMPLES) % 5 + 3} for b in words()]


@CASES.case
def nn_transformer() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
            self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

        def forward(self, a: Tensor, b: Tensor, pad: Tensor) -> Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(b.shape[1], dtype=self.head.weight.dtype)
            h = self.body(self.words(a), self.words(b), tgt_mask=causal, src_key_padding_mask=pad, memory_key_padding_mask=pad)
            return self.head(h)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["a"], batch["b"], batch["pad"]).flatten(0, 1), batch["y"].flatten())

    def one(k: int) -> Any:
        pad = torch.arange(LENGTH) >= ints(k, LENGTH, SAMPLES, 1, low=4)
        return {
            "a": ints(k + 1, WORDS, SAMPLES, LENGTH),
            "b": ints(k + 2, WORDS, SAMPLES, 6),
            "y": ints(k + 3, WORDS, SAMPLES, 6),
            "pad": pad,
        }

    return Net(), loss, batches(one)


@CASES.case
def nn_encoder_padded() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, 16, padding_idx=0), nn.Linear(16, CLASSES)
            self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0), 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            pad = x == 0
            h = self.body(self.words(x).transpose(0, 1), src_key_padding_mask=pad).masked_fill(pad.T[..., None], 0.0)
            return self.head(h.sum(0) / (~pad).sum(1, keepdim=True))

    data = words()
    for b in data:
        b["x"][:, 1:] *= torch.arange(1, LENGTH) < ints(int(b["x"][0, 0]), LENGTH, SAMPLES, 1, low=3)
        b["x"][:, 0] += 1
        b["x"].clamp_(max=WORDS - 1)
    return Net(), cross_entropy, data


@CASES.case
def nn_decoder() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.body(x, memory, tgt_is_causal=True, tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.l1_loss(model(batch["x"], batch["memory"]), batch["x"])

    return Net(), loss, batches(lambda k: {"x": reals(k, SAMPLES, 6, 8), "memory": reals(k + 1, SAMPLES, 5, 8)})


@CASES.case
def nn_attention_weights() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True, add_bias_kv=True, add_zero_attn=True)

        def forward(self, x: Tensor) -> Tensor:
            out, weights = self.attend(x, x[..., :6], x[..., 3:], average_attn_weights=False)
            return out.mean(1) + weights.square().sum((1, 2, 3), keepdim=True).squeeze(1).squeeze(1)

    return Net(), squares, batches(lambda k: {"x": reals(k, SAMPLES, 6, 8)})


@CASES.case
def nn_attention_of_torch() -> tuple[Any, ...]:
    class Net(nn.Module):
        """`scaled_dot_product_attention` three ways: causal, with a boolean mask, and with numbers added."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head, self.bias = nn.Linear(8, 24), nn.Linear(8, 8), nn.Parameter(torch.zeros(2, 6, 6))

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = F.scaled_dot_product_attention(h, k, v, attn_mask=pad[:, None, None])
            h = F.scaled_dot_product_attention(h, k, v, attn_mask=self.bias, scale=0.3)
            return self.head(h.transpose(1, 2).flatten(2))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"], batch["pad"]).square().mean()

    def one(k: int) -> Any:
        return {"x": reals(k, SAMPLES, 6, 8), "pad": torch.arange(6) < ints(k, 7, SAMPLES, 1, low=2)}

    return Net(), loss, batches(one)


# -- embeddings ---------------------------------------------------------------------------------------------------------------------

for mode in ("sum", "mean", "max"):
    plain(f"nn_embedding_bag_{mode}", lambda mode=mode: nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode=mode), nn.Linear(8, CLASSES)), words)
plain("nn_embedding_by_frequency", lambda: Pooled(nn.Embedding(WORDS, 8, padding_idx=3, scale_grad_by_freq=True)), words)


class Pooled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).mean(1))


@CASES.case
def nn_embedding_bag_offsets() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(WORDS, 8, mode="sum"), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            return self.head(self.bag(x, offsets, per_sample_weights=weights))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["offsets"], batch["weights"]), batch["y"])

    def one(k: int) -> Any:
        return {"x": ints(k, WORDS, 32), "offsets": torch.arange(8) * 4, "weights": reals(k + 1, 32), "y": ints(k + 2, CLASSES, 8)}

    return Net(), loss, batches(one)


@CASES.case
def nn_recommender() -> tuple[Any, ...]:
    class Net(nn.Module):
        """Tables of several features, their products pairwise, and a perceptron: DLRM."""

        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleDict({name: nn.Embedding(16, 4) for name in ("user", "item", "shop")})
            self.dense, self.top = nn.Linear(3, 4), mlp(10, 16, 1)

        def forward(self, batch: Any) -> Tensor:
            found = torch.stack([self.dense(batch["dense"]), *(table(batch[name]) for name, table in self.tables.items())], 1)
            pairs = (found @ found.transpose(1, 2))[:, *torch.triu_indices(4, 4, 1)]
            return self.top(torch.cat([found[:, 0], pairs], 1)).squeeze(1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch), batch["y"])

    def one(k: int) -> Any:
        ids = {name: ints(k + i, 16, SAMPLES) for i, name in enumerate(("user", "item", "shop"))}
        return {**ids, "dense": reals(k, SAMPLES, 3), "y": ints(k + 4, 2, SAMPLES).float()}

    return Net(), loss, batches(one)


# -- other shapes of models ---------------------------------------------------------------------------------------------------------


@CASES.case
def nn_graph() -> tuple[Any, ...]:
    class Net(nn.Module):
        """Messages along edges, summed where they arrive, and the mean over neighbours."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            h = F.relu(self.one(x))
            h = torch.zeros_like(h).index_add(0, target, h[source])
            h = h.scatter_reduce(0, target[:, None].expand(-1, 8), self.two(h)[source], "mean")
            return self.head(h)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["edges"]), batch["y"])

    return Net(), loss, batches(lambda k: {"x": reals(k, 12, 6), "edges": ints(k + 1, 12, 2, 30), "y": ints(k + 2, CLASSES, 12)})


@CASES.case
def nn_autoencoder() -> tuple[Any, ...]:
    class Net(nn.Module):
        """A variational one whose noise comes with the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = mlp(12, 16, 8), nn.Sequential(mlp(4, 16, 12), nn.Sigmoid())

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_var = self.down(x).chunk(2, -1)
            return self.up(mean + noise * (log_var / 2).exp()), mean, log_var

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out, mean, log_var = model(batch["x"], batch["noise"])
        apart = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        return F.binary_cross_entropy(out, batch["x"], reduction="sum") / len(out) + apart

    return (
        Net(),
        loss,
        batches(lambda k: {"x": torch.rand(SAMPLES, 12, generator=torch.Generator().manual_seed(k)), "noise": reals(k, SAMPLES, 4)}),
    )


@CASES.case
def nn_experts() -> tuple[Any, ...]:
    class Net(nn.Module):
        """Two of four experts a token, with a loss that balances them."""

        def __init__(self) -> None:
            super().__init__()
            self.route, self.experts, self.head = nn.Linear(8, 4), nn.ModuleList(mlp(8, 12, 8) for _ in range(4)), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.route(x).softmax(-1)
            best, which = weights.topk(2, -1)
            gates = torch.zeros_like(weights).scatter(-1, which, best / best.sum(-1, keepdim=True))
            mixed = sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
            return self.head(x + mixed), (weights.mean(0) * (gates > 0).to(x.dtype).mean(0)).sum()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out, balance = model(batch["x"])
        return F.cross_entropy(out, batch["y"]) + 0.1 * balance

    return Net(), loss, vectors()


@CASES.case
def nn_state_space() -> tuple[Any, ...]:
    class Net(nn.Module):
        """A linear recurrence with gates, unrolled."""

        def __init__(self) -> None:
            super().__init__()
            self.inward, self.decay, self.out = nn.Linear(8, 16), nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.inward(x).chunk(2, -1)
            keep, h, outs = torch.sigmoid(self.decay), torch.zeros_like(value[:, 0]), []
            for t in range(x.shape[1]):
                h = keep * h + (1 - keep) * value[:, t]
                outs.append(h * F.silu(gate[:, t]))
            return self.out(torch.stack(outs, 1))

    return Net(), squares, batches(lambda k: {"x": reals(k, SAMPLES, 6, 8)})


@CASES.case
def nn_fourier() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.filter, self.head = nn.Linear(8, 8), nn.Parameter(torch.randn(5)), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(self.inward(x)) * self.filter, n=8))

    return Net(), cross_entropy, vectors()


@CASES.case
def nn_linear_algebra() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward = nn.Linear(8, 9)

        def forward(self, x: Tensor) -> Tensor:
            a = self.inward(x).view(-1, 3, 3)
            spd = a @ a.mT + torch.eye(3, dtype=a.dtype)
            return (
                torch.linalg.solve(spd, x[:, :3, None]).squeeze(-1) + torch.logdet(spd)[:, None] + torch.linalg.inv(spd).diagonal(0, 1, 2)
            )

    return Net(), squares, vectors()


@CASES.case
def nn_hypernetwork() -> tuple[Any, ...]:
    class Net(nn.Module):
        """A net whose weights another net makes, a set for every sample."""

        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Linear(8, 8 * 4 + 4)

        def forward(self, x: Tensor) -> Tensor:
            made = self.maker(x)
            return torch.einsum("bi,bio->bo", x, made[:, :32].view(-1, 8, 4)) + made[:, 32:]

    return Net(), cross_entropy, vectors()
