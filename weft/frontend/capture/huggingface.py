"""What transformers is told while it is traced. Its models run the attention, masks and cache that their user configured.

It asks whether a tensor is fake before it reads one: a tensor that depends on no input can be read. Experts that it calls through
its interface are one op where they are shown to be of the form that op has; its own batched products do for all others.
transformers is never imported by weft: only a model that brings it needs this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from weft.core.errors import CaptureError
from weft.core.node import Node
from weft.frontend.capture.experts import apply
from weft.frontend.capture.known import fixed, through
from weft.frontend.capture.modes import hear
from weft.frontend.capture.recorder import Recorder
from weft.ops.experts import ACTIVATIONS
from weft.ops.shape import narrow, permute, reshape

NAME = "weft"


@contextmanager
def interfaces(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, models of transformers are told what can be read, and call weft for experts."""
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
    """Experts stored as [experts, 2 x hidden, features] (gate then up) or their transposes; others by transformers' own products."""
    from transformers.integrations.moe import batched_mm_experts_forward

    act = _activation(r, module)
    if act is None:
        r.assume(f"{type(module).__name__} is computed as transformers' batched_mm does: each token's experts are gathered for it")
        return batched_mm_experts_forward(module, x, picks, weights)
    gated, turned = getattr(module, "has_gate", True), getattr(module, "is_transposed", False)
    first = module.gate_up_proj if gated else module.up_proj
    return hear(r, None, _stored_experts, (x, picks, weights, first, module.down_proj, act, gated, turned), {})


def _activation(r: Recorder, module: Any) -> str | None:
    """The activation, where the experts have no biases and no norm, and act(gate) * up, or act(up), is what they compute."""
    if any(getattr(module, k, False) for k in ("has_bias", "has_post_expert_norm", "_is_expert_parallel")) or r.joint:
        return None
    gated = getattr(module, "has_gate", True)
    weight = module.gate_up_proj if gated else module.up_proj
    wide = weight.shape[-1 if getattr(module, "is_transposed", False) else 1]
    probe = r.placeholder(weight.new_empty((1, wide)))
    made = r.node(module._apply_gate(probe) if gated else module.act_fn(probe))
    gate, up = probe.chunk(2, dim=-1)
    for name, (act, _) in ACTIVATIONS.items():
        if made in ([r.node(act(gate) * up), r.node(up * act(gate))] if gated else [r.node(act(probe))]):
            return name
    return None


def _stored_experts(r: Recorder, x: Node, picks: Node, weights: Node, first: Node, down: Node, act: str, gated: bool, turned: bool) -> Node:
    up, gate = _up_and_gate(first, 2 if turned else 1) if gated else (first, None)
    if turned:
        up, down, gate = (None if v is None else permute(v, (0, 2, 1)) for v in (up, down, gate))
    return apply(r, x, picks, weights, up, down, gate, act)


def _up_and_gate(both: Node, dim: int) -> tuple[Node, Node]:
    """The joined dim is split in two, so that what is inside a half can be cut."""
    half = both.shape[dim] // 2
    pair = reshape(both, (*both.shape[:dim], 2, half, *both.shape[dim + 1 :]))
    gate, up = (reshape(narrow(pair, dim, i, i + 1), (*both.shape[:dim], half, *both.shape[dim + 1 :])) for i in range(2))
    return up, gate
