"""Whether two full programs denote the same outputs: a model on one device, and its form on a mesh.

First by derivation: both are erased and views that undo each other are taken out; outputs that become the same nodes are equal for all
values. Then every kind of node of the sharded program is run on all ranks of a simulated mesh against its global meaning, once per kind, so
repeated blocks cost nothing. Outputs that are not derived are compared by value, and the first node that strays is named with its layer.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from weft import interp
from weft.core.errors import InvalidProgram, WeftError
from weft.core.node import Node, Type, make, op_named, toposort
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.core.text import node_lines
from weft.ops.comm import is_comm
from weft.ops.fill import assuming_sharded
from weft.ops.registry import Kind
from weft.ops.shape import concat_op, narrow_op, permute_op, reshape, reshape_op
from weft.ops.source import input_node
from weft.rewrite.engine import erase_nodes

Known = Callable[[], Mapping[str, torch.Tensor]]
MOST_ELEMENTS = 2**20  # operands larger than this are not run


@dataclass(frozen=True)
class Place:
    """A node a person can find: its op, the layer its weights name, its printed line, and what is wrong."""

    op: str
    layer: str
    line: str
    why: str

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        return f"{self.op}{where}: {self.why}\n  > {self.line}"


@dataclass(frozen=True)
class Report:
    """The verdict. `derived` outputs are equal for all values; `evaluated` ones were compared at random values."""

    equal: bool
    outputs: int
    derived: int
    evaluated: int
    kinds_run: int
    first: Place | None = None
    seconds: float = 0.0
    missing: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        if self.equal:
            how = (
                f"{self.derived} of {self.outputs} outputs derived, {self.evaluated} by value, {self.kinds_run} kinds of op run on the mesh"
            )
            return f"equal: {how}, {self.seconds:.1f} s"
        return f"not equal: {self.first or 'outputs ' + ', '.join(self.missing)}"


def check(single: Program, sharded: Program, *, run: bool = True, seed: int = 0, known: Known | None = None) -> Report:
    """Whether `sharded` gives every output of `single`. Layouts of inputs and outputs may differ, shapes and dtypes may not.

    `known` gives values of inputs, for programs that cannot be run on others: as where the batch says how many rows are taken."""
    start = time.perf_counter()
    odd, single = _interface(single, sharded), _as_written(single, sharded)
    if odd:
        return Report(False, len(single.outputs), 0, 0, 0, None, time.perf_counter() - start, odd)
    here, there = erase_nodes(single), erase_nodes(sharded)
    tidy = _Tidy()
    open_ = [n for n, node in single.outputs if tidy(here[node]) is not tidy(there[sharded.output_names[n]])]
    first, kinds = _run_kinds(sharded, seed) if run else (None, 0)
    if first is None and open_:
        first = _first_divergence(single, sharded, open_, tidy, seed, known)
    derived = len(single.outputs) - len(open_)
    return Report(first is None, len(single.outputs), derived, len(open_), kinds, first, time.perf_counter() - start)


def _as_written(single: Program, sharded: Program) -> Program:
    """The single program with ops in others where the sharded one has none of them: it shards a dim there that they need in full."""
    left = {n.op for n in sharded.nodes}
    with assuming_sharded():
        swap = {n: n.op.across(*n.args, **dict(n.attrs)) for n in single.nodes if n.op.across is not None and n.op not in left}
    return single.rewrite(swap, "written across a shard boundary") if swap else single


def _interface(a: Program, b: Program) -> tuple[str, ...]:
    """Names that one program lacks or that have another shape."""
    odd = [n for n, node in a.outputs if n not in b.output_names or _plain(node.type) != _plain(b.output_names[n].type)]
    read = {n.attr("name") for n in b.nodes if n.op.is_input}
    odd += [
        n
        for n, node in b.input_names.items()
        if n in read and (n not in a.input_names or _plain(node.type) != _plain(a.input_names[n].type))
    ]
    return tuple(odd)


def _plain(t: Type) -> tuple[Any, ...]:
    return t.shape, t.dtype


# -- derivation ----------------------------------------------------------------------------------------------------------------------


class _Tidy:
    """Erased nodes without views that undo each other: parts of a concat, reshapes of reshapes, permutes of permutes."""

    def __init__(self) -> None:
        self.done: dict[Node, Node] = {}
        self.starts: dict[Node, list[int]] = {}  # of a concat, where each of its operands begins, and the end

    def __call__(self, root: Node) -> Node:
        stack = [root]
        while stack:
            node = stack.pop()
            wanted = [] if node in self.done else [a for a in node.args if a not in self.done]
            if wanted:
                stack += [node, *reversed(wanted)]
            elif node not in self.done:
                args = tuple(self.done[a] for a in node.args)
                same = all(a is b for a, b in zip(args, node.args, strict=True))
                self.done[node] = self._simpler(node if same else make(node.op, args, dict(node.attrs)))
        return self.done[root]

    def _simpler(self, node: Node) -> Node:
        if not node.args:
            return node
        inner = node.args[0]
        if node.op is reshape_op:
            source = inner.args[0] if inner.op is reshape_op else inner
            out: Node = reshape(source, node.shape)
            return out
        if node.op is permute_op and inner.op is permute_op:
            order = tuple(inner.attr("order")[i] for i in node.attr("order"))
            return inner.args[0] if order == tuple(range(node.ndim)) else make(node.op, inner.args, {"order": order})
        if node.op is narrow_op and inner.op is concat_op and node.attr("dim") == inner.attr("dim") and node.attr("step") == 1:
            return self._part(node, inner) or node
        return node

    def _part(self, node: Node, joined: Node) -> Node | None:
        """The operands of a concat that a narrow picks, where it ends between them."""
        dim = joined.attr("dim")
        if joined not in self.starts:
            self.starts[joined] = list(accumulate((a.shape[dim] for a in joined.args), initial=0))
        at = self.starts[joined]
        first, last = bisect_left(at, node.attr("start")), bisect_right(at, node.attr("stop")) - 1
        if first >= last or at[last] - at[first] != node.shape[dim]:
            return None
        return joined.args[first] if last == first + 1 else make(joined.op, joined.args[first:last], {"dim": dim})


# -- every kind of node, on the ranks ------------------------------------------------------------------------------------------------


def _run_kinds(program: Program, seed: int) -> tuple[Place | None, int]:
    """The first node whose ranks together do not compute its global value, and how many kinds were run."""
    seen: set[Any] = set()
    ran = 0
    for node in program.nodes:
        if node.op.is_input or node.op.is_number or node.op.is_item or node.op.is_tuple:
            continue
        kind = (node.op, node.attrs, tuple(a.types for a in node.args))
        if kind in seen:
            continue
        seen.add(kind)
        wrong = _run_one(node, seed)
        ran += wrong is not None
        if wrong:
            return place(program, node, wrong), ran
    return None, ran


def _run_one(node: Node, seed: int) -> str | None:
    """What is wrong with a node by itself: empty text for nothing, None where it cannot be run."""
    if any(len(a.types) != 1 or a.layout.shape and _elements(a) > MOST_ELEMENTS for a in node.args):
        return None
    fresh = [input_node(f"x{k}", a.type) for k, a in enumerate(node.args)]
    made = make(node.op, tuple(fresh), dict(node.attrs))
    outs = {f"y{k}": n for k, n in enumerate(made if len(made.types) > 1 else (made,))}
    program = new_program("one", node.mesh, fresh, outs)
    gen = torch.Generator().manual_seed(seed)
    given = {n.attr("name"): _draw(n, gen) if (own := _made_of_nothing(a)) is None else own for n, a in zip(fresh, node.args, strict=True)}
    try:
        full = interp.run_global(program, given)
    except (WeftError, RuntimeError, IndexError, ValueError):
        return None
    slack = _slack(program)
    try:
        ranks = interp.run(program, given, seed=seed, tolerance=slack)
    except WeftError as e:
        return f"its ranks disagree: {e.message}"
    for name, value in full.items():
        if not _close(ranks[name], value, slack):
            return "its ranks together do not compute its global value"
    return ""


def _elements(node: Node) -> int:
    total = 1
    for n in node.shape:
        total *= n
    return total


def _made_of_nothing(node: Node) -> torch.Tensor | None:
    """The value of an operand that needs no other but a seed, such as the numbers of rows, which are ascending; None where it has operands."""
    while is_comm(node) and len(node.args) == 1:
        node = node.args[0]
    if node.op.kind is not Kind.SOURCE or node.op.is_input:
        return None
    seeds = [n for n in toposort([node]) if n.op.is_input]
    given = {n.attr("name"): torch.ones(n.shape, dtype=n.dtype) for n in seeds}
    return interp.run_global(new_program("alone", node.mesh, seeds, {"y": node}), given)["y"]


def _draw(node: Node, gen: torch.Generator) -> torch.Tensor:
    if node.dtype == torch.bool:
        return torch.rand(node.shape, generator=gen) < 0.5
    if not node.dtype.is_floating_point:
        return torch.randint(0, 2, node.shape, generator=gen).to(node.dtype)
    return (torch.rand(node.shape, generator=gen, dtype=torch.float64) + 0.25).to(node.dtype)


def _slack(program: Program) -> float:
    sizes = [n.dtype.itemsize for n in program.nodes if len(n.types) == 1 and n.dtype.is_floating_point]
    return {8: 1e-9, 4: 2e-4}.get(min(sizes, default=8), 5e-2)


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or not b.dtype.is_floating_point:
        return a.shape == b.shape and bool(torch.equal(a, b))
    scale = float(b.double().abs().nan_to_num(posinf=0, neginf=0).max()) if b.numel() else 0.0
    return bool(torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * max(1.0, scale), equal_nan=True))


# -- values, and the first node that strays ------------------------------------------------------------------------------------------


def _first_divergence(
    single: Program, sharded: Program, names: Iterable[str], tidy: _Tidy, seed: int, known: Known | None
) -> Place | None:
    """None if the outputs have the same values; else the first node of `sharded` whose value `single` does not have."""
    here, there = erase_nodes(single), erase_nodes(sharded)
    values: dict[Node, Any] = {}
    roots = [tidy(erased[p.output_names[n]]) for n in names for p, erased in ((single, here), (sharded, there))]
    failed: Exception | None = None
    for given in _candidate_values(single, seed, known):
        try:
            values = {}
            _evaluate(roots, given, values)
            break
        except (RuntimeError, IndexError, InvalidProgram) as error:
            failed = error
    else:
        assert failed is not None
        raise failed
    slack = _slack(single)
    differing = [
        n for n in names if not _close(values[tidy(there[sharded.output_names[n]])], values[tidy(here[single.output_names[n]])], slack)
    ]
    if not differing:
        return None
    nodes = {tidy(here[n]) for n in single.nodes}
    _evaluate([tidy(there[n]) for n in sharded.nodes if not n.op.is_input], given, values)
    _evaluate(nodes, given, values)
    prints = {_print(values[n]) for n in nodes if n in values}
    needed = set(toposort([sharded.output_names[n] for n in differing]))
    for node in sharded.nodes:
        bare = tidy(there[node])
        if node in needed and node.args and bare not in nodes and node.op.kind is not Kind.COMM and _print(values[bare]) not in prints:
            return place(sharded, node, "the other program computes no such value")
    return Place("output", "", differing[0], "another value of the program is given under this name")


def _candidate_values(single: Program, seed: int, known: Known | None) -> Iterator[Mapping[str, torch.Tensor]]:
    """Values of the inputs, the most telling first: drawn ones; integers of 0, since every table has a first row; the batch's; all that are known."""
    gen = torch.Generator().manual_seed(seed)
    drawn = {n: _draw(node, gen) for n, node in single.input_names.items()}
    yield drawn
    yield {n: x if x.dtype.is_floating_point else torch.zeros_like(x) for n, x in drawn.items()}
    if known is None:
        return
    fits = {n: x for n, x in known().items() if n in drawn and _plain_of(x) == _plain_of(drawn[n]) and not x.is_meta}
    fits = {n: x.detach().to(drawn[n].device) for n, x in fits.items()}
    yield drawn | {n: x for n, x in fits.items() if single.input_names[n].role is Role.BATCH}
    yield drawn | fits


def _plain_of(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype


def _evaluate(roots: Iterable[Node], given: Mapping[str, torch.Tensor], values: dict[Node, Any]) -> None:
    for node in toposort(roots):
        if node not in values:
            values[node] = given[node.attr("name")] if node.op.is_input else _run(node, values)


def _run(node: Node, values: Mapping[Node, Any]) -> Any:
    try:
        return node.op.run(*(values[a] for a in node.args), **dict(node.attrs))
    except Exception as error:  # torch's, or the op's own: the program says what cannot be
        message = f"{type(error).__name__}: {error}"
        raise InvalidProgram(f"{node.op.name} cannot be run as the program says", needed="attributes and operands that it takes", found=message) from error


def _print(value: Any) -> Any:
    """A rough fingerprint that rounding does not change."""
    if isinstance(value, tuple):
        return tuple(map(_print, value))
    x = value.double()
    weights = torch.linspace(1.0, 2.0, max(1, x.numel()), dtype=torch.float64)[: x.numel()].reshape(x.shape)
    total = float((x * weights).nan_to_num().sum())
    return tuple(value.shape), f"{total:.3e}"


# -- naming a place ------------------------------------------------------------------------------------------------------------------


def place(program: Program, node: Node, why: str) -> Place:
    return Place(node.op.name, layer_of(node), node_lines(program)[node].strip(), why)


def layer_of(node: Node) -> str:
    """The layer whose weights are nearest above the node: `h.3.mlp` for `param.h.3.mlp.fc.weight`."""
    front, seen = [node], {node}
    while front:
        names = [str(n.attr("name")) for n in front if n.op.is_input and re.search(r"\.\d+\.", f".{n.attr('name')}")]
        if names:
            return layer_name(names[0])
        front = [a for n in front for a in n.args if a not in seen and not seen.add(a)]  # type: ignore[func-returns-value]
    return ""


def layer_name(weight: str) -> str:
    parts = weight.split(".")
    return ".".join(parts[:-2] if len(parts) > 3 else parts[:-1])


def locate(text: str, line: int) -> Place | None:
    """The node on a line of a program that does not parse, with its layer."""
    lines = text.splitlines()
    defined = {m[1]: (m[2], re.findall(r"%[\w.]+", m[3])) for t in lines if (m := re.match(r"\s*(%[\w.]+)\s*=\s*(\w+)\((.*?)\)\s{2,}", t))}
    m = re.match(r"\s*(%[\w.]+)\s*=\s*(\w+)", lines[line - 1]) if 0 < line <= len(lines) else None
    if m is None or m[1] not in defined:
        return None
    front, seen = [m[1]], {m[1]}
    while front:
        inputs = [n for n in front if defined.get(n, ("input",))[0] == "input" and re.search(r"\.\d+\.", n)]
        if inputs:
            return Place(m[2], layer_name(inputs[0][1:]), lines[line - 1].strip(), "")
        front = [a for n in front for a in defined.get(n, ("", []))[1] if a not in seen and not seen.add(a)]  # type: ignore[func-returns-value]
    return Place(m[2], "", lines[line - 1].strip(), "")


def equal_or_raise(single: Program, sharded: Program, known: Known | None = None) -> Report:
    """The report, if the programs are equal."""
    from weft.core.errors import RuleError

    report = check(single, sharded, known=known)
    if not report.equal:
        raise RuleError("the sharded program is not the single one", needed="the same outputs", found=str(report.first or report.missing))
    return report


__all__ = ["Place", "Report", "check", "equal_or_raise", "locate", "op_named"]
