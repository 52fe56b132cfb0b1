"""Seconds the host needs to issue the ops of a training step of torch as it runs by itself, by kind: an op, and one of a backward.

Small modules are called in chains, as models call them, so Python, autograd, dispatch and launch are all in it. Two lengths of a chain tell what a
link costs; what a link does besides its kind of op is taken off at what was found before. `Counting` sees the same ops in any other step, so

    host = host.mixed * (sum over kinds of (count * host.KIND + count in the backward * host.KIND.back) + nodes of the backward * host.node
                         + tensors updated * host.update + host.step)

`mixed` is what ops cost more in a step, where no two in a row are the same, as seen in a small one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.cluster import measure

VIEWS = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "chunk", "narrow", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_local_scalar_dense", "set_", "resize_", "diagonal",
    "unfold", "view_as", "_reshape_alias", "is_same_size", "sym_size", "item", "expand_as",
    "device", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
PARTS = (
    ("convolution", "convolution"),
    ("batch_norm", "batch_norm"),
    ("norm", "norm"),
    ("scaled_dot_product", "attention"),
    ("flash_attention", "attention"),
)
UPDATES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
SHORT, LONG = 8, 32  # links of a chain
FEW, MANY = 2, 34  # tensors of an update
WIDTH = 32  # of tensors so small that only the host counts
LEAST = 1e-7


FREE = {
    "detach",
    "alias",
    "is_same_size",
    "sym_size",
    "device",
    "_record_function_enter_new",
    "_record_function_exit",
}  # done without being called


def kind_of(name: str) -> str:
    """What of the host an op is like; nothing for one that no step calls by itself."""
    if name in VIEWS:
        return "" if name in FREE or "empty" in name else "view"
    return "product" if name in MATMULS else next((kind for part, kind in PARTS if part in name), "op")


class Counting(TorchDispatchMode):
    """Counts dispatched ops, and nodes of a backward, by the constant of each."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._node: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count(str(func.overloadpacket.__name__), args)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Any = ()) -> None:
        """An op that is dispatched now. Views are a part of the node that takes them back."""
        if name in UPDATES:
            self.counts.update({"host.update": len(args[0]), "host.step": 1})
            return
        node, kind = torch._C._current_autograd_node(), kind_of(name)
        if node is not None and node is not self._node:
            self.counts["host.node"] += 1
        self._node = node
        if kind and (node is None or kind != "view"):
            self.counts[f"host.{kind}{'.back' if node is not None else ''}"] += 1


def costs(device: str) -> dict[str, float]:
    """All constants of the host, kind by kind."""
    found: dict[str, float] = {}
    for kind, links in CHAINS.items():
        short, long = (_chain(links, n, device) for n in (SHORT, LONG))
        for end, of in (("", 0), (".back", 1)):
            key = "host.node" if kind == "view" and end else f"host.{kind}{end}"
            counts = _between(_counted(short[of]), _counted(long[of]))
            spent = (measure.seconds(long[of], device) - measure.seconds(short[of], device)) / (LONG - SHORT)
            others = sum(count * found[k] for k, count in counts.items() if k != key)
            found[key] = max((spent - others) / counts[key], LEAST)
    found |= _update(device, found)
    return found | {"host.mixed": _mixed(device, found)}


def total(counts: Mapping[str, int], get: Callable[[str, float], float]) -> float:
    """Seconds of a step that dispatches so many of each."""
    return get("host.mixed", 1.0) * sum(n * get(key, 0.0) for key, n in counts.items())


def _between(short: Counter[str], long: Counter[str]) -> Counter[str]:
    """Ops of one link."""
    return Counter({key: (long[key] - short[key]) / (LONG - SHORT) for key in long})  # type: ignore[misc]


def _counted(call: Callable[[], Any]) -> Counter[str]:
    with Counting() as seen:
        call()
    return seen.counts


# --- chains


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


Links = tuple[Callable[[], nn.Module], tuple[int, ...]]
IMAGES = (1, 8, 4, 4)
CHAINS: dict[str, Links] = {
    "view": (Transposed, (8, 8)),
    "op": (nn.ReLU, (8, 8)),
    "product": (lambda: nn.Linear(WIDTH, WIDTH), (8, WIDTH)),
    "norm": (lambda: nn.LayerNorm(WIDTH), (8, WIDTH)),
    "convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), IMAGES),
    "batch_norm": (lambda: nn.BatchNorm2d(8), IMAGES),
    "attention": (Attends, (1, 2, 8, WIDTH)),
}


def _chain(links: Links, count: int, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward through so many modules, and the backward of one."""
    make, shape = links
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    net = nn.Sequential(*(make() for _ in range(count))).to(device, dtype)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    out = net(x)
    grad, learnt = torch.ones_like(out), list(net.parameters())

    def backward() -> None:
        for p in learnt:
            p.grad = None
        torch.autograd.backward(out, grad, retain_graph=True)

    return lambda: net(x), backward


def _update(device: str, found: Mapping[str, float]) -> dict[str, float]:
    """Of fused AdamW for each tensor, and of an entire step beyond its ops: zeroing gradients, starting a backward and the update."""
    took = {}
    for count in (FEW, MANY):
        params = [nn.Parameter(torch.zeros(8, device=device)) for _ in range(count)]
        optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
        grads = [torch.zeros_like(p) for p in params]

        def step(params: list[nn.Parameter] = params, grads: list[torch.Tensor] = grads, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            optimizer.step()

        step()
        others = Counter({key: n for key, n in _counted(step).items() if key not in ("host.update", "host.step")})
        took[count] = measure.seconds(step, device) - total(others, found.get)
    each = max(LEAST, (took[MANY] - took[FEW]) / (MANY - FEW))
    x = torch.zeros((), device=device, requires_grad=True)

    def start() -> None:
        x.grad = None
        (x * x).backward()

    beginning = measure.seconds(start, device) - total(_counted(start), found.get)
    return {"host.update": each, "host.step": max(LEAST, took[FEW] - FEW * each + beginning)}


# --- a step


class Block(nn.Module):
    """Attention and a feed-forward part, as most models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(*x.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


BLOCKS = 4


def _mixed(device: str, found: Mapping[str, float]) -> float:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    net = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device, dtype)
    optimizer, x = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True), torch.randn(1, 8, WIDTH, device=device, dtype=dtype)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    step()
    return max(1.0, measure.seconds(step, device, 0.3) / total(_counted(step), found.get))
