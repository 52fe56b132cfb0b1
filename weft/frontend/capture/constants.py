"""What is known of a value while it is traced: one that depends on no input has a value now, exactly.

A mask made of aranges, a flag, a table: torch computes the same at every step. A uniform draw is known only to lie in [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.evaluate import values_of
from weft.core.node import Node, derived, toposort, user_line
from weft.frontend.capture.batch_numbers import BatchNumber, SharedLayer
from weft.frontend.capture.recorder import Recorder, substituted
from weft.ops.pointwise import cast, ge, gt, le, lt
from weft.ops.random import uniform
from weft.ops.shape import expand_op, reshape_op

ROOM = 1 << 24  # elements of a tensor that is computed while tracing


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, torch computes on real tensors and is not listened to."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def fixed(r: Recorder, node: Node) -> bool:
    """Whether it depends on no input and no draw, so that it is the same at every step."""
    known = r.fixed
    return derived(node, known, lambda n: not n.op.is_input and "site" not in dict(n.attrs) and all(known[a] for a in n.args))


def drawn(node: Node) -> bool:
    """Whether a random draw is in it, and little else: no input but the seed."""
    nodes = toposort([node])
    return any("site" in dict(n.attrs) for n in nodes) and all(n.attr("name") == "seed" for n in nodes if n.op.is_input)


def through(r: Recorder, node: Node, look: bool = False) -> Node:
    """The node as it is outside of the blocks that are being traced: what no gradient flows through stands for one value.

    With `look` the trace has looked at what stands there, so that it serves only blocks where the same stands.
    """
    behind = [n for n in toposort([node]) if n in r.stands and not r.differentiable[n]]
    if not behind:
        return node
    if look:
        r.looked.update(behind)
    return substituted([node], {n: through(r, r.stands[n], look) for n in behind})[0]


def value(r: Recorder, node: Node) -> Tensor | None:
    """The value of a node that is fixed, unless it would take too much room; None where it is not known."""
    if not fixed(r, node):
        return None
    found = r.values
    if node not in found:
        needed = [n for n in toposort([node]) if n not in found]
        small = all(math.prod(t.shape) <= ROOM for n in needed for t in n.types)
        with unheard():
            values_of([node] if small else (), found)
    return found.get(node)


def counting(r: Recorder, node: Node) -> int | None:
    """The first of integers that are known to go up by one."""
    found = None if node.dtype.is_floating_point else value(r, through(r, node))
    if found is None or not found.numel():
        return None
    with unheard():
        first = int(found.reshape(-1)[0])
        counts = torch.equal(found.reshape(-1), torch.arange(first, first + found.numel(), dtype=found.dtype))
    if not counts:
        return None
    through(r, node, look=True)
    return first


def number(r: Recorder, node: Node) -> bool | int | float | None:
    """The Python number a tensor of one element is, where that is known."""
    found = value(r, node)
    if found is not None:
        with unheard():
            return found.item()
    return _draw_against_bound(r, node)


def number_from_batch(r: Recorder, node: Node, state: bool = False) -> bool | int | float | None:
    """The Python number that the example's batch makes of a tensor of one element, where the batch alone decides it and is looked at at each call;
    with `state` the module's parameters and buffers too, which each rank then needs in full."""
    inputs = [n for n in toposort([node]) if n.op.is_input]
    values = {n: r.values[n] for n in inputs if n in r.values}
    anew = r.reads.read_anew if r.reads is not None else {}
    values |= {n: r.constants[n.attr("name")] for n in inputs if n.attr("name") in r.constants and n.attr("name") not in anew}
    drawn_or_large = any("site" in dict(n.attrs) or any(math.prod(t.shape) > ROOM for t in n.types) for n in toposort([node]))
    if r.reads is None or drawn_or_large:
        return None
    more, answers = [n.attr("name") for n in inputs if n not in values and n.attr("name") not in r.batch], r.reads.answers
    if more and (not state or answers is None or r.joint):
        return None
    if r.reads.shared and any(name.startswith("placeholder.") for name in more):
        raise SharedLayer
    if answers is not None and any(not name.startswith(("param.", "buffer.")) or answers.value(name) is None for name in more):
        return None
    question = BatchNumber(node, values, user_line() or "the batch")
    question.value = question.of(r.batch, answers)
    r.reads.asked.append(question)
    return question.value


def _draw_against_bound(r: Recorder, node: Node) -> bool | None:
    """u < p and the like for a uniform u: certain where p is not inside (0, 1)."""
    if node.op not in _FLIPPED:
        return None
    (left, right), op = (_bare(a) for a in node.args), node.op
    if right.op is uniform:
        left, right, op = right, left, _FLIPPED[op]
    bound = value(r, right)
    if left.op is not uniform or bound is None or bound.numel() != 1:
        return None
    with unheard():
        p = float(bound)
    never, always = (p <= 0, p > 1) if op in (lt, ge) else (p < 0, p >= 1)  # rounded, a draw may be 1
    less = False if never else True if always else None
    return less if less is None or op in (lt, le) else not less


_FLIPPED = {lt: gt, gt: lt, le: ge, ge: le}


def _bare(node: Node) -> Node:
    while node.op in (reshape_op, expand_op, cast) and (not node.op.is_cast or node.args[0].dtype.is_floating_point):
        node = node.args[0]
    return node
