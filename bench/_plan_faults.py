"""Faults of kinds that training systems have shipped, each planted in a placed program: an edit of its nodes, and no more.

A collective that does not happen, a rank that counts from its own first row, a factor too many: each must be refused before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import weft_zoo as zoo
from weft.api import pool
from weft.api.check_step import Case, check_against_torch
from weft.api.eager import How
from weft.api.safety import verified
from weft.core.errors import WeftError
from weft.core.node import Attrs, Node, Op, make
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.joint import substituted
from weft.ops.fill import full, shardings_of
from weft.ops.pointwise import add, mul
from weft.plan.pins import parse_pin
from weft.plan.spec import Spec

Edit = Callable[[Program], tuple[Node, Node]]  # a node, and what stands in its place
UPDATES = ("adam", "sgd", "adagrad", "rmsprop")


@dataclass(frozen=True)
class PlanFault:
    """An edit of the step of a small model under a plan or, without one, as it was captured; why it is wrong, what the refusal must name."""

    name: str
    why: str
    model: str
    plan: str
    edit: Edit
    names: str
    settings: tuple[tuple[str, Any], ...] = ()
    pins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def refusal(self, planted: bool = True) -> str:
        """What is said before the first step; empty where nobody notices."""
        try:
            self._by_plan(planted) if self.plan else self._by_torch(planted)
        except WeftError as e:
            return str(e)
        return ""

    def _by_plan(self, planted: bool) -> None:
        placed = _placed(self.model, self.plan, self.pins, self.settings)
        verified(_captured(self.model, self.settings).captured.program, edited(placed, self.edit) if planted else placed)

    def _by_torch(self, planted: bool) -> None:
        w = _captured(self.model, self.settings)
        check_against_torch(_edited(w.captured, self.edit) if planted else w.captured, w.case, w.example)


@dataclass(frozen=True)
class Work:
    """A small model's step in float64, captured, and all it was captured from."""

    captured: Captured
    case: Case
    example: Any


class Normed(nn.Module):
    """The least model with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@functools.cache
def _captured(model: str, settings: tuple[tuple[str, Any], ...]) -> Work:
    given = dict(settings)
    clip, size = given.pop("clip", None), {} if model == "normed" else {"layers": 1}
    if model == "normed":
        torch.manual_seed(0)
        net, loss = Normed().double(), lambda m, batch: m(batch).square().mean()
        example: Any = torch.randn(8, 6, dtype=torch.float64)
    else:
        w = zoo.small(model, dtype=torch.float64, **size, **given)
        net, loss, example = w.model, w.loss, w.example(8)
    optimizer = torch.optim.AdamW(net.parameters())
    captured = capture(net, example, loss, optimizer, clip=clip)
    return Work(captured, Case(net, loss, optimizer, How(clip), torch.device("cpu")), example)


@functools.cache
def _placed(model: str, plan: str, pins: tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> Program:
    return pool.prepare(_captured(model, settings).captured, Spec.parse(plan), pool.PlanRequest(tuple(map(parse_pin, pins)), False, 0.0))


def _edited(captured: Captured, edit: Edit) -> Captured:
    """The captured step with the fault in it, in its gradients too."""
    old, new = edit(captured.program)
    grads = substituted(list(captured.gradients.values()), {old: new})
    return replace(captured, program=edited(captured.program, edit), gradients=dict(zip(captured.gradients, grads, strict=True)))


def edited(program: Program, edit: Edit) -> Program:
    old, new = edit(program)
    made = substituted([n for _, n in program.outputs], {old: new})
    outputs = dict(zip(program.output_names, made, strict=True))
    return new_program(program.name, program.mesh, program.inputs, outputs, state=program.state)


# -- finding a place ---------------------------------------------------------------------------------------------------------------------


def update_of(p: Program, name: str) -> Node:
    """The update of the parameter whose name ends so."""
    return next(n for n in p.nodes if n.op.name in UPDATES and _owner(n.args[0]).endswith(name))


def _owner(n: Node) -> str:
    while n.args:
        n = n.args[0]
    return str(n.attr("name"))


def first(roots: Iterable[Node], *ops: str, where: Callable[[Node], bool] = lambda n: True) -> Node:
    """The nearest node of these ops among what the roots are made of."""
    front, seen = list(roots), set[Node]()
    while front:
        found = [n for n in front if n.op.name in ops and where(n)]
        if found:
            return found[0]
        front = [a for n in front for a in n.args if a not in seen and not seen.add(a)]  # type: ignore[func-returns-value]
    raise LookupError(f"no {' or '.join(ops)} here: bring the fault up to date")


def updated(p: Program, name: str) -> Node:
    """The next value of the parameter whose name ends so."""
    return next(n for k, n in p.outputs if k.startswith("param.") and k.endswith(name))


# -- edits -------------------------------------------------------------------------------------------------------------------------------


def twin(op: Op, infer: Any = None, **facets: Any) -> Op:
    """An op of the same name that does something else."""
    return replace(op, infer=infer or op.infer, **facets)


def again(n: Node, op: Op) -> Node:
    return make(op, n.args, dict(n.attrs))


def kept_apart(n: Node) -> Node:
    """The collective without its sum: every rank goes on with what it holds."""
    plain = n.op.exchange

    def exchange(xs: Any, places: Any, have: Any, want: Any, attrs: Attrs) -> Any:
        alone = [[x if j == i else torch.zeros_like(x) for j in range(len(xs))] for i, x in enumerate(xs)]
        return [plain(mine, places, have, want, attrs)[i] for i, mine in enumerate(alone)]

    return again(n, twin(n.op, exchange=exchange))


def unreduced(name: str, axis: str, *ops: str) -> Edit:
    """The gradient of a parameter, not summed along the axis."""

    def edit(p: Program) -> tuple[Node, Node]:
        n = first([updated(p, name)], *(ops or ("all_reduce", "reduce_scatter")), where=lambda n: n.attr("axis") == axis)
        return n, kept_apart(n)

    return edit


def not_local(op: str, where: Callable[[Node], bool] = lambda n: True, **facets: Any) -> Edit:
    """Ranks that do not know which slice they hold."""

    def edit(p: Program) -> tuple[Node, Node]:
        n = next(n for n in p.nodes if n.op.name == op and where(n) and _cut(n))
        return n, again(n, twin(n.op, **(facets or {"local": None})))

    return edit


def _cut(n: Node) -> bool:
    return any(atom.axes for t in (*n.types, *(a.types[0] for a in n.args)) for dim in t.layout.dims for atom in dim)


def scaled(at: Callable[[Program], Node], by: float) -> Edit:
    return lambda p: (n := at(p), mul(n, by))


def _unmasked(ctx: Any, x: torch.Tensor, index: torch.Tensor, **attrs: Any) -> torch.Tensor:
    return ctx.node.op.run(x, index % x.shape[attrs["dim"]], **attrs)  # type: ignore[no-any-return]


def _by_rank(ctx: Any, x: torch.Tensor, seed: torch.Tensor, **attrs: Any) -> torch.Tensor:
    return ctx.node.op.run(x, seed + 97 * sum(ctx.coords.values()), **attrs)  # type: ignore[no-any-return]


def _bias_before_the_sum(p: Program) -> tuple[Node, Node]:
    """all_reduce(x w) + b  ->  all_reduce(x w + b), where b is whole on every rank."""
    total = next(n for n in p.nodes if n.op.name == "add" and any(a.op.name == "all_reduce" for a in _through(n.args)) and _is_bias(n))
    summed = next(a for a in _through(total.args) if a.op.name == "all_reduce")
    inner = summed.args[0]
    bias = next(a for a in total.args if summed not in _through([a]))
    loose = twin(total.op, infer=lambda types, attrs: (types[0],))
    early = make(summed.op, (make(loose, (inner, bias), {}),), dict(summed.attrs))
    return total, _again_through(total, summed, early)


def _through(nodes: Iterable[Node]) -> list[Node]:
    """Nodes, and what they are views of."""
    out = []
    for n in nodes:
        out.append(n)
        while n.op.name in ("reshape", "permute"):
            n = n.args[0]
            out.append(n)
    return out


def _again_through(total: Node, old: Node, new: Node) -> Node:
    view = next(a for a in total.args if old in _through([a]))
    return substituted([view], {old: new})[0]


def _is_bias(n: Node) -> bool:
    return any(a.op.name == "input" and str(a.attr("name")).startswith("param.") and a.ndim == 1 for a in n.args)


def _other_slice(p: Program) -> tuple[Node, Node]:
    """ZeRO's update reads the parameter's slice of the next rank."""
    return turned(first([updated(p, "up.weight")], "slice", where=lambda n: _owner(n).endswith("up.weight")))


def _same_positions(p: Program) -> tuple[Node, Node]:
    """The rotary table's slice of the next rank."""
    rope = next(n for n in p.nodes if n.op.name == "rope" and n.args[1].op.name in ("slice", "cast"))
    return turned(first([rope.args[1]], "slice"))


def turned(n: Node) -> tuple[Node, Node]:
    """A slice that gives every rank the next one's."""
    plain = n.op.exchange

    def exchange(xs: Any, places: Any, have: Any, want: Any, attrs: Attrs) -> Any:
        out = plain(xs, places, have, want, attrs)
        return [*out[1:], out[0]]

    return n, again(n, twin(n.op, exchange=exchange))


def _stale(p: Program) -> tuple[Node, Node]:
    """The tied weight's gradient lacks what its rows in the embedding give."""
    total = first([update_of(p, "tokens.weight").args[1]], "add")
    return total, next(a for a in total.args if all(n.op.name != "put" for n in _through([a])))


def _unweighted(p: Program) -> tuple[Node, Node]:
    """Every expert that was picked counts alike."""
    weights = next(n for n in p.nodes if n.op.name == "experts").args[2]
    return weights, full(weights.shape, 1.0, weights.mesh, weights.dtype, shardings_of(weights))


def _averaged(p: Program) -> tuple[Node, Node]:
    summed = first([updated(p, "up.weight")], "all_reduce", where=lambda n: n.attr("axis") == "dp")
    n = summed if len(summed.types) == 1 else first([updated(p, "up.weight")], "item", where=lambda n: n.args[0] is summed)
    return n, mul(n, 0.5)


def _step_count(p: Program) -> tuple[Node, Node]:
    n = p.output_names["step"]
    return n, add(n, 1)


def _loss_factor(p: Program) -> Node:
    """The number by which every token's loss is scaled on the way back: one over how many there are."""
    back = next(n for n in p.nodes if n.op.name == "cross_entropy_backward")
    return first([back.args[0]], "div")


def _norm_square(p: Program) -> tuple[Node, Node]:
    n = first([p.output_names["grad_norm"]], "all_reduce")
    return n, kept_apart(n)


def _statistic(p: Program) -> tuple[Node, Node]:
    n = first([p.output_names[next(k for k in p.output_names if k.endswith("running_mean"))]], "all_reduce")
    return n, kept_apart(n)


def changed(op: str, **attrs: Any) -> Edit:
    """The first node of an op with other settings."""

    def edit(p: Program) -> tuple[Node, Node]:
        n = next(n for n in p.nodes if n.op.name == op)
        return n, make(n.op, n.args, {**dict(n.attrs), **attrs})

    return edit


def _kept(p: Program) -> tuple[Node, Node]:
    """A running mean that is never written."""
    name = next(k for k in p.output_names if k.endswith("running_mean"))
    return p.output_names[name], p.input_names[name]


PLAN_FAULTS = (
    PlanFault("a norm's gradient is not summed over tp", "with sequence parallelism every rank has seen its rows alone", "gpt2", "tp2,sp",
              unreduced("blocks.0.norm1.weight", "tp"), "all_reduce"),
    PlanFault("the loss is scaled by a rank's own tokens under cp", "twice too large, and so is every gradient", "gpt2", "cp2,a2a",
              scaled(_loss_factor, 2.0), "mul"),
    PlanFault("a tied weight learns from one of its two uses", "the share of the other is lost", "gpt2", "tp2", _stale, "param.tokens.weight"),
    PlanFault("a router's gradient is not summed", "every rank routed its own tokens", "mixtral-8x7b", "ep2",
              unreduced("router.weight", "ep"), "all_reduce"),
    PlanFault("a gradient is averaged twice", "the loss was a mean already", "gpt2", "dp2",
              _averaged, "mul"),
    PlanFault("ZeRO updates with a gradient nobody summed", "a slice of one rank's own term", "gpt2", "dp2,zero1",
              unreduced("blocks.0.mlp.up.weight", "dp", "reduce_scatter"), "reduce_scatter"),
    PlanFault("rotary positions are those of another rank", "every rank has its own part of the sequence", "llama3-8b", "cp2,ring",
              _same_positions, "slice"),
    PlanFault("a causal mask counts a rank's own rows", "row 0 of rank 1 is not row 0", "gpt2", "cp2,ring", not_local("attention"), "attention"),
    PlanFault("a causal mask is shifted by one", "every token sees the next", "gpt2", "cp2,ring", changed("attention", offset=1), "attention"),
    PlanFault("an embedding cut along the vocabulary does not mask", "a row of another rank is read here", "gpt2", "tp2",
              not_local("take", local=_unmasked), "take", (("vocab", 64),), ("tokens.weight=tp:S(0)",)),
    PlanFault("dropout draws the same on every tp rank", "the mask would follow the layout", "bert-large", "tp2,sp",
              not_local("dropout"), "dropout", (("dropout", 0.1),)),
    PlanFault("dropout draws another mask on each replica", "they would drift apart", "bert-large", "tp2",
              lambda p: (n := next(n for n in p.nodes if n.op.name == "dropout"), again(n, twin(n.op, local=_by_rank))), "dropout",
              (("dropout", 0.1),)),
    PlanFault("a bias is added on every tp rank before the sum", "it would count twice", "gpt2", "tp2", _bias_before_the_sum, "add"),
    PlanFault("batch norm's statistics are a rank's own", "its batch is half of the batch", "normed", "dp2", _statistic, "all_reduce"),
    PlanFault("gradients are clipped by a rank's own norm", "it lacks the other slices", "gpt2", "tp2", _norm_square, "all_reduce",
              (("clip", 1.0),)),
    PlanFault("weight decay reads another rank's slice", "parameters would be swapped", "gpt2", "dp2,zero1", _other_slice, "slice"),
    PlanFault("experts' outputs are added without weights", "the router would not matter", "mixtral-8x7b", "ep2", _unweighted, "experts"),
    PlanFault("the optimizer counts a step too many", "its corrections are off", "gpt2", "dp2,zero1", _step_count, "add"),
    # -- in the captured step, where only torch can tell --
    PlanFault("a causal mask is lost", "every token sees the future", "gpt2", "", changed("attention", causal=False), "blocks.0.attention"),
    PlanFault("a captured loss is scaled", "every gradient is twice as large", "gpt2", "", scaled(_loss_factor, 2.0), "the gradient of"),
    PlanFault("a captured dropout drops half as often", "its scale is another too", "gpt2", "", changed("dropout", p=0.05), "blocks.0",
              (("dropout", 0.1),)),
    PlanFault("weight decay is forgotten", "large weights stay", "gpt2", "", changed("adam", decay=0.0), "after the update"),
    PlanFault("batch norm forgets its running mean", "evaluation would use another", "normed", "", _kept, "running_mean"),
    PlanFault("a captured step counts one too many", "its corrections are off", "gpt2", "", _step_count, "the count of steps"),
)  # fmt: skip
