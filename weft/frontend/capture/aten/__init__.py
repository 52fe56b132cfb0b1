"""How ATen ops, and torch functions above them, become weft ops. Importing this package registers them all."""

from weft.frontend.capture.aten import attention, backward, images, indexing, linalg, norms, packed, pointwise, reduce, shape, sources  # noqa: F401
