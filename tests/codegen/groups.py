"""Fused groups the tests share, and a judge for them: the same formulas in float64, on all ranks' data at once."""

from __future__ import annotations

from typing import Any

import torch

from weft.codegen.expr import Group, Slot, Value, apply, cast, load, reduce, scalar, sqrt, total
from weft.codegen.kernel import compile_group
from weft.runtime.fused import HostKernel, Row
from weft.runtime.host_numbers import host_function

SCALARS = {"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "decay": 0.1, "step": 3.0, "most": 0.5}
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


def slots(grad: str = "f32", weight: str = "f32") -> dict[str, Slot]:
    return {
        "g": Slot("g", grad, spread=True), "w": Slot("w", weight, spread=True),
        "m": Slot("m", "f32"), "v": Slot("v", "f32"), "s": Slot("s", "f32"),
    }  # fmt: skip


def adam(s: dict[str, Slot], g: Value, w: Value) -> tuple[Value, Value, Value]:
    beta1, beta2, eps, step = (scalar(x) for x in ("beta1", "beta2", "eps", "step"))
    m = beta1 * load(s["m"]) + (1 - beta1) * g
    v = beta2 * load(s["v"]) + (1 - beta2) * (g * g)
    root = sqrt(v / (1 - apply("pow", beta2, step))) + eps
    return m, v, (m / (1 - apply("pow", beta1, step))) / root + scalar("decay") * w


def groups() -> dict[str, Group]:
    """From one sum to three phases."""
    s, b = slots(), slots("bf16", "bf16")
    lr = scalar("lr")
    out: dict[str, Group] = {}
    m, v, way = adam(s, reduce(s["g"]), load(s["w"]))
    out["adam"] = Group("adam", ((s["m"], m), (s["v"], v), (s["w"], load(s["w"]) - lr * way)))
    long, far = sqrt(total(load(s["w"]) * load(s["w"]))), sqrt(total(way * way))
    out["lamb"] = Group("lamb", ((s["m"], m), (s["v"], v), (s["w"], load(s["w"]) - (lr * (long / far)) * way)))
    spent = {**s, "g": Slot("g", "f32", spread=True, disposable=True)}
    summed = reduce(spent["g"])
    clipped = summed * apply("minimum", scalar("most") / sqrt(total(summed * summed, over_rows=True)), 1.0)
    m, v, way = adam(spent, clipped, load(s["w"]))
    far = sqrt(total(way * way))
    out["clipped lamb"] = Group("clipped", ((s["m"], m), (s["v"], v), (s["w"], load(s["w"]) - (lr / far) * way)))
    m, v, way = adam(b, reduce(b["g"]), load(b["w"]))
    out["bf16 adam"] = Group("low", ((b["m"], m), (b["v"], v), (b["w"], cast(load(b["w"]) - lr * way, "bf16"))))
    out["max"] = Group("most", ((s["s"], reduce(s["g"], "max") / total(apply("abs", reduce(s["g"])), "max")),))
    out["all_reduce"] = Group("all_reduce", ((s["g"], reduce(s["g"])),))
    out["all_gather"] = Group("all_gather", ((s["w"], load(s["m"]) * 2.0),))
    return out


def evaluate(group: Group, data: dict[str, list[list[torch.Tensor]]], numbers: dict[str, float]) -> dict[str, list[torch.Tensor]]:
    """What each store should hold, per tensor, in float64. `data[slot][rank][tensor]`; own slots are given whole, once."""
    tensors = len(next(iter(data.values()))[0])
    memo: dict[tuple[Value, int], Any] = {}

    def value(v: Value, k: int) -> Any:
        if (v, k) not in memo:
            memo[v, k] = _value(v, k)
        return memo[v, k]

    def _value(v: Value, k: int) -> Any:
        if v.fn == "const":
            return torch.tensor(v.const, dtype=torch.float64)
        if v.fn == "scalar":
            return torch.tensor(numbers[v.name], dtype=torch.float64)
        if v.fn == "load":
            return data[v.slot.name][0][k].double()
        if v.fn == "reduce":
            terms = torch.stack([rank[k].double() for rank in data[v.slot.name]])
            return {"sum": terms.sum, "max": lambda d: terms.amax(d)}[v.name](0)
        if v.fn == "total":
            parts = [value(v.args[0], j) for j in (range(tensors) if v.level == 0 else [k])]
            whole = torch.cat([p.reshape(-1) for p in parts])
            return whole.sum() if v.name == "sum" else whole.max()
        args = [value(a, k) for a in v.args]
        if v.fn == "cast":
            return args[0].to(TORCH[v.name]).double()
        name = {"add": "add", "sub": "sub", "mul": "mul", "div": "div"}.get(v.fn, v.fn)
        return getattr(torch, name)(*args)

    return {slot.name: [value(v, k) for k in range(tensors)] for slot, v in group.stores}


class Bound:
    """A group bound to random tensors on this rank, with everyone's data at hand for the judge."""

    def __init__(self, group: Group, sizes: list[int], peers: Any, target: str, launch: Any = None) -> None:
        self.group, self.sizes, self.peers = group, sizes, peers
        self.kernel = compile_group(group, peers.world, target)
        used = {slot.name: slot for slot in group.slots}
        starts, total_ = [], 0
        for n in sizes:
            starts.append(total_)
            total_ += -(-n // 16) * 16
        self.data: dict[str, list[list[torch.Tensor]]] = {}
        self.memory: dict[str, list[torch.Tensor]] = {}
        buffers = self.buffers = {}
        for name, slot in used.items():
            copies = [self._random(name, slot.dtype, r if name == "g" else 0) for r in range(peers.world if slot.spread else 1)]
            self.data[name] = copies
            if slot.spread:
                buffers[name] = peers.empty(total_ * slot.nbytes)
                views = [buffers[name].view(a * slot.nbytes, (n,), TORCH[slot.dtype]) for a, n in zip(starts, sizes, strict=True)]
            else:
                views = [torch.empty(n, dtype=TORCH[slot.dtype]) for n in sizes]
            for into, new in zip(views, copies[peers.rank if slot.spread and name == "g" else 0], strict=True):
                into.copy_(new)
            self.memory[name] = views
        self.runs = [self._run(n, peers.rank) for n in sizes]
        rows = []
        for k, (lo, hi) in enumerate(self.runs):
            at: dict[str, Any] = {}
            for name, slot in used.items():
                shift = lo * slot.nbytes
                at[name] = (
                    [a + starts[k] * slot.nbytes + shift for a in buffers[name].addresses]
                    if slot.spread
                    else self.memory[name][k].data_ptr() + shift
                )
            rows.append(Row(hi - lo, at))
        peers.barrier("filled")
        if target == "cpu":
            self.call: Any = HostKernel(self.kernel, rows, peers)
        else:
            from weft.runtime.launched import DeviceKernel

            spans = [max(hi - lo for lo, hi in (self._run(n, r) for r in range(peers.world))) for n in sizes]
            self.call = DeviceKernel(self.kernel, rows, peers, launch, spans)

    def _random(self, name: str, dtype: str, rank: int) -> list[torch.Tensor]:
        gen = torch.Generator().manual_seed(sum(map(ord, name)) + 7 * rank)
        made = [torch.randn(n, generator=gen) for n in self.sizes]
        return [(x.abs() if name == "v" else x).to(TORCH[dtype]) for x in made]

    def _run(self, n: int, rank: int) -> tuple[int, int]:
        share = -(-n // self.peers.world)
        return min(n, rank * share), min(n, (rank + 1) * share)

    def run(self) -> None:
        expand = host_function(self.kernel.scalars)
        self.call(expand(**{n: SCALARS[n] for n in self.kernel.scalar_names}))

    def check(self) -> None:
        """Spread slots must be right everywhere, own slots on this rank's run."""
        want = evaluate(self.group, self.data, SCALARS)
        for slot, _ in self.group.stores:
            for k, (lo, hi) in enumerate(self.runs):
                got = self.memory[slot.name][k]
                part = slice(None) if slot.spread else slice(lo, hi)
                tolerance = 2e-5 if slot.dtype == "f32" else 1e-2
                torch.testing.assert_close(got[part].double(), want[slot.name][k][part], rtol=tolerance, atol=tolerance)
