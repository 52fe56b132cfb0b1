"""One entry per op. Importing this package defines them all."""

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
