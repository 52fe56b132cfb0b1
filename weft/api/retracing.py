"""One step, several programs: what was traced is run as long as all it read from Python is as it was, and traced again when it is not.

A number that changes becomes an input, where the program with it as an input is shown to be the same. A step that leaves Python changed, or
draws random numbers there, is traced at every call. Programs are kept by what they compute, so that none is compiled twice.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.api.data import Brought, Shape, Shapes
from weft.api.lifting import filled_in, may_lift
from weft.api.ranges import Ranges, of_shapes
from weft.api.rank_sync import RankSync, one_process
from weft.api.settings_guard import SettingsGuard
from weft.api.step_state import RUNNING
from weft.core import cache
from weft.core.errors import CaptureError, RuntimeFault, WeftError
from weft.core.names import original
from weft.core.node import Type, remade, user_level
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.frontend.capture.batch_numbers import Answers
from weft.frontend.capture.batches import changed, named_batch
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.kept import Kept
from weft.frontend.capture.optimizer_settings import COUNT
from weft.frontend.capture.places import Change, Place, holds_traced

if TYPE_CHECKING:
    from weft.api.step import Step

MOST = 16  # programs of one step
MANY = 256  # sizes that run by programs of others

Make = Callable[..., "Step"]  # (example, known, **settings of the capture) to a step


@dataclass
class Form:
    """A program of the step, and what must hold for it to be the right one."""

    program: Program
    reads: Reads
    given: frozenset[str]
    attributes: dict[str, Any] = field(repr=False)
    unjudged: Callable[[Any], Any] | None = None  # compares it with torch on an example, where that is yet to be done
    ranged: bool = False  # whether it runs by code that was compiled for other sizes

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the full batches it is for, what it reads."""
        return {n: t.shape for n, t in self.attributes["_batch_types"].items()}

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether it is for full batches of these shapes."""
        return all(t.shape == shapes[n] for n, t in self.attributes["_batch_types"].items() if n in shapes)


class Variants:
    """The programs of one step, made as they are needed."""

    def __init__(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None, example: Any, run: str = "") -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.example = changed(example, lambda _, x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x)
        self.given: frozenset[str] = frozenset()
        self.impure = self.exact = False
        self.make: Make | None = None
        self.kept: list[Form] = []
        self.ranges = Ranges(self)
        self.warned: set[str] = set()
        self.times: Counter[str] = Counter()
        self.lifted: dict[str, tuple[Place | str, torch.dtype]] = {}
        self.unlifted: set[str] = set()
        self.settings = SettingsGuard(optimizer)
        self.rank_sync = RankSync(run)
        self.brought, self.brought_to_eval = Brought(self.rank_sync), Brought(self.rank_sync)
        self.own: dict[str, Tensor] = {}
        self.constants = Kept(next((p.device for p in model.parameters()), torch.device("cpu")))
        self.answers = Answers(self._of_module)
        self.asks = 0  # how often a number that the state decides made another program

    def _of_module(self, name: str) -> Tensor | None:
        """A parameter or buffer before there is a step."""
        found = self.own.get(original(name))
        return None if found is None or found.is_meta else found.detach()

    def asked(self) -> Answers:
        """Where questions are answered, with the module's own tensors, which a trace puts others in place of."""
        self.own = {f"param.{n}": p for n, p in self.model.named_parameters()} | {f"buffer.{n}": b for n, b in self.model.named_buffers()}
        return self.answers

    # -- the first trace -----------------------------------------------------------------------------------------------

    def observed(self, run: Callable[[Reads], Any]) -> Any:
        """What `run` captures, with what it read; where it changed Python on any rank, whether doing it again would be the same is found out."""
        with self.rank_sync.telling():
            first = Reads(self.model, self.loss, self.example)
            first.answers = self.asked()
            made = run(first)
        if not any(self.rank_sync.answers(bool(first.left or first.drew), "whether the step changes Python")):
            return made
        with self.rank_sync.telling():
            first.undo()
            words, stable = self._tried_twice(run)
        answers = self.rank_sync.answers([words, stable], "what the step changes in Python")
        if not all(stable for _, stable in answers):
            self.impure, self.given = True, self.given | {COUNT}
            words = next(words for words, stable in answers if not stable)
            warnings.warn(f"the step changes Python as it runs ({words}): it is traced at every call", stacklevel=user_level())
        last = self.reads(alone=self.impure)
        made = run(last)
        last.undo()
        return made

    def _tried_twice(self, run: Callable[[Reads], Any]) -> tuple[str, bool]:
        """What the step changes in Python, in words, and whether it is the same step after that; Python is then as it leaves it, or as before."""
        before = self.reads(alone=True)
        made = run(before)
        self.constants.steady = self._steady(_captured(made))
        before.keep()
        self.constants.steady = {}
        before.redo()
        after = self.reads(alone=True)
        try:
            again = run(after)
        except Exception as error:
            before.undo()
            if before.keeps_tensors:
                raise _keeps(before.keeps_tensors[0], error) from error
            raise
        more = [c for c in after.left if not holds_traced(c.now)]
        stable = self._same(_captured(made), _captured(again)) and not (more or after.drew or before.drew)
        after.undo()
        before.forget_tensors() if stable else before.undo()
        return before.left[0].words if before.left else "random numbers drawn in Python", stable

    def _same(self, a: Captured, b: Captured) -> bool:
        """Whether two traces mean one program, the second perhaps with buffers that hold constants the first has made."""
        own = {n: self.own[original(name)] for name, n in b.program.input_names.items() if original(name) in self.own}
        types = {n: made for n, tensor in own.items() if (made := self.constants.node(tensor)) is not None}
        outputs = remade((n for _, n in b.program.outputs), types) if types else {}
        return a.program.outputs == tuple((name, outputs.get(n, n)) for name, n in b.program.outputs)

    def _steady(self, captured: Captured) -> dict[str, Tensor]:
        """Buffers that a step leaves as they are."""
        program = captured.program
        written = {of for out, node in program.outputs if (of := program.next_of.get(out)) and node is not program.input_names.get(of)}
        named = {n: self._of_module(n) for n in program.input_names if n.startswith("buffer.") and n not in written}
        return {n: x for n, x in named.items() if x is not None}

    def reads(self, alone: bool = False, example: Any = None) -> Reads:
        reads = Reads(self.model, self.loss, self.example if example is None else example)
        reads.shared, reads.lifted, reads.answers, reads.kept = not alone, dict(self.lifted), self.asked(), self.constants
        return reads

    def adopt(self, step: Step, make: Make) -> Step:
        """The first program of the step."""
        self.make, step.forms = make, self
        self.answers.forget()
        self.answers.state = lambda name: step.full(name).detach().cpu() if name in step.state_names else self._of_module(name)
        self.settings.adopt(step.captured, self.given)
        self.kept.append(Form(step.traced, step.reads, self.given, _own(step)))
        return step

    # -- at each call --------------------------------------------------------------------------------------------------

    def choose(self, step: Step, batch: Any, exact: bool = False) -> None:
        """Make the step run the program that this call needs; with `exact` one that was compiled for its shape, and no other."""
        self.exact = exact
        self.answers.forget()  # an evaluation, or a call that failed, had others
        fits = self.brought.all_fit(named_batch(batch), step._batch_types, step.compiled.coords)
        other = exact and any(f.ranged and f.attributes["compiled"] is step.compiled for f in self.kept)
        same = self.settings.hold(self.given) and step.captured.given == self.given and _answers_hold(step, step.captured)
        if self.impure or other or not (fits and same and step.reads.hold(batch)):
            self._retrace(step, batch, self._shapes(step, batch, fits))
        step.read_anew()
        self.answers.forget()

    def _shapes(self, step: Step, batch: Any, fits: bool) -> dict[str, Shape]:
        """What the full batch measures; ranks are asked only where no program has taken one like it."""
        given, known = named_batch(batch), [step._batch_types, *(f.attributes["_batch_types"] for f in self.kept)]
        return self.brought.shapes(given, known[0]) if fits else self.brought.full(given, known, known[0], step.compiled.coords)

    def evaluated(self, step: Step, batch: Any, known: Sequence[Mapping[str, Type]]) -> tuple[Any, Shapes]:
        """The full batch of an evaluation, of which this may be a part, as it is traced; what it measures, and how parts are sharded."""
        shapes = self.brought_to_eval.full(named_batch(batch), known, step._batch_types, step.compiled.coords)
        return self._example_of(batch, shapes), Shapes(shapes, self.brought_to_eval.rows_sharded(step._batch_types))

    def _retrace(self, step: Step, batch: Any, shapes: dict[str, Shape]) -> None:
        if self.impure:
            self._use(step, *self._trace(step, batch, shapes, alone=True), batch, shapes)
            return
        changes = [*step.reads.changes(batch), *self._settings_changed(step)]
        self.times.update(c.words for c in changes)
        for form in reversed(self.kept):
            same = self._may_be(form) and form.fits(shapes) and self.settings.same_form(form.attributes["captured"])
            if same and form.reads.hold(batch) and _answers_hold(step, form.attributes["captured"]):
                self._agree(form.program, form.reads, batch, form, step)
                self._use(step, form.reads, form, batch, shapes)
                return
        if not (changes or self.exact) and all(t.shape == shapes[n] for n, t in step._batch_types.items() if n in shapes):
            self._asked(step)
        elif not (changes or self.exact):
            self.ranges.widen(step, batch, shapes)
        self._use(step, *self._trace(step, batch, shapes, changes), batch, shapes)

    def _settings_changed(self, step: Step) -> list[Change]:
        """Settings that were numbers of the program become inputs; with other groups every program is another."""
        changes, moved, grown = self.settings.changes(step.captured, self.given)
        self.given |= moved
        if grown:
            self.kept, self.ranges.found = [], []
        return changes

    def _asked(self, step: Step) -> None:
        """Say where Python asks for numbers that are others now."""
        self.asks += any(q.of_state for q in step.reads.asked)
        lines = ", ".join(dict.fromkeys(q.words for q in step.reads.asked)) or "a setting of the optimizer"
        self.tell(f"a number that Python asks for is another ({lines}): another program is compiled for it", once="asked")
        if self.asks > 2:
            self.tell(f"numbers that Python asks for ({lines}) are others again and again: each time the step is compiled anew", once="asks")

    def _may_be(self, form: Form) -> bool:
        return form.given == self.given and not (form.ranged and self.exact)

    def _trace(
        self, step: Step, batch: Any, shapes: dict[str, Shape], changes: list[Change] | None = None, alone: bool = False
    ) -> tuple[Reads, Form]:
        """The program that Python means now, new or known."""
        with self.rank_sync.telling(), _with_batch_in_message(step, batch):
            example = self._example_of(batch, shapes)
            numbers = [] if alone or not step.lifts else [c for c in changes or () if may_lift(c) and c.words not in self.unlifted]
            if numbers:
                peeked, reads = self._peek(example)
                known = self._known(peeked, example)
                if known is not None:  # numbers that no program reads
                    _take_constants(known, peeked)
                    self._agree(peeked.program, reads, batch, known, step)
                    return reads, known
                want = filled_in(peeked.program, {})
                for dtype in (torch.float64, torch.float32):
                    lifted = self._lifted(step, batch, example, want, numbers, dtype)
                    if lifted is not None:
                        return lifted
                self.unlifted |= {c.words for c in numbers}
            reads = self.reads(alone, example)
            made = self.made(step, batch, example, reads)
            kept = reads.keep()
            if not alone and (reads.left or reads.drew):
                reads.undo()
            if alone or kept:
                reads.redo()
                reads.forget_tensors()
            return reads, made

    def _peek(self, example: Any) -> tuple[Captured, Reads]:
        """The program that Python means now, not compiled."""
        found: list[Captured] = []
        reads = self.reads(example=example)
        assert self.make is not None
        self.make(example, lambda captured: bool(found.append(captured)) or True, given=self.given, reads=reads)
        reads.undo()
        return found[0], reads

    def _known(self, captured: Captured, example: Any) -> Form | None:
        """The form that runs this program, for batches like the example, if there is one."""
        shapes = {n: tuple(x.shape) for n, x in named_batch(example).items()}
        same = (f for f in self.kept if self._may_be(f) and f.program.outputs == captured.program.outputs)
        return next((f for f in same if f.fits(shapes)), None)

    def _lifted(self, step: Step, batch: Any, example: Any, want: Any, numbers: list[Change], dtype: torch.dtype) -> tuple[Reads, Form] | None:
        """The program with these numbers as inputs; None where it cannot be shown to be the same."""
        before, values = dict(self.lifted), dict[str, float]()
        for c in numbers:
            kind = dtype if isinstance(c.now, float) else torch.int64
            place = c.words.removesuffix(" of the batch") if c.place is None else ""
            name = place or f"value.{len(self.lifted)}"
            self.lifted[name] = (place or c.place, kind)  # type: ignore[assignment]
            values[name] = c.now
        reads = self.reads(example=example)
        try:
            made = self.made(step, batch, example, reads, check=lambda c: filled_in(c.program, values) == want)
        except RuntimeFault:
            raise
        except Exception:  # numbers that Python computes with, branches on or counts by stay numbers
            reads.undo()
            made = None
        if made is None:
            self.lifted = before
            return None
        return reads, made

    def made(self, step: Step, batch: Any, example: Any, reads: Reads, check: Callable[[Captured], bool] | None = None) -> Any:
        assert self.make is not None
        found: list[Form | None] = []

        def known(captured: Captured) -> bool:
            """Whether this program needs no compiling: there is one already, or it is not wanted. All ranks compile the same, or none does."""
            if check is not None and not check(captured):
                found[:] = [None]
                return True
            _require_same_state(step, captured)
            self._require_same_buffers(reads)
            form = self._known(captured, example)
            if form is not None:
                _take_constants(form, captured)
            form = form or self.ranges.form(captured, reads, example)
            found[:] = [form] if form is not None else []
            self._agree(captured.program, reads, batch, form, step)
            return bool(found)

        made = self.make(example, known, given=self.given, reads=reads)
        if found:
            return found[0]
        return Form(made.traced, reads, self.given, _own(made), made.unjudged)

    def _require_same_buffers(self, reads: Reads) -> None:
        """Refuse a batch for which the model makes a buffer of another type than the step has."""
        for name, moved in reads.resized(self.model).items():
            raise RuntimeFault(
                f"the model makes another buffer for this batch: {name}",
                needed=f"the type the step has: {_described(moved.before)}",
                found=_described(moved.now),
                try_="keep it in an attribute that is no buffer, or give batches of one size",
            )

    def _use(self, step: Step, reads: Reads, form: Form, batch: Any, shapes: dict[str, Shape]) -> None:
        form.reads = reads
        reached = form.unjudged is not None and any(q.of_state for q in reads.asked)
        if reached:
            form.unjudged = None
        if form.unjudged is not None:  # on the batch if it is a full one, else on values like it
            full = all(tuple(x.shape) == shapes.get(n) for n, x in named_batch(batch).items())
            form.attributes["verified"] = form.unjudged(batch if full else self._example_of(batch, shapes))
            form.unjudged = None
        self._keep(form, shapes)
        step.become(form.attributes)
        step.reads = reads
        if step.count_updates():
            self.given |= {COUNT}
            self.kept = []
            self._use(step, *self._trace(step, batch, shapes, alone=self.impure), batch, shapes)
        elif reached:  # it is for this state alone
            step.read_anew()
            try:
                step.check_reached_state(self._example_of(batch, shapes))
            except Exception:
                self.kept.remove(form)
                reads.asked[0].value = None  # never holds: the next call traces and compares again
                raise

    def _keep(self, form: Form, shapes: dict[str, Shape]) -> None:
        """As the last that was used. Of batches that always measure otherwise the oldest program goes; of those that do not, there may be so many."""
        same = [f for f in self.kept if f.ranged == form.ranged]
        if form not in self.kept and len(same) >= (MANY if form.ranged else MOST):
            others = [f for f in same if not f.fits(shapes) or f.reads.asked]
            self._require_memory(others)
            self.kept.remove(others[0])
        self.kept = [*(f for f in self.kept if f is not form), form]

    def _require_memory(self, others: list[Form]) -> None:
        if others:
            return
        words = self.times.most_common(1)[0][0] if self.times else "what the model does with Python's random numbers, or a counter"
        raise RuntimeFault(
            f"the step has been traced as {MOST} different programs",
            needed="values in Python that stop changing",
            found=f"{words} keeps changing",
            try_="pass it as a tensor in the batch",
        )

    def tell(self, words: str, once: str) -> None:
        if once not in self.warned and (one_process() or dist.get_rank() == 0):
            print(f"weft: {words}", file=sys.stderr)
        self.warned |= {once} if once else set()

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def _example_of(self, batch: Any, shapes: dict[str, Shape]) -> Any:
        """A batch as it is traced: as it came, where it is a full one; else of the shapes all ranks' parts make, with the numbers and flags of now."""
        if one_process() or all(tuple(x.shape) == shapes[n] for n, x in named_batch(batch).items()):
            return batch
        return of_shapes(batch, shapes)

    def _agree(self, program: Program, reads: Reads, batch: Any, form: Form | None, step: Step) -> None:
        """All ranks go over to the same program, or none does. A rank that stays with its own needs nobody."""
        stays = form is not None and form.attributes["compiled"] is step.compiled
        if one_process() or (stays and not self.impure):
            return
        answers = self.rank_sync.answers(cache.digest(program.text + repr(sorted(reads.numbers(batch).items()))), "the program of the step")
        odd = [r for r, digest in enumerate(answers) if digest != answers[dist.get_rank()]]
        if odd:
            raise RuntimeFault(
                f"ranks disagree about what the step is: rank {dist.get_rank()} and rank {', '.join(map(str, odd))}",
                needed="the same values in Python, and the same random state, on every rank",
                found=f"rank {', '.join(map(str, odd[:4]))} traced another program",
                try_="seed Python's random the same way on every rank, and change what the model reads on all of them",
            )


def _described(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _take_constants(form: Form, captured: Captured) -> None:
    """Let a program run on the constants of a later trace, where numbers of Python's made others."""
    own = form.attributes
    types, compiled = own["_state_types"], own["compiled"]
    moved = {n: x for n, x in captured.constants.items() if n in types and types[n].layout.present(compiled.coords) and not x.is_meta}
    local = {n: compiled.part(x, types[n].layout).clone() for n, x in moved.items()}
    own["_state"] = {**own["_state"], **local}
    own["captured"] = replace(own["captured"], constants={**own["captured"].constants, **moved})


def _captured(made: Any) -> Captured:
    return made if isinstance(made, Captured) else made.captured  # type: ignore[no-any-return]


def _own(step: Step) -> dict[str, Any]:
    return {k: x for k, x in step.__dict__.items() if k not in RUNNING} | {"_state": step._state, "_state_types": step._state_types}


@contextlib.contextmanager
def _with_batch_in_message(step: Step, batch: Any) -> Iterator[None]:
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


def _answers_hold(step: Step, captured: Captured) -> bool:
    """Whether what the optimizer asked about its settings has the same answers now."""
    return not captured.guards or captured.holds(step._settings())


def _require_same_state(step: Step, captured: Captured) -> None:
    """Refuse parameters under other names, and another form of the optimizer that keeps other state of a parameter than the step has."""
    names = {id(t): n for n, t in step.captured.parameters.items()}
    for name, t in captured.parameters.items():
        if names.get(id(t), name) != name:
            raise RuntimeFault(
                "the model holds a parameter in another place than when the step was made",
                needed=names[id(t)].removeprefix("param."),
                found=name.removeprefix("param."),
                try_="call the model on a batch once, then parallelize",
            )
    for name, now in captured.updates.items():
        was = step.captured.updates.get(name, now)
        if now.outputs.keys() != was.outputs.keys():
            kept = [", ".join(s for s in u.outputs if s != "param") or "no state" for u in (was, now)]
            group = next(i for i, g in enumerate(step.optimizer.param_groups) if any(p is captured.parameters.get(name) for p in g["params"]))
            raise RuntimeFault(
                f"{type(step.optimizer).__name__} of group {group} keeps other state than when the step was made",
                needed=kept[0],
                found=kept[1],
                try_="parallelize again, and take_state of this step",
            )


def _keeps(change: Change, error: Exception) -> CaptureError:
    return CaptureError(
        f"{change.words} carries a tensor from one step into the next",
        needed="what steps hand on in buffers",
        found=str(error).splitlines()[0],
        try_='self.register_buffer("name", torch.zeros(...)), and write into it',
    )
