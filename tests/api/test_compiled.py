"""Programs run by real processes over gloo give what the interpreter gives, rank by rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.api.ranks import on_ranks
from weft import interp
from weft.api.compiled import Compiled
from weft.codegen import show_code
from weft.core.errors import LayoutError, RuntimeFault
from weft.core.layout import Mesh, P, S
from weft.core.node import Type
from weft.core.program import Program, new_program
from weft.ops.source import input_node
from weft.programs.catalog import EXAMPLES
from weft.testing.layouts import layouts


def spread(p: Program, seed: int = 0) -> dict[str, list[Any]]:
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for i, (name, n) in enumerate(p.input_names.items()):
        x = torch.randn(n.shape, generator=gen, dtype=torch.float64) if n.shape else torch.tensor(3.0)
        x = x.abs() if name.startswith("v.") else x
        out[name] = interp.distribute(x.to(n.dtype), n.type, i)
    return out


def check(programs: list[Program], folder: Path) -> None:
    wants = [interp.run_ranks(p, spread(p)) for p in programs]

    def job(rank: int) -> None:
        for p, want in zip(programs, wants, strict=True):
            step = Compiled(p)
            got = step({k: v[rank] for k, v in spread(p).items()})
            for name in want:
                if want[name][rank] is not None:
                    torch.testing.assert_close(
                        got[name], want[name][rank], rtol=1e-4, atol=1e-4, msg=lambda m, p=p, name=name: f"{p.name} {name}: {m}\n{p}"
                    )

    on_ranks(programs[0].mesh.ranks, job, folder)


def test_every_example_and_schedule(tmp_path: Path) -> None:
    programs = [p for ex in EXAMPLES.values() for p in (ex.make(), *(fn(ex.make()) for fn in ex.schedules.values()))]
    check(programs, tmp_path)


def resharding(mesh: Mesh, shape: tuple[int, ...]) -> list[Program]:
    """From every layout to every other, P and R and S, nested and uneven."""
    out = []
    every = layouts(mesh, shape)
    pairs = [(i, j) for i in range(len(every)) for j, b in enumerate(every) if not any(isinstance(p, P) for _, p in b.partials)]
    for i, j in pairs[:: max(1, len(pairs) // 90)]:
        node = input_node("x", Type(torch.float32, every[i]))
        with contextlib.suppress(LayoutError):  # an uneven cut of an outer part cannot be made by slicing
            out.append(new_program(f"from{i}to{j}", mesh, [node], {"y": weft.reshard(node, every[j]) + 0.0}))
    assert len(out) > 60
    return out


@pytest.mark.parametrize(("mesh", "shape"), [(Mesh(a=3), (7, 4)), (Mesh(a=2, b=2), (5, 6))])
def test_any_layout_to_any_other(mesh: Mesh, shape: tuple[int, ...], tmp_path: Path) -> None:
    check(resharding(mesh, shape), tmp_path)


def test_a_gradient_program(tmp_path: Path) -> None:
    def loss(x: Any, w1: Any, w2: Any) -> Any:
        h = weft.relu(weft.all_gather(x, "tp") @ w1)
        y = weft.reduce_scatter(h @ w2, "tp", 0)
        return weft.all_reduce(weft.sum(y * y), "dp", "tp")

    p = weft.trace(loss, Mesh(dp=2, tp=2), x=weft.f64(10, 5, dp=S(0), tp=S(0)), w1=weft.f64(5, 7, tp=S(1)), w2=weft.f64(7, 5, tp=S(0)))
    check([weft.grad(p, reduce=True)], tmp_path)


def test_the_code_reads_as_torch() -> None:
    text = show_code(EXAMPLES["sgd"].schedules["RS-C-AG"](EXAMPLES["sgd"].make()), rank=3)
    assert "comm.reduce_scatter(i_g_0, on.dp, 'sum'" in text
    assert "def step(inputs):  # sgd, rank at dp 3" in text


def test_the_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(RuntimeFault, match="is for 4 ranks") as e:
        Compiled(EXAMPLES["adam"].make())
    assert "weft run -n 4" in str(e.value)


def test_a_wrong_local_shape_is_refused() -> None:
    p = weft.trace(lambda x: x + 1.0, Mesh(dp=1), x=weft.f32(4))
    with pytest.raises(RuntimeFault, match="input 'x'") as e:
        Compiled(p)({"x": torch.zeros(3)})
    assert "[4]" in str(e.value) and "[3]" in str(e.value)
