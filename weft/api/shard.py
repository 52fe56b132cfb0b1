"""`weft.shard(model, example, plan)`: for a user who keeps the training loop.

The model comes back with DTensor parameters, laid out as the plan says; its forward and backward passes are weft's programs, inside one
autograd function. Losses, optimizers, schedulers and checkpoints stay torch's.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from weft import interp
from weft.api import auto
from weft.api.check_module import CTS, GIVEN, GRAD, OUT, ForwardCase, TrainedCase
from weft.api.check_step import Verdict, check_against_torch
from weft.api.checkpoint import as_dtensor
from weft.api.compiled import Compiled
from weft.api.data import part_of_batch
from weft.api.eager import How, Moment
from weft.api.options import AnyPlan, device_for, require_ranks, spec_of
from weft.api.planfile import Followed, follow
from weft.api.rank_sync import broadcast_initial_state
from weft.api.safety import seen_by_first, verified
from weft.core.dtensor import to_placements
from weft.core.errors import PlanError, RuntimeFault
from weft.core.layout import Layout, Placement, S
from weft.core.names import original, part, readable
from weft.core.node import Type, toposort
from weft.core.program import Program
from weft.core.role import Role
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.batches import leaves, named_batch, samples_in
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.model import called, capture_step, capture_unchanged, require_torchs, uncompiled
from weft.frontend.capture.places import TABLES, Change, unchanged
from weft.frontend.capture.restored import in_mode
from weft.plan.named import input_layouts
from weft.plan.pins import parse_pin, resolve
from weft.plan.place import place
from weft.plan.plan import Plan
from weft.plan.spec import Spec
from weft.runtime import hosts
from weft.transform.phases import split_phases


def shard(
    model: nn.Module, example: Any, plan: AnyPlan = "dp1", *, device: str | torch.device | None = None, seed: int = 0, check: bool = True
) -> nn.Module:
    """Shard the model's parameters, and give it weft's forward and backward passes, for a training loop of your own.

    Loss, optimizer, scheduler, clipping and checkpoints stay PyTorch's. Every ZeRO stage shards parameters over replicas, and so the gradients
    and the optimizer's state: `zero3` gathers parameters again for the backward pass, `zero1` and `zero2` keep them gathered until then.

    Args:
        model: Any module. It is changed in place: its parameters become DTensors. Make the optimizer afterwards.
        example: One global batch, as the model takes it.
        plan: As for `parallelize`, of dp, tp, sp, cp, ep and the ZeRO stages; "auto" takes the fastest predicted for this machine.
        device: As for `parallelize`.
        seed: Of dropout.
        check: Compare results and gradients with the module's own first.

    Returns:
        The model. Call it with a global batch or with this rank's part of one; results are DTensors of the global values:
        `.full_tensor()` gathers them, `.to_local()` is this rank's part.

    Raises:
        PlanError: The plan needs the entire step (pipelines, micro-batches, recompute), or another number of processes.
    """
    require_torchs(model, None)
    model = uncompiled(model)
    where = device_for(model, device)
    hosts.meet(where)
    plan = spec_of(plan) if isinstance(plan, DeviceMesh) else plan
    followed = None if plan == "auto" else _followed(plan)
    broadcast_initial_state(model, None, example, where, plan=str(plan if followed is None else followed.spec), seed=seed)
    Sharded(model, followed, example, where, seed, check).adopt()
    return model


def parallelize_module(model: nn.Module, plan: str, example: Any, **options: Any) -> nn.Module:
    """The name of `shard` up to 0.1."""
    warnings.warn("weft.parallelize_module(model, plan, example) is now weft.shard(model, example, plan)", DeprecationWarning, stacklevel=2)
    return shard(model, example, plan, **options)


def _followed(plan: str | Path | Spec | Plan) -> Followed:
    """A plan for as many processes as there are, of which the model alone can do everything."""
    followed = follow(plan)
    spec = followed.spec
    require_ranks(spec, "weft.shard")
    beyond = spec.virtual_stages * spec.micro_batches > 1 or spec.recompute or spec.offload or spec.moves
    if beyond:
        raise PlanError(
            f"plan '{spec}' needs the entire training step",
            needed="dp, tp, sp, cp, ep and zero: what concerns the model alone",
            found=str(spec),
            try_="weft.parallelize, which runs the step",
        )
    return followed


@dataclass(frozen=True)
class Passes:
    """One mode of the model as programs: forward, and backward where it learns; how its results were nested."""

    captured: Captured
    forward: Program
    backward: Program | None
    outs: tuple[str, ...]  # the results, in order, by output name
    nest: TreeSpec

    def reached_from(self, name: str) -> set[str]:
        """The gradients of results that a parameter's own is made of."""
        if name not in self._reached:
            root = None if self.backward is None else self.captured.program.output_names.get(_gradient_of(name))
            nodes = toposort([root]) if root is not None else []
            self._reached[name] = {n.attr("name") for n in nodes if n.op.is_input and n.attr("name").startswith(CTS)}
        return self._reached[name]

    @cached_property
    def _reached(self) -> dict[str, set[str]]:
        return {}


class Sharded:
    """A module's passes on this rank, and what it calls instead of its own forward."""

    plan: Spec

    def __init__(self, model: nn.Module, followed: Followed | None, example: Any, device: torch.device, seed: int, check: bool) -> None:
        self.model, self.followed, self.device, self.seed = model, followed, device, seed
        self.example, self.calls = example, 0
        self.decision: auto.Decision | None = None  # of plan="auto"
        self.signature = inspect.signature(model.forward)
        self.given = self._arguments(*_call_of(example))
        self.names = {readable(f"param.{n}"): n for n, _ in model.named_parameters()}
        self.learning = {n for n, p in model.named_parameters() if p.requires_grad}
        self.reads: dict[bool, Reads] = {}
        self.verified: dict[bool, Verdict | None] = {}  # by torch, on rank 0; while training and not
        self.passes: dict[bool, Passes] = {}
        for mode in (True, False):
            self.passes[mode] = self._passes(mode, check)
        self._compiled: dict[str, Compiled] = {}
        self._mesh: Any = None

    def __reduce_ex__(self, _: Any) -> Any:
        raise RuntimeFault(
            "a sharded module is not copied or pickled",
            needed="copies made before weft.shard, and values in a state_dict",
            found=f"copy.deepcopy or torch.save of {type(self.model).__name__}",
            try_=("weft.shard(copy.deepcopy(model), example, plan), before the model itself is sharded",
                  "torch.distributed.checkpoint.save(model.state_dict(), ...)"),
        )  # fmt: skip

    # -- programs ----------------------------------------------------------------------------------------------------------------

    def _passes(self, learning: bool, check: bool) -> Passes:
        """A module that is training keeps what its parts are at, such as norms in evaluation mode. Torch calls its hooks around these passes."""
        with in_mode(self.model, learning), without_hooks(self.model):
            first, nest = captured_with_nest(self.model, self.example)
            self.reads[learning] = cast(Reads, first.reads).of_values(self.model)
            return self._learning(first, nest, check) if learning else self._evaluating(first, nest, check)

    def _learning(self, first: Captured, nest: TreeSpec, check: bool) -> Passes:
        moment = Moment.now()
        both = with_gradients(self.model, self.example, first)
        if self.followed is None:
            self.decision = auto.agree(both, self.device, by_name=True)
            self.followed = follow(self.decision.named)
        self.plan = self.followed.spec
        program = self._placed(both)
        if check:
            case = TrainedCase(self.model, None, None, How(), self.device, moment, lambda x: with_gradients(self.model, x))
            self.verified[True] = seen_by_first(lambda: check_against_torch(both, case, self.example))
            verified(both.program, program)
        outs = [n for n in program.output_names if n.startswith(OUT)]
        grads = [n for n in program.output_names if n.startswith(GRAD)]
        state = [n for n in program.output_names if n not in grads and n not in outs]
        regathered = (Role.PARAMETER,) if self.plan.most_zero in (0, 3) else ()
        forward, backward = split_phases(program, [[*outs, *state], grads], regathered)
        return Passes(both, forward, backward, tuple(outs), nest)

    def _evaluating(self, first: Captured, nest: TreeSpec, check: bool) -> Passes:
        program = self._placed(first)
        if check:
            self.verified[False] = seen_by_first(lambda: check_against_torch(first, ForwardCase(self.model, None, None, How(), self.device), self.example))
            verified(first.program, program, lambda: first.inputs(self.example))
        results = tuple(n for n in program.output_names if n not in dict(program.state))
        return Passes(first, program, None, results, nest)

    def _placed(self, captured: Captured) -> Program:
        sharded = replace(self.plan, zero=3, groups=()) if self.plan.most_zero else self.plan
        shapes = {n: x.shape for n, x in captured.program.inputs_for(Role.PARAMETER).items()}
        pins = resolve(map(parse_pin, self.plan.pins), shapes, self.plan.mesh.sizes)
        layouts, options = input_layouts(captured.program, sharded, {}, pins)
        layouts |= self._planned(captured.program)
        rows = samples_in(n.shape for n in captured.program.inputs_for(Role.BATCH).values())
        wanted = {n: self._redistributed(captured.program, n, layouts, rows) for n in captured.program.output_names if n.startswith("out")}
        return place(captured.program, self.plan.mesh, layouts, options, outputs=wanted)

    def _planned(self, program: Program) -> dict[str, Any]:
        """Layouts of the parameters as a plan file of this model has them; once they are sharded, their own."""
        if self.passes:
            return {n: dict(self._layout(n, x.shape).placements) for n, x in program.inputs_for(Role.PARAMETER).items()}
        file = cast(Followed, self.followed).program
        known = file.inputs_for(Role.PARAMETER) if file is not None else {}
        return {
            n: dict(known[n].layout.placements)
            for n, x in program.inputs_for(Role.PARAMETER).items()
            if n in known and known[n].shape == x.shape
        }

    def _redistributed(self, program: Program, out: str, layouts: Mapping[str, Any], rows: int) -> Mapping[str, Placement]:
        """Gradients as their parameters; results sharded along the batch, and replicated along every other axis."""
        node, mesh = program.output_names[out], self.plan.mesh
        places: Mapping[str, Placement] = {}
        if out.startswith(GRAD):
            places = layouts.get(f"param.{readable(original(out.removeprefix(GRAD + '.')))}", {})
        elif node.ndim and node.shape[0] == rows and self.plan.dp > 1:
            places = {"dp": S(0)}
        return Layout.of(mesh, node.shape, places).placements

    def compiled(self, program: Program) -> Compiled:
        if program.name not in self._compiled:
            self._compiled[program.name] = Compiled(program, self._mesh, self.device)
            self._mesh = self._compiled[program.name].device_mesh
        return self._compiled[program.name]

    # -- the module --------------------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Put this rank's parts into the module, and the sharded passes in the place of its own."""
        forward = self.compiled(self.passes[True].forward)
        own = dict(self.model.named_parameters())
        made = {id(own[n]): self._parameter(forward, name, own[n]) for name, n in self.names.items() if n in own}
        for module in self.model.modules():
            for key, p in list(module._parameters.items()):
                if p is not None and id(p) in made:
                    module._parameters[key] = made[id(p)]
        self.model.to(self.device)
        self.model.forward = self.__call__  # type: ignore[method-assign]
        self.model.weft = self  # type: ignore[assignment]

    def _parameter(self, forward: Compiled, name: str, p: nn.Parameter) -> nn.Parameter:
        layout = self._layout(name, p.shape)
        local = forward.part(p.detach(), layout).clone()
        return nn.Parameter(as_dtensor(local, layout, forward.device_mesh), requires_grad=p.requires_grad)

    def _layout(self, name: str, shape: Sequence[int]) -> Layout:
        """The layout of a parameter: that of the passes that learn."""
        programs = [self.passes[True].forward, self.passes[True].backward]
        found = (p.input_names[name].layout for p in programs if p is not None and name in p.input_names)
        return next(found, Layout.of(self.plan.mesh, shape))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passes, given = self.passes[self.model.training], self._arguments(args, kwargs)
        self._require_same_values(given)
        tensors = self._given(passes, self._as_example(given))
        self.calls += 1
        own = dict(self.model.named_parameters())
        names = [n for n in passes.captured.program.input_names if n in self.names]
        outs = _ShardedFunction.apply(self, passes, tensors, tuple(names), *(own[self.names[n]] for n in names))
        return tree_unflatten(list(outs), passes.nest)

    def _require_same_values(self, given: Mapping[str, Any]) -> None:
        """What was read from Python is as it was: these passes are of that, and are not made again."""
        changes = self.reads[self.model.training].changes()
        before, now = _values(self.given), _values(given)
        changes += [Change(f"{n} of the call", before.get(n), now.get(n)) for n in {**before, **now} if before.get(n) != now.get(n)]
        for n, p in self.model.named_parameters():
            changes += [Change(f"model.{n}.requires_grad", False, True)] if p.requires_grad and n not in self.learning else []
        if changes:
            raise RuntimeFault(
                "the module was parallelized for other values in Python",
                needed="all it reads as it was then",
                found=str(changes[0]),
                try_=("weft.shard after it is set: modes, hooks, requires_grad (what learns may be frozen later), and an example with all arguments",
                      "weft.parallelize, which traces again, or pass the value as a tensor"),
            )  # fmt: skip
        tensors = [(n, x) for name, given_ in given.items() for n, x in leaves(name, given_) if isinstance(x, Tensor)]
        moving = [n for n, x in tensors if x.requires_grad and torch.is_grad_enabled()]
        if moving:
            raise RuntimeFault(
                "the module's backward pass gives the gradients of its parameters alone",
                needed="arguments that need no gradient",
                found=f"{moving[0]} with requires_grad=True",
                try_=("weft.shard(...) of the module that makes them too", "x.detach(), where no gradient is meant to pass"),
            )

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, those of `*args` and `**kwargs` each by its own, without what is left at None or its default."""
        named, known = _named(self.signature, args, kwargs), self.signature.parameters
        usual = {n: known[n].default if n in known else None for n in named}
        return {n: x for n, x in named.items() if x is not None and not unchanged(x, usual[n])}

    def _as_example(self, given: Mapping[str, Any]) -> Any:
        """A call's arguments nested as the example's are."""
        if isinstance(self.example, Mapping):
            return {k: given.get(k, x) for k, x in self.example.items()}
        args, _ = _call_of(self.example)
        batch = [given.get(n, x) for n, x in _named(self.signature, args, {}).items()]
        return batch if isinstance(self.example, (tuple, list)) else batch[0]

    def _given(self, passes: Passes, batch: Any) -> dict[str, Tensor]:
        """This rank's part of the batch, of buffers and constants, and the seed."""
        named = named_batch(batch if passes.backward is None else {"given": batch})
        buffers = {readable(f"buffer.{n}"): b for n, b in self.model.named_buffers()}
        known = {**named, **buffers, **passes.captured.constants, "seed": torch.tensor(self.seed + self.calls)}
        out = {}
        for program in (passes.forward, passes.backward):
            for name, node in program.input_names.items() if program is not None else ():
                if node.role is not Role.PARAMETER and not name.startswith((CTS, "kept.")):
                    out[name] = self._part(name, known.get(name), node.type)
        return out

    def _part(self, name: str, x: Any, type_: Type) -> Tensor:
        coords = self.compiled(self.passes[True].forward).coords
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        part = None if x is None else part_of_batch(x, type_, coords)
        if part is None:
            raise RuntimeFault(
                f"the module was parallelized for another batch: {name.removeprefix(GIVEN).lstrip('.') or 'its only input'}",
                needed=f"{list(type_.shape)}, or this rank's {list(type_.layout.local_shape(coords))}",
                found="nothing" if x is None else str(list(x.shape)),
                try_="parallelize it with an example of this shape, or pad the batch",
            )
        return part.to(self.device)


def captured_with_nest(model: nn.Module, example: Any) -> tuple[Captured, TreeSpec]:
    """The forward pass, and how what it returns is nested. It may change nothing in Python."""
    seen: list[TreeSpec] = []
    hook = model.register_forward_hook(lambda _m, _a, out: seen.append(tree_flatten(out)[1]))
    try:
        captured = capture_unchanged(
            model, example, "a forward pass that changes nothing but buffers", "weft.parallelize, which traces such a step at every call"
        )
    finally:
        hook.remove()
    return captured, seen[-1]


def with_gradients(model: nn.Module, example: Any, first: Captured | None = None) -> Captured:
    """The forward and backward pass; `first` is the forward pass, where it is known."""
    program = (capture(model, example) if first is None else first).program
    results = [n for name, n in program.outputs if name not in dict(program.state)]
    return joint(model, example, [torch.empty(n.shape, dtype=n.dtype) for n in results])


def joint(model: nn.Module, example: Any, cts: Sequence[Tensor]) -> Captured:
    """The results of a model on a batch, and the gradients of its parameters for given gradients of the results."""

    def both(batch: Any) -> Any:
        outs = tree_flatten(called(model, batch["given"]))[0]
        moving = {n: p for n, p in model.named_parameters() if n in learning}
        floats = [(out, ct) for out, ct in zip(outs, batch["cts"], strict=True) if out.is_floating_point()]
        grads = torch.autograd.grad([x for x, _ in floats], list(moving.values()), [ct for _, ct in floats], allow_unused=True)
        return {"out": outs, "grads": {n: g for n, g in zip(moving, grads, strict=True) if g is not None}}

    learning = {n for n, p in model.named_parameters() if p.requires_grad}
    unused = torch.optim.SGD(model.parameters(), lr=0.0)
    return capture_step(both, model, unused, {"given": example, "cts": list(cts)}, name=type(model).__name__)


def _call_of(example: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments that an example stands for."""
    if isinstance(example, Mapping):
        return (), example
    return (example, {}) if isinstance(example, (tuple, list)) else ((example,), {})


def _named(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that a function has for them."""
    named: dict[str, Any] = {}
    for name, x in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        some = kind is inspect.Parameter.VAR_POSITIONAL
        named |= {f"{name}.{i}": item for i, item in enumerate(x)} if some else x if kind is inspect.Parameter.VAR_KEYWORD else {name: x}
    return named


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, flags and texts of a call, and what its tensors are called."""
    kinds = (bool, int, float, str)
    found = [(n, x) for name, x in given.items() for n, x in leaves(name, x)]
    return {n: x if isinstance(x, kinds) else "a tensor" for n, x in found if isinstance(x, (*kinds, Tensor))}


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside, the module has no hooks of its own; those of its parts stay."""
    stored = [(table, dict(table)) for table in map(module.__dict__.__getitem__, TABLES)]
    for table, _ in stored:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in stored:
            table.clear()
            table.update(hooks)


# -- inside autograd -------------------------------------------------------------------------------------------------------------------


class _ShardedFunction(torch.autograd.Function):
    """The sharded forward and backward as one function of the parameters."""

    @staticmethod
    def forward(ctx: Any, sharded: Sharded, passes: Passes, given: dict[str, Tensor], names: tuple[str, ...], *params: Any) -> Any:
        ctx.sharded, ctx.passes, ctx.names = sharded, passes, names
        ctx.set_materialize_grads(False)
        inputs = {**given, **dict(zip(names, params, strict=True))}
        own = {**inputs, **{readable(f"buffer.{n}"): b for n, b in sharded.model.named_buffers()}}
        written = {stored: _local(own[stored]) for _, stored in passes.captured.program.state}
        before = {n: _local(x).clone() if n in written else x for n, x in inputs.items()}
        outs, kept = _run_forward(sharded, passes, before, written)
        read = sharded.compiled(passes.backward).program.input_names if passes.backward is not None else {}
        stored = {n: x for n, x in {**before, **kept}.items() if n in read}
        ctx.stored = tuple(stored)
        ctx.save_for_backward(*stored.values())
        ctx.mark_non_differentiable(*(x for x in outs if not x.is_floating_point()))
        return outs

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        sharded, passes = ctx.sharded, ctx.passes
        if passes.backward is None:
            raise RuntimeFault(
                "the module ran in evaluation mode, for which weft.shard makes no backward pass",
                needed="model.train() before the call whose results are differentiated", found="model.eval()",
                try_="model.train(), with the parts that shall stay in evaluation mode, such as norms, put there before weft.shard",
            )  # fmt: skip
        run = sharded.compiled(passes.backward)
        inputs = {**dict(zip(ctx.stored, map(_local, ctx.saved_tensors), strict=True)), **_gradients(run, passes, cts)}
        with torch.no_grad():
            out = run({n: inputs[n] for n in run.program.input_names})
        given = {name.replace(OUT, CTS, 1) for name, ct in zip(passes.outs, cts, strict=True) if ct is not None}
        reached = [n if passes.reached_from(n) & given else "" for n in ctx.names]  # torch gives no gradient, not zeros, to what no differentiated result reads
        return None, None, None, None, *(_gradient(run, n, out) for n in reached)


def _run_forward(
    sharded: Sharded, passes: Passes, inputs: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """The results as DTensors, and what the backward pass needs of the way there; buffers, and parameters that are scaled in place, are written."""
    run = sharded.compiled(passes.forward)
    with torch.no_grad():
        out = run({n: _local(inputs[n]) for n in run.program.input_names})
        for name, stored in passes.captured.program.state:
            written[stored].copy_(out[name])
    results = tuple(as_dtensor(out[n], run.program.output_names[n].layout, run.device_mesh) for n in passes.outs)
    return results, {n: x for n, x in out.items() if n.startswith("kept.")}


def _local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach()  # type: ignore[no-any-return]


def _gradients(run: Compiled, passes: Passes, cts: Sequence[Any]) -> dict[str, Tensor]:
    """What autograd gives for the results, laid out as the backward pass reads it."""
    out = {}
    for name, ct in zip(passes.outs, cts, strict=True):
        key = name.replace(OUT, CTS, 1)
        node = run.program.input_names.get(key)
        if node is not None:
            out[key] = _at(torch.zeros(node.shape, dtype=node.dtype, device=run.device) if ct is None else ct, node.layout, run)
    return out


def _at(ct: Any, layout: Layout, run: Compiled) -> Tensor:
    if hasattr(ct, "redistribute"):
        return ct.redistribute(run.device_mesh, to_placements(layout)).to_local().contiguous()  # type: ignore[no-any-return]
    return interp.take_local(ct, layout, run.coords).contiguous()


def _gradient_of(name: str) -> str:
    """The name of a parameter's gradient among the outputs of a program."""
    return f"{GRAD}.{part(original(name.removeprefix('param.')))}"


def _gradient(run: Compiled, name: str, out: Mapping[str, Tensor]) -> Any:
    key = _gradient_of(name)
    return as_dtensor(out[key], run.program.output_names[key].layout, run.device_mesh) if key in out else None
