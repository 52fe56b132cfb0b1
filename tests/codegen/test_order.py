"""The order of a rank's work: sums start early, what finishes them waits, and never in another order than they were started."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import weft_zoo as zoo
from weft.api.pool import prepare
from weft.codegen import lower
from weft.codegen.order import is_wire, order
from weft.frontend.capture import Captured, capture
from weft.ops.registry import nbytes
from weft.plan.spec import Spec
from weft.runtime import hosts

MESSAGE = 1 << 14


@pytest.fixture(scope="module")
def captured() -> Captured:
    w = zoo.small("gpt2", dtype=torch.float32)
    return capture(w.model, w.example(4), w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-3), clip=None)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_hosts", ["here", "there"])
    monkeypatch.setattr("weft.passes.message_bytes", lambda device: MESSAGE)


def lines(captured: Captured, plan: str) -> list[str]:
    return lower(prepare(captured, Spec.parse(plan)), 0, donate=True, far={"dp": MESSAGE}).text.splitlines()


def found(text: list[str], pattern: str) -> list[tuple[int, str]]:
    return [(i, m[1]) for i, line in enumerate(text) if (m := re.match(pattern, line))]


@pytest.mark.usefixtures("apart")
def test_sums_are_waited_for_in_the_order_they_were_started(captured: Captured) -> None:
    text = lines(captured, "dp2")
    started = [name for _, name in found(text, r"    (\w+) = comm\.all_reduce(?:_list)?\(\[?t.*")]
    end = next(i for i, line in enumerate(text) if "library.adam_" in line)
    waits = [name for i, name in found(text, r"    (\w+) = \1\.wait\(\)") if i > end]
    assert len(waits) > 3
    assert waits[:-1] == [n for n in started if n in waits[:-1]]  # the last is the loss, which nothing waits for


@pytest.mark.usefixtures("apart")
def test_an_update_does_not_wait_for_later_sums(captured: Captured) -> None:
    text = lines(captured, "dp2")
    updates = [i for i, line in enumerate(text) if "library.adam_" in line]
    waits = [i for i, _ in found(text, r"    (\w+) = \1\.wait\(\)")]
    assert len(updates) > 3
    assert all(any(a < w < b for w in waits) for a, b in itertools.pairwise(updates))


@pytest.mark.usefixtures("apart")
def test_slices_are_updated_and_gathered_while_the_backward_pass_goes_on(captured: Captured) -> None:
    text = lines(captured, "dp2,zero1")
    gathers = [i for i, line in enumerate(text) if "comm.all_gather" in line]
    scatters = [i for i, line in enumerate(text) if "comm.reduce_scatter" in line]
    assert gathers[0] < scatters[-1]
    assert all("library.adam(" in line or "adam" not in line for line in text)  # one pass over memory each, not one per operation


@pytest.mark.usefixtures("apart")
def test_work_that_feeds_no_sum_gives_way_until_the_link_is_busy(captured: Captured) -> None:
    """The head's share of a tied weight's gradient is ready first and needed last."""
    program = prepare(captured, Spec.parse("dp2"))
    near, far = ([n for n in order(program, to) if n.op.name != "input"] for to in ({}, {"dp": MESSAGE}))
    first = next(n for n in far if is_wire(n) and n.args[0].ndim)
    tied = next(n for n in near if len(n.types) == 1 and n.shape == program.input_names["param.tokens.weight"].shape)
    assert near.index(tied) < near.index(first)
    assert far.index(tied) > far.index(first)


@pytest.mark.usefixtures("apart")
def test_slices_are_gathered_a_few_messages_before_they_are_read(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    program = prepare(captured, Spec.parse("dp2,zero3"))

    def under_way(ahead: int) -> float:
        """The most messages' worth that has been started and not been read, when a gather is first read."""
        monkeypatch.setattr("weft.codegen.order.AHEAD", ahead)
        at = {n: i for i, n in enumerate(order(program, {"dp": MESSAGE}))}
        gathers = [n for n in at if n.op.name == "all_gather" and n.args[0].op.name == "input"]
        read = {n: min(at[u] for u in program.users[n]) for n in gathers}
        assert all(at[n] < read[n] for n in gathers)
        return max(sum(nbytes(m.type) for m in gathers if at[m] < read[n] <= read[m]) / MESSAGE for n in gathers)

    none, three = under_way(0), under_way(3)
    assert none < three < 3 + none  # three messages, and what the rest of the order holds anyway


def test_with_clipping_gradients_still_come_early() -> None:
    w = zoo.small("gpt2", dtype=torch.float32)
    clipped = capture(w.model, w.example(4), w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-3), clip=1.0)
    nodes = order(prepare(clipped, Spec.parse("dp1")))
    made = [n for n in nodes if n.op.name in ("attention_backward", "layer_norm_backward")]
    weights = {node.shape for name, node in clipped.program.input_names.items() if name.startswith("param.blocks.")}
    early = [n for n in nodes[: nodes.index(made[-1])] if len(n.types) == 1 and n.shape in weights and n.ndim == 2]
    assert early, "weight gradients wait for the whole backward pass"


def test_ranks_share_a_host_along_an_axis_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_hosts", ["a", "a", "b", "b"])
    assert hosts.share({"dp": 2, "tp": 2}, "tp")
    assert not hosts.share({"dp": 2, "tp": 2}, "dp")
    assert hosts.share({"dp": 8}, "dp"), "ranks that were not met are taken to share one"
