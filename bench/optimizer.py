"""The fused optimizer step against the ways a user would otherwise run it, on 2 CPU ranks.

ddp            all_reduce over gloo, then torch's fused optimizer on everything
sharded_gloo   reduce_scatter over gloo (all_to_all and sum), torch's fused optimizer on the slice, all_gather over gloo
ddp_shm        as ddp over the shared memory the fused step uses: what is left is not the transport
sharded        as sharded_gloo over shared memory: what is left is fusion alone
"""

from __future__ import annotations

import math
from typing import Any

import typer

from bench._ranks import machine, quarter, run_ranks, start_line, time_rounds, worst

HYPER = {"lr": 1e-3, "weight_decay": 0.1}
MIXED = [int(2 ** (6 + 14 * ((k * 37) % 100) / 100)) + k for k in range(100)]


def register(app: typer.Typer) -> None:
    app.command("optimizer")(optimizer)


def optimizer(
    json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    ranks: int = typer.Option(2, help="Processes to start."),
    quick: bool = typer.Option(False, help="Fewer sizes and rounds."),
    only: str = typer.Option("", help="Run only cases whose name contains this."),
) -> None:
    """Fused reduce_scatter + update + all_gather against DDP and sharded optimizers."""
    from weft.cli.output import emit

    rows = run_ranks(measure, ranks, quick, only)
    show(rows)
    if json:
        emit({"bench": "optimizer", "machine": machine(), "rows": rows})


def cases(quick: bool) -> dict[str, tuple[str, list[int]]]:
    sizes = (16, 20, 24) if quick else (16, 18, 20, 22, 24, 26)
    found = {f"adamw 2^{k}": ("adamw", [1 << k]) for k in sizes}
    found |= {"adamw 100 tensors": ("adamw", MIXED)}
    found |= {f"{name} 2^{k}": (name, [1 << k]) for name in ("lamb", "sgd") for k in ((20,) if quick else (16, 20, 24))}
    return found


def show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from weft.cli.output import console

    names = list(dict.fromkeys(name for row in rows for name in row["peers_ms"]))
    table = Table(title="milliseconds per step, and how many times weft is faster")
    for column in ("case", "weft", "limit", *names):
        table.add_column(column, justify="right" if column != "case" else "left")
    for row in rows:
        cells = [f"{row['peers_ms'][n]:.3f} ({row['ratios'][n]:.1f}x)" if n in row["peers_ms"] else "" for n in names]
        table.add_row(row["case"], f"{row['weft_ms']:.3f}", f"{row['limit_ms']:.3f}", *cells)
    console.print(table)


# -- on the ranks ----------------------------------------------------------------------------------------------------


def measure(rank: int, world: int, quick: bool, only: str) -> list[dict[str, Any]]:
    return [one_case(label, rule, sizes, quick) for label, (rule, sizes) in cases(quick).items() if only in label]


def one_case(label: str, rule: str, sizes: list[int], quick: bool) -> dict[str, Any]:
    """All ways to take one step from the same parameters and gradients: first that they agree, then how long each takes."""
    from weft.runtime.peers import connect

    peers = connect()
    ways = [make(rule, sizes, peers) for make in (Fused, DdpGloo, ShardedGloo, DdpShared, ShardedShared)]
    ways = [way for way in ways if way.available]
    error = agree(ways, sizes, peers)
    rounds = (6 if quick else 16) if sum(sizes) <= 1 << 20 else 5
    ms = time_rounds({w.name: w.step for w in ways}, {w.name: w.fill for w in ways}, peers, rounds)
    fused = ways[0]
    moved = fused.bytes_per_element * sum(sizes)
    limit = 1e3 * moved / bandwidth(moved, peers)
    weft = ms.pop(fused.name)
    return {
        "case": label, "weft_ms": weft, "peers_ms": ms, "ratios": {name: t / weft for name, t in ms.items()},
        "limit_ms": limit, "bytes": moved, "correct": f"largest difference from ddp {error:.1e}",
    }  # fmt: skip


def agree(ways: list[Any], sizes: list[int], peers: Any) -> float:
    """Three steps each; the parameters must match those of the DDP way."""
    import torch

    for _ in range(3):
        for way in ways:
            way.fill()
            peers.barrier("filled")
            way.step()
    judge = next(way for way in ways if way.name == "ddp").parameters()
    errors = [max((a - b).abs().max().item() for a, b in zip(way.parameters(), judge, strict=True)) for way in ways]
    error = worst(max(errors))
    largest = max(p.abs().max().item() for p in judge)
    assert error <= 1e-6 * max(1.0, largest) * 4, f"the ways disagree by {errors}: {[w.name for w in ways]}"
    assert all(torch.isfinite(p).all() for p in judge)
    return error


def bandwidth(moved: int, peers: Any) -> float:
    """Bytes per second of all ranks together, reads and writes counted, copying as much as the step touches."""
    import time

    import torch

    n = min(max(moved // (2 * peers.world), 1 << 16), 1 << 28)
    source, target = torch.ones(n, dtype=torch.uint8), torch.empty(n, dtype=torch.uint8)
    times = []
    for _ in range(9):
        start_line(peers)
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return peers.world * 2 * n / worst(quarter(times))


class Way:
    """One way to take a step. `fill` gives this rank's gradients anew; `step` is what is timed."""

    name = ""
    available = True

    def __init__(self, rule: str, sizes: list[int], peers: Any) -> None:
        import torch

        self.rule, self.sizes, self.peers = rule, sizes, peers
        torch.manual_seed(0)
        self.start = [torch.randn(n) for n in sizes]
        torch.manual_seed(1 + peers.rank)
        self.fresh = [torch.randn(n) for n in sizes]
        self.set_up()

    def set_up(self) -> None:
        raise NotImplementedError

    def fill(self) -> None:
        for into, new in zip(self.gradients(), self.fresh, strict=True):
            into.copy_(new)

    def gradients(self) -> list[Any]:
        raise NotImplementedError

    def parameters(self) -> list[Any]:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError


class Fused(Way):
    """weft.optim as a user has it."""

    name = "weft"

    def set_up(self) -> None:
        import torch

        from weft import optim
        from weft.optim.base import kernel_of
        from weft.optim.rules import Numbers

        self.params = [torch.nn.Parameter(x.clone()) for x in self.start]
        kinds = {"adamw": optim.AdamW, "lamb": optim.Lamb, "sgd": optim.SGD}
        more = {"momentum": 0.9} if self.rule == "sgd" else {}
        self.optimizer = kinds[self.rule](self.params, **HYPER, **more)
        for p, home in zip(self.params, self.optimizer._banks[0].grad_views, strict=True):
            p.grad = home
        rule = self.optimizer.rule(self.optimizer.param_groups[0])
        self.bytes_per_element = kernel_of(rule, self.peers.world, Numbers(), False, "cpu").bytes_per_element

    def gradients(self) -> list[Any]:
        return [p.grad for p in self.params]

    def parameters(self) -> list[Any]:
        return [p.detach() for p in self.params]

    def step(self) -> None:
        self.optimizer.step()


class Flat(Way):
    """All tensors in one flat buffer, as DDP's buckets hold them: no copies are charged to the peers."""

    def set_up(self) -> None:
        import torch

        per = self.peers.world * 64
        self.total = -(-sum(self.sizes) // per) * per
        self.grad, self.weight = self.memory(), self.memory()
        self.weight[: sum(self.sizes)] = torch.cat(self.start)
        self.share = self.total // self.peers.world
        self.mine = slice(self.peers.rank * self.share, (self.peers.rank + 1) * self.share)
        self.prepare()

    def memory(self) -> Any:
        import torch

        return torch.zeros(self.total)

    def prepare(self) -> None:
        raise NotImplementedError

    def split(self, flat: Any) -> list[Any]:
        return list(flat[: sum(self.sizes)].split(self.sizes))

    def gradients(self) -> list[Any]:
        return self.split(self.grad)

    def parameters(self) -> list[Any]:
        return self.split(self.weight)

    def torch_optimizer(self, pieces: list[tuple[Any, Any]]) -> Any:
        """torch's own optimizer on these (parameter, gradient) views; LAMB as the usual foreach formulas, torch having none."""
        import torch

        params = []
        for weight, grad in pieces:
            p = torch.nn.Parameter(weight)
            p.grad = grad
            params.append(p)
        if self.rule == "adamw":
            return torch.optim.AdamW(params, **HYPER, fused=True).step
        if self.rule == "sgd":
            return torch.optim.SGD(params, **HYPER, momentum=0.9, fused=True).step
        return ForeachLamb(params, **HYPER).step


class ForeachLamb:
    """LAMB in torch's foreach ops."""

    def __init__(self, params: list[Any], lr: float, weight_decay: float) -> None:
        import torch

        self.params, self.lr, self.decay, self.t = [p.data for p in params], lr, weight_decay, 0
        self.grads = [p.grad for p in params]
        self.m, self.v = ([torch.zeros_like(p) for p in self.params] for _ in range(2))

    def step(self) -> None:
        import torch

        self.t += 1
        torch._foreach_lerp_(self.m, self.grads, 0.1)
        torch._foreach_mul_(self.v, 0.999)
        torch._foreach_addcmul_(self.v, self.grads, self.grads, 0.001)
        root = torch._foreach_div(self.v, 1 - 0.999**self.t)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, 1e-6)
        way = torch._foreach_div(self.m, root)
        torch._foreach_div_(way, 1 - 0.9**self.t)
        torch._foreach_add_(way, self.params, alpha=self.decay)
        far, long = torch._foreach_norm(way), torch._foreach_norm(self.params)
        trust = [a / b if a > 0 and b > 0 else torch.ones(()) for a, b in zip(long, far, strict=True)]
        torch._foreach_mul_(way, trust)
        torch._foreach_add_(self.params, way, alpha=-self.lr)


class DdpGloo(Flat):
    name = "ddp"

    def prepare(self) -> None:
        self.update = self.torch_optimizer(list(zip(self.parameters(), self.gradients(), strict=True)))

    def step(self) -> None:
        import torch.distributed as dist

        bucket = 25 * 2**20 // 4
        works = [dist.all_reduce(part, async_op=True) for part in self.grad.split(bucket)]
        for work in works:
            work.wait()
        self.grad.div_(self.peers.world)
        self.update()


class ShardedGloo(Flat):
    name = "sharded_gloo"

    def prepare(self) -> None:
        import torch

        self.available = self.rule != "lamb"  # a tensor's norm needs all of its slices
        self.received = torch.empty(self.total)
        self.shard_grad, self.shard = torch.zeros(self.share), self.weight[self.mine].clone()
        self.update = self.torch_optimizer([(self.shard, self.shard_grad)])

    def step(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_to_all_single(self.received, self.grad)
        torch.sum(self.received.view(self.peers.world, -1), 0, out=self.shard_grad)
        self.shard_grad.div_(self.peers.world)
        self.update()
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(self.weight, self.shard)  # renamed in torch 2.13


class Shared(Flat):
    """Buffers in shared memory, and collectives from the same generator as the fused kernel."""

    def memory(self) -> Any:
        import torch

        buffer = self.peers.empty(4 * self.total)
        self.buffers = [*getattr(self, "buffers", []), buffer]
        return buffer.view(0, (self.total,), torch.float32)

    def collective(self, name: str, own: Any = None) -> Any:
        from weft.codegen.expr import Group, Slot, load, reduce
        from weft.codegen.kernel import compile_group
        from weft.runtime.fused import Row, bind

        g, w, s = Slot("g", "f32", spread=True), Slot("w", "f32", spread=True), Slot("s", "f32")
        mean = reduce(g) * (1 / self.peers.world)
        stores = {"all_reduce": (g, mean), "reduce_scatter": (s, mean), "all_gather": (w, load(s))}
        offset = 4 * self.mine.start
        at = {slot: [a + offset for a in b.addresses] for slot, b in zip("gw", self.buffers, strict=True)}
        if own is not None:
            at["s"] = own.data_ptr()
        kernel = compile_group(Group(name, (stores[name],)), self.peers.world)
        return bind(kernel, [Row(self.share, at)], self.peers)


class DdpShared(Shared):
    name = "ddp_shm"

    def prepare(self) -> None:
        self.all_reduce = self.collective("all_reduce")
        self.update = self.torch_optimizer(list(zip(self.parameters(), self.gradients(), strict=True)))

    def step(self) -> None:
        self.all_reduce()
        self.update()


class ShardedShared(Shared):
    name = "sharded"

    def prepare(self) -> None:
        import torch

        self.available = self.rule != "lamb"
        self.shard_grad, self.shard = torch.zeros(self.share), self.weight[self.mine].clone()
        self.scatter = self.collective("reduce_scatter", self.shard_grad)
        self.gather = self.collective("all_gather", self.shard)
        self.update = self.torch_optimizer([(self.shard, self.shard_grad)])

    def step(self) -> None:
        self.scatter()
        self.update()
        self.gather()


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
