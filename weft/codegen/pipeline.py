"""The compiler as a list: every pass from a scheduled program to one rank's code, in order, with a name and a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.codegen.lower import rank_program
from weft.codegen.to_torch import Code, emit
from weft.core.program import Program
from weft.core.spec import validate


@dataclass(frozen=True)
class Pass:
    name: str
    why: str
    run: Callable[[Any, int], Any]


PASSES: tuple[Pass, ...] = (
    Pass("check", "a program that is not valid would hang or lie on real ranks", lambda p, rank: validate(p)),
    Pass("localise", "one rank's steps, collectives started as early as their operands allow", rank_program),
    Pass("write", "readable torch code, one line per node", lambda rp, rank: emit(rp)),
)


def lower(program: Program, rank: int = 0) -> Code:
    """One rank's code."""
    value: Any = program
    for step in PASSES:
        value = step.run(value, rank)
    assert isinstance(value, Code)
    return value


def show_code(program: Program, rank: int = 0) -> str:
    return lower(program, rank).text
