"""Programs to code: passes from a scheduled program to per-rank torch code, and fused groups to C++ and Triton."""
