"""Fused kernels as Triton: one program per vertex and block of columns; values are vectors over the columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft.codegen.text import TRITON, Writer, python
from weft.core.node import Node
from weft.dynamic.emit import Emitter, column, is_bool, sums_up
from weft.dynamic.kernel import Kernel, anything, concat_parts, statement
from weft.dynamic.lower import is_segment
from weft.dynamic.store import Pointer, Stores
from weft.runtime import modules

TYPES = {torch.float32: "tl.float32", torch.float64: "tl.float64"}
LARGEST = 512  # columns of a program
EXACT = {**TRITON, "tanh": "w_tanh({0})"}  # near 0 too
HEADER = """\
import triton
import triton.language as tl


@triton.jit
def w_tanh(x):
    z = x * x
    p = ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z - 3.33332819422e-1)
    e = tl.exp(-2.0 * tl.abs(x))
    big = (1.0 - e) / (1.0 + e)
    big = tl.where(x < 0, -big, big)
    if x.dtype == tl.float64:
        return big
    return tl.where(tl.abs(x) < 0.625, p * z * x + x, big)
"""


class Code:
    """A kernel ready to launch."""

    def __init__(self, function: Any, pointers: list[Pointer], lanes: int) -> None:
        self.function, self.pointers, self.lanes = function, pointers, lanes
        self.block = min(LARGEST, 1 << (lanes - 1).bit_length())
        self.across = -(-lanes // self.block)

    def launch(self, tensors: list[torch.Tensor], lo: int, hi: int, first_edge: int) -> None:
        if hi > lo:
            warps = max(1, min(8, self.block // 64))
            self.function[(hi - lo, self.across)](*tensors, lo, first_edge, BLOCK=self.block, num_warps=warps)


def build(kernels: list[tuple[Kernel, Stores]]) -> dict[int, Code]:
    """Write kernels into one module: id of the kernel -> how to launch it."""
    writers = [TritonEmitter(kernel, stores, f"weft_{i}") for i, (kernel, stores) in enumerate(kernels)]
    texts = [w.text() for w in writers]
    module = modules.load("\n\n".join([HEADER, *texts])) if writers else None
    return {id(w.kernel): Code(getattr(module, w.name), w.pointers, w.kernel.lanes) for w in writers}


class TritonEmitter(Emitter):
    def writer(self) -> Writer:
        return Writer(EXACT, python, lambda text, _: f"({text}).to({TYPES[self.dtype]})", entry=2)

    def text(self) -> str:
        """The full function."""
        body = [f"    {line}" for line in self._body()]
        if any(" - e0" in line for line in body):
            body.insert(0, f"    e0 = tl.load({self.index('edge_first')} + lo)")
        indices = [f"p{i}" for i, p in enumerate(self.pointers) if p.kind == "index"]  # they begin anywhere
        arguments = ", ".join([*(f"p{i}" for i in range(len(self.pointers))), "lo", "eb"])
        return "\n".join([
            f"@triton.jit(do_not_specialize={[*indices, 'lo', 'eb']})",
            f"def {self.name}({arguments}, BLOCK: tl.constexpr):",
            "    v = lo + tl.program_id(0)",
            "    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
            f"    m = j < {self.kernel.lanes}",
            *body,
        ])  # fmt: skip

    def _body(self) -> Iterator[str]:
        self.made: dict[Node, str] = {}
        for node in self.gradients():
            yield from self._collect(node)
        for level in self.levels():
            for node in self.vertices(level):
                yield from self._statement(node, node in self.kernel.stored)
            for node in self.kernel.stored:
                if is_segment(node) and self.level[node] == level:
                    yield self._store(node, self.name_of(node))
            yield from self._edges(level)

    def _collect(self, node: Node) -> Iterator[str]:
        yield f"{self.name_of(node)} = tl.zeros([BLOCK], {TYPES[self.dtype]})"
        for via in self.stores.gradients[node]:
            first, index = self.index(via.first), self.index(via.index)
            rows = self.at(Pointer("message", via.key, dtype=self.dtype))
            yield f"for k in range(tl.load({first} + v), tl.load({first} + v + 1)):"
            yield f"    {self.name_of(node)} += tl.load({rows} + tl.load({index} + k) * {self.kernel.lanes} + j, mask=m, other=0.0)"
        self.made[node] = self.name_of(node)

    def _edges(self, level: int) -> Iterator[str]:
        sums, ends = self.sums(level), self.edge_ends(level)
        if not sums and not ends:
            return
        first = self.index("edge_first")
        for node in sums:
            start = "0.0" if sums_up(node) else 'float("-inf")'
            yield f"{self.name_of(node)} = tl.full([BLOCK], {start}, {TYPES[self.dtype]})"
        yield f"for e in range(tl.load({first} + v), tl.load({first} + v + 1)):"
        outside, lines = dict(self.made), list[str]()
        for node in self.needed([*ends, *[n.args[0] for n in sums]]):
            lines += self._statement(node, node in ends)
        for node in sums:
            value = self._value(node.args[0], lines)
            total = f"{self.name_of(node)} + {value}" if sums_up(node) else EXACT["maximum"].format(self.name_of(node), value)
            lines.append(f"{self.name_of(node)} = {total}")
        self.made = outside
        yield from (f"    {line}" for line in lines)
        for node in sums:
            self.made[node] = self.name_of(node)
            if not sums_up(node):
                yield f"{self.name_of(node)} = tl.where(tl.load({first} + v) == tl.load({first} + v + 1), 0.0, {self.name_of(node)})"

    def _statement(self, node: Node, stored: bool) -> list[str]:
        lines: list[str] = []
        if parts := concat_parts(node):
            for i, part in enumerate(parts if stored else ()):
                value = self._value(part, lines)
                lines.append(self._store(node, value, i * self.kernel.lanes))
            return lines
        text = self.write(node, lambda n: self._value(n, lines), self.writer())
        if (value := statement(node, anything)) is not None and value.fn == "const":
            text = f"tl.full([BLOCK], {text}, {TYPES[self.dtype]})"
        lines.append(f"{self.name_of(node)} = {text}")
        self.made[node] = self.name_of(node)
        return [*lines, self._store(node, self.name_of(node))] if stored else lines

    def _value(self, node: Node, lines: list[str]) -> str:
        if node not in self.made:
            access = self.kernel.loads[node]
            if access.source in self.stores.gradients:
                return self.name_of(access.source)
            at, _, row, columns = self.place(access.source)
            where = column(access, "j", "//")
            if access.has_rows:
                index = f"tl.load({self.index(row.index)} + {row.of})" if row.index else f"({row.of})"
                where = f"{index} * {columns} + {where}"
            guard = ", mask=m, other=0" if any(stride for _, _, stride in access.dims) else ""
            load = f"tl.load({at} + {where}{guard})"
            lines.append(f"{self.name_of(node)} = {load}{' != 0' if is_bool(node) else ''}")
            self.made[node] = self.name_of(node)
        return self.made[node]

    def _store(self, node: Node, value: str, at_column: int = 0) -> str:
        at, _, row, columns = self.place(node)
        return f"tl.store({at} + ({row.of}) * {columns} + {at_column} + j, {value}, mask=m)"
