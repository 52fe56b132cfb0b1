"""Torch as the judge of a module by itself: what it returns and, where its user trains it, the gradients from given ones of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.api import eager
from weft.api.check_blocks import gradients, random_of
from weft.api.check_step import Case
from weft.core.names import original, part, readable
from weft.core.node import Node
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.batches import named_batch, tensors
from weft.frontend.capture.model import called
from weft.ops.fill import stop_gradient

GIVEN, CTS, OUT, GRAD = "batch.given", "batch.cts", "out.out", "out.grads"


@dataclass(frozen=True)
class ForwardCase(Case):
    """What a module returns."""

    word: ClassVar[str] = "pass"
    learns: ClassVar[bool] = False

    def capture(self, example: Any) -> Captured:
        return capture(self.model, example)

    def results(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return tensors("out", called(model, batch), objects=False)

    def cotangents(self, captured: Captured) -> dict[str, str]:
        return {n: "" for n in captured.program.output_names if n.partition(".")[0] == "out"}

    def updates(self, captured: Captured) -> dict[str, Any]:
        return {}

    def stepped(self, captured: Captured, pair: eager.Pair, batch: Any) -> dict[str, Tensor | None]:
        model, _ = pair
        with eager.drawn(captured):
            results = self.results(model, eager.on(batch, self.device))
            back = self.torchs_gradients(captured, model, results, batch)
        names, now = eager.names_of(captured, self.model), (*model.parameters(), *model.buffers())
        return {**{n: x.detach() for n, x in results.items()}, **back, **{n: t.detach().clone() for n, t in zip(names, now, strict=True)}}

    def torchs_gradients(self, captured: Captured, model: nn.Module, results: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor | None]:
        return {}


@dataclass(frozen=True)
class LossCase(ForwardCase):
    """The loss alone."""

    word: ClassVar[str] = "loss"

    def capture(self, example: Any) -> Captured:
        return capture(self.model, example, self.loss)

    def results(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"loss": self.loss(model, batch)}

    def cotangents(self, captured: Captured) -> dict[str, str]:
        return {"loss": ""}


@dataclass(frozen=True)
class TrainedCase(ForwardCase):
    """What a module returns, and its parameters' gradients; `both` captures that."""

    both: Callable[[Any], Captured] = lambda example: NotImplemented
    learns: ClassVar[bool] = True

    def capture(self, example: Any) -> Captured:
        return self.both(example)

    def batch(self, captured: Captured, example: Any) -> Any:
        """The example, and random gradients of what the module returns."""
        random, inputs = torch.Generator().manual_seed(0), captured.program.input_names
        cts = {n: random_of(x.shape, x.dtype, torch.device("cpu"), random) for n, x in inputs.items() if n.startswith(CTS)}
        outs = [n for n in captured.program.output_names if n.startswith(f"{OUT}.")]
        return {"given": example, "cts": [cts.get(n.replace(OUT, CTS, 1), torch.zeros(())) for n in outs]}

    def results(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {f"{OUT}.{i}": x for i, x in enumerate(tree_leaves(called(model, batch["given"])))}

    def cotangents(self, captured: Captured) -> dict[str, str]:
        return {n: n.replace(OUT, CTS, 1) for n in captured.program.output_names if n.startswith(f"{OUT}.")}

    def seeds(self, captured: Captured) -> list[tuple[Node, Node]]:
        p = captured.program
        return [(p.output_names[n], p.input_names[ct]) for n, ct in self.cotangents(captured).items() if ct in p.input_names]

    def gradients(self, captured: Captured) -> Mapping[str, Node] | None:
        found = {n.removeprefix(f"{GRAD}."): x for n, x in captured.program.outputs if n.startswith(f"{GRAD}.")}
        if captured.joint:
            return None
        return {f"param.{readable(original(n))}": x.args[0] if x.op is stop_gradient else x for n, x in found.items()}  # a gradient is a constant

    def torchs_gradients(self, captured: Captured, model: nn.Module, results: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor | None]:
        cts, moving = named_batch(eager.on(batch, self.device)), {f"{GRAD}.{part(n)}": p for n, p in model.named_parameters() if p.requires_grad}
        for p in moving.values():
            p.grad = None
        return {n[2:]: g for n, g in gradients([(results[n], cts[ct]) for n, ct in self.cotangents(captured).items()], moving).items()}
