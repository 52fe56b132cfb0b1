"""weft plans computation and communication of distributed PyTorch programs together."""

__version__ = "0.1.0"
