"""How a model is run: how it is sharded over devices, what is kept or computed again, and by which kind of kernels."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import PlanError
from weft.plan.schedules import CHUNKED, PLAIN, SCHEDULES, Schedule

RECOMPUTE = ("none", "selective", "per-op", "full")
AGAIN = {"recompute" if way == "full" else f"recompute:{way}": way for way in ("activation", "ffn", "selective", "per-op", "full")}
OFFLOAD = "offload"  # the host keeps what the backward pass reads of a layer or, of one that is recomputed, its inputs
OFFLOADED = (OFFLOAD, f"full-{OFFLOAD}")
MIXED = "mixed"  # layer by layer, as the memory of each stage allows; the plan says which
KERNELS = ("classic", "eager", "compiled")
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
DEVICES, CHUNKS = 1 << 20, 4096  # no plan has more
MOST = {"global_batch": 1 << 31, "micro_batch": 1 << 31, "pp": CHUNKS, "virtual": CHUNKS}
COUNTS = ("dp", "tp", "pp", "cp", "ep", "virtual", "micro_batch", "global_batch")


@dataclass(frozen=True)
class Setting:
    """One way to run a training step.

    `kernels`: `classic` is Megatron of 2021 (scores and softmax in memory, dropout, fused pointwise), `eager` one kernel per
    torch op with fused attention, `compiled` pointwise chains in one kernel each.
    """

    global_batch: int = 8
    micro_batch: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    virtual: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    keep_gathered: bool = False  # under ZeRO-3, gather parameters once a step, reduce gradients once, and keep both gathered between
    recompute: str = "none"
    schedule: str = PLAIN
    kernels: str = "compiled"
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    overlap_grads: bool = True
    overlap_params: bool = True
    overlap_sends: bool = False
    overlap_tp: bool = False  # collectives of tensor parallelism overlapped with the matmul they belong to
    batch_first: bool = False  # [batch, sequence, hidden] in memory: gathering along the sequence takes a copy
    master: bool = True  # parameters and optimizer kept in fp32 next to those computed with

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def copies(self) -> int:
        """Data-parallel ranks, those among which experts are spread counted once: `dp` as words have it."""
        return self.dp // self.ep

    @property
    def pipeline(self) -> Schedule:
        return SCHEDULES[self.schedule]

    def stride(self, axis: str) -> int:
        """Ranks between neighbours of an axis: tp innermost, then cp, dp, and pp outermost. ep runs along dp.

        `data` are all copies of a parameter (cp and dp together), `edp` the copies of one expert.
        """
        inner = {"tp": 1, "cp": self.tp, "data": self.tp, "dp": self.tp * self.cp, "ep": self.tp * self.cp}
        outer = {"edp": self.tp * self.cp * self.ep, "pp": self.tp * self.cp * self.dp}
        return {**inner, **outer}[axis]

    def place(self, axis: str) -> tuple[int, int]:
        """How an axis lies among the ranks: ranks between neighbours, and how many."""
        return self.stride(axis), self.size(axis)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        if axis in ("data", "edp"):
            return self.dp * self.cp if axis == "data" else max(1, self.dp // self.ep)
        return int(getattr(self, axis))

    def check(self) -> None:
        """Refuse what cannot be run, by name."""
        for name in COUNTS:
            value, most = getattr(self, name), MOST.get(name, DEVICES)
            if not 1 <= value <= most:
                said = name.replace("_", " ")
                raise PlanError(f"{said} is {value}", needed=f"{said} of 1 or more" if value < 1 else f"{said} of at most {most:,}", found=str(value))
        if self.devices > DEVICES or self.pp * self.virtual > CHUNKS:
            needed = f"at most {DEVICES:,} devices and {CHUNKS:,} chunks of layers"
            raise PlanError("no cluster is that large", needed=needed, found=f"{self.devices:,} devices, {self.pp * self.virtual:,} chunks")
        words = {"recompute": (*RECOMPUTE, *OFFLOADED, MIXED), "schedule": tuple(SCHEDULES), "kernels": KERNELS, "dtype": DTYPES, "grad_dtype": DTYPES}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise PlanError(f"no {name} named {getattr(self, name)!r}", needed=" or ".join(known), found=getattr(self, name))
        if self.zero not in (0, 1, 2, 3):
            raise PlanError("ZeRO has stages 0 to 3", needed="0, 1, 2 or 3", found=str(self.zero))
        if self.global_batch % (self.dp * self.micro_batch):
            raise PlanError(
                "the batch does not divide",
                needed=f"global batch a multiple of dp x micro-batch = {self.dp * self.micro_batch}",
                found=str(self.global_batch),
                try_=f"--batch {-(-self.global_batch // (self.dp * self.micro_batch)) * self.dp * self.micro_batch}",
            )
        if self.virtual > 1 and not self.pipeline.takes_chunks:
            raise PlanError(f"several chunks per stage need the {CHUNKED} schedule", needed=CHUNKED, found=self.schedule, try_=f"--schedule {CHUNKED}")
        if self.dp % self.ep:
            raise PlanError("experts are spread over data-parallel ranks", needed=f"ep a divisor of dp = {self.dp}", found=str(self.ep))
