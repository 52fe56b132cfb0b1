"""Every planted fault is found, and what finds it is content without the fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.faults import FAULTS, Fault
from tests.testing.plant import Line, plant
from weft.testing.fuzz import fuzz

TESTS = Path(__file__).parents[1]
SEED, MOST = 1, 400  # programs tried at most to find one fault
BY_FUZZER = [f for f in FAULTS if f.test is None]
BY_TEST = [f for f in FAULTS if f.test is not None]


def test_there_are_forty_and_more() -> None:
    assert len(FAULTS) >= 40
    assert len({f.name for f in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", BY_FUZZER, ids=str)
def test_the_fuzzer_finds(fault: Fault) -> None:
    with plant(fault.weaken):
        found = fuzz(MOST, SEED, fault.look_at, stop_at=1)
    assert found.mismatches == 1, f"{fault.why}, and nothing differed in {found.programs} programs"
    clean = fuzz(found.tried, SEED, fault.look_at)
    assert clean.mismatches == 0, clean.scripts[0]


@pytest.mark.parametrize("fault", BY_TEST, ids=str)
def test_a_test_finds(fault: Fault) -> None:
    assert fault.test is not None
    assert run_test(fault.test) == pytest.ExitCode.OK
    with plant(fault.weaken):
        assert run_test(fault.test) == pytest.ExitCode.TESTS_FAILED, fault.why


def run_test(name: str) -> int:
    """One test, run inside this process so that the fault is there."""
    alone = [f"-p no:{plugin}" for plugin in ("cacheprovider", "timeout", "unraisableexception", "xdist")]  # the third collects garbage five times
    return pytest.main([str(TESTS / name), "-x", "-W", "ignore", *" ".join(alone).split()])


def test_the_fuzzer_finds_them_unfocused(request: pytest.FixtureRequest) -> None:
    """As a user would run it, without a hint."""
    if not request.config.getoption("--all-faults"):
        pytest.skip("takes an hour: pytest --all-faults")
    missed = []
    for fault in BY_FUZZER:
        with plant(fault.weaken):
            missed += [] if fuzz(2000, 7, stop_at=1).mismatches else [fault.name]
    assert missed == []


def test_a_fault_that_is_out_of_date_says_so() -> None:
    old = Line("weft.core.layout:chunk", "no such text", "")
    with pytest.raises(LookupError, match="has 0 times 'no such text': bring the fault up to date"), plant(old):
        pass


def test_nothing_is_left_behind() -> None:
    from weft.core.layout import chunk

    with plant(Line("weft.core.layout:chunk", "-(-size // parts)", "(size // parts)")):
        assert chunk(7, 2, 0) == (0, 3)
    assert chunk(7, 2, 0) == (0, 4)
