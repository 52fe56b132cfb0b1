"""Ops that weft has no entry for, as nodes: torch's own function on each element, or one opaque node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.core.errors import CaptureError
from weft.core.node import DTYPE_NAMES, Node, user_line
from weft.frontend.capture.complexes import PARTS, parts_of
from weft.frontend.capture.handlers import to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.ops.fill import full
from weft.ops.opaque import each, opaque


def tensors_in(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]


@dataclass(frozen=True)
class _Pairs:
    """The node of a complex operand."""

    node: Node


def as_nodes(recorder: Recorder, given: Any) -> Any:
    return tree_map_only(Tensor, lambda t: _Pairs(recorder.node(t)) if t.dtype.is_complex else recorder.node(t), given)


def unknown(recorder: Recorder, func: Any, out: Any, args: Any, kwargs: Any) -> Any:
    """An op without an entry. Of each element alone, it is torch's function and derivative, sharded as its operands are; else one opaque node."""
    require_same_random_numbers(func)
    func = _TRAINED.get(func, func)
    if any(t.layout is not torch.strided for t in tensors_in(out)):
        raise CaptureError("weft has no sparse tensors", needed="dense tensors", found=f"{func} gives a sparse one", where=user_line())
    made = each_element(recorder, func, out, args, kwargs)
    if made is not None:
        return made
    nodes: list[Node] = []
    call, keys = template(recorder, args, nodes), tuple((k, template(recorder, v, nodes)) for k, v in kwargs.items())
    gives = tuple((DTYPE_NAMES[recorder.type((), dtype).dtype], shape) for shape, dtype in map(parts_of, tensors_in(out)))
    name = str(func)
    recorder.opaque.setdefault(name, []).append(user_line() or "")
    more = {"moves": tuple(i for i, n in enumerate(nodes) if recorder.moves(n))} if nodes else {"mesh": recorder.mesh.key}
    full = opaque(*nodes, target=name, call=call, keys=keys, gives=gives, **more)
    return full if len(gives) == 1 else list(full)


_TRAINED = {torch.ops.aten._embedding_bag_forward_only.default: torch.ops.aten._embedding_bag.default}  # what torch calls where gradients are on


_UNTAGGED = {torch.ops.aten.floor_divide.default, torch.ops.aten.hardswish.default, torch.ops.aten._prelu_kernel.default}  # of each element alone too


def each_element(recorder: Recorder, func: Any, out: Any, args: Any, kwargs: Any) -> Node | None:
    """One `each` node, where torch says that the op is elementwise and its operands are stretched as usual."""
    if not (torch.Tag.pointwise in func.tags or func in _UNTAGGED) or not isinstance(out, Tensor) or out.dtype.is_complex:
        return None
    if any(isinstance(x, (_Pairs, complex)) for x in tree_leaves((args, kwargs))):
        return None
    nodes: list[Node] = []
    call, keys = template(recorder, args, nodes), tuple((k, template(recorder, v, nodes)) for k, v in kwargs.items())
    if not nodes or tuple(torch.broadcast_shapes(*(n.shape for n in nodes))) != tuple(out.shape):
        return None
    kind = recorder.type((), out.dtype).dtype
    if kind.is_floating_point:  # so that stretching a 0-d operand changes no dtype
        nodes = [to_dtype(n, kind) if n.dtype.is_floating_point else n for n in nodes]
    return each(*nodes, target=str(func), call=call, keys=keys, gives=DTYPE_NAMES[kind])


def alone(recorder: Recorder, func: Any, *args: Any, dtype: torch.dtype) -> Node:
    """One `each` node of a torch op that is elementwise when it is called so."""
    nodes: list[Node] = []
    call = template(recorder, args, nodes)
    return each(*nodes, target=str(func), call=call, keys=(), gives=DTYPE_NAMES[dtype])


def template(recorder: Recorder, x: Any, nodes: list[Node]) -> Any:
    """An op's argument as plain data, its tensors put among the nodes; what weft cannot write down is refused."""
    if isinstance(x, _Pairs):
        nodes.append(x.node)
        return "pairs", len(nodes) - 1
    if isinstance(x, complex):
        return "complex", (x.real, x.imag)
    if isinstance(x, Node):
        number = x.op.is_number  # generated code would give it as a Python number
        nodes.append(full((), x.attr("value"), recorder.mesh, x.dtype) if number else x)
        return "tensor", len(nodes) - 1
    if isinstance(x, (list, tuple)):
        return tuple(template(recorder, y, nodes) for y in x)
    if isinstance(x, torch.dtype):
        return "dtype", str(x).removeprefix("torch.") if x in PARTS else DTYPE_NAMES[recorder.type((), x).dtype]
    if isinstance(x, float) and not math.isfinite(x):
        return "float", str(x)
    if isinstance(x, (torch.device, torch.memory_format)) or x is torch.strided:
        return None
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise CaptureError(
        f"weft cannot keep an op called with a {type(x).__name__}",
        needed="tensors, numbers, text and dtypes",
        found=repr(x)[:80],
        where=user_line(),
    )


def require_same_random_numbers(func: Any) -> None:
    """Torch's own random numbers would differ from rank to rank, and between a pass and its recomputation."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise CaptureError(
            f"weft has no random numbers like those of {func}",
            needed="uniform, normal, bernoulli, exponential or integers, which every rank can draw the same way",
            found=str(func),
            try_="draw it outside the step and pass it in the batch",
            where=user_line(),
        )
