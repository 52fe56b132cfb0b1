"""Row groups as C++: for each vertex, for each block of columns, loops over columns and over edges.

The function takes a table of addresses, the rows [lo, hi) of the class to work on, and the number of the class's first edge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from weft.codegen.expr import Value
from weft.codegen.segments import Messages, RowEmitter, RowSlot
from weft.codegen.text import CPP, Writer
from weft.codegen.to_cpu import number

HEADER = Path(__file__).with_name("lanes.h")
TYPES = {"f32": "float", "f64": "double", "bool": "bool", "i64": "i64"}
BLOCK = 64
VECTORS = {**CPP, "exp": "weft::exp({0})", "tanh": "weft::tanh({0})", "sigmoid": "weft::sigmoid({0})"}  # compilers make vectors of these


class CppEmitter(RowEmitter):
    def text(self) -> str:
        """The full function. Values that a later pass reads have an array each."""
        self.rows: dict[str, None] = {}  # lines before a loop over columns, each once
        lanes = self.group.lanes
        block = min(lanes, BLOCK)
        width = str(block) if lanes % block == 0 else f"std::min({block}, {lanes} - jb)"
        body = list(self.body())
        arrays = [f"{self.array(v)}[{block}]" for v in self.known]
        head = [f"const i64 e0 = {self.at(self.group.first)}[lo];"] if any(" - e0" in line for line in body) else []
        head += [f"real {', '.join(arrays)};"] if arrays else []
        return "\n".join([
            f'extern "C" void {self.name}(void **p, i64 lo, i64 hi, i64 eb) {{',
            f"  typedef {TYPES[self.group.real]} real;",
            *(f"  {TYPES[t]} *p{i} = ({TYPES[t]} *)p[{i}];" for i, t in enumerate(self.arguments.values())),
            f"  for (i64 v = lo; v < hi; ++v) for (int jb = 0; jb < {lanes}; jb += {block}) {{",
            f"    const int m = {width};", *(f"    {line}" for line in [*head, *body]), "  }", "}",
        ])  # fmt: skip

    def writer(self) -> Writer:
        return Writer(VECTORS, _number, lambda text, _: f"real({text})", entry=1)

    def array(self, value: Value) -> str:
        return f"{self.names[value]}_of"

    def reload(self, value: Value) -> str:
        return f"{self.array(value)}[j]"

    def collect(self, value: Value, slot: Messages) -> Iterator[str]:
        yield f"for (int j = 0; j < m; ++j) {self.reload(value)} = 0;"
        for rows, first, index in slot.paths:
            begin = self.at(first)
            yield f"for (i64 k = {begin}[v]; k < {begin}[v + 1]; ++k) {{"
            yield f"  const real *q = {self.at(rows, self.group.real)} + {self.at(index)}[k] * {self.group.lanes} + jb;"
            yield f"  for (int j = 0; j < m; ++j) {self.reload(value)} += q[j];"
            yield "}"

    def read(self, slot: RowSlot) -> str:
        return self._row(slot, "r")

    def _row(self, slot: RowSlot, kind: str) -> str:
        """One element; its row is found before the loop."""
        at, column = self.at(slot.pointer, slot.dtype), slot.column("(jb + j)")
        if not slot.columns:
            return f"{at}[{column}]"
        row = f"{self.at(slot.via)}[{slot.of}]" if slot.via is not None else slot.of
        name = f"{kind}{at}_{self.at(slot.via) if slot.via is not None else slot.of[0]}"
        self.rows[f"{TYPES[slot.dtype]} *{name} = {at} + ({row}) * {slot.columns};"] = None
        return f"{name}[{column}]"

    def define(self, value: Value, text: str) -> list[str]:
        name = self.names[value]
        return [f"const auto {name} = {text};", *([f"{self.reload(value)} = {name};"] if value in self.kept else [])]

    def store(self, slot: RowSlot, text: str) -> str:
        return f"{self._row(slot, 'w')} = {text};"

    def add(self, total: Value, text: str) -> str:
        return f"{self.reload(total)} += {text};" if total.name == "sum" else f"{self.reload(total)} = weft::larger({self.reload(total)}, real({text}));"

    def columns(self, lines: list[str]) -> Iterator[str]:
        yield "{"
        yield from (f"  {line}" for line in self.rows)
        yield "  #pragma omp simd"  # columns never meet, so buffers that overlap do no harm
        yield "  for (int j = 0; j < m; ++j) {"
        yield from (f"    {line}" for line in lines)
        yield "  }"
        yield "}"
        self.rows = {}

    def over_edges(self, sums: list[Value], lines: list[str]) -> Iterator[str]:
        first = self.at(self.group.first)
        for v in sums:
            yield f"for (int j = 0; j < m; ++j) {self.reload(v)} = {'0' if v.name == 'sum' else '-INFINITY'};"
        yield f"for (i64 e = {first}[v]; e < {first}[v + 1]; ++e) {{"
        yield from (f"  {line}" for line in lines)
        yield "}"
        for v in sums:
            if v.name != "sum":
                yield f"if ({first}[v] == {first}[v + 1]) for (int j = 0; j < m; ++j) {self.reload(v)} = 0;"


def _number(x: float) -> str:
    return f"real({float(x)!r})" if math.isfinite(x) else number(x)
