"""Batches: every vertex once, after its children, with its own class; and how near a policy comes to the fewest possible."""

from __future__ import annotations

import numpy as np
import pytest

from bench.dynamic import mixed_graphs
from tests.dynamic.graphs import SHAPES, graphs
from weft import dynamic
from weft.core.errors import UnknownName
from weft.dynamic.policy import POLICIES, batches, lower_bound

MIXED = {"leaf": dynamic.Reads(), "unary": dynamic.Reads(1), "binary": dynamic.Reads(2), "attention": dynamic.Reads(0, True)}


def check(s: dynamic.Structure, batch: np.ndarray, klass: np.ndarray) -> None:
    parent = np.repeat(np.arange(s.vertices), s.arity)
    assert (batch >= 0).all()
    assert (batch[s.child] < batch[parent]).all()
    assert sorted(set(batch.tolist())) == list(range(batches(batch)))
    for b in range(batches(batch)):
        assert len(set(klass[batch == b].tolist())) == 1


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_a_policy_runs_every_vertex_once_after_its_children(name: str, seed: int) -> None:
    import random

    for s in (graphs(seed, 30, SHAPES, "all"), mixed_graphs(random.Random(seed), 12)):
        klass = s.kind * 2 + (s.arity > 0)
        batch = POLICIES[name](s, klass)
        check(s, batch, klass)
        assert batches(batch) >= lower_bound(s, klass)


def test_one_type_needs_one_batch_per_level() -> None:
    s = graphs(1, 40, ("tree", "chain", "dag"), "all")
    klass = s.kind * 2 + (s.arity > 0)
    for policy in POLICIES.values():
        assert batches(policy(s, klass)) == lower_bound(s, klass) == int(s.depth.max()) + 1


def test_looking_ahead_waits_for_what_is_about_to_be_ready() -> None:
    """a a b / b a a: by depth 4 batches of two types; b first on one, a first on the other joins them."""
    build = dynamic.Builder()
    for types in ("aab", "baa"):
        build.sample()
        below: list[int] = []
        for kind in types:
            below = [build.add(below, kind=kind)]
    s = build.done()
    klass = s.kind * 2  # types alone: leaves and others of a type may share a batch here
    found = {name: batches(policy(s, klass)) for name, policy in POLICIES.items()}
    assert lower_bound(s, klass) == 3
    assert found["depth"] > found["lookahead"]
    assert found["auto"] == min(found.values())


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(UnknownName, match="no batching policy is called 'greedy'"):
        dynamic.Schedule(dynamic.chains([1]), {"vertex": dynamic.Reads(1)}, "greedy")


def test_children_of_chains_and_complete_trees_already_lie_in_order() -> None:
    chains = dynamic.Schedule(dynamic.chains([5, 9, 2, 9]), {"vertex": dynamic.Reads(1)})
    assert chains.gathered == 0
    level = dynamic.Schedule(dynamic.trees([((0, 1), (2, 3)), (4, 5)]), {"vertex": dynamic.Reads(0, True)})
    assert level.edge_child.tolist() == list(range(8))


def test_rounds_and_blocks_cover_all_rows() -> None:
    s = dynamic.Schedule(graphs(2, 30, SHAPES, "all"), {"vertex": dynamic.Reads(0, True)})
    assert sorted(s.vertex.tolist()) == list(range(s.structure.vertices))
    for k, block in s.blocks.items():
        rounds = [r for r in s.rounds if r.klass == k]
        assert [r.start for r in rounds] == [0, *[r.stop for r in rounds][:-1]]
        assert rounds[-1].stop == block.count
        assert rounds[-1].edge_stop == block.edge_count


def test_a_schedule_is_drawn() -> None:
    drawn = dynamic.draw(dynamic.Schedule(dynamic.trees([((0, 1), 2), (3, 4)]), {"vertex": dynamic.Reads(2)}))
    assert drawn.splitlines()[0] == "2 samples, 8 vertices, 6 edges: 3 batches by auto (the fewest possible)"
    assert [line.split()[:4] for line in drawn.splitlines()[3:6]] == [
        ["0", "vertex", "(no", "children)"], ["1", "vertex", "2", "0"], ["2", "vertex", "1", "0"],
    ]  # fmt: skip
    long = dynamic.draw(dynamic.Schedule(dynamic.chains([200]), {"vertex": dynamic.Reads(1)}))
    assert "... 140 more batches ..." in long
    assert "199 of 199 rows read one by one already lie in order" in long
    assert dynamic.draw(dynamic.Schedule(dynamic.trees([]), MIXED | {"vertex": dynamic.Reads()})).startswith("0 samples, 0 vertices")


def test_the_bound_is_said_when_it_is_not_met() -> None:
    import random

    drawn = dynamic.draw(dynamic.Schedule(mixed_graphs(random.Random(0), 8), MIXED))
    assert "at least" in drawn.splitlines()[0]
