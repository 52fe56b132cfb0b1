"""PyTorch models as programs: `capture(model, batch, loss, optimizer)`, or `capture_step` of a training step."""

from weft.frontend.capture.blocks import Instance
from weft.frontend.capture.handlers import register_lowering
from weft.frontend.capture.model import capture, capture_step
from weft.frontend.capture.step import Captured

__all__ = ["Captured", "Instance", "capture", "capture_step", "register_lowering"]
