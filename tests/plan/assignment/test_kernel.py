"""The compiled loops and the Python ones do the same; bounds are bounds; walks stay within the limits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.plan.assignment.problems import brute_force, tight_problem
from weft.core import native
from weft.plan.assignment import Problem, loops
from weft.plan.assignment.kernel import Kernel, kernel

needs_compiler = pytest.mark.skipif(not native.available(), reason="no C++ compiler here, so there is nothing to compare")


def problem(seed: int) -> Problem:
    return tight_problem(seed, nodes=12, k=4)


def charge(p: Problem) -> np.ndarray:
    return np.abs(np.sin(np.arange(len(p.c)))) * 3


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.plan.assignment.kernel._library", lambda: None)


def converge(k: Kernel, c: np.ndarray, rounds: int = 4) -> tuple[np.ndarray, np.ndarray]:
    messages = k.silence()
    for _ in range(rounds):
        k.sweep(c, messages, up=True)
        beliefs = k.sweep(c, messages, up=False)
    return messages, beliefs


@needs_compiler
@pytest.mark.parametrize("seed", range(25))
def test_compiled_and_python_agree_to_the_last_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def everything() -> tuple[object, ...]:
        p = problem(seed)
        k = kernel(p)
        messages, beliefs = converge(k, p.c)
        x = k.decode(p.c, messages, up=True)
        assert x is not None
        state = np.array([seed + 1], np.int64)
        gain, best = k.walk(p.c, charge(p), x, state, 0.5, 3000)
        return messages.tobytes(), beliefs.tobytes(), k.bound(p.c, messages), gain, best.tolist(), x.tolist(), state.tolist()

    compiled = everything()
    without_compiler(monkeypatch)
    assert everything() == compiled


@pytest.mark.parametrize("seed", range(25))
def test_a_bound_is_below_every_choice_and_only_rises(seed: int) -> None:
    p = tight_problem(seed)
    k, last = kernel(p), -np.inf
    messages, truth = k.silence(), brute_force(replace(p, limit=p.limit * 100))
    for _ in range(6):
        for up in (True, False):
            k.sweep(p.c, messages, up)
            bound = k.bound(p.c, messages)
            assert last - 1e-9 <= bound <= truth + 1e-9
            last = bound


@pytest.mark.parametrize("seed", range(25))
def test_walks_stay_within_limits_and_tell_their_gain(seed: int) -> None:
    p = problem(seed)
    k = kernel(p)
    messages, _ = converge(k, p.c)
    x = k.decode(p.c, messages, up=False)
    assert x is not None
    before = p.cost(x)
    gain, best = k.walk(p.c, charge(p), x, np.array([seed + 1], np.int64), 0.3, 5000)
    assert p.excess(x) == p.excess(best) == 0
    assert p.cost(best) == pytest.approx(before - gain)


def test_a_node_that_cannot_fit_ends_a_decode() -> None:
    p = tight_problem(3)
    p = replace(p, limit=p.limit * 0, m=p.m + 1)
    k = kernel(p)
    assert k.decode(p.c, k.silence(), up=True) is None


def test_the_python_loops_are_used_when_asked() -> None:
    script = "from weft.plan.assignment import kernel; print(kernel._library())"
    environment = {**os.environ, "WEFT_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "None"


def test_loops_are_the_four_a_kernel_calls() -> None:
    assert all(callable(getattr(loops, name)) for name in ("sweep", "bound", "decode", "walk"))
