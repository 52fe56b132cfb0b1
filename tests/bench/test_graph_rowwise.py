"""Which systems update tables by rows: weft, and experts who hold tables apart; others make whole gradients."""

from __future__ import annotations

from bench._graph.search import Candidate, GraphSearch, Spot
from bench._graph.task import CapturedTask
from weft.cluster.spec import cluster
from weft.core.layout import Mesh

SMALL = {"tables": (20_000, 20_000), "width": 8, "bag": 1, "dense": 5, "bottom": (8, 8), "top": (8, 1)}


def search() -> GraphSearch:
    task = CapturedTask("dlrm", cluster("2xx86-2"), 64, "fp32", "adam", tuple(SMALL.items()))
    return GraphSearch(task, 8e9)


def ops(way: Candidate) -> set[str]:
    return {n.op.name for n in way.placed.program.nodes} & {"put", "adam_at"}


def test_weft_updates_by_rows_and_unity_does_not() -> None:
    found = search()
    spot = Spot(found.task.captured(), found.cluster, Mesh(dp=2), 1, 1)
    own = next(found._ways(spot, 1.0))
    others = list(found._ways(spot, 1.0, restricted=True))
    assert (own.name, ops(own), own.rules) == ("weft", {"adam_at", "put"}, ("adam_by_rows",))  # pairs are put back by index too
    assert {w.name: (ops(w), w.rules) for w in others} == {"alpa-like": ({"put"}, ()), "unity-like": ({"put"}, ())}
    assert all(own.seconds < w.seconds for w in others)


def test_several_micro_batches_add_up_whole_gradients() -> None:
    found = search()
    spot = Spot(found.task.captured(2), found.cluster, Mesh(dp=2), 2, 1)
    assert ops(next(found._ways(spot, 1.0))) == {"put"}


def test_tables_apart_are_updated_by_rows() -> None:
    way = search()._tables_apart()
    assert isinstance(way, Candidate) and way.rules == ("adam_by_rows",)


def test_data_parallel_is_not() -> None:
    way = search().baselines()["data parallel"]
    assert isinstance(way, Candidate) and ops(way) == {"put"}
