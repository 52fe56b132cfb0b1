"""What is planned: a model, by name or the user's own, at a batch on a cluster, captured as one program at any number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from weft.cluster.spec import Cluster
from weft.core.layout import Placement, S
from weft.frontend.capture import Captured
from weft.ops.registry import nbytes


@dataclass(frozen=True)
class CapturedTask:
    """`dtype` is what matmuls are computed in; state and gradients are kept in fp32."""

    model: str
    cluster: Cluster
    batch: int
    dtype: str = "fp32"
    optimizer: str = "adam"
    changes: tuple[tuple[str, Any], ...] = ()

    def captured(self, rounds: int = 1) -> Captured:
        """The step over one micro-batch of all copies together, forward, backward and update."""
        return _capture(self.model, self.changes, self.batch // rounds, self.dtype, self.optimizer)

    @cached_property
    def samples(self) -> dict[str, int]:
        """Which dim of each tensor of a batch counts samples: the one that grows with the batch."""
        one, two = (_workload(self.model, self.changes).fields(n) for n in (self.batch, 2 * self.batch))
        grown = {k: [d for d, (a, b) in enumerate(zip(one[k].shape, two[k].shape, strict=True)) if a != b] for k in one}
        return {f"batch.{k}": dims[0] for k, dims in grown.items() if dims}

    def cut_samples(self, *axes: str) -> dict[str, dict[str, Placement]]:
        """The batch dealt out over these axes."""
        return {name: {a: S(d) for a in axes} for name, d in self.samples.items()}

    @cached_property
    def params(self) -> float:
        return float(sum(p.numel() for p in _workload(self.model, self.changes).model.parameters()))

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of everything that outlives a step."""
        program = self.captured().program
        return float(sum(nbytes(program.input_names[i].type) for _, i in program.state))


@cache
def _workload(model: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    from weft.frontend.source import load

    return load(model, **dict(changes))


def example_size(model: str) -> int:
    """Samples in the batch a model comes with."""
    return int(_workload(model, ()).batch)


@cache
def _capture(model: str, changes: tuple[tuple[str, Any], ...], batch: int, dtype: str, optimizer: str) -> Captured:
    import torch

    from weft.frontend.capture import capture

    work = _workload(model, changes)
    made = torch.optim.AdamW(work.model.parameters()) if optimizer == "adam" else torch.optim.SGD(work.model.parameters(), lr=0.01)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    return capture(work.model, work.example(batch, device="meta"), work.loss, made, precision=half)
