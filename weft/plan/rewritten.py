"""Training steps one rule away from a step.

A rule is used anywhere in the step as it stands, or in the forward pass alone: then the gradients are derived anew from the loss as it is now
written, so that one move changes a value and all that is computed back from it. What a rule makes equal has equal gradients. A plan file names
the moves, which are made again on a user's step: each is the use of a proved rule, so the step means what it did.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.autodiff import backward
from weft.core.errors import InvalidTransform, PlanError
from weft.core.node import Node, constant, with_operands
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured
from weft.ops.linalg import einsum_op, matmul
from weft.ops.shape import permute
from weft.rewrite.schema import Schema
from weft.rewrite.search import Use, both_directions, made, uses
from weft.rewrite.updates import by_definition, by_rows

SPELLED = "matmul_as_einsum"  # the rule by which matmuls are written as such
PRODUCTS = {"ak,nk->an": (None, (1, 0)), "an,nk->ak": (None, None), "an,ak->nk": ((1, 0), None)}  # and which operand is transposed


@dataclass(frozen=True)
class Move:
    """A use of a rule in the step; in its forward pass alone, where the gradients are then derived anew."""

    use: Use
    forward: bool

    def __str__(self) -> str:
        return str(self.use)

    def data(self) -> dict[str, Any]:
        """The move in JSON's own types."""
        return {**asdict(self.use), "forward": self.forward}

    @staticmethod
    def of(data: Mapping[str, Any]) -> Move:
        """The move of data that has the form of `data`."""
        return Move(Use(**{k: v for k, v in data.items() if k != "forward"}), data["forward"])


@dataclass(frozen=True, eq=False)
class RewrittenStep:
    """A program that trains, and the gradients in it by parameter; none where they are no vjps of its forward pass."""

    program: Program
    gradients: Mapping[str, Node] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Node, ...]:
        """Nodes are interned, so equal steps have equal keys."""
        return tuple(n for _, n in self.program.outputs)

    def neighbours(self, rules: Sequence[Schema], most: int) -> Iterator[tuple[Move, RewrittenStep]]:
        """Steps one move away, those that change the forward pass first."""
        anywhere = ((Move(use, False), RewrittenStep(there)) for use, there in uses(self.program, rules))
        yield from itertools.islice(itertools.chain(self._forward_changed(rules), anywhere), most)

    def moved(self, move: Move, rules: Sequence[Schema]) -> RewrittenStep:
        """The step after a move; refused where it cannot be made here."""
        if not move.forward:
            return RewrittenStep(made(self.program, move.use, rules))
        return self._with_loss(made(self._forward, move.use, rules).output_names["loss"])

    @property
    def _forward(self) -> Program:
        loss = self.program.output_names["loss"]
        needed = self.program.needs(loss)
        return new_program("forward", self.program.mesh, [n for n in self.program.inputs if n in needed], {"loss": loss})

    def _forward_changed(self, rules: Sequence[Schema]) -> Iterator[tuple[Move, RewrittenStep]]:
        if self.gradients:
            yield from ((Move(use, True), self._with_loss(there.output_names["loss"])) for use, there in uses(self._forward, rules))

    def _with_loss(self, loss: Node) -> RewrittenStep:
        program = self.program
        params = {name: program.input_names[name] for name in self.gradients}
        found = backward({loss: constant(1.0, loss.dtype, program.mesh)}, list(params.values()))
        gradients = {name: found[n] for name, n in params.items()}
        swap = {self.gradients[name]: new for name, new in gradients.items()} | {program.output_names["loss"]: loss}
        return RewrittenStep(program.rewrite({old: new for old, new in swap.items() if old is not new}, "forward pass rewritten"), gradients)


def as_run(program: Program, rounds: int) -> Program:
    """A step as weft runs it: tables are updated by rows. Gradients of several micro-batches are added up, so they are full tensors."""
    return by_rows(program) if rounds == 1 else program


def as_products(captured: Captured) -> RewrittenStep:
    """The step with matmuls written as such, transposes as views, so that rules about matmuls meet them. Its gradients are those
    of the forward pass so written: a rule used and taken back leads here again."""
    program, made = by_definition(captured.program), dict[Node, Node]()
    for n in program.nodes:
        args = tuple(made[a] for a in n.args)
        transposition = PRODUCTS.get(str(n.attr("equation"))) if n.op is einsum_op else None
        if transposition is not None:
            made[n] = matmul(*(a if order is None else permute(a, order) for a, order in zip(args, transposition, strict=True)))
        else:
            made[n] = with_operands(n, args)
    outputs = {name: made[n] for name, n in program.outputs}
    gradients = {name: made.get(n, n) for name, n in captured.gradients.items() if name in program.input_names}
    step = RewrittenStep(new_program(program.name, program.mesh, program.inputs, outputs, state=program.state), gradients)
    return step._with_loss(outputs["loss"]) if gradients else step


# -- the moves that a plan file names, made again on a captured step ---------------------------------------------------------------


def moves_of(layouts: Mapping[str, Any]) -> tuple[Move, ...] | None:
    """The moves in the layouts of a plan; None where it has none, not even that matmuls are written as such."""
    moves = layouts.get("moves")
    return None if moves is None else tuple(map(Move.of, moves))


def rewritten(captured: Captured, moves: Sequence[Move] | None) -> tuple[Captured, tuple[str, ...]]:
    """The step after the moves, and the words for them; as it is where there are none."""
    return (captured, ()) if moves is None else (replayed(captured, moves), tuple(words(moves)))


def replayed(captured: Captured, moves: Sequence[Move]) -> Captured:
    """The step after the moves; refused with the first that cannot be made here. What was known of its repeated blocks is not kept."""
    from weft.rewrite.certificate import proved_rules

    step, rules = as_products(captured), both_directions(proved_rules())
    for k, move in enumerate(moves, 1):
        which = f"move {k} of {len(moves)} cannot be made"
        if move.forward and not step.gradients:
            raise PlanError(f"{which}: {move} is for the forward pass", needed="gradients that follow from it", found="others")
        try:
            step = step.moved(move, rules)
        except InvalidTransform as e:
            raise PlanError(f"{which}: {e.message}", needed=e.needed, found=e.found) from e
    return replace(captured, program=step.program, gradients=step.gradients, blocks=())


def words(moves: Sequence[Move]) -> Iterator[str]:
    """What is done to a step, its rule first."""
    yield f"{SPELLED} backwards at every matmul, gradients derived anew"
    for move in moves:
        use = move.use
        transposition = " backwards" if use.rule.endswith("~") else ""
        where = f"{use.op} {use.at}" + (f" and {use.places - 1} alike" if use.places > 1 else "")
        yield f"{use.rule.rstrip('~')}{transposition} at {where}" + (" of the forward pass, gradients derived anew" if move.forward else "")
