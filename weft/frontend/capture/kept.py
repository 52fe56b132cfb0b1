"""Constants that a call keeps in Python: tables of positions, masks and the like, made once and held in an attribute or a dict.

After a trace they get the values torch would have given them, so that Python is as after a call of torch's; a later trace that finds them
there knows what they were made of, and means the same program.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.evaluate import values_of
from weft.core.node import Node, toposort
from weft.frontend.capture.values import TAG

ROOM = 1 << 24  # elements of a constant that is computed


class NotConstant(Exception):
    """A traced tensor that is other at every step, or in what cannot be made again with values."""


class Kept:
    """Tensors with values, and the nodes they were made of."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steady: dict[str, Tensor] = {}  # buffers that no step writes, by the names of inputs
        self._nodes: dict[int, tuple[Tensor, int, Node]] = {}
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def node(self, tensor: Tensor) -> Node | None:
        """What a kept tensor was made of, if nobody wrote into it since."""
        found = self._nodes.get(id(tensor))
        return found[2] if found is not None and tensor._version == found[1] else None

    def with_values(self, x: Any) -> Any:
        """The same with values for traced tensors."""
        if isinstance(x, FakeTensor):
            return self._value(x)
        if type(x) is dict:
            return {k: self.with_values(v) for k, v in x.items()}
        if type(x) in (list, tuple):
            return type(x)(map(self.with_values, x))
        return x

    def _value(self, traced: FakeTensor) -> Tensor:
        if id(traced) not in self._made:
            ref = getattr(traced, TAG, None)
            if ref is None or traced.is_complex():
                raise NotConstant
            node = ref.read()
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                made = self._computed(node).clone().to(self.device)
            self._made[id(traced)] = traced, made
            self._nodes[id(made)] = made, made._version, node
        return self._made[id(traced)][1]

    def _computed(self, node: Node) -> Tensor:
        nodes = toposort([node])
        if any("site" in dict(n.attrs) or any(math.prod(t.shape) > ROOM for t in n.types) for n in nodes):
            raise NotConstant
        if any(n.op.is_input and n.attr("name") not in self.steady for n in nodes):
            raise NotConstant
        made: Tensor = values_of([node], {}, lambda n: self.steady[n.attr("name")].cpu())[0]
        return made
