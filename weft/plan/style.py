"""How many passes over memory and how many kernels each part of a layer costs, for three ways of writing kernels.

A pair is (forward, backward) in units of the tensor at that place: one read or one write of it is one.
Counts follow from which tensors each kernel reads and writes; none is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[float, float]
Launches = tuple[int, int]


@dataclass(frozen=True)
class Style:
    attention_in_memory: bool
    norm: Pair  # read, write | read gradient and input, write gradient, read both again for the weight
    norm_launches: Launches
    norm_saved: float
    residual: Pair  # read both, write
    residual_dropout: Pair
    residual_launches: Launches
    heads: Pair  # make heads contiguous and back
    rotary: Pair
    rotary_launches: Launches
    activation: Pair
    gate: Pair  # of two inputs of this size to one
    activation_launches: Launches
    embed: Pair
    embed_launches: Launches
    loss: Pair  # in units of the 16-bit logits
    loss_launches: Launches
    loss_saved: float
    loss_work: float
    softmax: Pair = (2, 3)
    softmax_launches: Launches = (1, 1)
    softmax_apart: Pair = (16, 12)  # cast, scale, mask and softmax in fp32, cast back, each its own kernel
    softmax_apart_launches: Launches = (9, 6)
    softmax_wide: Pair = (6, 7)  # of scores in fp32: scale, mask and softmax
    softmax_wide_launches: Launches = (3, 3)


STYLES = {
    # fused norm, bias + gelu, bias + dropout + add, scale + mask + softmax; loss in fp32, step by step
    "classic": Style(
        attention_in_memory=True,
        norm=(2, 5), norm_launches=(1, 3), norm_saved=1,
        residual=(3, 2), residual_dropout=(3.5, 3.5), residual_launches=(1, 2),
        heads=(1, 2), rotary=(4, 4), rotary_launches=(2, 3),
        activation=(2, 4), gate=(3, 5), activation_launches=(1, 2),
        embed=(6, 4), embed_launches=(8, 6),
        loss=(8, 5), loss_launches=(16, 8), loss_saved=3, loss_work=4,
    ),
    # one kernel per torch op
    "eager": Style(
        attention_in_memory=False,
        norm=(10, 14), norm_launches=(6, 10), norm_saved=3,
        residual=(3, 2), residual_dropout=(6, 5), residual_launches=(1, 1),
        heads=(2, 2), rotary=(8, 10), rotary_launches=(8, 10),
        activation=(2, 3), gate=(5, 8), activation_launches=(2, 4),
        embed=(2, 2), embed_launches=(1, 2),
        loss=(9, 8), loss_launches=(4, 4), loss_saved=2, loss_work=4,
    ),
    # pointwise chains in one kernel each
    "compiled": Style(
        attention_in_memory=False,
        norm=(2, 4), norm_launches=(1, 2), norm_saved=0,
        residual=(1, 1), residual_dropout=(3, 3), residual_launches=(0, 1),
        heads=(0, 0), rotary=(2, 2), rotary_launches=(1, 1),
        activation=(2, 3), gate=(3, 5), activation_launches=(1, 1),
        embed=(2, 2), embed_launches=(1, 2),
        loss=(4, 3), loss_launches=(2, 2), loss_saved=1, loss_work=2,
    ),
}  # fmt: skip
