"""A kernel and its rows made callable on whatever device its peers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.runtime.fused import HostKernel, KernelLike, Row


def bind(
    kernel: KernelLike, rows: Sequence[Row], peers: Any, spans: Sequence[int] | None = None, *, name: str = "", blocks: int = 0
) -> Any:
    """The kernel on these rows; call it with its scalars.

    `spans` are the longest lengths any rank has for each row; `name` is what to call it when a rank is missing; `blocks`
    bounds the device blocks it runs on.
    """
    if peers.target == "cpu":
        return HostKernel(kernel, rows, peers, name or kernel.name)
    from weft.runtime.launched import DeviceKernel, Launch, choose_launch

    lengths = list(spans or [row.length for row in rows])
    launch = choose_launch(lengths, kernel.phases, peers) if not blocks else Launch(4096, 4096, 16, blocks, False)
    return DeviceKernel(kernel, rows, peers, launch, lengths, name or kernel.name)
