"""The kernel that moves rows beside a product: what it copies, interpreted, and what it becomes on a GPU."""

from __future__ import annotations

import re

import pytest

from tests.ranks import interpreted

COPIES = """
import torch
from weft.runtime.copy_kernel import CopyKernel
for flow in (False, True):
    for words in (40000, 17):
        mover = CopyKernel(torch.device("cpu"), 3)
        sources = [torch.randn(words) for _ in range(3)]
        targets = [torch.zeros(words) for _ in range(3)]
        mover.move(targets, sources, 2, flow=flow)
        for k in range(3):
            mover.wait(k)
            assert torch.equal(targets[k], sources[k]), (flow, words, k)
        mover.rest()
        assert not mover._flags.any()
"""


@pytest.mark.timeout(120)
def test_every_source_arrives() -> None:
    interpreted(COPIES, seconds=100)


@pytest.mark.parametrize("flow", [False, True])
def test_it_compiles_for_sm90_with_wide_copies(flow: bool) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weft.runtime.copy_kernel import AT_ONCE, IN_FLOW
    from weft.runtime.device_sync import move

    block, stages, warps = IN_FLOW if flow else AT_ONCE
    types = {
        "sources": ("*i32", "*i32"),
        "targets": ("*i32", "*i32"),
        "flags": "*i32",
        "words": "i32",
        "BLOCK": "constexpr",
        "STAGES": "constexpr",
    }
    const = {(move.arg_names.index("BLOCK"),): block, (move.arg_names.index("STAGES"),): stages}
    wide = [["tt.divisibility", 16]]
    attrs = {(0, 0): wide, (0, 1): wide, (1, 0): wide, (1, 1): wide, (3,): wide}
    made = triton.compile(ASTSource(move, types, const, attrs), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    ptx = made.asm["ptx"]
    assert re.search(r"cp\.async\.cg\.shared\.global.*, 0x10" if flow else r"ld\.global[.a-z0-9:]*\.v4\.b32", ptx), "16 bytes at once"
    assert re.search(r"st\.global[.a-z0-9:]*\.v4\.b32", ptx)
    assert made.metadata.shared <= 227 << 10, "what a multiprocessor has"
    assert re.search(r"atom\.global\.(gpu\.)?release", ptx)
