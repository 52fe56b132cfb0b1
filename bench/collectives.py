"""Collectives over shared memory by generated kernels against gloo, on CPU ranks: latency to bandwidth."""

from __future__ import annotations

from typing import Any

import typer

from bench._ranks import machine, run_ranks, time_rounds, worst


def register(app: typer.Typer) -> None:
    app.command("collectives")(collectives)


def collectives(
    json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    ranks: int = typer.Option(2, help="Processes to start."),
) -> None:
    """all_reduce, reduce_scatter and all_gather from 4 KB to 64 MB."""
    from rich.table import Table

    from weft.cli.output import console, emit

    rows = run_ranks(measure, ranks)
    table = Table("case", "weft ms", "limit ms", "gloo ms", "gloo / weft")
    for row in rows:
        table.add_row(
            row["case"], f"{row['weft_ms']:.4f}", f"{row['limit_ms']:.4f}", f"{row['peers_ms']['gloo']:.4f}", f"{row['ratios']['gloo']:.1f}"
        )
    console.print(table)
    if json:
        emit({"bench": "collectives", "machine": machine(), "rows": rows})


def measure(rank: int, world: int) -> list[dict[str, Any]]:
    return [one(op, 1 << k) for op in ("all_reduce", "reduce_scatter", "all_gather") for k in (10, 14, 18, 22, 24)]


def one(op: str, elements: int) -> dict[str, Any]:
    """One collective over `elements` float32 values on every rank, first compared, then timed."""
    import torch

    from bench.optimizer import bandwidth
    from weft.runtime.peers import connect

    peers = connect()
    ours, theirs = Shared(op, elements, peers), Gloo(op, elements, peers)
    for way in (ours, theirs):
        way.fill()
        peers.barrier("filled")
        way.run()
    error = worst((ours.result() - theirs.result()).abs().max().item())
    assert error < 1e-5, f"{op} of {elements} is off by {error}"
    assert torch.isfinite(ours.result()).all()
    rounds = 12 if elements < 1 << 20 else 4
    ms = time_rounds({"weft": ours.run, "gloo": theirs.run}, {"weft": ours.fill, "gloo": theirs.fill}, peers, rounds)
    moved = ours.bytes_per_element * elements
    return {
        "case": f"{op} {4 * elements // 1024} KB", "weft_ms": ms["weft"], "peers_ms": {"gloo": ms["gloo"]},
        "ratios": {"gloo": ms["gloo"] / ms["weft"]}, "limit_ms": 1e3 * moved / bandwidth(moved, peers), "bytes": moved,
        "correct": f"largest difference from gloo {error:.1e}",
    }  # fmt: skip


class Shared:
    """A generated kernel over shared memory; results are in the buffers users would read."""

    def __init__(self, op: str, elements: int, peers: Any) -> None:
        import torch

        from weft.codegen.expr import Group, Slot, load, reduce
        from weft.codegen.kernel import compile_group
        from weft.runtime.fused import Row, bind

        self.op, self.peers = op, peers
        share = elements // peers.world
        self.buffer = peers.empty(4 * elements)
        self.whole = self.buffer.view(0, (elements,), torch.float32)
        self.part = torch.zeros(share)
        torch.manual_seed(peers.rank)
        self.fresh, self.fresh_part = torch.randn(elements), torch.randn(share)
        spread, own = Slot("whole", "f32", spread=True), Slot("part", "f32")
        stores = {"all_reduce": (spread, reduce(spread)), "reduce_scatter": (own, reduce(spread)), "all_gather": (spread, load(own))}
        kernel = compile_group(Group(op, (stores[op],)), peers.world)
        self.bytes_per_element = kernel.bytes_per_element
        at = {"whole": [a + 4 * share * peers.rank for a in self.buffer.addresses], "part": self.part.data_ptr()}
        self.run = bind(kernel, [Row(share, at)], peers)

    def fill(self) -> None:
        if self.op == "all_gather":
            self.part.copy_(self.fresh_part)
        else:
            self.whole.copy_(self.fresh)

    def result(self) -> Any:
        return self.part if self.op == "reduce_scatter" else self.whole


class Gloo:
    """The same through torch.distributed; its reduce_scatter as all_to_all and sum, which moves half of what gloo's own moves."""

    def __init__(self, op: str, elements: int, peers: Any) -> None:
        import torch

        self.op, self.world = op, peers.world
        share = elements // peers.world
        self.whole, self.got, self.part = torch.zeros(elements), torch.zeros(elements), torch.zeros(share)
        torch.manual_seed(peers.rank)
        self.fresh, self.fresh_part = torch.randn(elements), torch.randn(share)

    def fill(self) -> None:
        if self.op == "all_gather":
            self.part.copy_(self.fresh_part)
        else:
            self.whole.copy_(self.fresh)

    def run(self) -> None:
        import torch
        import torch.distributed as dist

        if self.op == "all_reduce":
            dist.all_reduce(self.whole)
        elif self.op == "reduce_scatter":
            dist.all_to_all_single(self.got, self.whole)
            torch.sum(self.got.view(self.world, -1), 0, out=self.part)
        else:
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(self.whole, self.part)

    def result(self) -> Any:
        return self.part if self.op == "reduce_scatter" else self.whole
