"""Time passes over memory on a processor as they run within a step: their operands lie in no cache, since much ran in between."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

ALONE = 1.03  # over the time a thread worked: more is not the machine's own
COLD = 2**26  # bytes of operands gone round in turn: twice what the last cache of two cores holds
ROWS, COLUMNS = 512, 1024
SAMPLES, HEADS, KEYS, WIDTH = 8, 8, 64, 64  # of attention as it is defined


def among(calls: Sequence[Callable[[], Any]], budget: float = 0.06) -> float:
    """Seconds of one of several equal calls, each on operands of its own: the thread's own time, the second best round of five.
    Results are kept for a while, so that new ones do not go where the last one was."""
    endless, kept = itertools.cycle(calls), deque[Any](maxlen=len(calls))

    def mean(count: int) -> float:
        began = time.thread_time()
        kept.extend(call() for call in itertools.islice(endless, count))
        return (time.thread_time() - began) / count

    once = mean(len(calls))
    each = max(len(calls), min(2000, int(budget / 5 / max(once, 1e-7))))
    return sorted(mean(each) for _ in range(5))[1]


def each_cold(make: Callable[..., Callable[[], Any]], *shapes: tuple[int, ...]) -> list[Callable[[], Any]]:
    """`make` applied to tensors of these shapes so many times that together they fill no cache."""
    size = 4 * sum(torch.Size(s).numel() for s in shapes)
    return [make(*(torch.randn(s) for s in shapes)) for _ in range(max(1, COLD // size))]


def bandwidth(large: int, small: int) -> dict[str, float]:
    """Bytes a second of passes that write to other memory, over so many bytes at once and over a few, and of one over what it read:
    what is written elsewhere is fetched first, so it costs half as much again."""

    def out_of_place(size: int) -> float:
        half = (size // 8,)
        return size / among(each_cold(lambda x, y: lambda: torch.add(x, 1.0, out=y), half, half), 0.2)

    x = torch.zeros(large // 8)
    return {"rate.memory": out_of_place(large), "rate.cache": out_of_place(small), "rate.in_place": large / among([lambda: x.add_(1.0)], 0.2)}


def by_op() -> dict[str, float]:
    """Elements a second of ops that take longer than their bytes, by the names they have in programs."""
    shape = (ROWS, COLUMNS)
    scale, aten = torch.ones(COLUMNS), torch.ops.aten
    _, mean, spread = torch.native_layer_norm(torch.randn(shape), [COLUMNS], scale, scale, 1e-5)
    one: dict[str, Callable[[torch.Tensor], Any]] = {
        "gelu": F.gelu, "gelu.tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "tanh": torch.tanh, "exp": torch.exp,
        "sigmoid": torch.sigmoid, "softmax": lambda x: torch.softmax(x, -1), "cross_entropy": lambda x: torch.log_softmax(x, -1),
        "sum": lambda x: x.sum(0), "layer_norm": lambda x: torch.native_layer_norm(x, [COLUMNS], scale, scale, 1e-5),
    }  # fmt: skip
    two: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "gelu_backward": aten.gelu_backward, "gelu_backward.tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        "cross_entropy_backward": lambda g, x: torch.softmax(x, -1).sub_(g),
        "layer_norm_backward": lambda g, x: aten.native_layer_norm_backward(g, x, [COLUMNS], mean, spread, scale, scale, [True] * 3),
    }  # fmt: skip
    pairs = each_cold(lambda g, x: lambda: (g, x), shape, shape)
    tensors = [pair() for pair in pairs]
    found = {name: [lambda op=op, x=x: op(x) for g, x in tensors] for name, op in one.items()}
    found |= {name: [lambda op=op, g=g, x=x: op(g, x) for g, x in tensors] for name, op in two.items()}
    return {f"rate.{name}": ROWS * COLUMNS / among(calls, 0.03) for name, calls in found.items()}


def scores() -> dict[str, float]:
    """Seconds of causal attention as it is defined, its scores in memory, and of its backward: what sharded rows run by."""
    from weft.ops.registry import OPS

    attrs = {"scale": WIDTH**-0.5, "causal": True}
    q = torch.randn(SAMPLES, HEADS, 1, KEYS, WIDTH)
    k, v = torch.randn(2, SAMPLES, HEADS, KEYS, WIDTH)
    out, lse = OPS["attention"].run(q, k, v, **attrs)
    forward = among([lambda: OPS["attention"].run(q, k, v, **attrs)], 0.2)
    backward = among([lambda: OPS["attention_backward"].run(torch.ones_like(out), q, k, v, out, lse, **attrs)], 0.2)
    return {"scores.attention": forward, "scores.attention_backward": backward}
