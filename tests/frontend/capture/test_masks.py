"""A mask of attention stays a value until it is shown to be none, causal, a window or padding; what is shown equals torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.capture.checks import same_as_torch

B, H, S, D = 2, 2, 6, 4
REAL = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


class Attends(nn.Module):
    """Two layers alike, which are given a mask made outside of them."""

    def __init__(self, mask, heads=H):
        super().__init__()
        self.mask, self.layers = mask, nn.ModuleList(Layer(heads) for _ in range(2))

    def forward(self, x, keep):
        mask = self.mask(keep)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Layer(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.q, self.kv, self.heads = nn.Linear(H * D, H * D), nn.Linear(H * D, 2 * heads * D), heads

    def forward(self, x, mask):
        split = lambda y, h: y.unflatten(-1, (h, D)).transpose(1, 2)  # noqa: E731
        k, v = (repeated(split(y, self.heads), H // self.heads) for y in self.kv(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(split(self.q(x), H), k, v, mask)
        return x + out.transpose(1, 2).flatten(-2)


def repeated(x, times):
    if times == 1:
        return x
    return x[:, :, None].expand(-1, -1, times, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])


def rows_and_keys():
    return torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]


def window(size):
    i, j = rows_and_keys()
    return (j <= i) & (j > i - size)


def captured(mask, keep=REAL, heads=H):
    torch.manual_seed(0)
    model = Attends(mask, heads).double()
    x = torch.randn(B, S, H * D, dtype=torch.float64)
    found = same_as_torch(model, lambda m, b: m(*b).square().mean(), (x, keep), 1e-12)
    assert [len(group) for group in found.blocks] == [2]
    (one, two) = found.program.find_all("attention")
    assert dict(one.attrs) == dict(two.attrs)
    return one


def far(mask, dtype=torch.float64):
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def as_told(node):
    mask = node.args[3].shape if len(node.args) > 3 else None
    return bool(node.attr("causal")), node.attr("window") or 0, mask


@pytest.mark.parametrize(("mask", "told"), [
    (lambda keep: torch.ones(B, 1, S, S, dtype=torch.bool), (False, 0, None)),
    (lambda keep: torch.zeros(S, S, dtype=torch.float64), (False, 0, None)),
    (lambda keep: torch.ones(S, S, dtype=torch.bool).tril(), (True, 0, None)),
    (lambda keep: torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1), (True, 0, None)),
    (lambda keep: far(torch.ones(S, S, dtype=torch.bool).tril()), (True, 0, None)),
    (lambda keep: (rows_and_keys()[1] <= rows_and_keys()[0]).expand(B, 1, S, S), (True, 0, None)),
    (lambda keep: nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64), (True, 0, None)),
    (lambda keep: window(3), (True, 3, None)),
    (lambda keep: window(3)[0, 0].tril(), (True, 3, None)),
    (lambda keep: window(9), (True, 0, None)),
])  # fmt: skip
def test_a_mask_that_depends_on_no_input(mask, told):
    assert as_told(captured(mask)) == told


@pytest.mark.parametrize("keep", [REAL, LEFT], ids=["right", "left"])
def test_causal_and_padding_come_apart(keep):
    def mask(keep):
        i, j = rows_and_keys()
        here = keep.bool()[torch.arange(B)[:, None, None, None], j]
        return (torch.ones((), dtype=torch.bool) & (j <= i) & here).expand(B, 1, S, S)

    assert as_told(captured(mask, keep)) == (True, 0, (B, 1, 1, 1, S))


def test_padding_alone_is_not_stretched():
    assert as_told(captured(lambda keep: keep.bool()[:, None, None].expand(B, 1, S, S))) == (False, 0, (B, 1, 1, 1, S))
    additive = captured(lambda keep: torch.where(keep.bool()[:, None, None], 0.0, float("-inf")).double().expand(B, 1, S, S))
    assert as_told(additive)[0] is False


@pytest.mark.parametrize("mask", [
    lambda keep: torch.ones(S, S, dtype=torch.bool).tril(1),
    lambda keep: torch.ones(S, S, dtype=torch.bool).triu(),
    lambda keep: torch.ones(S, S, dtype=torch.bool).tril() | (torch.arange(S) == 3),
    lambda keep: torch.full((S, S), -2.0, dtype=torch.float64).triu(1),
    lambda keep: (torch.arange(S)[:, None] - torch.arange(S)).abs() <= 2,
], ids=["one more", "upper", "one column", "small numbers", "both sides"])  # fmt: skip
def test_not_quite_causal_stays_a_mask(mask):
    assert as_told(captured(mask)) == (False, 0, (1, 1, 1, S, S))


def test_a_causal_mask_that_is_an_input_stays_one():
    node = captured(lambda keep: keep, torch.ones(S, S, dtype=torch.bool).tril())
    assert as_told(node) == (False, 0, (1, 1, 1, S, S))


def test_the_least_number_is_not_minus_infinity_where_a_row_sees_nothing():
    """Such a row looks at all keys alike, in torch; the sum with padding must stay one mask."""

    def mask(keep):
        i, j = rows_and_keys()
        return far((j <= i) & keep.bool()[:, None, None])

    assert as_told(captured(mask, LEFT)) == (False, 0, (B, 1, 1, S, S))


def test_repeated_keys_are_read_before_they_were_repeated():
    node = captured(lambda keep: keep.bool()[:, None, None].expand(B, 1, S, S), heads=1)
    assert node.args[1].shape == node.args[2].shape == (B, 1, S, D)


def test_masks_made_by_vmap():
    def mask(keep):
        def sees(b, i, j):
            return (j <= i) & (keep[b, j] > 0)

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            sees = torch.vmap(sees, in_dims=dims)
        return sees(torch.arange(B), torch.arange(S), torch.arange(S))[:, None]

    captured(mask)
