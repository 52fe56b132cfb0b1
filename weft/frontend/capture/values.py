"""What a traced tensor stands for: a place in a cell, and the node the cell holds now.

Torch lets two tensors share storage and writes into it in place; a program has values only. A cell is one storage; a
view is a list of steps (reshape, permute, narrow, expand) from its cell. Reading replays the steps on the cell's node
when it has changed; writing puts the new value back through the steps, innermost last.
"""

from __future__ import annotations

from typing import Any

from weft.core.errors import CaptureError
from weft.core.node import Node, user_line
from weft.ops.shape import concat, expand, narrow, permute, reshape

Step = tuple[str, Any]  # ("reshape", shape), ("permute", order), ("narrow", (dim, start, stop, step)), ("expand", shape)
TAG = "_weft_ref"


class Cell:
    """One storage: its value now, and how often it was written."""

    __slots__ = ("node", "still", "version")

    def __init__(self, node: Node) -> None:
        self.node, self.version = node, 0
        self.still = False  # no gradient is asked of what is here


class Ref:
    """A tensor's place: the steps from a cell. `steps` None is a view weft has no steps for: readable, not writable."""

    __slots__ = ("_node", "cell", "steps", "stopped", "version")

    def __init__(self, cell: Cell, steps: tuple[Step, ...] | None = (), node: Node | None = None) -> None:
        self.cell, self.steps, self.version = cell, steps, cell.version
        self._node = cell.node if node is None else node
        self.stopped = False  # made where gradients were off

    def read(self) -> Node:
        if self.version != self.cell.version:
            if self.steps is None:
                raise _lost("read")
            self._node = self.cell.node
            for step in self.steps:
                self._node = view(self._node, step)
            self.version = self.cell.version
        return self._node

    def stand_for(self, node: Node) -> None:
        """Read as this node, which has the same value, until its storage is written to."""
        self._node, self.version, self.stopped = node, self.cell.version, False

    def write(self, node: Node) -> None:
        """Put a new value at this place."""
        if self.steps is None:
            raise _lost("write")
        below = [self.cell.node]
        for step in self.steps[:-1]:
            below.append(view(below[-1], step))
        for step, base in zip(reversed(self.steps), reversed(below), strict=True) if self.steps else ():
            node = put(base, step, node)
        self.cell.node = node
        self.cell.version += 1

    def then(self, steps: tuple[Step, ...], node: Node) -> Ref:
        """The place a view of this tensor has."""
        ref = Ref(self.cell, None if self.steps is None else (*self.steps, *steps), node)
        ref.stopped = self.stopped
        return ref


def _lost(what: str) -> CaptureError:
    return CaptureError(
        f"cannot {what} through this view after its storage was changed in place",
        needed="a view made of slices, reshapes and permutations",
        found="another kind of view",
        try_="clone() the view, or write out of place",
        where=user_line(),
    )


def view(node: Node, step: Step) -> Node:
    kind, arg = step
    if kind == "reshape":
        return reshape(node, arg)
    if kind == "permute":
        return permute(node, arg)
    if kind == "narrow":
        return narrow(node, *arg)
    return expand(node, arg)


def put(base: Node, step: Step, new: Node) -> Node:
    """The base with `new` written where the step looks."""
    kind, arg = step
    if kind == "reshape":
        return reshape(new, base.shape)
    if kind == "permute":
        return permute(new, sorted(range(len(arg)), key=arg.__getitem__))
    if kind == "narrow":
        dim, start, _, stride = arg
        return _put_slice(base, new, dim, start, stride) if new.shape[dim] else base
    raise CaptureError(
        "cannot write in place into a repeated view",
        needed="a slice",
        found=f"{kind} {arg}",
        try_="write out of place, with torch.where or torch.cat",
        where=user_line(),
    )


def _put_slice(base: Node, new: Node, dim: int, start: int, stride: int) -> Node:
    """The base with every so many-th of its slices from `start` on replaced: all but the last begin a run of the stride's length."""
    runs, last = new.shape[dim] - 1, start + (new.shape[dim] - 1) * stride
    parts = [narrow(base, dim, 0, start)]
    if runs and stride > 1:
        before, after = base.shape[:dim], base.shape[dim + 1 :]
        kept = narrow(reshape(narrow(base, dim, start, last), (*before, runs, stride, *after)), dim + 1, 1, stride)
        firsts = reshape(narrow(new, dim, 0, runs), (*before, runs, 1, *after))
        parts.append(reshape(concat([firsts, kept], dim + 1), (*before, runs * stride, *after)))
        new = narrow(new, dim, runs, runs + 1)
    parts = [p for p in (*parts, new, narrow(base, dim, last + 1, base.shape[dim])) if p.shape[dim]]
    return concat(parts, dim) if len(parts) > 1 else parts[0]
