"""Rules that begin, move and end parallelism around computation, and those that only change communication.

An op hole may be any op: whether a sharding or a partial sum passes it is a matter of its layout rule, so of types. A rule of
`communicate` that a verb applies is one of these, filled at a place; a test holds every verb to its line here.
"""

from __future__ import annotations

from functools import lru_cache

from weft.rewrite.rulefile import parse_rules
from weft.rewrite.schema import Schema

TEXT = """
[parallel]
data_parallel: f(x) == all_gather(f(slice(x, axis=a, dim=d)), axis=a)
data_parallel_pair: f(x, y) == all_gather(f(slice(x, axis=a, dim=d), y), axis=a)
data_parallel_both: f(x, y) == all_gather(f(slice(x, axis=a, dim=d), slice(y, axis=a, dim=e)), axis=a)
reduction_parallel: f(x, y) == all_reduce(f(slice(x, axis=a, dim=d), slice(y, axis=a, dim=e)), axis=a)
reduction_parallel_one: f(x) == all_reduce(f(slice(x, axis=a, dim=d)), axis=a)
column_then_row: matmul(f(matmul(x, all_gather(y, axis=a))), all_gather(z, axis=a)) == all_reduce(matmul(f(matmul(x, y)), z), axis=a)
    for x[i, k] y[k, l] z[l, j]
expert_parallel: f(x, all_gather(y, axis=a)) == all_to_all(f(all_to_all(x, axis=a, dim=d), y), axis=a, dim=e) for x[b, i, j] y[b, j, k]

[communicate]
split_scatter: all_reduce(x, axis=a) == all_gather(reduce_scatter(x, axis=a, dim=d), axis=a)
split_root: all_reduce(x, axis=a) == broadcast(reduce(x, axis=a, root=r), axis=a)
cancel_slice_gather: slice(all_gather(x, axis=a), axis=a, dim=d) == x
cancel_gather_slice: all_gather(slice(x, axis=a, dim=d), axis=a) == x
scatter_as_slice: slice(all_reduce(x, axis=a), axis=a, dim=d) == reduce_scatter(x, axis=a, dim=d)
turn: all_gather(x, axis=a) == all_gather(all_to_all(x, axis=a, dim=d), axis=a)
turn_as_gather: all_to_all(x, axis=a, dim=d) == slice(all_gather(x, axis=a), axis=a, dim=d)
sink_gather: f(all_gather(x, axis=a)) == all_gather(f(x), axis=a)
sink_gather_beside: f(all_gather(x, axis=a), y) == all_gather(f(x, y), axis=a)
sink_gather_sliced: f(all_gather(x, axis=a), y) == all_gather(f(x, slice(y, axis=a, dim=d)), axis=a)
sink_gather_both: f(all_gather(x, axis=a), all_gather(y, axis=a)) == all_gather(f(x, y), axis=a)
sink_gather_summing: f(all_gather(x, axis=a)) == all_reduce(f(x), axis=a)
sink_gather_summing_sliced: f(all_gather(x, axis=a), y) == all_reduce(f(x, slice(y, axis=a, dim=d)), axis=a)
sink_gather_summing_both: f(all_gather(x, axis=a), all_gather(y, axis=a)) == all_reduce(f(x, y), axis=a)
hoist_slice: slice(f(x), axis=a, dim=e) == f(slice(x, axis=a, dim=d))
hoist_slice_beside: slice(f(x, y), axis=a, dim=e) == f(slice(x, axis=a, dim=d), y)
hoist_slice_both: slice(f(x, y), axis=a, dim=e) == f(slice(x, axis=a, dim=d), slice(y, axis=a, dim=c))
delay_sum: f(all_reduce(x, axis=a)) == all_reduce(f(x), axis=a)
delay_sum_beside: f(all_reduce(x, axis=a), y) == all_reduce(f(x, y), axis=a)
delay_sum_both: f(all_reduce(x, axis=a), all_reduce(y, axis=a)) == all_reduce(f(x, y), axis=a)
delay_scatter: f(reduce_scatter(x, axis=a, dim=d)) == reduce_scatter(f(x), axis=a, dim=e)
delay_scatter_beside: f(reduce_scatter(x, axis=a, dim=d), slice(y, axis=a, dim=e)) == reduce_scatter(f(x, y), axis=a, dim=c)
delay_scatter_both: f(reduce_scatter(x, axis=a, dim=d), reduce_scatter(y, axis=a, dim=e)) == reduce_scatter(f(x, y), axis=a, dim=c)
sums_in_any_order: all_reduce(all_reduce(x, axis=a), axis=b) == all_reduce(all_reduce(x, axis=b), axis=a)
gathers_in_any_order: all_gather(all_gather(x, axis=a), axis=b) == all_gather(all_gather(x, axis=b), axis=a)
sum_past_gather: all_reduce(all_gather(x, axis=b), axis=a) == all_gather(all_reduce(x, axis=a), axis=b)
by_hierarchy: all_reduce(all_reduce(x, axis=a), axis=b)
    == all_gather(all_reduce(reduce_scatter(x, axis=a, dim=d), axis=b), axis=a)
send_slices: send(all_gather(x, axis=a), axis=b, to=r) == all_gather(send(x, axis=b, to=r), axis=a)
merge: all_reduce(x, axis=a), all_reduce(y, axis=a) == item(all_reduce(x, y, axis=a), index=0), item(all_reduce(x, y, axis=a), index=1)
bucket: all_reduce(x, axis=a), all_reduce(y, axis=a)
    == narrow(all_reduce(concat(x, y, dim=0), axis=a), dim=0, start=0, stop=size(x, 0), step=1),
    narrow(all_reduce(concat(x, y, dim=0), axis=a), dim=0, start=size(x, 0), stop=size(x, 0) + size(y, 0), step=1)
    for x[i, k] y[j, k]
"""


@lru_cache(maxsize=1)
def rules() -> tuple[Schema, ...]:
    return tuple(parse_rules(TEXT))
