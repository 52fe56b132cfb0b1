"""Modules of torch.nn as people combine them: recurrent, transposed, padded, parametrised. Opaque is allowed, wrong is not."""

import pytest
import torch
from torch import nn

from tests.frontend.capture.checks import same_as_torch

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(1))
KNOWN = {
    "lstm": (lambda: nn.LSTM(8, 6, 2, batch_first=True), X),
    "gru": (lambda: nn.GRU(8, 6, batch_first=True, bidirectional=True), X),
    "rnn": (lambda: nn.RNN(8, 6), X),
    "lstm cell": (lambda: nn.LSTMCell(8, 6), X[:, 0]),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "circular padding": (lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), X),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), X),
    "prelu": (nn.PReLU, X),
    "glu": (nn.GLU, X),
    "threshold": (lambda: nn.Threshold(0.1, 2.0), X),
    "hard shrink": (nn.Hardshrink, X),
    "soft shrink": (nn.Softshrink, X),
    "max pool of rows": (lambda: nn.MaxPool1d(2), X),
    "average pool of rows": (lambda: nn.AvgPool1d(2), X),
    "bag by offsets": (lambda: nn.EmbeddingBag(5, 4, mode="mean"), torch.tensor([1, 2, 3, 4, 0]), torch.tensor([0, 2, 2])),
    "bag sums": (lambda: nn.EmbeddingBag(5, 4, mode="sum", include_last_offset=True), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 4])),
    "batch norm over ranks": (lambda: nn.SyncBatchNorm(4), IMAGE),
    "triplet loss": (nn.TripletMarginLoss, X, X + 1, X * 2),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0, batch_first=True), 2), X, X),
}
OPAQUE = {
    "convolution in space": (lambda: nn.Conv3d(1, 2, 3), torch.randn(1, 1, 5, 5, 5)),
    "local response": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "adaptive maximum": (lambda: nn.AdaptiveMaxPool2d(3), IMAGE),
    "bilinear upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "unfold": (lambda: nn.Unfold(3), IMAGE),
    "reflection": (lambda: nn.ReflectionPad2d(1), IMAGE),
}


class First(nn.Module):
    """The first of what a module gives, times a parameter, so that there always is one."""

    def __init__(self, module):
        super().__init__()
        self.module, self.scale = module, nn.Parameter(torch.ones(()))

    def forward(self, *args):
        out = self.module(*args)
        return (out[0] if isinstance(out, tuple) else out) * self.scale


def captured(make, *inputs):
    torch.manual_seed(0)
    return same_as_torch(First(make()), lambda m, b: m(*b).square().mean(), inputs)


@pytest.mark.parametrize("name", KNOWN)
def test_known_to_weft(name):
    assert captured(*KNOWN[name]).opaque == {}


@pytest.mark.parametrize("name", OPAQUE)
def test_kept_whole(name):
    assert captured(*OPAQUE[name]).opaque
