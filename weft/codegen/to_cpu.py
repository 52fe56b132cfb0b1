"""A fused group as C++: one function for the full group, one sweep over the rows per phase.

A row of the table is: elements, index of its scalars, first row of the same tensor, then addresses, one per slot or one per
rank for spread slots. Sums over a tensor in several rows are added up at its first.
"""

from __future__ import annotations

import math

from weft.codegen.expr import Level, Slot, Value, ordered
from weft.codegen.phases import Phase, PhasedGroup
from weft.codegen.text import CPP, Writer, bare, host_scalars, uses

TYPES = {"f64": "double", "f32": "float", "bf16": "uint16_t", "f16": "_Float16"}
LOAD = {"f64": "{0}", "f32": "{0}", "bf16": "weft::widen({0})", "f16": "real({0})"}
STORE = {"f64": "{0}", "f32": "{0}", "bf16": "weft::narrow({0})", "f16": "_Float16({0})"}
HEAD = 3  # columns before the addresses
START = {"sum": "0", "max": "-INFINITY", "min": "INFINITY"}
JOIN = {"sum": "{0} + {1}", "max": "weft::larger({0}, {1})", "min": "weft::smaller({0}, {1})"}


def emit(phased: PhasedGroup, world: int) -> str:
    """The C++ source of a group, with `run` as its only entry."""
    return _Emitter(phased, world).source()


class _Emitter:
    def __init__(self, phased: PhasedGroup, world: int) -> None:
        self.phased, self.world = phased, world
        self.real = TYPES[phased.group.compute]
        self.totals = {t: k for k, t in enumerate(phased.totals)}
        self.scalars = host_scalars(phased.group.roots)
        self.columns = columns(phased)

    def source(self) -> str:
        width = sum(self.world if s.spread else 1 for s in self.columns) + HEAD
        head = [
            f"// {headline(self.phased)}",
            '#include "weft_sync.h"',
            "#include <cmath>",
            "",
            f"using real = {self.real};",
            f"constexpr int WORLD = {self.world}, COLUMNS = {width}, SCALARS = {len(self.scalars)}, "
            f"TOTALS = {len(self.totals)}, BLOCK = 512;",
            "",
        ]
        parts = [line for phase in self.phased.phases for line in [*self.phase(phase), ""]]
        return "\n".join([*head, *parts, *self.entry(), ""])

    def phase(self, phase: Phase) -> list[str]:
        writer = Writer(CPP, number, self._cast)
        body = [*self._scalar_lines(phase, writer), *self._pointer_lines(phase), *self._loop(phase, writer)]
        sums = ", double *sums" if phase.totals else ""
        return [
            f"static void phase{phase.number}(const int64_t *row, const double *scalars, const double *totals{sums}, "
            "int rank, bool past_caches) {",
            "  const int64_t n = row[0];",
            *("  " + line for line in body),
            "}",
        ]

    def _scalar_lines(self, phase: Phase, writer: Writer) -> list[str]:
        lines = []
        for k, v in enumerate(self.scalars):
            writer.name(v, f"{v.name}_" if v.fn == "scalar" else f"s{k}_")
        for t, k in self.totals.items():
            writer.name(t, f"totals[{k}]")
        roots = [v for _, v in phase.stores] + list(phase.body) + list(phase.totals)
        needed = {a for v in roots for a in v.args if a.level < Level.ELEMENT and a.fn != "const"}
        needed |= {v for v in phase.body if v.level < Level.ELEMENT}
        for k, v in enumerate(self.scalars):
            if v in needed:
                lines.append(f"const real {writer.names[v]} = scalars[{k}];")
            else:
                writer.name(v, f"scalars[{k}]")
        for i, v in enumerate(v for v in ordered(needed) if v in needed and v not in self.scalars):
            text = bare(writer.text(v))
            lines.append(f"const real {writer.name(v, f'r{i}_')} = {text};")
        return lines

    def _pointer_lines(self, phase: Phase) -> list[str]:
        lines, column = [], HEAD
        own = {reader.slot for reader in phase.reads.values() if reader.fn == "load"}
        every = {reader.slot for reader in phase.reads.values() if reader.fn == "reduce"}
        stored = {slot for slot, _ in phase.stores}
        for slot in self.columns:
            if slot.index:
                column += 1
                continue
            type_ = TYPES[slot.dtype]
            if slot.spread and slot in every | stored:
                at = ", ".join(f"reinterpret_cast<{type_} *>(row[{column + r}])" for r in range(self.world))
                lines.append(f"{type_} *const {slot.name}_of[WORLD] = {{{at}}};")
            if slot in own or (slot in stored and not slot.spread):
                at = f"{column} + rank" if slot.spread else str(column)
                lines.append(f"{type_} *const {slot.name} = reinterpret_cast<{type_} *>(row[{at}]);")
            column += self.world if slot.spread else 1
        return lines

    def _loop(self, phase: Phase, writer: Writer) -> list[str]:
        pushed = [slot for slot, _ in phase.stores if slot.spread]
        sums = [(t, f"sum{k}") for t, k in self.totals.items() if t in phase.totals]
        inner, after = self._inner(phase, writer), []
        for slot in pushed:
            what = f"{slot.name}_of[r] + at, new_{slot.name}, count * sizeof({TYPES[slot.dtype]})"
            after += [
                "for (int r = 0; r < WORLD; ++r)",
                f"  if (past_caches && r != rank) weft::stream({what});",
                f"  else memcpy({what});",
            ]
        clause = "".join(f" reduction({_omp(t)}:{name})" for t, name in sums)
        out = [f"alignas(64) {TYPES[slot.dtype]} new_{slot.name}[BLOCK];" for slot in pushed]
        out += [f"double whole_{name} = {START[t.name]};" for t, name in sums]
        out += ["for (int64_t at = 0; at < n; at += BLOCK) {"]
        out += ["  const int64_t count = n - at < BLOCK ? n - at : BLOCK;"]
        out += [f"  real {name} = {START[t.name]};" for t, name in sums]
        out += [
            f"  #pragma omp simd{clause}",
            "  for (int64_t j = 0; j < count; ++j) {",
            "    const int64_t i = at + j;",
        ]
        out += [f"    {line}" for line in inner] + ["  }"] + [f"  {line}" for line in after]
        out += [f"  whole_{name} = {_join(t, f'whole_{name}', f'double({name})')};" for t, name in sums] + ["}"]
        return out + [f"sums[{self.totals[t]}] = whole_{name};" for t, name in sums]

    def _inner(self, phase: Phase, writer: Writer) -> list[str]:
        """What is done to element i."""
        lines = [f"const {_type(r)} {writer.name(v, reader_name(r))} = {self._read(r)};" for v, r in phase.reads.items()]
        count = uses([*phase.body, *phase.totals])
        stored = {v: slot for slot, v in phase.stores}
        for k, v in enumerate(phase.body):
            if count.get(v, 0) > 1 or v in stored:
                name = f"new_{stored[v].name}_value" if v in stored else f"t{k}"
                text = bare(writer.text(v))
                lines.append(f"const real {writer.name(v, name)} = {text};")
        for slot, v in phase.stores:
            at = f"new_{slot.name}[j]" if slot.spread else f"{slot.name}[i]"
            lines.append(f"{at} = {STORE[slot.dtype].format(bare(writer.text(v)))};")
        for t in phase.totals:
            name = f"sum{self.totals[t]}"
            lines.append(f"{name} = {_join(t, name, writer.text(t.args[0]))};")
        return lines

    def _read(self, reader: Value) -> str:
        slot = reader.slot
        assert slot is not None
        if slot.index:
            return f"row[{self._column(slot)}] + i"
        if reader.fn == "load":
            return LOAD[slot.dtype].format(f"{slot.name}[{0 if slot.once else 'i'}]")
        text = LOAD[slot.dtype].format(f"{slot.name}_of[0][i]")
        for r in range(1, self.world):
            text = JOIN[reader.name].format(text, LOAD[slot.dtype].format(f"{slot.name}_of[{r}][i]"))
        return text

    def _column(self, wanted: Slot) -> int:
        before = self.columns[: self.columns.index(wanted)]
        return HEAD + sum(self.world if s.spread else 1 for s in before)

    def _cast(self, text: str, dtype: str) -> str:
        if dtype == self.phased.group.compute:
            return text
        return f"real({LOAD[dtype].format(STORE[dtype].format(text))})" if dtype != "f32" else f"real(float({text}))"

    def entry(self) -> list[str]:
        """Meet, sweep, meet: peers' inputs are ready before, their outputs are complete after."""
        lines = [
            'extern "C" int32_t run(weft::World *world, uint32_t op, const int64_t *table, int64_t rows,',
            "                       const double *scalars, double *const *sums_of, double *totals, int32_t past_caches) {",
            "  if (int32_t outcome = weft::barrier(world, op)) return outcome;",
        ]
        alone = self.world == 1
        lines = lines[:-1] if alone else lines
        for phase in self.phased.phases:
            sums = ", sums_of[world->rank] + k * TOTALS" if phase.totals else ""
            lines += [
                "  for (int64_t k = 0; k < rows; ++k)",
                f"    phase{phase.number}(table + k * COLUMNS, scalars + table[k * COLUMNS + 1] * SCALARS, "
                f"totals + k * TOTALS{sums}, world->rank, past_caches);",
            ]
            if phase.totals:
                meet = ["  if (int32_t outcome = weft::barrier(world, op)) return outcome;"]
                lines += [*([] if alone else meet), *self._join(phase)]
        return [*lines, "  weft::drain();", "  return 0;" if alone else "  return weft::barrier(world, op);", "}"]

    def _join(self, phase: Phase) -> list[str]:
        """Combine the sums of all ranks, in the same order on each; a total over rows is put into every row."""
        lines = ["  for (int64_t k = 0; k < rows; ++k) {"]
        for t in phase.totals:
            at = f"k * TOTALS + {self.totals[t]}"
            lines += [
                f"    totals[{at}] = sums_of[0][{at}];",
                f"    for (int r = 1; r < WORLD; ++r) totals[{at}] = {_join(t, f'totals[{at}]', f'sums_of[r][{at}]')};",
            ]
        lines.append("  }")
        for t in phase.totals:
            j = self.totals[t]
            if t.level == Level.ROW:
                first, own = f"totals[table[k * COLUMNS + 2] * TOTALS + {j}]", f"totals[k * TOTALS + {j}]"
                lines += [
                    f"  for (int64_t k = 0; k < rows; ++k) if (table[k * COLUMNS + 2] != k) {first} = {_join(t, first, own)};",
                    f"  for (int64_t k = 0; k < rows; ++k) {own} = {first};",
                ]
            else:
                lines += [
                    f"  double all{j} = {START[t.name]};",
                    f"  for (int64_t k = 0; k < rows; ++k) all{j} = {_join(t, f'all{j}', f'totals[k * TOTALS + {j}]')};",
                    f"  for (int64_t k = 0; k < rows; ++k) totals[k * TOTALS + {j}] = all{j};",
                ]
        return lines


def columns(phased: PhasedGroup) -> list[Slot]:
    """The slots in the order their addresses stand in a row."""
    return [*phased.group.slots, *phased.stash]


def headline(phased: PhasedGroup) -> str:
    reduced = [v.slot.name for p in phased.phases for v in p.reads if v.fn == "reduce" and v.slot]
    gathered = [slot.name for slot, _ in phased.group.stores if slot.spread]
    own = [slot.name for slot, _ in phased.group.stores if not slot.spread]
    parts = [("reduce", [*dict.fromkeys(reduced)]), ("update", own), ("gather", gathered)]
    return f"{phased.group.name}: " + "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts if names)


def _type(reader: Value) -> str:
    return "int64_t" if reader.slot and reader.slot.index else "real"


def reader_name(reader: Value) -> str:
    assert reader.slot is not None
    return f"{reader.slot.name}_{reader.name}" if reader.fn == "reduce" else f"{reader.slot.name}_value"


def number(x: float) -> str:
    if not math.isfinite(x):
        return f"real({'-' if x < 0 else ''}{'NAN' if math.isnan(x) else 'INFINITY'})"
    return f"real({x!r})" if x != int(x) or abs(x) > 1e9 or math.copysign(1.0, x) < 0 and x == 0 else f"{int(x)}"


def _join(t: Value, a: str, b: str) -> str:
    return JOIN[t.name].format(a, b)


def _omp(t: Value) -> str:
    return {"sum": "+", "max": "max", "min": "min"}[t.name]
