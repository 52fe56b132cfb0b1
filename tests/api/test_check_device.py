"""The judge computes where the model is, also where torch's functions are not listened to."""

from __future__ import annotations

import torch

from weft.api.deviation import run
from weft.core.layout import Mesh
from weft.frontend.capture.constants import unheard
from weft.frontend.trace import f64, trace
from weft.ops import fill, shape


def test_what_is_made_of_nothing_is_made_on_the_device_of_the_model() -> None:
    mesh = Mesh()
    program = trace(lambda x: shape.concat([x, fill.full((2,), -100.0, mesh, dtype="f64")], 0), mesh, x=f64(3))
    with unheard():
        out = run(program, {"x": torch.empty(3, dtype=torch.float64, device="meta")}, torch.device("meta"))
    assert out["out"].device.type == "meta"
