"""Other ways to run the benchmark's Tree-LSTM. Each takes the same Python trees and the same weights and does the same products.

A way has `construct(trees)` (all it does before the first number is computed) and `run(constructed)`, forward and backward,
which returns the sum of the roots and the gradient of the recurrent weights.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench._trees import Levels, Tree, gates, level_by_level, recursion
from examples.dynamic.tree_lstm import ChildSum, model
from weft import dynamic


class Way:
    """A way to run the model; `missing` says why it cannot."""

    name = ""

    def __init__(self, cell: ChildSum, x: Tensor) -> None:
        self.cell, self.x = cell, x

    def construct(self, trees: list[Tree]) -> Any:
        return trees

    def roots(self, constructed: Any) -> Tensor:
        raise NotImplementedError

    def run(self, constructed: Any) -> tuple[float, Tensor]:
        for p in self.cell.parameters():
            p.grad = None
        total = self.roots(constructed).sum()
        total.backward()
        return total.item(), self.cell.below.weight.grad


class Weft(Way):
    name = "weft"

    def __init__(self, cell: ChildSum, x: Tensor) -> None:
        super().__init__(cell, x)
        self.net = model(cell, cell.below.in_features)

    def construct(self, trees: list[Tree]) -> dynamic.Schedule:
        return self.net.prepare(dynamic.trees(trees), self.x)

    def roots(self, constructed: dynamic.Schedule) -> Tensor:
        return self.net(constructed, self.x)


class Naive(Way):
    name = "naive loop"

    def roots(self, constructed: list[Tree]) -> Tensor:
        return recursion(self.cell, constructed, self.x)


class LevelBatched(Way):
    name = "level-batched torch"

    def construct(self, trees: list[Tree]) -> Levels:
        return Levels(dynamic.trees(trees))

    def roots(self, constructed: Levels) -> Tensor:
        return level_by_level(self.cell, constructed, self.x)


class Dynet(Way):
    """DyNet with autobatching (agenda). Its expressions are the graph, so building them is construction."""

    name = "dynet autobatch"

    def __init__(self, cell: ChildSum, x: Tensor) -> None:
        super().__init__(cell, x)
        config = importlib.import_module("dynet_config")
        config.set(mem=2048, autobatch=1)
        self.dy = importlib.import_module("dynet")
        self.params = self.dy.ParameterCollection()
        values = (cell.word.weight, cell.word.bias, cell.below.weight, cell.forget.weight, cell.forget.bias)
        self.weights = [self._parameter(v) for v in values]
        self.rows = self.params.lookup_parameters_from_numpy(x.numpy())

    def _parameter(self, value: Tensor) -> Any:
        array = value.detach().numpy()
        return self.params.add_parameters(array.shape, init=self.dy.NumpyInitializer(array))

    def construct(self, trees: list[Tree]) -> Any:
        dy, size = self.dy, self.cell.below.in_features
        dy.renew_cg()
        word, bias, below, forget, forget_bias = (w.expr(update=True) for w in self.weights)

        def gated(iou: Any, kept: Any) -> tuple[Any, Any]:
            i, o, u = (dy.pick_range(iou, k * size, (k + 1) * size) for k in range(3))
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
            c = c if kept is None else c + kept
            return dy.cmult(dy.logistic(o), dy.tanh(c)), c

        def kept(h: Any, c: Any) -> Any:
            return dy.cmult(dy.logistic(dy.affine_transform([forget_bias, forget, h])), c)

        def walk(tree: Tree) -> tuple[Any, Any]:
            if isinstance(tree, int):
                return gated(dy.affine_transform([bias, word, dy.lookup(self.rows, tree, update=False)]), None)
            (h0, c0), (h1, c1) = walk(tree[0]), walk(tree[1])
            return gated(dy.affine_transform([bias, below, h0 + h1]), kept(h0, c0) + kept(h1, c1))

        return dy.esum([dy.sum_elems(walk(tree)[0]) for tree in trees])

    def run(self, constructed: Any) -> tuple[float, Tensor]:
        self.weights[2].scale_gradient(0)
        total = constructed.value()
        constructed.backward()
        return total, torch.from_numpy(np.array(self.weights[2].grad_as_array()))


class Dgl(Way):
    """DGL: messages along a batched graph, frontier by frontier."""

    name = "dgl"

    def __init__(self, cell: ChildSum, x: Tensor) -> None:
        super().__init__(cell, x)
        self.dgl = importlib.import_module("dgl")

    def construct(self, trees: list[Tree]) -> Any:
        graphs = [self._graph(tree) for tree in trees]
        batch = self.dgl.batch(graphs)
        return batch, self.dgl.topological_nodes_generator(batch), (batch.out_degrees() == 0).nonzero().flatten()

    def _graph(self, tree: Tree) -> Any:
        below, above, rows = list[int](), list[int](), list[int]()

        def walk(t: Tree) -> int:
            children = [] if isinstance(t, int) else [walk(s) for s in t]
            rows.append(t if isinstance(t, int) else -1)
            below.extend(children)
            above.extend([len(rows) - 1] * len(children))
            return len(rows) - 1

        walk(tree)
        graph = self.dgl.graph((below, above), num_nodes=len(rows))
        graph.ndata["row"] = torch.tensor(rows)
        return graph

    def roots(self, constructed: Any) -> Tensor:
        graph, order, ends = constructed
        rows = graph.ndata["row"]
        leaves = (rows >= 0).nonzero().flatten()
        size = self.cell.below.in_features
        h, c = gates(self.cell.word(self.x[rows[leaves]]), None)
        zero = torch.zeros(len(rows), size)
        graph.ndata["h"], graph.ndata["c"] = (zero.index_copy(0, leaves, v) for v in (h, c))
        graph.prop_nodes(order[1:], message_func=self._message, reduce_func=self._reduce, apply_node_func=self._apply)
        return graph.ndata.pop("h")[ends]

    @staticmethod
    def _message(edges: Any) -> dict[str, Tensor]:
        return {"h": edges.src["h"], "c": edges.src["c"]}

    def _reduce(self, nodes: Any) -> dict[str, Tensor]:
        h = nodes.mailbox["h"]
        kept = (torch.sigmoid(self.cell.forget(h)) * nodes.mailbox["c"]).sum(1)
        return {"iou": self.cell.below(h.sum(1)) + self.cell.word.bias, "kept": kept}

    @staticmethod
    def _apply(nodes: Any) -> dict[str, Tensor]:
        h, c = gates(nodes.data["iou"], nodes.data["kept"])
        return {"h": h, "c": c}


class Torchfold(Way):
    """torchfold: module calls at the same step of the recursion are batched."""

    name = "torchfold"

    def __init__(self, cell: ChildSum, x: Tensor) -> None:
        super().__init__(cell, x)
        package = importlib.import_module("torchfold.torchfold")
        package.torch = _OldTorch()  # it was written for a torch in which this name existed
        self.fold = package.Fold

    def construct(self, trees: list[Tree]) -> Any:
        fold = self.fold()

        def walk(tree: Tree) -> Any:
            if isinstance(tree, int):
                return fold.add("leaf", tree).split(2)
            (h0, c0), (h1, c1) = walk(tree[0]), walk(tree[1])
            return fold.add("inner", h0, c0, h1, c1).split(2)

        return fold, [[walk(tree)[0] for tree in trees]]

    def roots(self, constructed: Any) -> Tensor:
        fold, roots = constructed
        return fold.apply(self, roots)[0]

    def leaf(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return gates(self.cell.word(self.x[rows]), None)

    def inner(self, h0: Tensor, c0: Tensor, h1: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.sigmoid(self.cell.forget(h0)) * c0 + torch.sigmoid(self.cell.forget(h1)) * c1
        return gates(self.cell.below(h0 + h1) + self.cell.word.bias, kept)


class _OldTorch:
    tensor = types.SimpleNamespace(_TensorBase=torch.Tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


WAYS = (Weft, Naive, LevelBatched, Dynet, Dgl, Torchfold)


def available(cell: ChildSum, x: Tensor) -> tuple[list[Way], dict[str, str]]:
    """The ways that can be run here, and why others cannot."""
    found, missing = list[Way](), dict[str, str]()
    for kind in WAYS:
        try:
            found.append(kind(cell, x))
        except Exception as error:  # a peer may fail to import in many ways
            missing[kind.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, missing
