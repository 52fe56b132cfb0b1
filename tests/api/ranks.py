"""Real processes over gloo for tests that need nothing back but that every rank ends well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tests.ranks import run_ranks


def on_ranks(world: int, job: Callable[[int], None], folder: Path, seconds: float = 100) -> None:
    """Runs a job in forked processes joined over gloo, which leave together; the first failure is raised here."""

    def met(rank: int) -> None:
        job(rank)
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(world, met, folder, seconds=seconds)
