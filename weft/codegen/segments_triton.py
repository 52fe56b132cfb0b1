"""Row groups as Triton: one program per vertex and block of columns; values are vectors over the columns."""

from __future__ import annotations

from collections.abc import Iterator

from weft.codegen.expr import Level, Value
from weft.codegen.segments import Messages, RowEmitter, RowSlot
from weft.codegen.text import TRITON, Writer, python
from weft.codegen.to_triton import TYPES

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


class TritonEmitter(RowEmitter):
    def text(self) -> str:
        """The full function."""
        self.real = TYPES[self.group.real]
        self.loads: list[str] = []  # of vertices: before all else, once for all edges
        body = list(self.body())
        head = [f"e0 = tl.load({self.at(self.group.first)} + lo)"] if any(" - e0" in line for line in body) else []
        indices = [f"p{i}" for i, t in enumerate(self.arguments.values()) if t == "i64"]  # they begin anywhere
        return "\n".join([
            f"@triton.jit(do_not_specialize={[*indices, 'lo', 'eb']})",
            f"def {self.name}({', '.join([*(f'p{i}' for i in range(len(self.arguments))), 'lo', 'eb'])}, BLOCK: tl.constexpr):",
            "    v = lo + tl.program_id(0)",
            "    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
            f"    m = j < {self.group.lanes}",
            *(f"    {line}" for line in [*head, *self.loads, *body]),
        ])  # fmt: skip

    def writer(self) -> Writer:
        return Writer(EXACT, python, lambda text, _: f"({text}).to({self.real})", entry=2)

    def reload(self, value: Value) -> str:
        return self.names[value]

    def collect(self, value: Value, slot: Messages) -> Iterator[str]:
        name = self.names[value]
        yield f"{name} = tl.zeros([BLOCK], {self.real})"
        for rows, first, index in slot.paths:
            begin = self.at(first)
            yield f"for k in range(tl.load({begin} + v), tl.load({begin} + v + 1)):"
            row = f"{self.at(rows, self.group.real)} + tl.load({self.at(index)} + k) * {self.group.lanes}"
            yield f"    {name} += tl.load({row} + j, mask=m, other=0.0)"

    def read(self, slot: RowSlot) -> str:
        guard = ", mask=m, other=0" if any(stride for _, _, stride in slot.dims) else ""
        return f"tl.load({self._row(slot)}{guard}){' != 0' if slot.dtype == 'bool' else ''}"

    def _row(self, slot: RowSlot) -> str:
        at, column = self.at(slot.pointer, slot.dtype), slot.column("j", "//")
        if not slot.columns:
            return f"{at} + {column}"
        row = f"tl.load({self.at(slot.via)} + {slot.of})" if slot.via is not None else f"({slot.of})"
        return f"{at} + {row} * {slot.columns} + {column}"

    def define(self, value: Value, text: str) -> list[str]:
        lines = [f"{self.names[value]} = {self._wide(value, text)}"]
        if value.fn != "load" or value in self.of_edges:
            return lines
        self.loads += lines
        self.known[value] = self.names[value]
        return []

    def _wide(self, value: Value, text: str) -> str:
        return text if value.level is Level.ELEMENT else f"tl.full([BLOCK], {text}, {self.real})"

    def store(self, slot: RowSlot, text: str) -> str:
        return f"tl.store({self._row(slot)}, {text}, mask=m)"

    def add(self, total: Value, text: str) -> str:
        name = self.names[total]
        return f"{name} = {f'{name} + {text}' if total.name == 'sum' else EXACT['maximum'].format(name, text)}"

    def columns(self, lines: list[str]) -> Iterator[str]:
        yield from lines

    def over_edges(self, sums: list[Value], lines: list[str]) -> Iterator[str]:
        first = self.at(self.group.first)
        for v in sums:
            yield f"{self.names[v]} = tl.full([BLOCK], {'0.0' if v.name == 'sum' else python(float('-inf'))}, {self.real})"
        yield f"for e in range(tl.load({first} + v), tl.load({first} + v + 1)):"
        yield from (f"    {line}" for line in lines)
        for v in sums:
            if v.name != "sum":
                yield f"{self.names[v]} = tl.where(tl.load({first} + v) == tl.load({first} + v + 1), 0.0, {self.names[v]})"
