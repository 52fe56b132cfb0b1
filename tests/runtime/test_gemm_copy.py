"""The product that carries rows: what it multiplies and copies, interpreted on four ranks, and what it becomes on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.ranks import run_interpreted_ranks

CASES = [(136, 264, 72), (128, 8, 64), (512, 8, 8)]  # a rank's product: several tiles, one, and one with pieces left at its end


def gathers(rank: int) -> None:
    from weft.nn import Strategy
    from weft.nn.over_peers import gather_matmul
    from weft.runtime.gemm_copy import can_multiply

    for number, (m, n, k) in enumerate(CASES):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        parts = [torch.randn(m, k, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)]
        w = torch.randn(n, k, generator=torch.Generator().manual_seed(10 + rank)).to(dtype)
        whole = torch.cat(parts)
        assert can_multiply(parts[rank], w)
        got, kept = gather_matmul(parts[rank], w, None, Strategy("peers", by="matmul"))
        assert kept is not None and torch.equal(kept, whole), (m, n, k)
        torch.testing.assert_close(got.float(), whole.float() @ w.float().T, rtol=2e-2, atol=0.1)


@pytest.mark.timeout(200)
def test_products_carry_the_rows_of_four_ranks(tmp_path: Path) -> None:
    run_interpreted_ranks(4, gathers, tmp_path, seconds=150)


def test_only_what_the_kernels_can_multiply_is_given_to_them() -> None:
    from weft.runtime.gemm_copy import can_multiply

    half = {"dtype": torch.bfloat16}
    assert can_multiply(torch.empty(4, 16, **half), torch.empty(8, 16, **half))
    assert not can_multiply(torch.empty(16, 12, **half), torch.empty(8, 12, **half)), "rows that are not whole 16 bytes"
    assert not can_multiply(torch.empty(4, 16, **half), torch.empty(9, 16, **half)), "nor those of the result"
    assert not can_multiply(torch.empty(3, 16, **half), torch.empty(8, 16, **half)), "not whole lines of 128 bytes"
    assert not can_multiply(torch.empty(4, 16, **half), torch.empty(16, 8, **half).T), "a weight that lies the other way"
    assert not can_multiply(torch.empty(4, 16), torch.empty(8, 16)), "tensor cores would round float32"


def test_a_piece_is_as_large_as_one_step_needs() -> None:
    from weft.runtime.gemm_copy import LINES, _copy_size

    assert _copy_size(2048 * 28672 // 64, 33 * 2 * 448, *LINES) == 32
    assert _copy_size(1000, 1, *LINES) == 128
    assert _copy_size(33, 1, *LINES) == 64


@pytest.mark.parametrize("piece", [1024, 4096])
def test_registers_carry_in_wide_words(piece: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from weft.runtime import gemm_copy
    from weft.runtime.device_gemm_copy import multiply_carrying as kernel

    bm, bn, bk = gemm_copy.TILE
    const = {"BM": bm, "BN": bn, "BK": bk, "PIECE": piece, "WIDE": False}
    types = {"x": f"tensordesc<bf16[{bm},{bk}]>", "w": f"tensordesc<bf16[{bn},{bk}]>", "out": f"tensordesc<bf16[{bm},{bn}]>",
             "source": "*i32", "target": "*i32", "words": "i32", "m": "i32", "n": "i32", "k": "i32"}  # fmt: skip
    wide = {(kernel.arg_names.index(x),): [["tt.divisibility", 16]] for x in ("source", "target", "words")}
    at = {(kernel.arg_names.index(x),): v for x, v in const.items()}
    ptx, shared = compiled(triton, ASTSource(kernel, types | dict.fromkeys(const, "constexpr"), at, wide), num_stages=3)
    loads, stores = (re.findall(rf"{kind}\.global[.:a-zA-Z0-9_]*\.b32", ptx) for kind in ("ld", "st"))
    assert "wgmma.mma_async" in ptx and len(loads) == 2 * piece // 1024, "in the loop and for what is left"
    assert all(".v4." in op for op in loads + stores), "16 bytes at once"
    assert "st.local" not in ptx, "a piece stays in registers"
    assert shared <= 227 << 10, "what a multiprocessor has"


@pytest.mark.parametrize("lines", [32, 128])
def test_the_copy_engine_carries_beside_warps_that_multiply(lines: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from weft.runtime import gemm_copy
    from weft.runtime.hopper_gemm_copy import multiply_carrying as kernel

    def box(*shape: int) -> str:
        return f"tensordesc<bf16{list(shape)},{gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)!r}>"

    bm, bn, bk = gemm_copy.TILE
    piece = box(lines, gemm_copy.WIDTH)
    const = {"BM": bm, "BN": bn, "BK": bk, "STAGES": gemm_copy.STAGES, "LINES": lines, "WIDTH": gemm_copy.WIDTH}
    types = {"x": box(bm, bk), "w": box(bn, bk), "out": "*bf16", "source": piece, "target": piece}
    types |= dict.fromkeys(("m", "n", "k", "pieces"), "i32") | dict.fromkeys(const, "constexpr")
    at = {(kernel.arg_names.index(x),): v for x, v in const.items()}
    ptx, shared = compiled(triton, GluonASTSource(kernel, types, at, {}))
    assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx, "warps of their own for the products"
    loads, stores = (re.findall(rf"cp\.async\.bulk\.tensor\.2d\.{way}", ptx) for way in ("shared::", "global"))
    assert len(loads) > 2 and stores, "two operands and a piece come, a piece leaves"
    assert shared <= 227 << 10, "what a multiprocessor has"


def compiled(triton, source, **options: int) -> tuple[str, int]:
    from triton.backends.compiler import GPUTarget

    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8} | options)
    return made.asm["ptx"], made.metadata.shared
