"""The design in small: every op in every layout it accepts, verbs, planner and real processes against one device."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from examples import small_weft as w

MESH = w.mesh(a=2, b=2)
PAIRS = {"mm": ((4, 8), (8, 12)), "mm_t": ((4, 8), (12, 8)), "t_mm": ((8, 4), (8, 12))}
OPS = ["mm", "mm_t", "t_mm", "add", "sub", "mul", "div", "scale", "above", "sqrt", "relu", "step"]


def held(shape):
    """Every type of this shape on the mesh."""
    for places in itertools.product([w.R, w.P, *(w.S(d) for d in range(len(shape)))], repeat=2):
        with contextlib.suppress(w.Refused):
            yield w.tensor(MESH, *shape, **dict(zip("ab", places, strict=True)))


@pytest.mark.parametrize("name", OPS)
def test_every_op_computes_its_global_value_in_every_layout_it_accepts(name):
    op, attrs = getattr(w, name), (0.5,) if name in ("scale", "above") else ()
    shapes = PAIRS.get(name) or (((4, 8), (4, 8)) if name in ("add", "sub", "mul", "div") else ((4, 8),))
    accepted = 0
    for types in itertools.product(*(held(s) for s in shapes)):
        inputs = [w.INPUT(f"x{i}", t) for i, t in enumerate(types)]
        try:
            p = w.Program({"out": op(*inputs, *attrs)})
        except w.Refused:
            continue
        values = {f"x{i}": torch.rand(t.shape, dtype=torch.float64) + 0.5 for i, t in enumerate(types)}
        torch.testing.assert_close(w.on_simulated_ranks(p, values), w.on_one_device(p, values))
        accepted += 1
    assert accepted >= 7


def test_a_sum_may_not_wait_past_what_is_not_linear():
    with pytest.raises(w.Refused, match="relu is not linear in what is partial along a: all_reduce it first"):
        w.relu(w.INPUT("x", w.tensor(MESH, 4, a=w.P)))


def test_a_product_cut_both_ways_along_one_axis_is_refused():
    with pytest.raises(w.Refused, match="diagonal block"):
        w.mm(w.INPUT("x", w.tensor(MESH, 4, 8, a=w.S(0))), w.INPUT("y", w.tensor(MESH, 8, 12, a=w.S(1))))


def test_three_verbs_make_zero1():
    m = w.mesh(dp=2)
    p = w.trace(w.adam, g=w.tensor(m, 8, dp=w.P), x=w.tensor(m, 8), m=w.tensor(m, 8), v=w.tensor(m, 8))
    q = w.zero1(p)
    assert w.same_meaning(p, q)
    assert [n.op.name for n in q.nodes if n.op.moves] == ["slice", "reduce_scatter", "all_gather"]
    assert {k: str(n.type.on("dp")) for k, n in q.inputs.items()} == {"x": "R", "m": "S(0)", "g": "P", "v": "S(0)"}
    values = w.random_inputs(p)
    torch.testing.assert_close(w.on_simulated_ranks(q, values), w.on_one_device(p, values))


def test_state_that_is_read_whole_is_not_sharded():
    m = w.mesh(dp=2)
    p = w.trace(w.adam, g=w.tensor(m, 8, dp=w.P), x=w.tensor(m, 8), m=w.tensor(m, 8), v=w.tensor(m, 8))
    with pytest.raises(w.Refused, match="m must be read in equal slices only, found scale"):
        w.shard_state(p, "m")


def test_a_rewrite_that_changes_a_value_is_caught():
    p = w.mlp_of(w.mesh(a=2), 4, 4)
    with pytest.raises(AssertionError):
        w.rebuild(p, lambda node, args: args[0] if node.op is w.relu else w.again(node, args))


def layouts(p):
    return {k: str(n.type.on("gpu")) for k, n in p.inputs.items()}


def test_the_planner_cuts_samples_or_weights_by_price_and_never_loses():
    many, few = w.mlp_of(w.mesh(gpu=2), 4096, 16), w.mlp_of(w.mesh(gpu=2), 8, 128)
    machine = w.Machine()
    a, b = w.plan(many, machine), w.plan(few, machine)
    assert layouts(a) == {"x": "S(0)", "y": "S(0)", "w1": "S(0)", "w2": "S(0)"}  # what others call FSDP
    assert (layouts(b)["w1"], layouts(b)["w2"]) == ("S(1)", "S(0)")  # what others call Megatron
    assert w.cost(a, machine) < 0.6 * w.cost(many, machine)
    assert w.plan(few, w.Machine(latency=1.0)) == few
    with pytest.raises(w.Refused, match="no placement fits 10 bytes"):
        w.plan(few, w.Machine(memory=10))


@pytest.mark.parametrize("axes", [{"gpu": 2}, {"dp": 2, "tp": 2}])
def test_real_processes_train_as_one_device_does(axes):
    m = w.mesh(**axes)
    p = w.mlp_of(m, 8, 8)
    types = {"w1": w.tensor(m, 8, 32, **{m.axes[-1][0]: w.S(1)}), "w2": w.tensor(m, 32, 8, **{m.axes[-1][0]: w.S(0)})}
    data = w.tensor(m, 8, 8, **({"dp": w.S(0)} if "dp" in axes else {}))
    q = w.place(p, {**types, "x": data, "y": data}, w.Machine())
    values = w.random_inputs(p)
    want = dict(values)
    for _ in range(3):
        want |= w.on_one_device(p, want)
    w.assert_same(w.on_real_ranks(q, values, steps=3), {k: want[k] for k in ("w1", "w2")})
