"""Cases of torch.nn: every family of modules, at toy sizes."""

from __future__ import annotations

from bench._wild.tools import Table, cross_entropy, mlp, vectors

CASES = Table()
CASES.add("nn_mlp", lambda: (mlp(), cross_entropy, vectors()))
