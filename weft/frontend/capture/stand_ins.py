"""An optimizer's own `step()`, run on stand-ins: parameters whose values, gradients, state and settings are inputs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.core.errors import CaptureError
from weft.core.node import Node, toposort
from weft.core.role import Role
from weft.frontend.capture.handlers import to_dtype
from weft.frontend.capture.modes import listening_to_torch
from weft.frontend.capture.numbers import WIDE, Number, Questions, Value, asking, number_of
from weft.frontend.capture.optimizer_settings import COUNT, HOW, OWN, all_settings, is_given, is_single_number, number, settings_home
from weft.frontend.capture.recorder import Recorder
from weft.ops import pointwise as w
from weft.ops.source import input_op


def own_step(step: Any) -> Any:
    """A step without what torch puts around it: profiling, hooks, no_grad."""
    while hasattr(step, "__wrapped__") and step.__code__.co_filename.endswith(("torch/optim/optimizer.py", "torch/utils/_contextlib.py")):
        step = step.__wrapped__
    return step


class _Kept(dict[Any, Any]):
    """State of a parameter, or a group's settings: what is put there for the first time is what the state begins with."""

    begin: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, self.begin(key, value) if self.begin is not None and key not in self else value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for k, x in dict(*args, **kwargs).items():
            self[k] = x


Leaf = tuple[str, str]  # (whose, which): `p3`, a parameter by its number, or `group0`


@dataclass
class StandIns:
    """An optimizer on stand-ins for some parameters: runs its step, and tells what becomes of them."""

    optimizer: torch.optim.Optimizer
    params: Sequence[tuple[int, Tensor, torch.dtype]]  # (group, parameter, dtype of its gradient)
    given: Collection[str]
    dtype: torch.dtype | None = None  # in which floats are tried, where not in their own
    recorder: Recorder = field(default_factory=lambda: Recorder(computed=number_of))
    initial: dict[Leaf, Node] = field(default_factory=dict)
    late: set[Leaf] = field(default_factory=set)  # state whose first value is made of gradients
    trees: dict[str, dict[Any, Any]] = field(default_factory=dict)  # of each parameter or group: key -> (how it is nested, what its leaves are)
    owner: dict[Node, str] = field(default_factory=dict)
    group_keys: dict[str, set[str]] = field(default_factory=dict)  # numbers of a group, or of the optimizer itself, that the step changes

    def __post_init__(self) -> None:
        self.settings = all_settings(self.optimizer)
        self.questions = Questions({f"{k}.{g}": x for g, s in self.settings.items() for k, x in s.numbers.items() if is_given(k, self.given)})
        self.group_keys = self.group_keys or {g: set() for g in (*self.settings, OWN)}
        for k, (_, p, _) in enumerate(self.params):
            self._note(f"p{k}", self.optimizer.state.get(p, {}))
        for g, keys in self.group_keys.items():
            home = settings_home(self.optimizer, g)
            self._note(f"group{g}", {key: home[key] for key in keys if key in home})

    def _note(self, who: str, state: Mapping[Any, Any]) -> None:
        self.trees[who] = {key: self._tree(x) for key, x in state.items()}

    def _tree(self, x: Any) -> tuple[Any, list[Any]]:
        leaves, spec = tree_flatten(x)
        return spec, [self._kind(leaf) for leaf in leaves]

    def _kind(self, x: Any) -> Any:
        """What a leaf of the state is: a tensor's shape and dtype, a kind of number, or itself."""
        if isinstance(x, Tensor):
            return tuple(x.shape), self._as(x.dtype)
        if isinstance(x, torch.SymFloat):
            return float
        return type(x) if is_single_number(x) else ("fixed", x)

    def _as(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def input(self, who: str, which: str, shape: Any, dtype: torch.dtype, role: Role | None = None) -> Node:
        name = f"{which}.{who}"
        node = self.recorder.inputs.get(name)
        if node is None:
            node = self.recorder.declare(name, shape, dtype, role)
            self.owner[node] = who
        return node

    def _stand_in(self, who: str, key: Any) -> Any:
        """State that is there, as inputs, nested as it is."""
        spec, kinds = self.trees[who][key]
        leaves = []
        for which, kind in zip(leaf_names(key, len(kinds)), kinds, strict=True):
            if kind in (int, float):
                leaves.append(Number(Value(self.input(who, which, (), WIDE, Role.STATE))))
            elif kind[0] == "fixed":
                leaves.append(kind[1])
            else:
                leaves.append(self.recorder.wrap(self.input(who, which, *kind, Role.STATE)))
        return tree_unflatten(leaves, spec)

    def _begin(self, who: str, key: Any, value: Any) -> Any:
        """What is put where nothing was: an input from here on, if it can be told without a gradient."""
        leaves, spec = tree_flatten(value)
        if leaves:
            self.trees[who].setdefault(key, self._tree(value))
        made = []
        for which, leaf in zip(leaf_names(key, len(leaves)), leaves, strict=True):
            kind = self._kind(leaf)
            node = leaf.node.node if isinstance(leaf, torch.SymFloat) else self.recorder.ref(leaf).read() if isinstance(leaf, Tensor) else None
            if kind in (int, float) and node is None:
                node = self.recorder.number(leaf, WIDE)
            if node is None:
                made.append(leaf)
            elif any(n.op is input_op and n.role is not Role.PARAMETER for n in toposort([node])):
                self.late.add((who, which))
                made.append(leaf)
            else:
                self.initial[who, which] = node
                now = self.input(who, which, node.shape, node.dtype, Role.STATE)
                if isinstance(leaf, Tensor):
                    self.recorder.ref(leaf).write(now)
                made.append(leaf if isinstance(leaf, Tensor) else Number(Value(now)))
        return tree_unflatten(made, spec)

    def _setting(self, group: str, key: str, x: Any) -> Any:
        """A setting as the step sees it: an input if it is given, else as it is."""
        if key in HOW:
            return HOW[key]
        if isinstance(x, (tuple, list)) and x and all(map(is_single_number, x)):
            return type(x)(self._setting(group, f"{key}_at_{j}", v) for j, v in enumerate(x))
        if not is_single_number(x) or not is_given(key, self.given):
            return number(x) if isinstance(x, Tensor) and x.numel() == 1 and self.dtype is not None else x
        node = self.input(group, key, (), WIDE, Role.SETTING)
        self.owner[node] = ""
        if not isinstance(x, Tensor):
            return Number(Value(node))
        return self.recorder.wrap(to_dtype(node, self._as(x.dtype))).reshape(x.shape)

    def run(self, fresh: bool) -> dict[Leaf, Node]:
        """The step once: the next value of every parameter and all its state. `fresh` state is not there yet."""
        mine: Any = object.__new__(type(self.optimizer))
        mine.__dict__.update(self.optimizer.__dict__)
        mine.__dict__.pop("step", None)
        own = self.settings[OWN].numbers if OWN in self.settings else {}
        mine.__dict__.update({k: self._setting(OWN, k, mine.__dict__[k]) for k in own if k not in self.group_keys[OWN]})
        mine.__dict__.update({k: self._stand_in(f"group{OWN}", k) for k in self.group_keys[OWN]})
        stood, states, groups = [], defaultdict[Any, Any](_Kept), []
        for i, group in enumerate(self.optimizer.param_groups):
            keys = self.group_keys[str(i)]
            kept = _Kept({k: self._setting(str(i), k, x) for k, x in group.items() if k != "params" and k not in keys})
            kept |= {k: self._stand_in(f"group{i}", k) for k in keys if k in self.trees[f"group{i}"] and (k in group or not fresh)}
            kept["params"] = kept_params = list[Tensor]()
            kept.begin = functools.partial(self._begin, f"group{i}")
            groups.append(kept)
            for k, (at, p, dtype) in enumerate(self.params):
                if at == i:
                    who = f"p{k}"
                    stand = self.recorder.wrap(self.input(who, "param", p.shape, self._as(p.dtype), Role.PARAMETER), p)
                    stand.grad = self.recorder.wrap(self.input(who, "grad", p.shape, self._as(dtype)), stand)
                    stand.__dict__.update({n: x for n, x in vars(p).items() if n not in stand.__dict__})
                    there = self.trees[who] if p in self.optimizer.state or not fresh else {}
                    states[stand] = state = _Kept({key: self._stand_in(who, key) for key in there})
                    state.begin = functools.partial(self._begin, who)
                    stood.append((who, stand))
                    kept_params.append(stand)
        mine.param_groups, mine.state = groups, states
        before = dict(mine.__dict__)
        with torch.no_grad():
            own_step(type(self.optimizer).step)(mine)
        self._require_state(mine, before, len(states) != len(stood))
        out = {(who, "param"): self.recorder.ref(t).read() for who, t in stood}
        for who, t in stood:
            out |= self._left(who, states[t])
        for i, group in enumerate(groups):
            out |= self._left_in_group(i, group)
        return out | self._left(f"group{OWN}", {k: mine.__dict__[k] for k in self.group_keys[OWN]})

    def _require_state(self, mine: Any, before: Mapping[str, Any], elsewhere: bool) -> None:
        """What a step leaves in the optimizer's attributes: numbers are state, all else is refused."""
        fixed = {k: x for k, x in mine.__dict__.items() if k not in self.group_keys[OWN]}
        changed = [k for k, x in fixed.items() if k not in before or (x is not before[k] and (isinstance(x, torch.SymFloat) or x != before[k]))]
        if changed and all(k in before and is_number(before[k]) and is_number(fixed[k]) for k in changed):
            raise GroupChanges(OWN, set(changed))
        if changed or elsewhere:
            raise CaptureError(
                f"{type(mine).__name__} keeps state outside of its parameters' own",
                needed="what steps hand on in self.state[p], in the parameter groups, or in numbers that the optimizer has from the start",
                found=f"self.{changed[0]}" if changed else "state of something else than a parameter",
            )

    def _left(self, who: str, state: Mapping[Any, Any]) -> dict[Leaf, Node]:
        out: dict[Leaf, Node] = {}
        for key, x in state.items():
            leaves, _ = tree_flatten(x)
            if leaves:
                self.trees[who].setdefault(key, self._tree(x))
            for which, leaf in zip(leaf_names(key, len(leaves)), leaves, strict=True):
                if isinstance(leaf, torch.SymFloat):
                    out[who, which] = leaf.node.node
                elif isinstance(leaf, Tensor):
                    out[who, which] = self.recorder.ref(leaf).read()
                elif is_single_number(leaf):
                    out[who, which] = self.recorder.number(leaf, WIDE)
        return out

    def _left_in_group(self, i: int, now: Mapping[str, Any]) -> dict[Leaf, Node]:
        """Numbers of a group that the step has changed are state too; those it had not been known to change are learnt."""
        before = self.optimizer.param_groups[i]
        keys = self.group_keys[str(i)]
        fixed = [k for k in now if k not in keys and k not in HOW and k != "params"]
        moved = [k for k in fixed if k not in before or (is_single_number(now[k]) and not isinstance(now[k], (torch.SymFloat, Tensor)) and now[k] != before[k])]
        moved += [k for k in fixed if isinstance(now[k], torch.SymFloat) and now[k].node.node.op is not input_op]
        if moved:
            raise GroupChanges(str(i), set(moved))
        return self._left(f"group{i}", {k: now[k] for k in keys if k in now})

    # -- both runs -------------------------------------------------------------------------------------------------------------------------

    def traced(self) -> dict[Leaf, Node]:
        """The step for the first time, and later: one program of both."""
        with listening_to_torch(self.recorder), asking(self.questions):
            out = self._both_branches(True)
            if len(out) > len(self.params) and not all(p in self.optimizer.state for _, p, _ in self.params):
                later = self._both_branches(False)
                for leaf in out.keys() | later.keys():
                    a, b = out.get(leaf, later.get(leaf)), later.get(leaf, out.get(leaf))
                    assert a is not None and b is not None
                    out[leaf] = a if a is b else _where(w.lt(self.input("", COUNT, (), WIDE), 1.5), a, b)
                self.owner[self.input("", COUNT, (), WIDE)] = ""
            if "seed" in self.recorder.inputs:
                raise CaptureError(
                    f"{type(self.optimizer).__name__} draws random numbers as it updates", needed="an update without randomness", found="a draw"
                )
            return out

    def _both_branches(self, fresh: bool) -> dict[Leaf, Node]:
        out = self.questions.joined(lambda: self.run(fresh), self._join)
        if isinstance(out, Exception):
            raise out
        return out  # type: ignore[no-any-return]

    def _join(self, condition: Node, a: dict[Leaf, Node], b: dict[Leaf, Node]) -> dict[Leaf, Node]:
        def there(out: dict[Leaf, Node], other: dict[Leaf, Node], leaf: Leaf) -> Node:
            return out.get(leaf) or self.recorder.inputs.get(f"{leaf[1]}.{leaf[0]}") or other[leaf]

        return {leaf: x if (x := there(a, b, leaf)) is (y := there(b, a, leaf)) else _where(condition, x, y) for leaf in {**a, **b}}


class GroupChanges(Exception):
    """A step changes numbers of a group, which are state then."""


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float, torch.SymFloat)) and not isinstance(x, bool)


def _where(condition: Node, a: Node, b: Node) -> Node:
    return w.where(condition, a, to_dtype(b, a.dtype))  # type: ignore[no-any-return]


def leaf_names(key: Any, n: int) -> list[str]:
    return [str(key)] if n == 1 else [f"{key}_{i}" for i in range(n)]
