"""A dynamic model as part of a training step: while the step is traced it is one op, `rounds`, of graphs, inputs and weights.

The functions are traced once more, over the module's own tensors, and kept as a runner under a name that tells what they compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import StructureError
from weft.core.node import DTYPE_NAMES, Node
from weft.dynamic.balance import Cost, Sizes, assign_samples
from weft.dynamic.draw import as_data
from weft.dynamic.native import Ints
from weft.dynamic.packed import Packed, unpack
from weft.dynamic.plan import Variant
from weft.dynamic.run import Once, Replay
from weft.dynamic.schedule import Schedule
from weft.dynamic.structure import Structure
from weft.dynamic.vertex import Source
from weft.frontend.capture.handlers import function
from weft.frontend.capture.modes import Above
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.values import TAG
from weft.ops.rounds import HANDS, RUNNERS, rounds_of

if TYPE_CHECKING:
    from weft.dynamic.model import Model

SAVED = 16  # forward passes kept for their backward passes


def of_packed(model: Model, graphs: Packed, inputs: dict[str, Tensor], at: Any) -> Any:
    """A model called with the graphs of a step's batch: recorded while the step is traced, else run."""
    if not hasattr(graphs.graphs, TAG):
        return model(unpack(graphs.graphs, graphs.kinds), inputs, at=at)
    if not isinstance(at, str) or at != "roots":
        raise StructureError(
            "a step takes the outputs of graphs at their roots", needed='at="roots", a row for each sample', found=f"at={at!r}",
            try_="push what is wanted at the root: gather it there",
        )  # fmt: skip
    runner, weights = _traced(model, graphs.kinds, inputs)
    out = _rounds(runner, graphs.graphs, *inputs.values(), *weights)
    return out[0] if len(out) == 1 else dict(zip(RUNNERS[runner].outputs, out, strict=True))  # type: ignore[attr-defined]


def _rounds(runner: str, graphs: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Captured as one op by the trace; by itself it only says what the results are like."""
    if torch._C._is_torch_function_enabled():
        return handle_torch_function(_rounds, (graphs, *tensors), runner, graphs, *tensors)  # type: ignore[no-any-return]
    return [torch.empty(len(graphs), *shape, dtype=dtype) for shape, dtype in RUNNERS[runner].outputs.values()]  # type: ignore[attr-defined]


@function(_rounds)
def _recorded(r: Recorder, runner: str, graphs: Node, *tensors: Node) -> list[Node]:
    outputs = RUNNERS[runner].outputs.values()  # type: ignore[attr-defined]
    wants = tuple(k for k, n in enumerate(tensors) if r.moves(n))
    return rounds_of(runner, graphs, tensors, wants, tuple((DTYPE_NAMES[dtype], shape) for shape, dtype in outputs))


# -- tracing ---------------------------------------------------------------------------------------------------------------------------


def _traced(model: Model, kinds: tuple[str, ...], inputs: Mapping[str, Tensor]) -> tuple[str, list[Tensor]]:
    """The name of the runner, and what stands for the weights that it reads."""
    recorder = next(m.recorder for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, Above))
    with _outside(recorder) as known:
        device = next((w.device for w in model.held()), torch.device("cpu"))
        like = {n: torch.empty((0, *x.shape[1:]), dtype=x.dtype, device=device) for n, x in inputs.items()}
        runner = Rounds(model, kinds, like, {real for real, _ in known.values()})
        name = runner.name
        RUNNERS.setdefault(name, runner)
    return name, [known[id(w)][1] if id(w) in known else w for w in runner.weights]


@contextmanager
def _outside(recorder: Recorder) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Inside, nothing is listened to and modules have their own tensors; gives these, and what stands for each, by its identity."""
    tape = recorder.step.tape
    known = {id(real): (real, tape.traced[id(real)]) for real in tape.reals.values()}
    real = {id(traced): x for x, traced in known.values()}
    tables = [(table, dict(table)) for m in tape.model.modules() for table in (m._parameters, m._buffers)]
    original_call = nn.Module.__call__
    try:
        for table, saved in tables:
            table.update({k: real.get(id(t), t) for k, t in saved.items()})
        nn.Module.__call__ = nn.Module._wrapped_call_impl  # type: ignore[method-assign]
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield known
    finally:
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
        for table, saved in tables:
            table.update(saved)


# -- running ---------------------------------------------------------------------------------------------------------------------------


class Rounds:
    """Vertex functions traced for inputs like these; weights are given to each call."""

    def __init__(self, model: Model, kinds: tuple[str, ...], inputs: Mapping[str, Tensor], own: set[Tensor]) -> None:
        self.model, self.kinds, self.inputs = model, kinds, tuple(inputs)
        self.variant = Variant(model.functions, model.states, inputs, model.held(), model)
        self._require_sure()
        self.weights = [w for w in self.variant.weights if any(w is x for x in own) or w.ndim]  # numbers stay as they are
        first = next(iter(self.variant.functions.values()))
        self.outputs = {n: (o.shape[1:], o.dtype) for n, o in first.pushed.items()}
        self._saved: dict[Any, tuple[Any, Once | Replay, Ints, Any]] = {}
        self.last: Schedule | None = None  # of this rank, for the report

    @property
    def name(self) -> str:
        """Equal where functions, shapes and dtypes are."""
        text = [f"{k}: {f.program}" for k, f in self.variant.functions.items()]
        text += [str((k, f.reads, sorted(map(str, f.optional)))) for k, f in self.variant.functions.items()]
        text += [f"{list(w.shape)} {w.dtype} {w.requires_grad}" for w in self.variant.weights]
        text += [str(w.item()) for w in self.variant.weights if not w.ndim and not w.is_meta]
        text += [str((self.kinds, self.inputs, self.model.states, self.model.policy, self.model.fuse, self.model.target))]
        return f"{'.'.join(self.model.functions)}.{hashlib.sha256(chr(10).join(text).encode()).hexdigest()[:12]}"

    def _require_sure(self) -> None:
        for name, f in self.variant.functions.items():
            if f.is_random:
                drawn = next(n for n in f.program.users[f.program.input_names["seed"]])
                raise StructureError(
                    f"vertex function {name!r} draws random numbers inside a step", needed="the same numbers under every plan", found=drawn.op.name,
                    try_="dropout on the inputs or on the outputs of the dynamic model",
                )  # fmt: skip
            odd = [o for o, n in f.pushed.items() if not n.dtype.is_floating_point]
            if odd or f.pushed.keys() != next(iter(self.variant.functions.values())).pushed.keys():
                raise StructureError(
                    f"vertex function {name!r} of a step pushes {', '.join(f.pushed) or 'nothing'}",
                    needed="the same outputs of every type of vertex, all floating point", found=", ".join(odd) or name,
                )  # fmt: skip

    def forward(self, graphs: Tensor, hands: Tensor, tensors: Sequence[Tensor], wants: tuple[int, ...]) -> tuple[Tensor, ...]:
        s = unpack(graphs, self.kinds)
        mine = _hand(s, hands)
        call, rows, found = self._run(s, mine, tensors, wants)
        if wants:
            self._save(_key(graphs, hands, tensors), (tensors, graphs), call, rows)
        dtype = next(t.dtype for t in tensors if t.dtype.is_floating_point)
        return tuple(_placed(x, rows, len(graphs), dtype) for x in found)

    def backward(
        self, cts: Sequence[Tensor], graphs: Tensor, hands: Tensor, tensors: Sequence[Tensor], wants: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        saved = self._saved.pop(_key(graphs, hands, tensors), None)
        if saved is None:
            self.forward(graphs, hands, tensors, wants)
            saved = self._saved.pop(_key(graphs, hands, tensors))
        _, call, rows, dtype = saved
        at = torch.from_numpy(rows).to(cts[0].device)
        found = call.backward([ct.index_select(0, at).to(dtype).contiguous() for ct in cts], None)
        keys = [*(Source("pull", n) for n in self.inputs), *map(id, self.weights)]
        call.release()
        return tuple(_gradient(found.get(keys[k]), tensors[k]) for k in wants)  # type: ignore[call-overload]

    def _run(self, s: Structure, mine: Ints, tensors: Sequence[Tensor], wants: tuple[int, ...]) -> tuple[Any, Ints, list[Tensor]]:
        """The call, the rows of its samples among all, and what it gives there."""
        self._require_here(tensors)
        part = s if len(mine) == len(s) else s.take(mine)
        schedule = self.last = Schedule(part, self.variant.reads, self.model.policy)
        tensors = [t.detach().to(self.variant.dtype) if t.dtype.is_floating_point else t.detach() for t in tensors]
        given = dict(zip(self.inputs, tensors, strict=False))
        weights = self._weights(tensors[len(self.inputs) :])
        moving = frozenset(self.inputs[k] for k in wants if k < len(self.inputs))
        assert all(self.weights[k - len(self.inputs)].requires_grad for k in wants if k >= len(self.inputs)), "traced without this gradient"
        plan = self.model.plan_for(self.variant, schedule, given, moving, bool(wants))
        root = np.full(len(part), -1)
        root[np.searchsorted(part.sample, part.roots, side="right") - 1] = part.roots
        wanted = dict.fromkeys(plan.outputs, root[root >= 0])
        call = self.model.call_for(self.variant, plan, schedule, given, wanted, weights)
        found = call.forward(given, wanted, weights)
        if not wants:
            call.release()
        return call, mine[root >= 0], found

    def _require_here(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[-1].device
        if device.type != self.variant.device.type:
            raise StructureError(
                "a dynamic model runs in a step elsewhere than it was traced", needed=f"parameters on {device}", found=str(self.variant.device),
                try_=f"model.to({str(device)!r}) before weft.parallelize",
            )  # fmt: skip

    def shown(self) -> dict[str, Any]:
        """The rounds of this rank's last samples, as data for a report."""
        return {} if self.last is None else as_data(self.last)

    def _weights(self, given: Sequence[Tensor]) -> list[Tensor]:
        by = {id(w): x for w, x in zip(self.weights, given, strict=True)}
        return [by.get(id(w), w) for w in self.variant.weights]

    def _save(self, key: Any, alive: Any, call: Any, rows: Ints) -> None:
        """Keep a pass for its backward pass, and the tensors it read, so that no others lie where they do."""
        for old in [key, *list(self._saved)[: max(0, len(self._saved) - SAVED + 1)]]:
            if old in self._saved:
                self._saved.pop(old)[1].release()
        self._saved[key] = alive, call, rows, self.variant.dtype


def _key(graphs: Tensor, hands: Tensor, tensors: Sequence[Tensor]) -> Any:
    return tuple(hands.tolist()), tuple((t.data_ptr(), t._version, tuple(t.shape), t.dtype) for t in (graphs, *tensors))


def _hand(s: Structure, hands: Tensor) -> Ints:
    """The samples of some hands. All are halved by predicted time, and halved again: ranks that hold equal parts of the hands have equal work."""
    saved, found, sizes = set(hands.tolist()), list[int](), Sizes.of(s)

    def halve(samples: Ints, low: int, high: int) -> None:
        mine = len(saved.intersection(range(low, high)))
        if mine == high - low:
            found.extend(samples.tolist())
        elif mine:
            for k, part in enumerate(assign_samples(sizes, samples, 2, Cost())):
                middle = (low + high) // 2
                halve(part, *((low, middle), (middle, high))[k])

    halve(np.arange(len(s)), 0, HANDS)
    return np.array(sorted(found), np.int64)


def _placed(found: Tensor, rows: Ints, samples: int, dtype: torch.dtype) -> Tensor:
    """The rows of some samples among those of all."""
    if len(rows) == samples:
        return found.to(dtype)
    out = found.new_zeros((samples, *found.shape[1:]), dtype=dtype)
    return out.index_copy_(0, torch.from_numpy(rows).to(found.device), found.to(dtype))


def _gradient(found: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if found is None else found[: len(like)].to(like.dtype).reshape(like.shape)
