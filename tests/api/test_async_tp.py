"""`async-tp`: collectives of tensor parallelism go in chunks, overlapped with the matmuls they belong to; losses are torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.codegen.pipeline import show_code
from weft.core.errors import PlanError
from weft.core.program import Program
from weft.frontend.capture import capture
from weft.ops.registry import Kind
from weft.passes import Draft, run
from weft.plan.spec import Spec


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.Sequential(nn.Embedding(32, 16, dtype=torch.float64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def loss(m: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy((m(x) @ m[0].weight.T).flatten(0, 1), x.roll(-1, 1).flatten())


def batch(seed: int) -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(seed))


def adamw(m: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=1e-2)


def torch_losses(steps: int) -> list[float]:
    m, out = model(), []
    optimizer = adamw(m)
    for i in range(steps):
        optimizer.zero_grad()
        value = loss(m, batch(i))
        value.backward()
        optimizer.step()
        out.append(value.item())
    return out


def overlapped(p: Program) -> list[tuple[str, ...]]:
    return [tuple("matmul" if n.op.kind is Kind.CONTRACT else n.op.name for n in g.nodes) for g in p.groups if g.kind == "overlap"]


@pytest.mark.parametrize(("plan", "world"), [("tp2,async-tp", 2), ("tp2,sp,async-tp", 2), ("tp2,pp2,micro2,async-tp", 4)])
def test_losses_equal_one_process(plan: str, world: int, tmp_path: Path) -> None:
    want = torch_losses(3)

    def job(rank: int) -> None:
        m = model()
        step = parallelize(m, loss, adamw(m), batch(0), plan=plan)
        torch.testing.assert_close([float(step(batch(i))) for i in range(3)], want, rtol=1e-9, atol=1e-9)
        parts = step.micro_batches
        programs = [step.program] if parts is None else [p for s in parts.pipeline.stages for p in s.phases]
        groups = [g for p in programs for g in overlapped(p)]
        assert ("matmul", "reduce_scatter" if "sp" in plan.split(",") else "all_reduce") in groups
        assert ("all_gather", "matmul") in groups or "sp" not in plan.split(",")
        assert step.check(batch(7)) < 1e-9

    on_ranks(world, job, tmp_path)


def placed(words: str) -> Program:
    m = model()
    made = run(Draft(capture(m, batch(0), loss, adamw(m)), Spec.parse(words))).program
    assert made is not None
    return made


def test_only_groups_are_added() -> None:
    plain, chunked = placed("tp2,sp"), placed("tp2,sp,async-tp")
    assert plain.outputs == chunked.outputs and not overlapped(plain) and len(overlapped(chunked)) > 8
    assert (0, 4) in pipelines(chunked)


def pipelines(p: Program) -> set[tuple[int, int]]:
    """Along which dim, and in how many chunks, a rank's code does matmuls of samples and sequences: what cannot be split evenly runs node by node."""
    code = show_code(p)
    groups = [g for g in p.groups if g.kind == "overlap" and f"def {g.name}(chunk" in code]
    return {(g.option("dim"), g.option("chunks")) for g in groups if g.nodes[0].ndim == 3}


@pytest.mark.parametrize(("rows", "plan", "dim", "chunks"), [(6, "tp2", 0, 3), (6, "dp2,tp2", 0, 3), (5, "tp2", 1, 4), (1, "tp2", 1, 4)])
def test_chunks_are_even(rows: int, plan: str, dim: int, chunks: int) -> None:
    """Of five samples, and of one, the sequence of eight is split."""
    m, x = model(), torch.randint(0, 32, (rows, 8))
    made = run(Draft(capture(m, x, loss, adamw(m)), Spec.parse(f"{plan},async-tp"))).program
    assert made is not None
    assert (dim, chunks) in pipelines(made)


def test_nothing_to_overlap_is_refused() -> None:
    with pytest.raises(PlanError, match="async-tp has nothing to do") as e:
        placed("dp2,async-tp")
    assert "leave out async-tp" in str(e.value)
