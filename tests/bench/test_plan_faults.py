"""Every fault planted in a step, placed or captured, is refused before the first step; without it, the step is not."""

from __future__ import annotations

import pytest

from bench._plan_faults import PLAN_FAULTS, PlanFault

CLEAN = {(f.model, f.plan, f.pins, f.settings): f for f in PLAN_FAULTS}


def test_there_are_fourteen_and_more() -> None:
    assert len({f.name for f in PLAN_FAULTS}) == len(PLAN_FAULTS) >= 14
    assert len([f for f in PLAN_FAULTS if f.plan]) >= 14


@pytest.mark.parametrize("fault", PLAN_FAULTS, ids=str)
def test_it_is_found_before_the_first_step(fault: PlanFault) -> None:
    said = fault.refusal()
    head = "the plan changes what the model computes" if fault.plan else "does not compute what torch does"
    assert head in said, f"{fault.why}, and nobody noticed"
    assert fault.names in said and "check=False" in said


@pytest.mark.parametrize("fault", CLEAN.values(), ids=lambda f: f"{f.model} {f.plan or 'captured'}")
def test_without_it_nothing_is_said(fault: PlanFault) -> None:
    assert fault.refusal(planted=False) == ""
