"""Any torch training step as records and as memory over time, without running it: fake tensors, no data, no device used.

`observe` calls the step under fake tensors and notes every kernel torch would launch and every storage it would hold.
Storage is counted as the caching allocator counts it: rounded up to 512 bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.cluster.profile import Device
from weft.plan.cost import device_seconds
from weft.plan.workload import Attention, Gemm, Op, Touch

ROUND = 512
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
NAMES |= {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


@dataclass
class Observed:
    """Kernels in order, and bytes: `held` before the step, `peak` during it."""

    ops: list[Op] = field(default_factory=list)
    held: int = 0
    peak: int = 0


def seconds(seen: Observed, device: Device, host: str = "host.launch") -> float:
    """Time of a step among many: the host issues ahead where it can, so the slower of host and device sets the pace."""
    issued = sum(op.launches for op in seen.ops) * device.get(host, device.get("host.launch"))
    return max(issued, sum(device_seconds(device, op) for op in seen.ops))


def observe(make: Callable[[], Callable[[], Any]], warm: int = 1) -> Observed:
    """What a step does. `make` builds model, batch and optimizer and returns the step; `warm` steps come before the one
    observed, so that gradients and optimizer state are there already."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        recorder = Recorder()
        with recorder:
            step = make()
            for _ in range(warm):
                step()
            recorder.begin()
            step()
    return recorder.seen


class Recorder(TorchDispatchMode):
    """Notes each kernel and follows each storage from its first tensor to its last."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled functions run compiled under it."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.seen = Observed()
        self.live = 0
        self.known: dict[int, Any] = {}
        self.quiet = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow what comes out, but note no kernels: another has already said what runs."""
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def begin(self) -> None:
        """Forget what was done; keep what is held."""
        self.seen = Observed(held=self.live, peak=self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.quiet or TracingContext.try_get() is not None:
            return out
        self.seen.ops.extend(kernels(func, args, kwargs or {}, out))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor)
        return out

    def follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or tensor.device.type == "meta":
            return
        size = -(-storage.nbytes() // ROUND) * ROUND
        self.live += size
        self.seen.peak = max(self.seen.peak, self.live)
        self.known[key] = weakref.ref(storage, lambda _: self.drop(key, size))

    def drop(self, key: int, size: int) -> None:
        if self.known.pop(key, None) is not None:
            self.live -= size


# --- what a torch op is as a kernel

VIEWS = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "chunk", "narrow", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_local_scalar_dense", "set_", "resize_", "diagonal",
    "unfold", "view_as", "_reshape_alias", "is_same_size", "sym_size", "item", "expand_as",
    "device", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip


def kernels(func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    """The records of one torch op; none of one that only makes a view."""
    name = func.overloadpacket.__name__
    if name in VIEWS or (name == "_to_copy" and not _moves(args, out)):
        return
    if name in PRODUCTS:
        yield from PRODUCTS[name](name, args, kwargs, out)
    elif "scaled_dot_product" in name or name in ("_flash_attention_forward", "_flash_attention_backward"):
        yield _attention(name, args, out)
    elif name in ("embedding", "index_select", "gather", "index"):
        moved = 2 * sum(_bytes(t) for t in _tensors(out))
        yield Touch(name, moved, 0)
    else:
        moved = sum(_bytes(t) for t in _unique(args, kwargs, out)) + sum(_bytes(t) for t in _overwritten(name, args))
        yield Touch(name, float(moved), 0, launches=_launches(name, args))


def _moves(args: Any, out: Any) -> bool:
    """A cast or copy is a kernel unless it hands back the same storage."""
    return bool(out.untyped_storage()._cdata != args[0].untyped_storage()._cdata)


def _tensors(x: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def _unique(*things: Any) -> list[torch.Tensor]:
    """Tensors read or written, each storage once for reading and once for writing."""
    *read, out = things
    found = {t.untyped_storage()._cdata: t for t in _tensors(list(read))}
    return [*found.values(), *_tensors(out)]


def _overwritten(name: str, args: Any) -> list[torch.Tensor]:
    """What an op over lists of tensors writes in place, which it does not hand back."""
    if name.startswith("_fused_adam"):
        return [t for i in (0, 2, 3) for t in args[i]]
    if name.startswith(("_foreach", "_fused")) and name.endswith("_"):
        return list(args[0])
    return []


def _bytes(t: torch.Tensor) -> int:
    """Bytes of the elements that are there: an expanded tensor has only those of its storage."""
    return int(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()))


def _launches(name: str, args: Any) -> int:
    """A foreach or fused op is a few kernels over many tensors; a norm or loss backward is two."""
    if name.startswith(("_foreach", "_fused")):
        count = len(args[0]) if args and isinstance(args[0], (list, tuple)) else 1
        return max(1, count // 40)
    return 2 if name in ("native_layer_norm_backward", "sum", "embedding_dense_backward", "_softmax_backward_data") else 1


def _dtype(t: torch.Tensor) -> str:
    name = NAMES.get(t.dtype, "fp32")
    return "tf32" if name == "fp32" and torch.get_float32_matmul_precision() != "highest" else name


def _mm(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    a, b = args[-2:] if name != "addmm" else args[1:3]
    yield Gemm(a.shape[0], b.shape[1], a.shape[1], 1, _dtype(a), name)


def _bmm(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    a, b = args[-2:] if name != "baddbmm" else args[1:3]
    yield Gemm(a.shape[1], b.shape[2], a.shape[2], a.shape[0], _dtype(a), name)


def _scaled(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    a, b = args[:2]
    yield Gemm(a.shape[0], b.shape[1], a.shape[1], 1, "fp8", name)


def _convolution(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    """As a product of patches with the kernel; the backward is two such."""
    backward = name == "convolution_backward"
    grad, x, w = args[:3] if backward else (out, args[0], args[1])
    groups = args[9] if backward else args[8]
    m = grad.shape[0] * grad.shape[2:].numel()
    n, k = grad.shape[1] // groups, w.shape[1] * w.shape[2:].numel()
    if not backward:
        yield Gemm(m, n, k, groups, _dtype(x), name)
        return
    wanted = args[10]
    if wanted[0]:
        yield Gemm(m, k, n, groups, _dtype(x), f"{name} of input")
    if wanted[1]:
        yield Gemm(n, k, m, groups, _dtype(x), f"{name} of weight")


PRODUCTS: dict[str, Callable[..., Iterator[Op]]] = {
    "mm": _mm, "addmm": _mm, "bmm": _bmm, "baddbmm": _bmm, "_scaled_mm": _scaled,
    "convolution": _convolution, "convolution_backward": _convolution,
}  # fmt: skip


def _attention(name: str, args: Any, out: Any) -> Attention:
    back = "backward" in name
    q, k = args[1:3] if back else args[:2]
    causal = any(a is True for a in args)
    return Attention(
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal, _dtype(q), name,
        back=back, launches=2 if back else 1,
    )  # fmt: skip
