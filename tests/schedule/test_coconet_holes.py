"""What CoCoNet's compiler accepts and should not, or does and gets wrong: weft refuses each, or gets it right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft import interp
from weft.core.errors import InvalidProgram, InvalidTransform, TypeMismatch, WeftError
from weft.core.layout import Mesh, O, P, S
from weft.core.node import Node
from weft.core.program import Program, new_program
from weft.frontend.trace import f64, tensor, trace
from weft.ops import comm
from weft.ops.linalg import einsum
from weft.ops.pointwise import dropout, relu, sqrt, square, tanh, where
from weft.ops.reduce import sum_
from weft.schedule import delay, drop_dead, fuse, overlap, shard, shard_state, sink, split
from weft.testing.same import assert_same_meaning
from weft.testing.values import draw_inputs

MESH = Mesh(dp=3)


def traced(fn: Callable[..., Any], mesh: Mesh = MESH, **inputs: Any) -> Program:
    return trace(fn, mesh, **inputs)


def meaning(p: Program, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    return interp.run(p, {**draw_inputs(p), **given})


def agrees(p: Program, expected: Callable[..., Any]) -> None:
    """The program, rank by rank, is the torch function on the global tensors."""
    inputs = draw_inputs(p)
    torch.testing.assert_close(interp.run(p, inputs)["out"], expected(**inputs), rtol=1e-9, atol=1e-9)


# -- the language ----------------------------------------------------------------------------------------------------------------


def test_scalar_minus_tensor() -> None:
    agrees(traced(lambda w, lr: lr - w, w=f64(5, dp=S(0)), lr=f64()), lambda w, lr: lr - w)
    agrees(traced(lambda w: 2.0 - w, w=f64(5, dp=S(0))), lambda w: 2.0 - w)


def test_scalar_over_tensor() -> None:
    agrees(traced(lambda w, lr: lr / w, w=f64(5, dp=S(0)), lr=f64()), lambda w, lr: lr / w)
    agrees(traced(lambda w: 2.0 / w, w=f64(5)), lambda w: 2.0 / w)


def test_broadcast_by_leading_dims() -> None:
    agrees(traced(lambda x, b: x + b, x=f64(2, 4, 5, dp=S(1)), b=f64(5)), lambda x, b: x + b)
    with pytest.raises(TypeMismatch, match="equal sizes along"):
        traced(lambda x, b: x + b, x=f64(2, 4, 5), b=f64(4))


@pytest.mark.parametrize("fn", [lambda x: sqrt(square(x)), lambda x: where(x > 0.0, x, -x), lambda x: sum_(x), lambda x: relu(x)])
def test_one_op_alone_is_a_program(fn: Callable[[Any], Any]) -> None:
    """sqrt, a choice and a reduction each on their own."""
    p = traced(fn, x=f64(4, 3))
    assert_same_meaning(p, p)


def test_dtypes_do_not_mix_silently() -> None:
    with pytest.raises(TypeMismatch, match="several dtypes"):
        traced(lambda x, y: x + y, x=f64(4), y=tensor("f32", 4))


def test_a_norm_of_slices_is_a_pending_sum_and_not_a_number() -> None:
    p = traced(lambda x: sum_(square(x)), x=f64(7, dp=S(0)))
    assert p.output_names["out"].type.on("dp") == P()
    agrees(p, lambda x: x.square().sum())
    with pytest.raises(TypeMismatch, match="sqrt"):
        traced(lambda x: sqrt(sum_(square(x))), x=f64(7, dp=S(0)))


def test_all_reduce_of_a_replicated_value() -> None:
    with pytest.raises(TypeMismatch, match="all_reduce along dp has nothing to do here") as e:
        traced(lambda x: comm.all_reduce(x, axis="dp"), x=f64(4))
    assert e.value.needed == "dp:P in its operand"


def test_gather_of_what_is_not_cut() -> None:
    with pytest.raises(TypeMismatch, match="all_gather along dp has nothing to do here"):
        traced(lambda x: comm.all_gather(x, axis="dp"), x=f64(4, dp=P()))


def test_replicated_and_sliced_need_an_explicit_slice() -> None:
    with pytest.raises(TypeMismatch, match="add does not fit") as e:
        traced(lambda x, y: x + y, x=f64(6), y=f64(6, dp=S(0)))
    assert e.value.repairs == ("slice operand 0 along dp, or all_gather operand 1",)
    agrees(traced(lambda x, y: comm.slice_(x, axis="dp", dim=0) + y, x=f64(6), y=f64(6, dp=S(0))), lambda x, y: x + y)


def test_local_and_sliced_do_not_mix() -> None:
    with pytest.raises(TypeMismatch, match="sharded the same"):
        traced(lambda x, y: x + y, x=f64(6, dp=P()), y=f64(6, dp=S(0)))


def test_a_pending_sum_plus_a_whole_value() -> None:
    """Local + Replicated would count the second once per rank."""
    with pytest.raises(TypeMismatch, match="add does not fit") as e:
        traced(lambda x, y: x + y, x=f64(6, dp=P()), y=f64(6))
    assert "linear in operand 0" in str(e.value.needed)


def test_matmul_of_wrongly_sliced_operands() -> None:
    """CoCoNet calls any two sliced operands Local, whichever dims are cut."""
    right = traced(lambda x, w: x @ w, x=f64(4, 6, dp=S(1)), w=f64(6, 5, dp=S(0)))
    assert right.output_names["out"].type.on("dp") == P()
    agrees(right, lambda x, w: x @ w)
    for x, w in ((S(0), S(0)), (S(1), S(1)), (S(0), S(1))):
        with pytest.raises(TypeMismatch, match="matmul does not fit"):
            traced(lambda x, w: x @ w, x=f64(4, 6, dp=x), w=f64(6, 5, dp=w))


def test_matmul_of_any_batch_and_transpose() -> None:
    p = traced(lambda x, w: einsum("bij,bkj->bik", x, w), x=f64(2, 3, 4, dp=S(2)), w=f64(2, 5, 4, dp=S(2)))
    agrees(p, lambda x, w: x @ w.mT)


def test_uneven_sizes() -> None:
    """7 over 3 ranks: 3, 3 and 1, nothing padded, nothing read past the end."""
    p = traced(lambda g, w: w - comm.all_reduce(g, axis="dp"), g=f64(7, dp=P()), w=f64(7))
    q = sink(split(p, "all_reduce", dim=0), "all_gather")
    layout = q.find("reduce_scatter").layout
    assert [layout.local_shape(at) for at in MESH.places()] == [(3,), (3,), (1,)]
    assert_same_meaning(p, q)


def test_more_ranks_than_elements() -> None:
    p = traced(lambda g: comm.all_reduce(g, axis="dp") * 2.0, g=f64(2, dp=P()))
    assert_same_meaning(p, sink(split(p, "all_reduce", dim=0), "all_gather"))


def test_dropout_draws_one_number_per_element() -> None:
    p = traced(lambda x: dropout(x, 3, p=0.5, site=0), x=f64(40))
    kept = meaning(p, x=torch.ones(40, dtype=torch.float64))["out"]
    assert set(kept.tolist()) == {0.0, 2.0}  # scaled by 1 / (1 - p)
    assert 5 < int((kept > 0).sum()) < 35


def test_dropout_under_slicing() -> None:
    whole = traced(lambda x: dropout(x, 3, p=0.5, site=0), x=f64(6, 4))
    for place in (S(0), S(1)):
        part = traced(lambda x: dropout(x, 3, p=0.5, site=0), x=f64(6, 4, dp=place))
        assert torch.equal(meaning(whole)["out"], meaning(part)["out"])


def test_dropout_p_is_what_is_dropped() -> None:
    p = traced(lambda x: dropout(x, 3, p=0.1, site=0), x=f64(200))
    assert int((meaning(p, x=torch.ones(200, dtype=torch.float64))["out"] == 0).sum()) < 50


def test_two_dropouts_are_two() -> None:
    p = traced(lambda x: {"a": dropout(x, 3, p=0.5, site=0), "b": dropout(x, 3, p=0.5, site=1)}, x=f64(50))
    got = meaning(p)
    assert not torch.equal(got["a"], got["b"])


def test_a_slice_alone() -> None:
    agrees(traced(lambda w: comm.slice_(w, axis="dp", dim=0), w=f64(7)), lambda w: w)


def test_reduce_and_broadcast() -> None:
    p = traced(lambda g: comm.broadcast(comm.reduce_(g, axis="dp", root=2), axis="dp"), g=f64(5, dp=P()))
    agrees(p, lambda g: g)


def test_send_within_groups() -> None:
    """Each tensor-parallel rank of stage 0 sends its own slice to its fellow of stage 1, whatever the size of the world."""
    mesh = Mesh(pp=2, tp=3)
    p = traced(lambda x: comm.send(x, axis="pp", to=1), mesh, x=f64(7, pp=O(0), tp=S(0)))
    agrees(p, lambda x: x)
    sent = interp.run_ranks(p, {"x": interp.distribute(torch.arange(7.0), p.inputs[0].type)})["out"]
    assert [None if x is None else len(x) for x in sent] == [None, None, None, 3, 3, 1]


def test_send_backwards() -> None:
    agrees(traced(lambda x: comm.send(x, axis="dp", to=0), x=f64(4, dp=O(2))), lambda x: x)


# -- split -----------------------------------------------------------------------------------------------------------------------


def test_both_kinds_of_split_are_real() -> None:
    p = traced(lambda g: tanh(comm.all_reduce(g, axis="dp")), g=f64(6, dp=P()))
    scatter, root = split(p, "all_reduce", dim=0), split(p, "all_reduce", root=1)
    assert {n.op.name for n in scatter.nodes} == {"input", "reduce_scatter", "all_gather", "tanh"}
    assert {n.op.name for n in root.nodes} == {"input", "reduce", "broadcast", "tanh"}
    assert_same_meaning(p, scatter)
    assert_same_meaning(p, root)


def test_split_of_a_sum_that_is_an_output() -> None:
    p = traced(lambda g: comm.all_reduce(g, axis="dp"), g=f64(6, dp=P()))
    q = split(p, "all_reduce", dim=0)
    assert q.output_names["out"].op.name == "all_gather"
    assert q.find("reduce_scatter").args == (p.inputs[0],)  # the input itself, no alias of it
    assert_same_meaning(p, q)


# -- reorder ---------------------------------------------------------------------------------------------------------------------


def test_a_norm_brings_its_reduction() -> None:
    p = traced(lambda g: comm.all_reduce(g, axis="dp") / sqrt(sum_(square(comm.all_reduce(g, axis="dp")))), g=f64(7, dp=P()))
    q = sink(split(p, "all_reduce", dim=0), "all_gather")
    assert [n.shape for n in q.find_all("all_reduce")] == [()]
    assert_same_meaning(p, q)


def test_a_matmul_is_not_passed_along_the_dim_it_sums() -> None:
    p = traced(lambda x, w: comm.all_reduce(x, axis="dp") @ w, x=f64(4, 6, dp=P()), w=f64(6, 5))
    with pytest.raises(InvalidTransform, match="matmul sums over dim 1"):
        sink(split(p, "all_reduce", dim=1), "all_gather", past="matmul")
    assert_same_meaning(p, sink(split(p, "all_reduce", dim=0), "all_gather", past="matmul"))


def test_replicated_values_from_elsewhere_are_sliced() -> None:
    """CoCoNet slices input tensors only, not replicated results of other stages."""
    p = traced(lambda g, w: tanh(w) * comm.all_reduce(g, axis="dp"), g=f64(7, dp=P()), w=f64(7))
    q = sink(split(p, "all_reduce", dim=0), "all_gather")
    assert q.find("mul").type.on("dp") == S(0)
    assert_same_meaning(p, q)


def test_other_readers_of_a_gather_keep_it() -> None:
    def both(g: Node, w: Node) -> dict[str, Any]:
        y = comm.all_reduce(g, axis="dp")
        return {"a": y * 2.0, "b": y @ w}

    p = traced(both, g=f64(4, 6, dp=P()), w=f64(6, 2))
    q = sink(split(p, "all_reduce", dim=1), "all_gather", past="mul")
    assert q.find("matmul").args[0].op.name == "all_gather"
    assert_same_meaning(p, q)


def test_a_gather_that_is_an_output_stays_one() -> None:
    p = traced(lambda g: {"g": comm.all_reduce(g, axis="dp"), "y": tanh(comm.all_reduce(g, axis="dp"))}, g=f64(6, dp=P()))
    assert_same_meaning(p, sink(split(p, "all_reduce", dim=0), "all_gather"))


def test_dropout_is_passed_with_the_same_mask() -> None:
    p = traced(lambda g: dropout(comm.all_reduce(g, axis="dp"), 3, p=0.5, site=0), g=f64(7, dp=P()))
    q = sink(split(p, "all_reduce", dim=0), "all_gather")
    assert q.find("dropout").type.on("dp") == S(0)
    assert_same_meaning(p, q)


def test_a_sum_is_not_delayed_past_what_is_not_linear() -> None:
    p = traced(lambda g: tanh(comm.all_reduce(g, axis="dp")), g=f64(6, dp=P()))
    with pytest.raises(InvalidTransform, match="linear"):
        delay(p, "all_reduce")


# -- state -----------------------------------------------------------------------------------------------------------------------


def momentum() -> Program:
    def step(g: Node, m: Node, w: Node) -> dict[str, Any]:
        m = 0.9 * m + comm.all_reduce(g, axis="dp")
        return {"m": m, "w": w - 0.1 * m}

    return traced(step, g=f64(7, dp=P()), m=f64(7), w=f64(7))


def test_update_of_a_liveout() -> None:
    """State that is also an output is gathered, or stored cut for real; never half of each."""
    p = momentum()
    q = sink(split(p, "all_reduce", dim=0), "all_gather")
    assert q.output_names["m"].op.name == "all_gather"
    assert_same_meaning(p, q)


def test_sharded_state_is_cut_in_its_type() -> None:
    p = momentum()
    q = shard_state(sink(split(p, "all_reduce", dim=0), "all_gather"), "m")
    assert q.input_names["m"].type == q.output_names["m"].type
    assert q.input_names["m"].type.on("dp") == S(0)
    assert [n for n in q.nodes if n.op.name == "slice" and n.args[0] is q.input_names["m"]] == []
    assert len(q.find_all("all_gather")) == 1  # the weights'; the moment's is gone
    assert_same_meaning(p, q)


def test_sharded_state_over_steps() -> None:
    """Two steps of the cut program are two steps of the whole one."""
    p = momentum()
    q = shard_state(sink(split(p, "all_reduce", dim=0), "all_gather"), "m")
    now, then = draw_inputs(p), draw_inputs(p)
    for _ in range(2):
        now, then = {**now, **interp.run_global(p, now)}, {**then, **interp.run(q, then)}
    torch.testing.assert_close(then["w"], now["w"])


def test_state_read_whole_is_not_sharded() -> None:
    with pytest.raises(InvalidTransform, match="reads all of it"):
        shard_state(momentum(), "m")


def test_state_may_not_change_its_layout_on_the_way() -> None:
    with pytest.raises(InvalidProgram, match="would change its type"):
        trace(lambda m: {"m": comm.slice_(m, axis="dp", dim=0)}, MESH, m=f64(6), state={"m": "m"})


def test_what_is_dead_is_dropped() -> None:
    p = shard(momentum(), "w", axis="dp", dim=0)
    assert len(p.find_all("all_gather")) == len(p.find_all("slice")) == 1
    q = drop_dead(p)
    assert q.find_all("all_gather") == q.find_all("slice") == []
    assert_same_meaning(momentum(), q)


# -- fuse and overlap ------------------------------------------------------------------------------------------------------------


def chain() -> Program:
    return traced(lambda g, w: tanh(comm.all_reduce(g, axis="dp")) * w, g=f64(6, dp=P()), w=f64(6))


def test_fuse_around_a_middle_op() -> None:
    with pytest.raises(InvalidTransform, match="computed from the group and needed by it"):
        fuse(chain(), ["all_reduce", "mul"])


def test_two_collectives_in_one_fuse() -> None:
    p = traced(lambda a, b: comm.all_reduce(a, axis="dp") * comm.all_reduce(b, axis="dp"), a=f64(6, dp=P()), b=f64(6, dp=P()))
    with pytest.raises(InvalidTransform, match="at most one reduction of tensors"):
        fuse(p, [*p.find_all("all_reduce"), "mul"])


def test_a_member_that_cannot_be_fused_is_named() -> None:
    """Not skipped in the kernel."""
    p = traced(lambda x, w: comm.all_reduce(x @ w, axis="dp"), x=f64(4, 6, dp=S(1)), w=f64(6, 5, dp=S(0)))
    with pytest.raises(InvalidTransform, match="fuse with matmul"):
        fuse(p, ["matmul", "all_reduce"])


def test_overlap_of_unrelated_ops() -> None:
    p = traced(lambda a, b: {"a": tanh(a), "b": comm.all_reduce(b, axis="dp")}, a=f64(6), b=f64(6, dp=P()))
    with pytest.raises(InvalidTransform, match="to read a stage before it"):
        overlap(p, "tanh", "all_reduce", dim=0, chunks=2)


def test_overlap_of_what_cannot_be_chunked() -> None:
    p = traced(lambda x, w: comm.all_reduce(x, axis="dp") @ w, x=f64(4, 6, dp=P()), w=f64(6, 5))
    with pytest.raises(InvalidTransform, match="treat each chunk alone"):
        overlap(p, "all_reduce", "matmul", dim=1, chunks=2)
    assert overlap(p, "all_reduce", "matmul", dim=0, chunks=2).groups[0].option("chunks") == 2


def test_overlap_of_computation_alone() -> None:
    with pytest.raises(InvalidTransform, match="only computation"):
        overlap(chain(), "tanh", "mul", dim=0, chunks=2)


# -- names -----------------------------------------------------------------------------------------------------------------------


def scheduled(p: Program) -> Program:
    q = shard_state(sink(split(p, "all_reduce", dim=0), "all_gather"), p.inputs[1].attr("name"))
    return fuse(q, q.between("reduce_scatter", "all_gather"))


def test_names_do_not_matter() -> None:
    """CoCoNet picks its kernels by the name of the program; here another name changes nothing but the name."""
    p = momentum()
    called = new_program("adam", p.mesh, p.inputs, dict(p.outputs), state=p.state)
    assert scheduled(called).text.replace("program adam", "program step") == scheduled(p).text


def test_names_of_inputs_do_not_matter() -> None:
    def step(a: Node, b: Node, c: Node) -> dict[str, Any]:
        b = 0.9 * b + comm.all_reduce(a, axis="dp")
        return {"b": b, "c": c - 0.1 * b}

    other = scheduled(traced(step, a=f64(7, dp=P()), b=f64(7), c=f64(7))).text
    for new, old in (("a", "g"), ("b", "m"), ("c", "w")):
        other = re.sub(rf"%{new}\b", f"%{old}", re.sub(rf"\b{new}=", f"{old}=", re.sub(rf"={new}\b", f"={old}", other)))
    assert other == scheduled(momentum()).text


def test_bad_input_is_an_error_and_not_the_end() -> None:
    """CoCoNet's checks are asserts that end the process."""
    p = chain()
    for bad in (lambda: split(p, "tanh", dim=0), lambda: fuse(p, ["tanh"]), lambda: shard_state(p, "q"), lambda: traced(tanh, x=3)):
        with pytest.raises(WeftError):
            bad()
