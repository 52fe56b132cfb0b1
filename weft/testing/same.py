"""Whether two programs mean the same: the same global tensors, in the same layouts, rank by rank.

Only state may change its layout, input and output together; outputs may be dropped, never added.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft import interp
from weft.core.errors import WeftError
from weft.core.program import Program
from weft.core.spec import validate
from weft.core.text import parse
from weft.rewrite.engine import erase_nodes, same_erased
from weft.testing.values import draw_inputs

CHANGES_VALUES = ("bucket",)  # a step that flattens and shards, so only its values are the same, not its nodes


class MeaningChanged(AssertionError):
    """Two programs that should mean the same and do not."""


def assert_same_meaning(
    before: Program, after: Program, inputs: Mapping[str, torch.Tensor] | None = None, *, seed: int = 0, tolerance: float = 1e-9
) -> None:
    """`after`, run rank by rank, gives what `before` means globally; its types, text and handles are in order."""
    given = inputs if inputs is not None else draw_inputs(before, seed)
    check_statically(before, after)
    check_values(interp.run_global(before, given), after, given, tolerance)


def check_statically(before: Program, after: Program) -> None:
    """Everything that can be seen without running."""
    try:
        validate(after)
    except WeftError as e:
        raise MeaningChanged(f"not a valid program: {e}\n{after}") from e
    _check_types(before, after)
    _check_text(after)
    if not any(step.startswith(CHANGES_VALUES) for step in after.history):
        _check_erased(before, after)


def _check_types(before: Program, after: Program) -> None:
    stateful = {o for o, _ in before.state}
    for name, node in after.outputs:
        if name not in before.output_names:
            raise MeaningChanged(f"output {name} is new")
        was = before.output_names[name]
        if (was.shape, was.dtype) != (node.shape, node.dtype) or (name not in stateful and was.type != node.type):
            raise MeaningChanged(f"output {name} was {was.type} and is {node.type}")


def _check_text(program: Program) -> None:
    text = program.text
    try:
        again = parse(text).text
    except WeftError as e:
        raise MeaningChanged(f"does not parse back: {e}\n{text}") from e
    if again != text:
        raise MeaningChanged(f"parses back to another program:\n{text}\n--- parsed ---\n{again}")


def _check_erased(before: Program, after: Program) -> None:
    """Without communication both are the same nodes, and so is the node every handle leads to."""
    if not same_erased(before, after):
        raise MeaningChanged(f"computes something else once communication is erased:\n{before}\n--- after ---\n{after}")
    here, there = erase_nodes(before), erase_nodes(after)
    for node, alone in here.items():
        now = after._follow(node)
        if now is not None and there[now] is not alone:
            raise MeaningChanged(f"the handle of {node!r} leads to {now!r}, which is another value")


def check_values(expected: Mapping[str, torch.Tensor], after: Program, inputs: Mapping[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    try:
        got = interp.run(after, inputs, tolerance=tolerance)
    except WeftError as e:
        raise MeaningChanged(f"does not run: {e}\n{after}") from e
    for name, value in got.items():
        if not close(value, expected[name], tolerance):
            raise MeaningChanged(f"output {name} differs\nneeded {expected[name]}\nfound  {value}")


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Equal within the tolerance, relative to the largest entry."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point or not a.numel():
        return bool(torch.equal(a, b))
    finite = b[torch.isfinite(b)]
    scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
