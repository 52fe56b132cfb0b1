"""Images turned so that their channels lie beside each other: the same values, and what leaves lies as before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime import image_layout
from weft.runtime.image_layout import channels_last, faster_channels_last


def step(x: torch.Tensor, w: torch.Tensor, point: torch.Tensor) -> list[torch.Tensor]:
    """A grouped convolution, something about its channels, one of single points, and the gradients of both."""
    y = F.conv2d(x, w, padding=1, groups=2)
    z = (y.reshape(y.shape[0], 2, -1, *y.shape[2:]) * 2).reshape(y.shape).relu()
    out = F.conv2d(z, point)
    dz, dpoint, _ = torch.ops.aten.convolution_backward(out, z, point, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    dw = torch.nn.grad.conv2d_weight(x, w.shape, dz, padding=1, groups=2)  # its weight stands for its size alone
    return [out.sum((0, 2, 3)), dz, dw, dpoint]


def test_the_same_values_lie_as_they_did() -> None:
    given = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 4, 6, 5), (8, 2, 3, 3), (6, 8, 1, 1))]
    plain = make_fx(step, tracing_mode="fake")(*given)
    turned = channels_last(plain, given)
    for got, want in zip(turned(*given), step(*given), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    wide = [n for n in turned.graph.nodes if n.target is torch.ops.aten.convolution.default]
    assert len(wide) == 2 and all(n.args[0].meta["val"].stride()[1] == 1 and n.meta["val"].stride()[1] == 1 for n in wide)


def test_each_kind_of_convolution_is_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.randn(shape) for shape in ((2, 4, 6, 5), (8, 2, 3, 3), (6, 8, 1, 1))]
    plain = make_fx(lambda *xs: [*step(*xs), *step(*xs)], tracing_mode="fake")(*given)
    assert faster_channels_last(plain, torch.device("cpu")) in (True, False)  # the trials run
    asked: list[tuple[str, bool]] = []
    takes: dict[bool, float] = {}

    def scripted(kind: image_layout.Kind, device: torch.device, turned: bool) -> float:
        asked.append((kind[0].__name__, turned))
        return takes[turned]

    monkeypatch.setattr(image_layout, "_milliseconds", scripted)
    for as_it_is, turned, chosen in ((2.0, 1.0, True), (1.0, 2.0, False), (1.04, 1.0, False)):
        takes |= {False: as_it_is, True: turned}
        assert faster_channels_last(plain, torch.device("cpu")) is chosen
    assert sorted(asked[:8]) == sorted((f"{n}.default", t) for n in ("convolution", "convolution_backward") for t in (False, True) for _ in "ab")
