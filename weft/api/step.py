"""A training step on this rank: forward, backward and update as one call, and its state, laid out as the plan says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from weft import interp
from weft.api.check_blocks import filled
from weft.api.check_step import Case, Verdict, check_current_state
from weft.api.checkpoint import Store, as_dtensor
from weft.api.compiled import Compiled
from weft.api.data import Rows, Shapes, part_of_batch, rows_of
from weft.api.deviation import moved
from weft.api.documents import work_of
from weft.api.eager import How
from weft.api.evaluation import Evaluation
from weft.api.external_writes import OptimizerState, own_of
from weft.api.micro_batches import MicroBatches
from weft.api.retracing import MOST, Variants
from weft.api.safety import Losses, exactly, require_exact, seen_by_first
from weft.api.step_state import StepState, gathered
from weft.api.watch import watch
from weft.api.weights import SHARD, files_for, weights_of, write_folder, write_index
from weft.core.errors import RuntimeFault
from weft.core.names import original
from weft.core.node import Type
from weft.core.program import Program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.frontend.capture.batches import named_batch, samples_in
from weft.frontend.capture.optimizer_settings import COUNT, settings_home
from weft.frontend.capture.optimizers import Update, note_updates, of_shapes, put_state
from weft.frontend.capture.restored import as_before
from weft.passes import Draft
from weft.runtime.agree import from_first, rank, world
from weft.runtime.faults import lost_connections
from weft.transform.noise import INPUT, Noise, Probe

if TYPE_CHECKING:
    from weft.api.auto import Decision
    from weft.api.record import Recorder
    from weft.rewrite.check import Report

Loss = Callable[[nn.Module, Any], Tensor]
Values = Mapping[str, Tensor]


class Step(StepState):
    """Forward, backward and update as one call; its state is laid out as the plan says."""

    def __init__(self, captured: Captured, draft: Draft, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, seed: int) -> None:
        """`captured` is the step before rules rewrote it, `draft` what all passes made of it: one program or, of micro-batches, stages and the update."""
        program = cast(Program, draft.program if draft.pipeline is None else draft.pipeline.update)
        self.captured, self.program, self.plan = captured, program, draft.spec
        self.model, self.loss, self.optimizer, self.seed = model, loss, optimizer, seed
        watch()
        self.compiled = Compiled(program, device=draft.device, donate=True)
        self.micro_batches = MicroBatches(draft, self.compiled) if draft.pipeline is not None else None
        self.steps = 0
        self.grad_norm: Tensor | None = None
        self.decision: Decision | None = None
        self.report: Report | None = None  # of the check of the plan
        self.verified: Verdict | None = None  # of the comparison with torch, on rank 0
        self.unjudged: Callable[[Any], Verdict | None] | None = None  # makes that comparison, where it is yet to be made
        self.how, self.checked = How(), True  # whether what is made later shall be compared with torch too
        self.source = cast(Captured, draft.source).program  # what was placed: the captured step, or that after the moves of a plan file
        self.moves = draft.moves
        self.losses = Losses("ignore")
        self.deterministic: bool | str = False
        self.traced = captured.program  # as it was captured, before anything was made of it
        self.reads = captured.reads
        self.forms: Variants | None = None
        own = {n: node.type for n, node in program.inputs_for(Role.BATCH).items()}
        self._batch_types = own if self.micro_batches is None else self.micro_batches.batch_types
        known = {**captured.states, **captured.parameters, **captured.buffers, **captured.constants}
        self._state_types = {n: node.type for n, node in program.input_names.items() if n in known}
        self._missed = dict.fromkeys(captured.states.values(), 0)
        self._state = self._initial_state()
        self._updates, self._counts = dict(captured.updates), dict(captured.counts)
        self.own, self.optimizer_state = own_of(model), OptimizerState(optimizer)
        self._seen, self.synced = self.own.now, True
        self._evaluations: list[Evaluation] = []
        self.noise = Noise()
        self._probe = Probe(program, self.compiled.coords, self.noise, draft.device) if INPUT in program.input_names else None
        self.recorder: Recorder | None = None

    def _initial_state(self) -> dict[str, Tensor]:
        """This rank's part of parameters, buffers, constants and fresh optimizer state."""
        values = {**self.captured.parameters, **self.captured.buffers, **self.captured.constants}
        here = {n: x for n, x in self.program.input_names.items() if x.layout.present(self.compiled.coords)}  # the rest another stage has
        unread = {n: (x.layout, x.dtype) for n, x in here.items() if n in values and values[n].is_meta}
        out = weights_of(self.model).locals(unread, self.compiled.coords, self.compiled.device) if unread else {}
        for name, node in here.items():
            if name in out:
                continue
            shape = node.layout.local_shape(self.compiled.coords)
            if name in self.captured.begun:
                out[name] = self._local(name, self.captured.begun[name].detach()).clone()
            elif name in self.captured.states:
                out[name] = torch.zeros(shape, dtype=node.dtype, device=self.compiled.device)
            elif name in values:
                out[name] = self._local(name, values[name].detach()).clone()
        return out

    def _local(self, name: str, value: Tensor) -> Tensor:
        return self.compiled.part(value, self._state_types[name].layout)

    # -- running ---------------------------------------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> Tensor:
        """One step on a global batch, or on this rank's part of one; gives the loss of the global batch."""
        self.ready(batch)
        run = self.run if self.recorder is None else self.recorder.call
        given, skipped = self._batch(batch), self.skipped
        with exactly(self.deterministic), lost_connections(f"step {self.steps} of {self.captured.program.name}"):
            out = run(given, self._state)
        if self._probe is not None:
            self._probe.take(out)
        for name, inp in self.program.state:
            if inp in self._state:
                self._state[inp] = out[name]
        self.steps += 1
        self.grad_norm = out.get("grad_norm")
        self.losses.see(out["loss"], self.grad_norm, self.steps, given)
        if self.skipped > skipped and self.micro_batches is not None:
            self.micro_batches.take_back(self._state)
        self.stepped(self.skipped > skipped)
        self.tell(out["loss"])
        return out["loss"]

    def run(self, given: Values, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """All of a step on this rank's part of a batch; `state` is overwritten as far as the update may."""
        of_batch = given if self.micro_batches is None else self.micro_batches.run(given, state, self.seed + self.steps)
        return self.compiled({**state, **of_batch, **self._numbers()})

    def set_safety(self, on_nan: str, deterministic: bool | str) -> None:
        """What is done about losses that are NaN or Inf, and whether every run must give the same bits."""
        if deterministic:
            require_exact(self.compiled.device)
        self.losses, self.deterministic = Losses(on_nan), deterministic

    @property
    def skipped(self) -> int:
        """Steps whose loss was NaN or Inf and which changed nothing."""
        return self.losses.skipped

    def record(self, folder: str | None, *, cluster: str = "", progress: bool = True) -> Recorder:
        """Watch the steps from here on: print how training goes, and write a run for `weft report` into the folder."""
        from weft.api.record import Recorder

        self.recorder = Recorder(self, folder, cluster, progress)
        return self.recorder

    def eval(self, batch: Any) -> Tensor:
        """The loss alone, in evaluation mode; nothing changes."""
        self.take_written()
        example, brought = batch, Shapes.of(batch)
        if self.forms is not None:
            self.forms.asked().forget()
            example, brought = self.forms.evaluated(self, batch, [e.batch_types for e in self._evaluations])
        found = next((e for e in self._evaluations if e.is_for(batch, brought)), None) or Evaluation(self, example, brought)
        if found.lasts and found not in self._evaluations:
            self._evaluations = [*self._evaluations[-MOST:], found]
        return found(batch)

    def _batch(self, batch: Any, types: Mapping[str, Type] | None = None) -> dict[str, Tensor]:
        given = {**named_batch(batch), **self.lifted(batch)}
        out = {}
        for name, type_ in (self._batch_types if types is None else types).items():
            if name not in given:
                raise RuntimeFault(
                    f"the batch has no {name.removeprefix('batch.')!r}", needed=", ".join(self._batch_types), found=", ".join(given)
                )
            out[name] = self._part(name, type_, given[name]).to(self.compiled.device)
        return out | {n: x for n, x in given.items() if n.startswith("value.")}

    def _part(self, name: str, type_: Type, x: Tensor) -> Tensor:
        part = part_of_batch(x, type_, self.compiled.coords)
        if part is None:
            raise RuntimeFault(
                f"batch {name.removeprefix('batch.')!r} on rank {self.compiled.rank}",
                needed=f"{list(type_.shape)}, or this rank's {list(type_.layout.local_shape(self.compiled.coords))}",
                found=str(list(x.shape)),
                try_="parallelize with an example of this shape, drop the last batch, or pad it",
            )
        return part

    def rows(
        self, samples: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False, documents: Sequence[Iterable[int]] | None = None
    ) -> Rows:
        """This rank's rows of every batch of a data set, from the step reached on: `DataLoader(data, batch_sampler=step.rows(len(data)))`; all
        rows in micro-batches, which take full batches. `documents` are the lengths of the documents packed into each sample: then ranks and
        micro-batches get samples of about as many flops."""
        if self.micro_batches is not None:
            size, mine = self.micro_batches.samples, torch.arange
        else:
            types = [t for t in self._batch_types.values() if t.shape]
            size = samples_in(t.shape for t in types)
            mine = functools.partial(rows_of, next(t for t in types if t.shape[0] == size), self.compiled.coords)
        work = work_of(self.traced, documents, samples) if documents is not None else None
        return Rows(samples, size, mine, shuffle=shuffle, seed=seed, start=self.steps, drop_last=drop_last, work=work)

    @property
    def shapes(self) -> str:
        """The batches that are compiled for, in words."""
        return self.forms.ranges.compiled_for() if self.forms is not None else ""

    def _numbers(self) -> dict[str, Tensor]:
        """What changes from step to step by itself: settings of the optimizer, the step count, the seed of dropout."""
        settings = self._settings()
        taken = self.steps - self.skipped
        counts = {f"{COUNT}.{p.removeprefix('param.')}": taken - missed for p, missed in self._missed.items()}
        values = {**settings, **counts, "step": taken, "seed": self.seed + self.steps}
        kinds = {n: torch.float64 if n in settings else torch.int64 for n in values}
        # written by the device itself: a copy from the host would wait for all it has been given before
        own = {n: torch.full((), v, dtype=kinds[n], device=self.compiled.device) for n, v in values.items() if n in self.program.input_names}
        return own | (self._probe.inputs() if self._probe is not None else {})

    # -- state -----------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Tensor]:
        """Every parameter, buffer and optimizer tensor that this rank has a part of, by name: DTensors over the step's mesh, on one process plain tensors."""
        return {n: as_dtensor(x, self._state_types[n].layout, self.compiled.device_mesh) for n, x in self._state.items()}

    @property
    def local_state(self) -> dict[str, Tensor]:
        """This rank's part of every parameter, buffer and optimizer tensor, by name."""
        return self._state

    @property
    def state_names(self) -> list[str]:
        """Everything in the state of any rank."""
        return list(self._state_types)

    def checkpoints(self, folder: str, keep: int = 2) -> Store:
        """Where to save and restore: `store = step.checkpoints(folder); store.restore(); ...; store.save(wait=False)`."""
        return Store(folder, self, keep)

    def full(self, name: str) -> Tensor:
        """A full state tensor, on every rank. Collective: every rank must call it."""
        return gathered(self._state_types[name], self._state.get(name), self.compiled)

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter, buffer and optimizer tensor in full. Collective: every rank must call it."""
        self._meet("state_dict()")
        names = [n for n in self.state_names if n not in self.captured.constants]
        counts = {"steps": self.steps, "skipped": self.skipped, **{f"missed.{p}": k for p, k in self.missed.items() if k}}
        idle = {n: x.detach().to(self.compiled.device, copy=True) for n, x in self.idle().items()}
        return {n: self.full(n) for n in names} | idle | {n: torch.tensor(k) for n, k in counts.items()}

    def save_pretrained(self, folder: str | Path, size: int = SHARD) -> None:
        """Write the model as Hugging Face does: its config, safetensors files of at most `size` bytes, an index. Every rank must ask, and writes
        some of the files; none holds more than one full tensor."""
        self._meet("save_pretrained()")
        where, mine = Path(folder), {id(t): n for n, t in (*self.captured.parameters.items(), *self.captured.buffers.items())}
        kept: dict[str, tuple[str, Tensor]] = {}  # by the names in the files: the state's name, and the module's own tensor
        for name, t in self.model.state_dict(keep_vars=True).items():
            if isinstance(t, Tensor) and not any(t is other for _, other in kept.values()):
                kept[name] = mine.get(id(t), ""), t
        lost = [n for n, (of, t) in kept.items() if not of and t.is_meta]
        if lost:
            raise RuntimeFault("tensors of the module have no values", needed="tensors that the step reads", found=", ".join(lost[:3]))
        files = files_for({n: (t.dtype, tuple(t.shape)) for n, (_, t) in kept.items()}, size)
        where.mkdir(parents=True, exist_ok=True)
        write_folder(where, files, lambda n: self.full(kept[n][0]) if kept[n][0] else kept[n][1], rank(), world())
        if rank() == 0:
            write_index(where, files)
            for config in (getattr(self.model, "config", None), getattr(self.model, "generation_config", None)):
                if hasattr(config, "save_pretrained"):
                    config.save_pretrained(where)
        self._meet("the end of save_pretrained()")

    def _meet(self, what: str) -> None:
        """Refuse what only some ranks ask for, after waiting for the others: it takes all. What was written since `sync_model` is part of the state."""
        try:
            if self.forms is not None:
                self.forms.rank_sync.answers(None, what)
        except RuntimeFault as error:
            raise RuntimeFault(
                f"not every rank has called {what}", needed=f"step.{what.split()[-1]} on all ranks: each has a part of the state", found=error.message,
                try_="call it outside of `if rank == 0:`, and use the result there",
            ) from error  # fmt: skip
        if self.synced:
            self.take_written()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take full tensors, as `state_dict` gives them; each rank keeps its shards."""
        new = [n for n in self.captured.states if n not in state]
        self._load(state, [*new] if len(new) == len(self.captured.states) and int(state.get("steps", 0)) else [])

    def _load(self, state: Mapping[str, Tensor], missing: Sequence[str] = ()) -> None:
        """What the optimizer has not updated in that state begins here."""
        new = {n: p for n, p in self.captured.states.items() if n not in state}
        kinds = {n.removesuffix(p.removeprefix("param")) for n, p in self.captured.states.items()} | {"param", "buffer"}
        later = {n: x for n, x in state.items() if n not in self._state_types and n not in ("steps", "skipped") and not n.startswith("missed.")}
        missing = [*missing, *(n for n in self._state if n not in self.captured.constants and n not in state and n not in new)]
        odd = [n for n in later if n.partition(".")[0] not in kinds]
        if missing or odd:
            raise RuntimeFault(
                "the state does not belong to this model and optimizer",
                needed=f"{missing[0]} and {len(missing) - 1} more" if missing else f"state of {type(self.optimizer).__name__}",
                found=f"{len(state)} other tensors" if missing else odd[0],
            )
        fresh, idle = self._initial_state() if new else {}, self.idle()
        for n in self._state:
            if n in state or n in fresh:
                self._state[n] = self._local(n, state[n]).clone() if n in state else fresh[n]
        with torch.no_grad():
            for n in later.keys() & idle.keys():
                idle[n].copy_(later[n])
        self.keep_for_later({n: x.to(self.compiled.device) for n, x in later.items() if n not in idle})
        missed = {n.removeprefix("missed."): int(k) for n, k in state.items() if n.startswith("missed.")}
        steps, skipped = int(state["steps"]), int(state.get("skipped", 0))
        self.resume(steps, skipped, {**missed, **dict.fromkeys(new.values(), steps - skipped)})

    def take_state(self, other: Step) -> None:
        """Go on where another step of the same model is. Tensors of the same layout are taken as they are; else it is collective."""
        mine, theirs = self._state_types, other._state_types
        synced = other.synced and other.model is self.model
        if self.program.mesh == other.program.mesh and all(n in theirs and mine[n].layout == theirs[n].layout for n in self._state):
            fixed = other.captured.constants
            self._state_types = {**{n: t for n, t in theirs.items() if n not in fixed}, **mine}
            self._state = {n: x for n, x in other._state.items() if n in self._state_types and (n in mine or n not in fixed)}
            self.resume(other.steps, other.skipped, other.missed)
        else:
            self._load(other.state_dict())
        self.synced = synced

    def sync_model(self) -> nn.Module:
        """The user's module with the trained values in it; every rank must ask."""
        self._meet("sync_model()")
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        if any(t.is_meta for t in own.values()):
            raise RuntimeFault(
                "the module is on the meta device, which holds no values", needed="a module with values", found='one made in `with torch.device("meta")`',
                try_="step.save_pretrained(folder)",
            )  # fmt: skip
        with torch.no_grad():
            for name in self.state_names:
                if name in self.captured.parameters or name in self.captured.buffers:
                    own[original(name.partition(".")[2])].copy_(self.full(name))
        self.remember(synced=True)
        return self.model

    def sync_optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer with the state that the steps have led to, as torch keeps it; every rank must ask."""
        self._meet("sync_optimizer()")
        own = dict(self.model.named_parameters())
        updates: dict[Tensor, int] = {}
        for name, update in {**self._taken_over(), **self._updates}.items():
            if name.startswith("group."):
                first = next(k for k in self._state_types if k.startswith(f"group_{name.removeprefix('group.')}_"))
                at, before = first.partition(".")[2], f"group_{name.removeprefix('group.')}_"
                values = {s: self.full(f"{before}{s}.{at}") for s in update.outputs}
                put_state(settings_home(self.optimizer, name.removeprefix("group.")), update, values, torch.device("cpu"))
                continue
            p = own[original(name.removeprefix("param."))]
            values = {s: self.full(f"{s}.{name.removeprefix('param.')}") for s in update.outputs if s != "param" and s not in update.counted}
            taken = self.steps - self.skipped - self.missed.get(name, 0)
            if update.counted:
                updates[p] = taken
                values |= {s: torch.tensor(float(self._counts.get(name, 0) + taken)) for s in update.counted}
            if values:
                put_state(self.optimizer.state[p], update, values, p.device)
        note_updates(self.optimizer, updates)
        self.optimizer_state.remember()
        return self.optimizer

    def _taken_over(self) -> dict[str, Update]:
        """Of parameters with state from another run that no program has updated here, the update of one that keeps the same kinds of state."""
        state: dict[str, dict[str, tuple[int, ...]]] = {}
        for n, type_ in self._state_types.items():
            kind, _, at = n.partition(".")
            if kind not in ("param", "buffer") and not kind.startswith("group_") and f"param.{at}" not in self._updates:
                state.setdefault(f"param.{at}", {})[kind] = type_.shape
        known = {frozenset(u.outputs) - {"param", *u.counted}: u for n, u in self._updates.items() if not n.startswith("group.")}
        return {p: of_shapes(known[frozenset(kinds)], kinds) for p, kinds in state.items() if frozenset(kinds) in known}

    # -- trust -----------------------------------------------------------------------------------------------------------------

    def check(self, batch: Any, tolerance: float = 1e-4) -> float:
        """The largest relative difference between this step and one-device torch, over the loss and every updated tensor.

        The step is tried on a copy of the state; nothing changes. The batch must be a global one.
        """
        self.ready(batch, exact=not self.lifts)
        want = self._on_one_device(batch)
        got = self.run(self._batch(batch), {n: x.clone() for n, x in self._state.items()})
        found = {name: gathered(node.type, got.get(name), self.compiled) for name, node in self.program.outputs if name in want}
        own = self._close(found, want, tolerance, lambda: self._on_one_device(batch, moved))
        full = self._of_full_batch
        return own if full is None else max(own, self._against_torch(full, batch, self._inputs(batch)))

    @property
    def lifts(self) -> bool:
        """Whether numbers in Python may become inputs."""
        return self.micro_batches is None

    @property
    def _of_full_batch(self) -> Captured | None:
        """The step of a full batch as it was captured; none where micro-batches go by themselves."""
        return self.captured if self.micro_batches is None else self.micro_batches.micro.full

    def _inputs(self, batch: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
        """All that a step on one device reads, changed."""
        values = {n: change(self.full(n)) for n in self.state_names} | self._numbers()
        values |= {n: change(x).to(self.compiled.device) for n, x in {**named_batch(batch), **self.lifted(batch)}.items()}
        return values if self.micro_batches is None else values | self.micro_batches.seeds(0, self.seed + self.steps)

    def _on_one_device(self, batch: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> Values:
        """The captured step of the full batch, or micro-batch by micro-batch, by the interpreter, from changed inputs."""
        values, full = self._inputs(batch, change), self._of_full_batch
        if full is None:
            return cast(MicroBatches, self.micro_batches).one_by_one(self.captured, batch, values, change, self.seed + self.steps)
        return interp.run_global(full.program, {n: values[n] for n in full.program.input_names})

    def _against_torch(self, captured: Captured, batch: Any, inputs: Values) -> float:
        """The largest relative difference between the captured step and the user's own module in plain torch."""
        case = Case(self.model, self.loss, self.optimizer, self.how, self.compiled.device)
        given = {n: inputs[n] for n, node in captured.program.input_names.items() if node.role is not Role.BATCH}
        verdict = seen_by_first(lambda: check_current_state(captured, case, batch, given))
        return float(from_first(verdict.worst if verdict is not None else 0.0))

    def check_reached_state(self, batch: Any) -> None:
        """Compare the program with torch, both from the state reached."""
        full = self._of_full_batch
        if self.checked and full is not None:
            batch = filled(batch, self.compiled.device)
            with as_before(full.reads):
                self._against_torch(full, batch, self._inputs(batch))

    def _close(self, found: Values, want: Values, tolerance: float, again: Callable[[], Values] | None = None) -> float:
        """The largest relative difference between what was found and what was wanted; too large a one is refused.

        Where rounding alone moves one device's own result (Adam divides a gradient that is nothing but noise by its size), so
        much is allowed: it is learnt by running one device `again` from inputs moved in their last digit.
        """
        floats = {n: x for n, x in found.items() if x.is_floating_point()}
        differences = {n: float((x - want[n]).abs().max()) if x.numel() else 0.0 for n, x in floats.items()}
        size = {n: float(want[n].abs().max().clamp(min=1e-12)) if x.numel() else 1.0 for n, x in floats.items()}
        if again is not None and not all(differences[n] <= tolerance * size[n] for n in differences):
            moved = again()
            differences = {n: max(d - 8 * float((moved[n] - want[n]).abs().max()), 0.0) if d == d else d for n, d in differences.items()}
        worst = max(differences, key=lambda n: (differences[n] != differences[n], differences[n] / size[n]))
        if not differences[worst] <= tolerance * size[worst]:
            raise RuntimeFault(
                f"the step under {self.plan} does not equal one device",
                needed=f"a relative difference up to {tolerance:g} beyond what rounding does to one device",
                found=f"{differences[worst] / size[worst]:.3g} in {worst}",
                try_=f"step.check(batch, tolerance=...) if that is small for {str(floats[worst].dtype).removeprefix('torch.')}; else report it",
            )
        return differences[worst] / size[worst]
