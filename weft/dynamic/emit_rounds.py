"""All rounds of a batch as one Triton kernel that stays on the device: no launch, no padding and no template between rounds.

The kernel reads from a table which rows each round has. Its programs share the tiles of a stage and then meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from weft.dynamic.cell import Cell
from weft.dynamic.emit import column, is_bool
from weft.dynamic.emit_triton import HEADER, TYPES, TritonEmitter
from weft.dynamic.kernel import SEGMENT, Kernel
from weft.dynamic.product import HIGH
from weft.dynamic.stages import Stage, head, stages, tail
from weft.dynamic.store import Pointer
from weft.runtime import modules

TABLE = 5  # numbers per round: class, first and last row, first and last edge; the count of rounds comes before them
MULTIPLY = """\
@triton.jit
def w_multiply(a, w, low, at, inside, sums, PRECISION: tl.constexpr):
    b = tl.load(w + at, mask=inside, other=0.0)
    if PRECISION == "tf32x3":  # the matrix is there in two halves
        h = w_high(a)
        part = tl.dot(a - h, b, input_precision="tf32")
        part = tl.dot(h, tl.load(low + at, mask=inside, other=0.0), part, input_precision="tf32")
        return sums + tl.dot(h, b, part, input_precision="tf32")
    return tl.dot(a, b, sums, input_precision=PRECISION)
"""
MEET = """\
@triton.jit
def w_meet(count, goal):
    tl.debug_barrier()
    seen = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") + 1
    polls = 0
    while (seen < goal) & (polls < 16777216):  # seconds: a lost program must not hang the device
        seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
        polls += 1
    tl.debug_barrier()
"""


@dataclass(frozen=True)
class Tiles:
    """The sizes a kernel is compiled for: a tile of a product, one of a fused kernel alone, and how products multiply."""

    rows: int = 64
    lanes: int = 32
    inner: int = 32
    warps: int = 8
    depth: int = 3
    per_processor: int = 1
    precision: str = "ieee"

    def constants(self) -> dict[str, Any]:
        return {"BM": self.rows, "BL": self.lanes, "BK": self.inner, "DEPTH": self.depth, "PRECISION": self.precision}


@dataclass
class Code:
    """A kernel for all rounds, forward or backward, and its arguments: (class, pointer or matrix)."""

    function: Any
    arguments: list[tuple[int, Pointer | fx.Node]]
    classes: list[int]


@dataclass
class Writer:
    """The text of one kernel while it is written."""

    phase: str
    arguments: list[tuple[int, Pointer | fx.Node]] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)

    def at(self, klass: int, argument: Pointer | fx.Node) -> str:
        """The names that pass an argument on."""
        if (klass, argument) not in self.arguments:
            self.arguments.append((klass, argument))
        i = self.arguments.index((klass, argument))
        return ", ".join(names(f"q{i}", argument))


def names(name: str, argument: Pointer | fx.Node) -> list[str]:
    """What is passed for an argument: a pointer; for a matrix the pointers to its halves and two strides."""
    return [name] if isinstance(argument, Pointer) else [name, f"{name}l", f"{name}k", f"{name}n"]


def build(cells: Mapping[int, Cell], phase: str) -> Code | None:
    """One kernel for all rounds of a phase, or None where some step does not fit into one."""
    found = {k: stages(cell, phase) for k, cell in cells.items()}
    if any(s is None for s in found.values()):
        return None
    known = {k: s for k, s in found.items() if s}
    if not known:
        return None
    writer = Writer(phase)
    text = _main(writer, known, {k: cells[k] for k in known})
    module = modules.load("\n\n".join([HEADER, HIGH, MULTIPLY, MEET, *writer.functions, text]))
    return Code(getattr(module, f"weft_{phase}"), writer.arguments, list(known))


def _main(writer: Writer, known: Mapping[int, list[Stage]], cells: Mapping[int, Cell]) -> str:
    """The loop over rounds: which class it is, its stages, and where all programs meet."""
    meets_last = any(_must_meet(a, b) for a in known.values() for b in known.values())
    body: list[str] = []
    for k, these in known.items():
        body.append(f"if klass == {k}:")
        for i, stage in enumerate(these):
            if stage.waits:
                body += ["    goal += programs", "    w_meet(meeting, goal)"]
            body.append(f"    {_call(writer, stage, k, i, cells[k])}")
        if meets_last:
            body += ["    goal += programs", "    w_meet(meeting, goal)"]
    passed = [n for i, (_, a) in enumerate(writer.arguments) for n in names(f"q{i}", a)]
    loose = [f"q{i}" for i, (_, a) in enumerate(writer.arguments) if isinstance(a, Pointer) and a.kind == "index"]
    bases = [f"eb{k}" for k in known]
    which = "i" if writer.phase == "rounds" else "count - 1 - i"
    return "\n".join([
        f"@triton.jit(do_not_specialize={[*loose, 'table', *bases]})",
        f"def weft_{writer.phase}({', '.join([*passed, 'table', 'meeting', *bases])}, BM: tl.constexpr, BL: tl.constexpr, "
        "BK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr):",
        "    programs = tl.num_programs(0)",
        "    goal = 0",
        "    count = tl.load(table).to(tl.int32)",
        "    for i in range(0, count):",
        f"        at = table + 1 + ({which}) * {TABLE}",
        "        klass = tl.load(at)",
        "        lo = tl.load(at + 1)",
        "        hi = tl.load(at + 2)",
        "        elo = tl.load(at + 3)",
        "        ehi = tl.load(at + 4)",
        *(f"        {line}" for line in body),
    ])  # fmt: skip


def _must_meet(one: list[Stage], after: list[Stage]) -> bool:
    """Whether the first stages of a round may not run beside the last ones of the round before."""
    return not any(s.waits for s in after) or any(s.needs(tail(one)) for s in head(after))


def _call(writer: Writer, stage: Stage, klass: int, number: int, cell: Cell) -> str:
    name = f"s{klass}_{number}"
    emitter = TileEmitter(stage, cell, name)
    writer.functions.append(emitter.text())
    passed = [writer.at(klass, p) for p in (*emitter.pointers, *emitter.matrices)]
    return f"{name}({', '.join(passed)}, lo, hi, elo, ehi, eb{klass}, BM, BL, BK, DEPTH, PRECISION)"


class TileEmitter(TritonEmitter):
    """A stage: values are tiles of BM vertices by BL lanes, so what TritonEmitter writes for one vertex holds for many."""

    shape = "BM, BL"

    def __init__(self, stage: Stage, cell: Cell, name: str) -> None:
        kernel = stage.kernel or Kernel(int(stage.products[0].meta["val"].shape[1]), nodes=[])
        self.stage, self.matrices = stage, list[fx.Node]()
        if stage.kernel is not None:
            super().__init__(kernel, cell.stores, name)
        else:
            self.kernel, self.stores, self.name, self.pointers = kernel, cell.stores, name, []
            self.dtype = stage.products[0].meta["val"].dtype
        self.mask, self.row_mask = "m", "r"

    def text(self) -> str:
        """The whole function."""
        self.made: dict[fx.Node, str] = {}
        body = list(self._multiply())
        if self.stage.kernel is not None:
            body += self._body()
        else:
            body += self._keep(self.stage.products[0])
        if any(" - e0" in line for line in body):
            body.insert(0, f"e0 = tl.load({self.index('edge_first')} + lo)")
        e, low, high = ("e", "eb + elo", "eb + ehi") if self.stage.on_edges else ("v", "lo", "hi")
        passed = [n for i, p in enumerate(self.pointers) for n in names(f"p{i}", p)]
        passed += [n for i, w in enumerate(self.matrices) for n in names(f"w{i}", w)]
        narrow = "" if self.stage.products else "    BM: tl.constexpr = 16\n    BL: tl.constexpr = 64\n"
        lanes = self.kernel.lanes
        return "\n".join([
            "@triton.jit",
            f"def {self.name}({', '.join(passed)}, lo, hi, elo, ehi, eb, BM_: tl.constexpr, BL_: tl.constexpr, BK: tl.constexpr, "
            "DEPTH: tl.constexpr, PRECISION: tl.constexpr):",
            narrow or "    BM: tl.constexpr = BM_\n    BL: tl.constexpr = BL_\n",
            f"    across: tl.constexpr = ({lanes} + BL - 1) // BL",
            f"    tiles = tl.cdiv({high} - ({low}), BM).to(tl.int32) * across",
            "    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):",
            f"        {e} = {low} + (t // across) * BM + tl.arange(0, BM)[:, None]",
            "        j = (t % across) * BL + tl.arange(0, BL)[None, :]",
            f"        r = {e} < {high}",
            f"        c = j < {lanes}",
            "        m = r & c",
            *(f"        {line}" for line in body),
        ])  # fmt: skip

    # --- products

    def _multiply(self) -> Iterator[str]:
        """Sums of products, tile by tile along the inner dim."""
        for product in self.stage.products:
            left, right = product.args
            inner = int(right.meta["val"].shape[0])
            at, _, row, columns = self.place(left)
            w = f"w{self._matrix(right)}"
            sums = self._offsets(product)
            rows = f"tl.load({self.index(row.index)} + {row.of}, mask=r, other=0)" if row.index else f"({row.of})"
            yield f"{product.name}_r = {rows}"
            yield from (f"{name} = tl.zeros([BM, BL], tl.float32)" for name in sums)
            yield f"for k in tl.range(0, {inner}, BK, num_stages=DEPTH):"
            yield "    kk = k + tl.arange(0, BK)"
            yield f"    a = tl.load({at} + {product.name}_r * {columns} + kk[None, :], mask=r & (kk[None, :] < {inner}), other=0.0)"
            for name, offset in sums.items():
                where, inside = f"kk[:, None] * {w}k + (j + {offset}) * {w}n", f"(kk[:, None] < {inner}) & c"
                yield f"    {name} = w_multiply(a, {w}, {w}l, {where}, {inside}, {name}, PRECISION)"

    def _matrix(self, node: fx.Node) -> int:
        if node not in self.matrices:
            self.matrices.append(node)
        return self.matrices.index(node)

    def _offsets(self, product: fx.Node) -> dict[str, int]:
        """The columns of a product that are read at lane 0, with a name for the sum at each."""
        if self.stage.kernel is None:
            return {f"{product.name}_0": 0}
        found = {a.offset for a in self.kernel.loads.values() if a.source is product}
        return {f"{product.name}_{offset}": offset for offset in sorted(found)}

    def _keep(self, product: fx.Node) -> Iterator[str]:
        """Store a product that stands alone, in its parts where it has them."""
        (value,) = self._offsets(product)
        if not self.stage.parts:
            yield self._store(product, value)
        for part in self.stage.parts:
            at = self.at(Pointer(part.home.kind, part.home.key, part.home.domain, part.home.dtype, own=True))
            inside = f"m & (j >= {part.offset}) & (j < {part.offset + part.width})"
            yield f"tl.store({at} + v * {part.width} + j - {part.offset}, {value}, mask={inside})"

    # --- what differs from one vertex at a time

    def _collect(self, node: fx.Node) -> Iterator[str]:
        yield f"{node.name} = tl.zeros([BM, BL], {TYPES[self.dtype]})"
        for via in self.stores.gradients[node]:
            index, rows = self.index(via.index), self.at(Pointer("message", via.key, dtype=self.dtype))
            yield from self._bounds(self.index(via.first))
            yield "for k in range(0, tl.max(end - begin).to(tl.int32)):"
            yield "    more = r & (begin + k < end)"
            yield f"    from_row = tl.load({index} + begin + k, mask=more, other=0)"
            yield f"    {node.name} += tl.load({rows} + from_row * {self.kernel.lanes} + j, mask=more & c, other=0.0)"
        self.made[node] = node.name

    def _bounds(self, first: str) -> Iterator[str]:
        yield f"begin = tl.load({first} + v, mask=r, other=0)"
        yield f"end = tl.load({first} + v + 1, mask=r, other=0)"

    def _edges(self, level: int) -> Iterator[str]:
        sums, ends = self.sums(level), self.edge_ends(level)
        if not sums and not ends:
            return
        for node in sums:
            start = "0.0" if SEGMENT[node.target] == "sum" else 'float("-inf")'
            yield f"{node.name} = tl.full([BM, BL], {start}, {TYPES[self.dtype]})"
        yield from self._bounds(self.index("edge_first"))
        yield "for k in range(0, tl.max(end - begin).to(tl.int32)):"
        yield "    e = begin + k"
        yield "    re = r & (e < end)"
        yield "    me = re & c"
        outside, lines = dict(self.made), list[str]()
        self.mask, self.row_mask = "me", "re"
        for node in self.needed([*ends, *[n.args[0] for n in sums]]):
            lines += self._statement(node, node in ends)
        for node in sums:
            value = self._value(node.args[0], lines)
            total = f"{node.name} + {value}" if SEGMENT[node.target] == "sum" else f"w_max({node.name}, {value})"
            lines.append(f"{node.name} = tl.where(me, {total}, {node.name})")
        self.mask, self.row_mask, self.made = "m", "r", outside
        yield from (f"    {line}" for line in lines)
        for node in sums:
            self.made[node] = node.name
            if SEGMENT[node.target] == "max":
                yield f"{node.name} = tl.where(begin == end, 0.0, {node.name})"

    def _value(self, node: fx.Node, lines: list[str]) -> str:
        access = self.kernel.loads.get(node)
        if access is not None and access.source in self.stage.products:
            return f"{access.source.name}_{access.offset}"
        if node not in self.made and access is not None and access.source not in self.stores.gradients:
            at, _, row, columns = self.place(access.source)
            wide = any(stride for _, _, stride in access.dims)
            where = column(access, "j", "//")
            if access.has_rows:
                own = self.row_mask
                index = f"tl.load({self.index(row.index)} + {row.of}, mask={own}, other=0)" if row.index else f"({row.of})"
                where = f"{index} * {columns} + {where}"
            mask = {(True, True): self.mask, (True, False): self.row_mask, (False, True): "c"}.get((access.has_rows, wide), "")
            load = f"tl.load({at} + {where}{f', mask={mask}, other=0' if mask else ''})"
            lines.append(f"{node.name} = {load}{' != 0' if is_bool(node) else ''}")
            self.made[node] = node.name
        return super()._value(node, lines)

    def _store(self, node: fx.Node, value: str, at_column: int = 0) -> str:
        at, _, row, columns = self.place(node)
        return f"tl.store({at} + ({row.of}) * {columns} + {at_column} + j, {value}, mask={self.mask})"
