"""A fused group made ready to run: its source for one target and what the runtime must know to call it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.codegen import to_cpu
from weft.codegen.expr import Group, Level, Slot, ordered
from weft.codegen.phases import PhasedGroup, split_phases
from weft.codegen.text import PYTHON, Writer, bare, host_scalars, python


@dataclass(frozen=True)
class Kernel:
    """Plain data. `scalars` is a Python lambda from the group's scalars, by name, to the numbers the source expects;
    `numbers` one from the same scalars and a row's totals to what is handed back."""

    name: str
    target: str  # "cpu" or "triton"
    world: int
    source: str
    slots: tuple[Slot, ...]
    scalars: str
    scalar_names: tuple[str, ...]  # what the lambda takes
    scalar_count: int  # what it gives
    totals: int
    total_kinds: tuple[tuple[str, bool], ...]  # sum, max or min; whether over all rows
    numbers: str
    phases: int
    bytes_per_element: int  # moved over all ranks, for each element of the full tensor


def compile_group(group: Group, world: int, target: str = "cpu") -> Kernel:
    """Generate the kernel of `group` for `world` ranks."""
    parts = split_phases(group, world)
    source = to_cpu.emit(parts, world) if target == "cpu" else _triton(parts, world)
    kinds = tuple((t.name, t.level == Level.CALL) for t in parts.totals)
    return Kernel(group.name, target, world, source, tuple(to_cpu.columns(parts)), scalar_lambda(group), group.scalars,
                  len(host_scalars(group.roots)), len(kinds), kinds, number_lambda(parts), len(parts.phases),
                  bytes_moved(parts, world))  # fmt: skip


def scalar_lambda(group: Group) -> str:
    """The host's part of the arithmetic: hyper-parameters in, kernel scalars out, in double precision."""
    writer = _python(group)
    texts = [bare(writer.text(v)) for v in host_scalars(group.roots)]
    return f"lambda {', '.join(group.scalars)}: ({''.join(f'{text}, ' for text in texts)})"


def number_lambda(parts: PhasedGroup) -> str:
    """What is handed back, worked out by the host from the totals of a row."""
    writer = _python(parts.group)
    for k, total in enumerate(parts.totals):
        writer.name(total, f"totals[{k}]")
    texts = [bare(writer.text(v)) for v in parts.group.numbers]
    return f"lambda {', '.join([*parts.group.scalars, 'totals'])}: ({''.join(f'{text}, ' for text in texts)})"


def _python(group: Group) -> Writer:
    writer = Writer(PYTHON, python, lambda text, _: text)
    for v in ordered(group.roots):
        if v.fn == "scalar":
            writer.name(v, v.name)
    return writer


def bytes_moved(parts: PhasedGroup, world: int) -> int:
    """Bytes read and written over all ranks per element: each slice once, spread slots once per rank."""
    moved = 0
    for phase in parts.phases:
        for reader in phase.reads.values():
            assert reader.slot is not None
            moved += reader.slot.nbytes * (world if reader.fn == "reduce" else 1)
        moved += sum(slot.nbytes * (world if slot.spread else 1) for slot, _ in phase.stores)
    return moved


def _triton(parts: PhasedGroup, world: int) -> str:
    from weft.codegen import to_triton

    return to_triton.emit(parts, world)
