"""Layout rules by torch's own validator, on a few samples: what weft accepts is true, what it refuses though true has its reason."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from bench import layout_rules as rules
from tests.testing.plant import Facet, plant

pytestmark = pytest.mark.skipif(find_spec("torch.distributed.tensor._ops.strategy_validation") is None, reason="torch 2.13 brings the validator")
SOME = ("matmul", "narrow", "softmax", "embedding", "neg", "rope pending")


def named(name: str) -> rules.Tally:
    return rules.tally(next(c for c in rules.cases() if c.name == name), 40)


def test_some_samples() -> None:
    with rules.validator():
        found = rules.summary([named(name) for name in SOME])
    assert found["wrong"] == 0 and found["without_reason"] == 0
    assert found["ops"] >= len(SOME) - 1 and found["agree"] + found["missing"] == found["combinations"] > 60
    why = {row["case"]: row["reason"] for row in found["rows"]}
    assert why == {"neg": rules.ORDER, "rope pending": "tables are data"}


def test_what_is_refused_though_true_is_listed() -> None:
    """neg turns the order round: a pending max becomes a pending min."""
    with rules.validator():
        assert named("neg").missing == ["P(max) -> P(min)", "P(min) -> P(max)"]


def test_a_rule_that_is_false_is_found() -> None:
    with rules.validator(), plant(Facet("tanh", "linear", (frozenset({0}),))):
        assert named("tanh").wrong == ["P -> P"]


def test_every_sample_has_a_name_of_its_own() -> None:
    names = [c.name for c in rules.cases()]
    assert len(names) == len(set(names)) > 200
