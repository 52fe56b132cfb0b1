"""One entry per op. Importing this package defines them all."""

from weft.core.node import OPS
from weft.ops import (  # noqa: F401
    attention,
    batchnorm,
    comm,
    conv,
    custom_gradient,
    embed,
    experts,
    fill,
    host,
    leaves,
    linalg,
    loss,
    low,
    moe,
    norm,
    opaque,
    optimizers,
    order,
    pointwise,
    pool,
    random,
    reduce,
    rotary,
    rounds,
    rowwise,
    segment,
    shape,
    source,
)

BUILT_IN = frozenset(OPS)  # what weft itself defines, before users add theirs
