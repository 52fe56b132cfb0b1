"""Dynamic work of today against what people run for it, on one CPU thread: forward and backward (of draft trees forward alone).

rollouts-lstm, rollouts-transformer   branching rollouts of agents, each step computed once; peers run every path from root to leaf
draft-trees     verifying trees of speculative decoding, requests of all lengths; peers pad requests and mask (compiled too)
ragged-pool     attention pooling over ragged rows; peers are nested tensors (jagged), padding, and gather and scatter by hand
gnn-gat         two GAT layers; the peer is PyG's formulation in plain torch (index_select, scatter_reduce, index_add), as PyG has it without extensions

Times are CPU time of the process on batches not seen before, construction of structures included; ways agree before they are timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import typer

WIDE, HEADS = 128, 4


def register(app: typer.Typer) -> None:
    app.command("structures")(structures)


def structures(
    json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    only: str = typer.Option("", help="Run only cases whose name contains this."),
    batches: int = typer.Option(6, help="Batches of new structures per case."),
    compiled: bool = typer.Option(True, help="Run peers under torch.compile too."),
) -> None:
    """Branching rollouts, draft trees, ragged rows and GNN layers, against what a user would otherwise run."""
    import torch

    from bench._ranks import machine
    from weft.cli.output import console, emit

    torch.set_num_threads(1)
    rows = []
    for name in (n for n in CASES if only in n):
        rows.append(row := CASES[name](batches, compiled))
        peers = ", ".join(f"{n} {ms:.1f} ({row['ratios'][n]:.2f}x)" for n, ms in row["peers_ms"].items())
        console.print(f"{name:<22}{row['weft_ms']:>8.1f} ms   {peers}   {row['correct']}")
    if json:
        emit({"bench": "structures", "machine": {**machine(), "clock": "process CPU time, 1 thread"}, "rows": rows})


def _compared(case: str, ways: dict[str, Callable[..., Any]], batch: Callable[[], Any], cells: list[Any], batches: int, learns: bool = True) -> dict[str, Any]:
    from bench.dynamic import compare

    row = compare(case, ways, batch, lambda *_: [(1, 1, 1)], cells, batches, learns=learns)
    return {**row, "limit_ms": None, "times_limit": None}


# -- branching rollouts ------------------------------------------------------------------------------------------------------------------


def _rollouts(rng: random.Random, trees: int = 32, depth: int = 32, every: int = 8) -> tuple[Any, list[list[int]]]:
    """Steps of agents that branch in two every few steps, some ending early: the step before each, and all paths to ends, longest first."""
    import numpy as np

    before, samples = list[int](), [0]
    for _ in range(trees):
        ends = [-1]
        for d in range(depth):
            new = []
            for e in ends:
                for _ in range(2 if d and d % every == 0 else 1):
                    if d < 4 or rng.random() > 0.02:
                        before.append(e)
                        new.append(len(before) - 1)
            ends = new
        samples.append(len(before))
    inner, paths = set(before), []
    for v in range(len(before)):
        if v not in inner:
            path = [v]
            while before[path[-1]] >= 0:
                path.append(before[path[-1]])
            paths.append(path[::-1])
    return (np.array(before), np.array(samples)), sorted(paths, key=lambda p: -len(p))


def rollouts_lstm(batches: int, compiled: bool) -> dict[str, Any]:
    """An LSTM policy. The peer is nn.LSTM over packed trajectories."""
    import numpy as np
    import torch
    from torch import nn

    from weft import dynamic as wd

    torch.manual_seed(0)
    rng, lstm = random.Random(0), nn.LSTM(WIDE, WIDE)

    def vertex(v: Any) -> None:
        x, h, c = v.pull("x"), v.gather("h", 0, optional=True), v.gather("c", 0, optional=True)
        i, f, g, o = (x @ lstm.weight_ih_l0.t() + h @ lstm.weight_hh_l0.t() + lstm.bias_ih_l0 + lstm.bias_hh_l0).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        v.scatter(h=h, c=c)
        v.push(h=h)

    vertex.held = lambda: list(lstm.parameters())  # type: ignore[attr-defined]
    net = wd.Model(vertex, states={"h": WIDE, "c": WIDE})

    def batch() -> tuple[Any, Any]:
        (before, samples), paths = _rollouts(rng)
        return (before, samples, paths), torch.randn(len(before), WIDE)

    def weft(given: Any, x: torch.Tensor) -> torch.Tensor:
        before, samples, paths = given
        has = before >= 0
        first = np.concatenate([[0], np.cumsum(has)])
        s = wd.Structure(first, before[has], np.arange(len(before)), samples, np.zeros(len(before), np.int64), ("vertex",))
        return net(s, x, at=np.array([p[-1] for p in paths]))  # type: ignore[no-any-return]

    def packed(given: Any, x: torch.Tensor) -> torch.Tensor:
        steps = nn.utils.rnn.pack_sequence([torch.tensor(p) for p in given[2]])
        return lstm(nn.utils.rnn.PackedSequence(x[steps.data], steps.batch_sizes))[1][0][0]  # type: ignore[no-any-return]

    return _compared("rollouts-lstm", {"weft": weft, "nn.LSTM packed": packed}, batch, [lstm], batches)


def rollouts_transformer(batches: int, compiled: bool) -> dict[str, Any]:
    """A causal transformer. Peers take every trajectory as a sequence, padded."""
    import numpy as np
    import torch

    from examples.dynamic.token_tree import Decoder

    torch.manual_seed(0)
    rng, net = random.Random(0), Decoder(64, 2 * WIDE, HEADS, 2, longest=40)

    def batch() -> tuple[Any, Any]:
        (before, samples), paths = _rollouts(rng, trees=16)
        return (before, samples, paths), torch.randint(0, 64, (len(before),))

    def weft(given: Any, tokens: torch.Tensor) -> torch.Tensor:
        before, _, paths = given
        return _along_trees(net, before, tokens)[np.array([p[-1] for p in paths])]  # type: ignore[no-any-return]

    def padded(run: Callable[..., Any], given: Any, tokens: torch.Tensor) -> torch.Tensor:
        paths = given[2]
        lengths = torch.tensor([len(p) for p in paths])
        at = torch.zeros(len(paths), 32, dtype=torch.long)
        for i, p in enumerate(paths):
            at[i, : len(p)] = torch.tensor(p)
        out = run(net, tokens[at], torch.arange(32).expand(len(paths), 32), None)
        return out[torch.arange(len(paths)), lengths - 1]  # type: ignore[no-any-return]

    ways = {"weft": weft, "trajectories padded": lambda *a: padded(_dense, *a)}
    if compiled:
        fast = torch.compile(_dense, dynamic=True)
        ways["trajectories padded, compiled"] = lambda *a: padded(fast, *a)
    return _compared("rollouts-transformer", ways, batch, [net], batches)


def _along_trees(net: Any, before: Any, tokens: Any) -> Any:
    """Logits after every token, each of which attends to those on its path."""
    import numpy as np
    import torch

    from weft import dynamic as wd

    n, layers = len(before), len(net.layers)
    paths: list[list[int]] = []
    for v, b in enumerate(before.tolist()):
        paths.append([*(paths[b] if b >= 0 else ()), v])
    depth = np.array([len(p) for p in paths])
    one = np.concatenate([[v, *p] for v, p in enumerate(paths)])
    first = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(n, np.int64), *[depth + 1] * layers]))])
    child = np.concatenate([one + i * n for i in range(layers)])
    row = np.concatenate([np.arange(n), np.full(n * layers, -1)])
    kinds = ("token", *(f"layer{i}" for i in range(layers)))
    s = wd.Structure(first, child, row, np.array([0, n * (layers + 1)]), np.repeat(np.arange(layers + 1), n), kinds)
    given = {"token": tokens, "position": torch.from_numpy(depth - 1)}
    return net.net(s, given, at=np.arange(n * layers, n * (layers + 1)))


def _dense(net: Any, tokens: Any, position: Any, mask: Any) -> Any:
    """The same decoder over padded rows; causal where no mask is given."""
    from torch.nn.functional import scaled_dot_product_attention as attend

    h = net.token(tokens) + net.position(position)
    for i, layer in enumerate(net.layers):
        q, k, w = (a.unflatten(-1, (net.heads, -1)).transpose(1, 2) for a in (layer.query(h), net.key[i](h), net.value[i](h)))
        h = layer(h, attend(q, k, w, attn_mask=mask, is_causal=mask is None).transpose(1, 2).flatten(2))
    return net.head(h)


# -- draft trees ---------------------------------------------------------------------------------------------------------------------------


def draft_trees(batches: int, compiled: bool) -> dict[str, Any]:
    """32 requests of 4 to 96 tokens with 24 drafted ones each; requests are independent, none is cached."""
    import numpy as np
    import torch

    from examples.dynamic.token_tree import Decoder

    torch.manual_seed(0)
    rng, net = random.Random(0), Decoder(512, 2 * WIDE, HEADS, 4, longest=160)

    def batch() -> tuple[Any, Any]:
        before, samples = list[int](), [0]
        for _ in range(32):
            start, known = len(before), rng.choice((4, 6, 8, 10, 12, 16, 24, 48, 96))
            before += [-1, *range(start, start + known - 1)]
            for _ in range(24):
                before.append(rng.randrange(max(start + known - 1, len(before) - 8), len(before)))
            samples.append(len(before))
        return (np.array(before), np.array(samples)), torch.randint(0, 512, (len(before),))

    def weft(given: Any, tokens: torch.Tensor) -> torch.Tensor:
        return _along_trees(net, given[0], tokens)  # type: ignore[no-any-return]

    def padded(run: Callable[..., Any], given: Any, tokens: torch.Tensor) -> torch.Tensor:
        before, samples = given
        sizes = np.diff(samples)
        wide = int(sizes.max())
        mask, position = np.zeros((len(sizes), wide, wide), bool), np.zeros((len(sizes), wide), np.int64)
        rows, real = np.zeros((len(sizes), wide), np.int64), np.arange(wide) < sizes[:, None]
        for b, (start, size) in enumerate(zip(samples, sizes, strict=False)):
            for i in range(size):
                parent = before[start + i] - start
                if before[start + i] >= 0:
                    mask[b, i], position[b, i] = mask[b, parent], position[b, parent] + 1
                mask[b, i, i] = True
            mask[b, range(size, wide), range(size, wide)] = True
            rows[b, :size] = np.arange(start, start + size)
        out = run(net, tokens[torch.from_numpy(rows)], torch.from_numpy(position), torch.from_numpy(mask)[:, None])
        return out[torch.from_numpy(real)]  # type: ignore[no-any-return]

    ways = {"weft": weft, "padded, masked": lambda *a: padded(_dense, *a)}
    if compiled:
        fast = torch.compile(_dense, dynamic=True)
        ways["padded, masked, compiled"] = lambda *a: padded(fast, *a)
    return _compared("draft-trees", ways, batch, [net], batches, learns=False)


# -- ragged rows ---------------------------------------------------------------------------------------------------------------------------


def ragged_pool(batches: int, compiled: bool) -> dict[str, Any]:
    """Rows of 1 to 200 items, 30 on average, pooled by a softmax of a small network's scores."""
    import numpy as np
    import torch
    from torch import nn

    from weft import dynamic as wd

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    cell = nn.ModuleDict({"up": nn.Linear(WIDE, WIDE), "score": nn.Linear(WIDE, 1), "value": nn.Linear(WIDE, WIDE)})

    def score(x: torch.Tensor) -> torch.Tensor:
        return cell["score"](torch.tanh(cell["up"](x)))  # type: ignore[no-any-return]

    def item(v: Any) -> None:
        x = v.pull("x")
        v.scatter(s=score(x), v=cell["value"](x))

    def row(v: Any) -> None:
        v.push(y=v.reduce(v.softmax(v.gather("s")) * v.gather("v")))

    item.held = lambda: list(cell.parameters())  # type: ignore[attr-defined]
    net = wd.Model({"item": item, "row": row}, states={"s": 1, "v": WIDE})

    def batch() -> tuple[Any, Any]:
        lengths = np.minimum(rng.geometric(1 / 30, 128), 200)
        return lengths, torch.randn(int(lengths.sum()), WIDE)

    def weft(lengths: Any, x: torch.Tensor) -> torch.Tensor:
        sample = np.concatenate([[0], np.cumsum(lengths + 1)])
        top = np.zeros(sample[-1], bool)
        top[sample[1:] - 1] = True
        arity, rows = np.zeros(len(top), np.int64), np.full(len(top), -1)
        arity[top], rows[~top] = lengths, np.arange(len(x))
        s = wd.Structure(np.concatenate([[0], np.cumsum(arity)]), np.flatnonzero(~top), rows, sample, top.astype(np.int64), ("item", "row"))
        return net(s, x)  # type: ignore[no-any-return]

    def nested(lengths: Any, x: torch.Tensor) -> torch.Tensor:
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        rows = torch.nested.nested_tensor_from_jagged(x, ends, min_seqlen=1, max_seqlen=int(lengths.max()))
        weighed = torch.softmax(score(rows), dim=1) * cell["value"](rows)
        return torch.nested.to_padded_tensor(weighed, 0.0).sum(1)  # jagged sums have no gradient yet

    def padded(lengths: Any, x: torch.Tensor) -> torch.Tensor:
        there = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]
        rows = torch.zeros(*there.shape, WIDE)
        rows[there] = x
        weights = score(rows).masked_fill(~there.unsqueeze(-1), float("-inf")).softmax(1)
        return (weights * cell["value"](rows)).sum(1)

    def scattered(lengths: Any, x: torch.Tensor) -> torch.Tensor:
        at, n = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(lengths)), len(lengths)
        scores = score(x)
        top = torch.full((n, 1), float("-inf")).scatter_reduce(0, at[:, None], scores.detach(), "amax")
        weights = (scores - top[at]).exp()
        return torch.zeros(n, WIDE).index_add(0, at, weights / torch.zeros(n, 1).index_add(0, at, weights)[at] * cell["value"](x))

    ways = {"weft": weft, "nested tensors": nested, "padded": padded, "by index_add": scattered}
    return _compared("ragged-pool", ways, batch, [cell], batches)


# -- graphs ----------------------------------------------------------------------------------------------------------------------------------


def gnn_gat(batches: int, compiled: bool) -> dict[str, Any]:
    """10,000 vertices of 8 neighbours, 4 heads of 32."""
    import numpy as np
    import torch

    from examples.dynamic.gat import GAT, unrolled

    torch.manual_seed(0)
    rng, net, n = np.random.default_rng(0), GAT(WIDE, HEADS, layers=2), 10_000

    def batch() -> tuple[Any, Any]:
        ends = np.concatenate([rng.integers(0, n, (2, 8 * n)), np.arange(n)[None].repeat(2, 0)], axis=1)
        return ends, torch.randn(n, WIDE)

    def plain(run: Callable[..., Any], ends: Any, x: torch.Tensor) -> torch.Tensor:
        return run(x, *torch.from_numpy(ends))  # type: ignore[no-any-return]

    ways: dict[str, Callable[..., Any]] = {
        "weft": lambda ends, x: net.net(unrolled(n, ends, 2), x, at=np.arange(2 * n, 3 * n)), "as PyG, plain torch": lambda *a: plain(net.plain, *a)
    }  # fmt: skip
    if compiled:
        fast = torch.compile(net.plain)
        ways["as PyG, compiled"] = lambda *a: plain(fast, *a)
    return _compared("gnn-gat", ways, batch, [net], batches)


CASES: dict[str, Callable[[int, bool], dict[str, Any]]] = {
    "rollouts-lstm": rollouts_lstm, "rollouts-transformer": rollouts_transformer, "draft-trees": draft_trees, "ragged-pool": ragged_pool,
    "gnn-gat": gnn_gat,
}  # fmt: skip
