"""Fuse groups of programs, run as kernels on real ranks, mean what the interpreter says: any slice, dtype, total, dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.ranks import run_interpreted_ranks, run_ranks
from weft import interp
from weft.api.compiled import Compiled
from weft.codegen import lower, show_code
from weft.codegen.fuse import NotFusable, fuse_group
from weft.core.layout import Mesh, P, S
from weft.core.program import Program
from weft.programs.catalog import EXAMPLES
from weft.schedule import fuse, recipes


def traced(fn: Any, mesh: Mesh, **inputs: Any) -> Program:
    """`fn` with all it computes in one kernel."""
    p = weft.trace(fn, mesh, **inputs)
    return fuse(p, [n for n in p.nodes if n.args])


def along_the_middle(g: Any, b: Any, r: Any, seed: Any) -> Any:
    """A slice that is not the first dim, a bias along the last, dropout, a residual."""
    y = weft.reduce_scatter(g, "tp", 1) + b
    y = weft.dropout(y, seed, p=0.3, site=2) + weft.slice(r, "tp", 1)
    return weft.all_gather(weft.gelu(y), "tp")


def normalised(g: Any, w: Any) -> Any:
    """A total of a tensor whose slice is many runs of memory."""
    s = weft.reduce_scatter(g, "tp", 1)
    size = weft.sqrt(weft.all_reduce_partials(weft.sum(s * s)))
    return {"y": weft.all_gather(s / size * weft.slice(w, "tp", 1), "tp"), "s": s}


def low_precision(g: Any, w: Any) -> Any:
    s = weft.cast(weft.reduce_scatter(g, "tp", 0), "f32")
    new = weft.cast(weft.slice(w, "tp", 0), "f32") - 0.1 * s
    return {"w": weft.all_gather(weft.cast(new, "bf16"), "tp"), "s": s}


def one_shot(g: Any, x: Any, b: Any) -> Any:
    return weft.relu(weft.all_reduce(g, "tp") * weft.sigmoid(x) + b)


def most(g: Any) -> Any:
    s = weft.reduce_scatter(g, "tp", 0)
    return s / weft.all_reduce_partials(weft.amax(weft.abs(s)))


def with_its_norm(g: Any, lr: Any) -> Any:
    """A number that leaves the kernel, and one that only a number needs."""
    s = weft.reduce_scatter(g, "tp", 0)
    size, most_ = weft.all_reduce_partials(weft.sum(s * s)), weft.all_reduce_partials(weft.amax(s))
    return {"y": s * lr, "norm": weft.sqrt(size), "scaled": most_ * lr}


def half(g: Any, totals: Any) -> Any:
    """Terms in float16, a choice by a comparison, a scalar with a name that is taken."""
    s = weft.cast(weft.reduce_scatter(g, "tp", 0), "f32") * totals
    return weft.all_gather(weft.cast(weft.where(s > 0.0, s, 0.1 * s), "f16"), "tp")


def whole_norm(g: Any) -> Any:
    """A total of what every rank holds whole."""
    s = weft.all_reduce(g, "tp")
    return s / (weft.sqrt(weft.sum(s * s)) + weft.amax(s))


def columns(g: Any, scale: Any) -> Any:
    """A factor for each row of a matrix."""
    return weft.all_gather(weft.reduce_scatter(g, "tp", 0) * scale, "tp")


def programs(ranks: int) -> list[Program]:
    mesh = Mesh(tp=ranks)
    f, b = weft.f32, weft.bf16
    found = [
        traced(along_the_middle, mesh, g=f(3, 10, 6, tp=P()), b=f(6), r=f(3, 10, 6), seed=weft.i64()),
        traced(normalised, mesh, g=f(3, 8, 5, tp=P()), w=f(3, 8, 5)),
        traced(low_precision, mesh, g=b(70, 3, tp=P()), w=b(70, 3)),
        traced(one_shot, mesh, g=f(5, 7, tp=P()), x=f(5, 7), b=f(7)),
        traced(with_its_norm, mesh, g=f(4, 9, tp=P()), lr=f()),
        traced(half, mesh, g=weft.tensor("f16", 40, 3, tp=P()), totals=f()),
        traced(whole_norm, mesh, g=f(5, 7, tp=P())),
        traced(most, mesh, g=f(33, tp=P())),
        traced(columns, mesh, g=f(8, 6, tp=P()), scale=f(8, 1, tp=S(0))),
        traced(lambda x, y: weft.exp(-(x * x)) + y, mesh, x=f(9, 4), y=f(4)),
    ]
    found += [
        EXAMPLES[name].schedules["fuse(RS-C-AG)"](EXAMPLES[name].make()) for name in ("sgd", "adamw", "adamw-clipped", "lamb") if ranks == 4
    ]
    return found


def spread(p: Program) -> dict[str, list[Any]]:
    gen = torch.Generator().manual_seed(1)
    out = {}
    for i, (name, n) in enumerate(p.input_names.items()):
        x = torch.randn(n.shape, generator=gen, dtype=torch.float64) if n.shape else torch.tensor(3.0)
        out[name] = interp.distribute((x.abs() if name.startswith("v") else x).to(n.dtype), n.type, i)
    return out


def check(ranks: int, rank: int) -> None:
    for p in programs(ranks):
        want = interp.run_ranks(p, spread(p))
        step = Compiled(p)
        assert step.code.calls, f"{p.name} was not fused:\n{step.code.text}"
        for _ in range(2):
            got = step({k: v[rank].clone() for k, v in spread(p).items()})
            for name, values in want.items():
                near = 3e-2 if values[rank].dtype.itemsize == 2 or p.name == "low_precision" else 2e-4
                torch.testing.assert_close(
                    got[name], values[rank], rtol=near, atol=near, msg=lambda m, p=p, name=name: f"{p.name} {name}: {m}"
                )


@pytest.mark.parametrize("ranks", [2, 4])
def test_kernels_mean_what_the_interpreter_says(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, lambda rank: check(ranks, rank), tmp_path)


def interpreted(rank: int) -> None:
    check(4, rank)


def test_triton_kernels_of_programs_interpreted_on_four_ranks(tmp_path: Path) -> None:
    run_interpreted_ranks(4, interpreted, tmp_path, seconds=100)


def test_a_list_of_tensors_is_one_body_with_a_row_for_each() -> None:
    p = EXAMPLES["adamw"].schedules["fuse(RS-C-AG)"](EXAMPLES["adamw"].make())
    (fused,) = fuse_group(p, p.groups[0], 1, donate=True)
    assert [slot.name for slot in fused.body.slots] == ["m", "g", "v", "x"]
    assert [part.lengths for part in fused.parts] == [(128 * 128,), (32,), (33 * 7,)]
    assert fused.parts[2].places["g"].offsets == (33 * 7,)


def test_what_cannot_be_one_kernel_runs_node_by_node_and_says_why() -> None:
    p = weft.trace(lambda g: weft.sum(weft.all_reduce(g, "tp"), dims=1), Mesh(tp=2), g=weft.f32(4, 6, tp=P()))
    p = fuse(p, p.find_all(where=lambda n: bool(n.args)))
    with pytest.raises(NotFusable, match="over some dims"):
        fuse_group(p, p.groups[0], 0)
    text = lower(p, fuse=("tp", None)).text
    assert "# group k0 runs node by node: sum over some dims inside a fused group" in text


def test_tensors_of_whole_numbers_are_left_to_torch() -> None:
    p = weft.trace(lambda x, i: weft.cast(weft.cast(x * 2.0, "i64") + i, "f32"), Mesh(tp=1), x=weft.f32(4, 6), i=weft.i64(4, 6))
    p = fuse(p, p.find_all(where=lambda n: bool(n.args)))
    text = lower(p, fuse=("tp", None)).text
    assert "runs node by node: a cast to integers" in text or "runs node by node: a tensor that is not of floats" in text


def test_the_kernel_is_shown_with_the_code() -> None:
    p = recipes.one_kernel(recipes.zero1(EXAMPLES["sgd"].make()))
    text = show_code(p)
    assert "= k0(" in text
    assert "// k0: reduce g; update m" in text
    assert "#pragma omp simd" in text


def test_a_chain_longer_than_pythons_own_stack_is_one_kernel() -> None:
    """Ops that each read the one before, more than Python calls may nest."""

    def long(g: Any) -> Any:
        s = weft.all_reduce(g, "tp")
        for k in range(400):
            s = s * 0.5 if k % 2 else s + 1.0
        return s

    p = traced(long, Mesh(tp=2), g=weft.f32(4, tp=P()))
    assert len(fuse_group(p, p.groups[0], 0)[0].parts) == 1
