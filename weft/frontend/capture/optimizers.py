"""The update that an optimizer makes, captured from its own `step()`.

It is run on stand-ins of every kind of parameter, two of each. What the first update gives and
what later ones give are both traced, and joined where they differ. Parameters of one kind share one update; where one reads another's
gradient, all are traced together. An update that weft has an op for, as Adam's, is recognised by what it computes.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.core.errors import CaptureError, WeftError
from weft.core.node import Node, remade, toposort
from weft.core.role import Role
from weft.frontend.capture.guards import unheard
from weft.frontend.capture.numbers import WIDE, evaluate
from weft.frontend.capture.optimizer_settings import COUNT, number
from weft.frontend.capture.stand_ins import GroupChanges, Leaf, StandIns, leaf_names, own_step
from weft.ops.optimizers import KNOWN, Body, Known, body_of, runs_the_same
from weft.ops.pointwise import add
from weft.ops.source import input_op

# -- what is refused -------------------------------------------------------------------------------------------------------------------------


def require_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what one call of `step()` does not say: a closure that it calls, hooks after it, methods put into the object."""
    from torch.optim import optimizer as torchs

    name = type(optimizer).__name__
    wants = [p.name for p in list(inspect.signature(own_step(type(optimizer).step)).parameters.values())[1:] if p.default is p.empty and p.kind < 2]
    if wants:
        raise CaptureError(
            f"{name} takes a closure and computes the loss itself",
            needed="an optimizer whose step() takes nothing: its update follows from gradients that are there",
            found=f"{name}.step({', '.join(wants)})",
            try_="torch.optim.AdamW(model.parameters())",
        )
    own = [k for k in ("step", "_init_group") if k in vars(optimizer) and not _harmless(vars(optimizer)[k])]
    if own:
        raise CaptureError(
            f"{name} has a method of its own in place of its class's",
            needed="methods in the class: class Mine(torch.optim.Optimizer): def step(self): ...",
            found=f"optimizer.{own[0]} = {getattr(vars(optimizer)[own[0]], '__qualname__', '...')}",
        )
    inner = [k for k, x in vars(optimizer).items() if isinstance(x, torch.optim.Optimizer)]
    if inner:
        raise CaptureError(
            f"{name} has another optimizer's step in its own",
            needed="an optimizer that makes its update itself, of gradients, settings and state of its own",
            found=f"optimizer.{inner[0]}, a {type(vars(optimizer)[inner[0]]).__name__}",
            try_=f"optimizer.{inner[0]} for weft, and what {name} adds to it in the training loop, after step(batch)",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CaptureError(
            f"{name} has differentiable=True", needed="differentiable=False", found="differentiable=True", try_="leave it out"
        )
    everyones = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks = [*getattr(optimizer, "_optimizer_step_post_hooks", {}).values(), *(h for k in everyones for h in getattr(torchs, k, {}).values())]
    if hooks:
        raise CaptureError(
            f"{name} has hooks that run around its step",
            needed="an optimizer without hooks but those of register_step_pre_hook",
            found=", ".join(getattr(h, "__qualname__", type(h).__name__) for h in hooks),
            try_="call what they do in the training loop, after step(batch)",
        )


def _harmless(f: Any) -> bool:
    """A scheduler counts the calls of step and changes nothing; while a step is traced, its methods are weft's."""
    return bool(getattr(f, "_wrapped_by_lr_sched", False) or getattr(f, "of_weft", False))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Inside, nobody else listens to torch."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(unheard())
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


# -- updates ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """How a parameter is updated. Inputs are those of the trace: `param`, `grad` and every state by its name."""

    inputs: Mapping[str, Node]
    outputs: Mapping[str, Node]  # `param` and the state's next values
    initial: Mapping[str, Node]  # what state begins with, where it can be told
    nest: Mapping[Any, Any]  # how the optimizer keeps state: key -> (how its leaves are nested, their names, what each is)
    counted: tuple[str, ...] = ()  # state that counts updates
    known: tuple[Known, dict[str, Any]] | None = None  # the op that it is, with its attributes
    body: Body | None = None  # its arithmetic, where it is elementwise


@dataclass(frozen=True)
class Updates:
    """What one call of an optimizer's step does, of every parameter by its number, and of groups where their numbers change."""

    of: Sequence[Update]
    groups: Mapping[str, Update]  # by their number, and OWN
    settings: Mapping[str, Node]  # `lr.0` and others that are inputs
    count: Node | None  # which update it is, where that matters next to state that counts
    guards: Mapping[Node, bool]  # questions about settings, and the answers it holds for
    apart: bool = True  # no parameter reads another's


def captured_updates(optimizer: torch.optim.Optimizer, params: Sequence[tuple[int, Tensor, torch.dtype]], given: Collection[str]) -> Updates:
    """The updates of these parameters: (group, parameter, dtype of its gradient). Those of torch's own optimizers, which read nothing else than
    their groups and state, are traced once for each."""
    require_own_step(optimizer)
    key = _key(optimizer, params, given) if type(optimizer).__module__.startswith("torch.optim.") else None
    with _alone():
        if key is None or key not in _TRACED:
            made = _captured(optimizer, params, given)
            if key is None:
                return made
            if len(_TRACED) >= MOST_TRACED:
                _TRACED.clear()
            _TRACED[key] = made
        return _TRACED[key]


MOST_TRACED = 64
_TRACED: dict[Any, Updates] = {}


def _key(optimizer: torch.optim.Optimizer, params: Sequence[tuple[int, Tensor, torch.dtype]], given: Collection[str]) -> Any:
    """All that the trace of torch's own step depends on."""
    groups = tuple(tuple(sorted((k, type(x), repr(x)) for k, x in g.items() if k not in ("params", "param_names"))) for g in optimizer.param_groups)
    kinds = tuple((i, type(p), tuple(p.shape), p.stride(), p.device, p.dtype, dtype, _signature(optimizer, p)) for i, p, dtype in params)
    return type(optimizer), type(optimizer).step, groups, kinds, frozenset(given), torch.get_default_dtype()


def _captured(optimizer: torch.optim.Optimizer, params: Sequence[tuple[int, Tensor, torch.dtype]], given: Collection[str]) -> Updates:
    kinds: dict[Any, list[int]] = {}
    for j, (i, p, dtype) in enumerate(params):
        kinds.setdefault((i, tuple(p.shape), p.dtype, dtype, _signature(optimizer, p)), []).append(j)
    some = [j for members in kinds.values() for j in members[:2]]
    stood, out = _traced(optimizer, [params[j] for j in some], given, both=False)
    made = {j: _update(stood, out, f"p{k}") for k, j in enumerate(some)}
    if not _is_separable(stood, out) or not all(_same_update(made[m[0]], made[m[1]]) for m in kinds.values() if len(m) > 1):
        stood, out = _traced(optimizer, params, given)
        return _updates([stood], out, [_update(stood, out, f"p{j}") for j in range(len(params))], _is_separable(stood, out))
    tried = [stood]
    for m in kinds.values() if stood.questions.open else ():  # each kind by itself, so that answers do not multiply
        alone, what = _traced(optimizer, [params[m[0]]], given)
        made[m[0]], tried = _update(alone, what, "p0"), [*tried, alone]
    known: dict[Any, tuple[Known, dict[str, Any]] | None] = {}
    full = {m[0]: _recognised(optimizer, params[m[0]], made[m[0]], given, known, (i, *kind)) for (i, _, *kind), m in kinds.items()}
    shared = {j: full[m[0]] for m in kinds.values() for j in m}
    return _updates(tried, out, [shared[j] for j in range(len(params))], True)


def _traced(
    optimizer: torch.optim.Optimizer, params: Any, given: Any, dtype: torch.dtype | None = None, both: bool = True
) -> tuple[StandIns, dict[Leaf, Node]]:
    keys: dict[str, set[str]] = {}
    while True:
        stood = StandIns(optimizer, params, given, dtype, group_keys=keys)
        keys = stood.group_keys
        stood.questions.both = both
        try:
            return stood, stood.traced()
        except GroupChanges as change:
            i, more = change.args
            keys[i] |= more
        except WeftError:
            raise
        except Exception as error:
            if not both:  # not on this way: perhaps on the other
                return _traced(optimizer, params, given, dtype)
            name = type(optimizer).__name__
            raise CaptureError(
                f"{name}.step() cannot be followed",
                needed="an update that torch makes of dense gradients, in ops on tensors",
                found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                try_="an optimizer that plain torch runs on dense gradients, such as torch.optim.Adam",
            ) from error


def _signature(optimizer: torch.optim.Optimizer, p: Tensor) -> Any:
    """What else may tell two parameters apart: the state there is, and marks that the user put on one."""
    state = optimizer.state.get(p, {})
    marks = tuple((k, repr(x)) for k, x in vars(p).items() if isinstance(x, (bool, int, float, str)))
    return tuple((str(k), tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in tree_flatten(v)[0])) for k, v in state.items()), marks


def _update(stood: StandIns, out: Mapping[Leaf, Node], who: str) -> Update:
    outputs = {which: n for (at, which), n in out.items() if at == who}
    inputs = {n.attr("name").removesuffix(f".{who}"): n for n, at in stood.owner.items() if at == who}
    initial = {which: n for (at, which), n in stood.initial.items() if at == who}
    nest = {key: (spec, leaf_names(key, len(leaves)), leaves) for key, (spec, leaves) in stood.trees[who].items()}
    counted = tuple(s for s, n in outputs.items() if s != "param" and _counts(inputs.get(s), n, initial.get(s))) if not who.startswith("group") else ()
    return Update(inputs, outputs, initial, nest, counted)


def _counts(before: Node | None, after: Node, initial: Node | None) -> bool:
    """Whether a state goes up by one with every update, from 0 on where it is new."""
    if before is None or before.shape != () or after.op is not add or before not in after.args:
        return False
    one = next((a for a in after.args if a is not before), before)
    return one.op.is_number and one.attr("value") == 1 and (initial is None or evaluate(initial, {}) == 0)


def _is_separable(stood: StandIns, out: Mapping[Leaf, Node]) -> bool:
    """Whether what becomes of a parameter depends on its own inputs, settings and its group's numbers alone."""
    shared = {"", *(f"group{g}" for g in stood.group_keys)}
    return all(stood.owner[n] in {who, *shared} for (who, _), root in out.items() for n in toposort([root]) if n.op is input_op)


def _same_update(a: Update, b: Update) -> bool:
    """Whether two updates are one, over other inputs."""
    if a.inputs.keys() != b.inputs.keys() or a.outputs.keys() != b.outputs.keys():
        return False
    there = remade(b.outputs.values(), {n: a.inputs[k] for k, n in b.inputs.items()})
    return all(there[n] is a.outputs[k] for k, n in b.outputs.items())


def _updates(tried: Sequence[StandIns], out: Mapping[Leaf, Node], of: Sequence[Update], apart: bool) -> Updates:
    groups = {g: _update(tried[0], out, f"group{g}") for g, keys in tried[0].group_keys.items() if keys}
    inputs = {n: x for stood in tried for n, x in stood.recorder.inputs.items()}
    settings = {n: x for n, x in inputs.items() if x.role is Role.SETTING}
    return Updates(of, groups, settings, inputs.get(f"{COUNT}."), {k: x for stood in tried for k, x in stood.questions.guards.items()}, apart)


def _recognised(
    optimizer: torch.optim.Optimizer, param: tuple[int, Tensor, torch.dtype], update: Update, given: Collection[str],
    seen: dict[Any, tuple[Known, dict[str, Any]] | None], kind: Any,
) -> Update:  # fmt: skip
    """The update with the arithmetic of one element, and the op that computes the same, where there are such. Kinds that differ in shape alone
    and do the same to an element are tried once."""
    tensors = [s for s in update.outputs if s != "param" and s not in update.counted]
    body = body_of(update.inputs, update.outputs, tensors)
    if body is None:
        return update
    if (kind, body.text) not in seen:
        seen[kind, body.text] = _known(optimizer, param, tensors, given)
    return replace(update, known=seen[kind, body.text], body=body)


def _known(
    optimizer: torch.optim.Optimizer, param: tuple[int, Tensor, torch.dtype], tensors: Sequence[str], given: Collection[str]
) -> tuple[Known, dict[str, Any]] | None:
    """The op that computes what the optimizer does to a parameter, with its attributes."""
    group = optimizer.param_groups[param[0]]
    if any(isinstance(x, Tensor) and x.dtype.itemsize < param[1].dtype.itemsize for x in group.values()):
        return None  # what torch computes of a rate in fewer digits rounds to them
    for known in KNOWN:
        if set(known.states) != set(tensors) or not known.fits(group):
            continue
        stood, out = _traced(optimizer, [param], given, WIDE)
        tried = _update(stood, out, "p0")
        same = body_of(tried.inputs, tried.outputs, known.states)
        inputs, values = stood.recorder.inputs, stood.questions.settings
        settings = {inputs[n]: (n.rpartition(".")[0], x) for n, x in values.items() if n in inputs and n.endswith(f".{param[0]}")}
        counts = {tried.inputs[s]: -1 for s in tried.counted} | {n: 0 for name, n in inputs.items() if name == f"{COUNT}."}
        for attrs in known.attributes(group) if same is not None else ():
            if runs_the_same(known, attrs, same, settings, counts):
                return known, attrs
    return None


# -- what an optimizer has already -------------------------------------------------------------------------------------------------------------


def kept_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    """The state of a parameter as a run before this one, or the optimizer itself, left it, leaf by leaf."""
    state = optimizer.state.get(p, {})
    leaves = {key: tree_flatten(x)[0] for key, x in state.items()}
    return {which: x for key, found in leaves.items() for which, x in zip(leaf_names(key, len(found)), found, strict=True)}


def steps_taken(optimizer: torch.optim.Optimizer, p: Tensor, update: Update) -> int:
    """How many updates a parameter had before the step; what counts none has had one where there is state."""
    state = kept_state(optimizer, p)
    if update.counted:
        return counted_before(optimizer, p, update.counted[0]) if update.counted[0] in state else 0
    return int(bool(state))


def counted_before(optimizer: torch.optim.Optimizer, p: Tensor, key: str = "step") -> int:
    """What the optimizer counts of a parameter's updates, but for those that a step made itself."""
    return int(number(kept_state(optimizer, p)[key])) - _of_step.get(optimizer, {}).get(id(p), 0)


def put_state(kept: dict[Any, Any], update: Update, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Write state where the optimizer keeps it, nested and of the kinds that it has there."""
    for key, (spec, names, kinds) in update.nest.items():
        leaves = [_as_kept(values.get(name), kind, device) for name, kind in zip(names, kinds, strict=True)]
        if all(name in values or kind[0] == "fixed" for name, kind in zip(names, kinds, strict=True) if kind not in (int, float)):
            kept[key] = tree_unflatten(leaves, spec)


def _as_kept(x: Tensor | None, kind: Any, device: torch.device) -> Any:
    if kind in (int, float):
        return None if x is None else kind(x) if float(x).is_integer() else float(x)
    if kind[0] == "fixed":
        return kind[1]
    return None if x is None else x.to(device if kind[0] else "cpu", kind[1], copy=True).reshape(kind[0])


def of_shapes(update: Update, shapes: Mapping[str, tuple[int, ...]]) -> Update:
    """The update of a parameter whose state has other shapes."""
    nest = {
        key: (spec, names, [(shapes[n], kind[1]) if n in shapes and kind not in (int, float) else kind for n, kind in zip(names, kinds, strict=True)])
        for key, (spec, names, kinds) in update.nest.items()
    }
    return replace(update, nest=nest)


def note_updates(optimizer: torch.optim.Optimizer, updates: Mapping[Tensor, int]) -> None:
    """How many of the updates that the optimizer counts a step made itself and wrote there: programs of that step count them already."""
    _of_step.setdefault(optimizer, {}).update({id(p): n for p, n in updates.items()})


def forget_updates(optimizer: torch.optim.Optimizer) -> None:
    """What another step left in the optimizer is what a new one begins with."""
    _of_step.pop(optimizer, None)


_of_step: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = weakref.WeakKeyDictionary()
