"""Programs: naming a place, following it through rewrites, and what lies between two places."""

from __future__ import annotations

import pytest
import torch

from weft import interp
from weft.core.errors import AmbiguousPlace, InvalidProgram
from weft.core.layout import Mesh, P, S
from weft.core.program import Group, Program, new_program
from weft.frontend.trace import f64, trace
from weft.ops import comm, pointwise
from weft.ops.linalg import matmul

MESH = Mesh(tp=2)


def mlp(x, w, b, v):  # type: ignore[no-untyped-def]
    h = pointwise.gelu(matmul(x, w) + b)
    y = comm.all_reduce(matmul(h, v), axis="tp")
    return {"y": y + x, "h": h}


@pytest.fixture
def p() -> Program:
    return trace(mlp, MESH, x=f64(4, 6), w=f64(6, 8, tp=S(1)), b=f64(8, tp=S(0)), v=f64(8, 6, tp=S(0)))


def split(p: Program) -> Program:
    """The all_reduce as a reduce_scatter and an all_gather."""
    node = p.find("all_reduce")
    part = comm.reduce_scatter(node.args[0], axis="tp", dim=0)
    return p.rewrite({node: comm.all_gather(part, axis="tp")}, "split")


# -- naming a place --------------------------------------------------------------------------------------------------------------


def test_find_the_one(p: Program) -> None:
    assert p.find("gelu").op.name == "gelu"
    assert p.find("matmul", where=lambda n: n.shape == (4, 8)) is p.find("gelu").args[0].args[0]
    assert p.find_all("matmul") == [n for n in p.nodes if n.op.name == "matmul"]
    assert len(p.find_all()) == len(p.nodes)


def test_find_refuses_several_and_shows_them(p: Program) -> None:
    with pytest.raises(AmbiguousPlace) as e:
        p.find("matmul")
    assert str(e.value) == (
        "find('matmul') names 2 nodes of mlp\n\n"
        "  > %0 = matmul(%x, %w)              f64[4, 8] tp:S(1)\n"
        "  > %3 = matmul(%2, %v)              f64[4, 6] tp:P\n\n"
        "  needed  exactly one\n  found   2\n  try     find_all(...)[k], or where=lambda node: ..."
    )


def test_find_refuses_none_and_says_what_there_is(p: Program) -> None:
    with pytest.raises(AmbiguousPlace, match=r"names 0 nodes of mlp\n\n.*\n.*\n  try     one of add, all_reduce, gelu, input, matmul"):
        p.find("exp")


def test_at_takes_names_and_nodes(p: Program) -> None:
    assert p.at("gelu") is p.find("gelu") is p.at("h")
    assert p.at("y") is p.output_names["y"]
    assert p.at(p.find("all_reduce")) is p.find("all_reduce")
    assert p.at("%3") is p.find("all_reduce").args[0]
    assert p.at("%x") is p.input_names["x"]


def test_at_refuses_a_stranger(p: Program) -> None:
    stranger = trace(lambda z: pointwise.exp(z), MESH, z=f64(3), name="other").find("exp")
    with pytest.raises(AmbiguousPlace, match=r"<exp: f64\[3\] tp:R> is no place in mlp\n\n  needed  a node of this program"):
        p.at(stranger)
    with pytest.raises(AmbiguousPlace, match=r"%77 is no place in mlp\n\n  needed  one of %x"):
        p.at("%77")


def test_users_and_needs(p: Program) -> None:
    x = p.input_names["x"]
    assert {n.op.name for n in p.users[x]} == {"matmul", "add"}
    assert p.needs(p.find("gelu")) == {p.find("gelu"), *p.find("gelu").args, *p.needs(p.find("gelu").args[0])}
    assert p.find("all_reduce") not in p.needs(p.find("gelu"))


def test_nodes_stand_after_their_arguments_and_inputs_first(p: Program) -> None:
    order = {n: i for i, n in enumerate(p.nodes)}
    assert all(order[a] < order[n] for n in p.nodes for a in n.args)
    assert p.nodes[: len(p.inputs)] == p.inputs


def test_an_unused_input_stays() -> None:
    p = trace(lambda x, z: pointwise.exp(x), MESH, x=f64(3), z=f64(2), name="p")
    assert [n.attr("name") for n in p.nodes if n.op.name == "input"] == ["x", "z"]


# -- between ---------------------------------------------------------------------------------------------------------------------


def test_between_is_all_that_lies_on_the_ways(p: Program) -> None:
    names = [n.op.name for n in p.between("gelu", "all_reduce")]
    assert names == ["gelu", "matmul", "all_reduce"]
    assert p.between(p.find("all_reduce"), p.find("gelu")) == []
    first, last = p.find("gelu"), p.at("y")
    assert set(p.between(first, last)) == {n for n in p.nodes if first in p.needs(n) and n in p.needs(last)}


def test_between_takes_every_node_of_a_name(p: Program) -> None:
    assert [n.op.name for n in p.between("matmul", "matmul")] == ["matmul", "add", "gelu", "matmul"]


# -- rewrites --------------------------------------------------------------------------------------------------------------------


def test_rewrite_remakes_only_what_depends(p: Program) -> None:
    q = split(p)
    assert q.find("gelu") is p.find("gelu")
    assert q.find_all("all_reduce") == []
    assert [n.op.name for n in q.between("reduce_scatter", "all_gather")] == ["reduce_scatter", "all_gather"]
    assert (q.parent, q.step, q.history) == (p, "split", ["split"])
    assert p.find("all_reduce")  # nothing was mutated
    values = {n: torch.randn(node.shape, dtype=torch.float64) for n, node in p.input_names.items()}
    torch.testing.assert_close(interp.run(q, values)["y"], interp.run(p, values)["y"])


def test_handles_survive_rewrites(p: Program) -> None:
    reduced, last = p.find("all_reduce"), p.at("y")
    q = split(p)
    assert q.at(reduced) is q.find("all_gather")
    assert q.at(last) is q.output_names["y"]
    node = q.find("all_gather")
    part = comm.all_to_all(node.args[0], axis="tp", dim=1)
    r = q.rewrite({node: comm.all_gather(part, axis="tp")}, "again")
    assert r.at(reduced) is r.find("all_gather") is not node
    assert r.at(last) is r.output_names["y"]
    assert r.history == ["split", "again"]


def test_handles_survive_grouping_after_a_rewrite(p: Program) -> None:
    reduced, last = p.find("all_reduce"), p.at("y")
    q = split(p)
    g = q.with_groups([Group("fuse", "f", tuple(q.between("reduce_scatter", "all_gather")))], q, "fuse")
    assert g.at(reduced) is g.find("all_gather")
    assert g.at(last) is g.output_names["y"]
    assert g.history == ["split", "fuse"]


def test_a_handle_to_what_is_gone_is_refused(p: Program) -> None:
    q = p.with_outputs([("h", p.output_names["h"])], "drop_dead")
    assert q.at(p.find("gelu")) is p.find("gelu")
    with pytest.raises(AmbiguousPlace, match="is no place in mlp"):
        q.at(p.find("all_reduce"))


def test_groups_follow_a_rewrite(p: Program) -> None:
    group = Group("fuse", "tail", (p.find("all_reduce"), p.at("y")))
    q = split(p.with_groups([group], None, ""))
    assert q.groups[0].nodes == (q.find("all_gather"), q.at("y"))
    dropped = q.with_outputs([("h", q.output_names["h"])], "drop")
    assert dropped.groups == ()


def test_inputs_can_be_swapped(p: Program) -> None:
    x = p.input_names["x"]
    part = trace(lambda x: x, MESH, x=f64(*x.shape, tp=S(0)), name="part").inputs[0]
    whole = comm.all_gather(part, axis="tp")
    q = p.rewrite({x: whole}, "cut")
    with pytest.raises(InvalidProgram, match="input 'x' is read but not declared"):
        new_program(q.name, MESH, q.inputs, dict(q.outputs))
    q = q.with_outputs(q.outputs, "declare", inputs=(part, *q.inputs[1:]))
    assert str(q.input_names["x"].type) == "f64[4, 6] tp:S(0)"
    assert new_program(q.name, MESH, q.inputs, dict(q.outputs)).text == q.text


def test_lines_point_at_the_user(p: Program) -> None:
    assert p.lines[p.find("gelu")].startswith("test_program.py, line ")
    assert split(p).lines[split(p).at("y")] == p.lines[p.at("y")]


def test_state_is_by_name_and_type() -> None:
    step = trace(lambda x, g: {"x": x - g, "g": comm.all_reduce(g, axis="tp")}, MESH, x=f64(4, tp=P()), g=f64(4, tp=P()), name="sgd")
    assert step.state == (("x", "x"),)
