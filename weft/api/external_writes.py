"""What the user's module and optimizer hold next to a step that keeps its own: it is noticed when someone writes there.

A write bumps a tensor's version, moves its storage or, past both through `.data`, changes some elements that are looked at on CPUs.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.api.check_cost import has_values
from weft.core.names import readable

_known: weakref.WeakKeyDictionary[nn.Module, ExternalWrites] = weakref.WeakKeyDictionary()


def own_of(model: nn.Module) -> ExternalWrites:
    """One record for all steps of a module; what it holds now is what a step begins with."""
    if model not in _known:
        _known[model] = ExternalWrites(model)
    elif _known[model].written():
        _known[model].remember()
    return _known[model]


class ExternalWrites:
    """The tensors of a module as they were left, by the names that programs have for them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._look()
        self.times = 0  # that other values were put there
        self.steps = 0  # that a step trained
        self.last: weakref.ref[Any] | None = None  # the step that did
        self.remember()

    def _look(self) -> None:
        """Where the tensors of the module are, and the modules that it is made of."""
        modules = list(self.model().named_modules())  # type: ignore[union-attr]
        self.places = [(readable(f"{kind}.{f'{path}.{k}'.strip('.')}"), table, k) for path, m in modules
                       for kind, table in (("param", m._parameters), ("buffer", m._buffers)) for k, t in table.items() if t is not None]  # fmt: skip
        self.modules = [(m._modules, k, child) for _, m in modules for k, child in m._modules.items()]

    def remember(self) -> None:
        self.times += 1
        self.tensors = self._now()
        self.plain = [t for t in self.tensors if t is not None and has_values(t) and not t.is_inference()]
        self.versions, self.pointers = [t._version for t in self.plain], [t.data_ptr() for t in self.plain]
        sampled = [(t, x) for t in self.plain if (x := _sample(t)) is not None]
        self.samples = [x for _, x in sampled]
        self.seen, self.were = _bytes(self.samples), {id(t): x.clone() for t, x in sampled}

    @property
    def now(self) -> tuple[int, int]:
        """What steps compare, to see whether the module is as they know it."""
        return self.times, self.steps

    def trained(self, step: Any) -> None:
        """A step of the module has taken one: it has newer values than the module."""
        self.steps, self.last = self.steps + 1, weakref.ref(step)

    def trained_by(self) -> Any:
        """The step that was the last to take one, if it is still there."""
        return self.last and self.last()

    def everything(self) -> dict[str, Tensor]:
        return {n: t for n, t in self._named(self._now()) if t is not None}

    def _now(self) -> list[Any]:
        return [table.get(k) for _, table, k in self.places]

    def written(self, apart: Collection[str] = ()) -> dict[str, Tensor]:
        """The tensors that someone has written into, or put in another's place, since; where it is not known of which, all but those `apart`."""
        if any(table.get(k) is not child for table, k, child in self.modules):
            before, known = dict(self._named(self.tensors)), {id(t) for t in self.tensors}
            self._look()  # a tensor that has only come under another name was not written
            self.tensors = [t if n not in before and id(t) in known else before.get(n) for n, t in self._named(self._now())]
        now, plain = self._now(), self.plain
        same, sampled = all(a is b for a, b in zip(now, self.tensors, strict=True)), torch.equal(_bytes(self.samples), self.seen)
        if same and sampled and [t._version for t in plain] == self.versions and [t.data_ptr() for t in plain] == self.pointers:
            return {}
        marks = {id(t): (v, p) for t, v, p in zip(plain, self.versions, self.pointers, strict=True)}

        def changed(n: str, t: Tensor) -> bool:
            if id(t) not in marks or (t._version, t.data_ptr()) != marks[id(t)]:
                return id(t) in marks
            x = _sample(t)  # past the versions, it may be any that is looked at
            return x is not None and not sampled and (n not in apart or not torch.equal(_bytes([x]), _bytes([self.were[id(t)]])))

        both = zip(self._named(now), self.tensors, strict=True)
        return {n: t for (n, t), before in both if t is not None and (t is not before or changed(n, t))}

    def _named(self, tensors: list[Any]) -> Iterator[tuple[str, Any]]:
        return ((name, t) for (name, _, _), t in zip(self.places, tensors, strict=True))


def digest(tensors: Mapping[str, Tensor]) -> int:
    """What ranks compare."""
    found = 0
    for t in tensors.values():
        found = zlib.crc32(_bytes([t.detach().reshape(-1).cpu()]).numpy(), found)
    return found


def _sample(t: Any) -> Tensor | None:
    """A view of the first, the middle and the last element, where looking at it waits for nothing."""
    if not isinstance(t, Tensor) or t.device.type != "cpu" or not t.numel() or not t.is_contiguous() or t.is_complex():
        return None
    return t.detach().view(-1)[:: max(1, (t.numel() - 1) // 2)]


def _bytes(tensors: list[Tensor]) -> Tensor:
    """Their bytes, so that NaN equals itself."""
    by = {d: torch.cat([t for t in tensors if t.dtype is d]) for d in dict.fromkeys(t.dtype for t in tensors)}
    return torch.cat([x.contiguous().view(torch.uint8) for x in by.values()]) if by else torch.empty(0, dtype=torch.uint8)


class OptimizerState:
    """The state that an optimizer had when a step was made, or that the step put there."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.remember()

    def remember(self) -> None:
        self.optimizer_state, self.tensors = self.optimizer.state, self._now()
        self.versions = [t._version for t in self.tensors]

    def _now(self) -> list[Tensor]:
        return [x for s in self.optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]

    def written(self) -> bool:
        """Whether another was loaded, or this one changed."""
        if self.optimizer.state is not self.optimizer_state or [t._version for t in self.tensors] != self.versions:
            return True
        now = self._now() if self.optimizer_state else []
        return len(now) != len(self.tensors) or any(a is not b for a, b in zip(now, self.tensors, strict=True))
