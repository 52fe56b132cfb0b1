"""One entry per op. Importing this package defines them all."""

from weft.core.node import OPS
from weft.ops import (  # noqa: F401
    attention,
    batchnorm,
    by_rows,
    comm,
    conv,
    embed,
    experts,
    fill,
    host,
    linalg,
    loss,
    low,
    moe,
    norm,
    opaque,
    optimizers,
    order,
    own,
    pointwise,
    pool,
    random,
    reduce,
    rotary,
    rounds,
    shape,
    source,
)

BUILT_IN = frozenset(OPS)  # what weft itself defines, before users add theirs
