"""Complex numbers between real ones: each op on them is torch's own, and so is its gradient."""

import pytest
import torch
from torch import nn

import weft
from tests.frontend.capture.checks import same_as_torch, same_function
from weft.core.errors import CaptureError
from weft.frontend.capture import capture

X = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def written(z, y):
    """Into a part of complex numbers, and by a real one."""
    z[:, 1:3] *= 1j
    z[0] = y[0] + 0j
    return torch.view_as_real(z)


@pytest.mark.parametrize("f", [
    lambda x, y: torch.fft.fft(x).real,
    lambda x, y: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y), n=6),
    lambda x, y: torch.fft.fftn(x, dim=(1, 2)).imag + torch.fft.fft(y).real,
    lambda x, y: torch.view_as_real(torch.view_as_complex(x.reshape(3, 4, 3, 2)) * torch.polar(torch.ones(3).double(), torch.arange(3.0).double())),
    lambda x, y: (torch.complex(x, y) * torch.complex(x, y).conj()).real,
    lambda x, y: torch.complex(x, y).abs() + torch.complex(x, y).angle(),
    lambda x, y: torch.complex(x, y).transpose(1, 2)[:, 1:4].reshape(3, -1).real,
    lambda x, y: torch.view_as_real(torch.cat([torch.complex(x, y), 2j * torch.complex(y, x)], 1).sum(1)),
    lambda x, y: torch.einsum("bij,bkj->bik", torch.complex(x, y), torch.complex(y, x)).imag,
    lambda x, y: torch.complex(x, y).unsqueeze(0).expand(2, 3, 4, 6).permute(3, 0, 1, 2).real,
    lambda x, y: torch.fft.fft(x).mul_(2j).add_(torch.complex(y, x)).abs(),
    lambda x, y: written(torch.complex(x, y), y),
], ids=range(12))  # fmt: skip
def test_complex_between_real(f):
    same_function(f, X, Y, tolerance=1e-12)


class Turned(nn.Module):
    """Rotary embedding as it was first written: a complex table that is a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("turns", torch.polar(torch.ones(4, 3), torch.randn(4, 3)).to(torch.complex128), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.view_as_real(torch.view_as_complex(layer(x).unflatten(-1, (3, 2))) * self.turns).flatten(-2)
        return x


def test_a_table_of_complex_numbers():
    same_as_torch(Turned().double(), lambda m, b: m(*b).square().mean(), (X,), 1e-12)


class Holds(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f, self.weight = f, nn.Parameter(torch.ones(6).double())

    def forward(self, x):
        return self.f(x * self.weight)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Holds(torch.fft.fft), r"what the module returns \(out\) is complex"),
    (lambda: Holds(lambda x: torch.mul(torch.fft.fft(x), 2, out=torch.empty(3, 4, 6, dtype=torch.complex128)).real), "the target of the in-place op"),
    (lambda: nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "the parameter 0 is complex"),
])  # fmt: skip
def test_complex_at_the_border(make, words):
    with pytest.raises(CaptureError, match=words) as error:
        capture(make(), (X,))
    assert "view_as_real" in str(error.value)


def test_a_step_with_a_complex_table_is_compared_with_torch():
    model = Turned().double()
    weft.parallelize(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), X[:, :, :6])
