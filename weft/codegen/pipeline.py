"""The compiler as a list: every pass from a scheduled program to one rank's code, in order, with a name and a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from weft.codegen.lower import RankProgram, rank_program
from weft.codegen.to_torch import Code, emit
from weft.core.program import Program
from weft.core.spec import validate


@dataclass(frozen=True)
class Target:
    """What the code is for: a rank, the axes along which its peers' memory can be reached, and whether state is reused."""

    rank: int = 0
    fuse: Collection[str | None] = ()
    donate: bool = False
    device: str = "cpu"
    kernels: str = "cpu"  # the language of fused kernels: "cpu" is C++, "triton" runs on GPUs and, interpreted, anywhere
    far: Mapping[str, int] = field(default_factory=dict)  # axes along which messages are few, and the bytes of one


@dataclass(frozen=True)
class Pass:
    name: str
    why: str
    run: Callable[[Any, Target], Any]


PASSES: tuple[Pass, ...] = (
    Pass("check", "a program that is not valid would hang or lie on real ranks", lambda p, to: validate(p)),
    Pass("localise", "one rank's steps: collectives start early, groups are kernels or pipelines", lambda p, to: _localise(p, to)),
    Pass("write", "readable torch code, one line per node, one call per group", lambda rp, to: emit(rp, to.device, to.donate)),
)


def _localise(program: Program, to: Target) -> RankProgram:
    return rank_program(program, to.rank, to.fuse, to.donate, to.kernels, to.device, to.far)


def lower(program: Program, rank: int = 0, fuse: Collection[str | None] = (), donate: bool = False, device: str = "cpu",
          kernels: str = "cpu", far: Mapping[str, int] = MappingProxyType({})) -> Code:  # fmt: skip
    """One rank's code. Groups along the axes in `fuse` become kernels, collectives along those in `far` are bundled; with
    `donate`, state is updated in place."""
    value: Any = program
    for step in PASSES:
        value = step.run(value, Target(rank, fuse, donate, device, kernels, far))
    assert isinstance(value, Code)
    return value


def show_code(program: Program, rank: int = 0) -> str:
    """What a rank would run where peers share memory: its code, then the kernels that the code calls."""
    code = lower(program, rank, fuse=(None, *program.mesh.axes))
    kernels = [f"# kernel {name}, in C++\n{call.kernel.source}" for name, call in code.calls.items()]
    return "\n".join([code.text, *kernels])
