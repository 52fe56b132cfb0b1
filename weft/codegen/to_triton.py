"""A fused group as Triton: one launch per phase, in-kernel signals, 16-byte loads through address tables.

Phases are separate launches, so a program may rely on its own rank's last phase being over; `meet` does the same for
the other ranks. Sums over elements are left per piece of work in peer memory and added up by whoever needs them.
"""

from __future__ import annotations

from weft.codegen.expr import Level, Slot, Value, ordered
from weft.codegen.phases import Phase, PhasedGroup
from weft.codegen.text import TRITON, Writer, bare, host_scalars, python, totals_in, uses
from weft.codegen.to_cpu import HEAD, columns, headline, reader_name

TYPES = {"f64": "tl.float64", "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16"}
START = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
JOIN = {"sum": "{0} + {1}", "max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})"}
FOLD = {"sum": "tl.sum", "max": "tl.max", "min": "tl.min"}
TOTAL = '''\
@triton.jit
def total_{op}(sums_of, first, count, WORLD: tl.constexpr):
    """The {op} of what every rank left for `count` pieces of work from `first`."""
    part = tl.full([1024], {start}, {real})
    for r in tl.static_range(WORLD):
        theirs = tl.load(sums_of + r).to(tl.pointer_type({real})) + first
        for j in range(0, count, 1024):
            lane = j + tl.arange(0, 1024)
            part = {join}
    return {fold}(part)
'''


def emit(phased: PhasedGroup, world: int) -> str:
    """The Triton source of a group: `phase0`, `phase1`, ..."""
    return _Emitter(phased, world).source()


class _Emitter:
    def __init__(self, phased: PhasedGroup, world: int) -> None:
        self.phased, self.world = phased, world
        self.real = TYPES[phased.group.compute]
        self.totals = {t: k for k, t in enumerate(phased.totals)}
        self.scalars = host_scalars(phased.group.roots)
        self.column: dict[Slot, int] = {}
        at = HEAD
        for slot in columns(phased):
            self.column[slot] = at
            at += world if slot.spread else 1
        self.width = at

    def source(self) -> str:
        head = [f'"""{headline(self.phased)}."""', "", "import triton", "import triton.language as tl", ""]
        head += ["from weft.runtime.device_sync import meet, meet_alone, uniform  # noqa: F401", ""]
        phases = [line for phase in self.phased.phases for line in ["", *self.tile(phase), "", "", *self.phase(phase), ""]]
        return "\n".join([*head, *self._helpers(), *phases])

    def _helpers(self) -> list[str]:
        seen = "tl.load(theirs + lane, mask=lane < count, other={0})"
        return [
            "\n" + TOTAL.format(op=op, real=self.real, start=START[op], fold=FOLD[op],
                                join=JOIN[op].format("part", seen.format(START[op])))
            for op in dict.fromkeys(t.name for t in self.totals)
        ]  # fmt: skip

    def tile(self, phase: Phase) -> list[str]:
        """The work on one block of elements, given the addresses and scalars of its row."""
        writer = self._writer(phase)
        lines = [f"{writer.name(v, reader_name(r))} = {self._read(r)}" for v, r in phase.reads.items()]
        count = uses([*phase.body, *phase.totals])
        stored = {v: slot for slot, v in phase.stores}
        for k, v in enumerate(phase.body):
            if count.get(v, 0) > 1 or v in stored:
                text = bare(writer.text(v))
                lines.append(f"{writer.name(v, f'new_{stored[v].name}' if v in stored else f't{k}')} = {text}")
        for slot, v in phase.stores:
            value = bare(writer.text(v))
            value = value if slot.dtype == self.phased.group.compute else f"({value}).to({TYPES[slot.dtype]})"
            pointers = self._pointers(slot) if slot.spread else [slot.name]
            lines += [f"tl.store({pointer} + at, {value}, mask=inside)" for pointer in pointers]
        sums = [f"tl.where(inside, {writer.text(t.args[0])}, {START[t.name]})" for t in phase.totals]
        lines += [f"return {', '.join(sums)}"] if sums else []
        args = ", ".join([*self._all_pointers(phase), *(writer.names[v] for v in self._row_values(phase))])
        return ["@triton.jit", f"def tile{phase.number}({args}, at, inside, RANK: tl.constexpr):", *_indent(lines)]

    def phase(self, phase: Phase) -> list[str]:
        names = [f"sum{self.totals[t]}" for t in phase.totals]
        sums = list(zip(phase.totals, names, strict=True))
        writer = self._writer(phase)
        call = ", ".join([*self._all_pointers(phase), *(writer.names[v] for v in self._row_values(phase))])
        loop = [
            "which = tl.load(work + 4 * piece)",
            f"row = table + which * {self.width}",
            "start = tl.multiple_of(tl.load(work + 4 * piece + 1), 16)",
            "stop = tl.minimum(start + CHUNK, tl.load(row))",
            "even = tl.multiple_of(start + tl.maximum(stop - start, 0) // 16 * 16, 16)",
            *self._pointer_lines(phase),
            *self._scalar_lines(phase),
            *(f"{name} = tl.full([BLOCK], {START[t.name]}, {self.real})" for t, name in sums),
            "for first in range(start, even, BLOCK):",
            *_indent(self._call(phase, call, names, "first + tl.arange(0, BLOCK)", "even", fold=False)),
            *(f"{name} = {FOLD[t.name]}({name})" for t, name in sums),
            "if even < stop:",
            *_indent(self._call(phase, call, names, "even + tl.arange(0, 16)", "stop", fold=True)),
            *(f"tl.store(sums + {self.totals[t]} * pieces + piece, {name})" for t, name in sums),
        ]
        body = [
            "block = tl.program_id(0)",
            "if ENTER:",
            "    meet(pads, block, LIMIT, RANK, WORLD, LANES)",
            *self._before_loop(phase),
            "for piece in range(block, pieces, tl.num_programs(0)):",
            *_indent(loop),
            "if LEAVE:",
            "    meet(pads, block, LIMIT, RANK, WORLD, LANES)",
        ]
        if phase.totals:
            body.insert(1, f"sums = tl.load(sums_of + RANK).to(tl.pointer_type({self.real}))")
        return [
            "@triton.jit",
            f"def phase{phase.number}(table, work, pieces, scalars, sums_of, pads, LIMIT, RANK: tl.constexpr,",
            "           WORLD: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,",
            "           ALIGN: tl.constexpr, ENTER: tl.constexpr, LEAVE: tl.constexpr):",
            *_indent(body),
        ]

    def _call(self, phase: Phase, args: str, names: list[str], at: str, stop: str, *, fold: bool) -> list[str]:
        lines = [f"at = {at}"]
        call = f"tile{phase.number}({args}, at, at < {stop}, RANK)"
        if not names:
            return [*lines, call]
        parts = [f"more{i}" for i in range(len(names))]
        lines.append(f"{', '.join(parts)} = {call}")
        for t, name, part in zip(phase.totals, names, parts, strict=True):
            lines.append(f"{name} = {JOIN[t.name].format(name, f'{FOLD[t.name]}({part})' if fold else part)}")
        return lines

    def _read(self, reader: Value) -> str:
        slot = reader.slot
        assert slot is not None
        wide = "" if slot.dtype == self.phased.group.compute else f".to({self.real})"

        def one(pointer: str) -> str:
            return f"tl.load({pointer} + at, mask=inside, other=0.0){wide}"

        if slot.index:
            return f"{slot.name} + at"
        if reader.fn == "load":
            return f"tl.load({slot.name}){wide}" if slot.once else one(slot.name)
        text = one(f"{slot.name}_0")
        for r in range(1, self.world):
            text = JOIN[reader.name].format(text, one(f"{slot.name}_{r}"))
        return text

    def _pointers(self, slot: Slot) -> list[str]:
        return [f"{slot.name}_{r}" for r in range(self.world)]

    def _all_pointers(self, phase: Phase) -> list[str]:
        """Names of the addresses a phase uses, in table order."""
        own = {r.slot for r in phase.reads.values() if r.fn == "load"}
        own |= {slot for slot, _ in phase.stores if not slot.spread}
        every = {r.slot for r in phase.reads.values() if r.fn == "reduce"} | {s for s, _ in phase.stores if s.spread}
        names = []
        for slot in self.column:
            names += self._pointers(slot) if slot in every else []
            names += [slot.name] if slot in own else []
        return names

    def _pointer_lines(self, phase: Phase) -> list[str]:
        lines, used = [], set(self._all_pointers(phase))
        for slot, at in self.column.items():
            columns = {name: str(at + r) for r, name in enumerate(self._pointers(slot)) if slot.spread}
            columns[slot.name] = f"{at} + RANK" if slot.spread else str(at)
            for name, column in columns.items():
                if name in used and slot.index:
                    lines.append(f"{name} = tl.load(row + {column})")
                elif name in used:
                    pointer = f"tl.load(row + {column}).to(tl.pointer_type({TYPES[slot.dtype]}))"
                    lines.append(f"{name} = tl.multiple_of({pointer}, ALIGN)")
        return lines

    def _writer(self, phase: Phase) -> Writer:
        writer = Writer(TRITON, python, self._cast)
        for k, v in enumerate(self._row_values(phase)):
            writer.name(v, f"{v.name}_" if v.fn == "scalar" else f"s{k}_")
        return writer

    def _row_values(self, phase: Phase) -> list[Value]:
        """Values below element level that elements of this phase use, arguments first."""
        roots = [*phase.body, *phase.totals]
        wanted = {a for v in roots for a in v.args if a.level < Level.ELEMENT and a.fn != "const"}
        return [v for v in ordered(wanted) if v in wanted]

    def _scalar_lines(self, phase: Phase) -> list[str]:
        names = self._writer(phase).names
        writer = Writer(TRITON, python, self._cast)
        for k, v in enumerate(self.scalars):
            writer.name(v, f"tl.load(own + {k})")
        for t, k in self.totals.items():
            writer.name(t, f"total{k}")
        lines = [f"own = scalars + tl.load(row + 1) * {len(self.scalars)}"] if self.scalars else []
        totals = [t for t in totals_in(self._row_values(phase)) if t.level == Level.ROW]
        if totals:
            lines += ["if which != last:"]
            first, count = (f"tl.load(work + 4 * piece + {column})" for column in (2, 3))
            lines += [f"    {self._sum_up(t, first, count)}" for t in totals]
            lines += ["    last = which"]
        return lines + [f"{names[v]} = {bare(writer.text(v))}" for v in self._row_values(phase)]

    def _before_loop(self, phase: Phase) -> list[str]:
        """Totals over all rows are added up once; those of a row when the row changes."""
        totals = totals_in(self._row_values(phase))
        rows = [t for t in totals if t.level == Level.ROW]
        lines = [self._sum_up(t, "0", "pieces") for t in totals if t.level == Level.CALL]
        lines += [f"total{self.totals[t]} = tl.full([], 0.0, {self.real})" for t in rows]
        return lines + (["last = tl.full([], -1, tl.int64)"] if rows else [])

    def _sum_up(self, t: Value, first: str, count: str) -> str:
        k = self.totals[t]
        return f"total{k} = total_{t.name}(sums_of, {k} * pieces + {first}, {count}, WORLD)"

    def _cast(self, text: str, dtype: str) -> str:
        return text if dtype == self.phased.group.compute else f"({text}).to({TYPES[dtype]}).to({self.real})"


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]
