"""Plans that `weft plan --out` wrote, as `parallelize` runs them: degrees, order and micro-batches, pins, and layouts of tensors.

A plan of a captured model holds its program, and the moves by which proved rules made it of the model's own. The moves are made again on
the user's step, which is then held as the program is, at its own batch and in its own number types; where it is of another structure, parameters
and state are held as they are there, and the rest is placed around them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.api.trust import guard, verified
from weft.core.errors import PlanError
from weft.core.layout import R, S
from weft.core.node import Node
from weft.core.program import Program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.plan.carried import carried
from weft.plan.pieces import Found, Pieces, pieces_of, run_again
from weft.plan.pins import Pin, resolve
from weft.plan.place import Options, Placements, place
from weft.plan.plan import Plan, load, step_of
from weft.plan.recompute import recomputed, regions_of
from weft.plan.replay import moves_of, rewritten
from weft.plan.rewritten import Move
from weft.plan.spec import Spec

Held = Mapping[str, Placements]


@dataclass(frozen=True)
class Followed:
    """What of a plan file is followed. `program` is that of a captured model, on the mesh of one stage."""

    path: str
    words: str
    micro_batches: int = 1
    pins: tuple[str, ...] = ()
    program: Program | None = None
    moves: tuple[Move, ...] | None = None  # by which it was made of the model's own step; None where it is that
    unsaid: tuple[str, ...] = ()  # rules that made it, the file does not say where
    pieces: Pieces | None = None  # what its stages are made of

    def guarded(self) -> Followed:
        """The plan for a step that leaves state as it was where the loss is no number."""
        return replace(self, program=guard(self.program)) if self.program is not None else self

    def step(self, captured: Captured) -> tuple[Captured, tuple[str, ...]]:
        """The step with the plan's moves made, and the words for them; the model's own where they cannot be, which is warned of."""
        if self.program is None:
            return captured, ()
        self._require_same_model(captured)
        try:
            return rewritten(captured, self.moves)
        except PlanError as e:
            _warn(f"the rules of the plan {self.path} are not followed: {e.message}; needed {e.needed}, found {e.found}")
            return captured, ()

    def part(self, captured: Captured) -> tuple[Captured, tuple[str, ...]]:
        """The same of a micro-batch, whose gradients are added up before they are used: they must follow from its forward pass."""
        made, moves = self.step(captured)
        if made.gradients:
            return made, moves
        _warn(f"the rules of the plan {self.path} are not followed: they change gradients, which micro-batches add up")
        return captured, ()

    def found(self, captured: Captured) -> Found:
        """Where the step is cut and what runs again, as far as the plan says so; what of that cannot be is warned of."""
        found = self.pieces.find(captured) if self.pieces is not None else Found()
        if found.again and not captured.gradients:
            found = Found(told=["what it runs again: the model was traced together with its backward pass"])
        if found.told:
            _warn(f"of the plan {self.path} this is not followed: {'; '.join(found.told)}")
        return found

    def again(self, captured: Captured, named: Spec) -> Captured:
        """The step of one stage, with what runs again by its words or layer by layer; of a placed program that is said of its units."""
        regions = self.found(captured).again if self.program is None else None
        return recomputed(captured, regions_of(captured, named.recompute) if regions is None else regions)

    def held(self, captured: Captured, named: Spec) -> dict[str, Placements]:
        """How inputs are held: parameters and optimizer state as in the plan, and of a batch what can be cut as there."""
        if self.program is None:
            return {}
        own, theirs = captured.program.input_names, self.program.input_names
        self._require_same_model(captured)
        shared = [n for n in own if n in theirs and theirs[n].ndim == own[n].ndim and _divides(own[n].shape, theirs[n], named)]
        return {n: {a: p for a, p in theirs[n].layout.placements.items() if p != R} for n in shared}

    def _require_same_model(self, captured: Captured) -> None:
        assert self.program is not None
        own = {n: tuple(x.shape) for n, x in captured.parameters.items()}
        theirs = {n: x.shape for n, x in self.program.inputs_for(Role.PARAMETER).items()}
        odd = next((n for n in {**theirs, **own} if own.get(n) != theirs.get(n)), None)
        if odd is not None:
            words = [f"{list(shapes[odd])}" if odd in shapes else "none" for shapes in (theirs, own)]
            raise PlanError(
                f"the plan {self.path} is for another model", needed=f"{odd.removeprefix('param.')} of {words[0]}", found=words[1],
                try_="weft plan FILE.py:FUNCTION ... --out plan.json, with a function that makes this model",
            )  # fmt: skip

    def placed(self, captured: Captured, named: Spec, pins: Sequence[Pin]) -> Program | None:
        """The step held as the plan says, unless pins say otherwise; None where the plan says nothing of its tensors."""
        if self.program is None:
            return None
        program, again = self._placed(captured, named, pins), self.found(captured).again
        return run_again(program, captured, again) if again else program

    def _placed(self, captured: Captured, named: Spec, pins: Sequence[Pin]) -> Program:
        assert self.program is not None
        options = Options(gather=frozenset({"dp"} if named.zero == 3 else ()))
        if not pins and not self.unsaid:
            found = carried(self.program, captured.program, options)
            if found.alone and _is_same(captured.program, self.program):
                return self.program
            if found.alone:
                _warn(f"the plan {self.path} does not say how {_said(found.alone)} of the step are held: they are placed around the rest")
            return found.program
        held = self.held(captured, named)
        shapes = {n: tuple(x.shape) for n, x in captured.parameters.items()}
        for name, places in resolve(pins, shapes, named.mesh.sizes).items():
            held |= dict.fromkeys((name, *(s for s, p in captured.states.items() if p == name)), places)
        why = f"{', '.join(self.unsaid)} rewrote it and the file does not say where; plan again" if self.unsaid else "there are pins"
        _warn(f"of the plan {self.path} only inputs are held as it says, since {why}")
        return place(captured.program, named.mesh, held, options)


def _said(nodes: Sequence[Node]) -> str:
    names = list(dict.fromkeys(n.op.name for n in nodes))
    return f"{len(nodes)} nodes ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _divides(shape: tuple[int, ...], node: Any, named: Spec) -> bool:
    sizes, cuts = named.mesh.sizes, node.layout.placements
    return all(shape[p.dim] % sizes.get(a, 1) == 0 for a, p in cuts.items() if isinstance(p, S))


def _is_same(single: Program, placed: Program) -> bool:
    """Whether a placed program takes the same inputs and is proved to compute the same; every rank must ask."""
    if _kinds(single) != _kinds(placed):
        return False
    try:
        verified(single, placed)
    except PlanError:
        return False
    return True


def _kinds(p: Program) -> dict[str, tuple[object, tuple[int, ...]]]:
    return {name: (n.dtype, n.shape) for name, n in p.input_names.items()} | {f"{name} out": (n.dtype, n.shape) for name, n in p.outputs}


def _warn(words: str) -> None:
    warnings.warn(words, stacklevel=5)


def is_file(plan: str) -> bool:
    return isinstance(plan, str) and plan.endswith(".json")


def from_file(path: str) -> Followed:
    """A plan that `weft plan --out` wrote; what is not followed is warned of."""
    plan = load(path)
    if plan.named is None:
        raise PlanError(
            f"the plan {path} cannot be run by parallelize", needed="equal shares, or one stage and shares that torch.chunk's rule deals out",
            found=f"pp {plan.setting.pp}, {len(plan.shares)} kinds of copies", try_="weft plan ... --pin pp=1",
        )  # fmt: skip
    ignored = not_followed(plan)
    if ignored:
        warnings.warn(f"of the plan {path} this is not followed: {'; '.join(ignored)}", stacklevel=3)
    rounds = 1 if plan.shares or plan.setting.pp > 1 else plan.setting.micro_batches
    text = plan.layouts.get("program")
    made = step_of(text) if text else None
    unsaid = tuple(plan.layouts.get("rules", ())) if "moves" not in plan.layouts else ()
    pins, moves, words = tuple(plan.limits.get("layouts", ())), moves_of(plan.layouts), plan.named
    if moves is not None and rounds > 1:  # moves are made on the step of one micro-batch
        words, rounds = f"{words},micro{rounds}", 1
    return Followed(path, words, rounds, pins, made, moves, unsaid, pieces_of(plan, made))


def not_followed(plan: Plan) -> list[str]:
    """What of a plan changes time or memory and is not done by `parallelize`."""
    s = plan.setting
    found = ["parameters gathered once a step: they are gathered for every micro-batch"] if s.keep_gathered else []
    return found + (["collectives of tp beside products"] if s.overlap_tp else [])
