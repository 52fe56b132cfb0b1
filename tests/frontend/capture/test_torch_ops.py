"""Torch functions one by one: value and gradient through the captured program, and no op left opaque."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.capture.checks import ops, same_as_torch, same_function


def draw(*shape, seed=0, positive=False):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.abs() + 0.5 if positive else x


X, Y, Z = draw(3, 4), draw(3, 4, seed=1), draw(4, 5, seed=2)
POS = draw(3, 4, positive=True)
ROW = draw(4, seed=3)
IDS = torch.tensor([2, 0, 3, 3])
B = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, True, True]])
IMAGE, KERNEL = draw(2, 4, 9, 8), draw(6, 4, 3, 3, seed=1)

POINTWISE = {
    "add alpha": (lambda x, y: torch.add(x, y, alpha=2.5), X, Y),
    "add row": (lambda x, y: x + y, X, ROW),
    "add number": (lambda x: x + 2, X),
    "sub": (lambda x, y: torch.sub(x, y, alpha=0.5), X, Y),
    "rsub": (lambda x: 3 - x, X),
    "mul": (lambda x, y: x * y, X, ROW),
    "div": (lambda x, y: x / y, X, POS),
    "div number": (lambda x: 2.0 / x, POS),
    "div whole": (lambda x: x * (torch.arange(12).view(3, 4) // 5), X),
    "div whole down": (lambda x: x * ((torch.arange(12).view(3, 4) - 6) // 5), X),
    "div trunc": (lambda x: x * torch.div(torch.arange(12).view(3, 4) - 6, 5, rounding_mode="trunc"), X),
    "remainder": (lambda x: x * ((torch.arange(12).view(3, 4) - 6) % 5), X),
    "fmod": (lambda x: x * torch.fmod(torch.arange(12).view(3, 4) - 6, 5), X),
    "pow 3": (lambda x: x**3, X),
    "pow half": (lambda x: x**0.5, POS),
    "pow -1": (lambda x: x**-1, POS),
    "pow tensors": (lambda x, y: x**y, POS, Y),
    "number pow": (lambda x: 2**x, X),
    "whole number pow": (lambda x: x * torch.arange(4) ** 2, X),
    "exp": (torch.exp, X),
    "log": (torch.log, POS),
    "sqrt": (torch.sqrt, POS),
    "rsqrt": (torch.rsqrt, POS),
    "sin": (torch.sin, X),
    "cos": (torch.cos, X),
    "erf": (torch.erf, X),
    "tanh": (torch.tanh, X),
    "log1p": (torch.log1p, POS),
    "expm1": (torch.expm1, X),
    "log2": (torch.log2, POS),
    "log10": (torch.log10, POS),
    "exp2": (torch.exp2, X),
    "reciprocal": (torch.reciprocal, POS),
    "abs": (torch.abs, X),
    "neg": (torch.neg, X),
    "sign": (lambda x: torch.sign(x) * x, X),
    "floor": (lambda x: torch.floor(x) * x, X),
    "ceil": (lambda x: torch.ceil(x) * x, X),
    "square": (torch.square, X),
    "sigmoid": (torch.sigmoid, X),
    "logsigmoid": (F.logsigmoid, X),
    "relu": (F.relu, X),
    "relu6": (F.relu6, X),
    "gelu": (F.gelu, X),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "silu": (F.silu, X),
    "mish": (F.mish, X),
    "hardswish": (F.hardswish, X),
    "hardsigmoid": (F.hardsigmoid, X),
    "softplus": (lambda x: F.softplus(x, beta=2.0), X),
    "elu": (F.elu, X),
    "selu": (F.selu, X),
    "celu": (F.celu, X),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.2), X),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 0.5), X),
    "clamp": (lambda x: x.clamp(-0.5, 0.7), X),
    "clamp min": (lambda x: x.clamp(min=0.1), X),
    "clamp max": (lambda x: torch.clamp_max(x, 0.1), X),
    "clamp tensor": (lambda x, y: torch.clamp(x, min=y), X, Y),
    "maximum": (torch.maximum, X, Y),
    "minimum": (torch.minimum, X, Y),
    "where": (lambda x, y: torch.where(x > 0, x, y), X, Y),
    "where number": (lambda x: torch.where(x > 0, x, 0.0), X),
    "masked fill": (lambda x: x.masked_fill(B, 3.0), X),
    "masked fill -inf": (lambda x: torch.softmax(x.masked_fill(~B, float("-inf")), -1)[0], X),
    "logic": (lambda x: x * ((x > 0) & (x < 1) | (x != x) ^ ~(x >= -1)), X),
    "isfinite": (lambda x: x * torch.isfinite(x), X),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=0.3), X, Y),
    "addcdiv": (lambda x, y: torch.addcdiv(x, x, y, value=0.3), X, POS),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), X, Y),
    "cast": (lambda x: x.double().float() * x.to(torch.float64).float(), X),
    "bool": (lambda x: x * (x > 0).float(), X),
    "int to float": (lambda x: x * torch.arange(4).float(), X),
    "mixed dtypes": (lambda x: x * torch.arange(4) + True, X),
}

SHAPE = {
    "reshape": (lambda x: x.reshape(2, 6) * 2, X),
    "view": (lambda x: x.view(-1, 2), X),
    "flatten": (torch.flatten, IMAGE),
    "permute": (lambda x: x.permute(2, 0, 3, 1), IMAGE),
    "transpose": (lambda x: x.transpose(1, 3), IMAGE),
    "t": (lambda x: x.t(), X),
    "mT": (lambda x: x.mT, X),
    "swapaxes": (lambda x: x.swapaxes(0, 1), X),
    "movedim": (lambda x: x.movedim(1, -1), IMAGE),
    "unsqueeze": (lambda x: x[:, None] * x.unsqueeze(-1), X),
    "squeeze": (lambda x: x[:, :1].squeeze(1), X),
    "squeeze all": (lambda x: x[:1, None].squeeze(), X),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), X),
    "expand": (lambda x: x[:, None].expand(3, 5, 4), X),
    "expand new": (lambda x: x.expand(2, -1, -1), X),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (3, 4)), ROW),
    "repeat": (lambda x: x.repeat(2, 1, 3), X),
    "tile": (lambda x: x.tile(2), X),
    "repeat interleave": (lambda x: x.repeat_interleave(3, 1), X),
    "slice": (lambda x: x[1:, ::2], X),
    "slice from end": (lambda x: x[:, -3:-1], X),
    "select": (lambda x: x[-1], X),
    "ellipsis": (lambda x: x[..., 1], IMAGE),
    "narrow": (lambda x: x.narrow(1, 1, 2), X),
    "split": (lambda x: torch.cat(x.split(3, 1)[::-1], 1), X),
    "split even": (lambda x: [p * i for i, p in enumerate(x.split(2, 1))], X),
    "split sizes": (lambda x: x.split([1, 3], 1)[1], X),
    "chunk": (lambda x: torch.stack(x.chunk(2, 1)), X),
    "tensor_split": (lambda x: x.tensor_split(3, 1)[0], X),
    "unbind": (lambda x: sum(x.unbind(1)), X),
    "cat": (lambda x, y: torch.cat([x, y, x], 1), X, Y),
    "stack": (lambda x, y: torch.stack([x, y], 1), X, Y),
    "hstack": (lambda x, y: torch.hstack([x, y]), X, Y),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3)), X),
    "pad value": (lambda x: F.pad(x, (1, 2), value=7.0), X),
    "pad trims": (lambda x: F.pad(x, (-1, 2)), X),
    "roll": (lambda x: x.roll((1, -1), (0, 1)), X),
    "roll flat": (lambda x: x.roll(5), X),
    "flip": (lambda x: x.flip(0, 1), X),
    "tril": (lambda x: x.tril(1), X),
    "triu": (lambda x: x.triu(-1), X),
    "contiguous": (lambda x: x.t().contiguous(), X),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), IMAGE),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), IMAGE[:, :, :8]),
    "diagonal": (lambda x: x.diagonal(1, 0, 1), X),
    "diagonal below": (lambda x: torch.diagonal(x, -1, 1, 3), IMAGE),
    "meshgrid": (lambda x: torch.meshgrid(x, x, indexing="ij")[0], ROW),
    "diag embed by hand": (lambda x: torch.eye(4) * x, ROW),
}

REDUCE = {
    "sum": (torch.sum, X),
    "sum dims": (lambda x: x.sum((0, 2)), IMAGE),
    "sum keepdim": (lambda x: x.sum(1, keepdim=True), X),
    "mean": (torch.mean, X),
    "mean dims": (lambda x: x.mean((2, 3)), IMAGE),
    "amax": (lambda x: x.amax(1), X),
    "amin": (lambda x: x.amin(0, keepdim=True), X),
    "max": (torch.max, X),
    "max dim": (lambda x: x.max(1), X),
    "min dim": (lambda x: x.min(1, keepdim=True), X),
    "argmax": (lambda x: x.argmax(1), X),
    "argmin": (lambda x: x.argmin(), X),
    "any": (lambda x: x * (x > 0).any(1, keepdim=True), X),
    "all": (lambda x: x * (x > -9).all(), X),
    "var": (lambda x: x.var(1), X),
    "var biased": (lambda x: x.var(0, unbiased=False), X),
    "std": (lambda x: x.std(1), X),
    "var_mean": (lambda x: torch.var_mean(x, 1), X),
    "norm": (torch.linalg.vector_norm, X),
    "norm 1": (lambda x: x.norm(1), X),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, math.inf, 1), X),
    "normalize": (lambda x: F.normalize(x, dim=-1), X),
    "cosine": (lambda x, y: F.cosine_similarity(x, y), X, Y),
    "logsumexp": (lambda x: x.logsumexp(1), X),
    "softmax": (lambda x: x.softmax(0), X),
    "log softmax": (lambda x: F.log_softmax(x, -1), X),
    "softmin": (lambda x: F.softmin(x, 1), X),
    "cumsum": (lambda x: x.cumsum(1), X),
    "topk": (lambda x: x.topk(2), X),
    "topk smallest": (lambda x: x.topk(2, 0, largest=False), X),
    "sort": (lambda x: x.sort(1, descending=True), X),
    "argsort": (lambda x: x.argsort(0), X),
}

PRODUCTS = {
    "matmul": (torch.matmul, X, Z),
    "mv": (lambda x, y: x @ y, X, ROW),
    "vm": (lambda x, y: x @ y, ROW, Z),
    "dot": (torch.dot, ROW, ROW),
    "outer": (torch.outer, ROW, ROW),
    "batch by matrix": (lambda x, z: x[None].expand(2, -1, -1) @ z, X, Z),
    "matrix by batch": (lambda x, z: x @ z[None].expand(2, -1, -1), X, Z),
    "stretched batches": (lambda a, b: a[:, None] @ b[None], draw(3, 2, 4), draw(5, 4, 2)),
    "batch by vector": (lambda a, b: a @ b, draw(2, 3, 4), ROW),
    "bmm": (torch.bmm, draw(2, 3, 4), draw(2, 4, 5)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), draw(5), X, Z),
    "baddbmm": (torch.baddbmm, draw(2, 3, 5), draw(2, 3, 4), draw(2, 4, 5)),
    "linear": (F.linear, X, draw(6, 4), draw(6)),
    "linear 3d": (F.linear, draw(2, 3, 4), draw(6, 4)),
    "linear 1d": (F.linear, ROW, draw(6, 4)),
    "bilinear": (F.bilinear, X, X, draw(2, 4, 4)),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), draw(2, 3, 4), draw(2, 5, 4)),
    "einsum implicit": (lambda a, b: torch.einsum("ij,jk", a, b), X, Z),
    "einsum ellipsis": (lambda a, b: torch.einsum("...k,kj->...j", a, b), draw(2, 3, 4), Z),
    "einsum sum": (lambda a: torch.einsum("ij->i", a), X),
    "einsum list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), X, Z),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), X, Z),
    "trace by einsum": (lambda a: torch.einsum("ii->", a), draw(4, 4)),
}

INDEX = {
    "embedding": (lambda w: F.embedding(IDS, w), draw(5, 4)),
    "embedding padding": (lambda w: F.embedding(IDS, w, padding_idx=3), draw(5, 4)),
    "bag sum": (lambda w: F.embedding_bag(IDS.view(2, 2), w, mode="sum"), draw(5, 4)),
    "bag mean": (lambda w: F.embedding_bag(IDS.view(2, 2), w), draw(5, 4)),
    "bag weighed": (lambda w, s: F.embedding_bag(IDS.view(2, 2), w, mode="sum", per_sample_weights=s), draw(5, 4), draw(2, 2)),
    "index": (lambda x: x[IDS], draw(5, 4)),
    "index second": (lambda x: x[:, IDS], X),
    "index two": (lambda x: x[IDS[:3], IDS[1:]], draw(5, 4)),
    "index negative": (lambda x: x[torch.tensor([-1, 0])], X),
    "index counted from the end": (lambda x: x[torch.arange(-2, 1)] + x[torch.arange(-3, 0)[:, None], torch.arange(-4, 0)], X),
    "index apart": (lambda x: x[IDS[:2], :, IDS[2:]], draw(4, 3, 5)),
    "index middle": (lambda x: x[:, IDS[:2, None], IDS[None, 2:]], draw(2, 4, 5)),
    "index with slice": (lambda x: x[1:, IDS], X),
    "index_select": (lambda x: x.index_select(1, IDS), X),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1], [3, 0]])), X),
    "take_along": (lambda x: x.take_along_dim(x.argsort(1), 1), X),
    "scatter": (lambda x, y: x.scatter(1, torch.tensor([[0, 2], [1, 0], [3, 0]]), y[:, :2]), X, Y),
    "scatter value": (lambda x: x.scatter(1, torch.tensor([[0], [1], [3]]), 5.0), X),
    "scatter_add": (lambda x, y: x.scatter_add(1, torch.tensor([[0, 0], [1, 0], [3, 3]]), y[:, :2]), X, Y),
    "index_add": (lambda x, y: x.index_add(0, torch.tensor([2, 2, 0]), y, alpha=2), X, Y),
    "scatter amax": (
        lambda x: x.new_zeros(5, 4).scatter_reduce(0, torch.tensor([2, 2, 4])[:, None].expand(3, 4), x, "amax", include_self=False), X,
    ),
    "scatter amax of numbers": (lambda x: x.new_zeros(3).scatter_reduce(0, torch.tensor([0, 2, 2, 0]), x[0], "amax", include_self=False), X),
    "index_copy": (lambda x, y: x.index_copy(0, torch.tensor([2, 0]), y[:2]), X, Y),
    "index_put": (lambda x, y: x.index_put((torch.tensor([2, 0]), torch.tensor([1, 3])), y[0, :2]), X, Y),
    "index_put sum": (lambda x, y: x.index_put((torch.tensor([2, 2]),), y[:2], accumulate=True), X, Y),
    "one_hot": (lambda x: x * F.one_hot(IDS[:3], 4), X),
    "bincount": (lambda x: x * torch.bincount(IDS, minlength=4), X),
}

NORMS = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), X, ROW, ROW),
    "layer norm bare": (lambda x: F.layer_norm(x, (4,)), X),
    "layer norm 2": (lambda x, w: F.layer_norm(x, (9, 8), w), IMAGE, draw(9, 8)),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), X, ROW),
    "rms norm eps": (lambda x: F.rms_norm(x, (4,), eps=0.1), X),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, ROW, ROW),
    "instance norm": (lambda x: F.instance_norm(x), IMAGE),
    "batch norm eval": (lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()), IMAGE, ROW, draw(4, positive=True)),
    "cross entropy": (lambda x: F.cross_entropy(x, IDS[:3]), X),
    "cross entropy smooth": (lambda x: F.cross_entropy(x, IDS[:3], label_smoothing=0.2, reduction="sum"), X),
    "cross entropy ignored": (lambda x: F.cross_entropy(x, torch.tensor([1, -100, 2])), X),
    "cross entropy images": (lambda x: F.cross_entropy(x, torch.zeros(2, 9, 8, dtype=torch.long)), IMAGE),
    "cross entropy each": (lambda x: F.cross_entropy(x, IDS[:3], reduction="none"), X),
    "cross entropy weighed": (lambda x, w: F.cross_entropy(x, IDS[:3], w.detach().abs()), X, ROW),
    "cross entropy of chances": (lambda x, y: F.cross_entropy(x, y.softmax(1).detach()), X, Y),
    "nll": (lambda x: F.nll_loss(x.log_softmax(1), IDS[:3]), X),
    "mse": (F.mse_loss, X, Y),
    "l1": (F.l1_loss, X, Y),
    "smooth l1": (F.smooth_l1_loss, X, Y),
    "huber": (F.huber_loss, X, Y),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1).detach(), reduction="batchmean"), X, Y),
    "bce logits": (lambda x: F.binary_cross_entropy_with_logits(x, B.float()), X),
    "bce weighed": (lambda x, w: F.binary_cross_entropy_with_logits(x, B.float(), pos_weight=w.detach().abs()), X, ROW),
    "bce": (lambda x: F.binary_cross_entropy(x.sigmoid(), B.float()), X),
}

IMAGES = {
    "conv": (F.conv2d, IMAGE, KERNEL, draw(6)),
    "conv stride": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), IMAGE, KERNEL),
    "conv dilated": (lambda x, w: F.conv2d(x, w, dilation=2), IMAGE, KERNEL),
    "conv same": (lambda x, w: F.conv2d(x, w, padding="same"), IMAGE, KERNEL),
    "conv groups": (lambda x, w: F.conv2d(x, w, groups=2), IMAGE, draw(6, 2, 3, 3)),
    "conv depthwise": (lambda x, w: F.conv2d(x, w, groups=4), IMAGE, draw(4, 1, 3, 3)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1, stride=2), draw(2, 4, 9), draw(6, 4, 3)),
    "max pool": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "max pool padded": (lambda x: F.max_pool2d(x, 3, 2, padding=1), IMAGE),
    "avg pool": (lambda x: F.avg_pool2d(x, 3, 2, padding=1), IMAGE),
    "avg pool uncounted": (lambda x: F.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False), IMAGE),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    "adaptive uneven": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), IMAGE),
}

ATTENTION = {
    "plain": (F.scaled_dot_product_attention, draw(2, 3, 5, 4), draw(2, 3, 6, 4), draw(2, 3, 6, 4)),
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        draw(2, 3, 5, 4),
        draw(2, 3, 5, 4),
        draw(2, 3, 5, 4),
    ),
    "grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        draw(2, 4, 5, 4),
        draw(2, 2, 5, 4),
        draw(2, 2, 5, 4),
    ),
    "scaled": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3), draw(2, 3, 5, 4), draw(2, 3, 5, 4), draw(2, 3, 5, 4)),
    "bool mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, B[:, :3].logical_or(torch.eye(3).bool())),
        draw(2, 3, 3, 4),
        draw(2, 3, 3, 4),
        draw(2, 3, 3, 4),
    ),
    "float mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        draw(2, 3, 5, 4),
        draw(2, 3, 6, 4),
        draw(2, 3, 6, 4),
        draw(2, 1, 5, 6),
    ),
    "three dims": (F.scaled_dot_product_attention, draw(2, 5, 4), draw(2, 6, 4), draw(2, 6, 4)),
    "two dims": (F.scaled_dot_product_attention, draw(5, 4), draw(6, 4), draw(6, 4)),
    "five dims": (F.scaled_dot_product_attention, draw(2, 2, 3, 5, 4), draw(2, 2, 3, 6, 4), draw(2, 2, 3, 6, 4)),
    "shared keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)),
        draw(2, 3, 5, 4),
        draw(1, 3, 6, 4),
        draw(1, 3, 6, 4),
    ),
}

TABLES = {
    "pointwise": POINTWISE,
    "shape": SHAPE,
    "reduce": REDUCE,
    "products": PRODUCTS,
    "index": INDEX,
    "norms": NORMS,
    "images": IMAGES,
    "attention": ATTENTION,
}
ALL = {f"{kind}: {name}": case for kind, table in TABLES.items() for name, case in table.items()}


@pytest.mark.parametrize("name", ALL)
def test_function(name):
    f, *inputs = ALL[name]
    captured = same_function(f, *(x.clone() for x in inputs))
    assert captured.opaque == {}


def test_attention_is_one_op():
    f, *inputs = ATTENTION["grouped"]
    assert ops(same_function(f, *inputs))["attention"] == 1


@pytest.mark.parametrize("name", ["batch", "heads"])
def test_multi_head_attention_module(name):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=name == "batch")
    x = draw(3, 5, 8)

    def loss(model, batch):
        return model(batch[0], batch[0], batch[0], need_weights=False)[0].square().sum()

    captured = same_as_torch(module, loss, (x,))
    assert ops(captured)["attention"] == 1


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer(training):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 3).train(training)
    captured = same_as_torch(model, lambda m, b: m(*b).square().mean(), (draw(2, 5, 8),))
    assert captured.opaque == {}
