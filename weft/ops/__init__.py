"""One entry per op. Importing this package defines them all."""

from weft.ops import comm, fill, linalg, norm, pointwise, reduce, shape, source  # noqa: F401
