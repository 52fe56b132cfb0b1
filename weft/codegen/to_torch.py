"""One rank's steps as readable torch code over process groups. The unfused form: every program can be run by it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.codegen.blocks import Block, Call, Chunked, ChunkLocal
from weft.codegen.library_calls import keeps_statistics, library_call
from weft.codegen.local_memory import LocalShape, local_shape_of, local_size, partial_op, root_of
from weft.codegen.lower import RankProgram, Step, rank_program
from weft.codegen.matmul import matmul_text, matrices
from weft.codegen.order import is_wire
from weft.codegen.peepholes import Peephole
from weft.codegen.text import INFIX, python, settings
from weft.core.layout import Layout
from weft.core.node import Node
from weft.core.text import node_names
from weft.ops.comm import slice_
from weft.ops.host import from_host
from weft.ops.pointwise import where
from weft.ops.registry import Kind, Local

TORCH_INFIX = INFIX | {"pow": "**"}


@dataclass
class Code:
    """Source of a function `step(inputs)` and the objects its names stand for."""

    text: str
    names: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)  # fused kernels, by the name the text calls them
    parts: str = ""  # the same as `compute` and `update`


def emit(rp: RankProgram, device: str = "cpu", own: bool = False) -> Code:
    """The rank's function. `inputs` maps names to local tensors; the result maps output names to local tensors.

    `device` says whose fused kernels may be called, `own` that state may be overwritten. What overwrites state comes last, in
    a function of its own: `compute(inputs)` gives the results and the values that `update(inputs, values)` takes.
    """
    return _Writer(rp, device=device, own=own).write()


class _Writer:
    def __init__(self, rp: RankProgram, prefix: str = "", chunked: Chunked | None = None, device: str = "cpu", own: bool = False) -> None:
        self.rp, self.prefix, self.chunked, self.device, self.own = rp, prefix, chunked, device, own
        self.at: Mapping[str, int] = rp.coords
        names = node_names(rp.program)
        self.var = {n: _variable(names.get(n, "")) for n in rp.program.nodes if n in names and not _is_always_scalar_operand(rp, n)}
        self.names: dict[str, Any] = {}
        self.calls: dict[str, Call] = {}
        self.lines: list[str] = []
        self.kept = {} if chunked is not None else keeps_statistics(rp.program)
        self.statistics = {n: f"{self.var[n]}_statistics" for n in self.kept}
        self.backward_of: dict[Node, str] = {}  # a norm's backward, and where the statistics are once the norm has run
        self.rooms = _rooms(rp) if chunked is None and device == "cpu" else {}
        self.fetches = any(n.op is from_host for n in rp.program.nodes)
        self.elsewhere: dict[str, str] = {}  # a line that writes into peer memory, and the same without

    def write(self) -> Code:
        where = ", ".join(f"{a} {i}" for a, i in self.at.items()) or "alone"
        heads = [f"def step(inputs):  # {self.rp.program.name}, rank at {where}"]
        heads += [f"    # group {group} runs node by node: {why}" for group, why in self.rp.reasons.items()]
        self.read_inputs(self.rp.program.inputs)
        compute = list(self.lines)  # the same, but for what overwrites, and what that may need is not let go
        updates: list[Step] = []
        last = len(self.rp.steps) - sum(1 for _ in itertools.takewhile(_updates, reversed(self.rp.steps)))
        for k, step in enumerate(self.rp.steps):
            mark = len(self.lines)
            self.step(step)
            new = self.lines[mark:]
            if isinstance(step.what, Peephole) and step.what.last or k >= last:
                updates.append(step)
                new = new[: len(step.waits)]
            compute += [self.elsewhere.get(line, line) for line in new if not (updates and line.startswith("    del "))]
        waits = [f"    {self.var[n]} = {self.var[n]}.wait()" for n in self.rp.last_waits]
        outs = [(name, n) for name, n in self.rp.program.outputs if n.types[0].layout.present(self.at)]
        given = ", ".join(f"{name!r}: {self.value(n)}" for name, n in outs)
        text = [*heads, *self.lines, *waits, f"    return {{{given}}}"]
        return Code("\n".join(text) + "\n", self.names, self.calls, self.parts(updates, compute, waits, outs))

    def parts(self, updates: Sequence[Step], compute: list[str], waits: list[str], outs: list[tuple[str, Node]]) -> str:
        """The same in two functions: all that makes values, all that overwrites them. Nothing where a kernel of ours comes sooner."""
        own = {step.what for step in updates}
        if self.rp.homes or any(isinstance(step.what, Block) and step.what not in own for step in self.rp.steps):
            return ""
        read = dict.fromkeys(a for step in updates for a in step.what.inputs)  # type: ignore[union-attr]
        values = "".join(f"{self.var[a]}, " for a in read if not (a.op.is_input or a.op.is_number))
        overwritten = {new for step in updates if isinstance(step.what, Peephole) for new, _ in step.what.instead}
        made = {n for step in updates if isinstance(step.what, Block) for n in step.what.outputs}
        gone = overwritten | made
        results = ", ".join(f"{name!r}: {self.value(n)}" for name, n in outs if n not in gone)
        self.lines = []
        self.read_inputs(a for a in read if a.op.is_input)
        for step in updates:
            if isinstance(step.what, Block):
                self.block(step.what)
            else:
                self.lines.append(f"    {step.what.text(self.tensor)}")  # type: ignore[union-attr]
        given = ", ".join(f"{name!r}: {self.value(n)}" for name, n in outs if n in made)
        head = ["def compute(inputs):", *compute, *waits, f"    return {{{results}}}, ({values})", "", "def update(inputs, values):"]
        return "\n".join([*head, *([f"    {values}= values"] if values else []), *self.lines, f"    return {{{given}}}"]) + "\n"

    def read_inputs(self, nodes: Iterable[Node]) -> None:
        for n in nodes:
            if n.type.layout.present(self.at):
                self.line(f"{self.var[n]} = inputs[{n.attr('name')!r}]", n)

    def line(self, text: str, node: Node | None = None) -> None:
        shape = "" if node is None else "  # " + ", ".join(f"{list(t.layout.local_shape(self.at))}" for t in node.types)
        self.lines.append(f"    {text}{shape}")

    def step(self, step: Step) -> None:
        for n in step.waits:
            self.line(f"{self.var[n]} = {self.var[n]}.wait()")
        if isinstance(step.what, Block):
            self.block(step.what)
        elif isinstance(step.what, Peephole):
            self.peephole(step.what)
        elif step.what in self.rooms:
            self.term(step.what)
        elif step.what in self.var:
            self.line(f"{self.target(step.what)} = {self.expression(step.what)}", step.what)
        if step.what in self.rp.homes:
            self.line(f"{self.var[step.what]} = {self.var[self.rp.homes[step.what]]}.copy_({self.var[step.what]})")  # type: ignore[index]
        frees = [self.var[n] for n in step.frees if n in self.var and not n.op.is_input]
        frees += [self.backward_of[step.what]] if step.what in self.backward_of else []
        if frees:
            self.line(f"del {', '.join(frees)}")

    def peephole(self, form: Peephole) -> None:
        self.names |= form.names
        made = ", ".join(self.var[n] for n in form.outputs)
        self.line(f"{made} = {form.text(self.tensor)}" if made else form.text(self.tensor), form.outputs[0] if len(form.outputs) == 1 else None)
        self.var |= {new: self.var[old] for new, old in form.instead}

    def target(self, n: Node) -> str:
        """Where a result goes; a norm whose backward follows also leaves its statistics."""
        if n not in self.statistics:
            return self.var[n]
        self.backward_of[self.kept[n]] = self.statistics[n]
        return f"{self.var[n]}, *{self.statistics[n]}"

    def term(self, n: Node) -> None:
        """What ranks sum, made where the kernel that sums it reads it, if it is a matmul; else anywhere, to be brought there."""
        call, argument = self.rooms[n]
        pair = matrices(n, [self.tensor(a) for a in n.args], self.at)
        self.line(f"{self.var[n]} = {self.expression(n)}", n)
        if pair is not None:
            anywhere = self.lines.pop()
            self.line(f"{self.var[n]} = {call}.matmul({argument}, {', '.join(pair)})", n)
            self.elsewhere[self.lines[-1]] = anywhere

    def value(self, n: Node) -> str:
        """Its name, or the number it is, for what takes a number next to a tensor."""
        return self.var[n] if n in self.var else python(n.attr("value"))

    def tensor(self, n: Node) -> str:
        """Its name, or the number it is as a tensor."""
        return self.var[n] if n in self.var else _number(n)

    def bind(self, name: str, value: Any) -> str:
        name = self.prefix + name
        self.names[name] = value
        return name

    def expression(self, n: Node) -> str:
        if n.op.kind is Kind.COMM:
            return self.communicate(n)
        if n.op.name in TORCH_INFIX:
            left, right = (python(a.attr("value")) if _is_scalar_operand(n, a) else self.value(a) for a in n.args)
            return f"{f'({left})' if left.startswith('-') else left} {TORCH_INFIX[n.op.name]} {right}"
        if n.op is where and sum(a in self.var for a in n.args) == 2:
            return f"torch.where({', '.join(map(self.value, n.args))})"
        args = [self.tensor(a) for a in n.args]
        plain = matmul_text(n, args, self.at)
        if plain is not None:
            return plain
        writer = SPECIAL.get(n.op.name)
        if writer is not None:
            return writer(self, n, args)
        kept = self.statistics.get(n) or self.backward_of.get(n)
        library = library_call(n, args, self.device, self.own, self.at, kept, self.fetches) if self.chunked is None else None
        if library is not None:
            return library
        if n.op.local is not None:
            fn = self.bind(f"{n.op.name}_at", n.op.local)
            args = [self.here(n), *args]
        else:
            fn = self.function(n)
        return f"{fn}({', '.join(args + settings(n.attrs))})"

    def here(self, n: Node) -> str:
        """What the rank knows of its place when it runs `n`; on a chunk, for each chunk."""
        name = f"here{self.var[n][1:]}"
        if self.chunked is None:
            return self.bind(name, Local(n, self.at))
        c = self.chunked
        each = [ChunkLocal(c.origin[n], self.at, c.hows, k, c.chunks) for k in range(c.chunks)]
        return f"{self.bind(name, each)}[chunk]"

    def function(self, n: Node) -> str:
        run = n.op.run
        name = getattr(run, "__name__", "")
        return f"torch.{name}" if getattr(torch, name, None) is run else self.bind(f"{n.op.name}_op", run)

    # -- groups ------------------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        if block.chunked is not None:
            self.pipeline(block, block.chunked)
            return
        for call in block.calls:
            name = call.kernel.name
            self.calls[name] = call
            args = ", ".join(map(self.value, call.given))
            self.line(f"{''.join(f'{self.var[n]}, ' for n in call.made) or '_'} = {name}({args})")
            at = {n: k for k, n in enumerate(call.given)}
            for new, old in call.fused.reused.items():
                where = at.get(old, -1)
                self.line(f"{self.var[new]} = {name}.home({where}, {self.value(old)})  # updated in place")

    def pipeline(self, block: Block, chunked: Chunked) -> None:
        """One chunk as a generator that gives way before it waits; the chunks in turn."""
        inner = _Writer(rank_program(chunked.program, chunked.program.mesh.rank(self.at)), f"{block.group.name}_", chunked)
        names = dict(zip(block.inputs, chunked.program.inputs, strict=True))
        sharded = [n for n in chunked.sharded if n.types[0].layout.present(self.at)]
        full = [n for n in chunked.full if n.types[0].layout.present(self.at)]
        params = ", ".join(inner.var[names[n]] for n in [*sharded, *full])
        self.line(f"def {block.group.name}(chunk{', ' if params else ''}{params}):  # one of {chunked.chunks} chunks")
        for text in inner.body():
            self.line(f"    {text}")
        outs = [n for n in block.outputs if n.types[0].layout.present(self.at)]
        results = [inner.value(n) for (_, n), out in zip(chunked.program.outputs, block.outputs, strict=True) if out in outs]
        self.line(f"    return ({''.join(f'{r}, ' for r in results)})")
        self.names.update(inner.names)
        chunks = ", ".join(f"({self.value(n)}, Chunks{chunked.sharded[n]})" for n in sharded)
        fulls = ", ".join(map(self.value, full))
        joins = ", ".join(f"Chunks{chunked.joins[n]}" for n in outs)
        call = f"in_chunks({block.group.name}, {chunked.chunks}, [{chunks}], [{fulls}], [{joins}])"
        self.line(f"{''.join(f'{self.var[n]}, ' for n in outs) or '_'} = {call}")

    def body(self) -> list[str]:
        """The steps of a chunk, with a `yield` before each wait."""
        self.lines = []
        for step in self.rp.steps:
            if step.waits:
                self.line("yield")
            self.step(step)
        if self.rp.last_waits:
            self.line("yield")
        for n in self.rp.last_waits:
            self.line(f"{self.var[n]} = {self.var[n]}.wait()")
        return [line.removeprefix("    ") for line in self.lines]

    # -- communication -----------------------------------------------------------------------------------------------------------

    def communicate(self, n: Node) -> str:
        if len(n.args) == 1:
            return self.one(n, n.args[0], n.types[0].layout)
        parts = ", ".join(self.one(n, a, t.layout) for a, t in zip(n.args, n.types, strict=True))
        return f"comm.joined([{parts}])" if is_wire(n) else f"({parts})"

    def one(self, n: Node, arg: Node, want: Layout) -> str:
        x, axis, have = self.tensor(arg), n.attr("axis"), arg.type.layout
        if n.op is slice_:
            return self.local_slice(x, local_shape_of(want, axis, self.at), want)
        if not is_wire(n):
            return x
        return getattr(self, f"_{n.op.name}")(n, x, axis, have, want)  # type: ignore[no-any-return]

    def local(self, layout: Layout) -> tuple[int, ...]:
        return layout.local_shape(self.at)

    def local_slice(self, x: str, shape: LocalShape, want: Layout) -> str:
        span = (shape.before, shape.full, shape.after)
        return f"comm.slice_span({x}, span={span}, start={shape.start}, stop={shape.start + shape.mine}, shape={self.local(want)})"

    def gather(self, x: str, axis: str, shape: LocalShape, want: Layout) -> str:
        span = (shape.before, shape.mine, shape.after)
        return f"comm.all_gather({x}, on.{axis}, span={span}, full={shape.full}, shape={self.local(want)})"

    def _all_reduce(self, n: Node, x: str, axis: str, have: Layout, want: Layout) -> str:
        return f"comm.all_reduce({x}, on.{axis}, {partial_op(have, axis)!r}{_order(n)})"

    def _all_gather(self, n: Node, x: str, axis: str, have: Layout, want: Layout) -> str:
        return self.gather(x, axis, local_shape_of(have, axis, self.at), want)

    def _reduce_scatter(self, n: Node, x: str, axis: str, have: Layout, want: Layout) -> str:
        shape = local_shape_of(want, axis, self.at)
        span, op = (shape.before, shape.full, shape.after), partial_op(have, axis)
        return f"comm.reduce_scatter({x}, on.{axis}, {op!r}, span={span}, mine={shape.mine}, shape={self.local(want)}{_order(n)})"

    def _all_to_all(self, n: Node, x: str, axis: str, have: Layout, want: Layout) -> str:
        was, now = local_shape_of(have, axis, self.at), local_shape_of(want, axis, self.at)
        if have.where_sharded(axis)[0] == want.where_sharded(axis)[0]:  # type: ignore[index]
            full = self.gather(x, axis, was, have.gather(axis))
            return f"comm.done({self.local_slice(f'{full}.wait()', now, want)})"
        view, (old, new) = _expanded(have, want, axis, self.at)
        sizes = f"full={was.full}, mine={now.mine}, shape={self.local(want)}"
        return f"comm.all_to_all({x}, on.{axis}, view={view}, old={old}, new={new}, {sizes})"

    def _reduce(self, n: Node, x: str, axis: str, have: Layout, want: Layout) -> str:
        return f"comm.reduce({x}, on.{axis}, {partial_op(have, axis)!r}, root={n.attr('root')})"

    def _broadcast(self, n: Node, x: str, axis: str, have: Layout, want: Layout) -> str:
        mine = x if have.present(self.at) else None
        return f"comm.broadcast({mine}, on.{axis}, root={root_of(have, axis)}, shape={want.local_shape(self.at)}, like={self.like(n)})"

    def _send(self, n: Node, x: str, axis: str, have: Layout, want: Layout) -> str:
        if root_of(have, axis) == n.attr("to"):
            return f"comm.done({x})"
        if have.present(self.at):
            return f"comm.send({x}, on.{axis}, to={n.attr('to')})"
        return f"comm.recv(on.{axis}, source={root_of(have, axis)}, shape={want.local_shape(self.at)}, like={self.like(n)})"

    def like(self, n: Node) -> str:
        return f"(torch.{str(n.types[0].dtype).removeprefix('torch.')}, device)"


def _order(n: Node) -> str:
    return ", tree=True" if n.attr("tree") else ""


def _is_scalar_operand(user: Node, n: Node) -> bool:
    """Whether a constant stands next to a tensor of its dtype: as a number there it is the same, and compilers do more with numbers."""
    return n.op.is_number and user.op.name in TORCH_INFIX and any(not a.op.is_number and a.dtype == n.dtype for a in user.args)


def _is_always_scalar_operand(rp: RankProgram, n: Node) -> bool:
    return n.op.is_number and not rp.program.outputs_of(n) and all(_is_scalar_operand(user, n) for user in rp.program.users[n])


def _rooms(rp: RankProgram) -> dict[Node, tuple[str, int]]:
    """Terms that one kernel reads from every rank and nobody else does: the kernel, and which of its arguments each is."""
    found: dict[Node, tuple[str, int]] = {}
    for block in (step.what for step in rp.steps if isinstance(step.what, Block)):
        inside = set(block.nodes)
        for call in block.calls:
            at = {n: k for k, n in enumerate(call.given)}
            terms = dict.fromkeys(p.node for part in call.fused.parts for p in part.places.values() if p.role == "terms")
            own = [n for n in terms if n.args and not rp.program.outputs_of(n) and all(u in inside for u in rp.program.users[n])]
            found |= {n: (call.kernel.name, at[n]) for n in own}
    return found


def _updates(step: Step) -> bool:
    """Whether it overwrites state, or is a kernel of ours that may stand next to what does."""
    return isinstance(step.what, Block) and bool(step.what.calls) or isinstance(step.what, Peephole) and step.what.last


def _variable(name: str) -> str:
    bare = name.lstrip("%").replace(".", "_").replace("-", "_")
    return f"t{bare}" if bare[:1].isdigit() else f"i_{bare}"


def _expanded(have: Layout, want: Layout, axis: str, at: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The local operand with both sharded dims written as [before, part, after], and where the two parts are."""
    old, new = have.where_sharded(axis), want.where_sharded(axis)
    assert old is not None and new is not None
    local, view, where = have.local_shape(at), list[int](), dict[int, int]()
    for d in range(have.rank):
        if d not in (old[0], new[0]):
            view.append(local[d])
            continue
        layout, k, without = (have, old[1], None) if d == old[0] else (want, new[1], axis)
        parts = [local_size(a, layout, at, without) for a in layout.dims[d]]
        where[d] = len(view) + 1
        view += [math.prod(parts[:k]), parts[k], math.prod(parts[k + 1 :])]
    return tuple(view), (where[old[0]], where[new[0]])


def _number(n: Node) -> str:
    return f"torch.full((), {python(n.attr('value'))}, dtype={n.types[0].dtype}, device=device)"


SPECIAL: dict[str, Callable[[_Writer, Node, list[str]], str]] = {
    "reshape": lambda w, n, a: f"{a[0]}.reshape({n.types[0].layout.local_shape(w.at)})",
    "expand": lambda w, n, a: f"{a[0]}.expand({n.types[0].layout.local_shape(w.at)})",
    "permute": lambda w, n, a: f"{a[0]}.permute({n.attr('order')})",
    "item": lambda w, n, a: f"{a[0]}[{n.attr('index')}]",
    "optimization_barrier": lambda w, n, a: f"library.barrier(({', '.join(a)},))",
    "cast": lambda w, n, a: f"{a[0]}.to(torch.{str(n.types[0].dtype).removeprefix('torch.')})",
    "const": lambda w, n, a: _number(n),
    "neg": lambda w, n, a: f"-{a[0]}",
    "einsum": lambda w, n, a: f"torch.einsum({n.attr('equation')!r}, {', '.join(a)})",
}

__all__ = ["Code", "LocalShape", "emit"]
