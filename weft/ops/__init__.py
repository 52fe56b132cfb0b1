"""One entry per op. Importing this package defines them all."""

from weft.ops import comm, linalg, pointwise, reduce, shape  # noqa: F401
