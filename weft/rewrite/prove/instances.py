"""Where a rule is tried: every way to fill its holes on small meshes, in every layout in which both sides type the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from weft.core.errors import LayoutError, WeftError
from weft.core.layout import Layout, Mesh, O, P, Placement, R, S
from weft.core.node import Node, Type, apply
from weft.core.program import Program, new_program
from weft.ops.source import input_node
from weft.rewrite.pattern import Call, Hole, with_rest
from weft.rewrite.prove.shapes import ALONE, INT, base_labels, size_of
from weft.rewrite.schema import Form, OpHole, Schema, attrs_fit, dims_fit, erased, fill, form_fits, make_node, shapes_fit, sized

SITES: tuple[tuple[Mesh, tuple[int, int]], ...] = (
    (Mesh(m=2), (2, 3)), (Mesh(m=3), (4, 3)), (Mesh(m=2, n=2), (4, 3)), (Mesh(m=2), (4, 5)),
)  # fmt: skip
MANY = 5  # holes; the layouts of more are not all combined
AT_ROOTS = {"reduce", "broadcast", "send", "keep"}


Labels = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Setting:
    """Ops and attributes that fill the holes, and the shape of every hole."""

    left: tuple[Any, ...]
    right: tuple[Any, ...]
    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    bare: str = ""  # what one device would compute


@dataclass(frozen=True)
class Instance:
    """Both sides as nodes, on one mesh, over the same inputs."""

    setting: Setting
    mesh: Mesh
    inputs: tuple[Node, ...]
    left: tuple[Node, ...]
    right: tuple[Node, ...]

    def program(self, side: str) -> Program:
        nodes = self.left if side == "left" else self.right
        return new_program(side, self.mesh, self.inputs, {f"out{k}": n for k, n in enumerate(_values(nodes))})

    @property
    def title(self) -> str:
        left, right = (", ".join(map(str, s)) for s in (self.setting.left, self.setting.right))
        return f"{left}  ==  {right}"


def _values(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, or what those of several values give."""
    return [v for n in nodes for v in (n if len(n.types) > 1 else (n,))]


Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def settings(schema: Schema, sizes: Sequence[int], forms: Sequence[Form], axes: Sequence[str], rank: int = 2) -> Iterator[Setting]:
    """Every filling under the conditions whose two sides have the same shapes on one device."""
    fits = [[f for f in forms if f.arity == n and form_fits(f, name, schema.conditions)] for name, n in schema.op_holes.items()]
    keys = schema.attr_holes
    tries = [schema.choices(k, axes) for k in keys]
    known: dict[Any, list[Shapes]] = {}  # collectives vanish on one device, so many fillings share their shapes
    for chosen in itertools.product(*fits):
        ops = dict(zip(schema.op_holes, chosen, strict=True))
        for values in itertools.product(*tries):
            attrs = dict(zip(keys, values, strict=True))
            if not attrs_fit(attrs, schema.conditions):
                continue
            left, right = (tuple(fill(e, ops, attrs) for e in side) for side in (schema.left, schema.right))
            bare = _bare(left, right)
            text = str([str(e) for side in bare for e in side])
            kept = tuple(attrs.get(v) for c in schema.conditions if c.kind == "keeps" for v in c.args)
            if (text, kept) not in known:
                known[text, kept] = list(_shapes_alone(schema, bare, attrs, sizes, rank))
            yield from (Setting(left, right, shapes, text) for shapes in known[text, kept])


def _bare(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Both sides without communication; items of a merged collective are known by the side that has none."""
    bare = tuple(erased(e) for e in left), tuple(erased(e) for e in right)
    full = next((side for side in bare if not _merged(side)), ())
    return (full, full) if any(map(_merged, bare)) else bare


def _shapes_alone(
    schema: Schema, bare: tuple[tuple[Any, ...], tuple[Any, ...]], attrs: Mapping[str, Any], sizes: Sequence[int], rank: int
) -> Iterator[Shapes]:
    for choices in _shape_choices(schema, sizes, rank):
        for bound, nodes in typed(bare[0], choices):
            unfilled = zip((erased(x) for x in schema.left), nodes, strict=False)
            if not all(dims_fit(e, n, schema.conditions, attrs) for e, n in unfilled):
                continue
            bound = {**{h: c[0] for h, c in choices.items()}, **bound}
            if shapes_fit(bound, schema.conditions) and _types_like(bare[1], bound, nodes):
                yield tuple((h, bound[h].shape, bound[h].dtype) for h in schema.holes)


def _merged(exprs: Sequence[Any]) -> bool:
    return any(isinstance(c, Call) and not isinstance(c.op, OpHole) and c.op.is_item for c in exprs)


def _shape_choices(schema: Schema, sizes: Sequence[int], rank: int = 2) -> Iterator[dict[str, list[Node]]]:
    """Shapes of holes: as declared, sizes given to labels in turn and the other way round; else any of a few."""
    if set(schema.holes) <= set(schema.shapes):
        labels = base_labels(schema.shapes)
        for turn in range(min(2, len(sizes))):
            size = {x: sizes[(k + turn) % len(sizes)] for k, x in enumerate(labels)}
            yield {h: [declared(h, schema.shapes[h], size)] for h in schema.holes}
        return
    pool = [tuple(s) for s in itertools.product(sorted(set(sizes)), repeat=rank)]
    if max(schema.op_holes.values(), default=0) == 1:
        pool.append((1, *[sizes[-1]] * (rank - 1)))  # one that is stretched
    yield {h: [*(_input(h, s, torch.float64, ALONE) for s in pool), _input(h, (sizes[0],), torch.int64, ALONE)] for h in schema.holes}


def declared(hole: str, labels: Sequence[str], sizes: Mapping[str, int]) -> Node:
    """An input of the shape a rule declares."""
    return _input(hole, tuple(size_of(x, sizes) for x in labels if x != INT), _dtype(labels), ALONE)


def _dtype(labels: Sequence[str]) -> torch.dtype:
    return torch.int64 if INT in labels else torch.float64


def _input(hole: str, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, layout: Layout | None = None) -> Node:
    return input_node(hole, Type(dtype, layout or Layout.of(mesh, tuple(shape))))


Typed = list[tuple[dict[str, Node], tuple[Any, ...]]]


def typed(exprs: Sequence[Any], choices: Mapping[str, Sequence[Node]]) -> Typed:
    """Every choice of inputs for the holes under which the expressions type, with what they become."""
    found: Typed = [({}, ())]
    for e in exprs:
        found = [({**a, **b}, (*xs, y)) for a, xs in found for b, y in _typed(e, choices) if _agree(a, b)]
    return found


def _typed(expr: Any, choices: Mapping[str, Sequence[Node]]) -> list[tuple[dict[str, Node], Any]]:
    if isinstance(expr, Hole):
        return [({expr.name: n}, n) for n in choices[expr.name]]
    if not isinstance(expr, Call):
        return [({}, expr)]
    out = []
    for bound, args in typed(expr.args, choices):
        made = _made(expr, bound, args)
        if made is not None:
            out.append((bound, made))
    return out


_tried: dict[Any, Node | None] = {}


def _made(expr: Call, bound: Mapping[str, Node], args: tuple[Any, ...]) -> Node | None:
    """The op on these operands, or None where it does not type; asked for often, so remembered."""
    try:
        attrs = sized(Call(expr.op, (), expr.attrs), bound).attrs
        key = (expr.op, args, attrs)
        if key not in _tried:
            _tried[key] = None
            _tried[key] = apply(expr.op, args, with_rest(dict(attrs), args))
    except (WeftError, KeyError, IndexError):
        return None
    return _tried[key]


def _agree(a: Mapping[str, Node], b: Mapping[str, Node]) -> bool:
    return all(b[k] is v for k, v in a.items() if k in b)


def _types_like(exprs: Sequence[Any], bound: Mapping[str, Node], nodes: Sequence[Node]) -> bool:
    try:
        return all(make_node(e, bound).types == n.types for e, n in zip(exprs, nodes, strict=True))
    except (WeftError, KeyError, IndexError):
        return False


# -- layouts -----------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def layouts(mesh: Mesh, shape: tuple[int, ...], roots: bool, inner: bool, extremes: bool) -> tuple[Layout, ...]:
    """Ways to hold a tensor: per axis full, sharded along a dim, partial; at a root, inside a dim or a partial max where asked for."""
    shards: list[Placement] = [S(d) for d in range(len(shape))]
    shards += [S(d, within=n // 2) for d, n in enumerate(shape) if inner and n % 2 == 0 and n > 2]
    placements: list[Placement] = [P(), *([O(0), O(1)] if roots else []), *([P("max")] if extremes else [])]
    found: dict[Layout, None] = {}
    for places in itertools.product([R, *shards, *placements], repeat=len(mesh.axes)):
        try:
            found[Layout.of(mesh, shape, dict(zip(mesh.axes, places, strict=True)))] = None
        except LayoutError:
            continue
    return tuple(found)


def instances(
    setting: Setting, mesh: Mesh, *, inner: bool = False, rng: random.Random | None = None, most: int = 0, labels: Labels | None = None
) -> Iterator[Instance]:
    """Every choice of layouts in which both sides type, and the same; with `most`, of so many layouts per hole, drawn by `rng`. Of more than
    MANY holes with `labels`, those in which every axis shards one label, or none: few others type."""
    if labels is not None and len(setting.shapes) > MANY:
        for choices in _by_label(setting, mesh, labels):
            yield from _instances(setting, mesh, choices)
    else:
        yield from _instances(setting, mesh, choices_on(setting, mesh, inner=inner, rng=rng, most=most))


def _by_label(setting: Setting, mesh: Mesh, labels: Labels) -> Iterator[dict[str, list[Node]]]:
    dims = {h: [x for x in labels[h] if x != INT] for h, _, _ in setting.shapes}
    names = list(dict.fromkeys(x for own in dims.values() for x in own))
    for axes in itertools.product([None, *names], repeat=len(mesh.axes)):
        places = {
            h: {a: S(own.index(x)) if x in own else R for a, x in zip(mesh.axes, axes, strict=True)} for h, own in dims.items()
        }  # fmt: skip
        yield {h: [_input(h, shape, dtype, mesh, Layout.of(mesh, shape, places[h]))] for h, shape, dtype in setting.shapes}


def _instances(setting: Setting, mesh: Mesh, choices: Mapping[str, Sequence[Node]]) -> Iterator[Instance]:
    for bound, nodes in typed(setting.left, choices):
        if len(bound) == len(choices) and _types_like(setting.right, bound, nodes):
            right = tuple(make_node(e, bound) for e in setting.right)
            yield Instance(setting, mesh, tuple(bound[h] for h, _, _ in setting.shapes), tuple(nodes), right)


def choices_on(
    setting: Setting, mesh: Mesh, *, inner: bool = False, rng: random.Random | None = None, most: int = 0
) -> dict[str, list[Node]]:
    """Inputs for every hole, one per layout."""
    names = {c.op.name for e in (*setting.left, *setting.right) for c in _calls(e)}
    roots, extremes = bool(names & AT_ROOTS), bool(names & {"amax", "maximum"})
    choices: dict[str, list[Node]] = {}
    for h, shape, dtype in setting.shapes:
        some = [layout for layout in layouts(mesh, shape, roots, inner, extremes) if dtype.is_floating_point or not layout.partials]
        if rng is not None and most and len(some) > most:
            some = [some[0], *rng.sample(some[1:], most - 1)]
        choices[h] = [_input(h, shape, dtype, mesh, layout) for layout in some]
    return choices


def shaped_sides(schema: Schema, sizes: Sequence[int], forms: Sequence[Form], axes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Where the left side has a shape on one device, that shape and the right side's, or why it has none."""
    fits = [[f for f in forms if f.arity == n and form_fits(f, name, schema.conditions)] for name, n in schema.op_holes.items()]
    for chosen in itertools.product(*fits):
        ops = dict(zip(schema.op_holes, chosen, strict=True))
        attrs = {name: schema.choices(name, axes)[0] for name in schema.attr_holes}
        for choices in _shape_choices(schema, sizes):
            for bound, nodes in typed([erased(fill(e, ops, attrs)) for e in schema.left], choices):
                try:
                    right = str(make_node(erased(fill(schema.right[0], ops, attrs)), bound).type)
                except WeftError as e:
                    right = f"{e.message}: needed {e.needed}, found {e.found}"
                except (KeyError, IndexError):
                    right = "no value at all"
                yield str(nodes[0].type), right


def _calls(expr: Any) -> Iterator[Call]:
    if isinstance(expr, Call):
        yield expr
        for a in expr.args:
            yield from _calls(a)


def sample(
    schema: Schema, forms: Sequence[Form], rng: random.Random, per_site: int, *, inner: bool = False, every: bool = False, patience: int = 6
) -> Iterator[Instance]:
    """Some instances of a rule on every small mesh, from many fillings; gives up on a mesh after `patience` times more.

    With `every`, the first filling that types on a mesh is tried in all layouts the types allow.
    """
    for rank in (2, 3):  # matrices, and where those never type, stacks of them
        some = False
        for instance in _sample(schema, forms, rng, per_site, inner, every, patience, rank):
            some = True
            yield instance
        if some or schema.shapes:
            return


def _sample(
    schema: Schema, forms: Sequence[Form], rng: random.Random, per_site: int, inner: bool, every: bool, patience: int, rank: int
) -> Iterator[Instance]:
    some, untried = False, True
    for mesh, sizes in SITES:
        pools = list(settings(schema, sizes, forms, mesh.axes, rank))
        rng.shuffle(pools)
        if untried:  # every op, with every attribute, that may fill a hole is tried at least once
            pools = _one_of_each(pools)
        left, share, drawn = per_site, -(-per_site // max(1, len(pools))), not every
        for k, setting in enumerate(pools):
            first = untried and k < len({s.bare for s in pools})
            if not first and (left <= 0 or some and k >= per_site * patience):
                break
            found = list(instances(setting, mesh, inner=inner, rng=rng, most=10 if some and drawn else 0, labels=schema.shapes))
            taken = rng.sample(found, min(len(found), share)) if drawn else found
            left -= min(len(taken), share)
            some, drawn = some or bool(taken), drawn or bool(taken)
            yield from taken
        untried = False


def _one_of_each(pools: Sequence[Setting]) -> list[Setting]:
    """One setting for everything one device may be asked to compute first, then the others."""
    seen: set[Any] = set()
    first = [s for s in pools if s.bare not in seen and not seen.add(s.bare)]  # type: ignore[func-returns-value]
    chosen = set(map(id, first))
    return [*first, *(s for s in pools if id(s) not in chosen)]
