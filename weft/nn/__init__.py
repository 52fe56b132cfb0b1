"""Linear layers whose matmul and collective run at the same time, with gradients that overlap too. They are for models of your own: plans with
`async-tp` have chunks of ordinary matmuls and collectives instead."""

from weft.nn.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from weft.nn.layers import AllGatherLinear, LinearAllReduce, LinearReduceScatter
from weft.nn.strategies import Strategy, choose, set_strategy

__all__ = [
    "AllGatherLinear", "LinearAllReduce", "LinearReduceScatter", "Strategy",
    "all_gather_linear", "choose", "linear_all_reduce", "linear_reduce_scatter", "set_strategy",
]  # fmt: skip
