"""Repeated blocks: a layer is traced once, and its nodes are made again for every layer like it.

Two modules are candidates when class, children, parameter shapes and dtypes, `extra_repr`, training mode and tying agree and
neither has hooks. The first is traced with placeholders for its arguments, parameters and buffers; attributes in which
candidates differ (a layer number, say) are watched, and one that the trace read makes modules with another value of it
different after all. So capture time does not grow with depth, and a block is only reused where its trace could not differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from weft.core.node import Node, make, toposort
from weft.frontend.capture.caches import CacheNeeded, close, is_cache, opened
from weft.frontend.capture.calls import Calls, ModuleCall
from weft.frontend.capture.complexes import any_complex
from weft.frontend.capture.constants import through
from weft.frontend.capture.isomorphic import MISSING, PLAIN, Key, attributes, differing, hooked, restore, same, tensors_of, tying, watched
from weft.frontend.capture.precision import autocast_dtype
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.values import Cell, Ref, Step

RESULT = object()  # stands for a tensor in what a block returned


# -- templates ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A tensor that a block gave: its storage, of a slot or of the block's own; the steps to it; whether its gradient stops; how it lies."""

    base: int
    steps: tuple[Step, ...]
    stopped: bool
    like: Tensor


@dataclass
class Template:
    """One traced block: placeholders in, nodes out, and what of it was read."""

    slots: list[Node]  # placeholders of arguments, then of parameters and buffers
    results: list[Node]
    given: list[Given]  # the results as tensors: they may share storage with each other and with slots
    cells: list[Node]  # what the block's own storages hold, counted on from the slots
    written: dict[int, Node]  # slot -> what the block left in it
    body: list[Node]
    spec: Any  # of what the block returned; leaves are results by number, or plain values
    leaves: list[Any]
    read: dict[Key, Any]
    looks: dict[int, Node]  # slot -> what stood there, where the trace looked at it
    inside: tuple[ModuleCall, ...] = ()

    def instance(self, actual: list[Node], recorder: Recorder) -> dict[Node, Node]:
        """The body made again over other nodes; every random site anew."""
        made = dict(zip(self.slots, actual, strict=True))
        for node in self.body:
            attrs = dict(node.attrs)
            if "site" in attrs:
                attrs["site"] = recorder.next_site()
            made[node] = make(node.op, tuple(made.get(a, a) for a in node.args), attrs)
            if node in recorder.lines:
                recorder.lines[made[node]] = recorder.lines[node]
        return made

    def same(self, other: Template) -> bool:
        """Whether the two compute the same, whatever their random sites are called."""
        if len(self.body) != len(other.body) or len(self.results) != len(other.results) or not same(self.leaves, other.leaves):
            return False
        match, sites = dict(zip(other.slots, self.slots, strict=True)), {}
        for theirs, mine in zip(other.body, self.body, strict=True):
            a, b = dict(theirs.attrs), dict(mine.attrs)
            site = a.pop("site", None)
            if theirs.op is not mine.op or sites.setdefault(site, b.pop("site", None)) != dict(mine.attrs).get("site") or a != b:
                return False
            if tuple(match.get(x, x) for x in theirs.args) != mine.args:
                return False
            match[theirs] = mine
        written = {i: match.get(n, n) for i, n in other.written.items()}
        return [match.get(n, n) for n in other.results] == self.results and written == self.written


@dataclass(frozen=True)
class Instance:
    """Where a block stands in the program."""

    path: str
    inputs: tuple[Node, ...]
    parameters: tuple[Node, ...]
    outputs: tuple[Node, ...]
    nodes: tuple[Node, ...]


@dataclass
class Blocks:
    """Intercepts module calls and answers those it has traced before."""

    recorder: Recorder
    isomorphic: dict[nn.Module, list[nn.Module]]
    names: dict[nn.Module, str]
    templates: dict[Any, list[Template]] = field(default_factory=dict)
    found: dict[Any, list[Instance]] = field(default_factory=dict)
    depth: int = 0
    differing: dict[int, set[Key]] = field(default_factory=dict)
    cacheless: bool = True  # whether layers may be traced without the empty caches they are given
    cached: dict[int, tuple[Any, set[Any]]] = field(default_factory=dict)  # such caches, with the layers that were given them
    calls: Calls = field(init=False)

    def __post_init__(self) -> None:
        self.calls = Calls(self.recorder, self.names)

    def call(self, plain: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        caches = [x for x in leaves if is_cache(x)] if self.cacheless else []
        given = [None if is_cache(x) else x for x in leaves] if caches else leaves
        template = None
        if module in self.isomorphic and not hooked(module) and self._simple(given):
            self._leave_out(module, caches)
            key = id(self.isomorphic[module]), spec, tuple(map(_leaf_key, leaves)), tying(module), torch.is_grad_enabled(), autocast_dtype()
            template = self._known(key, plain, module, leaves, given, spec)
        if template is None:
            return self.calls.note(module, leaves, spec, lambda: plain(module, *args, **kwargs))
        return self.calls.note(module, given, spec, lambda: self._replay(key, template, module, given))

    def _known(self, key: Any, plain: Any, module: nn.Module, leaves: list[Any], given: list[Any], spec: Any) -> Template | None:
        """What was traced of a module like this, or is now."""
        for template in self.templates.setdefault(key, []):
            if self._reusable(template, module, given):
                return template
        made = self._trace(plain, module, leaves, spec, [x for x in leaves if is_cache(x)] if given is not leaves else [])
        if made is not None:
            self.templates[key].append(made)
        return made

    def _leave_out(self, module: nn.Module, caches: list[Any]) -> None:
        """Close the caches; a layer that comes twice would find there what it left."""
        for cache in caches:
            _, layers = self.cached.setdefault(id(cache), (cache, set()))
            own = {value for (_, name), value in attributes(module).items() if name == "layer_idx"} | {module}
            if own & layers:
                raise CacheNeeded("a layer is called twice")
            layers |= own
            close(cache)

    def _simple(self, leaves: list[Any]) -> bool:
        """Tensors of cells of their own, and plain values."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        cells = {id(self.recorder.ref(t).cell) for t in tensors}
        return len(cells) == len(tensors) and all(isinstance(x, (Tensor, *PLAIN)) for x in leaves) and not any_complex(tensors)

    def _reusable(self, template: Template, module: nn.Module, leaves: list[Any]) -> bool:
        """Whether all the trace read of its module, and looked at, is the same here; a block around this one has then read it too."""
        actual = [self.recorder.ref(t).read() for t in _slots(leaves, module)] if template.looks else []
        if not all(through(self.recorder, actual[i], look=True) is node for i, node in template.looks.items()):
            return False
        here = attributes(module) if template.read else {}
        if not all(same(value, here.get(k, MISSING)) for k, value in template.read.items()):
            return False
        for path, name in template.read:
            getattr(module.get_submodule(path), name, None)
        return True

    # -- tracing the first of a kind -----------------------------------------------------------------------------------

    def _trace(self, plain: Any, module: nn.Module, leaves: list[Any], spec: Any, caches: list[Any]) -> Template | None:
        """Trace without the caches, and then with them: it must be the same."""
        template = self._traced(plain, module, [None if caches and is_cache(x) else x for x in leaves], spec)
        if caches and template is not None:
            self.cacheless = False
            try:
                with opened(caches):
                    again = self._traced(plain, module, leaves, spec)
            finally:
                self.cacheless = True
            if again is None or not template.same(again):
                raise CacheNeeded("a layer computes something else with it")
        return template

    def _traced(self, plain: Any, module: nn.Module, leaves: list[Any], spec: Any) -> Template | None:
        recorder = self.recorder
        stand_ins = tree_map_only(Tensor, recorder.placeholder, leaves)
        own = tensors_of(module)
        inner = {i: recorder.placeholder(t) for i, t in {id(t): t for _, _, t in own}.items()}
        slots = [t for t in stand_ins if isinstance(t, Tensor)] + list(inner.values())
        nodes = [recorder.ref(t).read() for t in slots]
        before = attributes(module)
        args, kwargs = tree_unflatten(stand_ins, spec)
        self.depth += 1
        try:
            with _swapped(own, inner, module), watched(module, self._differing(module)) as read, self.calls.separately() as inside:
                result = plain(module, *args, **kwargs)
                kept = [id(t) for _, _, t in tensors_of(module)] == [id(inner[id(t)]) for _, _, t in own]
        finally:
            self.depth -= 1
        after = attributes(module)
        if not kept or after.keys() != before.keys() or any(after[k] is not before[k] for k in after):
            restore(module, before)
            return None
        template = self._template(result, slots, nodes, {k: before.get(k, MISSING) for k in read})
        if template is not None:
            kept, path = {*template.slots, *template.body}, self.names.get(module, "")
            template.inside = tuple(c.within(path, set(template.slots), kept) for c in inside)
        return template

    def _differing(self, module: nn.Module) -> set[Key]:
        group = self.isomorphic[module]
        if id(group) not in self.differing:
            self.differing[id(group)] = differing(group)
        return self.differing[id(group)]

    def _template(self, result: Any, slots: list[Tensor], nodes: list[Node], read: dict[Any, Any]) -> Template | None:
        recorder = self.recorder
        leaves, spec = tree_flatten(result)
        if not all(isinstance(x, (Tensor, *PLAIN)) for x in leaves) or any_complex(leaves):
            return None
        results = [recorder.node(x) for x in leaves if isinstance(x, Tensor)]
        storages = {id(recorder.ref(t).cell): i for i, t in enumerate(slots)}
        given, cells = [], []
        for x in (x for x in leaves if isinstance(x, Tensor)):
            ref = recorder.ref(x)
            if ref.steps is None:
                return None
            if id(ref.cell) not in storages:
                storages[id(ref.cell)] = len(slots) + len(cells)
                cells.append(ref.cell.node)
            given.append(Given(storages[id(ref.cell)], ref.steps, ref.stopped, x))
        written = {i: recorder.ref(t).cell.node for i, t in enumerate(slots) if recorder.ref(t).cell.version}
        body = _between(nodes, [*results, *cells, *written.values()])
        looks = {i: through(recorder, recorder.stands[n]) for i, n in enumerate(nodes) if n in recorder.looked}
        plain = [RESULT if isinstance(x, Tensor) else x for x in leaves]
        return Template(nodes, results, given, cells, written, body, spec, plain, read, looks)

    # -- the same again ------------------------------------------------------------------------------------------------

    def _replay(self, key: Any, template: Template, module: nn.Module, leaves: list[Any]) -> Any:
        recorder = self.recorder
        tensors = _slots(leaves, module)
        actual = [recorder.node(t) for t in tensors]
        made = template.instance(actual, recorder)
        for i, node in template.written.items():
            recorder.ref(tensors[i]).write(made.get(node, node))
        storages = [recorder.ref(t) for t in tensors] + [Ref(Cell(made.get(n, n))) for n in template.cells]
        results = (recorder.seen(storages[g.base], g.steps, g.stopped, g.like) for g in template.given)
        out = [next(results) if x is RESULT else x for x in template.leaves]
        self.calls.noted += [c.at(self.names.get(module, ""), made) for c in template.inside]
        if not self.depth:
            self._note(key, module, template, made, actual)
        return tree_unflatten(out, template.spec)

    def _note(self, key: Any, module: nn.Module, template: Template, made: dict[Node, Node], actual: list[Node]) -> None:
        inputs = len(actual) - len({id(t) for _, _, t in tensors_of(module)})
        instance = Instance(
            self.names.get(module, type(module).__name__),
            tuple(actual[:inputs]),
            tuple(actual[inputs:]),
            tuple(made.get(n, n) for n in template.results),
            tuple(made[n] for n in template.body),
        )
        self.found.setdefault((key, id(template)), []).append(instance)


def _slots(leaves: list[Any], module: nn.Module) -> list[Tensor]:
    """The tensors that a block reads: its arguments, then its parameters and buffers."""
    return [x for x in leaves if isinstance(x, Tensor)] + list({id(t): t for _, _, t in tensors_of(module)}.values())


def _leaf_key(leaf: Any) -> Any:
    if is_cache(leaf):
        return "cache"
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _between(slots: list[Node], results: list[Node]) -> list[Node]:
    """The nodes that depend on the slots and are needed for the results; random ones always count as the block's own."""
    inside, body = set(slots), []
    for node in toposort(results):
        if node not in inside and (any(a in inside for a in node.args) or "site" in dict(node.attrs)):
            inside.add(node)
            body.append(node)
    return body


@contextmanager
def _swapped(own: list[tuple[str, str, Tensor]], inner: dict[int, Tensor], module: nn.Module) -> Iterator[None]:
    """Inside, the block's parameters and buffers are the placeholders."""
    paths = dict(module.named_modules(remove_duplicate=False))

    def put(path: str, name: str, tensor: Tensor) -> None:
        owner = paths[path]
        (owner._parameters if name in owner._parameters else owner._buffers)[name] = tensor

    try:
        for path, name, t in own:
            put(path, name, inner[id(t)])
        yield
    finally:
        for path, name, t in own:
            put(path, name, t)


@contextmanager
def intercepted(blocks: Blocks) -> Iterator[None]:
    """Inside, calls of modules go through `blocks`."""
    plain = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return blocks.call(plain, self, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]
