"""Time kernels of this machine: products, attention, memory, launches. Each result is a sample the fit can predict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Product:
    """A product and the seconds it took."""

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
    """Time of one call: the best of five batches long enough for the clock to see, since all that disturbs only adds."""
    fn()
    synchronize(device)
    once = _batch(fn, device, 1)
    calls = max(1, min(2000, int(budget / 5 / max(once, 1e-7))))
    return min(_batch(fn, device, calls) for _ in range(5))


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


def products(device: str) -> list[tuple[int, int, int, int, str]]:
    """Shapes to time: every ramp of the surface, in the dtypes that count here."""
    if device == "cpu":
        sizes = [(m, n, k, 1, "fp32") for m in (32, 128, 512) for n in (64, 256, 1024) for k in (64, 256, 1024)]
        return sizes + [(128, 128, 64, 8, "fp32"), (256, 256, 64, 4, "fp32"), (2048, 512, 512, 1, "fp32"), (1024, 1024, 1024, 1, "fp32")]
    wide = [(m, n, k, 1, "bf16") for m in (512, 2048, 8192) for n in (512, 2048, 8192) for k in (256, 1024, 4096)]
    batched = [(2048, 2048, 128, 32, "bf16"), (1024, 1024, 64, 64, "bf16"), (512, 64, 512, 128, "bf16")]
    full = [(m, 4096, 4096, 1, d) for m in (1024, 8192) for d in ("tf32", "fp32")]
    return wide + batched + full + [(16384, 16384, 4096, 1, "bf16"), (32768, 4096, 4096, 1, "bf16")]


def time_product(device: str, m: int, n: int, k: int, batch: int, dtype: str) -> Product:
    """Random numbers, since a device draws less power, and runs faster, on zeros."""
    kind = DTYPES[dtype]
    a = torch.randn(batch, m, k, device=device, dtype=kind)
    b = torch.randn(batch, k, n, device=device, dtype=kind)
    a, b = (a[0], b[0]) if batch == 1 else (a, b)
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        return Product(m, n, k, batch, dtype, seconds(lambda: torch.matmul(a, b), device))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept


def sustained(device: str, span: float = 2.0) -> float:
    """Rate of a large product after it has run for a while, over its rate at first: what the power limit takes."""
    size = 8192 if device != "cpu" else 768
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device != "cpu" else torch.float32)
    time.sleep(0.3)
    first = _batch(lambda: a @ a, device, 4)
    began = time.perf_counter()
    last = first
    while time.perf_counter() - began < span:
        last = _batch(lambda: a @ a, device, 16)
    return min(1.0, first / last)


def misaligned(device: str) -> float:
    """Rate of a product with odd rows over that of one with rows of whole 16-byte loads."""
    size, dtype = (4096, torch.bfloat16) if device != "cpu" else (512, torch.float32)
    odd = torch.randn(size, size - 1, device=device, dtype=dtype)
    even = torch.randn(size, size, device=device, dtype=dtype)
    slow = seconds(lambda: even @ odd, device) / (size - 1)
    fast = seconds(lambda: even @ even, device) / size
    return min(1.0, fast / slow)


def attention(device: str, dtype: str, head_dim: int) -> tuple[float, float]:
    """Flop/s of causal attention in one kernel, forward and backward, counting the half that must be computed."""
    batch, heads, length = (4, 32, 4096) if device != "cpu" else (1, 4, 512)
    shape = batch, heads, length, head_dim
    q, k, v = (torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    flops = 2.0 * batch * heads * length * length * head_dim
    with torch.no_grad():
        forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return flops / forward, 2.5 * flops / backward


def bandwidth(device: str) -> tuple[float, float]:
    """Bytes a second read and written together by a pointwise kernel: of tensors no cache holds, and of some it does."""

    def rate(size: int) -> float:
        x, y = torch.ones(size // 8, device=device), torch.empty(size // 8, device=device)
        return size / seconds(lambda: torch.add(x, 1.0, out=y), device, 0.3)

    return rate(2**31 if device != "cpu" else 2**27), rate(cached(device))


def math_rate(device: str) -> float:
    """Elements a second through a gelu, whose exponentials cost a processor more than its bytes."""
    x = torch.randn(2**18 if device == "cpu" else 2**26, device=device)
    return x.numel() / seconds(lambda: F.gelu(x), device, 0.2)


def cached(device: str) -> int:
    """Bytes that surely stay in the last cache one device has to itself."""
    return 2**24 if device != "cpu" else 2**20


def launches(device: str) -> tuple[float, float]:
    """Seconds between small kernels of a stream, and seconds the host needs to issue a torch op in training."""
    host = _host(device)
    if device == "cpu":  # kernels run on the thread that issues them
        return host, 0.0
    return _back_to_back(), host


def _host(device: str) -> float:
    layers, width = 20, 32
    weights = [torch.randn(width, width, device=device, requires_grad=True) for _ in range(layers)]
    x = torch.randn(8, width, device=device)

    def step() -> None:
        y = x
        for w in weights:
            y = F.gelu(F.linear(y, w))
        y.sum().backward()

    return seconds(step, device, 0.3) / (6 * layers)  # product and gelu; two products, gelu and a sum back


def compiled_host(device: str) -> float:
    """Seconds the host needs to issue a kernel of a compiled function."""
    layers, width = 20, 32
    weights = [torch.randn(width, width, device=device, requires_grad=True) for _ in range(layers)]
    x = torch.randn(8, width, device=device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = F.gelu(F.linear(x, w))
        return x.sum()

    fast = torch.compile(forward)
    return seconds(lambda: fast(x).backward(), device, 0.3) / (5 * layers)  # product and gelu; gelu and two products back


def workspace() -> int:
    """Bytes the product library keeps, of the forward's thread and of the backward's."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # products timed before have already made it keep some
        torch.cuda.synchronize()
        clear()
    before = torch.cuda.memory_allocated()
    w = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (w @ w).sum().backward()
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.linear(w.detach(), w, bias).sum().backward()
    del w, bias
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def _back_to_back() -> float:
    """Small kernels of a recorded graph, which the host does not slow down."""
    x = torch.zeros(1024, device="cuda")
    x.add_(1.0)  # load the kernel before recording
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(200):
            x.add_(1.0)
    return seconds(graph.replay, "cuda") / 200


def samples(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured, one by one: a name for the progress bar and the measurement."""
    for shape in products(device):
        yield "products", lambda shape=shape: time_product(device, *shape)
    yield "memory", lambda: bandwidth(device)
    yield "launches", lambda: launches(device)
    dtype = "bf16" if device != "cpu" else "fp32"
    yield "attention", lambda: attention(device, dtype, 128)
    yield "attention", lambda: attention(device, dtype, 64)
    yield "alignment", lambda: misaligned(device)
    yield "sustained", lambda: sustained(device)
    yield "compiled kernels", lambda: compiled_host(device) if device != "cpu" else 0.0
    yield "workspace", lambda: workspace() if device != "cpu" else 0
    yield "exponentials", lambda: math_rate(device)
