"""A plan's decisions with what they are made for: the batch, number types, kernels, and what a system overlaps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from weft.core.errors import PlanError
from weft.plan.schedules import CHUNKED, PLAIN, SCHEDULES
from weft.plan.spec import MIXED, OFFLOADED, RECOMPUTE, Spec

KERNELS = ("classic", "eager", "compiled")
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
DEVICES, CHUNKS = 1 << 20, 4096  # no plan has more
MOST = dict.fromkeys(("global_batch", "micro_batch", "micro_batches", "--batch", "--seq"), 1 << 31) | dict.fromkeys(("pp", "virtual"), CHUNKS)
COUNTS = ("dp", "tp", "pp", "cp", "ep", "virtual", "micro_batches", "global_batch")
NAMED = {  # decisions as pins, reports and other systems name them, where a Spec has another word
    "dp": "replicas", "copies": "dp", "virtual": "chunks", "sequence_parallel": "sp", "keep_gathered": "gather_once", "overlap_tp": "async_tp",
}  # fmt: skip

DECISIONS = (  # what reports and exports tell of a setting, by these names
    "global_batch", "micro_batch", "dp", "tp", "pp", "cp", "ep", "virtual", "sequence_parallel", "zero", "keep_gathered", "recompute", "schedule", "kernels",
    "dtype", "grad_dtype", "overlap_grads", "overlap_params", "overlap_sends", "overlap_tp", "ragged_ep", "batch_first", "master",
)  # fmt: skip


@dataclass(frozen=True)
class Setting(Spec):
    """A Spec, and what it is made for.

    `kernels`: `classic` is Megatron of 2021 (scores and softmax in memory, dropout, fused pointwise), `eager` one kernel per
    torch op with fused attention, `compiled` pointwise chains in one kernel each.
    """

    global_batch: int = 8
    kernels: str = "compiled"
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    overlap_grads: bool = True
    overlap_params: bool = True
    overlap_sends: bool = False
    batch_first: bool = False  # [batch, sequence, hidden] in memory: gathering along the sequence takes a copy
    master: bool = True  # parameters and optimizer kept in fp32 next to those computed with
    imbalance: float = 1.0  # picks of the busiest rank of ep over those of an average one, in every layer

    @staticmethod
    def of(spec: Spec, **given: Any) -> Setting:
        """The decisions with what they are made for."""
        own = {f.name: getattr(spec, f.name) for f in fields(Spec)}
        made = Setting(**own | {"micro": spec.micro_batches}, **given)
        made._require_batch()
        return made

    @staticmethod
    def counted(
        global_batch: int = 8, micro_batch: int = 1, dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, virtual: int = 1,
        sequence_parallel: bool = False, zero: int = 0, keep_gathered: bool = False, recompute: str = "none", schedule: str = PLAIN, **more: Any,
    ) -> Setting:  # fmt: skip
        """As other systems count and name: copies among which experts are spread, and samples of a micro-batch."""
        degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "virtual": virtual}
        for name, value in {**degrees, "micro_batch": micro_batch, "global_batch": global_batch}.items():  # the batch last: it follows from them
            require_count(name, value)
        if dp % ep:
            raise PlanError("experts are spread over data-parallel ranks", needed=f"ep a divisor of dp = {dp}", found=str(ep))
        lone = virtual == 1 and not (schedule in SCHEDULES and SCHEDULES[schedule].takes_chunks)
        return Setting(
            dp // ep, cp, ep, tp, zero, sequence_parallel, pp=pp, schedule=schedule, micro=_rounds(global_batch, dp * micro_batch),
            virtual=0 if lone else virtual, gather_once=keep_gathered,
            async_tp=more.pop("overlap_tp", False), global_batch=global_batch, **more,
        ).recomputing(recompute)  # fmt: skip

    @property
    def spec(self) -> Spec:
        """The decisions alone, what follows from the rest of them said in one way."""
        own = {f.name: getattr(self, f.name) for f in fields(Spec)}
        lone = self.pp == 1 and self.micro_batches == 1
        return Spec(**own | {"micro": 0 if lone else self.micro_batches, "virtual": self.virtual if self.virtual > 1 else 0})

    @property
    def devices(self) -> int:
        return self.replicas * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Data-parallel ranks, those among which experts are spread too: each takes samples of its own."""
        return self.dp * self.ep

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch on each replica."""
        return self.global_batch // (self.replicas * self.micro_batches)

    def in_micro_batches(self, n: int) -> Setting:
        """So many micro-batches of as many samples as these have."""
        return replace(self, micro=n, global_batch=self.replicas * self.micro_batch * n)

    def of_batch(self, samples: int) -> Setting:
        """Another batch in micro-batches of as many samples as these."""
        return self.in_micro_batches(_rounds(samples, self.replicas * self.micro_batch))

    def of_samples(self, n: int) -> Setting:
        """The same batch in micro-batches of so many samples, which divide it."""
        return replace(self, micro=self.global_batch // (self.replicas * n))

    def named(self, name: str) -> Any:
        """A decision by the name that pins and reports have for it."""
        return self.again or "none" if name == "recompute" else getattr(self, NAMED.get(name, name))

    def stride(self, axis: str) -> int:
        """Ranks between neighbours of an axis: tp innermost, then cp, dp, and pp outermost. ep runs along dp.

        `data` are all copies of a parameter (cp and dp together), `edp` the copies of one expert.
        """
        inner = {"tp": 1, "cp": self.tp, "data": self.tp, "dp": self.tp * self.cp, "ep": self.tp * self.cp}
        outer = {"edp": self.tp * self.cp * self.ep, "pp": self.tp * self.cp * self.replicas}
        return {**inner, **outer}[axis]

    def place(self, axis: str) -> tuple[int, int]:
        """How an axis lies among the ranks: ranks between neighbours, and how many."""
        return self.stride(axis), self.size(axis)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        own = {"data": self.replicas * self.cp, "dp": self.replicas, "edp": self.dp}
        return own[axis] if axis in own else int(getattr(self, axis))

    def _require_batch(self) -> None:
        unit = self.replicas * self.micro_batches
        if self.global_batch % unit or not self.global_batch:
            raise PlanError("the batch does not divide", needed=f"a multiple of dp x micro-batches = {unit}", found=str(self.global_batch))

    def check(self) -> None:
        """Refuse what cannot be run, by name."""
        words = {"schedule": tuple(SCHEDULES), "kernels": KERNELS, "dtype": DTYPES, "grad_dtype": DTYPES}
        words["recompute"] = ("none", *RECOMPUTE[1:], *OFFLOADED, MIXED)
        for name, known in words.items():
            if (value := self.named(name)) not in known:
                raise PlanError(f"no {name} named {value!r}", needed=" or ".join(known), found=value)
        for name in COUNTS:
            require_count(name, self.named(name))
        if self.devices > DEVICES or self.pp * self.chunks > CHUNKS:
            needed = f"at most {DEVICES:,} devices and {CHUNKS:,} chunks of layers"
            raise PlanError("no cluster is that large", needed=needed, found=f"{self.devices:,} devices, {self.pp * self.chunks:,} chunks")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError("ZeRO has stages 0 to 3", needed="0, 1, 2 or 3", found=str(self.zero))
        require_imbalance(self.imbalance)
        self._require_batch()
        if self.chunks > 1 and not self.pipeline.takes_chunks:
            raise PlanError(f"several chunks per stage need the {CHUNKED} schedule", needed=CHUNKED, found=self.schedule, try_=f"--schedule {CHUNKED}")


def _rounds(batch: int, unit: int) -> int:
    """Micro-batches of a batch of which so many samples are computed at a time."""
    if batch % unit:
        raise PlanError(
            "the batch does not divide", needed=f"global batch a multiple of dp x micro-batch = {unit}", found=str(batch),
            try_=f"--batch {-(-batch // unit) * unit}",
        )  # fmt: skip
    return batch // unit


def require_count(name: str, value: int) -> None:
    """Refuse a number that no setting can have."""
    most, words = MOST.get(name, DEVICES), name.replace("_", " ")
    if not 1 <= value <= most:
        raise PlanError(f"{words} is {value}", needed=f"{words} of 1 or more" if value < 1 else f"{words} of at most {most:,}", found=str(value))


def require_imbalance(value: float) -> None:
    """Refuse what no rank's share of the picks can be."""
    if not 1 <= value <= DEVICES:
        raise PlanError(
            f"imbalance is {value:g}", needed=f"picks of the busiest rank over those of an average one: 1 (even) to {DEVICES:,}", found=f"{value:g}",
            try_="--imbalance 1.2",
        )  # fmt: skip
