"""Calls of modules as a trace records them: where each stands in the program, so that one can be taken out of it and run by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from weft.core.node import Node, toposort
from weft.frontend.capture.isomorphic import PLAIN
from weft.frontend.capture.precision import autocast_dtype
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.values import TAG


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module that has tensors. Leaves of what it is given and of what it returns are nodes and plain values."""

    path: str
    given: tuple[Any, ...]
    spec: Any  # how what is given was nested: (args, kwargs)
    results: tuple[Any, ...]
    nest: Any
    moving: frozenset[Node]  # those of them that a gradient may flow through
    written: tuple[tuple[str, Node], ...]  # buffers that it left changed, by their name in the module
    grad: bool  # whether gradients were on
    cast: torch.dtype | None  # autocast's
    complete: bool  # whether all it depends on is known
    inside: tuple[ModuleCall, ...] = ()

    @property
    def arguments(self) -> list[Node]:
        return list(dict.fromkeys(x for x in self.given if isinstance(x, Node)))

    @property
    def returned(self) -> list[Node]:
        return [x for x in self.results if isinstance(x, Node)]

    @property
    def nodes(self) -> list[Node]:
        return [*self.arguments, *self.returned, *(n for _, n in self.written)]

    def at(self, path: str, made: Mapping[Node, Node]) -> ModuleCall:
        """The same call in a block that was made again over other nodes, at another path."""

        def there(x: Any) -> Any:
            return made.get(x, x) if isinstance(x, Node) else x

        return replace(
            self, path=f"{path}.{self.path}".strip("."), given=tuple(map(there, self.given)), results=tuple(map(there, self.results)),
            moving=frozenset(map(there, self.moving)), written=tuple((n, there(x)) for n, x in self.written),
            inside=tuple(c.at(path, made) for c in self.inside),
        )  # fmt: skip

    def within(self, path: str, slots: set[Node], kept: set[Node]) -> ModuleCall:
        """The call as a part of the block at the path, which is made again of the nodes kept; all of it if it needs no other."""
        lost = [n for n in self.nodes if n not in kept and not slots.isdisjoint(toposort([n]))]
        inside, below = tuple(c.within(path, slots, kept) for c in self.inside), not path or self.path.startswith(f"{path}.")
        return replace(self, path=self.path.removeprefix(path).strip("."), complete=self.complete and below and not lost, inside=inside)


@dataclass
class Calls:
    """Notes the calls of modules, those inside others with these."""

    recorder: Recorder
    names: Mapping[nn.Module, str]
    noted: list[ModuleCall] = field(default_factory=list)

    @contextmanager
    def separately(self) -> Iterator[list[ModuleCall]]:
        """Inside, calls are noted in a list of their own."""
        outer, self.noted = self.noted, []
        try:
            yield self.noted
        finally:
            self.noted = outer

    def note(self, module: nn.Module, leaves: list[Any], spec: Any, answer: Callable[[], Any]) -> Any:
        """What the call answers; it is noted if the module has tensors."""
        own = _own(module)
        if not own:
            return answer()
        grad, cast = torch.is_grad_enabled(), autocast_dtype()
        before, given = self._versions([*own.values(), *leaves]), self._nodes(leaves)
        plain = all(self.recorder.ref(t).read().op.is_input for t in own.values() if hasattr(t, TAG))  # no one has computed them
        with self.separately() as inside:
            result = answer()
        found, nest = tree_flatten(result)
        results, written = self._nodes(found), self._written(module, own, before)
        moving = frozenset(self.recorder.ref(t).read() for t in [*leaves, *found] if isinstance(t, Tensor) and hasattr(t, TAG) and self._moves(t))
        still = all(self._version(t) == before[id(t)] for t in leaves if isinstance(t, Tensor) and hasattr(t, TAG))
        full = plain and still and module in self.names and None not in (given, results, written)
        self.noted.append(
            ModuleCall(self.names.get(module, ""), given or (), spec, results or (), nest, moving, written or (), grad, cast, full, tuple(inside))
        )
        return result

    def _written(self, module: nn.Module, own: dict[str, Tensor], before: dict[int, int]) -> tuple[tuple[str, Node], ...] | None:
        """Buffers that are others now; None where a parameter is, or where it cannot be told."""
        now = _own(module)
        if now.keys() != own.keys():
            return None
        changed = [n for n, t in now.items() if t is not own[n] or self._version(t) != before[id(t)]]
        if any(n in dict(module.named_parameters()) or not hasattr(now[n], TAG) for n in changed):
            return None
        return tuple((n, self.recorder.ref(now[n]).read()) for n in changed)

    def _version(self, t: Tensor) -> int:
        return self.recorder.ref(t).cell.version if hasattr(t, TAG) else -1

    def _versions(self, values: list[Any]) -> dict[int, int]:
        return {id(t): self._version(t) for t in values if isinstance(t, Tensor)}

    def _nodes(self, leaves: list[Any]) -> tuple[Any, ...] | None:
        """Traced tensors as nodes; None where something else than these and plain values is among them."""
        if not all(isinstance(x, PLAIN) or (isinstance(x, Tensor) and hasattr(x, TAG) and not x.is_complex()) for x in leaves):
            return None
        return tuple(self.recorder.ref(x).read() if isinstance(x, Tensor) else x for x in leaves)

    def _moves(self, t: Tensor) -> bool:
        if self.recorder.joint:
            with torch._C.DisableTorchFunction():
                return t.requires_grad
        return not self.recorder.ref(t).stopped and self.recorder.moves(self.recorder.ref(t).read())


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
