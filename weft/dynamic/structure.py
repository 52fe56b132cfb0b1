"""The graphs of a batch as arrays: who the children of each vertex are, its type, and the row of its input.

A graph is data. It comes as nested tuples, parent arrays, edge lists, chains, networkx graphs or from a Builder,
and every form ends as one Structure over all samples, with the vertices of a sample next to each other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from weft.core.errors import StructureError
from weft.dynamic import native
from weft.dynamic.native import Ints

NO_ROW = -1  # this vertex has no external input
NO_CHILD = -1  # this child is absent


@dataclass(frozen=True, eq=False)
class Structure:
    """Vertex v has children child[first[v]:first[v+1]], type kinds[kind[v]], and reads row row[v] of the inputs."""

    first: Ints
    child: Ints
    row: Ints
    sample: Ints  # sample s owns vertices sample[s]:sample[s+1]
    kind: Ints
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sample) - 1

    @property
    def vertices(self) -> int:
        return len(self.row)

    @cached_property
    def arity(self) -> Ints:
        return np.diff(self.first)

    @cached_property
    def depth(self) -> Ints:
        """The longest path below each vertex. A cycle is refused here."""
        self.check()
        depth, stuck = native.depth(self.first, self.child)
        if stuck >= 0:
            raise _error(self, stuck, "is on a cycle", "every vertex after its children", _cycle(self, stuck))
        return depth

    @cached_property
    def roots(self) -> Ints:
        """Vertices that are nobody's child."""
        used = np.zeros(self.vertices + 1, bool)
        used[self.child] = True  # an absent child (-1) marks the spare place at the end
        return np.flatnonzero(~used[:-1])

    def sample_of(self, vertex: int) -> tuple[int, int]:
        """(sample, number of the vertex within it)."""
        s = int(np.searchsorted(self.sample, vertex, side="right")) - 1
        return s, vertex - int(self.sample[s])

    def check(self) -> None:
        """Every child is a vertex of the same batch."""
        bad = np.flatnonzero((self.child < NO_CHILD) | (self.child >= self.vertices))
        if len(bad):
            v = int(np.searchsorted(self.first, bad[0], side="right")) - 1
            start, stop = (int(self.sample[self.sample_of(v)[0] + k]) for k in (0, 1))
            raise _error(
                self, v, f"has child {int(self.child[bad[0]]) - start}, which is not there",
                f"children between 0 and {stop - start - 1}", f"{int(self.child[bad[0]]) - start}",
            )  # fmt: skip

    @cached_property
    def packed(self) -> Any:
        """All of it as one tensor, a row for each sample."""
        from weft.dynamic.packed import pack

        return pack(self)

    def batch_parts(self) -> list[tuple[str, Any]]:
        """What a step is given of it: the tensor, and what it is only right for."""
        return [("packed", self.packed), ("kinds", ", ".join(self.kinds))]

    def with_batch_parts(self, parts: list[tuple[str, Any]]) -> Any:
        """What stands for it where another tensor does: graphs that are traced, or others."""
        from weft.dynamic.packed import Packed

        return Packed(dict(parts)["packed"], self.kinds)

    def take(self, samples: Sequence[int] | Ints) -> Structure:
        """The structure of some samples alone; rows of inputs stay as they are."""
        picked = np.asarray(samples, np.int64)
        sizes = self.sample[picked + 1] - self.sample[picked]
        vertices = native.spans(self.sample[picked], sizes)
        arity = self.arity[vertices]
        child = self.child[native.spans(self.first[vertices], arity)]
        bounds = bounds_of(sizes)
        shift = np.repeat(bounds[:-1] - self.sample[picked], sizes)  # a sample moves as one piece
        moved = np.where(child < 0, child, child + np.repeat(shift, arity))
        return replace(self, first=bounds_of(arity), child=moved, row=self.row[vertices], sample=bounds, kind=self.kind[vertices])


def trees(samples: Sequence[Any], *, leaf: str = "vertex", inner: str = "vertex") -> Structure:
    """Nested tuples (or lists): a tuple is a vertex with those children, an int a leaf that reads that input row.

    None is a leaf without input. `leaf` and `inner` name the types of the two kinds of vertex.
    """
    flat = native.flatten(samples)
    first, child, row, sample = flat[:4] if flat is not None else _flatten(samples)
    kinds = tuple(dict.fromkeys((leaf, inner)))
    kind = np.zeros(len(row), np.int64) if len(kinds) == 1 else (np.diff(first) > 0).astype(np.int64)
    made = Structure(first, child, row, sample, kind, kinds)
    if flat is not None:
        vars(made)["depth"] = flat[4]  # a nested tuple has no cycle and no child that is not there
    return made


def chains(lengths: Sequence[int] | Ints, *, kind: str = "vertex", rows: Ints | None = None) -> Structure:
    """Sequences: each vertex has the one before it as its child. Rows count through all sequences unless given."""
    sizes = _lengths(lengths)
    total = int(sizes.sum())
    starts = bounds_of(sizes)
    arity = np.ones(total, np.int64)
    arity[starts[:-1][sizes > 0]] = 0
    child = np.arange(total)[arity > 0] - 1
    row = np.arange(total) if rows is None else np.asarray(rows, np.int64)
    return Structure(bounds_of(arity), child, row, starts, np.zeros(total, np.int64), (kind,))


def _lengths(lengths: Any) -> Ints:
    try:
        sizes = np.asarray(lengths, np.int64)
    except (ValueError, TypeError) as error:
        raise StructureError("the lengths cannot be read", needed="integers", found=repr(lengths)) from error
    if sizes.ndim != 1 or (sizes < 0).any():
        raise StructureError("the lengths cannot be read", needed="a list of integers, 0 or more", found=repr(lengths))
    return sizes


def parents(
    samples: Sequence[Sequence[int]], *, kind: str = "vertex", inputs: str = "all", kinds: Sequence[Sequence[str]] = ()
) -> Structure:
    """One array per sample: parent[v] is the parent of v, -1 at a root. `inputs` is "all", "leaves" or "none"."""
    sizes = np.array([len(p) for p in samples], np.int64)
    flat = np.concatenate([np.asarray(p, np.int64) for p in samples]) if len(samples) else np.empty(0, np.int64)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    bounds = bounds_of(sizes)
    bad = np.flatnonzero((flat < -1) | (flat >= sizes[owner]))
    if len(bad):
        v, s = int(bad[0]), int(owner[bad[0]])
        raise StructureError(
            f"sample {s}: vertex {v - bounds[s]} has parent {flat[v]}, which is not there",
            needed=f"parents between 0 and {sizes[s] - 1}, or -1 at a root", found=str(flat[v]),
        )  # fmt: skip
    below = np.flatnonzero(flat >= 0)
    pairs = np.stack([below, flat[below] + bounds[owner[below]]])
    return _from_pairs(pairs, sizes, kind, kinds, inputs)


def edges(
    samples: Sequence[tuple[int, Sequence[tuple[int, int]]]],
    *,
    kind: str = "vertex",
    inputs: str = "all",
    kinds: Sequence[Sequence[str]] = (),
) -> Structure:
    """One (number of vertices, [(child, parent), ...]) per sample; the order of a vertex's edges is that of its children."""
    for s, sample in enumerate(samples):
        if not (isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], (int, np.integer))):
            raise StructureError(
                f"sample {s} cannot be read", needed="(number of vertices, [(child, parent), ...])", found=repr(sample)[:80],
                try_="dynamic.edges([(3, [(0, 2), (1, 2)])])",
            )  # fmt: skip
    sizes = np.array([n for n, _ in samples], np.int64)
    bounds = bounds_of(sizes)
    counts = np.array([len(e) for _, e in samples], np.int64)
    lists = [np.asarray(e, np.int64).reshape(-1, 2) for _, e in samples]
    flat = np.concatenate(lists).T if lists else np.empty((2, 0), np.int64)
    owner = np.repeat(np.arange(len(sizes)), counts)
    bad = np.flatnonzero(((flat < 0) | (flat >= sizes[owner])).any(0))
    if len(bad):
        s, pair = int(owner[bad[0]]), flat[:, bad[0]].tolist()
        raise StructureError(
            f"sample {s}: edge {tuple(pair)} names a vertex that is not there",
            needed=f"(child, parent), each between 0 and {sizes[s] - 1}", found=str(tuple(pair)),
        )  # fmt: skip
    return _from_pairs(flat + bounds[owner], sizes, kind, kinds, inputs)


def networkx(graphs: Iterable[Any], *, kind: str = "vertex", inputs: str = "all") -> Structure:
    """Directed graphs whose edges run from child to parent. Vertex data `kind` and `row` are used where given."""
    build = Builder()
    for graph in graphs:
        names = list(graph.nodes)
        place = {name: i for i, name in enumerate(names)}
        build.sample()
        for name in names:
            data = graph.nodes[name]
            below = [place[c] for c in graph.predecessors(name)]
            has_row = inputs == "all" or (inputs == "leaves" and not below)
            row = data.get("row", build.vertices if has_row else None)
            build.add(below, kind=data.get("kind", kind), row=row)
    return build.done()


class Builder:
    """Makes graphs vertex by vertex: `add` gives the number of the vertex within its sample."""

    def __init__(self) -> None:
        self._sample: list[int] = []
        self._first, self._child, self._row, self._kind = [0], list[int](), list[int](), list[int]()
        self._kinds: dict[str, int] = {}

    @property
    def vertices(self) -> int:
        return len(self._row)

    def sample(self) -> Builder:
        """Begin the next sample."""
        self._sample.append(self.vertices)
        return self

    def add(self, children: Iterable[int | None] = (), *, kind: str = "vertex", row: int | None = None) -> int:
        """A vertex with these children (numbers within the sample; None where one is absent)."""
        if not self._sample:
            self.sample()
        base = self._sample[-1]
        self._child += [NO_CHILD if c is None else _number(c, base, self.vertices - base) for c in children]
        self._first.append(len(self._child))
        self._row.append(NO_ROW if row is None else row)
        self._kind.append(self._kinds.setdefault(kind, len(self._kinds)))
        return self.vertices - 1 - base

    def done(self) -> Structure:
        """All samples so far, as arrays."""
        arrays = (self._first, self._child, self._row, [*self._sample, self.vertices], self._kind)
        first, child, row, sample, kind = (np.array(a, np.int64) for a in arrays)
        return Structure(first, child, row, sample, kind, tuple(self._kinds) or ("vertex",))


def join(parts: Sequence[Structure], rows: Sequence[int] | None = None) -> Structure:
    """One batch from several. Part i's input rows begin at rows[i] (0: all read the same inputs)."""
    kinds = tuple(dict.fromkeys(k for p in parts for k in p.kinds)) or ("vertex",)
    at, edge, base = 0, 0, rows or [0] * len(parts)
    pieces: dict[str, list[Ints]] = {name: [] for name in ("first", "child", "row", "sample", "kind")}
    for part, shift in zip(parts, base, strict=True):
        pieces["first"].append(part.first[:-1] + edge)
        pieces["child"].append(np.where(part.child < 0, part.child, part.child + at))
        pieces["row"].append(np.where(part.row < 0, part.row, part.row + shift))
        pieces["sample"].append(part.sample[:-1] + at)
        pieces["kind"].append(np.array([kinds.index(k) for k in part.kinds], np.int64)[part.kind])
        at, edge = at + part.vertices, edge + len(part.child)
    full = {name: np.concatenate([*parts_, np.empty(0, np.int64)]) for name, parts_ in pieces.items()}
    full["first"] = np.append(full["first"], edge)
    full["sample"] = np.append(full["sample"], at)
    return Structure(**full, kinds=kinds)


def _from_pairs(pairs: Ints, sizes: Ints, kind: str, kinds: Sequence[Sequence[str]], inputs: str) -> Structure:
    """From (child, parent) over the full batch."""
    total = int(sizes.sum())
    order = np.argsort(pairs[1], kind="stable")
    arity = np.bincount(pairs[1], minlength=total) if total else np.empty(0, np.int64)
    flat = [name for sample in kinds for name in sample] or [kind] * total
    if len(flat) != total:
        raise StructureError(
            "types do not match the vertices", needed=f"{total} names in `kinds`", found=f"{len(flat)}",
        )  # fmt: skip
    names = tuple(dict.fromkeys(flat)) or (kind,)
    number = {name: i for i, name in enumerate(names)}
    row = _rows(arity, inputs)
    kind_of = np.array([number[name] for name in flat], np.int64)
    return Structure(bounds_of(arity), pairs[0][order], row, bounds_of(sizes), kind_of, names)


def _rows(arity: Ints, inputs: str) -> Ints:
    """Which input row each vertex reads when the form of the graph does not say."""
    total = len(arity)
    if inputs == "all":
        return np.arange(total)
    if inputs == "none":
        return np.full(total, NO_ROW)
    if inputs == "leaves":
        return np.where(arity == 0, np.cumsum(arity == 0) - 1, NO_ROW)
    raise StructureError("unknown choice of inputs", needed='"all", "leaves" or "none"', found=repr(inputs))


def bounds_of(counts: Ints) -> Ints:
    """Where each of some runs begins, and the last ends."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def _flatten(samples: Sequence[Any]) -> tuple[Ints, Ints, Ints, Ints]:
    """Nested tuples by a Python loop: the fallback, and the one that says what is wrong."""
    build = Builder()
    for s, root in enumerate(samples):
        start = build.sample().vertices
        stack: list[tuple[Any, list[int]]] = [((root,), [])]
        while True:
            node, done = stack[-1]
            if len(done) == len(node):
                stack.pop()
                if not stack:
                    break
                stack[-1][1].append(build.add(done))
                continue
            below = node[len(done)]
            if isinstance(below, (tuple, list)):
                stack.append((below, []))
                _guard(stack, s)
            else:
                done.append(build.add(row=_leaf(below, s, build.vertices - start)))
    made = build.done()
    return made.first, made.child, made.row, made.sample


def _leaf(value: Any, sample: int, vertex: int) -> int | None:
    if value is None:
        return None
    try:
        row = operator.index(value)
    except TypeError:
        row = -1
    if row < 0:
        raise StructureError(
            f"sample {sample}: vertex {vertex} is not a leaf weft can read",
            needed="a tuple of children, the number of an input row (0 or more), or None", found=repr(value)[:60],
        )  # fmt: skip
    return row


def _guard(stack: Sequence[Any], sample: int) -> None:
    if len(stack) > 1_000_000:
        raise StructureError(
            f"sample {sample}: the nesting does not end", needed="a finite tree",
            found="more than a million levels (does a list contain itself?)",
        )  # fmt: skip


def _number(child: int, base: int, size: int) -> int:
    """The batch-wide number of a child; one that is not there yet may still come, so only negatives are refused now."""
    if child < 0:
        raise StructureError(f"vertex {size} has child {child}", needed="0 or more, or None where a child is absent", found=str(child))
    return base + child


def _cycle(s: Structure, vertex: int) -> str:
    """The way from a vertex on a cycle back to itself, as text."""
    base = int(s.sample[s.sample_of(vertex)[0]])
    came, todo = {vertex: vertex}, [vertex]
    while todo:
        v = todo.pop()
        below = [c for c in s.child[s.first[v] : s.first[v + 1]].tolist() if c >= 0]
        if vertex in below:
            path = [v]
            while path[-1] != vertex:
                path.append(came[path[-1]])
            return " -> ".join(str(p - base) for p in [*reversed(path), vertex])
        new = [c for c in below if c not in came]
        came |= dict.fromkeys(new, v)
        todo += new
    return f"{vertex - base} waits for itself"


def _error(s: Structure, vertex: int, what: str, needed: str, found: str) -> StructureError:
    sample, number = s.sample_of(vertex)
    return StructureError(f"sample {sample}: vertex {number} {what}", needed=needed, found=found)
