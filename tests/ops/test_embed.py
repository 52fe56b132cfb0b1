"""Lookups, orders and losses beyond layouts: dtypes, what is pending, sources, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft.ops
from weft import interp
from weft.autodiff import grad, vjp
from weft.core.errors import TypeMismatch
from weft.core.layout import Mesh, P, R, S
from weft.core.text import parse
from weft.frontend.trace import f64, i64, tensor, trace
from weft.ops import embed, fill, loss, order

MESH = Mesh(a=2)


@pytest.mark.parametrize("cut", ["vocabulary", "tokens", "features"])
def test_embedding_and_its_gradient(cut: str) -> None:
    """Rows read where they are held: pending by vocabulary; gradients pending by tokens, cut by vocabulary."""
    places = {"vocabulary": (S(0), R), "tokens": (R, S(0)), "features": (S(1), R)}[cut]
    p = trace(embed.embedding, MESH, weight=f64(7, 4, a=places[0]), index=i64(5, a=places[1]))
    assert p.output_names["out"].type.on("a") == {"vocabulary": P(), "tokens": S(0), "features": S(1)}[cut]
    assert vjp(p).output_names["d.weight"].type.on("a") == {"vocabulary": S(0), "tokens": P(), "features": S(1)}[cut]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("index", ["i64", "i32"])
def test_embedding_dtypes(dtype: str, index: str) -> None:
    p = trace(embed.embedding, Mesh(a=3), weight=tensor(dtype, 7, 4, a=S(0)), index=tensor(index, 5))
    w, i = torch.randn(7, 4).to(p.inputs[0].dtype), torch.tensor([0, 6, 3, 3, 2]).to(p.inputs[1].dtype)
    got = interp.run_ranks(p, {"weight": interp.distribute(w, p.inputs[0].type), "index": [i] * 3})["out"]
    assert torch.equal(sum(got), F.embedding(i, w))  # one term is the row, the others are zero: exact in every dtype
    assert torch.equal(interp.run_global(p, {"weight": w, "index": i})["out"], F.embedding(i, w))


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize("place", [R, S(0), S(1)], ids=str)
def test_cross_entropy_dtypes(dtype: str, tolerance: float, place: Any) -> None:
    along = S(0) if place == S(0) else R
    p = grad(trace(loss.cross_entropy, MESH, logits=tensor(dtype, 5, 7, a=place), target=i64(5, a=along)), reduce=True)
    torch.manual_seed(0)
    x, t = torch.randn(5, 7).to(p.inputs[0].dtype), torch.tensor([0, 6, -100, 3, 3])
    leaf = x.float().requires_grad_()
    want = F.cross_entropy(leaf, t)
    want.backward()
    got = interp.run(p, {"logits": x, "target": t}, tolerance=tolerance)
    assert (got["out"].dtype, got["d.logits"].dtype) == (torch.float32, x.dtype)
    torch.testing.assert_close(got["out"], want.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got["d.logits"].float(), leaf.grad, rtol=tolerance, atol=tolerance)


def test_mean_is_over_the_kept_targets_of_all_ranks() -> None:
    """One rank keeps all its targets, the other one of three: a mean of means would be wrong."""
    p = trace(loss.cross_entropy, MESH, logits=f64(6, 4, a=S(0)), target=i64(6, a=S(0)))
    x, t = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, -100, -100])
    torch.testing.assert_close(interp.run(p, {"logits": x, "target": t})["out"], F.cross_entropy(x, t))
    assert p.output_names["out"].type.on("a") == P()


def test_all_targets_ignored_is_no_number_as_in_torch() -> None:
    p = trace(loss.cross_entropy, MESH, logits=f64(2, 4), target=i64(2))
    x, t = torch.randn(2, 4, dtype=torch.float64), torch.tensor([-100, -100])
    assert math.isnan(interp.run_global(p, {"logits": x, "target": t})["out"])
    assert math.isnan(F.cross_entropy(x, t))


def test_whole_vocabulary_is_one_op_each_way() -> None:
    p = trace(lambda x, t: loss.cross_entropy(x, t, reduction="sum"), MESH, x=f64(5, 4, a=S(0)), t=i64(5, a=S(0)))
    names = [n.op.name for n in grad(p, wrt=["x"]).nodes]
    assert names.count("cross_entropy") == names.count("cross_entropy_backward") == 1
    assert "softmax" not in names
    assert "all_reduce" not in names


def test_cut_vocabulary_costs_three_small_reductions() -> None:
    p = trace(lambda x, t: loss.token_losses(x, t), MESH, x=f64(5, 4, a=S(1)), t=i64(5))
    sums = [n for n in p.nodes if n.op.name == "all_reduce"]
    assert [str(n.args[0].type.on("a")) for n in sums] == ["P(max)", "P", "P"]
    assert all(math.prod(n.shape) == 5 for n in sums)
    assert "all_gather" not in p.text


def test_ties_go_where_torchs_go() -> None:
    p = trace(lambda x: {"k": list(order.topk(x, 2)), "best": order.argmax(x, 1)}, MESH, x=f64(3, 4, a=S(0)))
    x = torch.tensor([[1.0, 2, 2, 1], [0, 0, 0, 0], [3, 1, 3, 3]], dtype=torch.float64)
    got = interp.run(p, {"x": x})
    assert got["k.1"].tolist() == torch.topk(x, 2).indices.tolist()
    assert got["best"].tolist() == torch.argmax(x, 1).tolist()


def test_sources_print_and_parse_back() -> None:
    def fn(x: Any) -> Any:
        low = fill.full(x.shape, -math.inf, x.mesh, x.dtype, fill.shardings_of(x))
        return weft.ops.pointwise.maximum(low, x) * fill.arange(5, x.mesh, dtype="f64", shards=(("a", 0, None),))

    p = trace(fn, MESH, x=f64(5, a=S(0)))
    assert parse(p.text).text == p.text
    x = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(interp.run(p, {"x": x})["out"], x * torch.arange(5))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_sources_are_made_slice_by_slice(size: int) -> None:
    """Uneven and empty slices among them."""
    mesh = Mesh(a=2, b=3)
    p = trace(lambda x: fill.arange(size, mesh, start=1, step=2, shards=(("a", 0, None), ("b", 0, None))), mesh, x=f64())
    got = interp.run_ranks(p, {"x": [torch.zeros((), dtype=torch.float64)] * 6})["out"]
    assert torch.cat(got).tolist() == list(range(1, 1 + 2 * size, 2))


def test_exact_over_a_field() -> None:
    p = trace(lambda w, i: order.cumsum(embed.embedding(w, i), 1), MESH, w=f64(7, 4, a=S(0)), i=i64(5))
    w, i = torch.randint(0, interp.PRIME, (7, 4)), torch.tensor([0, 6, 3, 3, 2])
    want = F.embedding(i, w).cumsum(1) % interp.PRIME
    assert torch.equal(interp.run_global(p, {"w": w, "i": i}, prime=interp.PRIME)["out"], want)
    assert torch.equal(interp.run(p, {"w": w, "i": i}, prime=interp.PRIME)["out"], want)


def test_second_gradients_of_lookups() -> None:
    """put is take's transpose and the other way round."""
    p = vjp(vjp(trace(lambda x, i: embed.put(x, i, fill.arange(4, x.mesh), 0), MESH, x=f64(5, 2, a=S(0)), i=i64(5, a=S(0)))))
    assert {n.op.name for n in p.nodes} >= {"put"}


def test_a_float_index_is_refused() -> None:
    with pytest.raises(TypeMismatch) as e:
        trace(embed.embedding, MESH, weight=f64(7, 4), index=f64(5))
    assert "take looks up by integers" in str(e.value)
    assert "needed  i64 or i32 in operand 1" in str(e.value)
    assert "found   f64[5] a:R" in str(e.value)


def test_rows_and_tokens_cut_by_one_axis_are_refused() -> None:
    with pytest.raises(TypeMismatch) as e:
        trace(embed.embedding, MESH, weight=f64(6, 4, a=S(0)), index=i64(4, a=S(0)))
    assert "needed  axis a to shard one label" in str(e.value)


def test_order_along_a_cut_dim_is_refused() -> None:
    for fn in (lambda x: order.cumsum(x, 0), lambda x: order.topk(x, 2, 0)[0], lambda x: order.argmax(x, 0)):
        with pytest.raises(TypeMismatch, match="needs in full, unsharded"):
            trace(fn, MESH, x=f64(5, 4, a=S(0)))


def test_topk_of_too_many_is_refused() -> None:
    with pytest.raises(TypeMismatch, match="topk asks for more than there is"):
        trace(lambda x: order.topk(x, 5)[0], MESH, x=f64(3, 4))


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(TypeMismatch, match="mean, sum or none"):
        trace(lambda x, t: loss.cross_entropy(x, t, reduction="avg"), MESH, x=f64(3, 4), t=i64(3))


def test_scatter_of_another_dtype_is_refused() -> None:
    with pytest.raises(TypeMismatch, match="scatter writes its own dtype"):
        trace(lambda x, i, s: embed.scatter(x, i, s, 0), MESH, x=f64(3, 4), i=i64(2, 4), s=tensor("f32", 2, 4))


@pytest.mark.parametrize(("shape", "dim"), [((5, 3), 0), ((2, 5), 1)])
def test_rows_are_found_without_a_search_where_code_is_traced(shape: tuple[int, ...], dim: int) -> None:
    """Inductor of torch 2.11 cannot search in a view; rows without a gap need no search at all."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from weft.runtime import library_kernels

    index = torch.tensor([7, 2, 2, 11, 5])
    x = torch.randn(*shape[:dim], 5, *shape[dim + 1 :], dtype=torch.float64)
    whole = x.new_zeros(*shape[:dim], 12, *shape[dim + 1 :]).index_add_(dim, index, x)
    for rows in (range(2, 7), range(12), range(11, 12)):
        held = torch.arange(12)[rows.start : rows.stop]
        want = whole.narrow(dim, rows.start, len(rows))
        torch.testing.assert_close(library_kernels.put_run(x, index, dim=dim, rows=rows), want)
        traced = make_fx(lambda x, i, r: library_kernels.put(x, i, r.view(-1), dim=dim), tracing_mode="fake")(x, index, held)
        assert not any("searchsorted" in str(n.target) for n in traced.graph.nodes)
        torch.testing.assert_close(traced(x, index, held), want)
        at, hit = embed.find(index, held)
        traced = make_fx(embed.find, tracing_mode="fake")(index, held)
        assert [t.tolist() for t in traced(index, held)] == [at.tolist(), hit.tolist()]


def test_a_rank_knows_which_rows_it_holds_without_a_gap() -> None:
    mesh = Mesh(a=2, b=3)
    for cuts in ({"a": S(0)}, {"a": S(0), "b": S(0)}, {"b": S(0)}):
        layout = trace(lambda x: x, mesh, x=f64(11, **cuts)).inputs[0].layout
        for rank in range(mesh.ranks):
            at = mesh.coords(rank)
            run = layout.run(0, at)
            assert run is not None and list(run) == layout.positions(0, at).tolist()
    folded = trace(lambda x: embed.reshape(x, (12,)), mesh, x=f64(3, 4, a=S(1))).outputs[0][1].layout
    assert folded.run(0, {"a": 1, "b": 0}) is None  # the second half of each of three
