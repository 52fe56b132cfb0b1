"""Generated kernels equal their formulas: C++ on shared memory, Triton interpreted with real processes, and PTX for sm_90."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.codegen.groups import Bound, groups
from tests.ranks import run_interpreted_ranks, run_ranks
from weft.codegen.expr import Group, Slot, apply, load, reduce, total
from weft.codegen.kernel import compile_group
from weft.codegen.phases import split_phases
from weft.core.errors import KernelError
from weft.runtime import modules

SIZES = [1000, 37, 4096, 1, 5]


@pytest.mark.parametrize("world", [2, 3])
def test_cpp_kernels_equal_their_formulas(world: int, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        from weft.runtime.peers import connect

        for group in groups().values():
            bound = Bound(group, SIZES, connect(), "cpu")
            bound.run()
            bound.check()

    run_ranks(world, job, tmp_path)


def test_triton_kernels_equal_their_formulas_on_four_ranks(tmp_path: Path) -> None:
    """Under the interpreter, in a fresh interpreter process since triton reads the setting when it is imported."""
    run_interpreted_ranks(4, interpreted, tmp_path, seconds=100)


def interpreted(rank: int) -> None:
    from weft.runtime.launched import Launch
    from weft.runtime.peers import connect

    for name, group in groups().items():
        for launch in (Launch(128, 256, 4, 2, True), Launch(256, 256, 4, 64, False)):
            bound = Bound(group, [300, 37, 5], connect(), "triton", launch)
            bound.run()
            bound.call.check()
            connect().barrier(f"ran {name}")
            bound.check()


@pytest.mark.parametrize("name", list(groups()))
def test_triton_kernels_compile_for_sm90_with_wide_loads_and_system_scope(name: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = compile_group(groups()[name], 4, "triton")
    module = modules.load(kernel.source)
    for phase in range(kernel.phases):
        fn = getattr(module, f"phase{phase}")
        const = {"RANK": 1, "WORLD": 4, "LANES": 4, "CHUNK": 4096, "BLOCK": 2048, "ALIGN": 16, "ENTER": True, "LEAVE": True}
        types = {"table": "*i64", "work": "*i64", "pieces": "i32", "scalars": "*fp32", "sums_of": "*i64", "pads": "*i64", "LIMIT": "i32"}
        source = ASTSource(fn, {**types, **dict.fromkeys(const, "constexpr")}, {(fn.arg_names.index(k),): v for k, v in const.items()})
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        assert re.search(r"ld\.global[.a-z0-9:]*\.v4\.b32", ptx), "loads of 16 bytes"
        assert re.search(r"atom\.global\.sys\.release", ptx) or re.search(r"atom\.global\.release\.sys", ptx)
        assert re.search(r"atom\.global\.sys\.acquire", ptx) or re.search(r"atom\.global\.acquire\.sys", ptx)


def test_a_total_cuts_a_group_into_phases_that_move_the_fewest_bytes() -> None:
    found = groups()
    assert len(split_phases(found["adam"], 4).phases) == 1
    assert compile_group(found["adam"], 4).bytes_per_element == 8 * 4 + 20
    lamb = split_phases(found["lamb"], 4)
    assert [sorted(s.name for s, _ in p.stores) for p in lamb.phases] == [["m", "v"], ["w"]]
    assert not lamb.stash, "the direction is computed again from m and v, which are in memory anyway"
    clipped = split_phases(found["clipped lamb"], 4)
    assert len(clipped.phases) == 3
    assert [s.inside for s in clipped.stash] == ["g"], "the sum is kept in the gradient's own slice, not read from all ranks again"
    assert not split_phases(found["clipped lamb"], 2).stash, "with two ranks reading it again costs no more than keeping it"


def test_a_sum_is_written_the_same_whatever_the_number_of_tensors() -> None:
    kernel = compile_group(groups()["adam"], 2)
    assert "g_of[0][i] + g_of[1][i]" in kernel.source
    assert kernel.scalars == "lambda beta1, beta2, lr, step, eps, decay: " + kernel.scalars.split(": ", 1)[1]


def test_what_cannot_be_is_refused() -> None:
    own = Slot("m", "f32")
    with pytest.raises(KernelError, match="cannot reduce m") as e:
        reduce(own)
    assert "a spread slot" in str(e.value)
    with pytest.raises(KernelError, match="cannot apply frobnicate"):
        apply("frobnicate", 1.0)
    with pytest.raises(KernelError, match="names a slot twice"):
        Group("twice", ((own, load(own)), (own, load(own) * 2.0)))
    with pytest.raises(KernelError, match="stores no tensor"):
        Group("scalar", ((own, total(load(own))),))
