"""A kernel and its rows made callable on whatever device its peers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.runtime.fused import HostKernel, KernelLike, Row


def bind(kernel: KernelLike, rows: Sequence[Row], peers: Any, spans: Sequence[int] | None = None, *, name: str = "") -> Any:
    """The kernel on these rows; call it with its scalars.

    `spans` are the longest lengths any rank has for each row; `name` is what to call it when a rank is missing.
    """
    if peers.target == "cpu":
        return HostKernel(kernel, rows, peers, name or kernel.name)
    from weft.runtime.launched import DeviceKernel, choose_launch

    lengths = list(spans or [row.length for row in rows])
    return DeviceKernel(kernel, rows, peers, choose_launch(lengths, kernel.phases, peers), lengths, name or kernel.name)
