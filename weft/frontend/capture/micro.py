"""A step in micro-batches, derived from the step of the full batch.

The micro-batches are one more axis of a mesh, along which the batch is sharded. What treats samples apart is then sharded like them (S), and a sum
over samples is a sum of the micro-batches' terms (P), which passes on where an op is linear in it. Where the loss comes out as such a sum,
the terms' gradients sum to the full batch's, whatever the loss is. What needs all samples at once and no parameter, such as the number
of labels that count, is computed first, of the full batch; what needs them and a parameter is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.autodiff import backward
from weft.core.errors import LayoutError, PlanError, TypeMismatch
from weft.core.layout import Layout, Mesh, P, Placement, R, Replicated, S, dim_size
from weft.core.node import Node, Type, constant, make, remade, toposort
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.frontend.capture.batches import changed, named_batch
from weft.frontend.capture.blocks import Instance
from weft.frontend.capture.step import Captured
from weft.ops.attention import attention_op
from weft.ops.custom_gradient import own_gradient, rule_of
from weft.ops.embed import take
from weft.ops.fill import arange, full, full_op
from weft.ops.opaque import independent_operands, opaque
from weft.ops.pointwise import add, dropout_op, mul
from weft.ops.registry import ONE, Equation, arg_sets
from weft.ops.shape import expand, expand_op, narrow, reshape_op
from weft.ops.source import input_in_layout, input_node

AXIS = "micro"
FIRST, PART = "first.", "part"  # inputs of a micro-batch: what was computed first, and which of the micro-batches it is


@dataclass(frozen=True)
class Micro:
    """The step of one of some micro-batches: its loss and gradients, and the buffers in `summed`, add up to the full batch's.

    `dims` are the tensors of the batch that are sharded, and along which dim; `first` gives, of the full batch, inputs of every micro-batch
    and buffers that no parameter changes. Other buffers are the same after every micro-batch, each begun with what was there before.
    Where `full` is none, the step is not derived: its loss is a part of the mean over the micro-batches' own.
    """

    captured: Captured
    parts: int
    dims: Mapping[str, int]
    first: Program | None = None
    summed: frozenset[str] = frozenset()
    full: Captured | None = None


GIVEN = (Role.BATCH, Role.AHEAD, Role.SEED)  # inputs that come with a micro-batch rather than with the model or the optimizer


def in_micro_batches(captured: Captured, parts: int, dims: Mapping[str, int]) -> Micro:
    """The step split into equal micro-batches; one that is no sum over them is refused in words."""
    require_gradients(captured)
    return Micro(captured, 1, dims, full=captured) if parts == 1 else _Derivation(captured, parts, dims).micro()


def require_gradients(captured: Captured) -> None:
    if not captured.gradients:
        raise PlanError(
            "a step in micro-batches needs gradients that follow from the forward pass",
            needed="no old hooks of the backward pass, and autograd functions that write into none of their operands",
            found="one that was traced together with its backward pass",
            try_="a plan without pp, micro and accumulate",
        )
    kept = {name: n for name, n in captured.program.outputs if name != "loss" and not name.startswith("buffer.")}
    made = remade(kept.values(), {n: input_node(f"d.{name}", n.type) for name, n in captured.gradients.items()})
    read: dict[Node, str] = {}  # a tensor of the batch that a value is made of
    for n in toposort(made[n] for n in kept.values()):
        found = n.attr("name") if n.op.is_input and n.role is Role.BATCH else next((read[a] for a in n.args if a in read), "")
        read |= {n: found} if found else {}
    for name, n in kept.items():
        if made[n] in read:
            raise PlanError(
                "a step in micro-batches changes parameters and the optimizer's state once, after the last of them",
                needed="parameters that are made of their gradients and of what was there before",
                found=f"{name}, made also of {read[made[n]]}, as where the forward pass writes into it",
                try_=("a plan without pp, micro and accumulate", "an embedding without max_norm, its rows bounded after step(batch)"),
            )


# -- the batch -----------------------------------------------------------------------------------------------------------------------


def batch_dims_of(batch: Any) -> tuple[int, dict[str, int]]:
    """How many samples a batch has, and along which dim each of its tensors has them; one that has no such dim is left out.

    They are as many as the first dim of every tensor is long or, where these differ, as the one length that all have, or most first dims.
    """
    shapes = {n: tuple(x.shape) for n, x in named_batch(batch).items() if x.ndim}
    firsts = Counter(shape[0] for shape in shapes.values())
    common = set.intersection(*(set(shape) for shape in shapes.values())) if shapes else set()
    once = {size for size in common if all(shape.count(size) == 1 for shape in shapes.values())}
    likely = [size for size, count in firsts.items() if count == max(firsts.values())] if len(once) != 1 or len(firsts) == 1 else list(once)
    if len(likely) != 1:
        raise PlanError(
            "the batch dim of the tensors in the batch is ambiguous",
            needed="one length that most of its tensors begin with",
            found=", ".join(f"{n.removeprefix('batch.')} {list(shape)}" for n, shape in shapes.items()) or "no tensor with dims",
            try_="another number of samples, or a plan without pp, micro and accumulate",
        )
    (samples,) = likely
    dims = {n: 0 if shape[0] == samples else shape.index(samples) for n, shape in shapes.items() if samples in shape}
    return samples, {n: d for n, d in dims.items() if d == 0 or shapes[n].count(samples) == 1}


def most_parts(samples: int, most: int) -> int:
    """The most equal micro-batches, up to so many, that a batch can be split into."""
    return max(n for n in range(1, most + 1) if samples % n == 0)


def require_parts(samples: int, parts: int) -> None:
    fits = most_parts(samples, parts)
    if fits != parts:
        raise PlanError(
            f"a batch of {samples} is not {parts} equal micro-batches", needed=f"a multiple of {parts}", found=str(samples), try_=f"micro{fits}"
        )


def micro_batch(batch: Any, k: int, parts: int) -> Any:
    """One of equal parts of a batch, each tensor sharded along its samples; what has none goes to every part."""
    samples, dims = batch_dims_of(batch)
    require_parts(samples, parts)

    def cut(name: str, x: Any) -> Any:
        return x.chunk(parts, dims[name])[k].clone() if isinstance(x, torch.Tensor) and name in dims else x

    return changed(batch, cut)


# -- derivation ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MicroValue:
    """A value of the full batch as one micro-batch has it: how the axis holds it, and the node that makes the micro-batch's part."""

    types: tuple[Type, ...]
    node: Node

    @property
    def place(self) -> Placement:
        return self.types[0].on(AXIS)


class _Derivation:
    def __init__(self, captured: Captured, parts: int, dims: Mapping[str, int]) -> None:
        self.captured, self.parts, self.dims = captured, parts, dims
        self.program = p = captured.program
        self.mesh, self.own = Mesh(**{AXIS: parts}), p.mesh
        self.loss = p.output_names["loss"]
        self.written = {name: n for name, n in p.outputs if name.startswith("buffer.")}
        self.order = toposort([self.loss, *self.written.values()])
        self.free = self._without_parameters()
        self.values: dict[Node, _MicroValue] = {}
        self.known: dict[Node, Node] = {}  # what is computed first, and the input it comes by

    def _without_parameters(self) -> set[Node]:
        found: set[Node] = set()
        for n in self.order:
            if n.op.is_input and n.role is not Role.PARAMETER or not n.op.is_input and found.issuperset(n.args):
                found.add(n)
        return found

    def micro(self) -> Micro:
        for n in self.order:
            value = self._value(n)
            if value is not None:
                self.values[n] = value
        outputs = {"loss": self._term(self.loss).node}
        buffers = {name: self._buffer(name, n) for name, n in self.written.items() if n not in self.free}
        outputs |= {name: value.node for name, value in buffers.items()}
        summed = frozenset(name for name, value in buffers.items() if isinstance(value.place, P))
        first = {node.attr("name"): n for n, node in self.known.items()}
        first |= {name: n for name, n in self.written.items() if n in self.free}
        program = _program(f"{self.program.name}.first", self.program, first) if first else None
        return Micro(self._captured(outputs), self.parts, self.dims, program, summed, self.captured)

    def _captured(self, outputs: Mapping[str, Node]) -> Captured:
        """The captured step with a micro-batch's loss and gradients instead of the batch's."""
        made = {n: value.node for n, value in self.values.items()}
        return with_loss(self.captured, outputs, [made])

    # -- one value -------------------------------------------------------------------------------------------------------------

    def _value(self, n: Node) -> _MicroValue | None:
        """What a micro-batch has of a value; none where it is a tuple that is computed first."""
        if n.op.is_input:
            return self._input(n)
        if any(a not in self.values for a in n.args):
            return self._first(n)
        args = [self.values[a] for a in n.args]
        for candidate in self._operand_candidates(n, args):
            made = self._made(n, candidate)
            if made is not None:
                return made
        if n not in self.free:
            raise self._refusal(n, args)
        return self._first(n) if len(n.types) == 1 else None

    def _input(self, n: Node) -> _MicroValue:
        name = n.attr("name")
        layout = Layout.of(self.mesh, n.shape, {AXIS: S(self.dims[name])} if name in self.dims else {})
        own = Layout.of(self.own, layout.largest_local)
        return _MicroValue((Type(n.dtype, layout),), input_in_layout(n, own))

    def _first(self, n: Node) -> _MicroValue:
        """The full value, computed before the micro-batches."""
        if n not in self.known:
            self.known[n] = input_node(f"{FIRST}{len(self.known)}", n.type, Role.AHEAD)
        return _MicroValue((Type(n.dtype, Layout.of(self.mesh, n.shape)),), self.known[n])

    def _operand_candidates(self, n: Node, args: Sequence[_MicroValue]) -> Iterator[list[_MicroValue]]:
        """The operands as they are, then brought to wherever the op could take them, with the least to compute first."""
        yield list(args)
        here = [x.place for x in args]
        eq = self._equation(n, args)
        wanted = _sharded_operands(eq, here) + _sums(n, here) if eq is not None else []
        wanted += [_batch_sharded_operands(n)] if n.op is opaque and S(0) in here else []
        wanted.append(tuple(R if a in self.free else p for a, p in zip(n.args, here, strict=True)))
        for places in sorted(wanted, key=lambda places: sum(p != q and not isinstance(p, Replicated) for p, q in zip(here, places, strict=True))):
            brought = [self._brought(a, x, p) for a, x, p in zip(n.args, args, places, strict=True)]
            if None not in brought:
                yield [x for x in brought if x is not None]

    def _equation(self, n: Node, args: Sequence[_MicroValue]) -> Equation | None:
        return None if n.op.equation is None else n.op.equation(tuple(x.types[0] for x in args), dict(n.attrs))

    def _brought(self, n: Node, value: _MicroValue, place: Placement) -> _MicroValue | None:
        """The value held otherwise, where that needs nothing of other micro-batches or no parameter."""
        if value.place == place:
            return value
        if not isinstance(value.place, Replicated):
            return self._brought(n, self._first(n), place) if n in self.free else None
        if isinstance(place, P):
            return self._share(value) if n.dtype.is_floating_point and place.op == "sum" else None
        assert isinstance(place, S)
        return self._sliced(n, value, place)

    def _share(self, value: _MicroValue) -> _MicroValue:
        """An even share of a full value, so that the shares sum to it."""
        (t,) = value.types
        return _MicroValue((t.with_layout(t.layout.hold(AXIS, P())),), mul(value.node, 1.0 / self.parts))

    def _sliced(self, n: Node, value: _MicroValue, place: S) -> _MicroValue | None:
        """A micro-batch's slice of a full value."""
        (t,), dim = value.types, place.dim
        layout = t.layout.shard(AXIS, dim, place.within)
        if not layout.is_even or place.within is not None:
            return None
        size, shape = layout.largest_local[dim], layout.largest_local
        if n.op is full_op:
            node = full(shape, n.attr("value"), self.own, n.dtype)
        elif n.op is expand_op and n.args[0].shape[dim] == 1 and isinstance(self.values[n.args[0]].place, Replicated):
            node = expand(self.values[n.args[0]].node, shape)
        else:
            rows = add(arange(size, self.own), mul(self._part, size))
            node = take(value.node, rows, dim)
        return _MicroValue((t.with_layout(layout),), node)

    @property
    def _part(self) -> Node:
        return input_node(PART, Type(torch.int64, Layout.of(self.own, ())), Role.SEED)

    # -- the op on it ----------------------------------------------------------------------------------------------------------

    def _made(self, n: Node, args: Sequence[_MicroValue]) -> _MicroValue | None:
        """The op on operands held so, if it may be."""
        attrs = {k: self.mesh.key if k == "mesh" else v for k, v in n.attrs}
        try:
            found = self._per_sample_types(n, args) or n.op.infer(tuple(t for x in args for t in x.types), attrs)
            types = found if isinstance(found, tuple) else (found,)
            nodes, attrs = self._local(n, args, types)
            made = make(n.op, tuple(nodes), attrs)
        except (TypeMismatch, LayoutError, _ByPlace):
            return None
        fits = all(t.layout.is_even and t.layout.largest_local == own.shape for t, own in zip(types, made.types, strict=True))
        return _MicroValue(types, made) if fits else None

    def _per_sample_types(self, n: Node, args: Sequence[_MicroValue]) -> tuple[Type, ...]:
        """The types of a torch op without an entry that takes samples each by itself; none where that is not known."""
        if n.op is not opaque or not independent_operands(n) or tuple(x.place for x in args) != _batch_sharded_operands(n):
            return ()
        first = args[0].types[0].layout.dims[0]
        if any(x.types[0].layout.dims[0] != first for x in args[: independent_operands(n)]):
            return ()
        full = [Layout.of(self.mesh, shape) for _, shape in n.attr("gives")]
        return tuple(Type(t.dtype, layout.with_dim(0, first)) for t, layout in zip(n.types, full, strict=True))

    def _local(self, n: Node, args: Sequence[_MicroValue], types: Sequence[Type]) -> tuple[list[Node], dict[str, Any]]:
        """Operands and attributes of the op in one micro-batch; where it must know which it is, it is an operand."""
        nodes, attrs = [x.node for x in args], dict(n.attrs)
        places = [x.place for x in args if len(x.types) == 1]
        if n.op is own_gradient and not self._by_sample(n, args):
            raise _ByPlace
        if n.op is opaque:
            return nodes, {**attrs, "gives": tuple((d, t.layout.largest_local) for (d, _), t in zip(attrs["gives"], types, strict=True))}
        if n.op.local is None or not any(isinstance(p, S) for p in (*places, *(t.on(AXIS) for t in types))):
            return nodes, attrs
        if n.op in (reshape_op, expand_op):
            return nodes, {**attrs, "shape": types[0].layout.largest_local}
        if n.op is dropout_op:
            return [*nodes, self._part], {**attrs, "of": self._of(args[0])}
        eq = self._equation(n, args)
        labels = {eq.label(k, p.dim) for k, p in enumerate(places) if isinstance(p, S)} if eq is not None else set[str]()
        if n.op is attention_op and labels <= {"b", "g", "r"} and (labels == {"b"} or not n.attr("p")):
            return ([*nodes, self._part], {**attrs, "of": self._of(args[0])}) if n.attr("p") else (nodes, attrs)
        if eq is None or not n.op.by_dim or not all(labels <= set(out) for out in eq.outs):
            raise _ByPlace
        if "dim" in attrs and eq.ins[0][attrs["dim"]] in labels:
            raise _ByPlace
        return nodes, attrs

    def _of(self, value: _MicroValue) -> tuple[int, int, int]:
        """Where a micro-batch's elements stand in the full tensor: along which dim, in runs of how many, one of how many."""
        layout = value.types[0].layout
        at = layout.where_sharded(AXIS)
        assert at is not None
        dim, k = at
        return dim, dim_size(layout.dims[dim][k:]) // self.parts, self.parts

    # -- what leaves the micro-batch -------------------------------------------------------------------------------------------

    def _term(self, n: Node) -> _MicroValue:
        value = self._brought(n, self.values[n], P())
        if value is None:
            raise self._refusal(n, [self.values[n]])
        return value

    def _buffer(self, name: str, n: Node) -> _MicroValue:
        value = self.values[n]
        if isinstance(value.place, S) or value.place == P("max") or value.place == P("min"):
            raise self._refusal(n, [value], f"the new value of {name}")
        return value

    def _by_sample(self, n: Node, args: Sequence[_MicroValue]) -> bool:
        """Whether a gradient of the user's own, made of a micro-batch's cotangent, is the micro-batch's part of what the full one gives."""
        if all(isinstance(x.place, Replicated) for x in args):
            return True
        rule, many = rule_of(n), n.attr("operands")
        types = {rule.ct: args[0].types[0], **{slot: x.types[0] for slot, x in zip(rule.slots, args[1 + many :], strict=True)}}
        try:
            for m in toposort([g for g in rule.gradients if g is not None]):
                if m not in types:
                    if m.op.local is not None or len(m.types) > 1 or not m.args and m.ndim:
                        return False
                    attrs = {k: self.mesh.key if k == "mesh" else v for k, v in m.attrs}
                    found = m.op.infer(tuple(types[a] for a in m.args), attrs)
                    types[m] = found[0] if isinstance(found, tuple) else found
        except (TypeMismatch, LayoutError):
            return False
        pairs = [(x.types[0], types[g]) for x, g in zip(args[1 : 1 + many], rule.gradients, strict=True) if g is not None]
        return all(g.on(AXIS) == (P() if isinstance(x.on(AXIS), Replicated) else x.on(AXIS)) for x, g in pairs)

    def _refusal(self, n: Node, args: Sequence[_MicroValue], what: str = "") -> PlanError:
        meaning = {"max": "the greatest of all samples", "min": "the least of all samples", "sum": "a sum over all samples"}
        pending = [meaning[x.place.op] for x in args if isinstance(x.place, P)]
        reads = pending[0] if pending else "all samples at once"
        where = self.program.lines.get(n) or next((line for m in reversed(self.order[: self.order.index(n)]) if (line := self.program.lines.get(m))), None)
        return PlanError(
            f"the step in {self.parts} micro-batches would not be the full batch's",
            needed="a loss that is a sum over samples, of what each has by itself and of labels and masks of all",
            found=f"{what or _op_name(n)}, which {'weft does not know and ' if n.attr('target') else ''}takes {reads}, made by the parameters",
            try_=("micro1, or a plan without pp, micro and accumulate", "allow_micro_mean=True for the mean over what the micro-batches give by themselves"),
            where=where,
        )


def _op_name(n: Node) -> str:
    """What an op is called, of torch's where it has no entry."""
    return str(n.attr("target") or n.op.name)


def _batch_sharded_operands(n: Node) -> tuple[Placement, ...]:
    """The operands of an opaque op that have samples sharded along them, the others replicated."""
    return tuple(S(0) if k < independent_operands(n) else R for k in range(len(n.args)))


class _ByPlace(Exception):
    """An op that would have to know where in the full tensor its slice lies."""


def _sharded_operands(eq: Equation, here: Sequence[Placement]) -> list[tuple[Placement, ...]]:
    """Every operand sharded along a label that one is sharded along, the others replicated."""
    found = []
    labels = {eq.label(k, p.dim): p.within for k, p in enumerate(here) if isinstance(p, S)}
    for label, within in labels.items():
        if label not in eq.unsharded and label != ONE:
            dims = dict(eq.dims_of(label))
            found.append(tuple(S(dims[k], within) if k in dims else R for k in range(len(here))))
    return found


def _sums(n: Node, here: Sequence[Placement]) -> list[tuple[Placement, ...]]:
    """Every operand of a set in which the op is linear a partial sum, the others replicated."""
    pending = {k for k, p in enumerate(here) if p == P()}
    sets = [s for s in arg_sets(n.op.linear, len(here)) if s & pending]
    return [tuple(P() if k in s else R for k in range(len(here))) for s in sets]


# -- programs with another loss ----------------------------------------------------------------------------------------------------


def with_loss(captured: Captured, outputs: Mapping[str, Node], copies: Sequence[Mapping[Node, Node]]) -> Captured:
    """The captured step with another loss and other buffers, `copies` of its forward pass, and what follows from the gradients."""
    p, loss = captured.program, outputs["loss"]
    inputs = {n.attr("name"): n for n in toposort(outputs.values()) if n.op.is_input}
    wanted = {name: inputs[name] for name in captured.gradients if name in inputs}
    found = backward({loss: constant(1.0, loss.dtype, p.mesh)}, list(wanted.values()))
    gradients = {name: found[n] for name, n in wanted.items() if n in found}
    lost = [name for name in captured.gradients if name not in gradients]
    assert not lost, f"no gradient of {lost} in the micro-batch"
    kept = {name: n for name, n in p.outputs if name != "loss" and not name.startswith("buffer.")}
    made = remade(kept.values(), {captured.gradients[name]: g for name, g in gradients.items()})
    lines = {copy[n]: line for copy in (*copies, made) for n, line in p.lines.items() if n in copy}
    outputs = {**outputs, **{name: made[n] for name, n in kept.items()}}
    program = _program(p.name, p, outputs, lines)
    blocks = tuple(tuple(_moved(b, copy) for copy in copies for b in group) for group in captured.blocks)
    return replace(captured, program=program, gradients=gradients, blocks=blocks)


def _program(name: str, like: Program, outputs: Mapping[str, Node], lines: Mapping[Node, str] | None = None) -> Program:
    """The program of some outputs: the inputs they read, in the order they had, then new ones."""
    read = {n.attr("name"): n for n in toposort(outputs.values()) if n.op.is_input}
    read = {**{i: like.input_names[i] for o, i in like.state if o in outputs}, **read}  # state may be written and never read
    names = [*(n for n in like.input_names if n in read), *(n for n in read if n not in like.input_names)]
    state = tuple((o, i) for o, i in like.state if o in outputs and i in read)
    return new_program(name, like.mesh, [read[n] for n in names], dict(outputs), state=state, lines=lines or {})


def _moved(block: Instance, made: Mapping[Node, Node]) -> Instance:
    """A block where it stands in another program."""

    def each(nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(dict.fromkeys(made[n] for n in nodes if n in made))

    return Instance(block.path, each(block.inputs), each(block.parameters), each(block.outputs), each(block.nodes))


def unrolled(micro: Micro) -> Captured:
    """All micro-batches in one program, one behind the other."""
    assert micro.full is not None
    one, outputs = micro.captured.program, dict[str, Node]()
    leaves = {name: n for name, n in one.outputs if name == "loss" or name.startswith("buffer.")}
    copies = []
    for j in range(micro.parts):
        copy = remade(leaves.values(), {n: _given(micro, j, name, n) for name, n in one.input_names.items()})
        copies.append(copy)
        for name, n in leaves.items():
            sums = name in outputs and (name == "loss" or name in micro.summed)
            outputs[name] = add(outputs[name], copy[n]) if sums else outputs.get(name, copy[n])
    outputs |= {name: n for name, n in (micro.first.outputs if micro.first is not None else ()) if name.startswith("buffer.")}
    made = with_loss(micro.captured, outputs, copies)
    program = _program(micro.full.program.name, micro.full.program, made.program.output_names, made.program.lines)
    return replace(made, program=program, blocks=(tuple(_forward_block(micro, copy, copies) for copy in copies),))


def _forward_block(micro: Micro, copy: Mapping[Node, Node], copies: Sequence[Mapping[Node, Node]]) -> Instance:
    """The forward pass of one micro-batch as the block that repeats."""
    p = micro.captured.program
    given = [n for n in p.inputs if n in copy]
    others = set().union(*(other.values() for other in copies if other is not copy))
    nodes = dict.fromkeys(n for n in copy.values() if n not in others and not n.op.is_input)
    params = tuple(copy[n] for n in given if n.role is Role.PARAMETER)
    return Instance("", tuple(copy[n] for n in given if n.role in GIVEN), params, (copy[p.output_names["loss"]],), tuple(nodes))


def _given(micro: Micro, j: int, name: str, n: Node) -> Node:
    """An input of micro-batch j, made of the full batch's inputs."""
    assert micro.full is not None
    if name == PART:
        return constant(j, n.dtype, n.mesh)
    if name.startswith(FIRST):
        assert micro.first is not None
        return micro.first.output_names[name]
    if name in micro.dims:
        dim = micro.dims[name]
        return narrow(micro.full.program.input_names[name], dim, j * n.shape[dim], (j + 1) * n.shape[dim])  # type: ignore[no-any-return]
    return n
