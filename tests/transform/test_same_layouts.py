"""Layouts of a placed program on other steps of the same model: node for node the step, held as the program where it has such nodes."""

from __future__ import annotations

import torch

import weft
from weft import Mesh, S, f32, f64, trace
from weft.core.program import Program
from weft.ops.shape import narrow
from weft.plan.place import place
from weft.rewrite.engine import same_erased
from weft.transform.same_layouts import with_same_layouts


def net(rows: int, dtype=f32, clip: bool = False) -> Program:
    """Halves of the rows, each with numbers of its own: the same op on the same operand, which only attributes tell apart."""

    def made(x, w):
        first, last = narrow(x, 0, 0, rows // 2), narrow(x, 0, rows // 2, rows)
        out = weft.relu(first @ w) * 2.0 + (last @ w) * float(rows)
        return weft.minimum(out, 1.0) if clip else out

    return trace(made, Mesh(), x=dtype(rows, 6), w=dtype(6, 4))


def placed(program: Program) -> Program:
    return place(program, Mesh(tp=2), {"w": {"tp": S(1)}})


def test_the_same_step_is_the_program_itself() -> None:
    found = with_same_layouts(placed(net(8)), net(8))
    assert found.program.text == placed(net(8)).text and not found.alone


def test_other_sizes_and_types_are_held_alike() -> None:
    for step in (net(12), net(8, f64)):
        found = with_same_layouts(placed(net(8)), step)
        assert same_erased(step, found.program) and not found.alone
        assert [str(n.layout.placements) for n in found.program.find_all("matmul")] == [
            str(n.layout.placements) for n in placed(net(8)).find_all("matmul")
        ]


def test_what_has_no_pair_is_placed_around_the_rest() -> None:
    step = net(8, clip=True)
    found = with_same_layouts(placed(net(8)), step)
    assert same_erased(step, found.program) and [n.op.name for n in found.alone] == ["minimum"]
    assert all(isinstance(n.layout.placement("tp"), S) for n in found.program.find_all("matmul"))


def test_sizes_that_cannot_be_cut_so_are_whole() -> None:
    def made(x, w):
        return x @ w

    before, after = (trace(made, Mesh(), x=f32(8, 6), w=f32(6, n)) for n in (4, 3))
    found = with_same_layouts(placed(before), after)
    assert same_erased(after, found.program) and found.program.input_names["w"].layout.where_sharded("tp") is None
    x, w = torch.randn(8, 6), torch.randn(6, 3)
    torch.testing.assert_close(weft.interp.run(found.program, {"x": x, "w": w})["out"], x @ w)
