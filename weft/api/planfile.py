"""Plans as `parallelize` follows them, words, a `Spec` or a plan file: exactly, or refused in words.

A plan of a captured model holds its program, and the moves by which proved rules made it of the model's own. The moves are made again on
the user's step, which is then laid out as the program is, at its own batch and in its own number types. What a step has beyond the plan's, such
as clipping, is placed around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.api.safety import verified
from weft.core.errors import PlanError
from weft.core.layout import R, S
from weft.core.node import Node
from weft.core.program import Program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.plan.pins import Pin
from weft.plan.place import Placements, PlacingOptions
from weft.plan.plan import Plan, load, step_of
from weft.plan.rewritten import rewritten
from weft.plan.spec import MIXED, Spec
from weft.transform.recompute import recomputed, regions_of
from weft.transform.same_layouts import with_same_layouts
from weft.transform.skip_nan import skip_nan
from weft.transform.stage_contents import FoundStages, StageContents, stage_contents_of

Held = Mapping[str, Placements]
FREE = "weft plan ... --pin pp=1"


@dataclass(frozen=True)
class Followed:
    """A plan to be followed. `program` is that of a captured model, on the mesh of one stage; `as_run` where it was chosen with its buckets and kernels."""

    path: str
    spec: Spec
    program: Program | None = None
    contents: StageContents | None = None  # what its stages are made of
    as_run: bool = False

    def guarded(self) -> Followed:
        """The plan for a step that leaves state as it was where the loss is NaN or Inf."""
        return replace(self, program=skip_nan(self.program)) if self.program is not None else self

    def step(self, captured: Captured) -> tuple[Captured, tuple[str, ...]]:
        """The step with the plan's moves made, and the words for them."""
        if self.program is not None and not self.as_run:
            self._require_same_model(captured)
        try:
            return rewritten(captured, self.spec.moves)
        except PlanError as e:
            raise self._refused(f"the rules of {self.path} cannot be used: {e.message}", e.needed, e.found) from e

    def part(self, captured: Captured) -> tuple[Captured, tuple[str, ...]]:
        """The same of a micro-batch, whose gradients are added up before they are used: they must follow from its forward pass."""
        made, moves = self.step(captured)
        if moves and not made.gradients:
            needed = "rules that leave gradients as they are, since micro-batches add them up"
            raise self._refused(f"the rules of {self.path} cannot be used", needed, ", ".join(moves[:3]))
        return made, moves

    def found(self, captured: Captured) -> FoundStages:
        """Where the step is split and what is recomputed, as far as the plan says so."""
        found = self.contents.find(captured) if self.contents is not None else FoundStages()
        if found.recomputed and not captured.gradients:
            found = FoundStages(problems=["what it recomputes: the model was traced together with its backward pass"])
        if found.problems:
            raise self._refused(f"{self.path} cannot be followed on this step", "the step that was planned", "; ".join(found.problems))
        return found

    def again(self, captured: Captured) -> Captured:
        """The step of one stage, with what is recomputed by its words or layer by layer; of a placed program by its words alone."""
        regions = self.found(captured).recomputed if self.program is None else None
        mode = "" if self.spec.recompute == MIXED else self.spec.again
        return recomputed(captured, regions_of(captured, mode) if regions is None else regions)

    def input_layouts(self, captured: Captured, spec: Spec) -> dict[str, Placements]:
        """How inputs are laid out: parameters and optimizer state as in the plan, and of a batch what can be sharded as there."""
        if self.program is None:
            return {}
        own, theirs = captured.program.input_names, self.program.input_names
        self._require_same_model(captured)
        shared = [n for n in own if n in theirs]
        odd = next((n for n in shared if theirs[n].ndim != own[n].ndim or not _divides(own[n].shape, theirs[n], spec)), None)
        if odd is not None:
            placement = ", ".join(f"{a}:{p}" for a, p in theirs[odd].layout.placements.items())
            raise self._refused(f"{self.path} cannot be followed on this step", f"{odd} to be laid out as {placement}", f"{list(own[odd].shape)}")
        return {n: {a: p for a, p in theirs[n].layout.placements.items() if p != R} for n in shared}

    def _require_same_model(self, captured: Captured) -> None:
        assert self.program is not None
        own = {n: tuple(x.shape) for n, x in captured.parameters.items()}
        theirs = {n: x.shape for n, x in self.program.inputs_for(Role.PARAMETER).items()}
        odd = next((n for n in {**theirs, **own} if own.get(n) != theirs.get(n)), None)
        if odd is not None:
            words = [f"{list(shapes[odd])}" if odd in shapes else "none" for shapes in (theirs, own)]
            raise self._refused(f"{self.path} is for another model", f"{odd.removeprefix('param.')} of {words[0]}", words[1])

    def placed(self, captured: Captured, pins: Sequence[Pin]) -> Program | None:
        """The step laid out as the plan says; None where it says nothing of single tensors."""
        if self.program is None or self.as_run:
            return self.program
        if pins:
            raise PlanError(
                f"{self.path} fixes the layout of every tensor", needed="no pins next to it", found=", ".join(map(str, pins)), try_="leave out pins="
            )
        found = with_same_layouts(self.program, captured.program, PlacingOptions(gather=frozenset(self.spec.copies if self.spec.most_zero == 3 else ())))
        same = bool(found.alone) and _is_same(captured.program, self.program)
        if found.lost and not same:
            raise self._refused(f"{self.path} is for another step", f"the plan's {_describe_nodes(found.lost)}", "none that could be laid out so")
        return self.program if same else found.program

    def _refused(self, message: str, needed: str, found: str) -> PlanError:
        return PlanError(message, needed=needed, found=found, try_="weft plan FILE.py:FUNCTION ... --save plan.json, with a function that makes this step")


def _describe_nodes(nodes: Sequence[Node]) -> str:
    names = list(dict.fromkeys(str(n.attr("name") or n.op.name).removeprefix("param.") for n in nodes))
    return f"{len(nodes)} nodes ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _divides(shape: tuple[int, ...], node: Any, spec: Spec) -> bool:
    sizes, placements = spec.mesh.sizes, node.layout.placements
    return all(shape[p.dim] % sizes.get(a, 1) == 0 for a, p in placements.items() if isinstance(p, S))


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


def follow(plan: str | Path | Spec | Plan) -> Followed:
    """What is to be followed of words, a spec, a plan, or the path of its file."""
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return _of_plan(load(plan), f"the plan {plan}")
    if isinstance(plan, Plan):
        return _of_plan(plan, "the plan")
    spec = plan.checked() if isinstance(plan, Spec) else Spec.parse(plan)
    return Followed(f"the plan {spec}", runnable(spec, f"the plan {spec}"), contents=stage_contents_of(spec))


def _of_plan(plan: Plan, path: str) -> Followed:
    text = plan.layouts.get("program")
    if text and plan.layouts.get("rules") and "moves" not in plan.layouts:
        rules = ", ".join(plan.layouts["rules"])
        raise PlanError(f"{path} does not say where rules rewrote its step", needed="the moves of its rules", found=rules, try_="plan again")
    if text and plan.setting.stages:
        raise PlanError(f"{path} has stages of an earlier planner", needed="stages of layers, or words", found="units of a program", try_="plan again")
    spec = runnable(plan.spec, path)
    return Followed(path, spec, step_of(text) if text else None, stage_contents_of(spec))


def runnable(spec: Spec, path: str) -> Spec:
    """The spec as weft runs it; refused where it is not all done."""
    if spec.shares and not (spec.shards and spec.pp == 1):
        kinds = f"pp {spec.pp}, {len(spec.shares)} kinds of copies"
        needed = "equal shares, or one stage and shares that torch.chunk's rule gives"
        raise PlanError(f"{path} cannot be run by parallelize", needed=needed, found=kinds, try_=FREE)
    if spec.gather_once:
        raise PlanError(
            f"{path} cannot be run by parallelize", needed="what parallelize does",
            found="parameters gathered once a step, not for every micro-batch", try_="weft plan ... --pin keep_gathered=false",
        )  # fmt: skip
    if spec.recompute == MIXED and not spec.stages:
        raise PlanError(f"{path} does not say what it recomputes", needed="its stages, block by block", found=MIXED, try_="plan again")
    if spec.open:
        raise PlanError(f"{path} leaves decisions open", needed="a plan", found=", ".join(sorted(spec.open)), try_='plan="auto"')
    return replace(spec, shares=(), micro=0 if spec.shares else spec.micro)
