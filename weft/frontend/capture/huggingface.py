"""transformers' own interfaces: attention, masks and experts are registered there under the name "weft" while tracing.

Left alone, transformers sees fake tensors and writes out the whole [batch, 1, rows, keys] mask, repeats keys for grouped
queries, and gathers an expert's weights per token. Here causality stays a property of the attention op, and padding
stays a [batch, 1, 1, keys] mask. transformers is never imported by weft: only a model that brings it needs this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import CaptureError
from weft.core.node import Node
from weft.frontend.capture.experts import apply
from weft.frontend.capture.modes import hear
from weft.frontend.capture.recorder import Recorder
from weft.ops.shape import narrow, permute, reshape

NAME = "weft"
PADDING = torch.uint8  # the dtype of a mask that says which keys are there and nothing of order; theirs are bool or float


@contextmanager
def interfaces(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, models of transformers call weft for attention, masks and experts, and build no cache."""
    configs = list({id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}.values())
    if not configs or "transformers" not in sys.modules:
        yield
        return
    theirs = sys.modules.get("transformers.masking_utils")
    packed = getattr(theirs, "find_packed_sequence_indices", None)
    kept = [(c, c._attn_implementation, getattr(c, "use_cache", None), getattr(c, "_experts_implementation", None)) for c in configs]
    try:
        _register(recorder)
        if packed is not None:
            theirs.find_packed_sequence_indices = lambda ids: None if _counts(recorder.node(ids)) else packed(ids)
        for c in configs:
            c._attn_implementation = NAME
            if getattr(c, "use_cache", None) is not None:
                c.use_cache = False
            if hasattr(c, "_experts_implementation"):
                c._experts_implementation = NAME
        yield
    finally:
        if packed is not None:
            theirs.find_packed_sequence_indices = packed
        for c, attention, cache, experts in kept:
            c._attn_implementation = attention
            if cache is not None:
                c.use_cache = cache
            if hasattr(c, "_experts_implementation"):
                c._experts_implementation = experts


def _register(recorder: Recorder) -> None:
    from transformers import masking_utils, modeling_utils

    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # older ones have no such interface, and each model its own experts
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, lambda module, *args: experts(recorder, module, *args))


def _counts(positions: Node) -> bool:
    """Whether positions are 0, 1, 2 ... by how they were made, so that no row can hold several sequences."""
    while positions.op.name in ("reshape", "expand", "cast") or (positions.op.name == "add" and positions.args[1].op.name == "const"):
        positions = positions.args[0]
    return positions.op.name == "arange" and positions.attr("step") == 1


def mask(batch_size: int, q_length: int, kv_length: int, *, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
         attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:  # fmt: skip
    """None where order alone masks, padding as [batch, 1, 1, keys], and their own full mask for all other patterns."""
    from transformers import masking_utils as theirs

    plain = mask_function in (None, theirs.causal_mask_function, theirs.bidirectional_mask_function)
    if not plain or not (isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0):
        return theirs.sdpa_mask(
            batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, **{**more, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
    padding = theirs.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return None if padding is None else padding[:, None, None, :kv_length].to(PADDING)


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
              position_bias: Tensor | None = None, s_aux: Any = None, **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """One attention op: causal if the module is and no mask of theirs says otherwise."""
    if softcap is not None or s_aux is not None:
        raise CaptureError(
            "attention with a soft cap or sinks has no whole op",
            needed="attention that is softmax of scaled products",
            found=type(module).__name__,
            try_='capture it with attn_implementation="eager"',
        )
    ordered = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    own = attention_mask is None or attention_mask.dtype == PADDING
    causal = bool(ordered and own and query.shape[2] > 1)
    if causal and attention_mask is None and key.shape[2] > query.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    seen = attention_mask.bool() if attention_mask is not None and own else attention_mask
    if position_bias is not None:
        seen = position_bias if seen is None else _biased(position_bias, seen)
    out = F.scaled_dot_product_attention(query, key, value, seen, dropout, causal, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _biased(bias: Tensor, seen: Tensor) -> Tensor:
    if seen.dtype != torch.bool:
        return bias + seen
    return torch.where(seen, bias, torch.full((), float("-inf"), dtype=bias.dtype))


# -- experts -----------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def experts(r: Recorder, module: nn.Module, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
    """Experts stored as [experts, 2 x hidden, features] (gate then up) or their transposes."""
    act = _ACTIVATIONS.get(getattr(module.config, "hidden_act", ""))
    odd = any(getattr(module, k, False) for k in ("has_bias", "has_post_expert_norm")) or not getattr(module, "is_concatenated", True)
    from transformers.integrations.moe import _default_apply_gate

    if act is None or odd or type(module)._apply_gate is not _default_apply_gate:
        raise CaptureError(
            f"weft does not know the experts of {type(module).__name__}",
            needed="gate and up side by side, a down projection, no biases, a common activation",
            found=f"activation {getattr(module.config, 'hidden_act', None)!r}" if act is None else "another form",
            try_="register the module: weft.frontend.capture.experts.module",
        )
    gated, turned = getattr(module, "has_gate", True), getattr(module, "is_transposed", False)
    first = module.gate_up_proj if gated else module.up_proj
    return hear(r, None, _stored_experts, (x, picks, weights, first, module.down_proj, act, gated, turned), {})


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
