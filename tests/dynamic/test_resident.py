"""All rounds in one kernel: which steps become which stages, where programs meet, and that it computes and compiles."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from examples.dynamic import tree_lstm
from tests.dynamic.graphs import graphs
from tests.ranks import ROOT, interpreted
from weft import dynamic
from weft.dynamic import captured
from weft.dynamic.choice import PATIENCE, Choice, Way, to_try
from weft.dynamic.emit_rounds import Tiles, build
from weft.dynamic.engine import Plan
from weft.dynamic.layout import bulk, padded
from weft.dynamic.stages import Stage, head, stages, tail
from weft.dynamic.store import Pointer


def plan_of(hidden: int = 32) -> Plan:
    """A Tree-LSTM compiled for Triton, without running it."""
    model = tree_lstm.model(tree_lstm.ChildSum(hidden, hidden), hidden)
    model.target = "triton"
    s, x = dynamic.trees([((0, 1), 2)]), torch.randn(3, hidden)
    variant = model._variant({"x": x}, s)
    return model._plan(variant, dynamic.Schedule(s, variant.reads), {"x": x})


def of(phase: str) -> list[Stage]:
    found = stages(plan_of().cells["vertex", True], phase)
    assert found is not None
    return found


def test_a_product_read_by_one_kernel_stays_in_its_registers() -> None:
    for phase in ("rounds", "back"):
        gather, cell, product = of(phase)
        assert gather.kernel is not None and not gather.products
        assert cell.kernel is not None and len(cell.products) == 1
        assert product.kernel is None and len(product.products) == 1
        assert not any(kind == "scratch" for s in (gather, cell, product) for kind, _ in s.reads | s.writes)


def test_programs_meet_only_where_one_reads_what_another_wrote() -> None:
    for phase in ("rounds", "back"):
        these = of(phase)
        assert [s.waits for s in these] == [False, True, True]
        assert tail(these) == these[2:] and head(these) == these[:1]
        assert not head(these)[0].needs(tail(these)), "the next round gathers while this one's last product runs"
        assert these[1].needs(these[:1]) and these[2].needs(these[1:2])


def test_what_is_no_product_with_a_weight_keeps_the_rounds_apart() -> None:
    """Attention over children multiplies rows with rows."""
    from examples.dynamic import recursive_transformer

    model = recursive_transformer.model(recursive_transformer.Block(8, 8, heads=2))
    model.target = "triton"
    s, x = dynamic.trees([((0, 1), 2)]), torch.randn(3, 8)
    variant = model._variant({"x": x}, s)
    plan = model._plan(variant, dynamic.Schedule(s, variant.reads), {"x": x})
    assert not plan.can_stay(s.kinds)


def test_the_fastest_way_stays_and_a_failing_one_goes() -> None:
    slow, fast, broken = Way(), Way(Tiles()), Way(Tiles(lanes=16))
    choice = Choice([slow, fast, broken])
    choice.refuse(broken, "no room")
    while not choice.due:
        choice.runs(choice.now())
    assert choice.ran == {slow: 3, fast: 3, broken: 0}
    choice.wait_for(slow)
    assert not choice.due and choice.now() == slow, "who had no room for a batch runs next"
    for way, ms in ((slow, 2.0), (fast, 6.0), (slow, 2.1), (fast, 1.0), (slow, 2.2), (fast, 1.1)):
        choice.saw(way, ms)
    choice.settle()
    assert choice.now() == fast, "by medians: once it was late"
    assert choice.refused == {broken: "no room"}
    choice.refuse(fast, "lost its memory")
    assert choice.now() == Way(), "what every device can do is left"


def test_ways_that_never_hold_a_batch_together_are_not_waited_for() -> None:
    first, other = Way(), Way(Tiles())
    choice = Choice([first, other])
    for _ in range(2 * PATIENCE + 1):
        assert not choice.decided
        choice.runs(other)
    assert choice.now() == first


def test_ways_are_compared_on_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of one way: both are recorded, both are timed on the same batch as often, one is left and results stay right."""
    both = [Way(), Way(above=1)]
    monkeypatch.setattr(captured, "ways", lambda *_: list(both))
    torch.manual_seed(0)
    cell = tree_lstm.ChildSum(8, 8)
    model, plain = (tree_lstm.model(cell, 8) for _ in range(2))
    model.replay, plain.replay, model.resident = True, False, None
    for seed in range(12):
        s, x = graphs(seed % 3, 6, ("binary",), "leaves", largest=5), torch.randn(64, 8, requires_grad=True)
        got, want = model(s, x), plain(s, x)
        torch.testing.assert_close(got, want)
        mine, theirs = (torch.autograd.grad(y.square().sum(), [x, *cell.parameters()]) for y in (got, want))
        torch.testing.assert_close(mine, theirs)
    (templates,) = model._templates.values()
    (choice,) = templates._choices.values()
    assert choice.decided and {len(times) for times in choice.times.values()} == {captured.TURNS}
    assert {c.way for c in templates.kept} == {choice.now()}


def test_full_precision_never_uses_single_tf32_products() -> None:
    assert "tf32" not in {w.tiles.precision for w in to_try("highest") if w.tiles}
    assert {w.tiles.precision for w in to_try("high") if w.tiles} == {"tf32"}


@pytest.mark.parametrize("above", [None, 4])
@pytest.mark.parametrize("seed", range(4))
def test_rows_to_spare_belong_to_the_first_round_of_their_class(seed: int, above: int | None) -> None:
    reads = {"vertex": dynamic.Reads(0, True)}
    first, later = (dynamic.Schedule(graphs(seed + 10 * i, 12, ("binary",), "leaves", largest=7), reads) for i in (0, 1))
    room = bulk(first, None, above)
    assert (len(room.lead) > 0) == (above is not None)
    wider = bulk(later, room, above)
    for s, t in ((first, room), (first, wider), (later, wider)):
        laid = padded(s, t, t.holds(s) or [], {("h", "edge"), ("h", "vertex")})
        for v in range(s.structure.vertices):
            at, below = laid.place[v], s.structure.child[s.structure.first[v] : s.structure.first[v + 1]]
            edges = laid.arrays["edge_first"]
            assert laid.arrays["edge_child"][edges[at] : edges[at + 1]].tolist() == laid.place[below].tolist()
        table = laid.arrays["round"]
        assert table[0] == len(s.rounds) - len(t.lead) and len(table) == 1 + 5 * t.rounds
        assert table[1 : 1 + 5 * table[0]].reshape(-1, 5).tolist() == [list(r) for r in laid.rounds[laid.lead :]]
        for k, block in laid.blocks.items():
            ends = [(r.start, r.stop) for r in laid.rounds if r.klass == k]
            assert ends[0][0] == 0 and ends[-1][1] == block.count, "every row belongs to a round"
            assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert room.holds(dynamic.Schedule(graphs(3, 40, ("binary",), "leaves", largest=7), reads)) is None


SCRIPT = """
import sys; sys.path.insert(0, {root!r})
import torch
from examples.dynamic import dag_rnn, sequence, tree_lstm
from tests.dynamic.graphs import by_hand, graphs
from weft import dynamic
from weft.dynamic.choice import Way
from weft.dynamic.emit_rounds import Tiles
torch.manual_seed(0)
made = [(c := tree_lstm.ChildSum(3, 5), tree_lstm.model(c, 5), "leaves"), (d := dag_rnn.DagRNN(3, 5), dag_rnn.model(d), "all"),
        (b := tree_lstm.Binary(3, 5), tree_lstm.model(b, 5), "leaves")]
for cell, model, words in made:
    model.target, model.replay, model.split_products = "triton", True, True
    model.resident = Way(Tiles(rows=16, lanes=16, inner=16, precision="tf32x3"), 3) if words == "leaves" else True
    for seed in (1, 2):
        s = graphs(seed, 4, ("binary", "single") if words == "leaves" else ("dag", "tree"), words, largest=5)
        x = torch.randn(s.vertices, 3, requires_grad=True)
        ours = model(s, x, at="all")
        theirs = torch.stack([h if isinstance(h, torch.Tensor) else h[0] for h in by_hand(s, x, cell.alone)])
        inputs = [x, *cell.parameters()]
        pairs = list(zip(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs)))
        with torch.no_grad():
            [p.mul_(0.9) for p in cell.parameters()]  # what was recorded reads the weights as they are
        print(max(float((a - b).detach().abs().max()) for a, b in [(ours, theirs), *pairs]))
    (templates,) = model._templates.values()
    assert all(c.way.tiles for c in templates.kept), [str(c.way) for c in templates.kept]
"""


def test_all_rounds_in_one_kernel_compute_the_same() -> None:
    """In Triton's interpreter, as one program."""
    printed = interpreted(SCRIPT.format(root=str(ROOT)))
    assert all(float(line) < 1e-5 for line in printed.split()), printed


@pytest.mark.parametrize("phase", ["rounds", "back"])
def test_it_compiles_for_sm90_to_tensor_cores_and_acquires_what_others_wrote(phase: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    code = build({1: plan_of(64).cells["vertex", True]}, phase)
    assert code is not None
    tiles = Tiles(precision="tf32x3")
    names, types, constants = code.function.arg_names, dict[str, str](), tiles.constants()
    for i, (_, argument) in enumerate(code.arguments):
        dtype = argument.dtype if isinstance(argument, Pointer) else torch.float32
        types[f"q{i}"] = "*i64" if dtype is torch.int64 else "*fp32"
        if not isinstance(argument, Pointer):
            types[f"q{i}l"], types[f"q{i}k"], types[f"q{i}n"], constants[f"q{i}k"] = "*fp32", "constexpr", "i32", 1
    types |= {"table": "*i64", "meeting": "*i32", "eb1": "i32"} | dict.fromkeys(tiles.constants(), "constexpr")
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t == "*fp32" or n.endswith("n")}
    source = ASTSource(code.function, {n: types[n] for n in names}, {(names.index(k),): c for k, c in constants.items()}, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiles.warps}).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "atom.global.gpu.acq_rel" in ptx and "ld.global.gpu.acquire" in ptx
