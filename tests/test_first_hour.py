"""What a newcomer types wrong is refused, on the line that says it, rather than taken for something else."""

import pytest
import torch

import weft
from weft import Mesh, O, P, S
from weft.core.errors import InvalidProgram, InvalidTransform, LayoutError, NotDifferentiable, TypeMismatch, UnknownName, WeftError
from weft.core.node import DTYPES, OPS, Type, make
from weft.core.spec import validate
from weft.ops.source import input_node

MESH = Mesh(dp=2)


def refused(kind, fn, *words, **inputs):
    with pytest.raises(kind) as e:
        weft.trace(fn, MESH, **inputs)
    text = str(e.value)
    assert "test_first_hour.py, line" in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("placement", [P, S, O, "R", 0])
def test_what_is_no_placement_is_refused(placement):
    refused(LayoutError, lambda x: x + 1.0, "input 'x'", "P('max')", x=weft.f32(4, dp=placement))


@pytest.mark.parametrize("shape", [(-3,), (3.5,)])
def test_what_is_no_shape_is_refused(shape):
    refused(LayoutError, lambda x: x + 1.0, "integer sizes", x=weft.f32(*shape))


def test_python_may_not_ask_a_value():
    refused(TypeMismatch, lambda x: x if x > 0.0 else -x, "weft.lang.where", x=weft.f32(4))
    refused(TypeMismatch, lambda x: weft.where(x == 0.0, x, -x), "weft.lang.eq(x, 0.0)", x=weft.f32(4))
    refused(TypeMismatch, lambda x: weft.where(x != 0.0, x, -x), "weft.lang.ne", x=weft.f32(4))
    assert weft.trace(lambda x: weft.where(weft.eq(x, 0.0), x, abs(x)), MESH, x=weft.f32(4)).find("eq")


def test_an_unknown_axis_is_told_with_its_line():
    refused(LayoutError, lambda x: weft.all_reduce(x, "tp"), "no axis 'tp'", x=weft.f32(4, dp=P()))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: weft.permute(x, 0, 3),
        lambda x: weft.transpose(x, 0, 5),
        lambda x: weft.narrow(x, 5, 0, 1),
        lambda x: weft.concat([x, x], 2),
        lambda x: weft.pad(x, -3, 1, 1),
    ],
)
def test_a_dim_that_is_not_there_is_refused(fn):
    refused(TypeMismatch, fn, "in a tensor of 2 dims", "a dim from -2 to 1", x=weft.f32(3, 4))


def test_pad_concat_and_clamp_of_nothing():
    refused(TypeMismatch, lambda x: weft.pad(x, 0, -1, 0), "narrow(x", x=weft.f32(3))
    refused(TypeMismatch, lambda x: weft.concat([], 0), "at least one tensor", x=weft.f32(3))
    refused(TypeMismatch, lambda x: weft.clamp(x), "lo=, hi= or both", x=weft.f32(3))


def test_zero_and_minus_zero_are_two_numbers():
    program = weft.trace(lambda x: {"up": x / 0.0, "down": x / -0.0}, MESH, x=weft.f32(1))
    got = weft.interp.run(program, {"x": torch.ones(1)})
    assert (got["up"].item(), got["down"].item()) == (float("inf"), -float("inf"))
    assert str(weft.parse(str(program))) == str(program)


@pytest.mark.parametrize("dtype", ["i64", "i32", "u8", "bf16", "f16"])
def test_every_op_of_one_or_two_tensors_gives_the_dtype_it_declares(dtype):
    """An op either refuses the dtype when the program is written, or gives what its type says."""
    checked = 0
    for op in OPS.values():
        for k in (1, 2):
            args = tuple(input_node(f"a{i}", Type(DTYPES[dtype], weft.Layout.of(MESH, (4, 4)))) for i in range(k))
            if op.kind.name not in ("POINTWISE", "REDUCE"):
                continue
            try:
                node = make(op, args, {})
            except (WeftError, KeyError, IndexError):
                continue
            if op.name != "clamp":
                checked += 1
                assert op.run(*[torch.ones(4, 4, dtype=DTYPES[dtype])] * k).dtype == node.dtype, (op.name, dtype)
    assert checked > 15


@pytest.mark.parametrize(("here", "to", "op"), [("u8", "i64", "sum"), ("i8", "f32", "sum"), ("i64", "u8", "max"), ("u8", "i8", "min")])
def test_a_cast_under_a_pending_reduction_that_would_wrap_is_refused(here, to, op):
    refused(TypeMismatch, lambda x: weft.cast(x, to), "all_reduce it first", x=weft.tensor(here, 4, dp=P(op)))


def test_an_input_named_by_a_number_would_not_parse_back():
    with pytest.raises(InvalidProgram, match="number of a node"):
        weft.trace(lambda **kw: kw["0"] + 1.0, MESH, **{"0": weft.f32(3)})


def two_chains(x, y):
    return {"a": weft.sin(weft.exp(x)), "b": weft.sin(weft.exp(y))}


def test_two_kernels_may_not_wait_for_each_other():
    """k0 makes what k1 reads and reads what k1 makes; each is closed by itself, and neither could start."""
    p = weft.trace(two_chains, MESH, x=weft.f32(8), y=weft.f32(8))
    (e0, e1), (s0, s1) = p.find_all("exp"), p.find_all("sin")
    with pytest.raises(InvalidTransform, match="with the rest of k0 and needed by it"):
        weft.fuse(weft.fuse(p, [e0, s1]), [s0, e1])
    text = str(weft.fuse(p, [e0, s1])).replace("fuse k0: %0 %3", "fuse k0: %0 %3\n  fuse k1: %1 %2")
    with pytest.raises(InvalidProgram, match=r"needs .* outside it, which needs the group"):
        weft.parse(text)
    validate(weft.fuse(weft.fuse(p, [e0, s0]), [e1, s1]))


def test_shard_state_wants_a_name():
    p = weft.trace(two_chains, MESH, x=weft.f32(8), y=weft.f32(8))
    with pytest.raises(InvalidTransform, match="shard_state of nothing"):
        weft.shard_state(p)


def test_a_max_waits_past_what_keeps_the_order():
    x = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    for op in ("max", "min"):
        p = weft.trace(lambda a: weft.exp(weft.all_reduce(a, "dp")) + 1.0, MESH, a=weft.f64(3, dp=P(op)))
        q = weft.delay(weft.delay(p, "all_reduce"), "all_reduce")
        assert q.nodes[-1].op.name == "all_reduce"
        torch.testing.assert_close(weft.interp.run(q, {"a": x})["out"], x.exp() + 1.0)


@pytest.mark.parametrize("fn", [lambda a: 2.0 * weft.all_reduce(a, "dp"), lambda a: weft.sum(weft.all_reduce(a, "dp"))])
def test_a_max_does_not_wait_past_what_is_only_linear(fn):
    p = weft.trace(fn, MESH, a=weft.f32(8, dp=P("max")))
    with pytest.raises(InvalidTransform, match="keep the order of the partial max") as e:
        weft.delay(p, "all_reduce")
    assert "is cut along" not in str(e.value)


def test_the_interpreter_wants_every_input_in_its_shape():
    p = weft.trace(lambda a, b: a + b, MESH, a=weft.f32(5), b=weft.f32(5))
    with pytest.raises(InvalidProgram, match="no value for input 'b'"):
        weft.interp.run(p, {"a": torch.ones(5)})
    with pytest.raises(InvalidProgram, match="input 'a' has another shape"):
        weft.interp.run(p, {"a": torch.ones(4), "b": torch.ones(5)})


def test_gradients_of_and_by_what_is_not_there():
    p = weft.trace(lambda x: weft.sum(x), MESH, x=weft.f32(3))
    for asked in ({"of": "loss"}, {"wrt": ["w"]}):
        with pytest.raises(UnknownName, match="to differentiate"):
            weft.grad(p, **asked)
    with pytest.raises(NotDifferentiable, match="floating-point output"):
        weft.grad(weft.trace(lambda x: weft.sum(x), MESH, x=weft.i64(3)))
