"""What transformers is shown while it is traced. Its models run the attention, masks and cache that their user configured.

It asks whether a tensor is fake before it reads one: a tensor that depends on no input can be read. Experts that it calls through
its interface are one op where they are shown to be of the form that op has; its own batched matmuls do for all others.
transformers is never imported by weft: only a model that brings it needs this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn, sigmoid
from torch.nn.functional import silu

from weft.core.errors import CaptureError
from weft.core.node import Node
from weft.frontend.capture.constants import fixed, through
from weft.frontend.capture.experts import apply
from weft.frontend.capture.modes import intercept
from weft.frontend.capture.precision import lowered
from weft.frontend.capture.recorder import Recorder
from weft.ops import pointwise as w
from weft.ops.embed import take
from weft.ops.experts import ACTIVATIONS
from weft.ops.fill import full
from weft.ops.linalg import einsum
from weft.ops.norm import to_dtype
from weft.ops.shape import concat, narrow, permute, reshape

NAME = "weft"
EVEN = 8  # features that biases take, so that rows stay full lines


@contextmanager
def interfaces(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, models of transformers are shown what can be read, and call weft for experts."""
    configs = list({id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}.values())
    if not configs or "transformers" not in sys.modules:
        yield
        return
    _refuse_kernels(configs)
    with _readable(recorder), _own_experts(configs, recorder):
        yield


def _refuse_kernels(configs: list[Any]) -> None:
    found = {str(c._attn_implementation) for c in configs}
    kernels = sorted(x for x in found if "flash" in x or x.startswith(("flex", "kernels-community", "paged")))
    if kernels:
        raise CaptureError(
            f"attention by {kernels[0]} cannot be traced",
            needed='attn_implementation "sdpa" or "eager", which run on any device; weft chooses the kernel itself',
            found=f"attn_implementation={kernels[0]!r}",
            try_='model.set_attn_implementation("sdpa") before parallelize',
        )


@contextmanager
def _readable(recorder: Recorder) -> Iterator[None]:
    """Inside, a tensor is fake to transformers only where its value is not known."""
    theirs: Any = sys.modules.get("transformers.utils.import_utils")
    plain: Callable[[Any], bool] | None = getattr(theirs, "is_fake_tensor", None)
    if plain is None:
        yield
        return

    def is_fake(x: Any) -> bool:
        return plain(x) and not fixed(recorder, through(recorder, recorder.node(x), look=True))

    theirs.is_fake_tensor = is_fake
    try:
        yield
    finally:
        theirs.is_fake_tensor = plain


# -- experts -----------------------------------------------------------------------------------------------------------


@contextmanager
def _own_experts(configs: list[Any], recorder: Recorder) -> Iterator[None]:
    kept = [(c, c._experts_implementation) for c in configs if hasattr(c, "_experts_implementation")]
    interface: Any = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None or not kept:  # older ones have no such interface, and each model its own experts
        yield
        return
    interface.register(NAME, lambda module, *args, **more: experts(recorder, module, *args, **more))
    try:
        for c, _ in kept:
            c._experts_implementation = NAME
        yield
    finally:
        for c, name in kept:
            c._experts_implementation = name
        type(interface)._global_mapping.pop(NAME, None)


def experts(r: Recorder, module: nn.Module, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
    """Experts stored as [experts, 2 x hidden, features] (gate then up) or their transposes; others by transformers' own matmuls."""
    from transformers.integrations.moe import batched_mm_experts_forward

    act = _activation(r, module)
    if act is None:
        r.assume(f"{type(module).__name__} is computed as transformers' batched_mm does: each token's experts are gathered for it")
        return batched_mm_experts_forward(module, x, picks, weights)
    gated, transposed = getattr(module, "has_gate", True), getattr(module, "is_transposed", False)
    name = "gate_up_proj" if gated else "up_proj"
    biases = [getattr(module, f"{n}_bias") for n in (name, "down_proj")] if getattr(module, "has_bias", False) else []
    how = act, gated, transposed, getattr(module, "is_concatenated", True)
    return intercept(r, None, _stored_experts, (x, picks, weights, getattr(module, name), module.down_proj, *how, *biases), {})


def _activation(r: Recorder, module: Any) -> str | None:
    """The activation, where the experts have no norm, and act(gate) * up, its clamped form, or act(up) is what they compute."""
    if any(getattr(module, k, False) for k in ("has_post_expert_norm", "_is_expert_parallel")) or r.joint:
        return None
    gated = getattr(module, "has_gate", True)
    weight = module.gate_up_proj if gated else module.up_proj
    wide = weight.shape[-1 if getattr(module, "is_transposed", False) else 1]
    probe = r.placeholder(weight.new_empty((1, wide)))
    made = r.node(module._apply_gate(probe) if gated else module.act_fn(probe))
    gate, up = probe.chunk(2, dim=-1) if getattr(module, "is_concatenated", True) else (probe[..., ::2], probe[..., 1::2])
    for name, (act, _) in ACTIVATIONS.items():
        if made in ([r.node(act(gate) * up), r.node(up * act(gate))] if gated else [r.node(act(probe))]):
            return name
    return _clamped(r, module, gate, up, made) if gated and r.capacity is None else None


def _clamped(r: Recorder, module: Any, gate: Tensor, up: Tensor, made: Node) -> str | None:
    """The activation of gates and ups that are clamped, by the module's own slope and limit."""
    slope, limit = getattr(module, "alpha", 1.0), getattr(module, "limit", None)
    if not isinstance(slope, (int, float)) or not isinstance(limit, (int, float)):
        return None
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    for glu in (gate * sigmoid(gate * slope), silu(gate)) if slope == 1 else (gate * sigmoid(gate * slope),):
        for shift, moved in ((0.0, up), (1.0, up + 1)):
            if made in (r.node(moved * glu), r.node(glu * moved)):
                return f"clamped:{slope}:{limit}:{shift}"
    return None


def _stored_experts(
    r: Recorder, x: Node, picks: Node, weights: Node, first: Node, down: Node, act: str, gated: bool, transposed: bool, interleaved: bool, *biases: Node
) -> Node:
    up, gate = _up_and_gate(first, 2 if transposed else 1, interleaved) if gated else (first, None)
    if transposed:
        up, down, gate = (None if v is None else permute(v, (0, 2, 1)) for v in (up, down, gate))
    if not biases:
        return apply(r, x, picks, weights, up, down, gate, act)
    x, up, down, gate, *biases = lowered(r, x, up, down, gate, *biases)
    ups = _up_and_gate(biases[0], 1, interleaved) if gated else (biases[0], None)
    up, gate = (None if v is None else _wider(v, 2, reshape(b, (*b.shape, 1))) for v, b in zip((up, gate), ups, strict=True))
    out = apply(r, _wider(x, 1, full((x.shape[0], 1), 1.0, x.mesh, x.dtype)), picks, weights, up, _wider(down, 1), gate, act)
    return w.add(narrow(out, 1, 0, x.shape[1]), einsum("tk,tkd->td", to_dtype(weights, x.dtype), take(biases[1], picks, dim=0)))


def _wider(x: Node, dim: int, *more: Node) -> Node:
    """With eight more features, zeros but for what is given: a bias is the weight of a feature that is always 1."""
    shape = tuple(EVEN - len(more) if d == dim else n for d, n in enumerate(x.shape))
    return concat([x, *more, full(shape, 0.0, x.mesh, x.dtype)], dim)  # type: ignore[no-any-return]


def _up_and_gate(both: Node, dim: int, interleaved: bool) -> tuple[Node, Node]:
    """The joined dim is split in two, so that what is inside a half can be sharded; the halves stand side by side, or in turn."""
    half = both.shape[dim] // 2
    pair = reshape(both, (*both.shape[:dim], *((2, half) if interleaved else (half, 2)), *both.shape[dim + 1 :]))
    at = dim if interleaved else dim + 1
    gate, up = (reshape(narrow(pair, at, i, i + 1), (*both.shape[:dim], half, *both.shape[dim + 1 :])) for i in range(2))
    return up, gate
