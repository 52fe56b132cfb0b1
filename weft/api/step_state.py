"""What a step has to run one program now and another later: state by name, laid out as the program at hand wants it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft import interp
from weft.api.external_writes import ExternalWrites, OptimizerState, digest
from weft.api.watch import launched
from weft.core.errors import RuntimeFault
from weft.core.layout import Layout
from weft.core.names import original, readable
from weft.core.node import Type
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.optimizer_settings import COUNT, all_settings, is_given, number
from weft.frontend.capture.optimizers import Update
from weft.runtime.agree import rank

if TYPE_CHECKING:
    from weft.api.retracing import Variants

# what belongs to the run, whichever program it runs
RUNNING = frozenset({"steps", "losses", "deterministic", "recorder", "decision", "noise", "grad_norm", "forms", "seed", "model", "loss",
                     "optimizer", "_state", "_state_types", "_missed", "_evaluations", "own", "optimizer_state", "_seen", "synced", "listeners",
                     "_updates", "_counts"})  # fmt: skip


class StepState:
    """What a step has to run one program now and another later: state by name, laid out as the program at hand wants it."""

    captured: Captured
    model: nn.Module
    optimizer: torch.optim.Optimizer
    compiled: Any
    program: Program
    steps: int
    skipped: int
    losses: Any
    traced: Program
    reads: Reads | None
    forms: Variants | None
    own: ExternalWrites
    optimizer_state: OptimizerState
    _seen: tuple[int, int]
    synced: bool  # whether the user's module has the values of the step: at the beginning, and from `sync_model` to the next step
    _updates: dict[str, Update]  # of every parameter that any program updates
    _counts: dict[str, int]  # and how often the optimizer had updated it before
    _state: dict[str, Tensor]
    _state_types: dict[str, Type]
    _batch_types: Mapping[str, Type]
    _probe: Any
    noise: Any
    grad_norm: Tensor | None
    listeners: list[Callable[[int, dict[str, float]], Any]] = []  # noqa: RUF012 - replaced, never added to
    _missed: dict[str, int]  # steps in which a parameter was not updated, of all that any program updates

    def ready(self, batch: Any, exact: bool = False) -> None:
        """Before a call: the program that what Python says now asks for, with tensors kept there as they are now; `exact`: compiled for this very shape."""
        self.take_written()
        if self.forms is not None:
            self.forms.choose(self, batch, exact)
            numbers = self.reads.numbers(batch) if self.reads is not None else {}
            self.forms.rank_sync.see({**self._settings(), **numbers})

    def remember(self, synced: bool) -> None:
        """The module is known as it is now."""
        self.own.remember()
        self._seen, self.synced = self.own.now, synced

    def take_written(self) -> None:
        """Values that the user, or another step, wrote into the module become the step's; refused where they were made of old ones."""
        if self.optimizer_state.written():
            raise RuntimeFault(
                "the optimizer's state was changed after the step was made",
                needed="state that the optimizer has when it is given to parallelize: from then on the step keeps it",
                found=f"other state of {type(self.optimizer).__name__} at step {self.steps}",
                try_=("optimizer.load_state_dict(...) before weft.parallelize(...)", "step.checkpoints(folder).restore() for a saved run"),
            )
        self._require_newest()
        written = self.own.written() if self.own.times == self._seen[0] else self.own.everything()
        if not written:
            return
        if not self.synced:
            names = [original(n.partition(".")[2]) for n in written]
            raise RuntimeFault(
                "values were written into the module while the step has others",
                needed="step.sync_model() before the module is read or written: after a step its values are old ones",
                found=f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} written after step {self.steps}",
                try_=("step.sync_model(), then write, then step(batch)", "step.load_state_dict(...), which writes into the step itself"),
            )
        answers = self.forms.rank_sync.answers(digest(written), "what was written into the module") if self.forms is not None else []
        if len(set(answers)) > 1:
            raise RuntimeFault(
                "ranks have written other values into the module",
                needed="the same values on every rank",
                found=f"rank {next(r for r, answer in enumerate(answers) if answer != answers[0])} has others than rank 0",
                try_="load the same file on every rank",
            )
        for name in [n for n in written if n in self._state]:
            self._state[name] = self.compiled.part(written[name].detach(), self._state_types[name].layout).clone()
        self.remember(synced=True)

    def _require_newest(self) -> None:
        """Refuse to go on from values that another step of the module has trained meanwhile, and keeps."""
        other = self.own.trained_by()
        if other is not None and other is not self and not other.synced and self.own.now[1] != self._seen[1]:
            raise RuntimeFault(
                "another step of this module has trained it since",
                needed="step.sync_model() of the one step before the other is called: each keeps its own values",
                found=f"step {other.steps} of the other, whose values are not in the module",
                try_=("other.sync_model(), then step(batch), which takes them", "step.take_state(other), to go on with this one alone"),
            )

    def _settings(self) -> dict[str, float]:
        """The optimizer's settings that are inputs, as they are now."""
        found = all_settings(self.optimizer)
        return {f"{k}.{g}": x for g, s in found.items() for k, x in s.numbers.items() if is_given(k, self.captured.given)}

    def on_step(self, tell: Callable[[int, dict[str, float]], Any]) -> None:
        """Call `tell(step, values)` after every step, on rank 0: loss, gradient norm and rates, as W&B, TensorBoard and others take them."""
        self.listeners = [*self.listeners, tell]

    def tell(self, loss: Tensor) -> None:
        """The values of the step just taken, to all who listen."""
        if self.listeners and rank() == 0:
            rates = {f"lr.{i}" if i else "lr": number(g["lr"]) for i, g in enumerate(self.optimizer.param_groups)}
            norm = {} if self.grad_norm is None else {"grad_norm": float(self.grad_norm)}
            for listener in self.listeners:
                listener(self.steps, {"loss": float(loss), **norm, **rates})

    def stepped(self, skipped: bool = False) -> None:
        """After a call: which parameters it did not update. One that was skipped counts for none."""
        launched(f"step {self.steps} of {self.captured.program.name}", self.compiled.device)
        self.own.trained(self)
        self._seen, self.synced = self.own.now, False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers ask, to warn of a loop without updates
        mine = set(self.captured.states.values())
        for p in self._missed if not skipped else ():
            self._missed[p] += p not in mine

    @property
    def missed(self) -> dict[str, int]:
        """In how many of the steps taken a parameter was not updated, of those that any was."""
        return self._missed

    def resume(self, steps: int, skipped: int, missed: Mapping[str, int]) -> None:
        """Go on as a run that has come so far. What a checkpoint has of the module that no program reads was put there."""
        self.steps, self.losses.skipped = steps, skipped
        self.remember(synced=False)
        self._missed = {p: missed.get(p, 0) for p in {**self._missed, **missed}}
        if self.count_updates() and self.forms is not None:
            self.forms.given |= {COUNT}
            self.forms.kept = []

    def keep_for_later(self, state: Mapping[str, Tensor]) -> None:
        """State of an optimizer that no program of this step reads yet, in full on every rank; its parameters are no new ones."""
        self._state |= state
        self._missed = {**{f"param.{n.partition('.')[2]}": 0 for n in state if not n.startswith("group_")}, **self._missed}
        self._state_types |= {n: Type(x.dtype, Layout.of(self.program.mesh, tuple(x.shape))) for n, x in state.items()}

    def count_updates(self) -> bool:
        """Whether the program updates parameters that other steps did not; one that is new has missed all so far."""
        for p in self.captured.states.values():
            self._missed.setdefault(p, self.steps - self.skipped)
        return COUNT not in self.captured.given and any(self._missed[p] for p in self.captured.states.values())

    def idle(self) -> dict[str, Tensor]:
        """Parameters and buffers that no program has read: they are as the module has them, and a later program may read them."""
        named = (("param", self.model.named_parameters()), ("buffer", self.model.named_buffers()))
        own = {readable(f"{kind}.{n}"): x for kind, of in named for n, x in of}
        return {n: x for n, x in own.items() if n not in self._state_types and not x.is_meta}

    def layout_of(self, name: str) -> Type:
        """How a tensor of the state is laid out, by whichever program."""
        return self._state_types[name]

    def become(self, form: dict[str, Any]) -> None:
        """Run another program from here on; state goes over as it is, or is laid out anew where that program holds it otherwise."""
        state, types = form["_state"], form["_state_types"]
        fixed = {**self.captured.constants, **form["captured"].constants}
        known = {n: x for n, x in self._state.items() if n not in fixed}
        for name, type_ in types.items():
            before = self._state_types.get(name)
            if before is None or name in fixed:
                known |= {name: state[name]} if name in state else {}
            elif before.layout != type_.layout:
                full = gathered(before, known.pop(name, None), self.compiled)
                present = type_.layout.present(form["compiled"].coords)
                known |= {name: form["compiled"].part(full, type_.layout).clone()} if present else {}
        form["_state"] = {n: x for n, x in state.items() if n in fixed}
        types = {**{n: t for n, t in self._state_types.items() if n not in fixed}, **types}
        self.__dict__.update({k: x for k, x in form.items() if k not in RUNNING})
        self._updates, self._counts = {**self._updates, **self.captured.updates}, {**self._counts, **self.captured.counts}
        self._state, self._state_types = known, types
        if self._probe is not None:
            self._probe.noise = self.noise

    def read_anew(self) -> None:
        """Tensors that Python keeps, as they are now: another tensor, or other values in it."""
        for name, place in self.reads.read_anew.items() if self.reads is not None else ():
            now = place.now()
            if name in self._state and (now is not place.value or now._version != self._versions.get(name)):
                real = torch.view_as_real(now.detach().resolve_conj()) if now.is_complex() else now.detach()
                self._state[name] = self.compiled.part(real, self._state_types[name].layout).clone()
                place.value, self._versions[name] = now, now._version

    def lifted(self, batch: Any) -> dict[str, Tensor]:
        """Inputs that are numbers in Python, as they are now."""
        if self.reads is None or not self.reads.lifted:
            return {}
        numbers, kinds = self.reads.numbers(batch), self.reads.lifted
        return {n: torch.full((), x, dtype=kinds[n][1], device=self.compiled.device) for n, x in numbers.items()}

    @property
    def _versions(self) -> dict[str, int]:
        return self.__dict__.setdefault("_read_versions", {})  # type: ignore[no-any-return]


def gathered(type_: Type, local: Tensor | None, compiled: Any) -> Tensor:
    """A value in full on every rank, from what each holds, if anything."""
    layout = type_.layout
    everywhere = all(layout.where_sharded(a) is None for a in layout.mesh.axes) and not layout.partials
    if local is not None and (not dist.is_initialized() or everywhere):
        return local
    shapes = [layout.local_shape(at) if layout.present(at) else None for at in layout.mesh.places()]
    size = type_.dtype.itemsize
    most = max(math.prod(s) for s in shapes if s is not None) * size
    mine = torch.zeros(most, dtype=torch.uint8, device="cpu" if dist.get_backend() == "gloo" else compiled.device)
    if local is not None:
        mine[: local.numel() * size] = local.detach().contiguous().reshape(-1).view(torch.uint8)
    flat = [torch.empty_like(mine) for _ in shapes]
    dist.all_gather(flat, mine)
    parts = [None if s is None else x[: math.prod(s) * size].view(type_.dtype).reshape(s) for x, s in zip(flat, shapes, strict=True)]
    return interp.denote(parts, type_, tolerance=1e-5).to(compiled.device)
