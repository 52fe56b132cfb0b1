"""Graphs as data: every form gives the same arrays, and a bad graph is refused by sample and vertex."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

from tests.dynamic.graphs import SHAPES, graphs
from weft import dynamic
from weft.core.errors import StructureError
from weft.dynamic import native, structure
from weft.dynamic.layout import Template, exact, padded, template

TREE = ((0, 1), (2, 3, 4))


def arrays(s: dynamic.Structure) -> list[list[int]]:
    return [a.tolist() for a in (s.first, s.child, s.row, s.sample, s.kind)]


def test_nested_tuples_number_children_first() -> None:
    s = dynamic.trees([TREE, 5, (6,)])
    assert s.sample.tolist() == [0, 8, 9, 11]
    assert s.row.tolist() == [0, 1, -1, 2, 3, 4, -1, -1, 5, 6, -1]
    assert [s.child[s.first[v] : s.first[v + 1]].tolist() for v in (2, 6, 7, 10)] == [[0, 1], [3, 4, 5], [2, 6], [9]]
    assert s.roots.tolist() == [7, 8, 10]
    assert s.depth.tolist() == [0, 0, 1, 0, 0, 0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("samples", [[TREE], [], [0], [(), (None, 1)], [[0, [1, 2]]], [np.int64(3)], [((((0,),),),)]])
def test_the_slow_reader_agrees_with_the_fast_one(samples: list[Any]) -> None:
    fast = native.flatten(samples)
    slow = structure._flatten(samples)
    if fast is None:  # what only the slow reader knows
        assert isinstance(samples[0], np.integer)
    else:
        assert [a.tolist() for a in fast[:4]] == [a.tolist() for a in slow]
        assert fast[4].tolist() == native._depth(*slow[:2])[0].tolist()


def test_parents_edges_chains_networkx_and_builder_say_the_same() -> None:
    chain = dynamic.chains([3])
    graph = nx.DiGraph([(0, 1), (1, 2)])
    build = dynamic.Builder().sample()
    for below in ([], [0], [1]):
        build.add(below, row=build.vertices)
    forms = [dynamic.parents([[1, 2, -1]]), dynamic.edges([(3, [(0, 1), (1, 2)])]), dynamic.networkx([graph]), build.done()]
    assert all(arrays(f) == arrays(chain) for f in forms)


def test_inputs_at_leaves_and_types_by_name() -> None:
    s = dynamic.parents([[2, 2, -1], [-1]], inputs="leaves", kinds=[["word", "word", "phrase"], ["word"]])
    assert s.row.tolist() == [0, 1, -1, 2]
    assert [s.kinds[k] for k in s.kind] == ["word", "word", "phrase", "word"]
    typed = nx.DiGraph([("a", "b")])
    typed.nodes["b"]["kind"] = "top"
    assert [dynamic.networkx([typed]).kinds[k] for k in dynamic.networkx([typed]).kind] == ["vertex", "top"]


def test_taking_samples_and_joining_them_gives_the_batch_back() -> None:
    whole = graphs(0, 30, SHAPES, "some")
    parts = [whole.take([i]) for i in range(len(whole))]
    assert arrays(dynamic.join(parts)) == arrays(whole)
    assert arrays(whole.take(range(len(whole)))) == arrays(whole)


def test_joining_moves_rows_and_types() -> None:
    a, b = dynamic.chains([2], kind="a"), dynamic.chains([1], kind="b")
    both = dynamic.join([a, b], rows=[0, 2])
    assert both.row.tolist() == [0, 1, 2]
    assert [both.kinds[k] for k in both.kind] == ["a", "a", "b"]


@pytest.mark.parametrize("seed", range(6))
def test_without_a_compiler_the_answers_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = graphs(seed, 25, SHAPES, "all")
    reads = {"vertex": dynamic.Reads(0, True)}
    fast = dynamic.Schedule(s, reads)
    monkeypatch.setattr(native, "library", lambda: None)
    again = graphs(seed, 25, SHAPES, "all")
    slow = dynamic.Schedule(again, reads)
    assert again.depth.tolist() == s.depth.tolist()
    assert slow.vertex.tolist() == fast.vertex.tolist()
    assert [a.tolist() for a in native.reverse(slow.edge_child, s.vertices + 1)] == [
        exact(fast, {("h", "edge")}).arrays[k].tolist() for k in ("reader_first", "reader_edge")
    ]
    with pytest.raises(StructureError, match="is on a cycle"):
        dynamic.edges([(3, [(0, 1), (1, 2), (2, 0)])]).depth  # noqa: B018


@pytest.mark.parametrize("seed", range(4))
def test_a_padded_layout_keeps_who_reads_whom(seed: int) -> None:
    reads = {"vertex": dynamic.Reads(0, True)}
    s, other = (dynamic.Schedule(graphs(k, 20, SHAPES, "all"), reads) for k in (seed, seed + 50))
    room = template(s, template(other))
    taken = room.holds(s)
    assert taken is not None
    _keeps(s, padded(s, taken, room, set()))


def test_vertices_wait_for_a_later_round_where_theirs_is_full() -> None:
    comb: Any = 0
    for leaf in range(1, 10):
        comb = comb, leaf
    s = dynamic.Schedule(dynamic.trees([(((0, 1), (2, 3)), ((4, 5), (6, 7)))] * 6 + [comb]), {"vertex": dynamic.Reads(0, True)})
    first, second, *later = template(s).rooms
    tight = Template((first, replace(second, rows=second.rows // 2), *later), 0)
    assert tight.holds(s) is None
    fitted = tight.fit(s)
    assert fitted is not None
    _keeps(fitted[0], padded(*fitted, tight, set()))
    assert Template((first, *later[:4]), 0).fit(s) is None


def _keeps(s: dynamic.Schedule, layout: Any) -> None:
    """Every vertex finds its children and its input."""
    first, child = layout.arrays["edge_first"], layout.arrays["edge_child"]
    for v in range(s.structure.vertices):
        at = layout.place[v]
        below = s.structure.child[s.structure.first[v] : s.structure.first[v + 1]]
        assert child[first[at] : first[at + 1]].tolist() == layout.place[below].tolist()
        assert layout.arrays["row"][at] == s.structure.row[v]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a cycle": (
        lambda: dynamic.edges([(1, []), (4, [(0, 1), (1, 2), (2, 3), (3, 1)])]).depth,
        r"sample 1: vertex \d is on a cycle.*needed  every vertex after its children.*found   \d -> \d -> \d -> \d",
    ),
    "a missing child": (
        lambda: _run(_built([[], [7]])),
        "sample 0: vertex 1 has child 7, which is not there.*needed  children between 0 and 1.*found   7",
    ),
    "a parent out of range": (
        lambda: dynamic.parents([[-1], [1, 5]]),
        "sample 1: vertex 1 has parent 5, which is not there.*needed  parents between 0 and 1, or -1 at a root",
    ),
    "an edge out of range": (
        lambda: dynamic.edges([(2, [(0, 1)]), (2, [(0, 2)])]),
        r"sample 1: edge \(0, 2\) names a vertex that is not there",
    ),
    "a leaf that is no number": (
        lambda: dynamic.trees([(0, 1), (0, "word")]),
        "sample 1: vertex 1 is not a leaf weft can read.*found   'word'",
    ),
    "a negative row": (lambda: dynamic.trees([(0, -3)]), "sample 0: vertex 1 is not a leaf weft can read"),
    "wrong arity": (
        lambda: _run(dynamic.trees([(0, 1), (0, 1, 2)]), slots=True),
        "sample 1: vertex 3 has 3 children.*needed  2 children, as its type 'vertex' reads, or none.*found   3",
    ),
    "an absent child": (
        lambda: _run(_built([[], [0, None]]), slots=True),
        "sample 0: vertex 1 lacks child 1.*try     gather it with optional=True",
    ),
    "an absent child where another may be absent": (lambda: _run(_built([[], [None, 0]]), second=True), "sample 0: vertex 1 lacks child 0"),
    "too few children": (lambda: _run(_built([[], [None]]), second=True), "sample 0: vertex 1 lacks child 0"),
    "a vertex that is not there": (lambda: _run(dynamic.trees([(0, 1)]), at=[0, -1]), "is not there.*needed  numbers between 0 and 2.*found   -1"),
    "truth values for vertices": (lambda: _run(dynamic.trees([(0, 1)]), at=[True, False, True]), "this names no vertices"),
    "vertices of no output": (lambda: _run(dynamic.trees([(0, 1)]), at={"g": [0]}), "other outputs than the functions push.*needed  h.*found   g"),
    "an array as input": (lambda: _run(dynamic.trees([(0, 1)]), x=np.zeros((4, 3))), "input 'x' is no tensor.*found   ndarray"),
    "a row out of range": (
        lambda: _run(dynamic.trees([(0, 1), (1, 9)])),
        "sample 1: vertex 1 reads row 9 of input 'x', which is not there.*needed  a row between 0 and 3",
    ),
    "no row at all": (
        lambda: _run(dynamic.trees([(0, None)])),
        "sample 0: vertex 1 has no row of input 'x'.*try     pull it with optional=True",
    ),
    "an unknown type": (
        lambda: _run(dynamic.chains([2], kind="word")),
        "sample 0: vertex 0 has a type the model does not know.*needed  'vertex'.*found   'word'",
    ),
    "mixed dtypes among samples": (
        lambda: _run(dynamic.trees([(0, 1), (2, 3)]), x=[torch.zeros(2, 3), torch.zeros(2, 3).double()]),
        "sample 1: vertex 0 reads 'x' in another dtype or shape than sample 0.*found   torch.float64",
    ),
    "inputs in another dtype": (
        lambda: _run(dynamic.trees([(0, 1)]), x=torch.zeros(4, 3).double()),
        "sample 0: vertex 0 reads 'x' in another dtype than the model's parameters have.*needed  torch.float32.*found   torch.float64",
    ),
    "an unknown choice": (lambda: dynamic.parents([[-1]], inputs="some"), "unknown choice of inputs"),
    "types that do not match": (lambda: dynamic.parents([[-1]], kinds=[["a", "b"]]), "types do not match the vertices"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_graph_is_refused_by_sample_and_vertex(what: str) -> None:
    make, message = BAD[what]
    with pytest.raises(StructureError) as refused:
        make()
    assert re.search(message, str(refused.value), re.S), str(refused.value)


def test_an_absent_child_among_several_reads_zeros() -> None:
    def double(v: dynamic.Vertex) -> None:
        h = v.pull("x") + 2 * v.gather("h", reduce="sum", optional=True)
        v.scatter(h=h)
        v.push(h=h)

    model = dynamic.Model(double, states={"h": 1})
    assert model(_built([[], [0, None, 0]]), torch.ones(1, 1)).tolist() == [[5.0]]


def _built(children: list[list[int | None]]) -> dynamic.Structure:
    build = dynamic.Builder().sample()
    for below in children:
        build.add(below, row=0)
    return build.done()


def _run(s: dynamic.Structure, slots: bool = False, x: Any = None, second: bool = False, at: Any = "roots") -> Any:
    weight = torch.randn(3, 3)

    def function(v: dynamic.Vertex) -> None:
        below = v.gather("h", 0) + v.gather("h", 1, optional=second) if slots or second else v.gather("h", reduce="sum", optional=True)
        pulled = v.pull("x", optional=slots or s.row.min() < 0 and s.arity[s.row < 0].min() > 0)
        h = pulled @ weight + below
        v.scatter(h=h)
        v.push(h=h)

    return dynamic.Model(function, states={"h": 3})(s, torch.zeros(4, 3) if x is None else x, at=at)
