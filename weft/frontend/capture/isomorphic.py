"""Which modules are the same: by what can be seen from outside, and by what a trace of them reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set", "_is_full_backward_hook",
        "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
        *_HOOKS}  # fmt: skip
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def tensors_of(module: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Parameters and buffers with the module path and name they hang at, shared ones as often as they stand."""
    found = []
    for path, m in module.named_modules(remove_duplicate=False):
        for table in (m._parameters, m._buffers):
            found += [(path, name, t) for name, t in table.items() if t is not None]
    return found


def shape_key(module: nn.Module, known: dict[nn.Module, Any]) -> Any:
    """What two blocks must share before they are compared in use; None where a hook or an own forward forbids it."""
    if module in known:
        return known[module]
    children = [(name, shape_key(m, known)) for name, m in module._modules.items() if m is not None]
    own = [
        (n, tuple(t.shape), t.dtype, t.requires_grad)
        for n, t in itertools.chain(module._parameters.items(), module._buffers.items())
        if t is not None
    ]
    bad = _hooked_here(module) or any(key is None for _, key in children)
    key = None if bad else (type(module), module.training, module.extra_repr(), tuple(own), tuple(children))
    known[module] = key
    return key


def _hooked_here(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or any(getattr(module, h) for h in _HOOKS)


def hooked(module: nn.Module) -> bool:
    """Whether anyone listens inside: hooks may come after the classes were made."""
    return any(map(_hooked_here, module.modules()))


def candidates(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Every module that has another like it, with all of its class; leaves are not worth it."""
    keys: dict[nn.Module, Any] = {}
    classes: dict[Any, list[nn.Module]] = {}
    for m in model.modules():
        key = shape_key(m, keys)
        if key is not None and m._modules and not isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            classes.setdefault(key, []).append(m)
    return {m: group for group in classes.values() if len(group) > 1 for m in group}


def tying(module: nn.Module) -> tuple[int, ...]:
    """Which of the tensors are the same one."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, (_, _, t) in enumerate(tensors_of(module)))


MISSING = object()  # what stands for an attribute a module does not have
Key = tuple[str, str]  # of an attribute: the path of its module, and its name


def attributes(module: nn.Module) -> dict[Key, Any]:
    """All attributes of a module and those in it, watched ones too."""
    found = {}
    for path, m in module.named_modules(remove_duplicate=False):
        found |= {(path, name): value for name, value in m.__dict__.items() if name not in _OWN}
        found |= {(path, name): value for (owner, name), value in _hidden.items() if owner is m and (path, name) not in found}
    return found


def restore(module: nn.Module, before: dict[Key, Any]) -> None:
    """Take back what a trace has left in attributes."""
    for path, m in module.named_modules(remove_duplicate=False):
        for name in [n for n in m.__dict__ if n not in _OWN]:
            if (path, name) in before:
                m.__dict__[name] = before[path, name]
            else:
                del m.__dict__[name]


def same(a: Any, b: Any) -> bool:
    """Surely the same: one object, or plain values that are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, functools.partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return isinstance(a, PLAIN) and a == b


def differing(group: list[nn.Module]) -> set[Key]:
    """Attributes that are not surely the same in all of a class; some may lack one."""
    first, *rest = map(attributes, group)
    keys = set(first).union(*rest)
    return {k for k in keys if not all(same(first.get(k, MISSING), r.get(k, MISSING)) for r in rest)}


# -- watching reads: a watched attribute is taken out of its module, so that looking it up falls to __getattr__ --------------

_hidden: dict[tuple[nn.Module, str], Any] = {}
_watches: list[tuple[dict[tuple[nn.Module, str], Key], set[Key]]] = []


def _look(plain: Any) -> Any:
    def look(self: nn.Module, name: str) -> Any:
        for keys, read in _watches:
            if (self, name) in keys:
                read.add(keys[self, name])
        return _hidden[self, name] if (self, name) in _hidden else plain(self, name)

    return look


@contextmanager
def watched(module: nn.Module, names: set[Key]) -> Iterator[set[Key]]:
    """Inside, reads of these attributes are noted, in watches around this one too."""
    paths = dict(module.named_modules(remove_duplicate=False))
    read = {(path, name) for path, name in names if hasattr(type(paths[path]), name)}  # the class would answer instead
    keys = {(paths[path], name): (path, name) for path, name in names - read}
    mine = [(owner, name) for owner, name in keys if (owner, name) not in _hidden and name in owner.__dict__]
    for owner, name in mine:
        _hidden[owner, name] = owner.__dict__.pop(name)
    plain = nn.Module.__getattr__
    nn.Module.__getattr__ = plain if _watches else _look(plain)  # type: ignore[method-assign]
    _watches.append((keys, read))
    try:
        yield read
    finally:
        _watches.pop()
        nn.Module.__getattr__ = plain  # type: ignore[method-assign]
        for owner, name in mine:
            owner.__dict__.setdefault(name, _hidden.pop((owner, name)))
