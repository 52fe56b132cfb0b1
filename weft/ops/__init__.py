"""One entry per op. Importing this package defines them all."""

from weft.core.node import OPS
from weft.ops import (  # noqa: F401
    attention,
    batchnorm,
    comm,
    conv,
    embed,
    fill,
    linalg,
    loss,
    moe,
    norm,
    order,
    pointwise,
    pool,
    reduce,
    rotary,
    shape,
    source,
)

BUILT_IN = frozenset(OPS)  # what weft itself defines, before captures and users add theirs
