"""Programs to code: passes from a scheduled program to per-rank torch code, and fused groups to C++ and Triton."""

from weft.codegen.pipeline import lower, show_code

__all__ = ["lower", "show_code"]
