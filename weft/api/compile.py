"""`weft.compile`: a program, or a model under a plan, as a callable on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from weft.api.check_module import ForwardCase
from weft.api.check_step import Verdict, check_against_torch
from weft.api.compiled import Compiled
from weft.api.eager import How
from weft.api.external_writes import ExternalWrites
from weft.api.retracing import MOST
from weft.api.safety import seen_by_first, verified
from weft.core.errors import PlanError, RuntimeFault
from weft.core.layout import Layout, S
from weft.core.program import Program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.frontend.capture.batches import named_batch
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.model import capture_unchanged, uncompiled
from weft.frontend.capture.restored import as_before, evaluating
from weft.plan.named import input_layouts, tensor_shards
from weft.plan.place import Placements, place
from weft.plan.spec import Spec

Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


@overload
def compile(what: Program, plan: str = "dp1", example: None = None, *, device: str | torch.device = "cpu", check: bool = True) -> Compiled: ...
@overload
def compile(what: nn.Module, plan: str = "dp1", example: Any = None, *, device: str | torch.device = "cpu", check: bool = True) -> Inference: ...
def compile(
    what: Program | nn.Module, plan: str = "dp1", example: Any = None, *, device: str | torch.device = "cpu", check: bool = True
) -> Compiled | Inference:
    """Compile a model for inference under a plan, or a program as a function on local tensors by name.

    Args:
        what: A module, or a `Program`.
        plan: Degrees, for a module: "tp2".
        example: One batch, for a module. A batch of another shape is compiled when it first comes.
        device: Where to run.
        check: Compare what is captured with the module in plain torch, and the plan's program with it, before it runs.

    Returns:
        Of a module a function of full batches, whose results are replicated on every rank: `run(batch)["out"]`.
    """
    if isinstance(what, Program):
        return Compiled(what, device=device)
    if example is None:
        raise PlanError("a model is compiled for batches of one shape", needed="example=, one batch", found="none")
    return Inference(what, plan, example, torch.device(device), check)


class Inference:
    """A model's forward pass under a plan; weights are laid out as the plan says, results are replicated.

    Buffers that the pass writes, such as a key-value cache, stay on the ranks, sharded as what is written to them is. A batch of a new shape
    is compiled when it first comes, with the same weights and buffers: prefill and decode are two shapes of one model. What is written into
    the module later, weights or buffers, is taken over before the next call.
    """

    def __init__(self, model: nn.Module, plan: str, example: Any, device: torch.device, check: bool = True) -> None:
        self.model, self.device, self.named, self.check = uncompiled(model), device, Spec.parse(plan), check
        self.verified: Verdict | None = None  # of the last program, on rank 0
        if self.named.pp > 1 or self.named.micro or self.named.recompute:
            raise PlanError("inference runs the full batch at once", needed="a plan without pp, micro and recompute", found=plan)
        self._held: dict[str, Placements] = {}
        self._state: dict[str, Tensor] = {}
        self._taken: dict[str, tuple[Tensor, Layout]] = {}  # the module's own tensor, and its layout here
        self._carried: set[str] = set()  # what calls write: the module has what it began with
        self._own, self._calls = ExternalWrites(self.model), 0
        self._made: dict[Shapes, list[tuple[Compiled, Captured]]] = {}
        self.compiled, _ = self._for(example)
        self.program = self.compiled.program

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        written = self._own.written(apart=self._carried)
        for name, value in written.items():
            self._take(name, value)
        if written:
            self._own.remember()
        run, captured = self._for(batch)
        reads = cast(Reads, captured.reads)
        own = {n: _local(run, n, x) for n, x in reads.tensors_now(captured.constants).items() if n in run.program.input_names}
        given = {n: _local(run, n, x) for n, x in named_batch(batch).items() if n in run.program.input_names}
        known = {**self._state, **own, **given, "seed": torch.tensor(self._calls)}
        self._calls += 1
        out = run({n: known[n] for n in run.program.input_names}, self._state)
        state = dict(run.program.state)
        self._state |= {stored: out[n] for n, stored in state.items()}
        return {n: x for n, x in out.items() if n not in state}

    def buffer(self, name: str) -> Tensor:
        """This rank's part of a buffer, as the last call left it."""
        return self._state[f"buffer.{name}"]

    def _for(self, batch: Any) -> tuple[Compiled, Captured]:
        """The program for batches of this shape and for what Python says now."""
        shapes = tuple((n, tuple(x.shape), x.dtype) for n, x in named_batch(batch).items())
        known = self._made.setdefault(shapes, [])
        made = next((m for m in reversed(known) if cast(Reads, m[1].reads).hold(batch)), None)
        if made is None:
            grad = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(grad):  # a trace has tensors of its own
                made = self._make(batch)
            _require_memory(known, batch)
            known.append(made)
            self._own = ExternalWrites(self.model)  # it may have other modules now
        return made

    def _make(self, batch: Any) -> tuple[Compiled, Captured]:
        captured = self._captured(batch)
        program = self._placed(captured)
        if self.check:
            self._check(captured, program, batch)
        run = Compiled(program, device=self.device, repeated=True)
        for name, value in {**captured.parameters, **captured.buffers}.items():
            if name in run.program.input_names and (name not in self._taken or self._taken[name][0] is not value):
                self._taken[name] = value, run.program.input_names[name].layout
                self._take(name, value, run)
        self._carried |= {became for _, became in program.state}
        return run, captured

    def _take(self, name: str, value: Tensor, run: Compiled | None = None) -> None:
        """The module's value, in place of what the calls so far have made of it."""
        if name in self._taken:
            here = (run or self.compiled).part(value.detach(), self._taken[name][1])
            self._state[name], self._taken[name] = here.clone(), (value, self._taken[name][1])

    def _check(self, captured: Captured, program: Program, batch: Any) -> None:
        case = ForwardCase(self.model, None, None, How(), self.device)
        with evaluating(self.model), as_before(captured.reads):
            self.verified = seen_by_first(lambda: check_against_torch(captured, case, batch))
        verified(captured.program, program, lambda: captured.inputs(batch))

    def _captured(self, batch: Any) -> Captured:
        with evaluating(self.model):
            captured = capture_unchanged(
                self.model, batch, "a model in evaluation mode that changes nothing but its buffers", "keep what it counts in a buffer"
            )
        cast(Reads, captured.reads).in_any_mode()
        return captured

    def _placed(self, captured: Captured) -> Program:
        """Parameters as the plan says; buffers as what is written to them comes, so that writing moves nothing."""
        program, mesh = captured.program, self.named.mesh
        layouts, options = input_layouts(program, self.named, {})
        layouts |= self._shard_with_caches(program, layouts)
        written = {n: stored for n, stored in program.state if stored not in self._held}
        if written:
            free = program.with_outputs(program.outputs, "", state=())
            first = place(free, mesh, layouts, options, outputs={n: {} for n in written})
            found = {stored: first.output_names[n].layout.placements for n, stored in written.items()}
            self._held |= {n: {a: p for a, p in places.items() if isinstance(p, S)} for n, places in found.items()}
        params = program.inputs_for(Role.PARAMETER)
        self._held = {**{n: p for n, p in layouts.items() if n in params}, **self._held}
        known = {n: p for n, p in self._held.items() if n in program.input_names}
        return place(program, mesh, {**layouts, **known}, options)


    def _shard_with_caches(self, program: Program, layouts: Mapping[str, Placements]) -> dict[str, Placements]:
        """Tensor parallelism that may also shard what the pass writes, so that a sharding of heads goes through their cache."""
        if self.named.tp == 1:
            return {}
        stored = {stored for _, stored in program.state}
        may = {n: node for n, node in program.input_names.items() if node.role is Role.PARAMETER or n in stored}
        shards = tensor_shards(program, program.outputs[0][1], may, self.named.tp)
        return {n: {**layouts.get(n, {}), "tp": shard} for n, shard in shards.items()}


def _require_memory(known: list[tuple[Compiled, Captured]], batch: Any) -> None:
    if len(known) >= MOST:
        words = str(cast(Reads, known[-1][1].reads).changes(batch)[0])
        raise RuntimeFault(
            f"the model has been compiled {MOST} times for batches of one shape",
            needed="values in Python that stop changing",
            found=words,
            try_="pass it as a tensor in the batch",
        )


def _local(run: Compiled, name: str, value: Tensor) -> Tensor:
    return run.part(value, run.program.input_names[name].layout).contiguous()
