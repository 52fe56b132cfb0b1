"""Graphs that grow while they run: decoding, search, agents. What is added next may depend on what came out before.

Each `run` batches the vertices added since the last one. Children that ran before are brought in by vertices of a type of their own, which
pull the states kept from then; autograd joins the runs, so a loss on any of them trains the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import StructureError
from weft.dynamic.model import Model
from weft.dynamic.native import Ints
from weft.dynamic.plan import held_by
from weft.dynamic.structure import Builder, Structure
from weft.dynamic.vertex import Vertex

BROUGHT = "(ran before)"


class Growing:
    """Open graphs over a model. Vertices are numbered in the order they are added."""

    def __init__(self, model: Model) -> None:
        self.model, self._runner = model, _with_states(model)
        self._children: list[Sequence[int]] = []
        self._kind: list[str] = []
        self._added: list[tuple[int, Mapping[str, Tensor]]] = []  # since the last run: so many vertices, and the rows given with them
        self._like: dict[str, Tensor] = {}  # of every input, no rows
        self._starts = [0]  # the first vertex of each run, and of the next
        self._states: list[dict[str, Tensor]] = []
        self._outputs: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self._kind)

    @property
    def waiting(self) -> int:
        """Vertices added and not yet run."""
        return len(self._kind) - self._starts[-1]

    def add(
        self, children: Iterable[Sequence[int]], inputs: Mapping[str, Tensor] | Tensor | None = None, *, kind: str = "vertex"
    ) -> list[int]:
        """Add one vertex per entry of `children`, with row i of `inputs` for the i-th. Returns their numbers."""
        if kind not in self.model.functions:
            raise StructureError(
                f"no vertex function is called {kind!r}", needed=" or ".join(map(repr, self.model.functions)), found=repr(kind)
            )
        first, new = len(self), [tuple(c) for c in children]
        for i, below in enumerate(new):
            bad = [c for c in below if not 0 <= c < first + i]
            if bad:
                raise StructureError(
                    f"vertex {first + i} has child {bad[0]}, which is not there",
                    needed=f"vertices added before it: 0 to {first + i - 1}", found=str(bad[0]),
                )  # fmt: skip
        given = {} if inputs is None else {"x": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        short = next((name for name, x in given.items() if len(x) != len(new)), None)
        if short is not None:
            raise StructureError(
                f"input {short!r} does not match the vertices added", needed=f"{len(new)} rows", found=f"{len(given[short])}"
            )
        self._children += new
        self._kind += [kind] * len(new)
        self._added.append((len(new), given))
        self._like |= {name: x.new_empty((0, *x.shape[1:])) for name, x in given.items()}
        return list(range(first, first + len(new)))

    def run(self) -> None:
        """Run all that was added since the last run, batched."""
        fresh = range(self._starts[-1], len(self))
        if not fresh:
            return
        before = sorted({c for v in fresh for c in self._children[v] if c < fresh[0]})
        structure, inputs = self._structure(fresh, before)
        at = np.arange(len(before), structure.vertices)
        results = self._runner(structure, inputs, at=at)
        results = results if isinstance(results, dict) else {self._only: results}
        results = self._by_vertex(fresh, results)
        self._states.append({n.removeprefix("state "): r for n, r in results.items() if n.startswith("state ")})
        self._outputs.append({n: r for n, r in results.items() if not n.startswith("state ")})
        self._starts.append(len(self))
        self._added = []

    def state(self, name: str, vertices: Sequence[int]) -> Tensor:
        """What vertices that ran scattered under a name, one row each."""
        return self._pick([s.get(name) for s in self._states], vertices, name)

    def output(self, name: str, vertices: Sequence[int]) -> Tensor:
        """What vertices that ran pushed under a name, one row each."""
        return self._pick([o.get(name) for o in self._outputs], vertices, name)

    def _pick(self, runs: Sequence[Tensor | None], vertices: Sequence[int], name: str) -> Tensor:
        at = np.arange(self._starts[-1])[np.asarray(vertices, np.int64)]
        parts, order, runs_of = list[Tensor](), list[Ints](), np.searchsorted(self._starts, at, side="right") - 1
        for run in np.unique(runs_of).tolist():
            here = np.flatnonzero(runs_of == run)
            values = runs[run]
            if values is None:
                raise StructureError(f"vertex {vertices[here[0]]} gives no {name!r}", needed="a name its type gives", found=name)
            parts.append(values[torch.from_numpy(at[here] - self._starts[run]).to(values.device)])
            order.append(here)
        full = torch.cat(parts)
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        return full[back.to(full.device)]

    def _structure(self, fresh: range, before: list[int]) -> tuple[Structure, dict[str, Tensor]]:
        """The graph of one run: brought-in vertices first, then the new ones; and the rows all of them read."""
        number, build = {v: i for i, v in enumerate([*before, *fresh])}, Builder()
        for i in range(len(before)):
            build.add(kind=BROUGHT, row=i)
        reads = [bool(given) for count, given in self._added for _ in range(count)]
        for v, has_row in zip(fresh, reads, strict=True):
            build.add([number[c] for c in self._children[v]], kind=self._kind[v], row=build.vertices if has_row else None)
        return build.done(), self._inputs(len(fresh), before)

    def _inputs(self, fresh: int, before: list[int]) -> dict[str, Tensor]:
        """Rows of every input: those of brought-in vertices hold states, those of new ones what was given with them."""
        like = next((t for f in self.model.functions.values() for t in held_by(f)), None)
        out: dict[str, Tensor] = {}
        for name, shape in self.model.states.items():
            rows = self.state(name, before) if before else torch.zeros((0, *shape), **_options(like))
            out[f"state {name}"] = torch.cat([rows, rows.new_zeros((fresh, *shape))])
        for name, none in self._like.items():
            parts = [(len(before), {}), *self._added]
            out[name] = torch.cat([given.get(name, none.new_zeros((count, *none.shape[1:]))) for count, given in parts])
        return out

    def _by_vertex(self, fresh: range, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs with one row per new vertex, also where only some types push them."""
        out: dict[str, Tensor] = {}
        for name, rows in results.items():
            pushes = [i for i, v in enumerate(fresh) if name in self._pushed[self._kind[v]]]
            if len(pushes) == len(fresh):
                out[name] = rows
            else:
                at = torch.tensor(pushes, dtype=torch.int64, device=rows.device)
                out[name] = rows.new_zeros((len(fresh), *rows.shape[1:])).index_copy(0, at, rows)
        return out

    @property
    def _pushed(self) -> dict[str, set[str]]:
        variant = next(iter(self._runner._made.variants.values()))[0]
        return {name: set(f.pushed) for name, f in variant.functions.items()}

    @property
    def _only(self) -> str:
        return next(iter({o for outputs in self._pushed.values() for o in outputs}))


def _with_states(model: Model) -> Model:
    """The model with its states among its outputs, and the type that brings in states from earlier runs."""

    def showing(function: Callable[[Vertex], None]) -> Callable[[Vertex], None]:
        def shown(v: Vertex) -> None:
            function(v)
            v.push(**{f"state {n}": s for n, s in v.scattered.items()})

        return shown

    def brought(v: Vertex) -> None:
        v.scatter(**{name: v.pull(f"state {name}") for name in model.states})

    functions: dict[str, Any] = {name: showing(f) for name, f in model.functions.items()}
    return Model({**functions, BROUGHT: brought}, model.states, policy=model.policy, fuse=model.fuse, replay=False, target=model.target)


def _options(like: Tensor | None) -> dict[str, Any]:
    return {} if like is None else {"dtype": like.dtype, "device": like.device}
