"""Every op, every layout: forward and gradient against torch on the global tensors; what weft refuses and an oracle would not."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import weft.ops  # noqa: F401 - defines the ops
from tests.ops import harness
from tests.ops.harness import ONE_AXIS, Case
from weft.core.node import OPS

FILES = sorted(path.stem for path in Path(__file__).parent.glob("cases_*.py"))
CASES: list[Case] = [c for file in FILES for c in importlib.import_module(f"tests.ops.{file}").CASES]


def test_every_op_is_covered() -> None:
    built_in = {name for name, op in OPS.items() if op.run.__module__.startswith(("weft.ops", "torch")) or op.run.__module__ == "_operator"}
    covered = {n.op.name for c in CASES for n in harness.one_axis(c, ONE_AXIS[0])[0][0].nodes}
    assert built_in - covered == set()


def test_case_names_are_unique() -> None:
    assert len({c.name for c in CASES}) == len(CASES)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_every_layout(c: Case) -> None:
    for mesh in ONE_AXIS:
        programs, _ = harness.one_axis(c, mesh)
        assert programs
        harness.check_forward(c, programs)
        if c.smooth:
            harness.check_gradient(c, programs)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_two_axes(c: Case) -> None:
    programs = list(harness.two_axes(c))
    assert programs
    harness.check_forward(c, programs)
    if c.smooth:
        harness.check_gradient(c, programs[::3])


@pytest.mark.parametrize("c", [c for c in CASES if not c.local], ids=str)
def test_what_holds_is_accepted(c: Case) -> None:
    """A layout that the raw function on slices shows to hold, and weft refuses, needs a reason."""
    found = harness.missed(c, ONE_AXIS[0])
    assert bool(found) == bool(c.refused), f"{c.refused or 'these hold and are refused'}:\n{harness.show(found)}"


@pytest.mark.parametrize("c", [c for c in CASES if harness.polynomial(c)], ids=str)
def test_exactly(c: Case) -> None:
    """Over a prime field, where all ops of the case are polynomials: rank by rank as globally, and as in whole floats."""
    programs = harness.exact_programs(c, ONE_AXIS[0])
    assert programs
    for program in programs[:40]:
        harness.check_exactly(program)
