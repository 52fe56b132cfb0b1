"""Fused kernels as C++: for each vertex, for each block of columns, loops over columns and over edges.

The function takes a table of addresses, one per Pointer in order, the rows [lo, hi) of the class to work on, and the number of the
class's first edge.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from weft.codegen.text import CPP, Writer
from weft.core import native
from weft.core.node import Node
from weft.dynamic.emit import Emitter, column, is_bool, sums_up
from weft.dynamic.kernel import Kernel, concat_parts
from weft.dynamic.lower import is_segment
from weft.dynamic.store import Pointer, Stores

TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "bool", torch.int64: "i64"}
HEADER = Path(__file__).with_name("lanes.h")
BLOCK = 64
VECTORS = {**CPP, "exp": "weft::exp({0})", "tanh": "weft::tanh({0})", "sigmoid": "weft::sigmoid({0})"}  # compilers make vectors of these

Code = tuple[Callable[[int, int, int, int], None], list[Pointer]]


def build(kernels: list[tuple[Kernel, Stores]]) -> dict[int, Code]:
    """Compile kernels into one library: id of the kernel -> (function, what its table holds)."""
    writers = [CppEmitter(kernel, stores, f"weft_{i}") for i, (kernel, stores) in enumerate(kernels)]
    if not writers:
        return {}
    texts = [w.text() for w in writers]
    library = native.load("\n".join([HEADER.read_text(), *texts]))
    out: dict[int, Code] = {}
    for writer in writers:
        function: Any = getattr(library, writer.name)
        function.argtypes, function.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 3], None
        out[id(writer.kernel)] = function, writer.pointers
    return out


class CppEmitter(Emitter):
    def writer(self) -> Writer:
        return Writer(VECTORS, _number, lambda text, _: f"real({text})", entry=1)

    def text(self) -> str:
        """The full function."""
        body = [f"    {line}" for line in self._row()]
        if any(" - e0" in line for line in body):
            body.insert(0, f"    const i64 e0 = {self.index('edge_first')}[lo];")
        table = [f"  {TYPES[p.dtype]} *p{i} = ({TYPES[p.dtype]} *)p[{i}];" for i, p in enumerate(self.pointers)]
        lanes = self.kernel.lanes
        block = min(lanes, BLOCK)
        width = str(block) if lanes % block == 0 else f"std::min({block}, {lanes} - jb)"
        return "\n".join([
            f'extern "C" void {self.name}(void **p, i64 lo, i64 hi, i64 eb) {{',
            f"  typedef {TYPES[self.dtype]} real;", *table,
            f"  for (i64 v = lo; v < hi; ++v) for (int jb = 0; jb < {lanes}; jb += {block}) {{",
            f"    const int m = {width};", *body, "  }", "}",
        ])  # fmt: skip

    def _row(self) -> Iterator[str]:
        """All that happens to one block of columns of one vertex. Kept values have an array each."""
        kept = sorted({*self.kept(), *self.gradients()}, key=self.name_of)
        if kept:
            yield f"real {', '.join(f'{self.name_of(n)}[{min(BLOCK, self.kernel.lanes)}]' for n in kept)};"
        for node in self.gradients():
            yield from self._collect(node)
        for level in self.levels():
            done = [n for n in self.kernel.stored if is_segment(n) and self.level[n] == level]
            if (plain := self.vertices(level)) or done:
                yield from _Loop(self).over(plain, stores=done)
            yield from self._edges(level)

    def _collect(self, node: Node) -> Iterator[str]:
        """Sum up the messages sent to a state."""
        name, lanes = self.name_of(node), self.kernel.lanes
        yield f"for (int j = 0; j < m; ++j) {name}[j] = 0;"
        for via in self.stores.gradients[node]:
            first, index = self.index(via.first), self.index(via.index)
            rows = self.at(Pointer("message", via.key, dtype=self.dtype))
            yield f"for (i64 k = {first}[v]; k < {first}[v + 1]; ++k) {{"
            yield f"  const real *q = {rows} + {index}[k] * {lanes} + jb;"
            yield f"  for (int j = 0; j < m; ++j) {name}[j] += q[j];"
            yield "}"

    def _edges(self, level: int) -> Iterator[str]:
        """One pass over the edges: every edge op of this level, and the sums that wait for it."""
        sums, ends = self.sums(level), self.edge_ends(level)
        if not sums and not ends:
            return
        first = self.index("edge_first")
        for node in sums:
            start = "0" if sums_up(node) else "-INFINITY"
            yield f"for (int j = 0; j < m; ++j) {self.name_of(node)}[j] = {start};"
        yield f"for (i64 e = {first}[v]; e < {first}[v + 1]; ++e) {{"
        nodes = self.needed([*ends, *[n.args[0] for n in sums]])
        yield from (f"  {line}" for line in _Loop(self).over(nodes, sums=sums, keep=ends))
        yield "}"
        for node in sums:
            if not sums_up(node):
                yield f"if ({first}[v] == {first}[v + 1]) for (int j = 0; j < m; ++j) {self.name_of(node)}[j] = 0;"


class _Loop:
    """One loop over columns: rows are found before it, values live inside it."""

    def __init__(self, emitter: CppEmitter) -> None:
        self.emitter, self.kept, self.name_of, self.writer = emitter, emitter.kept(), emitter.name_of, emitter.writer()
        self.rows: dict[str, None] = {}  # lines before the loop, each once
        self.lines: list[str] = []
        self.made: dict[Node, str] = {}

    def over(
        self, nodes: list[Node], *, stores: list[Node] | None = None, sums: list[Node] | None = None,
        keep: list[Node] | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """Ops as statements; then stores of sums made before, or sums over the edge at hand."""
        stored = self.emitter.kernel.stored if keep is None else keep
        for node in nodes:
            self._statement(node, node in stored)
        for node in stores or ():
            self._store(node, f"{self.name_of(node)}[j]")
        for node in sums or ():
            self._add(node)
        yield "{"
        yield from (f"  {line}" for line in self.rows)
        yield "  #pragma omp simd"  # columns never meet, so buffers that overlap do no harm
        yield "  for (int j = 0; j < m; ++j) {"
        yield from (f"    {line}" for line in self.lines)
        yield "  }"
        yield "}"

    def _statement(self, node: Node, stored: bool) -> None:
        if parts := concat_parts(node):
            for i, part in enumerate(parts if stored else ()):
                self._store(node, self._value(part), column=i * self.emitter.kernel.lanes)
            return
        text = self.emitter.write(node, self._value, self.writer)
        self.made[node] = f"{self.name_of(node)}_"
        self.lines.append(f"const {'bool' if is_bool(node) else 'real'} {self.name_of(node)}_ = {text};")
        if node in self.kept:
            self.lines.append(f"{self.name_of(node)}[j] = {self.name_of(node)}_;")
        if stored:
            self._store(node, f"{self.name_of(node)}_")

    def _value(self, node: Node) -> str:
        """The text of an operand; it is loaded first if need be."""
        if node not in self.made:
            if node in self.kept:
                return f"{self.name_of(node)}[j]"
            access = self.emitter.kernel.loads[node]
            gradient = access.source in self.emitter.stores.gradients
            text = f"{self.name_of(access.source)}[j]" if gradient else self._load(node)
            self.made[node] = f"{self.name_of(node)}_"
            self.lines.append(f"const {'bool' if is_bool(node) else 'real'} {self.name_of(node)}_ = {text};")
        return self.made[node]

    def _load(self, node: Node) -> str:
        access = self.emitter.kernel.loads[node]
        at, pointer, row, columns = self.emitter.place(access.source)
        if not access.has_rows:
            return f"{at}[{column(access, '(jb + j)')}]"
        index = f"{self.emitter.index(row.index)}[{row.of}]" if row.index else row.of
        name = f"r{at}_{row.index or row.of[0]}"
        self.rows[f"const {TYPES[pointer.dtype]} *{name} = {at} + ({index}) * {columns};"] = None
        return f"{name}[{column(access, '(jb + j)')}]"

    def _store(self, node: Node, value: str, column: int = 0) -> None:
        at, pointer, row, columns = self.emitter.place(node)
        self.rows[f"{TYPES[pointer.dtype]} *w{at} = {at} + ({row.of}) * {columns};"] = None
        self.lines.append(f"w{at}[{column} + jb + j] = {value};")

    def _add(self, node: Node) -> None:
        value, name = self._value(node.args[0]), self.name_of(node)
        total = f"{name}[j] += {value};" if sums_up(node) else f"{name}[j] = weft::larger({name}[j], {value});"
        self.lines.append(total)


def _number(x: float) -> str:
    if not math.isfinite(x):
        return f"real({'-' if x < 0 else ''}{'NAN' if math.isnan(x) else 'INFINITY'})"
    return f"real({float(x)!r})"
