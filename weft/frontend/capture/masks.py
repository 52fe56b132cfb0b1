"""What a mask of attention is shown to be: nothing, causal, a window, or a smaller mask next to these.

A mask is a value of the program. A bool one is taken apart into the parts that must all hold; a part that depends on no input
is computed here and compared, element for element. What is not shown stays a mask. `i` are query rows, `j` keys.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.node import Node
from weft.frontend.capture.constants import counting, fixed, through, unheard, value
from weft.frontend.capture.recorder import Recorder
from weft.ops import pointwise as w
from weft.ops.fill import full_op
from weft.ops.pointwise import add, cast, ge, gt, le, logical_and, lt, mul, where
from weft.ops.shape import expand_op, reshape, reshape_op
from weft.ops.source import const

EVERYWHERE = (-math.inf, math.inf)
FAR = -1e4


@dataclass(frozen=True)
class Seen:
    """Which keys a row sees: j <= i if causal, j > i - window if there is one, and those of the mask."""

    causal: bool = False
    window: int = 0
    mask: Node | None = None


def recognised(r: Recorder, mask: Node | None, rows: int, keys: int, causal: bool) -> Seen:
    """A mask [batch, heads, rows, keys], any of them 1, as the least that says the same."""
    if mask is None:
        return Seen(causal)
    full = through(r, mask)
    full = _as_bool(r, full) or full
    bands = {p: _band(r, p, rows, keys) for p in _parts(full)} if full.dtype == torch.bool else {}
    shown = [b for b in bands.values() if b is not None]
    least = _joined(_parts(full)) if full.dtype == torch.bool else mask
    if not shown and math.prod(least.shape) >= math.prod(mask.shape):
        return Seen(causal, mask=mask)
    through(r, mask, look=True)
    if not shown:
        return Seen(causal, mask=least)
    low, high = functools.reduce(_both, shown, (0 if causal else -math.inf, math.inf))
    if low == 0 or (low, high) == EVERYWHERE:
        left = [p for p, b in bands.items() if b is None]
        return Seen(low == 0, 0 if high == math.inf else int(high) + 1, _joined(left))
    return Seen(causal, mask=_joined([p for p, b in bands.items() if b != EVERYWHERE]))


def _joined(parts: list[Node]) -> Node | None:
    return functools.reduce(w.logical_and, parts) if parts else None


def _both(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return max(a[0], b[0]), min(a[1], b[1])


# -- the parts -----------------------------------------------------------------------------------------------------------


def _parts(mask: Node) -> list[Node]:
    """The bool tensors that must all be true, each of four dims and as small as it is before it is stretched."""
    if mask.op is expand_op and mask.dtype == torch.bool:
        return _parts(_four(mask.args[0]))
    if mask.op is logical_and:
        return list(dict.fromkeys(p for a in mask.args for p in _parts(_four(a))))
    inner = mask.args[0] if mask.op is reshape_op else None
    for four in (_four, _with_heads):
        if inner is not None and inner.op in (expand_op, logical_and) and four(inner) is mask:
            return list(dict.fromkeys(p for a in inner.args for p in _parts(four(a))))
    return [mask]


def _with_heads(x: Node) -> Node:
    """[batch, rows, keys], or the last of these, with a dim for heads."""
    three = (1,) * (3 - x.ndim) + x.shape
    return reshape(x, (three[0], 1, *three[1:])) if x.ndim <= 3 else x


def _four(x: Node) -> Node:
    return reshape(x, ((1,) * (4 - x.ndim) + x.shape)) if x.ndim < 4 else x


def _as_bool(r: Recorder, mask: Node) -> Node | None:
    """The bool mask that an additive one stands for: 0 where it is true, minus infinity elsewhere.

    The least finite number does as well where every row sees a key, for all that is added to it is lost.
    """
    if mask.dtype == torch.bool:
        return None
    cond = _choice(r, mask)
    if cond is not None:
        return cond
    found = value(r, mask)
    if found is None:
        return None
    with unheard():
        far, seen = found <= torch.finfo(found.dtype).min, found == 0
        every = bool(seen.any(-1).all()) or not bool((found[far] > -math.inf).any())
        if not bool((far | seen).all()) or not every:
            return None
    return w.eq(mask, r.number(0.0, mask.dtype))


def _choice(r: Recorder, mask: Node) -> Node | None:
    """c, where the mask is where(c, 0, -inf)."""
    while mask.op is expand_op and mask.ndim == mask.args[0].ndim:
        mask = mask.args[0]
    if mask.op is not where:
        return None
    cond, yes, no = mask.args
    zero, far = _number(r, yes), _number(r, no)
    return _four(cond) if zero == 0 and far == -math.inf and cond.shape == mask.shape else None


def far(r: Recorder, mask: Node) -> bool:
    """Whether a finite number far below any score is put where an input says so, in place of minus infinity."""
    if mask.op in (expand_op, reshape_op, cast):
        return far(r, mask.args[0])
    if mask.op in (add, mul):
        return any(far(r, a) for a in mask.args)
    if mask.op is not where or fixed(r, mask.args[0]):
        return False
    return any(x is not None and -math.inf < x <= FAR for x in (_number(r, a) for a in mask.args[1:])) or any(far(r, a) for a in mask.args[1:])


def _number(r: Recorder, node: Node) -> float | None:
    """The one number that a fixed tensor holds everywhere."""
    while node.op in (expand_op, reshape_op, cast):
        node = node.args[0]
    if node.op in (const, full_op):
        return float(node.attr("value"))
    return None


# -- bands: all i - j between two bounds -------------------------------------------------------------------------------------


def _band(r: Recorder, part: Node, rows: int, keys: int) -> tuple[float, float] | None:
    """The least and the greatest i - j that the part lets through, where it lets through just these; None where not shown."""
    if not fixed(r, part):
        return None
    low, high = _compared(r, part) or _measured(r, part, rows, keys) or (None, None)
    if low is None or high is None:
        return None
    return -math.inf if low <= 1 - keys else low, math.inf if high >= rows - 1 else high


def _measured(r: Recorder, part: Node, rows: int, keys: int) -> tuple[float, float] | None:
    found = value(r, part)
    if found is None or found.ndim < 2:
        return None
    with unheard():
        if bool(found.all()):
            return EVERYWHERE
        seen = found.reshape(-1, *found.shape[-2:])
        return _band_of(seen[0].expand(rows, keys)) if bool((seen == seen[0]).all()) else None


def _band_of(seen: Tensor) -> tuple[float, float] | None:
    rows, keys = seen.shape
    distance = torch.arange(rows)[:, None] - torch.arange(keys)
    if not bool(seen.any()):
        return None
    low, high = int(distance[seen].min()), int(distance[seen].max())
    return (low, high) if torch.equal(seen, (distance >= low) & (distance <= high)) else None


def _compared(r: Recorder, part: Node) -> tuple[float, float] | None:
    """The same of i + a <= j + b and its like, whose table may be too large to be written out."""
    if part.op not in _SENSE:
        return None
    sides = [_counted(r, _four(a)) for a in part.args]
    if None in sides or {s[0] for s in sides if s} != {"i", "j"}:
        return None
    (first, a), (_, b) = sides  # type: ignore[misc]
    sense, strict = _SENSE[part.op]
    least = (b - a) if first == "i" else (a - b)  # i - j against this number
    if (sense == ">") == (first == "i"):
        return least + strict, math.inf
    return -math.inf, least - strict


_SENSE = {lt: ("<", 1), le: ("<", 0), gt: (">", 1), ge: (">", 0)}


def _counted(r: Recorder, side: Node) -> tuple[str, int] | None:
    """("i", a) where the tensor is i + a over rows, ("j", b) where it is j + b over keys."""
    shape = side.shape
    if math.prod(shape) != max(shape) or max(shape) == 1 or side.dtype.is_floating_point or shape.index(max(shape)) < 2:
        return None
    first = counting(r, side)
    return None if first is None else ("ij"[shape.index(max(shape)) - 2], first)
