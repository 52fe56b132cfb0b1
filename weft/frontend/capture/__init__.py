"""PyTorch models as programs: `capture(model, batch, loss, optimizer)`."""

from weft.frontend.capture.blocks import Instance
from weft.frontend.capture.model import Captured, capture
from weft.frontend.capture.modes import teach

__all__ = ["Captured", "Instance", "capture", "teach"]
