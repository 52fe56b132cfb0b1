"""Systems people use today as smaller spaces of the same search, each with the overlap that system has.

A baseline is the best of a full sweep of its own degrees, micro-batch, recompute and schedule, priced by the same simulator on
the same kernels: what differs is only what the system can say.
"""

from __future__ import annotations

from weft.plan.space import Space
from weft.plan.spec import RECOMPUTE
from weft.plan.stage_partitioner import Measure

EVERYTHING = Space()

_ALONE = {
    "sp": (False,), "schedules": ("1f1b",), "async_tp": (False,), "gather_once": (False,), "recompute": RECOMPUTE,
}  # fmt: skip
_SOME_LAYERS = Measure(("none", "full"), free=False, host=False)  # a number of layers recomputed in full, the same on every stage

BASELINES: dict[str, Space] = {
    # gradients reduced in buckets overlapped with the backward
    "data parallel": Space(axes=("dp",), zero=(0,), **_ALONE),  # type: ignore[arg-type]
    # the update is sharded; updated parameters are gathered at the end of the step
    "zero1": Space(axes=("dp",), zero=(1,), overlap_params=False, **_ALONE),  # type: ignore[arg-type]
    "zero2": Space(axes=("dp",), zero=(2,), overlap_params=False, **_ALONE),  # type: ignore[arg-type]
    # parameters gathered ahead, layer by layer
    "zero3": Space(axes=("dp",), zero=(3,), **{**_ALONE, "gather_once": (False, True)}),  # type: ignore[arg-type]
    # tensor parallelism inside the node, interleaved stages, sharded optimizer, sends and tensor collectives overlapped with compute
    "megatron 3D": Space(
        axes=("dp", "tp", "pp", "ep"), inside_node=("tp",), zero=(0, 1), gather_once=(False,),
        recompute=("", "selective", "full", "mixed"), measure=_SOME_LAYERS, schedules=("1f1b", "interleaved"),
    ),
    # sharded parameters across, tensor parallelism inside the node, collectives in pieces overlapped with matmuls
    "fsdp+tp": Space(axes=("dp", "tp", "ep"), inside_node=("tp",), zero=(3,), schedules=("1f1b",), measure=_SOME_LAYERS),
    # one fused reduction at the end and nothing overlapped with compute; layers recomputed in full or not; 1F1B
    "alpa-like": Space(
        axes=("dp", "tp", "pp", "ep"), zero=(0, 1), gather_once=(False,), sp=(False,), recompute=("", "full"),
        schedules=("1f1b",), async_tp=(False,), overlap_grads=False, overlap_params=False, overlap_sends=False,
    ),
    # no stages, no sharded state, no recompute, no overlap
    "unity-like": Space(
        axes=("dp", "tp", "ep"), zero=(0,), gather_once=(False,), sp=(False,), recompute=("",),
        schedules=("1f1b",), async_tp=(False,), overlap_grads=False, overlap_params=False, overlap_sends=False,
    ),
}  # fmt: skip
