"""Vertex functions of many kinds against themselves: batched by weft, and on one vertex at a time in plain torch; values and gradients, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dynamic.graphs import assert_same
from weft import dynamic
from weft.core.errors import StructureError

X = {"dtype": torch.float64}


class One:
    """A vertex by itself: what a vertex function is given, in plain torch."""

    def __init__(self, below: list[One | None], row: int, inputs: dict[str, Tensor], states: dict[str, int]) -> None:
        self.below, self.row, self.inputs, self.states = below, row, inputs, states
        self.scattered, self.pushed, self.after = dict[str, Tensor](), dict[str, Tensor](), 0

    def pull(self, name: str = "x", *, optional: bool = False) -> Tensor:
        x = self.inputs[name]
        return x[self.row : self.row + 1] if self.row >= 0 else x.new_zeros(1, *x.shape[1:])

    def of(self, child: int, name: str) -> Tensor:
        there = child < len(self.below) and self.below[child] is not None
        return self.below[child].scattered[name] if there else torch.zeros(1, self.states[name], **X)  # type: ignore[union-attr]

    def gather(self, name: str, child: int | None = None, *, reduce: str | None = None, after: int = 0, optional: bool = False) -> Tensor:
        if child is not None:
            return self.of(child, name)
        self.after = after
        rows = torch.cat([torch.zeros(0, self.states[name], **X), *(self.of(k, name) for k in range(after, len(self.below)))])
        return rows if reduce is None else self.reduce(rows, reduce)

    @property
    def edge_rows(self) -> Tensor:
        return torch.zeros(max(0, len(self.below) - self.after), dtype=torch.int64)

    def spread(self, value: Tensor) -> Tensor:
        return value.expand(max(0, len(self.below) - self.after), *value.shape[1:])

    def reduce(self, edges: Tensor, how: str = "sum") -> Tensor:
        if how == "sum" or not len(edges):
            return edges.sum(0, keepdim=True)
        return edges.mean(0, keepdim=True) if how == "mean" else edges.amax(0, keepdim=True)

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(0)

    def scatter(self, **states: Tensor) -> None:
        self.scattered |= states

    def push(self, **outputs: Tensor) -> None:
        self.pushed |= outputs


class Cell(nn.Module):
    def __init__(self, function: Callable[[Cell, Any], None], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.m = function, nn.ModuleList(modules).double()
        self.scale: Any = 1.0

    def forward(self, v: Any) -> None:
        self.function(self, v)


def given(v: Any, h: Tensor) -> None:
    v.scatter(h=h)
    v.push(h=h)


def two_passes(c: Cell, v: Any) -> None:
    """The children's values brought to mean 0 and square mean 1 over the children, dim by dim."""
    e = c.m[0](v.gather("h"))
    off = e - v.spread(v.reduce(e, "mean"))
    given(v, torch.tanh(v.reduce(off / torch.sqrt(v.spread(v.reduce(off**2, "mean")) + 0.1) * e) + v.pull("x", optional=True)))


def transformer(c: Cell, v: Any) -> None:
    x = c.m[1](v.pull("x", optional=True)).view(-1, 2, 4)
    given(v, c.m[0](x + v.gather("h", reduce="mean").view(-1, 2, 4)).flatten(1))


def attention(c: Cell, v: Any) -> None:
    """Its projections are of rows of all positions, position by position."""
    x = c.m[1](v.pull("x", optional=True)).view(-1, 3, 4)
    given(v, torch.tanh(c.m[0](x, x, x)[0].flatten(1) + v.gather("h", reduce="sum")))


def maximum(c: Cell, v: Any) -> None:
    """Of whole numbers, so that children tie."""
    h = v.pull("x", optional=True).round() + v.gather("h", reduce="max")
    v.scatter(h=h)
    v.push(h=h * c.m[0](h))


def two_children(c: Cell, v: Any) -> None:
    a, b = v.gather("h", 0, optional=True), v.gather("h", 1, optional=True)
    given(v, torch.tanh(c.m[0](a) - c.m[1](b) * a + v.pull("x", optional=True)))


def first_and_rest(c: Cell, v: Any) -> None:
    a, rest = v.gather("h", 0, optional=True), v.gather("h", after=1)
    given(v, torch.tanh(c.m[0](a) + v.reduce(v.softmax(rest.sum(1, keepdim=True)) * rest * v.spread(a)) + v.pull("x", optional=True)))


def whole_numbers(c: Cell, v: Any) -> None:
    h = torch.tanh(c.m[0](v.pull("ids", optional=True)) + v.gather("h", reduce="sum"))
    v.scatter(h=h)
    v.push(h=h, best=h.argmax(1).to(torch.float64))


def functions(c: Cell, v: Any) -> None:
    x = v.pull("x", optional=True) + v.gather("h", reduce="sum")
    y = F.gelu(x) + F.silu(x) * x**3 + F.softplus(x) + F.leaky_relu(x, 0.1) - x.clamp(-0.3, 0.4) + F.gelu(x, approximate="tanh")
    z = torch.where((x > 0) & ~(x > 0.5) | (x < -0.5), y, torch.maximum(x, x.flip(1))) + F.normalize(x, dim=1) + x.cumsum(1)
    given(v, torch.tanh(z * 0.3))


def parts(c: Cell, v: Any) -> None:
    a, b = c.m[0](v.pull("x", optional=True)).chunk(2, 1)
    e = v.gather("h")
    w = e.view(-1, 1, 5) * e.view(-1, 5, 1)
    given(v, torch.cat([a[:, ::2], b[:, 3:]], 1) * v.reduce(w.mean(2)) + F.layer_norm(a, (5,)))


def coarser(c: Cell, v: Any) -> None:
    """Part of it in another precision."""
    x = (v.pull("x", optional=True).float() * 2.5).tanh()
    given(v, x.double() * 0.5 + v.gather("h", reduce="sum"))


def distances(c: Cell, v: Any) -> None:
    """Of one op come a gradient with rows, and one of a weight without."""
    x = v.pull("x", optional=True) + v.gather("h", reduce="sum")
    given(v, torch.tanh(x + torch.cdist(x[:, None], c.m[0].weight.expand(len(x), 5, 5))[:, 0]))


def viewed(c: Cell, v: Any) -> None:
    """The gradient of an input is a view of what is made round by round; a vertex's value is read by the number of the vertex."""
    x, e = v.pull("x", optional=True), v.gather("h")
    y = (x + v.reduce(e * x[v.edge_rows])).view(-1, 5, 1)
    given(v, torch.tanh((y * y).sum(2).flip(1) + c.m[0](x)))


def unread(c: Cell, v: Any) -> None:
    """A state nobody gathers, one that nobody needs, outputs that are states, and no rows."""
    dead, x = v.gather("k", reduce="sum"), v.pull("x", optional=True)
    v.scatter(h=x + v.gather("h", reduce="sum"), k=c.m[0](x) + 0 * dead)
    v.push(h=v.gather("h", reduce="mean"), x=x, bias=c.m[0].bias.expand(x.shape[0], -1))


SQUARE, WIDE = lambda: nn.Linear(5, 5), lambda n: nn.Linear(5, n)
FUNCTIONS: dict[str, tuple[Any, Callable[[], list[nn.Module]], int]] = {
    "two passes over children": (two_passes, lambda: [nn.LayerNorm(5)], 5),
    "a transformer layer": (transformer, lambda: [nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), WIDE(8)], 8),
    "attention in a vertex": (attention, lambda: [nn.MultiheadAttention(4, 2, batch_first=True), WIDE(12)], 12),
    "the largest of children that tie": (maximum, lambda: [SQUARE()], 5),
    "children one by one, some absent": (two_children, lambda: [SQUARE(), SQUARE()], 5),
    "the first child and the rest": (first_and_rest, lambda: [SQUARE()], 5),
    "whole numbers as inputs": (whole_numbers, lambda: [nn.Embedding(9, 5)], 5),
    "pointwise functions": (functions, list, 5),
    "parts of values": (parts, lambda: [WIDE(10)], 5),
    "two precisions": (coarser, list, 5),
    "a gradient that torch takes": (distances, lambda: [SQUARE()], 5),
    "gradients that are views": (viewed, lambda: [SQUARE()], 5),
    "what nobody reads": (unread, lambda: [SQUARE()], 5),
}


def graphs(seed: int, most: int, absent: bool) -> dynamic.Structure:
    """Graphs with shared children, the same child twice, single vertices; some children absent."""
    rng, build = random.Random(seed), dynamic.Builder()
    for _ in range(6):
        build.sample()
        for v in range(rng.randint(1, 8)):
            below: list[int | None] = [rng.randrange(v) for _ in range(rng.randint(0, min(v, most)))]
            if absent and below and rng.random() < 0.4:
                below[rng.randrange(len(below))] = None
            build.add(below, row=build.vertices if rng.random() < 0.6 else None)
    return build.done()


def alone(cell: Any, s: dynamic.Structure, inputs: dict[str, Tensor], states: dict[str, int]) -> list[One]:
    done: list[One] = []
    for v in range(s.vertices):  # children come before their parents here
        below = [None if c < 0 else done[int(c)] for c in s.child[s.first[v] : s.first[v + 1]]]
        done.append(One(below, int(s.row[v]), inputs, states))
        cell(done[-1])
    return done


@pytest.mark.parametrize("fuse", [None, False], ids=["kernels", "ops"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_equals_each_vertex_by_itself(name: str, fuse: bool | None) -> None:
    torch.manual_seed(0)
    function, modules, width = FUNCTIONS[name]
    cell, states = Cell(function, *modules()), {"h": width, "k": 5}
    for seed in (0, 1):
        s = graphs(seed, 2 if function is two_children else 3, function is two_children)
        inputs = {"x": torch.randn(s.vertices, 5, requires_grad=True, **X), "ids": torch.randint(9, (s.vertices,))}
        theirs = alone(cell, s, inputs, states)
        ours = dynamic.Model(cell, states, fuse=fuse)(s, inputs, at="all")
        ours = ours if isinstance(ours, dict) else {"h": ours}
        assert ours.keys() == theirs[0].pushed.keys()
        both = [torch.cat([flat[n].reshape(s.vertices, -1) for n in ours], 1) for flat in (ours, {n: torch.cat([o.pushed[n] for o in theirs]) for n in ours})]
        # of float32 inside, sums in another order differ by its roundings
        assert_same(*both, [inputs["x"], *cell.parameters()], 1e-6 if function is coarser else 1e-9)


@pytest.mark.parametrize("width", [1, 63, 65])
def test_rows_of_any_width(width: int) -> None:
    torch.manual_seed(0)

    def function(c: Cell, v: Any) -> None:
        e = v.gather("h")
        given(v, torch.tanh(c.m[0](v.pull("x", optional=True)) + v.reduce(torch.sigmoid(c.m[1](e)) * e) + v.reduce(e, "max")))

    cell, s, states = Cell(function, nn.Linear(5, width), nn.Linear(width, width)), graphs(2, 3, False), {"h": width}
    x = torch.randn(s.vertices, 5, requires_grad=True, **X)
    theirs = torch.cat([o.pushed["h"] for o in alone(cell, s, {"x": x}, states)])
    assert_same(dynamic.Model(cell, states)(s, x, at="all"), theirs, [x, *cell.parameters()])


def small() -> tuple[Cell, dynamic.Model, Tensor]:
    torch.manual_seed(0)

    def function(c: Cell, v: Any) -> None:
        given(v, F.dropout(torch.tanh(c.m[0](v.pull("x")) * c.scale + v.gather("h", reduce="sum")), 0.5, c.training))

    cell = Cell(function, nn.Linear(5, 4))
    return cell.eval(), dynamic.Model(cell, {"h": 4}), torch.randn(3, 5, **X)


def test_what_python_says_is_read_again() -> None:
    """A weight, a module, a number or the mode of training that is another than when the function was traced."""
    cell, model, x = small()
    s = dynamic.chains([2, 1])

    def seen() -> None:
        theirs = torch.cat([o.pushed["h"] for o in alone(cell, s, {"x": x}, {"h": 4})])
        assert torch.allclose(model(s, x, at="all"), theirs)

    seen()
    cell.m[0].weight = nn.Parameter(torch.randn(4, 5, **X))
    seen()
    cell.m[0] = nn.Linear(5, 4, **X)
    seen()
    cell.scale = 3.0
    seen()
    cell.m[0].requires_grad_(False)
    assert not model(s, x).requires_grad
    cell.m[0].requires_grad_(True)
    model(s, x).sum().backward()
    assert cell.m[0].weight.grad is not None
    cell.train()
    assert not torch.equal(model(s, x), model(s, x)), "dropout"
    cell.eval()
    seen()
    assert sum(map(len, model._made.variants.values())) <= 4


def test_what_a_backward_cannot_do_is_refused() -> None:
    cell, model, x = small()
    s = dynamic.chains([2, 1])
    x.requires_grad_()
    twice = model(s, x).sum()
    twice.backward(retain_graph=True)
    with pytest.raises(StructureError, match=r"(?s)differentiated a second time.*needed  one backward for each call.*try  +the sum of the losses"):
        twice.backward()
    with pytest.raises(StructureError, match=r"(?s)a gradient of a dynamic model's gradient is not there.*needed  backward without create_graph"):
        torch.autograd.grad(model(s, x).sum(), x, create_graph=True)
    out = model(s, x)
    with torch.no_grad():
        cell.m[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_under_autocast_a_vertex_keeps_its_precision() -> None:
    _, model, x = small()
    s = dynamic.chains([2, 1])
    plain = model.float()(s, x.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(s, x.float()), plain)


def _thrice(_: nn.Module, into: Any, __: Any) -> tuple[Tensor]:
    return (into[0] * 3,)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "of a module": lambda m: m.register_full_backward_hook(_thrice),
    "before a module's": lambda m: m.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,)),
    "of an activation": lambda m: m.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g.clamp(max=0.5)) and None),
}


@pytest.mark.parametrize("what", HOOKS)
def test_hooks_of_gradients(what: str) -> None:
    cell, model, x = small()
    s = dynamic.chains([2, 1])
    model(s, x)  # a hook that is registered later is heard too
    handle = HOOKS[what](cell.m[0])
    x.requires_grad_()
    for _ in range(2):
        theirs = torch.cat([o.pushed["h"] for o in alone(cell, s, {"x": x}, {"h": 4})])
        assert_same(model(s, x, at="all"), theirs, [x, *cell.parameters()])
        handle.remove()


def test_a_gradient_on_the_way() -> None:
    """A vertex that reads how an energy of its own changes with its input."""

    def function(c: Cell, v: Any) -> None:
        x = v.pull("x")
        (force,) = torch.autograd.grad(torch.tanh(c.m[0](x)).square().sum(), x, create_graph=True)
        given(v, torch.tanh(force + v.gather("h", reduce="mean")))

    cell, s, x = Cell(function, nn.Linear(4, 4)), dynamic.chains([3, 1]), torch.randn(4, 4, requires_grad=True, **X)
    theirs = torch.cat([o.pushed["h"] for o in alone(cell, s, {"x": x}, {"h": 4})])
    assert_same(dynamic.Model(cell, {"h": 4})(s, x, at="all"), theirs, [x, *cell.parameters()])


def test_gradients_that_only_autograd_makes_are_refused() -> None:
    def backward(c: Cell, v: Any) -> None:
        h = c.m[0](v.pull("x"))
        h.sum().backward()
        given(v, h)

    counted: list[int] = []
    s, x = dynamic.chains([2]), torch.randn(2, 4, **X)
    words = r"(?s)vertex function 'vertex' has gradients that only autograd can make.*needed  ops, hooks that map a gradient.*found   "
    with pytest.raises(StructureError, match=words + r"backward\(\)"):
        dynamic.Model(Cell(backward, nn.Linear(4, 4)), {"h": 4})(s, x)
    cell = Cell(lambda c, v: given(v, c.m[0](v.pull("x"))), nn.Linear(4, 4))
    cell.m[0].register_full_backward_hook(lambda _, into, __: counted.append(1) or (into[0] * len(counted),))
    with pytest.raises(StructureError, match=words + "a hook that does not always do the same"):
        dynamic.Model(cell, {"h": 4})(s, x.requires_grad_())


def test_types_may_have_any_name() -> None:
    """Also those that modules use for themselves, and those with dots."""
    names = ("update", "a.b", "a_b", "keys", "training")
    cells = {n: Cell(lambda c, v: given(v, torch.tanh(c.m[0](v.pull("x")))), nn.Linear(4, 4)) for n in names}
    model, build, x = dynamic.Model(cells, {"h": 4}), dynamic.Builder(), torch.randn(5, 4, **X)
    for i, n in enumerate(names):
        build.sample().add(kind=n, row=i)
    theirs = torch.cat([torch.tanh(cells[n].m[0](x[i : i + 1])) for i, n in enumerate(names)])
    assert_same(model(build.done(), x), theirs, list(model.parameters()))
    assert len(list(model.parameters())) == 10
