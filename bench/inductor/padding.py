"""Products whose rows no 16-byte load can take: a compiler pads them where that is faster, as inductor does.

An operand is copied into a wider one, by the kernel that makes it where one does, else by a pass of its own; the result is a
view of a wider one. So padding also costs memory: what is copied cannot be written over what it was made of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from weft.cluster import kernels
from weft.cluster.profile import Device
from weft.cost.price import device_seconds
from weft.cost.work import Gemm

ALIGNED = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}  # elements of a 16-byte load
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
GAIN = 1.1  # inductor pads what becomes faster by this
TURN = 5.0  # a copy that also turns rows into columns, over one that does not
_aten = torch.ops.aten


def pad(gm: GraphModule, device: Device) -> None:
    """Pad every product of a graph that gains by it."""
    made: dict[tuple[str, tuple[int, ...]], Node] = {}
    for node in list(gm.graph.nodes):
        operands = _operands(node)
        if operands and _gains(device, *operands):
            _widen(gm, node, operands, made)
    gm.graph.lint()
    gm.recompile()


def _operands(node: Node) -> tuple[Node, Node] | None:
    if node.op != "call_function" or node.target not in (_aten.mm.default, _aten.bmm.default, _aten.addmm.default):
        return None
    a, b = node.args[-2:] if node.target is not _aten.addmm.default else node.args[1:3]
    return (a, b) if isinstance(a, Node) and isinstance(b, Node) and a.meta["val"].dtype in ALIGNED else None


def _sizes(a: Node, b: Node) -> tuple[int, int, int, int]:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape[-2], y.shape[-1], x.shape[-1], x.shape[0] if x.dim() == 3 else 1


def loose(a: torch.Tensor, b: torch.Tensor) -> str:
    """Of [m, k] x [k, n] the sizes that neither operand nor the result is contiguous along."""
    inner = {"k" if a.stride(-1) == 1 else "m", "n" if b.stride(-1) == 1 else "k", "n"}
    return "".join(letter for letter in "mnk" if letter not in inner)


def _more(size: int, unit: int) -> int:
    """Elements to add; a dim of one is none."""
    return -size % unit if size > 1 else 0


def _gains(device: Device, a: Node, b: Node) -> bool:
    m, n, k, batch = _sizes(a, b)
    unit = ALIGNED[a.meta["val"].dtype]
    dm, dn, dk = (_more(x, unit) for x in (m, n, k))
    if not dm + dn + dk:
        return False
    now = Gemm(m, n, k, batch, NAMES[a.meta["val"].dtype], loose=loose(a.meta["val"], b.meta["val"]))
    then = device_seconds(device, replace(now, m=m + dm, n=n + dn, k=k + dk))
    for operand, changed in ((a, dm + dk), (b, dk + dn)):
        if changed and not _free(operand):
            value = operand.meta["val"]
            turned = 1 if value.is_contiguous() else TURN
            then += kernels.memory_bound(device, 2.0 * turned * value.numel() * value.element_size(), 1)
    return device_seconds(device, now) > GAIN * then


def _free(operand: Node) -> bool:
    """Whether the kernel that makes an operand can write it wider: not if it is given, turned, or made by a product or attention."""
    if not operand.meta["val"].is_contiguous():
        return False
    while operand.op == "call_function" and _is_view(operand):
        operand = operand.all_input_nodes[0]
    return operand.op == "call_function" and not any(w in str(operand.target) for w in ("mm", "convolution", "scaled_dot_product"))


def _is_view(node: Node) -> bool:
    return any(w in str(node.target) for w in ("view", "permute", "transpose", "getitem", "unsqueeze", "squeeze", "aten.t."))


def _widen(gm: GraphModule, node: Node, operands: tuple[Node, Node], made: dict[tuple[str, tuple[int, ...]], Node]) -> None:
    a, b = operands
    m, n, k, _ = _sizes(a, b)
    unit = ALIGNED[a.meta["val"].dtype]
    dm, dn, dk = (_more(x, unit) for x in (m, n, k))
    with gm.graph.inserting_before(node):
        wide_a, wide_b = _padded(gm, a, dm, dk, made), _padded(gm, b, dk, dn, made)
        if node.target is _aten.addmm.default:
            bias = _padded_bias(gm, node.args[0], dm, dn, made)
            wide = _call(gm, node.target, (bias, wide_a, wide_b))
        else:
            wide = _call(gm, node.target, (wide_a, wide_b))
        if dm:
            wide = _call(gm, _aten.slice.Tensor, (wide, -2, 0, m))
        if dn:
            wide = _call(gm, _aten.slice.Tensor, (wide, -1, 0, n))
    node.replace_all_uses_with(wide)
    gm.graph.erase_node(node)


def _padded(gm: GraphModule, x: Node, rows: int, columns: int, made: dict[tuple[str, tuple[int, ...]], Node]) -> Node:
    """The operand with zeros below and to the right."""
    if not rows + columns:
        return x
    key = x.name, (rows, columns)
    if key not in made:
        copied = (x, [0, columns, 0, rows], 0.0)
        made[key] = _written_wider(gm, x, rows, columns) if _free(x) else _call(gm, _aten.constant_pad_nd.default, copied)
    return made[key]


def _written_wider(gm: GraphModule, x: Node, rows: int, columns: int) -> Node:
    """The kernel that makes the operand writes the wider one at once; whoever else reads it reads a part of that."""
    shape = x.meta["val"].shape
    with gm.graph.inserting_after(x):
        wide = gm.graph.call_function(_aten.constant_pad_nd.default, (x, [0, columns, 0, rows], 0.0))
        _value(wide)
    with gm.graph.inserting_after(wide):
        lower = gm.graph.call_function(_aten.slice.Tensor, (wide, -2, 0, shape[-2]))
        _value(lower)
    with gm.graph.inserting_after(lower):
        part = gm.graph.call_function(_aten.slice.Tensor, (lower, -1, 0, shape[-1]))
        _value(part)
    x.replace_all_uses_with(part, delete_user_cb=lambda user: user is not wide)
    return wide


def _padded_bias(gm: GraphModule, x: Any, rows: int, columns: int, made: dict[tuple[str, tuple[int, ...]], Node]) -> Any:
    shape = x.meta["val"].shape
    by = [0, columns if shape[-1] > 1 else 0] + ([0, rows if shape[0] > 1 else 0] if len(shape) > 1 else [])
    return _call(gm, _aten.constant_pad_nd.default, (x, by, 0.0)) if any(by) else x


def _call(gm: GraphModule, target: Any, args: tuple[Any, ...]) -> Node:
    return _value(gm.graph.call_function(target, args))


def _value(node: Node) -> Node:
    """Give a node the fake result of its call."""
    values = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
    first = next(v for v in values if isinstance(v, torch.Tensor))
    with first.fake_mode:
        node.meta["val"] = node.target(*values)  # type: ignore[operator]
    return node
