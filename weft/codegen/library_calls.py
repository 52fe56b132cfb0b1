"""Which nodes torch has a fused kernel for on this rank, and how to call it. Everything else runs as its op is defined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch

from weft.codegen.text import settings
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.embed import before_comm, put_op
from weft.ops.experts import experts, experts_backward
from weft.ops.fill import arange_op, full_op
from weft.ops.host import to_host
from weft.ops.optimizers import adam
from weft.ops.pointwise import eq, where
from weft.ops.shape import reshape_op
from weft.ops.source import const

Test = Callable[[Node, str], bool]
FLASH = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}

HALF = (torch.bfloat16, torch.float16)
_SITES = itertools.count()  # of copies that are kept by the host, in all programs of this process
WIDE, ROOM = 128, 1 << 30  # numbers in a head, and bytes of scores that may be in memory for it


def _rows_replicated(q: Node, k: Node) -> bool:
    """All query rows and keys are here, so that causal means what the kernel takes it for."""
    layout = q.type.layout
    return not any(a.axes for a in layout.dims[3]) and k.ndim == 4 and q.shape[3] == k.shape[2] and q.shape[-1] == k.shape[-1]


def _matmuls_are_faster(q: Node, k: Node) -> bool:
    """torch's kernel for f32 leaves the tensor cores to others: with wide heads two matmuls and a softmax take half its time."""
    scores = 4 * math.prod((*q.type.layout.largest_local[:4], k.type.layout.largest_local[2]))
    rounded = torch.get_float32_matmul_precision() != "highest"
    return q.dtype == torch.float32 and rounded and q.shape[-1] >= WIDE and scores <= ROOM


def _plain_attention(first: int) -> Test:
    def test(n: Node, device: str) -> bool:
        q, k, v = n.args[first : first + 3]
        plain = not n.attr("offset") and v.shape[-1] == k.shape[-1] and q.dtype in FLASH.get(device, ())
        plain = plain and not (device == "cuda" and _matmuls_are_faster(q, k)) and k.ndim == 4 and not n.attr("p")
        plain = plain and n.attr("written_out") not in (device, "any")
        masks = n.args[3 if first == 0 else 6 :]
        ordered = n.attr("causal") or n.attr("window")
        return plain and all(m.dtype == q.dtype for m in masks) and (_rows_replicated(q, k) or not ordered)

    return test


def documents(n: Node, device: str) -> tuple[Node, Node] | None:
    """The numbers of rows and keys, [batch or 1, tokens] each, where the mask of an attention on a GPU is that they are equal."""
    first = n.op.attends
    if device != "cuda" or first is None or n.attr("window") or not _plain_attention(first)(n, device):
        return None
    q, k = n.args[first], n.args[first + 1]
    masks = n.args[3 if first == 0 else 6 :]
    if len(masks) != 1 or q.dtype not in HALF or q.shape[-1] not in (16, 32, 64, 128) or math.prod(masks[0].shape[1:3]) != 1:
        return None
    found = _equal(masks[0])
    if found is None:
        return None
    rows, keys = found if found[0].shape[-1] == 1 else found[::-1]
    row_major = rows.shape[-2:] == (q.shape[3], 1) and keys.shape[-2:] == (1, k.shape[2])
    each = all(math.prod(x.shape) in (x.shape[-1] * x.shape[-2], q.shape[0] * x.shape[-1] * x.shape[-2]) for x in found)
    return (rows, keys) if row_major and each else None


def _equal(mask: Node) -> tuple[Node, Node] | None:
    """a and b, where a mask is 0 if they are equal and minus infinity elsewhere."""
    while mask.op is reshape_op:
        mask = mask.args[0]
    if mask.op is not where or [float(a.attr("value")) for a in mask.args[1:] if a.op in (const, full_op)] != [0.0, -math.inf]:
        return None
    cond = mask.args[0]
    while cond.op is reshape_op:
        cond = cond.args[0]
    full = cond.op is eq and all(not a.dtype.is_floating_point and a.ndim == cond.ndim > 1 for a in cond.args)
    return (cond.args[0], cond.args[1]) if full else None


def _plain_adam(n: Node, device: str) -> bool:
    """f32 throughout, as torch's kernel keeps its own step count and rates."""
    return len(n.args) == 6 and n.attr("sign") == 1 and all(a.dtype == torch.float32 for a in n.args[:4])


def _one_dtype(n: Node, device: str) -> bool:
    return len({a.dtype for a in n.args}) == 1


def _unsmoothed(n: Node, device: str) -> bool:
    return n.attr("smoothing") == 0.0 and n.args[1].dtype.is_floating_point


def _grouped(first: int) -> Test:
    """Where torch multiplies groups of rows without asking the host for their sizes: bf16 on a GPU, rows of a multiple of 16 bytes."""

    def test(n: Node, device: str) -> bool:
        x, up = n.args[first], n.args[first + 3]
        even = all(size % 8 == 0 for size in up.type.layout.largest_local[1:])
        return device == "cuda" and even and all(a.dtype == torch.bfloat16 for a in (x, *n.args[first + 2 :]))

    return test


def _on_gpu(n: Node, device: str) -> bool:
    return device == "cuda"


def _always(n: Node, device: str) -> bool:
    return True


def all_rows(rows: Node) -> bool:
    """Whether the rows that a put fills are all there are, in order."""
    return _counted(rows) and not any(a.axes for a in rows.layout.dims[0])


def _counted(rows: Node) -> bool:
    return rows.op is arange_op and (rows.attr("start"), rows.attr("step")) == (0, 1)


def local_rows(rows: Node, at: Mapping[str, int]) -> range | None:
    """The rows that a put fills here, where they follow each other without a gap."""
    return rows.layout.run(0, at) if _counted(before_comm(rows)) else None


LIBRARY: Mapping[str, Test] = {
    "attention": _plain_attention(0),
    "attention_backward": _plain_attention(1),
    "adam": _plain_adam,
    "experts": _grouped(0),
    "experts_backward": _grouped(1),
    "put": _always,
    "to_host": _on_gpu,
    "from_host": _on_gpu,
    "landed": _on_gpu,
    "layer_norm": _one_dtype,
    "layer_norm_backward": _one_dtype,
    "cross_entropy_backward": _unsmoothed,
}


def library_call(
    n: Node, args: list[str], device: str, own: bool, at: Mapping[str, int], statistics: str | None = None, fetches: bool = False
) -> str | None:
    """The call at a place of the mesh, or None where the op's own function must do. `statistics` is where a norm leaves, or finds, its own;
    `fetches` says that what goes to the host comes back in the same program."""
    test = LIBRARY.get(n.op.name)
    if test is None or not test(n, device):
        return None
    if n.op is put_op and (run := local_rows(n.args[2], at)):
        full = len(run) == n.args[2].shape[0]
        return f"library.put_{'all' if full else 'run'}({args[0]}, {args[1]}, dim={n.attr('dim')}, rows={len(run) if full else run})"
    attrs: dict[str, object] = {k: v for k, v in n.attrs if k not in ("sign", "written_out", "sent", "imbalance")} | ({"own": own} if n.op is adam else {})
    if n.op is to_host and fetches:
        attrs["site"] = next(_SITES)
    if n.op in (experts, experts_backward):
        attrs["first"] = _first(n.args[3 if n.op is experts else 4], at)
    more = [f"statistics={statistics}"] if statistics and n.op.name == "layer_norm_backward" else []
    call = f"library.{n.op.name}({', '.join([*args, *settings(attrs.items()), *more])})"
    return f"{call}[0]" if n.op.name == "layer_norm" and statistics is None else call


def _first(experts: Node, at: Mapping[str, int]) -> int:
    """The number of the first expert held here; those held stand side by side."""
    experts_here = experts.layout.positions(0, at)
    return int(experts_here[0]) if len(experts_here) else 0


def keeps_statistics(p: Program) -> dict[Node, Node]:
    """Norms whose backward follows, by the same kernel: mean and deviation are kept between them."""
    norms = {(n.args[0], n.attr("eps")): n for n in p.nodes if n.op.name == "layer_norm" and _one_dtype(n, "")}
    found: dict[Node, Node] = {}
    for back in p.nodes:
        if back.op.name == "layer_norm_backward" and _one_dtype(back, ""):
            n = norms.get((back.args[1], back.attr("eps")))
            if n is not None and n not in found:
                found[n] = back
    return found
