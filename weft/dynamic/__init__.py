"""Dynamic models: one vertex function, a graph per sample, batched by structure.

class Sum(nn.Module):
    def forward(self, v):                      # v stands for many vertices at once
        h = v.pull("x", optional=True) + v.gather("h", reduce="sum")
        v.scatter(h=h), v.push(h=h)

model = weft.dynamic.Model(Sum(), states={"h": 64})
out = model(weft.dynamic.trees([((0, 1), 2), (3, 4)]), x)      # one row per root
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from weft.dynamic.balance import Cost, assign
from weft.dynamic.draw import draw
from weft.dynamic.grow import Growing
from weft.dynamic.lazy import batched, flush
from weft.dynamic.model import Model
from weft.dynamic.policy import lower_bound
from weft.dynamic.schedule import Reads, Schedule
from weft.dynamic.structure import Builder, Structure, chains, edges, join, networkx, parents, trees
from weft.dynamic.vertex import Vertex

__all__ = [
    "Builder", "Cost", "Growing", "Model", "Reads", "Recorder", "Schedule", "Structure", "Vertex", "VertexProgram", "assign", "batched",
    "chains", "draw", "edges", "flush", "join", "lower_bound", "networkx", "parents", "program", "shard", "trees",
]  # fmt: skip

_LATER = {"Recorder": "watch", "VertexProgram": "programs", "program": "programs", "shard": "programs"}  # they bring in the planner


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'weft.dynamic' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"weft.dynamic.{_LATER[name]}"), name)
    return value
