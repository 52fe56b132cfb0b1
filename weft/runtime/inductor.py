"""Inductor, with what it compiled kept on disk, as torch.compile keeps it: a second start loads it, and of ranks of a host that compile the same
graph one does and the others load it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule


def compiled(graph: GraphModule, given: Sequence[Tensor], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """A graph as Inductor's code for inputs like those given."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as inductor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=True), allow_non_fake_inputs=True)  # without one nothing is kept
    with _one_at_a_time(graph, given), tracing(TracingContext(mode)):
        return inductor(graph, list(given), options=dict(options or {}))  # type: ignore[no-any-return]


@contextlib.contextmanager
def _one_at_a_time(graph: GraphModule, given: Sequence[Tensor]) -> Iterator[None]:
    """Wait for a rank of this host that compiles the same. Different graphs are compiled at the same time."""
    if not dist.is_initialized():
        yield
        return
    from torch._inductor.runtime.runtime_utils import cache_dir

    text = "\n".join([graph.code, *(f"{x.dtype} {tuple(x.shape)} {x.stride()}" for x in given)])
    place = Path(cache_dir(), "weft")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks: every rank compiles
            place.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((place / hashlib.sha256(text.encode()).hexdigest()).open("w")), fcntl.LOCK_EX)
        yield
