"""Updates of tables by the rows a batch looked up, in place: the gradient of a table is never a tensor of its size.

    on a CPU          rows of one index are summed; the table is then updated in blocks of rows, whose gradient stays in the cache
    on accelerators   every row looked up claims the slot of its row of the table, and rows of one slot are summed; one kernel then updates
                      all rows, each asking its slot. No shape depends on the indices, so that a step can be recorded.

Where a zero gradient changes nothing (`still`), only rows looked up are read and written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from weft.runtime import inductor, library_kernels

BLOCK = 1 << 20  # bytes of gradient that are made at a time
Run = Callable[..., Any]  # (p, g, *state, lr, step) to the new p and state
_compiled: WeakKeyDictionary[Run, dict[object, Run]] = WeakKeyDictionary()


def update_(
    run: Run, kept: Sequence[Tensor], x: Tensor, index: Tensor, rows: Tensor | None, lr: Tensor, step: Tensor, *,
    still: bool, adam: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Overwrites a table and its state. `rows` are the ascending rows of the table that are here, None where all are; `adam` has the settings
    where torch's own kernel does the update."""
    if not kept[0].numel():
        return
    x, at = x.reshape(index.numel(), *kept[0].shape[1:]), index.reshape(-1)
    if kept[0].device.type != "cpu":
        _on_device(run, kept, x, at, rows, lr, step, still)
        return
    x, at = _local_lookups(x, at, rows)
    found, which = torch.unique(at, return_inverse=True)
    sums = x.new_zeros(len(found), *x.shape[1:]).index_add_(0, which, x)
    if still:
        new = _tuple(run(*_with([t[found] for t in kept], sums), lr, step))
        for t, some in zip(kept, new, strict=True):
            t.index_copy_(0, found, some)
        return
    for some, g in _blocks(kept, sums, found):
        if adam is not None:
            library_kernels.adam_(*([t] for t in _with(some, g)), lr, step, **adam)
        else:
            _overwrite(some, _tuple(run(*_with(some, g), lr, step)))


# -- on a CPU ----------------------------------------------------------------------------------------------------------------------------


def _local_lookups(x: Tensor, at: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """What was looked up of the rows that are here, and where among them it stands."""
    if rows is None:
        return x, at
    place = torch.searchsorted(rows, at.contiguous()).clamp(max=rows.numel() - 1)
    hit = (rows[place] == at).nonzero().reshape(-1)
    return x[hit], place[hit]


def _blocks(kept: Sequence[Tensor], sums: Tensor, found: Tensor) -> Any:
    """Table and state in blocks of rows, each with its gradient, which is one and the same memory."""
    total, width = kept[0].shape[0], kept[0][:1].numel() * kept[0].element_size()
    size = max(1, BLOCK // max(1, width))
    starts = range(0, total, size)
    ends = torch.searchsorted(found, torch.tensor([*starts, total])).tolist()
    gradient = sums.new_zeros(min(size, total), *sums.shape[1:])
    for start, first, last in zip(starts, ends, ends[1:], strict=False):
        some = [t[start : start + size] for t in kept]
        g, here = gradient[: some[0].shape[0]], found[first:last].long() - start
        g.index_copy_(0, here, sums[first:last])
        yield some, g
        g.index_fill_(0, here, 0)


# -- on an accelerator ---------------------------------------------------------------------------------------------------------------------


def _on_device(
    run: Run, kept: Sequence[Tensor], x: Tensor, at: Tensor, rows: Tensor | None, lr: Tensor, step: Tensor, still: bool
) -> None:  # fmt: skip
    given = [x, at, lr.to(x.device), step.to(x.device), *([] if rows is None else [rows]), *kept]
    known, key = _compiled.setdefault(run, {}), tuple((tuple(t.shape), t.stride(), t.dtype) for t in given)
    if key not in known:
        known[key] = _compile(run, given, rows is not None, still)
    known[key](*given)


def _compile(run: Run, given: Sequence[Tensor], sharded: bool, still: bool) -> Run:
    """By Inductor, which fuses the asking with the update and overwrites in place; op by op where it refuses."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def flat(x: Tensor, at: Tensor, lr: Tensor, step: Tensor, *rest: Tensor) -> tuple[Tensor]:
        if still and not sharded:
            _update_looked_up_rows(run, rest, x, at, lr, step)
        else:
            _update_all_rows(run, rest[1:] if sharded else rest, x, at, rest[0] if sharded else None, lr, step)
        return (step + 1,)  # a graph gives something

    if os.environ.get("WEFT_INDUCTOR", "1") == "0":
        return flat
    try:
        return inductor.compiled(make_fx(flat, tracing_mode="fake")(*given), given)
    except Exception as error:
        warnings.warn(f"tables are updated op by op: Inductor refused it ({type(error).__name__}: {error})", stacklevel=2)
        return flat


def _update_all_rows(run: Run, kept: Sequence[Tensor], x: Tensor, at: Tensor, rows: Tensor | None, lr: Tensor, step: Tensor) -> None:
    """All rows, each with the sum in its slot. A row that is not held has a slot beyond the last, which nobody asks."""
    total = kept[0].shape[0]
    if rows is not None:
        place = torch.searchsorted(rows, at).clamp(max=total - 1)
        at = torch.where(rows[place] == at, place, total)
    slots, sums = _sums(x, at, total + 1)
    slots = slots[:total]
    hit = (slots >= 0).reshape(total, *(1,) * (x.ndim - 1))
    g = torch.where(hit, sums[slots.clamp(min=0)], torch.zeros((), dtype=sums.dtype, device=x.device))
    _overwrite(kept, _tuple(run(*_with(kept, g), lr, step)))


def _update_looked_up_rows(run: Run, kept: Sequence[Tensor], x: Tensor, at: Tensor, lr: Tensor, step: Tensor) -> None:
    """The rows looked up; one that was so twice is written twice, with the same sum."""
    slots, sums = _sums(x, at, kept[0].shape[0])
    new = _tuple(run(*_with([t[at] for t in kept], sums[slots[at]]), lr, step))
    for t, some in zip(kept, new, strict=True):
        t.index_put_((at,), some)


def _sums(x: Tensor, at: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """By row the slot it has, one of those that claimed it, and by slot the sum, at least in f32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    own = torch.arange(at.shape[0], dtype=torch.int32, device=x.device)
    slots = torch.full((total,), -1, dtype=torch.int32, device=x.device).index_put_((at,), own)
    sums = x.new_zeros(max(1, at.shape[0]), *x.shape[1:])  # one that may be asked, where nothing was looked up
    return slots, sums.index_put_((slots[at],), x, accumulate=True)


def _with(kept: Sequence[Tensor], g: Tensor) -> tuple[Tensor, ...]:
    return kept[0], g, *kept[1:]


def _overwrite(kept: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for t, value in zip(kept, new, strict=True):
        t.copy_(value)


def _tuple(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
