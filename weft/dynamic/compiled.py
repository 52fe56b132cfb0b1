"""Kernels of a plan compiled together, and bound to the buffers of a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from weft.codegen import segments_cpp, segments_triton
from weft.codegen.segments import RowGroup
from weft.core import native
from weft.dynamic.kernel import Kernel, row_group
from weft.dynamic.store import Pointer, Stores
from weft.runtime import modules

Span = tuple[int, int, int, int]  # rows [0]:[1] of the class and their edges [2]:[3]
Bound = Callable[[Span], None]
LARGEST = 512  # columns of a program on a GPU


@dataclass(frozen=True)
class Code:
    """A kernel ready to be bound, and what it is given."""

    pointers: list[Pointer]
    bind: Callable[[Sequence[Tensor], int], Bound]  # to tensors and the number of the class's first edge


def compile_kernels(kernels: Sequence[tuple[Kernel, Stores]], target: str) -> dict[int, Code]:
    """Kernels in one library or module: id of the kernel -> its code."""
    groups = [row_group(*found) for found in kernels]
    made = [] if not groups else _triton(groups) if target == "triton" else _cpp(groups)
    return {id(kernel): code for (kernel, _), code in zip(kernels, made, strict=True)}


def _cpp(groups: Sequence[RowGroup]) -> list[Code]:
    writers = [segments_cpp.CppEmitter(group, f"weft_{i}") for i, group in enumerate(groups)]
    texts = [w.text() for w in writers]
    library = native.load("\n".join([segments_cpp.HEADER.read_text(), *texts]))
    return [Code(list(w.arguments), _binder(getattr(library, w.name))) for w in writers]  # type: ignore[arg-type]


def _binder(function: Any) -> Callable[[Sequence[Tensor], int], Bound]:
    function.argtypes, function.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 3], None

    def bind(tensors: Sequence[Tensor], first_edge: int) -> Bound:
        table = np.array([x.data_ptr() for x in tensors], np.int64)
        at = table.ctypes.data

        def call(span: Span, keep: Any = (table, tensors)) -> None:  # addresses hold as long as what they point to
            function(at, span[0], span[1], first_edge)

        return call

    return bind


def _triton(groups: Sequence[RowGroup]) -> list[Code]:
    writers = [segments_triton.TritonEmitter(group, f"weft_{i}") for i, group in enumerate(groups)]
    texts = [w.text() for w in writers]
    module = modules.load("\n\n".join([segments_triton.HEADER, *texts]))
    return [Code(list(w.arguments), _launcher(getattr(module, w.name), w.group.lanes)) for w in writers]  # type: ignore[arg-type]


def _launcher(function: Any, lanes: int) -> Callable[[Sequence[Tensor], int], Bound]:
    block = min(LARGEST, 1 << (lanes - 1).bit_length())
    across, warps = -(-lanes // block), max(1, min(8, block // 64))

    def bind(tensors: Sequence[Tensor], first_edge: int) -> Bound:
        def launch(span: Span) -> None:
            if span[1] > span[0]:
                function[span[1] - span[0], across](*tensors, span[0], first_edge, BLOCK=block, num_warps=warps)

        return launch

    return bind
