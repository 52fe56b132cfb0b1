"""Whole training steps of published cases: planned under the case's own prices and options, and held against all it states.

Options are constraints of the same search. Forced data parallel: every node as `place` has it with the batch split. A batch dim forced to
an axis: along that axis as data parallel has it, and along no other axis is the batch split. Preferring reduce_scatter: the plan is made,
then state of parameters whose gradients are summed along an axis is sharded along it, everything before the update staying as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench._alpha_beta import AlphaBeta
from bench._case_words import Specs, counted, options, unmentioned

AXES = ("x", "y", "z")
SCALARS = 40.0  # sums of the loss and other single numbers, which the published objectives leave out
KNOWN = {
    "id", "case", "kind", "section", "same_as", "model", "batch", "seq", "image", "x", "alpha", "beta", "cases", "mesh", "meshes", "devices", "objective",
    "counts", "specs", "option", "options", "method", "optimizer", "status", "formula", "note", "tolerance", "rs", "micro_batches",
    "num_micro_batches", "microbatches", "remat", "source", "like_specs", "like_counts",
}  # fmt: skip
Row = dict[str, Any]


def rows(case: Mapping[str, Any], words: Mapping[str, Any], row: Callable[..., Row], missing: Callable[[str, str], Row]) -> Iterator[Row]:
    """One row for each mesh a case is stated for; `words` are its own and those of the case it is the same as."""
    name, asked = str(case.get("id", case.get("case", "case"))), options(words)
    unknown = set(words) - KNOWN
    if isinstance(asked, str) or unknown:
        yield missing(name, f"words not understood: {asked if isinstance(asked, str) else ', '.join(sorted(unknown))}")
        return
    meshes = words.get("meshes") or [words.get("mesh") or [words.get("devices", 4), 1]]
    for one in words.get("cases") or [{"mesh": m} for m in meshes]:
        stated = {**words, **one}
        yield _row(name, stated, asked, row, missing)
        if "rs" in stated:  # the same with reduce_scatter preferred
            stated = {k: v for k, v in stated.items() if k not in ("objective", "specs")} | {"counts": stated["rs"]}
            yield _row(f"{name} rs", stated, {**asked, "prefer_reduce_scatter": True}, row, missing)


def _row(name: str, stated: Mapping[str, Any], asked: Mapping[str, Any], row: Any, missing: Any) -> Row:
    title = f"{name} {'x'.join(map(str, stated['mesh']))}"
    try:
        plan = _plan_of(stated, asked)
    except KeyError as absent:
        return missing(title, f"no {absent}")  # type: ignore[no-any-return]
    if isinstance(plan, str):
        return missing(title, f"words not understood: {plan}")  # type: ignore[no-any-return]
    published = {k: stated[k] for k in ("objective", "counts", "specs") if k in stated}
    return row(title, published, lambda: _checked(plan, stated))  # type: ignore[no-any-return]


def _checked(plan: Plan, stated: Mapping[str, Any]) -> tuple[Any, bool]:
    """A mixed mesh shape is the mesh as given, or all its devices along one axis."""
    found, good = plan.check(stated)
    if good or not plan.asked.get("allow_mixed_mesh_shape") or len(plan.shape) == 1:
        return found, good
    flat, good = replace(plan, shape=[math.prod(plan.shape)], alpha=[max(plan.alpha)], beta=[min(plan.beta)]).check(stated)
    return flat | {"two axes": found["objective"]}, good


def _plan_of(stated: Mapping[str, Any], asked: Mapping[str, Any]) -> Plan | str:
    from bench._case_programs import Sizes, build

    rounds = int(asked.get("num_micro_batches", 1))
    x = tuple(stated.get("x", ()))
    model = str(stated["model"]) + (", remat" if asked.get("remat") and "remat" not in str(stated["model"]) else "")
    batch = stated.get("batch", x[0] if x else 0)
    sizes = Sizes(batch // rounds, stated.get("seq", 0), stated.get("image", 0), x)
    captured = build(model, sizes, str(stated.get("optimizer", "")))
    if isinstance(captured, str):
        return captured
    shape = [math.prod(stated["mesh"])] if asked.get("force_data_parallel") else list(stated["mesh"])
    return Plan(captured, shape, stated.get("alpha", [1, 1]), stated.get("beta", [1, 1]), asked, rounds)


@dataclass(frozen=True)
class Plan:
    captured: Any
    shape: list[int]
    alpha: Sequence[float]
    beta: Sequence[float]
    asked: Mapping[str, Any]
    rounds: int

    def check(self, stated: Mapping[str, Any]) -> tuple[Any, bool]:
        """Objective, counts and sharding, each as stated or better, all of one plan.

        Where the cheapest plan is another than the one stated, it is made again with parameters as stated and no other collectives."""
        found, good = self._checked(stated, frozenset(), {})
        if good:
            return found, True
        words = "; ".join(str(stated[k]) for k in ("like_specs", "specs") if k in stated)
        specs = Specs(self.captured, self.mesh).pins(words)
        kinds = unmentioned(stated.get("like_counts" if self._slices_state else "counts"))
        turned = ">" in str(
            (stated.get("counts") or {}).get("all_to_all", "") if isinstance(stated.get("counts"), Mapping) else stated.get("counts")
        )
        if not specs and not kinds and not turned:
            return found, False
        again, good = self._checked(stated, kinds, specs, turned)
        return again | {"free": found["objective"]}, good and found["objective"] <= again["objective"] * (1 + 1e-6) + SCALARS

    @property
    def _slices_state(self) -> bool:
        return bool(self.asked.get("prefer_reduce_scatter") or self.asked.get("force_zero_stage_3"))

    def _checked(
        self, stated: Mapping[str, Any], kinds: frozenset[str], specs: dict[str, Any], turned: bool = False
    ) -> tuple[dict[str, Any], bool]:
        first = self._solved(kinds, specs, turned)
        last = self._in_slices(first) if self._slices_state else first
        found: dict[str, Any] = {"objective": round(first.cost, 2), "counts": merged(last.program)}
        good = [True]
        if "objective" in stated:
            good.append(first.cost <= stated["objective"] * (1 + stated.get("tolerance", 0.01)) + SCALARS)
        if "counts" in stated:
            good.append(self._counts(last, stated["counts"], found))
        if "specs" in stated:
            good.append(self._specs(last, str(stated["specs"]), found))
        return found, all(good)

    def _counts(self, chosen: Any, published: Any, found: dict[str, Any]) -> bool:
        if isinstance(published, Mapping) and any(isinstance(v, Mapping) for v in published.values()):  # by part of the step
            parts = by_part(chosen.program)
            found["counts"] = parts
            kept = {("apply" if "apply" in k else "accumulate"): v for k, v in published.items()}
            return all(bool(counted(parts[k], v)) for k, v in kept.items())
        result = counted(found["counts"], published)
        if result is None:
            found["why"] = f"counts not understood: {published}"
        return bool(result)

    def _specs(self, chosen: Any, words: str, found: dict[str, Any]) -> bool:
        if "rng" in words or "dropout mask" in words:
            return _drawn_in_parts(chosen.program)
        if "gather(" in words or "gather " in words:
            return _gathered_in_parts(chosen.program)
        result = Specs(self.captured, self.mesh).holds(words, chosen.program)
        found["specs"] = "hold" if result is True else "do not hold" if result is False else f"not understood: {result}"
        return result is True

    # -- the search ---------------------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Any:
        """The first axis innermost, so that what the others have split can be scattered along it."""
        from weft.core.layout import Mesh

        return Mesh(**dict(reversed(list(zip(AXES, self.shape, strict=False)))))

    @property
    def _by_axis(self) -> tuple[dict[str, float], dict[str, float]]:
        return dict(zip(AXES, self.alpha, strict=False)), dict(zip(AXES, self.beta, strict=False))

    def _prices(self, forbid: bool, more: frozenset[str] = frozenset()) -> Any:
        """A sum is done at once, as the published planner has it; scattering it comes after, and moves from dim to dim only on one axis or mixed."""
        if not forbid:
            return AlphaBeta(self.mesh, *self._by_axis)
        banned = {k for k in ("all_gather", "all_to_all") if self.asked.get(f"allow_{k}", True) is False} | {"reduce_scatter", *more}
        if self._two_axes and not self.asked.get("allow_mixed_mesh_shape"):
            banned.add("all_to_all")
        return AlphaBeta(self.mesh, *self._by_axis, frozenset(banned))

    @property
    def _two_axes(self) -> bool:
        return sum(n > 1 for n in self.shape) > 1

    def _solved(self, kinds: frozenset[str] = frozenset(), specs: Mapping[str, Any] | None = None, turned: bool = False) -> Any:
        from weft.plan.layouts import Rates, choose

        prices, pins = self._prices(True, kinds), {**(specs or {}), **self._pins()}
        return choose(
            self.captured.program, self.mesh, prices, gap=1e-9, allow=self._allow(turned), rates=Rates(rounds=self.rounds), pins=pins
        )

    def _pins(self) -> dict[str, list[dict[str, Any]]]:
        """Data parallel holds parameters and their state replicated."""
        if not self.asked.get("force_data_parallel"):
            return {}
        return {name: [{}] for name in (*self.captured.gradients, *self.captured.states)}

    def _allow(self, turned: bool = False) -> Any:
        rules: list[Any] = [_groups_split] if turned else []
        if self.asked.get("force_data_parallel"):
            rules.append(self._as_data_parallel(self.mesh, 0))
        elif "force_batch_dim_to_mesh_dim" in self.asked:
            rules += self._batch_on(int(self.asked["force_batch_dim_to_mesh_dim"]))
        if self._two_axes and not self.asked.get("allow_mixed_mesh_shape"):
            rules.append(_one_axis_a_dim)
        return (lambda node, way: all(rule(node, way) for rule in rules)) if rules else None

    @property
    def _before(self) -> set[Any]:
        """What loss and gradients need."""
        from weft.core.node import toposort

        return set(toposort([self.captured.program.output_names["loss"], *self.captured.gradients.values()]))

    def _batch_on(self, axis: int) -> list[Any]:
        """Along the axis as data parallel has it; along the others no batch dim is split."""
        rules = []
        if self.shape[axis] > 1:
            rules.append(self._as_data_parallel(self.mesh, axis))
        if prime := self._prime():
            dims, at = self._batch_dims(prime), self.mesh.axes.index(AXES[axis])

            def elsewhere(node: Any, way: Any) -> bool:
                from weft.core.layout import S

                places = [(*x, *y) for x, y in zip((*way.operands, *way.results), dims.get(node, ()), strict=False)]
                return not any(isinstance(p, S) and p.dim == x[-1] for x in places for j, p in enumerate(x[:-1]) if j != at)

            rules.append(elsewhere)
        return rules

    def _prime(self) -> int:
        """The least number that divides the batch."""
        rows = [n.shape[0] for name, n in self.captured.program.input_names.items() if name.startswith("batch.") and n.ndim]
        return next((p for p in range(2, min(rows) + 1) if all(r % p == 0 for r in rows)), 0)

    def _placed(self, mesh: Any, axis: str) -> Mapping[Any, Any]:
        from weft.core.layout import S
        from weft.plan.place import placed_with

        inputs = {n: {axis: S(0)} for n, node in self.captured.program.input_names.items() if n.startswith("batch.") and node.ndim}
        return placed_with(self.captured.program, mesh, inputs)[1]

    def _batch_dims(self, parts: int) -> dict[Any, list[tuple[int]]]:
        """Of every node the dim of each operand and result that is the batch, -1 for none."""
        from weft.core.layout import S

        made = self._placed(mesh_of([parts]), "x")

        def dim(layout: Any) -> tuple[int]:
            place = layout.placement("x")
            return (place.dim if isinstance(place, S) else -1,)

        return {n: [dim(t.layout) for t in (*(t for a in m.args for t in a.types), *m.types)] for n, m in made.items()}

    def _as_data_parallel(self, mesh: Any, axis: int) -> Any:
        name = AXES[axis]
        at = mesh.axes.index(name)
        made, before = self._placed(mesh, name), self._before

        def alike(node: Any, way: Any) -> bool:
            here = made.get(node)
            if here is None or node not in before or not node.args:
                return True
            told = [t.layout.placement(name) for t in (*(t for a in here.args for t in a.types), *here.types)]
            return [x[at] for x in (*way.operands, *way.results)] == told

        return alike

    # -- state in slices ------------------------------------------------------------------------------------------------------------

    def _in_slices(self, first: Any) -> Any:
        from weft.plan.layouts import Rates, choose

        inputs, before = self.captured.program.input_names, self._before
        summed = {name: self._summed(first, g) for name, g in self.captured.gradients.items()}
        pins = {}
        for n, of in self.captured.states.items():
            if of in summed and inputs[n].ndim:  # means of rows and columns may stay as they are
                pins[n] = [self._slices(first, n, summed[of]), *([] if inputs[n].shape == inputs[of].shape else [first.inputs[n]])]
        whole = self.asked.get("force_zero_stage_3")
        pins |= {of: [self._slices(first, of, axes) if whole else first.inputs[of]] for of, axes in summed.items()}

        def as_before(node: Any, way: Any) -> bool:
            return node not in before or not node.args or node.op.name == "item" or way.key == first.way(node).key

        return choose(
            self.captured.program, self.mesh, self._prices(False), gap=1e-9, pins=pins, allow=as_before, rates=Rates(rounds=self.rounds)
        )  # fmt: skip

    def _summed(self, chosen: Any, gradient: Any) -> list[str]:
        from weft.core.layout import P

        places = chosen.way(gradient).results[0]
        return [a for a, p in zip(self.mesh.axes, places, strict=True) if isinstance(p, P) and self.mesh.sizes[a] > 1]

    def _slices(self, chosen: Any, name: str, axes: Sequence[str]) -> dict[str, Any]:
        """The layout of a value with these axes added, each along a dim that it divides evenly, one that is not split if there is one."""
        from weft.core.errors import LayoutError
        from weft.core.layout import Layout, S

        held = dict(chosen.inputs[name])
        node = self.captured.program.input_names[name]
        for axis in axes:
            taken = {p.dim for p in held.values() if isinstance(p, S)}
            for d in sorted(range(node.ndim), key=lambda d: d in taken):
                more = {**held, axis: S(d)}
                try:
                    even = Layout.of(self.mesh, node.shape, more).is_even
                except LayoutError:
                    continue
                if even:
                    held = more
                    break
        return held


def _groups_split(node: Any, way: Any) -> bool:
    """Products of many pairs of matrices are split by pairs, as the published planner has it by default."""
    from weft.core.layout import S
    from weft.ops.registry import Kind

    if node.op.kind is not Kind.CONTRACT:
        return True
    eq = node.op.equation(tuple(t for a in node.args for t in a.types), dict(node.attrs))
    pairs = set(eq.outs[0]).intersection(*map(set, eq.ins))
    held = {eq.label(k, p.dim) for k, places in enumerate(way.operands) for p in places if isinstance(p, S)}
    return not pairs or bool(pairs & held)


def _one_axis_a_dim(node: Any, way: Any) -> bool:
    from weft.core.layout import S

    for places in (*way.operands, *way.results):
        dims = [p.dim for p in places if isinstance(p, S)]
        if len(dims) != len(set(dims)):
            return False
    return True


def mesh_of(sizes: Sequence[int]) -> Any:
    from weft.core.layout import Mesh

    return Mesh(**dict(zip(AXES, sizes, strict=False)))


def prices_of(mesh: Any, alpha: Sequence[float], beta: Sequence[float]) -> AlphaBeta:
    return AlphaBeta(mesh, dict(zip(mesh.axes, alpha, strict=False)), dict(zip(mesh.axes, beta, strict=False)))


# -- what a plan says ---------------------------------------------------------------------------------------------------------------


def _moves(node: Any) -> bool:
    from weft.ops.comm import is_comm

    return is_comm(node) and node.op.name not in ("slice", "turn") and math.prod(node.type.shape) > 1


def merged(program: Any, among: Any = None) -> dict[str, int]:
    """How many collectives of each kind are left when those that do not wait for one another go as one; sums of single numbers aside."""
    deep: dict[Any, Counter[str]] = {}
    total: Counter[str] = Counter()
    for node in program.nodes:
        here = Counter[str]()
        for a in node.args:
            here |= deep[a]
        if _moves(node) and (among is None or node in among):
            here = here + Counter([node.op.name])
        deep[node] = here
        total |= here
    return dict(sorted(total.items()))


def by_part(program: Any) -> dict[str, dict[str, int]]:
    """Collectives of the passes over micro-batches, and of the update."""
    from weft.plan.roles import Roles

    after = Roles(program).after
    return {"accumulate": merged(program, program.node_set - after), "apply": merged(program, after)}


def _in_parts(program: Any, *names: str) -> bool:
    nodes = [n for n in program.nodes if any(k in n.op.name for k in names)]
    ranks = math.prod(program.mesh.sizes.values())
    return bool(nodes) and all(math.prod(n.layout.largest_local) * ranks == math.prod(n.shape) for n in nodes)


def _drawn_in_parts(program: Any) -> bool:
    return _in_parts(program, "dropout", "rand", "bernoulli")


def _gathered_in_parts(program: Any) -> bool:
    return _in_parts(program, "index", "take", "gather_")
