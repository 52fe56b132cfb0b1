"""Torch's own sample inputs (`op_db`, `module_db`, `optim_db`), and edge values, strides and sizes put into them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

EDGES = (0.0, 1.0, -1.0, math.inf, 0.5, -0.0, 3.0, -math.inf, -3.0, 6.0, math.nan, -0.5, 2.0, -2.0, 20.0, 1e-30, -20.0, 100.0)
LARGEST = 20_000  # elements of the tensors of a sample that is worth its time
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Sample:
    """A module whose parameters are what gradients are wanted of; calling it gives any structure of tensors."""

    name: str
    module: nn.Module
    only_shape: bool = False  # what it gives was never filled


class Given(nn.Module):
    """A function of tensors as a module: those that want a gradient are its parameters, the others its buffers."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, finish: Callable[[Any], Any] = lambda out: out) -> None:
        super().__init__()
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.function, self.finish = function, finish
        for i, x in enumerate(self.leaves):
            if isinstance(x, Tensor):
                self.leaves[i] = None
                wants = x.requires_grad and (x.is_floating_point() or x.is_complex())
                if wants:
                    self.register_parameter(f"x{i}", nn.Parameter(x.detach()))
                else:
                    self.register_buffer(f"x{i}", x.detach())

    def forward(self) -> Any:
        leaves = [getattr(self, f"x{i}", x) for i, x in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.finish(self.function(*args, **kwargs))


# -- op_db -------------------------------------------------------------------------------------------------------------------------


@functools.cache
def op_names() -> dict[str, Any]:
    from torch.testing._internal import common_methods_invocations as all_ops

    all_ops.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # a draw must look like one
    return {f"op {o.name}{'.' + o.variant_test_name if o.variant_test_name else ''}": o for o in all_ops.op_db}


def op_samples(info: Any, dtypes: list[str], limit: int) -> Iterator[Sample]:
    """Torch's samples in the first dtype the op has, some of them with edges, then two in each of the others."""
    has = [DTYPES[d] for d in dtypes if DTYPES[d] in info.dtypes] or sorted(info.dtypes, key=_rank)[:1]
    for dtype in has:
        first = dtype is has[0]
        drawn = _spread(_drawn(info, dtype), limit if first else 2)
        for i, s in enumerate(drawn):
            yield _op_sample(info, f"{_short(dtype)} sample {i}", s.input, s.args, s.kwargs, s)
        for i, s in enumerate(_spread(drawn, min(3, limit))) if first and dtype.is_floating_point else ():
            for kind, change in VARIANTS.items():
                given = _changed((s.input, s.args, s.kwargs), change, kind in SIZES)
                if given is not None:
                    yield _op_sample(info, f"{_short(dtype)} sample {i} {kind}", *given, s)


def _drawn(info: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    wants = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    return [s for s in info.sample_inputs("cpu", dtype, requires_grad=wants) if _elements(s) <= LARGEST]


def _elements(sample: Any) -> int:
    leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return sum(x.numel() for x in leaves if isinstance(x, Tensor))


def _rank(dtype: torch.dtype) -> tuple[bool, str]:
    return dtype != torch.int64, str(dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spread(items: list[Any], limit: int) -> list[Any]:
    """So many, from first to last."""
    if len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / max(1, limit - 1))] for i in range(limit)]


def _op_sample(info: Any, name: str, x: Any, args: Any, kwargs: Any, sample: Any) -> Sample:
    module = Given(info.op, (x, *args), kwargs, sample.output_process_fn_grad)
    return Sample(name, module, only_shape="empty" in info.name or "resize" in info.name)


# -- edges -------------------------------------------------------------------------------------------------------------------------


def _edged(x: Tensor, at: int) -> Tensor:
    values = [EDGES[(i * 5 + at * 7) % len(EDGES)] for i in range(x.numel())]
    return torch.tensor(values, dtype=x.dtype).reshape(x.shape)


def _tied(x: Tensor, at: int) -> Tensor:
    return torch.randint(-2, 3, x.shape, generator=torch.Generator().manual_seed(at)).to(x.dtype)


def _one(value: float) -> Callable[[Tensor, int], Tensor]:
    def change(x: Tensor, at: int) -> Tensor:
        y = x.detach().clone(memory_format=torch.contiguous_format)
        if y.numel() and not at:
            y.view(-1)[y.numel() // 2] = value
        return y

    return change


def _permuted(x: Tensor, at: int) -> Tensor | None:
    if x.ndim < 2:
        return x
    back = tuple(reversed(range(x.ndim)))
    return x.detach().permute(back).contiguous().permute(back)


VARIANTS: dict[str, Callable[[Tensor, int], Tensor | None]] = {
    "edges": _edged,
    "other edges": lambda x, at: _edged(x, at + 3),
    "ties": _tied,
    "zeros": lambda x, at: torch.zeros_like(x),
    "ones": lambda x, at: torch.ones_like(x),
    "one zero": _one(0.0),
    "one inf": _one(math.inf),
    "one -inf": _one(-math.inf),
    "one nan": _one(math.nan),
    "permuted": _permuted,
    "size 1": lambda x, at: x.detach()[:1] if x.ndim else x,
    "odd size": lambda x, at: x.detach()[:3] if x.ndim else x,
}


SIZES = ("size 1", "odd size")


def _changed(given: Any, change: Callable[[Tensor, int], Tensor | None], resized: bool = False) -> Any:
    """The sample with its plain float tensors changed, each told its place; None where there is none of them.

    Sizes are changed only where all tensors have one shape: torch does not check all that it is given, and reads on."""
    count = 0
    if resized and len({x.shape for x in tree_flatten(given)[0] if isinstance(x, Tensor) and x.ndim}) != 1:
        return None

    def each(x: Tensor) -> Tensor:
        nonlocal count
        if x.layout is not torch.strided or not x.is_floating_point() or x.numel() == 0:
            return x
        y = change(x, count)
        count += 1
        return y.detach().requires_grad_(x.requires_grad)

    made = tree_map_only(Tensor, each, given)
    return made if count else None


# -- module_db ---------------------------------------------------------------------------------------------------------------------


def module_names() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {f"module {m.name}": m for m in module_db}


class Called(nn.Module):
    """A module on what it is called with, whose float tensors want gradients too."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.given = Given(lambda *a, **k: (a, k), args, kwargs)

    def forward(self) -> Any:
        args, kwargs = self.given()
        return self.module(*args, **kwargs)


def module_samples(info: Any, dtypes: list[str], limit: int) -> Iterator[Sample]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        drawn = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
        for i, s in enumerate(_spread(list(drawn), limit)):
            for kind in ("", *([] if i else VARIANTS)):
                try:
                    torch.manual_seed(1)
                    module = info.module_cls(*s.constructor_input.args, **s.constructor_input.kwargs)
                    given = copy.deepcopy((s.forward_input.args, s.forward_input.kwargs))
                except Exception:
                    continue
                given = _changed(given, VARIANTS[kind], kind in SIZES) if kind else given
                if given is not None:
                    module = module.double().train(training)
                    yield Sample(f"{'train' if training else 'eval'} sample {i} {kind}".strip(), Called(module, *given))


# -- optim_db ----------------------------------------------------------------------------------------------------------------------


def optim_names() -> dict[str, Any]:
    from torch.testing._internal.common_optimizers import optim_db

    return {f"optim {o.optim_cls.__name__}": o for o in optim_db}


def optim_samples(info: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(what, class, keyword arguments) of every setting torch tests."""
    for given in info.optim_inputs_func(device="cpu"):
        yield given.desc, info.optim_cls, given.kwargs
