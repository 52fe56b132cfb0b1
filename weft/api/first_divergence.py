"""Where a captured step first leaves torch: the first module, in the order they end, whose output the program has nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.api import eager

if TYPE_CHECKING:
    from weft.api.check_step import Sides

Print = tuple[int, float, float, float]  # how many elements, their sum, the sum of their sizes and of their squares


def first_divergence(sides: Sides) -> str:
    """In words; empty where it cannot be told. A fingerprint does not depend on the order of dims, so a view is the same value."""
    case = sides.case
    try:
        with (
            eager.unnoticed(case.moment, sides.device),
            eager.copied(case.model, None, sides.device) as (model, _),
            _outputs(model) as seen,
            torch.no_grad(),
            eager.drawn(sides.captured),
        ):
            case.results(model, eager.on(sides.example, sides.device))
        known = [_print(x) for x in sides.values()]
    except Exception:  # only words are lost
        return ""
    strays = [(path, made) for path, made in seen if not any(_same(made, k, sides.allowed.tolerance) for k in known)]
    if not strays:
        return "every module's output is right, so it is the backward pass or the update"
    path = strays[0][0]
    return f"the first module whose output the program does not compute is {path or 'the model'} ({type(model.get_submodule(path)).__name__})"


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[tuple[str, Print]]]:
    """Fingerprints of what modules give, in the order they end."""
    seen: list[tuple[str, Print]] = []

    def note(path: str) -> Any:
        def hook(_m: Any, _a: Any, out: Any) -> None:
            seen.extend((path, _print(x)) for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim)

        return hook

    hooks = [m.register_forward_hook(note(path)) for path, m in model.named_modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _print(x: Tensor) -> Print:
    x = x.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return x.numel(), float(x.sum()), float(x.abs().sum()), float(x.square().sum())


def _same(a: Print, b: Print, tolerance: float) -> bool:
    slack = 10 * tolerance
    return a[0] == b[0] and all(abs(x - y) <= slack * max(abs(s), 1e-30) for x, y, s in zip(a[1:], b[1:], (a[2], a[2], a[3]), strict=True))
