"""How much a solver may do: work, counted in table entries read, and a deadline that can only end it early."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Work left and when to stop. The same work gives the same answer; a deadline that strikes first may not."""

    work: float
    seconds: float = float("inf")
    spent: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    def spend(self, work: float) -> bool:
        """Note work done; whether more may follow."""
        self.spent += work
        return not self.over

    @property
    def over(self) -> bool:
        return self.spent >= self.work or self.left <= 0

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.begun + self.seconds - time.monotonic()

    def share(self, part: float) -> Budget:
        """A part of what is left, spent on its own; tell this budget with `spend` when it is done."""
        return Budget((self.work - self.spent) * part, self.left * part)
