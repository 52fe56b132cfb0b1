"""Any torch training step as records and as memory over time, without running it: fake tensors, no data, no device used.

`observe` calls the step under fake tensors and notes every kernel torch would launch and every storage it would hold.
Storage is counted as the caching allocator counts it: rounded up to 512 bytes.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.inductor.padding import loose
from weft.cluster import issue
from weft.cluster.issue import UPDATES, VIEWS
from weft.cluster.profile import Device
from weft.cost.price import device_seconds
from weft.cost.work import Attention, Gemm, MemoryBound, Op

ROUND = 512
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
NAMES |= {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


@dataclass
class Observed:
    """Kernels in order, and bytes: `held` before the step, `peak` during it."""

    ops: list[Op] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    issued: Counter[str] = field(default_factory=Counter)  # kernels, by the constant that says what one costs the host
    dispatched: Counter[str] = field(default_factory=Counter)  # ops that torch issues one by one, likewise

    def note(self, ops: Sequence[Op], host: str) -> None:
        self.ops.extend(ops)
        self.issued[host] += sum(op.launches for op in ops)


def seconds(seen: Observed, device: Device, recorded: bool = False) -> float:
    """Time of a step among many: the host issues ahead where it can, so the slower of host and device sets the pace.

    A step `recorded` as one graph is issued at once."""
    return max(0.0 if recorded else host_seconds(seen, device), sum(device_seconds(device, op) for op in seen.ops))


def host_seconds(seen: Observed, device: Device) -> float:
    """What issuing costs: ops of torch by their kind where the host was timed so, else all kernels alike."""
    by_kind = "host.op" in device.constants
    kernels = sum(n * device.get(host, device.get("host.launch")) for host, n in seen.issued.items() if not (by_kind and host == "host.launch"))
    return kernels + (issue.total(seen.dispatched, device.get) if by_kind else seen.dispatched["host.step"] * device.get("host.step", 0.0))


def observe(make: Callable[[], Callable[[], Any]], warm: int = 1, host: str = "host.launch") -> Observed:
    """What a step does. `make` builds model, batch and optimizer and returns the step; `warm` steps come before the one
    observed, so that gradients and optimizer state are there already. `host` says how its ops are issued: `host.launch` with
    gradients followed, `host.plain` without."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        recorder = Recorder(host)
        with recorder:
            step = make()
            for _ in range(warm):
                step()
            recorder.begin()
            step()
    return recorder.seen


class Recorder(TorchDispatchMode):
    """Notes each kernel and follows each storage from its first tensor to its last."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled functions run compiled under it."""
        return True

    def __init__(self, host: str = "host.launch", place: str = "") -> None:
        super().__init__()
        self.host, self.place = host, place
        self.seen = Observed()
        self._live = 0
        self._of: dict[int, tuple[int, int]] = {}  # where each storage lay, and its bytes
        self._gone: list[weakref.ref[Any]] = []  # appended to without a Python frame, which a step that is being traced would be seen to run
        self.known: dict[int, Any] = {}
        self.quiet = False
        self._counting = issue.Counting(self.seen.dispatched)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow what comes out, but note no kernels: another has already said what runs."""
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def begin(self) -> None:
        """Forget what was done; keep what is held, which is not what only waits to be collected."""
        gc.collect()
        self.seen = Observed(held=self.live, peak=self.live)
        self._counting = issue.Counting(self.seen.dispatched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._result(func, args, kwargs or {})
        if self.quiet or TracingContext.try_get() is not None:
            return out
        name = _packet(func)
        self.seen.note([*kernels(func, args, kwargs or {}, out), *_laid_out(name, args, out)], self.host)
        if self.host == "host.launch" or name in UPDATES:
            self._counting.count(name, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor)
        self.seen.peak = max(self.seen.peak, self.live + passing(_packet(func), args))
        return out

    @staticmethod
    def _result(func: Any, args: Any, kwargs: Any) -> Any:
        if _packet(func) in UPDATES:  # hand nothing back; torch has no fake of those with tensor rates
            return None
        guess = GUESSES.get(_packet(func), _no_guess)(args)
        return func(*args, **kwargs) if guess is None else guess

    def follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, live = storage._cdata, self.live
        if key in self.known or tensor.device.type == "meta" or self.place not in ("", tensor.device.type):
            return
        size = -(-storage.nbytes() // ROUND) * ROUND
        self._live = live + size
        self.seen.peak = max(self.seen.peak, self._live)
        self.known[key] = ref = weakref.ref(storage, self._gone.append)
        self._of[id(ref)] = key, size

    @property
    def live(self) -> int:
        """Bytes of all storages that are still there."""
        while self._gone:
            key, size = self._of.pop(id(self._gone.pop()))
            del self.known[key]
            self._live -= size
        return self._live


# --- results that depend on the data, which is not there: taken at their largest


def _no_guess(args: Any) -> Any:
    return None


def _all_true(args: Any) -> torch.Tensor:
    (mask,) = args
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _all_taken(args: Any) -> torch.Tensor | None:
    """`x[mask]`: every row of x."""
    x, index = args
    if len(index) != 1 or index[0] is None or index[0].dtype != torch.bool:
        return None
    return x.new_empty((index[0].numel(), *x.shape[index[0].dim() :]))


def _some_number(args: Any) -> Any:
    (x,) = args
    if getattr(x, "constant", None) is not None:
        return None
    return 1.0 if x.dtype.is_floating_point else 1


def _they_are(args: Any) -> bool:
    return True


GUESSES: dict[str, Callable[[Any], Any]] = {
    "nonzero": _all_true, "index": _all_taken, "_local_scalar_dense": _some_number, "equal": _they_are, "allclose": _they_are,
}  # fmt: skip


# --- what a torch op is as a kernel


def kernels(func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    """The records of one torch op; none of one that only makes a view."""
    name = _packet(func)
    if name in VIEWS or (name == "_to_copy" and not _moves(args, out)):
        return
    if name in PRODUCTS:
        yield from PRODUCTS[name](name, args, kwargs, out)
    elif "scaled_dot_product" in name or name in ("_flash_attention_forward", "_flash_attention_backward"):
        yield _attention(name, args, out)
    elif name in ("embedding", "index_select", "gather", "index"):
        moved = 2 * sum(_bytes(t) for t in _tensors(out))
        yield MemoryBound(name, moved)
    elif name == "native_layer_norm_backward":
        yield from _norm_backward(name, args, out)
    else:
        moved = sum(_bytes(t) for t in _unique(args, kwargs, out)) + sum(_bytes(t) for t in _overwritten(name, args))
        yield MemoryBound(name, float(moved + _read_again(name, args)), launches=_launches(name, args), walk=_walk(name, args, out))


def passing(name: str, args: Any) -> int:
    """Bytes an op holds while it runs: cuDNN's attention sums the gradient of the queries in 32 bits, and a number for each of their rows."""
    if name != "_scaled_dot_product_cudnn_attention_backward":
        return 0
    queries = args[1]
    return 4 * int(queries.numel() + queries.shape[:-1].numel())


def _norm_backward(name: str, args: Any, out: Any) -> Iterator[Op]:
    """The gradient of the input row by row, those of scale and shift down the columns."""
    grad, x = args[:2]
    yield MemoryBound(name, float(_bytes(grad) + _bytes(x) + _bytes(x)))
    if any(t is not None for t in out[1:]):
        yield MemoryBound(f"{name} of weights", float(_bytes(grad) + _bytes(x)), walk="memory.columns.norm")


LONG = 48 * 1024  # bytes of a row that fit the memory a block of threads shares


def _read_again(name: str, args: Any) -> int:
    """Bytes a softmax reads more than once: of rows too long to be kept, for the largest and for the sum; backward for the sum."""
    if name not in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
        return 0
    x = args[0]
    if x.shape[-1] * 4 <= LONG:
        return 0
    return 2 * _bytes(x)  # twice the input; or once more the gradient and once more the result


def _walk(name: str, args: Any, out: Any) -> str:
    """Passes torch makes at less than the full bandwidth: into a wider type, sums down the columns, updates of many tensors."""
    if name.startswith("_fused_adam"):
        return "memory.update"
    if name == "_to_copy" and out.element_size() > args[0].element_size():
        return "memory.widen"
    if "batch_norm" in name and _channels_first(args[0]):
        return "memory.batch_norm"
    if (
        name == "sum"
        and len(args) > 1
        and isinstance(args[1], (list, tuple))
        and args[0].dim() - 1 not in [d % args[0].dim() for d in args[1]]
    ):
        return "memory.columns"
    return ""


def _packet(func: Any) -> str:
    """The name of an op, whichever overload; of an op of ops its own."""
    return str(getattr(func, "overloadpacket", func).__name__)


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
    return 2 if name in ("sum", "embedding_dense_backward") else 1


def _dtype(t: torch.Tensor) -> str:
    name = NAMES.get(t.dtype, "fp32")
    return "tf32" if name == "fp32" and torch.get_float32_matmul_precision() != "highest" else name


def _mm(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    a, b = args[-2:] if name != "addmm" else args[1:3]
    yield Gemm(a.shape[0], b.shape[1], a.shape[1], 1, _dtype(a), name, loose=loose(a, b))


def _bmm(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    a, b = args[-2:] if name != "baddbmm" else args[1:3]
    yield Gemm(a.shape[1], b.shape[2], a.shape[2], a.shape[0], _dtype(a), name, loose=loose(a, b))


def _scaled(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    a, b = args[:2]
    yield Gemm(a.shape[0], b.shape[1], a.shape[1], 1, "fp8", name)


def _convolution(name: str, args: Any, kwargs: Any, out: Any) -> Iterator[Op]:
    """As a product of patches with the kernel; the backward is two such."""
    backward = name == "convolution_backward"
    grad, x, w = args[:3] if backward else (out, args[0], args[1])
    groups = args[9] if backward else args[8]
    m = grad.shape[0] * grad.shape[2:].numel()
    n, k = grad.shape[1] // groups, _whole_loads(w.shape[1], x) * w.shape[2:].numel()
    if not backward:
        yield Gemm(m, n, k, groups, _dtype(x), name)
        return
    wanted = args[10]
    if wanted[0]:
        yield Gemm(m, k, n, groups, _dtype(x), f"{name} of input")
    if wanted[1]:
        yield Gemm(n, k, m, groups, _dtype(x), f"{name} of weight", loose="k")


def _channels_first(x: torch.Tensor) -> bool:
    return x.dim() == 4 and x.shape[1] > 1 and not x.is_contiguous(memory_format=torch.channels_last)


def _laid_out(name: str, args: Any, out: Any) -> Iterator[Op]:
    """Convolutions of 16 bits work on channels last: what lies otherwise is brought there and back, a kernel for each tensor."""
    if name not in ("convolution", "convolution_backward"):
        return
    x = args[1] if name == "convolution_backward" else args[0]
    if x.device.type == "cpu" or x.element_size() > 2 or not _channels_first(x):
        return
    moved = [args[0], args[1], *_tensors(out)[:1]] if name == "convolution_backward" else [x, out]
    yield MemoryBound("layout", 2.0 * sum(_bytes(t) for t in moved), launches=len(moved))


def _whole_loads(channels: int, x: torch.Tensor) -> int:
    """Channels as the library lays them out: whole loads of 16 bytes."""
    unit = 16 // x.element_size()
    return -(-channels // unit) * unit if x.device.type != "cpu" else channels


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
