"""What a user may do to a program: verbs from program to program, and recipes made of them."""

from weft.schedule.groups import fuse, overlap
from weft.schedule.moves import delay, hoist, sink
from weft.schedule.parallel import redistribute, shard
from weft.schedule.state import drop_dead, shard_state
from weft.schedule.verbs import bucket, by_hierarchy, merge, split, undo

__all__ = [
    "bucket",
    "by_hierarchy",
    "delay",
    "drop_dead",
    "fuse",
    "hoist",
    "merge",
    "overlap",
    "redistribute",
    "shard",
    "shard_state",
    "sink",
    "split",
    "undo",
]
