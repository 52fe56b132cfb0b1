"""One entry per op. Importing this package defines them all."""

from weft.ops import attention, comm, embed, fill, linalg, loss, moe, norm, order, pointwise, reduce, rotary, shape, source  # noqa: F401
