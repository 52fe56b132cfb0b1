"""Programs as records: sizes of the busiest rank, what is sent, what a fused kernel saves, what is held."""

from __future__ import annotations

from typing import Any

import pytest

from weft import lang as w
from weft.cluster.spec import cluster
from weft.core.layout import Mesh, P, S
from weft.core.program import Program
from weft.cost.memory import live_bytes, peak_bytes
from weft.cost.price import device_seconds, on_mesh
from weft.cost.simulate import predict
from weft.cost.work import Collective, Gemm, MemoryBound, Op, by_place, matmul_sizes, records
from weft.frontend.trace import tensor, trace
from weft.ops.attention import attention
from weft.ops.experts import experts
from weft.ops.registry import nbytes
from weft.plan.sent_alone import sent_alone
from weft.programs.blocks import mlp, self_attention
from weft.schedule import sink, split
from weft.schedule.groups import fuse

BATCH, SEQ, HIDDEN = 2, 64, 128


def block(tp: int) -> Program:
    return mlp(Mesh(tp=tp), BATCH, SEQ, HIDDEN)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_products_shrink_with_the_cut(tp: int) -> None:
    products = [op for op in records(block(tp)) if isinstance(op, Gemm)]
    assert [(op.m, op.n, op.k) for op in products] == [
        (BATCH * SEQ, 4 * HIDDEN // tp, HIDDEN),
        (BATCH * SEQ, HIDDEN, 4 * HIDDEN // tp),
    ]


def test_the_sum_is_of_the_whole_tensor() -> None:
    (sent,) = [op for op in records(block(4)) if isinstance(op, Collective)]
    assert (sent.kind, sent.axis, sent.bytes) == ("all_reduce", "tp", BATCH * SEQ * HIDDEN * 4)


def test_a_fused_kernel_touches_less() -> None:
    wide = tensor("f32", BATCH * SEQ, 4 * HIDDEN)
    plain = trace(lambda x, y: w.gelu(x + y), Mesh(tp=1), x=wide, y=wide)
    fused = fuse(plain, [n for n in plain.nodes if n.op.name in ("add", "gelu")])
    less = sum(op.bytes for op in records(plain) if isinstance(op, MemoryBound)) - sum(op.bytes for op in records(fused) if isinstance(op, MemoryBound))
    assert less == 2 * BATCH * SEQ * 4 * HIDDEN * 4  # the sum is neither written nor read again


def test_a_fused_kernel_touches_its_own_slices_and_what_peers_send() -> None:
    """Of what it scatters and gathers a rank reads and writes a slice here; the rest is its peers', and counted as sent."""
    whole, mesh = 64 * 4, Mesh(dp=4)
    plain = split(trace(lambda g: w.gelu(w.all_reduce(g, "dp")), mesh, g=tensor("f32", 64, dp=P("sum"))), "%0", dim=0)
    p = sink(plain, plain.find("all_gather"))
    fused = fuse(p, [n for n in p.nodes if n.op.name in ("reduce_scatter", "gelu", "all_gather")])
    ops = records(fused)
    assert [op.bytes for op in ops if isinstance(op, MemoryBound)] == [2 * whole / 4]
    assert [(op.kind, op.bytes, op.peer) for op in ops if isinstance(op, Collective)] == [("reduce_scatter", whole, True), ("all_gather", whole, True)]


def test_a_bias_is_added_by_its_product() -> None:
    assert [op.name for op in records(block(1)) if isinstance(op, MemoryBound)].count("add") == 2  # the one after the sum over ranks, and the residual
    assert any(op.name == "fused add gelu" for op in records(fuse(block(1), [n for n in block(1).nodes if n.op.name in ("add", "gelu")][:2])))


def test_padded_pieces_are_laid_side_by_side_in_one_pass() -> None:
    piece = tensor("f32", 4, 8)
    made = records(trace(lambda a, b, c: w.pad(a, 0, 0, 8) + w.pad(b, 0, 4, 4) + w.pad(c, 0, 8, 0), Mesh(tp=1), a=piece, b=piece, c=piece))
    assert [(op.name, op.bytes) for op in made if isinstance(op, MemoryBound)] == [("concat", 2 * 12 * 8 * 4)]


def test_ops_take_a_rate_of_their_own_where_one_was_measured() -> None:
    from weft.cluster.profile import Constant, Device

    (gelu,) = [op for op in records(block(1)) if op.name == "gelu"]
    plain = cluster("H100").device
    slow = Device("slow", {**plain.constants, f"rate.{gelu.kind}": Constant(1e6, "measured")})
    assert device_seconds(slow, gelu) == pytest.approx(BATCH * SEQ * 4 * HIDDEN / 1e6)
    assert device_seconds(plain, gelu) < 1e-4


def test_time_has_causes() -> None:
    made = predict(block(4), cluster("4xH100"))
    assert made.causes_ms["tp"] > 0
    assert sum(made.causes_ms.values()) == pytest.approx(made.step_ms)
    assert predict(block(4), cluster("2x2xH100")).step_ms > made.step_ms


def test_bytes_held() -> None:
    one, four = peak_bytes(block(1)), peak_bytes(block(4))
    weights = 2 * HIDDEN * 4 * HIDDEN * 4
    assert one > weights + 2 * BATCH * SEQ * 4 * HIDDEN * 4
    assert four < one


def sent(program: Program) -> list[tuple[str, float]]:
    return [(op.kind, op.bytes) for op in records(program) if isinstance(op, Collective)]


def test_a_split_sum_sends_the_whole_tensor_twice() -> None:
    """Both halves are named by the bytes of the whole tensor, as collectives are priced."""
    halves = split(block(4), "all_reduce", dim=1)
    whole = BATCH * SEQ * HIDDEN * 4
    assert sent(halves) == [("reduce_scatter", whole), ("all_gather", whole)]


def test_a_slice_sends_nothing_and_is_a_copy_unless_it_lies_in_one_piece() -> None:
    columns, rows = (trace(lambda x, d=d: w.slice(x, "dp", d), Mesh(dp=4), x=tensor("f32", 16, 8)) for d in (1, 0))
    assert records(columns) == [MemoryBound("slice", 2 * 16 * 2 * 4)]
    assert records(rows) == []


def test_a_pad_is_a_pass_where_pieces_do_not_fill_the_sum() -> None:
    piece = tensor("f32", 4, 8)
    made = records(trace(lambda a, b: w.pad(a, 0, 0, 8) + w.pad(b, 0, 4, 4), Mesh(tp=1), a=piece, b=piece))
    assert [(op.name, op.bytes) for op in made if isinstance(op, MemoryBound)] == [("pad", (12 + 2 * 4) * 8 * 4)] * 2 + [("add", 3 * 12 * 8 * 4)]


@pytest.mark.parametrize(("within", "sizes"), [(None, ["all_gather"]), (16, ["all_gather", "all_gather laid out"])])
def test_pieces_that_interleave_are_laid_out(within: int | None, sizes: list[str]) -> None:
    """A dim of three times 16 whose inner part is cut lies in strips, each of which goes to its place."""
    p = trace(lambda x: w.all_gather(x, "tp"), Mesh(tp=2), x=tensor("f32", 48, 8, tp=S(0, within)))
    assert [op.name for op in records(p)] == sizes


def test_uneven_pieces_are_padded_and_cut() -> None:
    gathered = records(trace(lambda x: w.all_gather(x, "tp"), Mesh(tp=2), x=tensor("f32", 4, 17, tp=S(1))))
    scattered = records(trace(lambda x: w.reduce_scatter(x, "tp", 1), Mesh(tp=2), x=tensor("f32", 4, 17, tp=P("sum"))))
    whole = 4 * 17 * 4
    assert [(op.name, op.bytes) for op in gathered[-1:]] == [("all_gather of uneven pieces", 2 * whole)]
    assert [(op.name, op.bytes) for op in scattered[-1:]] == [("reduce_scatter of uneven pieces", 2 * whole)]


def test_uneven_parts_count_as_the_largest() -> None:
    program = trace(lambda a, b: a @ b, Mesh(dp=4), a=tensor("f32", 10, 8, dp=S(0)), b=tensor("f32", 8, 6))
    (product,) = [n for n in program.nodes if n.op.name == "matmul"]
    assert matmul_sizes(product) == (3, 6, 8, 1)


def test_views_and_inputs_cost_nothing() -> None:
    program = trace(lambda x: w.permute(w.reshape(x, 4, 2, 8), 1, 0, 2), Mesh(dp=2), x=tensor("f32", 8, 8))
    assert records(program) == []
    assert predict(program, cluster("2xA100")).step_ms == 0


def test_attention_is_priced_by_its_flops() -> None:
    def of(seq: int) -> MemoryBound:
        (op,) = [op for op in records(self_attention(Mesh(dp=1), 1, seq, 128, n_heads=2, p=0.0, tp=None)) if op.name == "attention"]
        assert isinstance(op, MemoryBound)
        return op

    assert of(128).share == "attention.forward"
    assert of(256).flops == pytest.approx(4 * of(128).flops)


def test_each_place_has_its_records() -> None:
    plain = block(2)
    pointwise = [n for n in plain.nodes if n.op.name in ("add", "gelu")][:2]
    fused = fuse(plain, pointwise)
    places = list(by_place(fused))
    assert [op for _, ops in places for op in ops] == records(fused)
    groups = [ops for place, ops in places if place in fused.groups]
    assert len(groups) == 1 and all(isinstance(op, Op) and op.name.startswith("fused") for op in groups[0])


def test_what_is_held_falls_when_a_value_is_last_used() -> None:
    program = block(1)
    held = live_bytes(program)
    assert len(held) == len(program.nodes)
    assert max(held) == peak_bytes(program)
    assert held[-1] < max(held)


def test_axes_lie_in_the_cluster_with_the_last_innermost() -> None:
    costs = on_mesh(cluster("2x4xA100"), Mesh(dp=2, tp=4))
    assert costs.ranks("tp").members == (4, 4), "all of tp lies in one node"
    assert costs.ranks("dp").members == (1, 2), "each of dp in a node of its own"
    assert costs.seconds(Collective("all_reduce", 2**24, "tp")) < costs.seconds(Collective("all_reduce", 2**24, "dp"))


def test_a_kernel_that_reaches_its_peers_launches_nothing() -> None:
    program = split(block(2), "all_reduce", dim=1)
    parts = [n for n in program.nodes if n.op.name in ("reduce_scatter", "all_gather")]
    place = cluster("2xx86-2")
    costs = on_mesh(place, program.mesh)
    sums = [Collective("reduce_scatter", 4096.0, "tp", peer=peer) for peer in (False, True)]
    alone, inside = (costs.seconds(op) for op in sums)
    assert inside < place.links[0].get("launch") < alone
    assert [op.peer for op in records(program) if isinstance(op, Collective)] == [False] * len(parts)


def test_attention_whose_rows_are_cut_reaches_memory() -> None:
    """Under a causal mask no library's kernel takes part of the rows."""

    def of(causal: bool, **cut: S) -> list[Op]:
        q, k = tensor("f32", 2, 2, 64, 32, **cut), tensor("f32", 2, 2, 64, 32)
        made = trace(lambda q, k, v: attention(q, k, v, causal=causal)[0], Mesh(cp=2), q=q, k=k, v=k)
        return [op for op in records(made) if "attention" in op.name]

    assert [type(op) for op in of(True)] == [MemoryBound]
    assert [type(op) for op in of(False, cp=S(2))] == [MemoryBound]
    product, _, scores, hard = of(True, cp=S(2))
    assert (product.m, product.n, product.k, product.batch) == (32, 64, 32, 4)
    assert (scores.bytes, hard.elements) == (11 * 4 * 32 * 64 * 4, 2 * 4 * 32 * 64)
    assert (scores.kind, scores.elements) == ("scores.attention", 4 * 32 * 64)


def test_pieces_that_do_not_lie_end_to_end_are_copied_into_place() -> None:
    def of(dim: int) -> list[str]:
        made = trace(lambda x: w.all_gather(x, "tp"), Mesh(tp=2), x=tensor("f32", 8, 8, tp=S(dim)))
        return [op.name for op in records(made)]

    assert of(0) == ["all_gather"]
    assert of(1) == ["all_gather", "all_gather laid out"]


def test_one_kernel_holds_only_what_leaves_it() -> None:
    plain = block(1)
    (gelu,) = plain.find_all("gelu")
    before = gelu.args[0]
    fused = fuse(plain, [before, gelu])
    at = plain.nodes.index(gelu)
    assert list(plain.users[before]) == [gelu]
    assert live_bytes(plain)[at] - live_bytes(fused)[at] == nbytes(before.type)


def test_state_is_written_over_by_its_kernel() -> None:
    made = trace(lambda x: {"x": x * 2.0 + 1.0}, Mesh(dp=1), x=tensor("f32", 16))
    nodes = [n for n in made.nodes if n.op.name in ("mul", "add")]
    assert made.state and peak_bytes(made) > 64 and peak_bytes(fuse(made, nodes)) == 64


@pytest.mark.parametrize(("ops", "walk"), [(("mul", "add", "sub"), "memory.in_place"), (("mul", "add"), "")])
def test_what_is_written_over_what_was_read_is_not_fetched_first(ops: tuple[str, ...], walk: str) -> None:
    """A kernel that updates state in place has the rate of such passes, where it was measured; one that writes elsewhere does not."""
    made = trace(lambda x, y: {"x": x * 2.0 + y - 1.0}, Mesh(dp=1), x=tensor("f32", 16), y=tensor("f32", 16))
    first = records(fuse(made, [n for n in made.nodes if n.op.name in ops]))[0]
    assert isinstance(first, MemoryBound) and first.walk == walk


def test_what_sent_tokens_leave_out_takes_no_time_and_no_memory() -> None:
    """Experts told to send: no rows are gathered or summed on their way, and the peak is that of a rank's own tokens."""

    def layer(x: Any, picks: Any, weights: Any, up: Any, down: Any) -> Any:
        rows = [w.all_gather(v, "ep") for v in (x, picks, weights)]
        return w.reduce_scatter(experts(*rows, up, down, act="silu"), "ep", 0)

    sizes = {"x": (64, 256), "picks": (64, 2), "weights": (64, 2), "up": (8, 32, 256), "down": (8, 256, 32)}
    given = {n: tensor("i64" if n == "picks" else "f32", *size, ep=S(0)) for n, size in sizes.items()}
    gathered = trace(layer, Mesh(ep=4), **given)
    alone = sent_alone(gathered, "ep")
    swap = ("all_to_all", 16 * 2 * 256 * 4)
    assert sent(alone) == [("all_gather", 64 * 2 * 8), ("all_gather", 64 * 2 * 4), swap, swap]
    given_bytes = sum(nbytes(n.type) for n in alone.inputs)
    assert peak_bytes(gathered) - given_bytes == 64 * 2 * (8 + 4) + 2 * 64 * 256 * 4  # picks, weights, tokens and their sum
    assert peak_bytes(alone) - given_bytes == 16 * 256 * 4  # a rank's own sum, once picks and weights are gone
