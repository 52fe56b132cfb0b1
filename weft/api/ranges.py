"""One compilation for many sizes of a batch: programs of a few sizes that differ in numbers alone, each number a function of the sizes.

A size between theirs is traced. Where its trace is what the numbers predict, it runs by the code at hand: nothing is planned, proved or compiled.
Where sizes decide on the form of the code (a table is updated by rows, or all of it), there is a range on each side of the choice.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from weft.api.compiled import Compiled, plan_of
from weft.api.data import Shape
from weft.core.errors import RuntimeFault
from weft.core.layout import Layout
from weft.core.node import Node, make
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.frontend.capture.batches import changed, named_batch
from weft.frontend.capture.guards import Reads
from weft.ops.source import input_node
from weft.runtime.traced import Traced

if TYPE_CHECKING:
    from weft.api.micro_batches import MicroBatches
    from weft.api.retracing import Form, Variants
    from weft.api.step import Step

Shapes = Mapping[str, Shape]
Place = tuple[str, int]  # a tensor of the batch, and a dim of it
Sizes = tuple[int, ...]  # of the dims that change
Rule = Callable[[Sizes], Any]
POWERS = (1, 2, -1, 0)
MOST = 4  # ranges of one step
NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.])")


class Unexplained(Exception):
    """Programs of several sizes that differ in more than numbers, or in numbers that no formula of the sizes gives."""


# -- what changes ------------------------------------------------------------------------------------------------------------------


def changing(a: Shapes, b: Shapes) -> tuple[tuple[Place, ...], ...] | None:
    """The dims that differ, those that are the same in both together; None where `b` lacks tensors of `a`."""
    if not a.keys() <= b.keys() or any(len(a[n]) != len(b[n]) for n in a):
        return None
    found: dict[Sizes, list[Place]] = {}
    for name in a:
        for dim, pair in enumerate(zip(a[name], b[name], strict=True)):
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append((name, dim))
    return tuple(map(tuple, found.values()))


def resized(shapes: Shapes, dims: Sequence[Sequence[Place]], sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shapes with other sizes of the dims that change."""
    of = {place: size for places, size in zip(dims, sizes, strict=True) for place in places}
    return {n: tuple(of.get((n, d), size) for d, size in enumerate(shape)) for n, shape in shapes.items()}


def same_outside(a: Shapes, b: Shapes, dims: Sequence[Sequence[Place]]) -> bool:
    """Whether `b` has the tensors of `a`, and in other dims than these the same sizes."""
    return a.keys() <= b.keys() and resized(a, dims, sizes_of(b, dims)) == {n: b[n] for n in a}


def sizes_of(shapes: Shapes, dims: Sequence[Sequence[Place]]) -> Sizes:
    return tuple(shapes[places[0][0]][places[0][1]] for places in dims)


# -- numbers as functions of the sizes ------------------------------------------------------------------------------------------------


def explained(sizes: Sequence[Sizes], seen: Sequence[Any]) -> Rule:
    """What gives each of the values at its sizes, whatever they are made of, and others of the kind at others."""
    first = seen[0]
    if any(type(x) is not type(first) for x in seen):
        raise Unexplained(f"{first!r} and other things")
    if all(x is first or x == first for x in seen):
        return lambda _: first
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return _formula(sizes, seen)
    if isinstance(first, (tuple, list)) and len({len(x) for x in seen}) == 1:
        rules = [explained(sizes, xs) for xs in zip(*seen, strict=True)]
        return lambda at: type(first)(rule(at) for rule in rules)
    if isinstance(first, Mapping) and all(x.keys() == first.keys() for x in seen):
        named = {k: explained(sizes, [x[k] for x in seen]) for k in first}
        return lambda at: {k: rule(at) for k, rule in named.items()}
    if isinstance(first, functools.partial) and all(x.func == first.func for x in seen):
        given = explained(sizes, [(x.args, x.keywords) for x in seen])
        return lambda at: functools.partial(first.func, *given(at)[0], **given(at)[1])
    if isinstance(first, Node):
        return _node(sizes, seen)
    if dataclasses.is_dataclass(first):
        fields = {f.name: explained(sizes, [getattr(x, f.name) for x in seen]) for f in dataclasses.fields(first) if f.init}
        return lambda at: type(first)(**{name: rule(at) for name, rule in fields.items()})
    raise Unexplained(f"{first!r} and {seen[-1]!r}"[:200])


def _node(sizes: Sequence[Sizes], seen: Sequence[Node]) -> Rule:
    """A node with operands of its own: what a rank must know of it is its types."""
    op = seen[0].op
    if any(n.op is not op for n in seen) or any(len(a.types) != 1 for a in seen[0].args):
        raise Unexplained(f"{op.name} and another op")
    types = explained(sizes, [tuple(a.type for a in n.args) for n in seen])
    attrs = explained(sizes, [dict(n.attrs) for n in seen])
    return lambda at: make(op, tuple(input_node(f"a{k}", t) for k, t in enumerate(types(at))), attrs(at))


def _formula(sizes: Sequence[Sizes], seen: Sequence[float]) -> Rule:
    """c m + d, where m is made of powers of the sizes: all numbers follow from two of them."""
    full = isinstance(seen[0], int)
    ys = [Fraction(y) if full else y for y in seen]
    for powers in sorted(itertools.product(POWERS, repeat=len(sizes[0])), key=lambda ps: sum(p != 1 for p in ps) - 2 * ps.count(0)):
        ms = [_monomial(at, powers) for at in sizes]
        k = next((k for k, m in enumerate(ms) if m != ms[0]), 0)
        if not k:
            continue
        c = (ys[k] - ys[0]) / (ms[k] - ms[0]) if full else Fraction(ys[0] / float(ms[0])).limit_denominator(10**6)
        d = ys[0] - c * ms[0] if full else Fraction(0)
        if all((c * m + d if full else float(c * m)) == y for m, y in zip(ms, ys, strict=True)):
            return lambda at, c=c, d=d, powers=powers: _number(c * _monomial(at, powers) + d, full)  # type: ignore[misc]
    raise Unexplained(f"the number {seen[0]}, then {seen[-1]}")


def _monomial(at: Sizes, powers: Sequence[int]) -> Fraction:
    out = Fraction(1)
    for size, power in zip(at, powers, strict=True):
        out *= Fraction(size) ** power
    return out


def _number(x: Fraction, full: bool) -> float:
    if full and x.denominator != 1:
        raise Unexplained(f"{x} is not an integer")
    return int(x) if full else float(x)


# -- code ------------------------------------------------------------------------------------------------------------------------------


class Code:
    """What one rank runs, for the sizes between those of some compiled programs."""

    def __init__(self, sizes: Sequence[Sizes], made: Sequence[Compiled]) -> None:
        self.base = made[0]
        if any(isinstance(c._step, Traced) for c in made):
            raise Unexplained("a program that is compiled in one piece")
        self.text, self.numbers = _common(sizes, [c.code.text for c in made])
        self.code = compile(self.text.replace("def step(inputs):", "def step(inputs, n):", 1), f"<weft {self.base.program.name}, of many sizes>", "exec")
        self.names = explained(sizes, [c.code.names for c in made])
        fused = [{k: _call_key(plan_of(call, c.coords)) for k, call in c.code.calls.items()} for c in made]
        if any(x != fused[0] for x in fused):
            raise Unexplained("fused kernels of other sizes")
        self.shapes = explained(sizes, [{n: tuple(shape) for n, shape, _ in c._expected} for c in made])
        self.layouts = list(_sharded_layouts(sizes, [c.program for c in made]))

    def at(self, sizes: Sizes) -> Compiled:
        if not all(layout(sizes).is_even for layout in self.layouts):
            raise Unexplained("sizes that ranks do not divide as they do the others")
        names = {**self.base._step.__globals__, **self.names(sizes)}
        numbers = tuple(rule(sizes) for rule in self.numbers)
        exec(self.code, names)  # the text is weft's own
        made, step = copy.copy(self.base), names["step"]
        shapes = self.shapes(sizes)
        made._expected = [(n, torch.Size(shapes[n]), dtype) for n, _, dtype in self.base._expected]
        made._step = functools.partial(step, n=numbers)
        made._step._plain = step  # type: ignore[attr-defined]
        made.code = dataclasses.replace(self.base.code, text=re.sub(r"\bn\[(\d+)\]", lambda m: repr(numbers[int(m[1])]), self.text))
        return made


def _call_key(plan: Any) -> tuple[Any, ...]:
    """What a fused call says of its tensors: numbers in kernels are not looked into."""
    return plan.parts, plan.results, plan.spans, plan.numbers, plan.written, plan.given


def _common(sizes: Sequence[Sizes], texts: Sequence[str]) -> tuple[str, list[Rule]]:
    """The text with `n[k]` for every number that changes, and what gives these."""
    parts = [NUMBER.split(re.sub(r"  # .*", "", text)) for text in texts]
    if len({len(p) for p in parts}) > 1 or any(p[::2] != parts[0][::2] for p in parts):
        raise Unexplained("code of another form")
    out, rules, known = list(parts[0]), list[Rule](), dict[tuple[str, ...], int]()
    for k in range(1, len(out), 2):
        seen = tuple(p[k] for p in parts)
        if len(set(seen)) > 1:
            if seen not in known:
                known[seen] = len(rules)
                rules.append(explained(sizes, [float(x) if "." in x or "e" in x else int(x) for x in seen]))
            out[k] = f"n[{known[seen]}]"
    return "".join(out), rules


def _sharded_layouts(sizes: Sequence[Sizes], programs: Sequence[Program]) -> Iterator[Callable[[Sizes], Layout]]:
    """Every layout that changes and is sharded over ranks, evenly in all the programs."""
    _require_as_many(programs)
    seen = set()
    for nodes in zip(*(p.nodes for p in programs), strict=True):
        for types in zip(*(n.types for n in nodes), strict=True):
            layouts = tuple(t.layout for t in types)
            if layouts not in seen and any(x != layouts[0] for x in layouts) and any(atom.axes for dim in layouts[0].dims for atom in dim):
                seen.add(layouts)
                if not all(x.is_even for x in layouts):
                    raise Unexplained("sizes that ranks do not divide")
                yield explained(sizes, layouts)


def _require_as_many(programs: Sequence[Program]) -> None:
    if len({len(p.nodes) for p in programs}) > 1:
        raise Unexplained("how many nodes they have")


# -- a step ----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Range:
    """Sizes of some dims of the batch, from the least to the greatest of those that were compiled."""

    dims: tuple[tuple[Place, ...], ...]
    forms: list[Form]

    @cached_property
    def sizes(self) -> list[Sizes]:
        return [sizes_of(f.shapes, self.dims) for f in self.forms]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return [(min(of), max(of)) for of in zip(*self.sizes, strict=True)]

    def __str__(self) -> str:
        bounds_of = {p: f"{lo} to {hi}" for places, (lo, hi) in zip(self.dims, self.bounds, strict=True) for p in places}
        own = self.forms[0].shapes
        return ", ".join(f"{n.removeprefix('batch.')} [{', '.join(bounds_of.get((n, d), str(x)) for d, x in enumerate(own[n]))}]" for n in own)

    def has(self, shapes: Shapes) -> bool:
        """Whether it is for batches of such shapes."""
        at = sizes_of(shapes, self.dims) if self.is_like(shapes) else ()
        return bool(at) and all(lo <= size <= hi for size, (lo, hi) in zip(at, self.bounds, strict=True))

    def is_like(self, shapes: Shapes) -> bool:
        """Whether shapes differ from its own in the dims that change alone."""
        return same_outside(self.forms[0].shapes, shapes, self.dims)

    def why_none(self) -> str:
        """What its programs differ in, other than numbers that follow from the sizes; empty where in nothing else."""
        try:
            assert self.parts and self.traced
        except Unexplained as e:
            return str(e)
        return ""

    # -- what is run

    @cached_property
    def parts(self) -> dict[str, Callable[[Sizes], Any]]:
        """Of a step, what is another for other sizes."""
        own = [f.attributes for f in self.forms]
        if any(x["plan"] != own[0]["plan"] or x.keys() != own[0].keys() for x in own):
            raise Unexplained("another plan")
        found: dict[str, Callable[[Sizes], Any]] = {"compiled": Code(self.sizes, [x["compiled"] for x in own]).at}
        if own[0]["micro_batches"] is not None:
            found["micro_batches"] = self._micro_batches([x["micro_batches"] for x in own])
        return found | {key: explained(self.sizes, [x[key] for x in own]) for key in ("_batch_types", "_state_types")}

    def _micro_batches(self, made: Sequence[MicroBatches]) -> Callable[[Sizes], MicroBatches]:
        """Their programs, what passes between stages, and the layouts of a full batch."""
        runners = [m.runner for m in made]
        once = {key: Code(self.sizes, [getattr(m, key) for m in made]) for key in ("first", "spread") if getattr(made[0], key) is not None}
        phases = {g: [Code(self.sizes, [r.phases[g][k] for r in runners]) for k in range(len(of))] for g, of in runners[0].phases.items()}
        coming, types = explained(self.sizes, [r.coming for r in runners]), explained(self.sizes, [m.batch_types for m in made])

        def at(sizes: Sizes) -> MicroBatches:
            new, runner = copy.copy(made[0]), copy.copy(runners[0])
            runner.phases, runner.coming = {g: [code.at(sizes) for code in of] for g, of in phases.items()}, coming(sizes)
            new.__dict__.update({key: code.at(sizes) for key, code in once.items()}, runner=runner, batch_types=types(sizes))
            return new

        return at

    def form(self, captured: Captured, reads: Reads, shapes: Shapes) -> Form | None:
        """The step of a batch of these shapes, whose trace is this; None where it is another than predicted."""
        sizes, base = sizes_of(shapes, self.dims), self.forms[0]
        try:
            if not self._predicts(sizes, captured.program):
                return None
            made = {key: at(sizes) for key, at in self.parts.items()}
        except Unexplained:
            return None
        types = made["_state_types"]
        state = {n: made["compiled"].part(x, types[n].layout) for n, x in captured.constants.items() if n in types}
        own = {"captured": captured, "traced": captured.program, "reads": reads, "_state": state, "verified": None, "unjudged": None}
        return dataclasses.replace(base, program=captured.program, reads=reads, attributes={**base.attributes, **made, **own}, unjudged=None, ranged=True)

    def _predicts(self, sizes: Sizes, program: Program) -> bool:
        """Whether a trace is that of the programs at hand but for numbers, and these as they give."""
        programs = [f.program for f in self.forms]
        if [len(p.nodes) for p in programs] != [len(program.nodes)] * len(programs) or program.state != programs[0].state:
            return False
        return all(_wiring(p) == _wiring(program) for p in programs) and all(
            rule(sizes) == _numbers(n) for rule, n in zip(self.traced, program.nodes, strict=True)
        )

    @cached_property
    def traced(self) -> list[Rule]:
        """The numbers of every node of the trace."""
        _require_as_many([f.program for f in self.forms])
        known: dict[Any, Rule] = {}
        out = []
        for nodes in zip(*(f.program.nodes for f in self.forms), strict=True):
            seen = tuple(map(_numbers, nodes))
            if seen not in known:
                known[seen] = explained(self.sizes, seen)
            out.append(known[seen])
        return out


class Ranges:
    """The ranges of sizes that a step is compiled for."""

    def __init__(self, of: Variants) -> None:
        self.of, self.found = of, list[Range]()
        self.failed: Counter[Any] = Counter()  # how often no range was found of some dims

    def compiled_for(self) -> str:
        """The batches that need no compilation, in words."""
        single = [f for f in self.of.kept if not f.ranged and not any(r.has(f.shapes) for r in self.found)]
        shapes = (", ".join(f"{n.removeprefix('batch.')} {list(s)}" for n, s in f.shapes.items()) for f in single)
        return "; ".join([*map(str, self.found), *shapes])

    def form(self, captured: Captured, reads: Reads, example: Any) -> Form | None:
        """The program of a batch whose sizes lie between those of compiled ones."""
        shapes = {n: tuple(x.shape) for n, x in named_batch(example).items()}
        wide = [r for r in self.found if r.forms[0].given == self.of.given and r.has(shapes) and not self.of.exact]
        made = next((form for r in wide if (form := r.form(captured, reads, shapes)) is not None), None)
        return made if wide and all(self.of.rank_sync.answers(made is not None, "whether compiled code fits a batch")) else None

    def widen(self, step: Step, batch: Any, shapes: dict[str, Shape]) -> None:
        """Where this is the third size of some dims, compile for the powers of two around, so that no size between them is compiled again."""
        self.found = [r for r in self.found if r.forms[0].given == self.of.given]
        if any(r.has(shapes) for r in self.found):
            return
        near = [r for r in self.found if r.is_like(shapes)]
        dims, forms = (near[0].dims, near[0].forms) if near else self._like(shapes)
        key = dims, tuple(shape for shape in resized(shapes, dims, (0,) * len(dims)).values())
        if not forms or self.failed[key] * len(dims) > 1 or min(sizes_of(shapes, dims)) < 2:
            self.of.tell(f"a batch of another shape ({_describe_shapes(shapes, step)}): another program is compiled for it", once="shape")
            return
        with self.of.rank_sync.telling():
            made, odd = self._range(dims, forms, shapes, lambda at: self._sample(step, batch, resized(shapes, dims, at)))
        if made is None:
            self.failed[key] += not near
            self.of.tell(f"a batch of another shape ({_describe_shapes(shapes, step)}): each is compiled by itself, since programs differ in {odd}", once=odd)
            return
        outside = f"; {_describe_shapes(shapes, step)} is outside {' and '.join(map(str, near))}" if near else ""
        beyond = f"; programs of sizes beyond differ in {odd}" if odd else ""
        self.found = [*(r for r in self.found[-MOST:] if not (r.dims == dims and r.is_like(shapes) and set(r.sizes) <= set(made.sizes))), made]
        self.of.tell(f"compiled for batches of {made}{outside}{beyond}", once="")

    def _like(self, shapes: dict[str, Shape]) -> tuple[Any, list[Form]]:
        """Programs of batches that differ from this in the same few dims, of three sizes at least with its own."""
        groups: dict[Any, list[Form]] = {}
        for form in self.of.kept:
            dims = changing(form.shapes, shapes) if form.given == self.of.given and not form.ranged else None
            if dims and len(dims) <= 2:
                groups.setdefault(dims, []).append(form)
        came = {dims: [sizes_of(shapes, dims), *(sizes_of(f.shapes, dims) for f in forms)] for dims, forms in groups.items()}
        found = [(dims, groups[dims]) for dims, at in came.items() if all(len(set(of) - {0, 1}) > 2 for of in zip(*at, strict=True))]
        return min(found, key=lambda x: len(x[0]), default=((), []))

    def _range(self, dims: Any, forms: list[Form], shapes: Shapes, sample: Callable[[Sizes], Form | str]) -> tuple[Range | None, str]:
        """The range around sizes of some programs and the one that came; else, of one dim, that of programs of its form. What others differ in."""
        at = sizes_of(shapes, dims)
        came = [size for size in (*(sizes_of(f.shapes, dims) for f in forms), at) if min(size) > 1]
        ends = [{1 << (min(of).bit_length() - 1), 1 << (max(of) - 1).bit_length()} for of in zip(*came, strict=True)]
        known = self._known(dims, forms, shapes)
        made = {size: known[size] for size in came if size in known}
        made |= {size: known[size] if size in known else sample(size) for size in itertools.product(*ends)}
        made |= {at: sample(at)} if len(made) < 3 else {}
        odd = self._agreed(_odd(dims, *made.values()))
        if odd and len(dims) > 1:
            return None, odd
        if odd:
            side = self._side(dims, known | made, at, sample)
            none = self._agreed(side if isinstance(side, str) else side.why_none())
            return (None, none) if none or isinstance(side, str) else (side, odd)
        return Range(dims, [f for f in made.values() if not isinstance(f, str)]), ""

    def _known(self, dims: Any, forms: list[Form], shapes: Shapes) -> dict[Sizes, Form | str]:
        """The programs there are for batches that differ in these dims alone."""
        own = forms[0].shapes.keys()
        kept = [f for f in self.of.kept if f.given == self.of.given and not f.ranged and f.shapes.keys() == own and same_outside(f.shapes, shapes, dims)]
        found = {sizes_of(f.shapes, dims): f for f in (*kept, *(f for r in self.found if r.dims == dims and r.is_like(shapes) for f in r.forms), *forms)}
        return {size: f for size, f in found.items() if min(size) > 1}

    def _side(self, dims: Any, made: dict[Sizes, Form | str], at: Sizes, sample: Callable[[Sizes], Form | str]) -> Range | str:
        """The range around a size of one dim in which every program is of its form; what others differ in where there is none."""
        made = made if at in made else {at: sample(at), **made}
        odd = {at: ""}  # from the program of this size
        while True:
            new = [size for size in made if size not in odd]
            found = zip(*self.of.rank_sync.answers([_odd(dims, made[at], made[size]) for size in new], "the form of programs"), strict=True)
            odd |= {size: next(filter(None, words), "") for size, words in zip(new, found, strict=True)}
            others = [size for size in odd if odd[size]]
            below, above = max((x for x in others if x < at), default=(0,)), min((x for x in others if x > at), default=(math.inf,))
            inside = [size for size in made if below < size < above]
            middle = ((min(inside)[0] + max(inside)[0]) // 2,)
            if len(inside) == 1:
                return next(filter(None, odd.values()), "more than numbers")
            if len(inside) > 2 or middle in made:
                return Range(dims, [made[size] for size in inside])  # type: ignore[misc]
            made[middle] = sample(middle)

    def _agreed(self, words: str) -> str:
        """Why any rank has no range."""
        return next(filter(None, self.of.rank_sync.answers(words, "sizes of a batch")), "")

    def _sample(self, step: Step, batch: Any, shapes: dict[str, Shape]) -> Form | str:
        """A program compiled for batches of other sizes than this one, of which none may have come; or why there is none."""
        example = of_shapes(batch, shapes)
        reads = self.of.reads(example=example)
        self.of.exact = True
        try:
            made: Form = self.of.made(step, batch, example, reads)
        except RuntimeFault:
            raise
        except Exception as e:  # the model takes no such sizes
            return f"what sizes they take ({type(e).__name__}: {e})".splitlines()[0]
        finally:
            self.of.exact = False
            reads.undo()
        if all(f is not made for f in self.of.kept):
            self.of.kept = [made, *self.of.kept]
        made.attributes["_state"] = {n: x for n, x in made.attributes["_state"].items() if n in made.attributes["captured"].constants}
        return made


def _odd(dims: Any, *forms: Form | str) -> str:
    """What some programs differ in other than numbers, or why a size has none."""
    missing = next((f for f in forms if isinstance(f, str)), "")
    return missing or Range(dims, list(forms)).why_none()  # type: ignore[arg-type]


def of_shapes(batch: Any, shapes: Shapes) -> Any:
    """A batch of other sizes, without values."""
    return changed(batch, lambda n, x: torch.empty(shapes[n], dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x)


def _describe_shapes(shapes: Shapes, step: Step) -> str:
    return ", ".join(f"{n.removeprefix('batch.')} {list(shapes[n])}" for n in step._batch_types if n in shapes)


def _numbers(n: Node) -> Any:
    return (n.attrs, n.types if n.op.is_input else ())


def _wiring(program: Program) -> Any:
    """A program without its numbers: ops, who reads whom, what is given."""
    at = {n: k for k, n in enumerate(program.nodes)}
    return [(n.op.name, *(at[a] for a in n.args)) for n in program.nodes], [(name, at[n]) for name, n in program.outputs]
