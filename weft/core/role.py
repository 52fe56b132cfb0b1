"""What an input of a step is for. An input says so itself, whatever its name is."""

from __future__ import annotations

import enum


class Role(enum.Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor found in Python, which the step only reads
    BATCH = "batch"
    STATE = "state"  # what the optimizer keeps of a parameter
    SETTING = "setting"  # a number: a learning rate, the count of steps
    SEED = "seed"  # what a micro-batch draws by: the seed, and which of them it is
    AHEAD = "ahead"  # computed of the full batch before its micro-batches

    def __repr__(self) -> str:
        return self.value
