"""Random numbers, each a function of (seed, site, global index), so that every layout draws the same."""

from __future__ import annotations

import functools
import operator

import torch

from weft.core.layout import Layout
from weft.core.node import Attrs, Type, dtype_of
from weft.ops.pointwise import uniform_at
from weft.ops.registry import Kind, Types, define


def _random_infer(types: Types, attrs: Attrs) -> Type:
    (seed,) = types
    return Type(dtype_of(attrs["dtype"]), Layout.of(seed.mesh, attrs["shape"], dict(seed.layout.partials)))


def _index(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(functools.reduce(operator.mul, shape, 1)).reshape(shape)


def _uniform(seed: torch.Tensor, shape: tuple[int, ...], dtype: str, site: int) -> torch.Tensor:
    return uniform_at(_index(shape), seed, site).to(dtype_of(dtype))


def _normal(seed: torch.Tensor, shape: tuple[int, ...], dtype: str, site: int) -> torch.Tensor:
    """Box-Muller on two streams of the same site."""
    at = _index(shape)
    radius = torch.sqrt(-2 * torch.log1p(-uniform_at(2 * at, seed, site)))
    return (radius * torch.cos(2 * torch.pi * uniform_at(2 * at + 1, seed, site))).to(dtype_of(dtype))


uniform = define("uniform", kind=Kind.SOURCE, infer=_random_infer, run=_uniform, vjp=lambda n, ct: (None,))
normal = define("normal", kind=Kind.SOURCE, infer=_random_infer, run=_normal, vjp=lambda n, ct: (None,))
