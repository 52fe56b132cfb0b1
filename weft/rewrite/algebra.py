"""Rules about values: the laws of sums, matmuls, views and blocks, each as a line of weft. `prove` has the last word on them."""

from __future__ import annotations

from functools import lru_cache

from weft.rewrite.rulefile import parse_rules
from weft.rewrite.schema import Schema

TEXT = """
[algebra]
add_swap: x + y == y + x
add_regroup: (x + y) + z == x + (y + z)
mul_swap: x * y == y * x
mul_regroup: (x * y) * z == x * (y * z)
factor_out: x * z + y * z == (x + y) * z
sub_as_add: x - y == x + (-y)
neg_twice: -(-x) == x
square_as_product: square(x) == x * x
scale_regroup: (x * y) * 2.0 == x * (y * 2.0)

linear_sum: f(x + y) == f(x) + f(y) where f linear in 0, x like y
linear_difference: f(x - y) == f(x) - f(y) where f linear in 0, x like y
linear_scale: f(x * 2.0) == f(x) * 2.0 where f linear in 0
linear_negative: f(-x) == -f(x) where f linear in 0
bilinear_left: f(x + y, z) == f(x, z) + f(y, z) where f linear in 0, x like y
bilinear_right: f(z, x + y) == f(z, x) + f(z, y) where f linear in 1, x like y
fold_scale_left: f(x * 2.0, y) == f(x, y) * 2.0 where f linear in 0
fold_scale_right: f(x, y * 2.0) == f(x, y) * 2.0 where f linear in 1
joint_sum: f(x, y) + f(z, w) == f(x + z, y + w) where f linear in 0 1, x like z, y like w

matmul_regroup: (x @ y) @ z == x @ (y @ z) for x[i, k] y[k, l] z[l, j]
matmul_transpose: permute(x @ y, order=(1, 0)) == permute(y, order=(1, 0)) @ permute(x, order=(1, 0)) for x[i, k] y[k, j]
transpose_twice: permute(permute(x, order=(1, 0)), order=(1, 0)) == x for x[i, j]
transpose_pointwise: permute(f(x), order=(1, 0)) == f(permute(x, order=(1, 0))) for x[i, j] where f pointwise
matmul_as_einsum: x @ y == einsum(x, y, equation='ik,kj->ij') for x[i, k] y[k, j]
batched_as_einsum: x @ y == einsum(x, y, equation='bsk,kj->bsj') for x[b, s, k] y[k, j]

merge_projections: concat(*(x @ y_), dim=1) == x @ concat(*y_, dim=1) for x[i, k] y_[k, j_]
merge_rows: concat(*(x_ @ z), dim=0) == concat(*x_, dim=0) @ z for x_[i_, k] z[k, l]
split_inner: concat(x, y, dim=1) @ concat(z, w, dim=0) == x @ z + y @ w for x[i, k] y[i, l] z[k, j] w[l, j]
concat_pointwise: concat(*f(x_), dim=d) == f(concat(*x_, dim=d)) where f pointwise
concat_kept: concat(*f(x_), dim=e) == f(concat(*x_, dim=d)) where f keeps d of 0 as e
concat_regroup: concat(concat(x, y, dim=0), z, dim=0) == concat(x, concat(y, z, dim=0), dim=0) for x[i, l] y[j, l] z[k, l]
concat_grid: concat(concat(x, y, dim=1), concat(z, w, dim=1), dim=0) == concat(concat(x, z, dim=0), concat(y, w, dim=0), dim=1)
    for x[i, j] y[i, k] z[l, j] w[l, k]
stack_columns: concat(*x_, dim=1)
    == reshape(concat(*reshape(x_, shape=(size(x_, 0), 1, size(x_, 1))), dim=1), shape=(size(x_, 0), -1)) for x_[i, k]
first_of_concat: narrow(concat(x, y, dim=0), dim=0, start=0, stop=size(x, 0), step=1) == x for x[i, k] y[j, k]
second_of_concat: narrow(concat(x, y, dim=0), dim=0, start=size(x, 0), stop=size(x, 0) + size(y, 0), step=1) == y for x[i, k] y[j, k]
first_of_columns: narrow(concat(x, y, dim=1), dim=1, start=0, stop=size(x, 1), step=1) == x for x[k, i] y[k, j]
narrow_columns: narrow(x @ y, dim=1, start=0, stop=1, step=1) == x @ narrow(y, dim=1, start=0, stop=1, step=1) for x[i, k] y[k, j]
narrow_pointwise: narrow(f(x), dim=d, start=0, stop=1, step=1) == f(narrow(x, dim=d, start=0, stop=1, step=1)) where f pointwise

sum_twice: sum(sum(x, dims=(1,)), dims=(0,)) == sum(x, dims=(0, 1)) for x[i, j]
sum_of_concat: sum(concat(x, y, dim=0), dims=(0,)) == sum(x, dims=(0,)) + sum(y, dims=(0,)) for x[i, k] y[j, k]
sum_of_transpose: sum(permute(x, order=(1, 0)), dims=(0,)) == sum(x, dims=(1,)) for x[i, j]
sum_of_product: sum(x @ y, dims=(0,), keepdim=True) == sum(x, dims=(0,), keepdim=True) @ y for x[i, k] y[k, j]
"""


@lru_cache(maxsize=1)
def rules() -> tuple[Schema, ...]:
    return tuple(parse_rules(TEXT))
