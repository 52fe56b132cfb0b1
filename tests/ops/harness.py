"""Every layout of one op application, against torch on the global tensors: forward, gradient, and what weft refuses.

Along one axis every combination of operand layouts is tried; along two, pairs of those that hold along one, drawn by a fixed
seed. A combination that weft types must never be wrong. An oracle that knows nothing of weft's rules (the raw torch function
on every rank's slices, and every layout its results could be in) says which combinations weft refuses though they hold.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft import interp
from weft.autodiff import vjp
from weft.core.errors import InvalidProgram, LayoutError, TypeMismatch
from weft.core.layout import Layout, Mesh, O, P
from weft.core.node import Node, Type
from weft.core.program import Program, new_program
from weft.frontend.trace import input_node
from weft.testing.layouts import layouts

ONE_AXIS = (Mesh(a=2), Mesh(a=3))
TWO_AXES = Mesh(a=2, b=2)
PAIRS = 40  # two-axis combinations tried per case
Combo = tuple[Layout, ...]


@dataclass(frozen=True)
class Input:
    """An operand: its shape, and how its values are drawn."""

    shape: tuple[int, ...]
    draw: Callable[[torch.Generator, tuple[int, ...]], torch.Tensor]

    def value(self, seed: int) -> torch.Tensor:
        return self.draw(torch.Generator().manual_seed(seed), self.shape)


def normal(*shape: int) -> Input:
    return Input(shape, lambda g, s: torch.randn(s, generator=g, dtype=torch.float64))


def positive(*shape: int) -> Input:
    return Input(shape, lambda g, s: torch.rand(s, generator=g, dtype=torch.float64) + 0.5)


def distinct(*shape: int) -> Input:
    """No two values alike, so that an order is an order."""
    return Input(shape, lambda g, s: torch.randperm(math.prod(s), generator=g).reshape(s).double() - math.prod(s) // 2)


def index(below: int, *shape: int) -> Input:
    return Input(shape, lambda g, s: torch.randint(0, below, s, generator=g))


def flags(*shape: int) -> Input:
    return Input(shape, lambda g, s: torch.rand(s, generator=g) < 0.5)


@dataclass(frozen=True)
class Case:
    """One application of an op: in weft, and in torch on global tensors."""

    name: str
    fn: Callable[..., Any]
    ref: Callable[..., Any]
    inputs: tuple[Input, ...]
    smooth: bool = True  # whether its gradient is compared
    refused: str = ""  # why weft refuses layouts that hold, where it does
    partial: bool = True  # whether pending inputs are tried
    roots: bool = True  # whether inputs at one rank only are tried
    inner: bool = True  # whether cuts of parts of a dim are tried
    local: bool = False  # whether a rank must know its slice, so that the raw function on slices says nothing
    rtol: float = 1e-9

    def __str__(self) -> str:
        return self.name

    def values(self, seed: int = 0) -> list[torch.Tensor]:
        return [x.value(17 * seed + k) for k, x in enumerate(self.inputs)]

    def expected(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return as_list(self.ref(*values))


def case(name: str, fn: Callable[..., Any], ref: Callable[..., Any], *inputs: Input, **more: Any) -> Case:
    return Case(name, fn, ref, inputs, **more)


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) or (isinstance(x, Node) and len(x.types) > 1) else [x]


# -- programs ------------------------------------------------------------------------------------------------------------------


def typed(c: Case, combo: Combo) -> Program | None:
    """The program on inputs of these layouts, or None where weft refuses it."""
    dtypes = [x.value(0).dtype for x in c.inputs]
    nodes = [input_node(f"x{k}", Type(d, lay)) for k, (d, lay) in enumerate(zip(dtypes, combo, strict=True))]
    try:
        outs = as_list(c.fn(*nodes))
    except (TypeMismatch, LayoutError):
        return None
    return new_program(re.sub(r"\W+", "_", c.name), combo[0].mesh, nodes, {f"y{k}": out for k, out in enumerate(outs)})


def operand_layouts(c: Case, mesh: Mesh) -> list[list[Layout]]:
    return [[lay for lay in layouts(mesh, x.shape, inner=c.inner) if _makes_sense(x, lay, c)] for x in c.inputs]


def _makes_sense(x: Input, layout: Layout, c: Case) -> bool:
    """What the case asks for; a sum of bools is no bool."""
    pending = any(isinstance(p, P) for _, p in layout.partials)
    at_root = any(isinstance(p, O) for _, p in layout.partials)
    return (not pending or (c.partial and x.value(0).dtype != torch.bool)) and (not at_root or c.roots)


@cache
def one_axis(c: Case, mesh: Mesh) -> tuple[list[Program], list[Combo]]:
    """Every combination along one axis: the programs weft types, and the combinations it refuses."""
    programs, refused = [], []
    for combo in itertools.product(*operand_layouts(c, mesh)):
        program = typed(c, combo)
        if program is None:
            refused.append(combo)
        else:
            programs.append(program)
    return programs, refused


def two_axes(c: Case, count: int = PAIRS) -> Iterator[Program]:
    """Some programs on two axes: one axis holds the operands as it may alone, the other in any way that types."""
    holds = [_combo(p) for p in one_axis(c, ONE_AXIS[0])[0]]
    every = holds + one_axis(c, ONE_AXIS[0])[1]
    pick = random.Random(zlib.crc32(c.name.encode()))
    for _ in range(20 * count):
        combo = _pair(c, pick.choice(holds), pick.choice(pick.choice([every, holds])))
        program = None if combo is None else typed(c, combo)
        if program is not None:
            yield program
            count -= 1
        if count == 0:
            return


def _combo(program: Program) -> Combo:
    return tuple(n.layout for n in program.inputs)


def _pair(c: Case, a: Combo, b: Combo) -> Combo | None:
    places = [{"a": x.placement("a"), "b": y.placement("a")} for x, y in zip(a, b, strict=True)]
    try:
        return tuple(Layout.of(TWO_AXES, x.shape, p) for x, p in zip(c.inputs, places, strict=True))
    except LayoutError:
        return None


# -- forward and gradient ------------------------------------------------------------------------------------------------------


def check_forward(c: Case, programs: Iterable[Program]) -> None:
    """Each program means what torch computes, globally and rank by rank."""
    values = c.values()
    expected = c.expected(values)
    for program in programs:
        inputs = dict(zip(program.input_names, values, strict=True))
        agree(program, expected, interp.run_global(program, inputs), "global", c.rtol)
        agree(program, expected, by_ranks(program, inputs, c.rtol), "rank by rank", c.rtol)


def by_ranks(program: Program, inputs: dict[str, torch.Tensor], rtol: float) -> dict[str, torch.Tensor]:
    try:
        return interp.run(program, inputs, tolerance=rtol)
    except Exception as e:
        raise AssertionError(f"weft types what it cannot run:\n{program}") from e


def agree(program: Program, expected: Sequence[torch.Tensor], got: dict[str, torch.Tensor], how: str, rtol: float) -> None:
    for want, have in zip(expected, got.values(), strict=True):
        same = want.shape == have.shape and want.dtype == have.dtype and interp.same_values(have, want, rtol)
        assert same, f"{how}:\n{program}\nwanted {want}\nfound {have}"


def check_gradient(c: Case, programs: Iterable[Program]) -> None:
    """The vjp of each program equals torch's, in programs of weft ops run rank by rank."""
    values = c.values()
    draw = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(y.shape, dtype=y.dtype, generator=draw) for y in c.expected(values) if y.is_floating_point()]
    wanted = torch_gradients(c, values, cotangents)
    for program in programs:
        back = vjp(program)
        got = by_ranks(back, dict(zip(back.input_names, [*values, *cotangents], strict=True)), c.rtol)
        agree(back, wanted, got, "gradient", 10 * c.rtol)


def torch_gradients(c: Case, values: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    floats = [v for v in leaves if v.requires_grad]
    outs = [y for y in as_list(c.ref(*leaves)) if y.is_floating_point()]
    pairs = [(y, ct) for y, ct in zip(outs, cotangents, strict=True) if y.requires_grad]
    grads = torch.autograd.grad([y for y, _ in pairs], floats, [ct for _, ct in pairs], allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for v, g in zip(floats, grads, strict=True)]


# -- exactly ---------------------------------------------------------------------------------------------------------------------


def polynomial(c: Case) -> bool:
    """Whether the case, on whole operands where it takes them, is made of polynomials of floats."""
    program = typed(c, tuple(Layout.of(ONE_AXIS[0], x.shape) for x in c.inputs))
    return all(v.is_floating_point() for v in c.values()) and (program is None or _in_field(program))


def _in_field(program: Program) -> bool:
    return all(n.op.name in ("input", "item") or n.op.field is not None for n in program.nodes)


def exact_programs(c: Case, mesh: Mesh) -> list[Program]:
    """Programs that are polynomials of the inputs; a field has no order, so none with a pending max."""
    return [p for p in one_axis(c, mesh)[0] if _in_field(p) and not _has_order(p)]


def _has_order(program: Program) -> bool:
    return any(isinstance(p, P) and p.op != "sum" for n in program.nodes for t in n.types for _, p in t.layout.partials)


def check_exactly(program: Program) -> None:
    """Small whole numbers in floats and mod a prime; then large ones, globally and rank by rank."""
    draw = torch.Generator().manual_seed(3)
    small = {n: torch.randint(-9, 9, node.shape, generator=draw) for n, node in program.input_names.items()}
    floats = interp.run_global(program, {n: v.double() for n, v in small.items()})
    field = interp.run_global(program, {n: v % interp.PRIME for n, v in small.items()}, prime=interp.PRIME)
    large = {n: torch.randint(0, interp.PRIME, node.shape, generator=draw) for n, node in program.input_names.items()}
    ranks = interp.run(program, large, prime=interp.PRIME)
    whole = interp.run_global(program, large, prime=interp.PRIME)
    for name in program.output_names:
        if torch.equal(floats[name], floats[name].round()):
            assert torch.equal(floats[name].long() % interp.PRIME, field[name]), program
        assert torch.equal(ranks[name], whole[name]), program


# -- the oracle ----------------------------------------------------------------------------------------------------------------


def missed(c: Case, mesh: Mesh) -> list[Combo]:
    """Combinations of whole, cut and summed operands that hold for the raw torch function on slices, and that weft refuses.

    A pending max is left out: whether one passes hangs on the signs of the values drawn.
    """
    return [combo for combo in one_axis(c, mesh)[1] if _plain(combo) and holds(c, combo)]


def _plain(combo: Combo) -> bool:
    return all(p == P("sum") for lay in combo for _, p in lay.partials)


def holds(c: Case, combo: Combo) -> bool:
    """Whether some layout of each output makes the ranks' results denote the global one, for several draws of the inputs."""
    left: list[set[Layout]] | None = None
    for seed in range(3):
        values = c.values(seed)
        expected = c.expected(values)
        ranks = on_slices(c, values, combo, seed)
        if ranks is None:
            return False
        fits = [{lay for lay in _candidates(combo[0].mesh, y) if _denotes(outs, y, lay)} for y, outs in zip(expected, ranks, strict=True)]
        left = fits if left is None else [x & y for x, y in zip(left, fits, strict=True)]
        if not all(left):
            return False
    return True


def on_slices(c: Case, values: Sequence[torch.Tensor], combo: Combo, seed: int) -> list[list[torch.Tensor]] | None:
    """Per output, what the raw function gives on every rank's slices; None where it fails on some."""
    parts = [interp.distribute(v, Type(v.dtype, lay), seed + k) for k, (v, lay) in enumerate(zip(values, combo, strict=True))]
    try:
        ranks = [as_list(c.ref(*local)) for local in zip(*parts, strict=True)]
    except (RuntimeError, IndexError, ValueError):
        return None
    return [list(outs) for outs in zip(*ranks, strict=True)]


def _candidates(mesh: Mesh, y: torch.Tensor) -> list[Layout]:
    at_root = [lay for lay in layouts(mesh, tuple(y.shape)) if any(isinstance(p, O) for _, p in lay.partials)]
    return [lay for lay in layouts(mesh, tuple(y.shape)) if lay not in at_root and (y.dtype != torch.bool or not lay.partials)]


def _denotes(outs: list[torch.Tensor], y: torch.Tensor, layout: Layout) -> bool:
    shapes = [layout.local_shape(at) for at in layout.mesh.places()]
    if [tuple(x.shape) for x in outs] != shapes:
        return False
    try:
        return interp.same_values(interp.denote(outs, Type(y.dtype, layout), tolerance=1e-9), y, 1e-9)
    except InvalidProgram:
        return False


def show(combos: Sequence[Combo]) -> str:
    return "\n".join("  " + " ; ".join(map(str, combo)) for combo in combos)


__all__ = ["ONE_AXIS", "TWO_AXES", "Case", "Combo", "Input", "case", "check_forward", "check_gradient", "missed", "show"]
