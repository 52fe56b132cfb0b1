"""Which nodes torch has a fused kernel for on this rank, and how to call it. Everything else runs as its op is defined."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from weft.core.node import Node

Test = Callable[[Node, str], bool]
FLASH = {"cpu": (torch.float32, torch.float64, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}


def _rows_whole(q: Node, k: Node) -> bool:
    """All query rows and keys are here, so that causal means what the kernel takes it for."""
    lay = q.type.layout
    return not any(a.cut for a in lay.dims[3]) and k.ndim == 4 and q.shape[3] == k.shape[2] and q.shape[-1] == k.shape[-1]


def _plain_attention(first: int) -> Test:
    def test(n: Node, device: str) -> bool:
        q, k, v = n.args[first : first + 3]
        plain = not n.attr("window") and not n.attr("offset") and v.shape[-1] == k.shape[-1] and q.dtype in FLASH.get(device, ())
        return plain and len(n.args) == (3 if first == 0 else 6) and (_rows_whole(q, k) or not n.attr("causal")) and k.ndim == 4

    return test


def _plain_adam(n: Node, device: str) -> bool:
    """f32 throughout, as torch's kernel keeps its own step count and rates."""
    return len(n.args) == 6 and n.attr("sign") == 1 and all(a.dtype == torch.float32 for a in n.args[:4])


QUICK: Mapping[str, Test] = {"attention": _plain_attention(0), "attention_backward": _plain_attention(1), "adam": _plain_adam}


def quick_call(n: Node, args: list[str], device: str, own: bool) -> str | None:
    """The call, or None where the op's own function must do."""
    test = QUICK.get(n.op.name)
    if test is None or not test(n, device):
        return None
    attrs = {k: v for k, v in n.attrs if k != "sign"} | ({"own": own} if n.op.name == "adam" else {})
    return f"quick.{n.op.name}({', '.join(args + [f'{k}={v!r}' for k, v in attrs.items()])})"
