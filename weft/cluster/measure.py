"""Time kernels of this machine: matmuls, attention, memory, launches. Each result is a sample the fit can predict."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.cluster import passes

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MatmulTime:
    """A matmul and the seconds it took."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


def seconds(fn: Callable[[], Any], device: str, budget: float = 0.06) -> float:
    """Time of one call: the best of five batches long enough for the clock to see, since all that disturbs only adds. On a processor
    the second best, since its clocks and caches are never at their best for a full step."""
    fn()
    synchronize(device)
    once = _batch(fn, device, 1)
    calls = max(1, min(2000, int(budget / 5 / max(once, 1e-7))))
    return sorted(_batch(fn, device, calls) for _ in range(5))[1 if device == "cpu" else 0]


def _batch(fn: Callable[[], Any], device: str, calls: int) -> float:
    """Mean of some calls. On a processor the thread's own time counts, which others on the machine cannot stretch."""
    clock = time.thread_time if device == "cpu" else time.perf_counter
    synchronize(device)
    began = clock()
    for _ in range(calls):
        fn()
    synchronize(device)
    return (clock() - began) / calls


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def matmul_shapes(device: str) -> list[tuple[int, int, int, int, str]]:
    """Shapes to time: every ramp of the surface, in the dtypes that count here."""
    if device == "cpu":
        sizes = [(m, n, k, 1, "fp32") for m in (32, 128, 512) for n in (64, 256, 1024) for k in (64, 256, 1024)]
        return sizes + [(128, 128, 64, 8, "fp32"), (256, 256, 64, 4, "fp32"), (2048, 512, 512, 1, "fp32"), (1024, 1024, 1024, 1, "fp32")]
    wide = [(m, n, k, 1, "bf16") for m in (512, 2048, 8192) for n in (512, 2048, 8192) for k in (256, 1024, 4096)]
    batched = [(2048, 2048, 128, 32, "bf16"), (1024, 1024, 64, 64, "bf16"), (512, 64, 512, 128, "bf16")]
    full = [(m, 4096, 4096, 1, d) for m in (1024, 8192) for d in ("tf32", "fp32")]
    return wide + batched + full + [(16384, 16384, 4096, 1, "bf16"), (32768, 4096, 4096, 1, "bf16")]


def time_matmul(device: str, m: int, n: int, k: int, batch: int, dtype: str) -> MatmulTime:
    """Random numbers, since a device draws less power, and runs faster, on zeros. On an accelerator the host is left out of it."""
    kind = DTYPES[dtype]
    a = torch.randn(batch, m, k, device=device, dtype=kind)
    b = torch.randn(batch, k, n, device=device, dtype=kind)
    a, b = (a[0], b[0]) if batch == 1 else (a, b)
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        took = seconds(lambda: torch.matmul(a, b), device) if device == "cpu" else _in_a_row(lambda: torch.matmul(a, b), 10)
        return MatmulTime(m, n, k, batch, dtype, took)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept


def sustained(device: str, span: float = 2.0) -> float:
    """Rate of a large matmul after it has run for a while, over its rate at first: what the power limit takes."""
    size = 8192 if device != "cpu" else 768
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device != "cpu" else torch.float32)
    time.sleep(0.3)
    first = _batch(lambda: a @ a, device, 4)
    began = time.perf_counter()
    last = first
    while time.perf_counter() - began < span:
        last = _batch(lambda: a @ a, device, 16)
    return min(1.0, first / last)


def misaligned(device: str) -> dict[str, float]:
    """Rates of matmuls whose rows lack one, two or three factors of two of a 16-byte load, over that of one with none missing."""
    size, dtype = (4096, torch.bfloat16) if device != "cpu" else (512, torch.float32)
    left = torch.randn(size, size, device=device, dtype=dtype)

    def per_column(columns: int) -> float:
        right = torch.randn(size, columns, device=device, dtype=dtype)
        return seconds(lambda: left @ right, device) / columns

    fast = per_column(size)
    wanted = 3 if dtype == torch.bfloat16 else 2
    rates = {missing: min(1.0, fast / per_column(size - 2 ** (wanted - missing))) for missing in range(1, wanted + 1)}
    return {f"gemm.misaligned.{missing}": rate for missing, rate in rates.items()}


KEYS = 4096  # over which attention is timed on accelerators
LONG, SHORT = 512, 64  # over which on processors


def attention(device: str, dtype: str, head_dim: int) -> dict[str, float]:
    """Flop/s of causal attention in one kernel, forward and backward, by the width of heads."""
    shape = (4, 32, KEYS, head_dim) if device != "cpu" else (1, 4, LONG, head_dim)
    forward, backward = _attention(device, dtype, shape)
    return {f"attention.forward.{head_dim}": forward, f"attention.backward.{head_dim}": backward}


def short_attention() -> dict[str, float]:
    """The same on a processor over few keys."""
    forward, backward = _attention("cpu", "fp32", (8, 8, SHORT, 64))
    return {"attention.forward.short": forward, "attention.backward.short": backward}


def _attention(device: str, dtype: str, shape: tuple[int, int, int, int]) -> tuple[float, float]:
    """Flop/s, counting the half that must be computed."""
    batch, heads, length, head_dim = shape
    q, k, v = (torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    flops = 2.0 * batch * heads * length * length * head_dim
    with torch.no_grad():
        forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return flops / forward, 2.5 * flops / backward


def bandwidth(device: str) -> dict[str, float]:
    """Bytes a second read and written together by a pointwise kernel: of tensors no cache holds, and of smaller ones, which a cache
    holds on an accelerator and which a processor has to fetch within a step."""

    if device == "cpu":
        return passes.bandwidth(2**27, cached(device))

    def rate(size: int) -> float:
        x, y = torch.ones(size // 8, device=device), torch.empty(size // 8, device=device)
        return size / _in_a_row(lambda: torch.add(x, 1.0, out=y), 50)

    return {"rate.memory": rate(2**31), "rate.cache": rate(cached(device))}


def math_rate(device: str) -> float:
    """Elements a second through a gelu, whose exponentials cost more than its bytes: on a processor, and in half precision elsewhere."""
    x = torch.randn(2**18, device=device) if device == "cpu" else torch.randn(2**26, device=device, dtype=torch.bfloat16)
    return x.numel() / seconds(lambda: F.gelu(x), device, 0.2)


DEPTH, ROWS, WIDTH = 3, 512, 384  # of a step that shows what matmuls lose among other ops


def step() -> dict[str, float]:
    """Seconds of a training step of a few layers (norm, matmul, gelu, matmul, residual) on a processor, its usual ones, not the best.

    Ranks begin together and wait for the slowest; where others are on the machine too, not for them."""
    shapes = [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)]
    layers = [[torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes] for _ in range(DEPTH)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer], lr=1e-4, fused=True)
    x = torch.randn(ROWS, WIDTH)

    def once() -> None:
        y = x
        for up, up_bias, down, down_bias, scale, shift in layers:
            z = F.gelu(F.linear(F.layer_norm(y, (WIDTH,), scale, shift), up, up_bias))
            y = y + F.linear(z, down, down_bias)
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()

    def both() -> tuple[float, float]:
        if dist.is_initialized():
            dist.barrier()
        began, worked = time.perf_counter(), time.thread_time()
        once()
        worked = time.thread_time() - worked
        if dist.is_initialized():
            dist.barrier()
        return time.perf_counter() - began, worked

    once()
    taken, worked = (statistics.median(times) for times in zip(*(both() for _ in range(15)), strict=True))
    return {"step.seconds": min(taken, passes.ALONE * worked)}


def cached(device: str) -> int:
    """Bytes that surely stay in the last cache one device has to itself."""
    return 2**24 if device != "cpu" else 2**20


def launches(device: str) -> dict[str, float]:
    """Seconds between small kernels of a stream, and seconds the host needs to issue one: of a torch op in training, of one
    without gradients, of a compiled function. On a processor kernels run on the thread that issues them."""
    if device == "cpu":
        return {"kernel.launch": _plain(device), "host.launch": 0.0, "host.plain": 0.0, "host.compiled": 0.0}
    return {
        "kernel.launch": _back_to_back(), "host.launch": _trained(device), "host.plain": _plain(device),
        "host.compiled": _compiled(device),
    }  # fmt: skip


def _host(device: str) -> dict[str, float]:
    from weft.cluster import issue

    return issue.costs(device)


LAYERS, NARROW = 20, 32  # of a network so small that only launches count


def _forward(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = F.gelu(F.linear(x, w))
    return x.sum()


def _weights(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    return [torch.randn(NARROW, NARROW, device=device, requires_grad=True) for _ in range(LAYERS)], torch.randn(8, NARROW, device=device)


def _trained(device: str) -> float:
    weights, x = _weights(device)
    # matmul and gelu; two matmuls, gelu and a sum back
    return seconds(lambda: _forward(weights, x).backward(), device, 0.3) / (6 * LAYERS)


def _plain(device: str) -> float:
    weights, x = _weights(device)
    with torch.no_grad():
        return seconds(lambda: _forward(weights, x), device, 0.3) / (2 * LAYERS)


def _compiled(device: str) -> float:
    weights, x = _weights(device)
    fast = torch.compile(_forward)
    return seconds(lambda: fast(weights, x).backward(), device, 0.3) / (5 * LAYERS)  # matmul and gelu; gelu and two matmuls back


def workspace() -> dict[str, float]:
    """Bytes the matmul library keeps, of the forward's thread and of the backward's, in a process that has done nothing else."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return {"workspace.bytes": float(pool.apply(_kept))}


def _kept() -> int:
    """What stays allocated after matmuls with and without bias, forward and backward."""
    before = torch.cuda.memory_allocated()
    w = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (w @ w).sum().backward()
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.linear(w.detach(), w, bias).sum().backward()
    del w, bias
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated() - before)


def _back_to_back() -> float:
    x = torch.zeros(1024, device="cuda")
    return _in_a_row(lambda: x.add_(1.0), 200)


def _in_a_row(call: Callable[[], Any], times: int) -> float:
    """Seconds of a kernel among others of a recorded graph, which the host does not slow down."""
    call()  # load the kernel before recording
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return seconds(graph.replay, "cuda", 0.2) / times


def walks(device: str) -> dict[str, float]:
    """What torch's passes that do not stream reach of the rate of one that does: into a wider type, sums down the columns, and updates."""
    x = torch.randn(2**15, 2**11, device=device, dtype=torch.bfloat16)
    scale = torch.ones(x.shape[1], device=device, dtype=x.dtype)
    _, mean, spread = torch.native_layer_norm(x, [x.shape[1]], scale, scale, 1e-5)
    size = x.numel() * x.element_size()
    streamed = 2 * size / seconds(lambda: x + 1.0, device)

    def share(call: Callable[[], Any], moved: int) -> float:
        return min(1.0, moved / seconds(call, device) / streamed)

    backward = torch.ops.aten.native_layer_norm_backward
    return {
        "memory.widen": share(lambda: x.float(), 3 * size), "memory.columns": share(lambda: x.sum(0), size),
        "memory.columns.norm": share(
            lambda: backward(x, x, [x.shape[1]], mean, spread, scale, scale, [False, True, True]), 2 * size
        ),
        "memory.update": share(_update(x), 7 * size),
    }  # fmt: skip


def _update(x: torch.Tensor) -> Callable[[], Any]:
    """Adam on a list of tensors in one call: reads parameter, gradient and two moments, writes all but the gradient."""
    params, grads, first, second = ([torch.zeros_like(part) for part in x.chunk(16)] for _ in range(4))
    counts = [torch.ones((), device=x.device) for _ in params]
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    return lambda: torch._fused_adamw_(params, grads, first, second, [], counts, **settings)


def samples(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured, one by one: a name for the progress bar and the measurement, a matmul or numbers by name."""
    for shape in matmul_shapes(device):
        yield "products", lambda shape=shape: time_matmul(device, *shape)
    yield "memory", lambda: bandwidth(device)
    yield "launches", lambda: launches(device)
    if device != "cpu":
        yield "the host", lambda: _host(device)
    if device != "cpu":
        yield "passes", lambda: walks(device)
    dtype = "bf16" if device != "cpu" else "fp32"
    yield "attention", lambda: attention(device, dtype, 128)
    yield "attention", lambda: attention(device, dtype, 64)
    yield "alignment", lambda: misaligned(device)
    yield "sustained", lambda: {"gemm.sustained": sustained(device) if device != "cpu" else 1.0}
    yield "workspace", lambda: workspace() if device != "cpu" else {"workspace.bytes": 0.0}
    yield "exponentials", lambda: {"math.rate": math_rate(device)}
    if device == "cpu":
        yield "short attention", short_attention
        yield "passes", passes.by_op
        yield "attention with its scores", passes.scores
        yield "a step", step
