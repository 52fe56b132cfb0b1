"""A captured program split into blocks, which are calls of modules that the trace recorded, and what stands around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weft.api import check_cost
from weft.api.deviation import refusal
from weft.autodiff import backward
from weft.core.errors import NotDifferentiable
from weft.core.names import readable
from weft.core.node import Node, make
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured
from weft.frontend.capture.calls import ModuleCall
from weft.frontend.capture.isomorphic import shape_key, tensors_of
from weft.ops.fill import zeros_like
from weft.ops.pointwise import add
from weft.ops.source import input_node

if TYPE_CHECKING:
    from weft.api.check_step import Case

AROUND = "what stands around the blocks"
KNOWN = ("constant.", "seed", "value.")  # inputs that a block may read though it is not given them


def split_at(roots: Iterable[Node], at: Mapping[Node, Node]) -> dict[Node, Node]:
    """The roots and all they need, where some nodes are inputs; every random number is drawn by its place in its tensor alone."""
    made, stack = dict(at), list(roots)
    while stack:
        n = stack[-1]
        waiting = [a for a in n.args if a not in made] if n not in made else []
        stack.extend(waiting)
        if waiting:
            continue
        stack.pop()
        if n not in made:
            args, attrs = tuple(made[a] for a in n.args), dict(n.attrs)
            same = "site" not in attrs and all(a is b for a, b in zip(args, n.args, strict=True))
            made[n] = n if same else make(n.op, args, {**attrs, "site": 0} if "site" in attrs else attrs)
    return made


def _depends_on(results: Sequence[Node], at: Mapping[Node, Node]) -> bool:
    """Whether a result is computed from another."""
    return any(other in split_at([n], at) for n in results for other in results if other is not n)


def with_gradients(outputs: Mapping[str, Node], seeds: Iterable[tuple[Node, Node]], wrt: Mapping[str, Node], name: str) -> Program:
    """The outputs, and `d.NAME` of what they depend on: zeros where no gradient reaches it."""
    summed: dict[Node, Node] = {}
    for node, ct in seeds:
        summed[node] = add(summed[node], ct) if node in summed else ct
    found = backward(summed, wrt.values()) if summed else {}
    every = {**outputs, **{f"d.{n}": found[x] if x in found else zeros_like(x) for n, x in wrt.items()}}
    return program_of(every, name)


def program_of(outputs: Mapping[str, Node], name: str) -> Program:
    made = split_at(outputs.values(), {})
    return new_program(name, next(iter(outputs.values())).mesh, [n for n in made if n.op.is_input], dict(outputs))


@dataclass(eq=False)
class ModuleBlock:
    """A call of a module, and its part of the program: what it gives from `x.0`, ... and its own tensors, `own.NAME`."""

    call: ModuleCall
    module: nn.Module
    given: dict[Node, Node]  # what it is given, and the input that stands for it
    own: dict[str, Tensor]  # the module's tensors by input
    gives: dict[str, Node]
    inner: set[Node]  # of the full program
    key: Any

    def program(self, differentiable: bool) -> Program:
        """Forward and, where gradients are on, backward from `ct.0`, ..."""
        name = readable(f"block.{self.call.path}")
        if not (self.call.grad and differentiable):
            return program_of(self.gives, name)
        seeds = [(n, input_node(f"ct.{k[2:]}", n.type)) for k, n in self.gives.items() if k.startswith("y.") and n.dtype.is_floating_point]
        wrt = {str(x.attr("name")): x for n, x in self.given.items() if n in self.call.moving and n.dtype.is_floating_point}
        inputs = {str(n.attr("name")): n for n in split_at(self.gives.values(), {}) if n.op.is_input}
        wrt |= {k: inputs[k] for k, t in self.own.items() if t.requires_grad and k in inputs}
        return with_gradients(self.gives, seeds, wrt, name)


def named_own(path: str, name: str) -> str:
    return readable(f"own.{f'{path}.{name}'.strip('.')}")


class ModuleBlocks:
    """The program as blocks that can be run by themselves, and what is around them."""

    def __init__(self, captured: Captured, case: Case) -> None:
        self.captured, self.case = captured, case
        known = {**captured.parameters, **captured.buffers}
        self.names = {id(t): n for n, t in known.items()}
        self.inputs = {n: captured.program.input_names[n] for n in known if n in captured.program.input_names}
        self.left: list[str] = []
        self.differentiable = self._vjps()
        self.programs: dict[Any, Program] = {}
        self._keys: dict[nn.Module, Any] = {}
        self.blocks = list(self._chosen(captured.calls))
        self.around: Around | None = None
        try:
            self.around = Around(self)
        except NotDifferentiable as e:
            self.left.append(f"{AROUND} was not compared: {e}")

    def fits(self) -> bool:
        """Whether all of it can be afforded."""
        work = sum(check_cost.seconds(self.programs[key], self.case.device) for key in {b.key for b in self.blocks})
        return work <= check_cost.SECONDS and (self.around is None or check_cost.fits(self.around.program, self.case.device))

    def _vjps(self) -> bool:
        """Whether all gradients are what weft's rules make of the forward pass: then blocks' own are parts of them."""
        if not self.case.learns:
            return False
        wanted = self.case.gradients(self.captured)
        if wanted is None:
            self.left.append("the backward pass, of which Python is a part, was not compared")
            return False
        made = backward(dict(self.case.seeds(self.captured)), [self.inputs[n] for n in wanted]) if wanted else {}
        odd = [n for n, g in wanted.items() if made.get(self.inputs[n]) is not g]
        if odd:
            found = f"the gradient of {odd[0].removeprefix('param.')} is another node than weft's rules make of the forward pass"
            raise refusal(self.case, found)
        return True

    def _chosen(self, calls: Iterable[ModuleCall]) -> Iterator[ModuleBlock]:
        """The largest calls that can be run by themselves and afforded; of a model without values none that is made of others and exceeds a share."""
        for call in calls:
            block = self._block(call) if call.complete else None
            if block is not None and self._affordable(block):
                yield block
            else:
                yield from self._chosen(call.inside)

    def _affordable(self, block: ModuleBlock) -> bool:
        try:
            program = self.programs.setdefault(block.key, block.program(self.differentiable))
        except NotDifferentiable:
            return False
        return check_cost.fits(program, self.case.device) and not (block.call.inside and check_cost.exceeds_share(program, self.captured))

    def _block(self, call: ModuleCall) -> ModuleBlock | None:
        module = self.case.model.get_submodule(call.path)
        own: dict[Node, str] = {}
        tensors: dict[str, Tensor] = {}
        for path, name, t in tensors_of(module):
            node = self.inputs.get(self.names.get(id(t), ""))
            if node is not None and node not in own:
                own[node] = named_own(path, name)
                tensors[own[node]] = t
        given = {n: input_node(f"x.{i}", n.type) for i, n in enumerate(call.arguments)}
        at = {**{n: input_node(name, n.type, n.role) for n, name in own.items()}, **given}
        if any(n in at or not n.args for n in call.returned) or _depends_on(call.returned, at):
            return None  # it hands on what it was given, or what others make of its results too: a gradient has two ways then
        made = split_at([*call.returned, *(n for _, n in call.written)], at)
        inputs = set(at.values())
        if any(n.op.is_input and n not in inputs and not str(n.attr("name")).startswith(KNOWN) for n in made.values()):
            return None  # it reads something that it is not given
        gives = {f"y.{i}": made[n] for i, n in enumerate(dict.fromkeys(call.returned))} | {readable(f"buffer.{k}"): made[n] for k, n in call.written}
        plain = tuple(None if isinstance(x, Node) else (type(x), x) for x in (*call.given, *call.results))
        shape = shape_key(module, self._keys) or id(module)
        moving = tuple(n in call.moving for n in (*given, *call.returned))
        key = shape, call.spec, plain, tuple(gives.items()), moving, call.grad, call.cast
        return ModuleBlock(call, module, given, tensors, gives, {n for n, x in made.items() if n not in at and x is not n}, key)


class Around:
    """The program of all that stands around the blocks: from the batch, its parameters and the blocks' results to its own results and
    what blocks are given; and back."""

    def __init__(self, found: ModuleBlocks) -> None:
        blocks, case, captured = found.blocks, found.case, found.captured
        p = captured.program
        returned = dict.fromkeys(n for b in blocks for n in b.call.returned)
        self.returned = {n: f"out.{i}" for i, n in enumerate(returned)}
        self.given = {n: f"x.{i}" for i, n in enumerate(dict.fromkeys(n for b in blocks for n in b.call.arguments))}
        self.owner = {self.given[n]: b.call.path for b in reversed(blocks) for n in b.call.arguments}
        self.owner |= {self.returned[n]: b.call.path for b in reversed(blocks) for n in b.call.returned}
        at = {n: input_node(name, n.type) for n, name in self.returned.items()}
        inside = {found.names[id(b.module.get_buffer(k))] for b in blocks for k, _ in b.call.written if id(b.module.get_buffer(k)) in found.names}
        roots = {n: p.output_names[n] for n in case.cotangents(captured)}
        roots |= {n: x for n, x in p.outputs if n.startswith("buffer.") and n not in inside}
        roots |= {name: n for n, name in self.given.items()}
        made = split_at(roots.values(), at)
        self.entangled = any(not made.keys().isdisjoint(b.inner - at.keys()) for b in blocks)
        gives = {name: made[n] for name, n in roots.items()}
        moving = {n for b in blocks if b.call.grad for n in b.call.arguments if n in b.call.moving and n.dtype.is_floating_point}
        self.cts: dict[Node, str] = {}
        if not found.differentiable:
            self.program = program_of(gives, "around")
            return
        self.cts = {n: f"ct.{self.given[n]}" for n in self.given if n in moving}
        inputs = {str(n.attr("name")): n for n in made.values() if n.op.is_input}
        wrt = {n: x for n, x in inputs.items() if n in captured.parameters and captured.parameters[n].requires_grad}
        flows = {n for b in blocks for n in b.call.returned if n in b.call.moving and n.dtype.is_floating_point}
        wrt |= {name: at[n] for n, name in self.returned.items() if n in flows}
        seeds = [(made[n], ct) for n, ct in case.seeds(captured)] + [(made[n], input_node(ct, n.type)) for n, ct in self.cts.items()]
        self.program = with_gradients(gives, seeds, wrt, "around")

    def describe_tensor(self, name: str) -> str:
        """A tensor in words."""
        base = name.removeprefix("d.")
        if base in self.owner:
            what = f"what {self.owner[base] or 'the model'} {'is given' if base.startswith('x.') else 'returns'}"
            return f"the gradient of {what}" if name != base else what
        if name != base:
            return f"the gradient of {base.removeprefix('param.')}"
        return f"the buffer {name[7:]}" if name.startswith("buffer.") else f"the {name}"
