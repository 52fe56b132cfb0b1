"""weft from nothing: the idea in eight short files, to be read in the order in which they are imported here.

Every value of a program is one global tensor. A layout says how the ranks of a mesh hold it. Computation changes values;
communication changes layouts and never a value. From these three sentences follow types for parallel programs, a check that
no schedule can get wrong, ZeRO as three short functions, and a planner that has never heard of Megatron yet finds it.

Left out for brevity, and found in weft: shardings that are uneven or nested, partial maxima, gradients, kernels, real prices.

    python -m examples.small_weft
"""

# ruff: noqa: F403, I001  # everything is exported, in the order of reading

from .layouts import *
from .nodes import *
from .ops import *
from .meaning import *
from .verbs import *
from .planner import *
from .processes import *
from .programs import *
