"""The order of a sum that no layout changes: by pairs of neighbours, again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of neighbours two by two, round after round; one that is left over waits for the next."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]
