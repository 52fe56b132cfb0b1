"""One step, several programs: what was traced is run as long as all it read from Python is as it was, and traced again when it is not.

A number that changes becomes an input, where the program with it as an input is shown to be the same. A step that leaves Python changed, or
draws random numbers there, is traced at every call. Programs are kept by what they compute, so that none is compiled twice.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft import interp
from weft.api.together import Together
from weft.core import cache
from weft.core.errors import CaptureError, RuntimeFault, WeftError
from weft.core.node import Node, Type, constant, make
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.frontend.capture.batches import changed, leaves
from weft.frontend.capture.guards import Change, Place, Reads, holds_traced, is_number
from weft.frontend.capture.optimizers import COUNT, number, rule_of
from weft.frontend.capture.step import named_batch
from weft.runtime import faults

if TYPE_CHECKING:
    from weft.api.parallelize import Step

MOST = 16  # programs of one step
# what belongs to the run, whichever program it runs
RUNNING = frozenset({"steps", "losses", "deterministic", "recorder", "decision", "noise", "grad_norm", "forms", "seed", "model", "loss",
                     "optimizer", "_state", "_held_as", "_missed", "_evals", "_evaluate"})  # fmt: skip

Make = Callable[..., "Step"]  # (example, known, **settings of the capture) to a step


@dataclass
class Form:
    """A program of the step, and what must hold for it to be the right one."""

    program: Program
    reads: Reads
    given: frozenset[str]
    attributes: dict[str, Any] = field(repr=False)


class Forms:
    """The programs of one step, made as they are needed."""

    def __init__(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None, example: Any, run: str = "") -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.example = changed("batch", example, lambda _, x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x)
        self.given: frozenset[str] = frozenset()
        self.impure = False
        self.make: Make | None = None
        self.kept: list[Form] = []
        self.times: Counter[str] = Counter()
        self.lifted: dict[str, tuple[Place | str, torch.dtype]] = {}
        self.unlifted: set[str] = set()
        self._settings = _settings(optimizer)
        self._agreed = 0
        self.together, self._run = Together(run), run

    # -- the first trace -----------------------------------------------------------------------------------------------

    def observed(self, run: Callable[[Reads], Any]) -> Any:
        """What `run` captures, with what it read; where it changed Python, whether doing it again would be the same is found out."""
        first = Reads(self.model, self.loss, self.example)
        made = run(first)
        if not first.left and not first.drew:
            return made
        first.undo()
        before = self._reads(alone=True)
        made = run(before)
        before.redo()
        after = self._reads(alone=True)
        try:
            again = run(after)
        except Exception as error:
            before.undo()
            if before.keeps_tensors:
                raise _keeps(before.keeps_tensors[0], error) from error
            raise
        more = [c for c in after.left if not holds_traced(c.now)]
        settled = _same(_captured(made), _captured(again)) and not (more or after.drew or before.drew)
        after.undo()
        if settled:
            before.forget_tensors()
        else:
            before.undo()
            self.impure, self.given = True, self.given | {COUNT}
            what = before.left[0].words if before.left else "random numbers drawn in Python"
            warnings.warn(f"the step changes Python as it runs ({what}): it is traced at every call", stacklevel=4)
        last = self._reads(alone=self.impure)
        made = run(last)
        last.undo()
        return made

    def _reads(self, alone: bool = False, example: Any = None) -> Reads:
        reads = Reads(self.model, self.loss, self.example if example is None else example)
        reads.shared, reads.lifted = not alone, dict(self.lifted)
        return reads

    def adopt(self, step: Step, make: Make) -> Step:
        """The first program of the step."""
        self.make, step.forms = make, self
        self.kept.append(Form(step.traced, step.reads, self.given, _own(step)))
        return step

    # -- at each call --------------------------------------------------------------------------------------------------

    def choose(self, step: Step, batch: Any) -> None:
        """Make the step run the program that this call needs."""
        if self.impure:
            self._use(step, *self._trace(step, batch, alone=True), batch)
        elif not (step.reads.hold(batch) and self._settings_hold() and self._shapes_hold(step, batch)):
            self._again(step, batch)
        step.read_anew()

    def _again(self, step: Step, batch: Any) -> None:
        changes = [*step.reads.changes(batch), *self._settings_changed(step)]
        self.times.update(c.words for c in changes)
        for form in reversed(self.kept):
            if form.given == self.given and form.reads.hold(batch) and self._fits(form, step, batch):
                self._use(step, form.reads, form, batch)
                return
        self._use(step, *self._trace(step, batch, changes), batch)

    def _trace(self, step: Step, batch: Any, changes: list[Change] | None = None, alone: bool = False) -> tuple[Reads, Form]:
        """The program that Python means now, new or known."""
        example = self._example_of(step, batch)
        numbers = [] if alone or not step.lifts else [c for c in changes or () if _may_lift(c) and c.words not in self.unlifted]
        if numbers:
            with _told_of_the_batch(step, batch):
                want = _filled_in(self._peek(example).program, {})
            for dtype in (torch.float64, torch.float32):
                lifted = self._lifted(example, want, numbers, dtype)
                if lifted is not None:
                    return lifted
            self.unlifted |= {c.words for c in numbers}
        reads = self._reads(alone, example)
        with _told_of_the_batch(step, batch):
            made = self._made(example, reads)
        if alone:
            reads.redo()
            reads.forget_tensors()
        elif reads.left or reads.drew:
            reads.undo()
        return reads, made

    def _peek(self, example: Any) -> Captured:
        """The program that Python means now, not compiled."""
        found: list[Captured] = []
        reads = self._reads(example=example)
        assert self.make is not None
        self.make(example, lambda captured: bool(found.append(captured)) or True, given=self.given, reads=reads)
        reads.undo()
        return found[0]

    def _lifted(self, example: Any, want: Any, numbers: list[Change], dtype: torch.dtype) -> tuple[Reads, Form] | None:
        """The program with these numbers as inputs; None where it cannot be shown to be the same."""
        before, values = dict(self.lifted), dict[str, float]()
        for c in numbers:
            kind = dtype if isinstance(c.now, float) else torch.int64
            batch = c.words.removesuffix(" of the batch") if c.place is None else ""
            name = batch or f"value.{len(self.lifted)}"
            self.lifted[name] = (batch or c.place, kind)  # type: ignore[assignment]
            values[name] = c.now
        reads = self._reads(example=example)
        try:
            made = self._made(example, reads, check=lambda c: _filled_in(c.program, values) == want)
        except Exception:  # numbers that Python computes with, branches on or counts by stay numbers
            reads.undo()
            made = None
        if made is None:
            self.lifted = before
            return None
        return reads, made

    def _made(self, example: Any, reads: Reads, check: Callable[[Captured], bool] | None = None) -> Any:
        assert self.make is not None
        found: list[Form | None] = []

        def known(captured: Captured) -> bool:
            """Whether this program needs no compiling: there is one already, or it is not wanted."""
            if check is not None and not check(captured):
                found[:] = [None]
                return True
            found[:] = [f for f in self.kept if f.given == self.given and f.program.outputs == captured.program.outputs][:1]
            return bool(found)

        step = self.make(example, known, given=self.given, reads=reads)
        if found:
            return found[0]
        return Form(step.traced, reads, self.given, _own(step))

    def _use(self, step: Step, reads: Reads, form: Form, batch: Any) -> None:
        form.reads = reads
        if form not in self.kept:
            self._require_room()
            self.kept.append(form)
        self._agree(form, reads, batch)
        step.become(form.attributes)
        step.reads = reads
        if step.count_updates():
            self.given |= {COUNT}
            self.kept = []
            self._use(step, *self._trace(step, batch, alone=self.impure), batch)

    def _require_room(self) -> None:
        if len(self.kept) < MOST:
            return
        words = self.times.most_common(1)[0][0] if self.times else "what the model does with Python's random numbers, or a counter"
        raise RuntimeFault(
            f"the step has been traced as {MOST} different programs",
            needed="values in Python that settle",
            found=f"{words} keeps changing",
            try_="pass it as a tensor in the batch",
        )

    # -- what else a program depends on --------------------------------------------------------------------------------

    def _settings_hold(self) -> bool:
        return self.optimizer is None or _settings(self.optimizer, self.given) == self._settings

    def _settings_changed(self, step: Step) -> list[Change]:
        """Settings that were numbers of the program become inputs; another form of the optimizer is another program, or refused."""
        if self.optimizer is None or self._settings_hold():
            return []
        groups, rules = self.optimizer.param_groups, step.captured.rules
        if len(groups) != len(rules) or [len(g["params"]) for g in groups] != [n for n, _ in self._settings]:
            raise RuntimeFault(
                "the optimizer has other parameter groups than when the step was made",
                needed=f"{len(rules)} groups of the same parameters",
                found=f"{len(groups)} groups of {', '.join(str(len(g['params'])) for g in groups)} parameters",
                try_="add all groups before parallelize",
            )
        found = []
        for i, (group, was) in enumerate(zip(groups, rules, strict=True)):
            now = rule_of(self.optimizer, group)
            if now.state != was.state:
                raise RuntimeFault(
                    f"{type(self.optimizer).__name__} of group {i} keeps other state than when the step was made",
                    needed=", ".join(was.state) or "no state",
                    found=", ".join(now.state) or "no state",
                    try_="parallelize again, and take_state of this step",
                )
            moved = [k for k, x in now.settings.items() if x != was.settings[k] and k not in self.given]
            self.given |= set(moved)
            found += [Change(f"{k} of the optimizer's group {i}", was.settings[k], now.settings[k]) for k in moved]
        self._settings = _settings(self.optimizer, self.given)
        return found

    def _shapes_hold(self, step: Step, batch: Any) -> bool:
        return _alone() is False or all(tuple(x.shape) == step.batch_shape(n) for n, x in named_batch(batch).items() if step.batch_shape(n) is not None)

    def _fits(self, form: Form, step: Step, batch: Any) -> bool:
        if not _alone():
            return True
        shapes = {n: t.shape for n, t in form.attributes["_batch_types"].items()}
        return all(tuple(x.shape) == shapes[n] for n, x in named_batch(batch).items() if n in shapes)

    def _example_of(self, step: Step, batch: Any) -> Any:
        """A batch as it is traced: of one process as it came; else of the shapes all ranks' parts make, with the numbers and flags of now."""
        if _alone():
            return batch
        shapes = {n: x for n, x in leaves("batch", self.example) if isinstance(x, Tensor)}
        name = "batch.0" if isinstance(batch, Tensor) else "batch"
        if set(named_batch(batch)) - set(named_batch(self.example)):
            raise RuntimeFault(
                "the batch has tensors that the example had not",
                needed=", ".join(named_batch(self.example)),
                found=", ".join(named_batch(batch)),
                try_="parallelize with an example that has them all",
            )
        return self.example if isinstance(batch, Tensor) else changed(name, batch, lambda n, x: shapes[n] if isinstance(x, Tensor) else x)

    def _agree(self, form: Form, reads: Reads, batch: Any) -> None:
        """All ranks go over to the same program, or none does."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._agreed += 1
        key, rank, world = f"weft.form.{self._run}.{self._agreed}", dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}.{rank}", cache.digest(form.program.text + repr(sorted(reads.numbers(batch).items()))))
        keys = [f"{key}.{r}" for r in range(world)]
        told: dict[int, str] = {}
        try:
            store.wait(keys, _patience())
            told = {r: store.get(k).decode() for r, k in enumerate(keys)}
        except (RuntimeError, dist.DistError):
            told = {r: store.get(k).decode() for r, k in enumerate(keys) if store.check([k])}
        odd = [r for r in range(world) if told.get(r) != told[rank]]
        if odd:
            raise RuntimeFault(
                f"ranks disagree about what the step is: rank {rank} and rank {', '.join(map(str, odd))}",
                needed="the same values in Python, and the same random state, on every rank",
                found="; ".join(f"rank {r} {'traced another program' if r in told else 'did not trace it anew'}" for r in odd[:4]),
                try_="seed Python's random alike on every rank, and change what the model reads on all of them",
            )


class Changing:
    """What a step has to run one program now and another later: state by name, held as the program at hand wants it."""

    lifts = True  # whether numbers in Python may become inputs
    captured: Captured
    optimizer: torch.optim.Optimizer
    compiled: Any
    program: Program
    steps: int
    skipped: int
    traced: Program
    reads: Reads | None
    forms: Forms | None
    _state: dict[str, Tensor]
    _held_as: dict[str, Type]
    _batch_types: Mapping[str, Type]
    _missed: dict[str, int]  # steps in which a parameter was not updated, of all that any program updates

    def ready(self, batch: Any) -> None:
        """Before a call: the program that what Python says now asks for, with tensors kept there as they are now."""
        if self.forms is not None:
            self.forms.choose(self, batch)
            numbers = self.reads.numbers(batch) if self.reads is not None else {}
            self.forms.together.see({**self._settings(), **numbers})

    def _settings(self) -> dict[str, float]:
        """The optimizer's settings that are inputs, as they are now."""
        groups = self.optimizer.param_groups
        found = {f"lr.{i}": number(g["lr"]) for i, g in enumerate(groups)}
        if self.captured.given - {COUNT}:
            rules = [rule_of(self.optimizer, g) for g in groups]
            found |= {f"{k}.{i}": x for i, r in enumerate(rules) for k, x in r.settings.items() if k in self.captured.given}
        return found

    def stepped(self) -> None:
        """After a call: which parameters it did not update."""
        mine = set(self.captured.states.values())
        for p in self._missed:
            self._missed[p] += p not in mine

    def count_updates(self) -> bool:
        """Whether the program updates parameters that other steps did not; one that is new has missed all so far."""
        for p in self.captured.states.values():
            self._missed.setdefault(p, self.steps - self.skipped)
        return COUNT not in self.captured.given and any(self._missed[p] for p in self.captured.states.values())

    def held_as(self, name: str) -> Type:
        """How a tensor of the state is held, by whichever program."""
        return self._held_as[name]

    def become(self, form: dict[str, Any]) -> None:
        """Run another program from here on; state goes over as it is, or is laid out anew where that program holds it otherwise."""
        state, held = form["_state"], form["_held_as"]
        known = {n: x for n, x in self._state.items() if not n.startswith("constant.")}
        for name, type_ in held.items():
            before = self._held_as.get(name)
            if before is None or name.startswith("constant."):
                known |= {name: state[name]} if name in state else {}
            elif before.layout != type_.layout:
                whole = gathered(before.layout, self._state.get(name), self.compiled)
                present = type_.layout.present(form["compiled"].coords)
                known |= {name: interp.take_local(whole, type_.layout, form["compiled"].coords).clone()} if present else {}
        form["_state"] = {n: x for n, x in state.items() if n.startswith("constant.")}
        held = {**{n: t for n, t in self._held_as.items() if not n.startswith("constant.")}, **held}
        self.__dict__.update({k: x for k, x in form.items() if k not in RUNNING})
        self._state, self._held_as = known, held

    def read_anew(self) -> None:
        """Tensors that Python keeps, as they are now: another tensor, or other values in it."""
        for name, place in self.reads.read_anew.items() if self.reads is not None else ():
            now = place.now()
            if name in self._state and (now is not place.value or now._version != self._versions.get(name)):
                real = torch.view_as_real(now.detach().resolve_conj()) if now.is_complex() else now.detach()
                local = interp.take_local(real, self._held_as[name].layout, self.compiled.coords)
                self._state[name] = local.to(self.compiled.device).clone()
                place.value, self._versions[name] = now, now._version

    def lifted(self, batch: Any) -> dict[str, Tensor]:
        """Inputs that are numbers in Python, as they are now."""
        if self.reads is None or not self.reads.lifted:
            return {}
        numbers, kinds = self.reads.numbers(batch), self.reads.lifted
        return {n: torch.full((), x, dtype=kinds[n][1], device=self.compiled.device) for n, x in numbers.items()}

    def batch_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor of a whole batch, where a call takes it as it is."""
        type_ = self._batch_types.get(name)
        return None if type_ is None else type_.shape

    @property
    def _versions(self) -> dict[str, int]:
        return self.__dict__.setdefault("_read_versions", {})  # type: ignore[no-any-return]


def gathered(layout: Any, local: Tensor | None, compiled: Any) -> Tensor:
    """A value whole on every rank, from what each holds, if anything."""
    everywhere = all(layout.where_cut(a) is None for a in layout.mesh.axes) and not layout.held
    if local is not None and (not dist.is_initialized() or everywhere):
        return local
    parts: list[Any] = [None] * layout.mesh.ranks
    dist.all_gather_object(parts, None if local is None else local.cpu())
    some = next(x for x in parts if x is not None)
    return interp.denote(parts, Type(some.dtype, layout), tolerance=1e-5).to(compiled.device)


def _patience() -> Any:
    from datetime import timedelta

    limit = faults.timeout_s()
    return timedelta(seconds=min(limit, 60) if limit > 0 else 60)


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _captured(made: Any) -> Captured:
    return made if isinstance(made, Captured) else made.captured  # type: ignore[no-any-return]


def _same(a: Captured, b: Captured) -> bool:
    return a.program.outputs == b.program.outputs


def _own(step: Step) -> dict[str, Any]:
    return {k: x for k, x in step.__dict__.items() if k not in RUNNING} | {"_state": step._state, "_held_as": step._held_as}


@contextlib.contextmanager
def _told_of_the_batch(step: Step, batch: Any) -> Iterator[None]:
    """Where a user's code fails on a batch that lacks what those before had, that is said."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        given, wanted = named_batch(batch), step._batch_types
        missing = [n for n in wanted if n not in given]
        if not missing:
            raise
        found = f"{', '.join(given) or 'no tensor'}; the loss raised {type(error).__name__}: {error}"
        raise RuntimeFault(f"the batch has no {missing[0].removeprefix('batch.')!r}", needed=", ".join(wanted), found=found) from error


def _may_lift(c: Change) -> bool:
    return is_number(c.before) and type(c.before) is type(c.now) and (c.place is not None or c.words.endswith(" of the batch"))


def _settings(optimizer: torch.optim.Optimizer | None, given: frozenset[str] = frozenset()) -> Any:
    """All of the optimizer's groups that is no input: how many parameters each has, and its settings."""
    if optimizer is None:
        return ()
    if given - {COUNT}:
        rules = [rule_of(optimizer, g) for g in optimizer.param_groups]
        kept = [(r.form, [x for k, x in r.settings.items() if k not in given]) for r in rules]
        return [(len(g["params"]), settings) for g, settings in zip(optimizer.param_groups, kept, strict=True)]
    keys = [k for k in optimizer.defaults if k != "lr"]
    return [(len(g["params"]), [g.get(k) for k in keys]) for g in optimizer.param_groups]


def _keeps(change: Change, error: Exception) -> CaptureError:
    return CaptureError(
        f"{change.words} carries a tensor from one step into the next",
        needed="what steps hand on in buffers",
        found=str(error).splitlines()[0],
        try_='self.register_buffer("name", torch.zeros(...)), and write into it',
    )


def _filled_in(program: Program, values: Mapping[str, float]) -> dict[str, Node]:
    """The outputs where inputs are these numbers, and what follows from numbers alone is computed, as Python would have."""
    made: dict[Node, Node] = {}
    for n in program.nodes:
        if n.op.name == "input" and n.attr("name") in values:
            made[n] = constant(values[n.attr("name")], n.dtype, n.mesh)
            continue
        args = tuple(made[a] for a in n.args)
        if n.args and all(a.op.name == "const" for a in args) and n.shape == () and len(n.types) == 1:
            made[n] = _computed(n, args)
        else:
            args = args[::-1] if n.op.name in ("add", "mul") and args[0].op.name == "const" else args
            made[n] = n if args == n.args else make(n.op, args, dict(n.attrs))
    return {name: made[n] for name, n in program.outputs}


def _computed(n: Node, args: tuple[Node, ...]) -> Node:
    if n.op.name == "cast":
        return constant(args[0].attr("value"), n.dtype, n.mesh)
    wide = [torch.tensor(a.attr("value"), dtype=torch.float64 if a.dtype.is_floating_point else a.dtype) for a in args]
    return constant(n.op.run(*wide, **dict(n.attrs)).item(), n.dtype, n.mesh)


