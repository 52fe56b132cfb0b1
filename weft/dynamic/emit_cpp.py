"""Fused kernels as C++: for each vertex, for each block of lanes, loops over lanes and over edges.

The function takes a table of pointers, one per Pointer in order, and the rows [lo, hi) of the class to work on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from weft.dynamic import ops
from weft.dynamic.kernel import SEGMENT, Access, Kernel, cat_parts, operands, statement
from weft.dynamic.phases import base, domain
from weft.dynamic.store import Pointer, Stores

TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "bool"}
HEADER = Path(__file__).with_name("lanes.h")
BLOCK = 64
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==",
          "ne": "!=", "and": "&&", "or": "||"}  # fmt: skip
_CALL = {"max": "w_max<T>", "min": "w_min<T>", "exp": "w_exp", "tanh": "w_tanh", "sigmoid": "w_sigmoid", "abs": "std::fabs",
         "log": "std::log", "sqrt": "std::sqrt", "sin": "std::sin", "cos": "std::cos", "erf": "std::erf", "pow": "std::pow"}  # fmt: skip


def source(kernels: list[tuple[str, str]]) -> str:
    """One file with several kernels, given as (name, text)."""
    return HEADER.read_text() + "\n" + "\n".join(text for _, text in kernels)


@dataclass
class Emitter:
    """Writes one kernel."""

    kernel: Kernel
    stores: Stores
    name: str

    def __post_init__(self) -> None:
        self.pointers: list[Pointer] = []
        self.level = self.kernel.level()
        self.dtype = next(
            n.meta["val"].dtype for n in [*self.kernel.nodes, *self.kernel.loads] if n.meta["val"].dtype.is_floating_point
        )
        self.edges = {n for n in self.kernel.nodes if domain(n) == "edge"}
        self.kept = self._kept()

    def text(self) -> str:
        """The whole function."""
        body = [f"    {line}" for line in self._row()]
        if any(" - e0" in line for line in body):
            body.insert(0, f"    const i64 e0 = {self._at(Pointer('index', 'edge_first'))}[lo];")
        table = [f"  {p.ctype()} p{i} = ({p.ctype()})p[{i}];" for i, p in enumerate(self.pointers)]
        lanes = self.kernel.lanes
        block = BLOCK if lanes % BLOCK == 0 else min(lanes, BLOCK)
        width = f"const int m = {block};" if lanes % block == 0 else f"const int m = std::min({block}, {lanes} - jb);"
        return "\n".join([
            f'extern "C" void {self.name}(void **p, i64 lo, i64 hi) {{',
            f"  typedef {TYPES[self.dtype]} T;", *table,
            f"  for (i64 v = lo; v < hi; ++v) for (int jb = 0; jb < {lanes}; jb += {block}) {{",
            f"    {width}", *body, "  }", "}",
        ])  # fmt: skip

    def _kept(self) -> set[fx.Node]:
        """Vertex values that outlive the loop which makes them, so they need a place of their own."""
        out = set()
        for node in self.kernel.nodes:
            if node in self.edges:
                if node.target is ops.spread and node.args[0] in self.level:
                    out.add(node.args[0])
                continue
            for a in operands(node):
                if a in self.level and a not in self.edges and self.level[a] != self.level[node]:
                    out.add(a)
        return out | {n for n in self.kernel.nodes if n.target in SEGMENT}

    def _row(self) -> Iterator[str]:
        """All that happens to one block of lanes of one vertex."""
        block = min(BLOCK, self.kernel.lanes)
        names = [*self.kept, *self._gradients()]
        if names:
            yield "T " + ", ".join(f"{_name(n)}[{block}]" for n in sorted(names, key=lambda n: n.name)) + ";"
        for node in self._gradients():
            yield from self._collect(node)
        for at in range(max(self.level.values(), default=0) + 1):
            yield from self._vertex_loop([n for n in self.kernel.nodes if n not in self.edges and self.level[n] == at])
            yield from self._edge_loop(at)

    def _gradients(self) -> list[fx.Node]:
        """Gradients of states that the kernel reads: sums over the readers of the vertex."""
        found = {base(n) for n in self.kernel.loads} & set(self.stores.gradients)
        return sorted(found, key=lambda n: n.name)

    def _collect(self, node: fx.Node) -> Iterator[str]:
        name, lanes = _name(node), self.kernel.lanes
        yield f"for (int j = 0; j < m; ++j) {name}[j] = 0;"
        for via in self.stores.gradients[node]:
            first, index = self._at(Pointer("index", via.first)), self._at(Pointer("index", via.index))
            rows = self._at(Pointer("message", via.key, dtype=self.dtype))
            yield f"for (i64 k = {first}[v]; k < {first}[v + 1]; ++k) {{"
            yield f"  const T *q = {rows} + {index}[k] * {lanes} + jb;"
            yield f"  for (int j = 0; j < m; ++j) {name}[j] += q[j];"
            yield "}"

    def _vertex_loop(self, nodes: list[fx.Node]) -> Iterator[str]:
        plain = [n for n in nodes if n.target not in SEGMENT]
        stored = [n for n in nodes if n in self.kernel.stored]
        if plain or stored:
            yield from self._loop(plain, [n for n in stored if n not in plain])

    def _edge_loop(self, at: int) -> Iterator[str]:
        """One pass over the edges: every edge op of this level, and the sums that wait for it."""
        sums = [n for n in self.kernel.nodes if n.target in SEGMENT and self.level[n] == at + 1]
        ends = [n for n in self.kernel.stored if n in self.edges and self.level[n] == at]
        if not sums and not ends:
            return
        for node in sums:
            start = "0" if SEGMENT[node.target] == "sum" else "-INFINITY"
            yield f"for (int j = 0; j < m; ++j) {_name(node)}[j] = {start};"
        first = self._at(Pointer("index", "edge_first"))
        needed = self._needed([*ends, *[n.args[0] for n in sums]])
        yield f"for (i64 e = {first}[v]; e < {first}[v + 1]; ++e) {{"
        yield from (f"  {line}" for line in self._loop(needed, sums, keep=ends))
        yield "}"
        for node in sums:
            if SEGMENT[node.target] == "max":
                yield f"if ({first}[v] == {first}[v + 1]) for (int j = 0; j < m; ++j) {_name(node)}[j] = 0;"

    def _needed(self, ends: list[fx.Node]) -> list[fx.Node]:
        """The edge ops that `ends` depend on."""
        found: set[fx.Node] = set()
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node in self.edges and node not in found:
                found.add(node)
                todo += operands(node)
        return [n for n in self.kernel.nodes if n in found]

    def _loop(self, nodes: list[fx.Node], others: list[fx.Node], keep: list[fx.Node] | None = None) -> Iterator[str]:
        """A loop over lanes: ops as statements; then sums over edges, or stores of sums already made."""
        lines: list[str] = []
        made: dict[fx.Node, str] = {}
        prologue: list[str] = []
        for node in nodes:
            lines += self._statement(node, made, prologue, keep)
        for node in others:
            if keep is None:
                lines += self._store(node, f"{_name(node)}[j]", prologue)
            else:
                lines.append(self._accumulate(node, made, prologue, lines))
        yield from dict.fromkeys(prologue)
        yield "#pragma omp simd"  # lanes never meet, so buffers that overlap do no harm
        yield "for (int j = 0; j < m; ++j) {"
        yield from (f"  {line}" for line in lines)
        yield "}"

    def _statement(
        self, node: fx.Node, made: dict[fx.Node, str], prologue: list[str], keep: list[fx.Node] | None
    ) -> Iterator[str]:
        if parts := cat_parts(node):
            for i, part in enumerate(parts):
                value, before = self._operand(part, made, prologue)
                yield from before
                if node in self.kernel.stored:
                    yield from self._store(node, value, prologue, column=i * self.kernel.lanes)
            return
        before: list[str] = []
        text = self._expression(statement(node), made, prologue, before)
        yield from before
        kind = TYPES[node.meta["val"].dtype] if node.meta["val"].dtype is torch.bool else "T"
        made[node] = f"{_name(node)}_"
        yield f"const {kind} {made[node]} = {text};"
        if node in self.kept:
            yield f"{_name(node)}[j] = {made[node]};"
        if node in self.kernel.stored and (keep is None or node in keep):
            yield from self._store(node, made[node], prologue)

    def _expression(self, e: Any, made: dict[fx.Node, str], prologue: list[str], before: list[str]) -> str:
        if isinstance(e, fx.Node):
            value, lines = self._operand(e, made, prologue)
            before += lines
            return value
        if not isinstance(e, tuple):
            return f"T({float(e)!r})" if abs(float(e)) != float("inf") else f"T({'-' if e < 0 else ''}INFINITY)"
        function, *args = e
        texts = [self._expression(a, made, prologue, before) for a in args]
        if function in _INFIX:
            return f"({texts[0]} {_INFIX[function]} {texts[1]})"
        if function == "where":
            return f"({texts[0]} ? {texts[1]} : {texts[2]})"
        if function in ("neg", "not"):
            return f"({'-' if function == 'neg' else '!'}{texts[0]})"
        return f"{_CALL[function]}({', '.join(texts)})"

    def _operand(self, node: fx.Node, made: dict[fx.Node, str], prologue: list[str]) -> tuple[str, list[str]]:
        """A value to read, and lines that fetch it first."""
        if node in made:
            return made[node], []
        if node in self.kept:
            return f"{_name(node)}[j]", []
        access = self.kernel.loads[node]
        made[node] = f"{_name(node)}_"
        if access.source in self.stores.gradients:
            return made[node], [f"const T {made[node]} = {_name(access.source)}[j];"]
        where = self._address(access, prologue)
        kind = TYPES[node.meta["val"].dtype] if node.meta["val"].dtype is torch.bool else "T"
        return made[node], [f"const {kind} {made[node]} = {where};"]

    def _address(self, access: Access, prologue: list[str]) -> str:
        pointer, row = self.stores.where(access.source)
        at = self._at(pointer)
        columns = self.stores.columns(access.source)
        if not access.has_rows:
            return f"{at}[{_column(access)}]"
        index = f"{self._at(Pointer('index', row.index))}[{row.of}]" if row.index else row.of
        name = f"r{at}_{row.index or row.of[0]}".replace(" ", "")
        prologue.append(f"const {pointer.element()} *{name} = {at} + ({index}) * {columns};")
        return f"{name}[{_column(access)}]"

    def _store(self, node: fx.Node, value: str, prologue: list[str], column: int = 0) -> Iterator[str]:
        pointer, row = self.stores.where(node)
        at, columns = self._at(pointer), self.stores.columns(node)
        name = f"w{at}"
        prologue.append(f"{pointer.element()} *{name} = {at} + ({row.of}) * {columns};")
        yield f"{name}[{column} + jb + j] = {value};"

    def _accumulate(self, node: fx.Node, made: dict[fx.Node, str], prologue: list[str], lines: list[str]) -> str:
        value, before = self._operand(node.args[0], made, prologue)
        lines += before
        name = _name(node)
        return f"{name}[j] += {value};" if SEGMENT[node.target] == "sum" else f"{name}[j] = w_max<T>({name}[j], {value});"

    def _at(self, pointer: Pointer) -> str:
        if pointer not in self.pointers:
            self.pointers.append(pointer)
        return f"p{self.pointers.index(pointer)}"


def _column(access: Access) -> str:
    """The column of lane jb + j."""
    terms = [str(access.offset)] if access.offset else []
    for after, size, stride in access.dims:
        if stride:
            lane = "(jb + j)"
            lane = lane if after == 1 else f"({lane} / {after})"
            lane = lane if len(access.dims) == 1 or (after, size) == _slowest(access) else f"({lane} % {size})"
            terms.append(lane if stride == 1 else f"{lane} * {stride}")
    return " + ".join(terms) or "0"


def _slowest(access: Access) -> tuple[int, int]:
    return access.dims[0][:2]


def _name(node: fx.Node) -> str:
    return node.name
