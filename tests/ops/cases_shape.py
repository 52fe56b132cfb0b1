"""Ops that move, drop or repeat elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ops.harness import case, distinct, normal
from weft.ops import shape as sh

CASES = [
    case("reshape that merges", lambda x: sh.reshape(x, 12, 2), lambda x: x.reshape(12, 2), normal(4, 3, 2), local=True),
    case("reshape that splits", lambda x: sh.reshape(x, 2, 2, 3), lambda x: x.reshape(2, 2, 3), normal(4, 3), local=True),
    case("reshape across", lambda x: sh.reshape(x, 6, 2), lambda x: x.reshape(6, 2), normal(4, 3), local=True),
    case("reshape to one more", lambda x: sh.reshape(x, 5, 1, 3), lambda x: x.reshape(5, 1, 3), normal(5, 3), local=True),
    case("reshape of one", lambda x: sh.reshape(x, ()), lambda x: x.reshape(()), normal(1, 1), local=True),
    case("permute", lambda x: sh.permute(x, 2, 0, 1), lambda x: x.permute(2, 0, 1), normal(4, 3, 2)),
    case("transpose", sh.transpose, lambda x: x.mT, normal(4, 5)),
    case("expand", lambda x: sh.expand(x, (4, 3)), lambda x: x.expand(4, 3), normal(1, 3), local=True),
    case("expand to more dims", lambda x: sh.expand(x, (2, 3)), lambda x: x.expand(2, 3), normal(3), local=True),
    case(
        "expand like another", lambda x, y: sh.expand_like(x, y) * y, lambda x, y: x.expand(4, 3) * y,
        normal(4, 1), normal(4, 3), local=True,
    ),
    case("narrow", lambda x: sh.narrow(x, 0, 1, 3), lambda x: x[1:3], normal(5, 4)),
    case("narrow in steps", lambda x: sh.narrow(x, 1, 0, 5, 2), lambda x: x[:, 0:5:2], normal(3, 5)),
    case("narrow in long steps", lambda x: sh.narrow(x, 0, 1, 6, 3), lambda x: x[1:6:3], normal(7, 2)),
    case("split", lambda x: sh.split(x, [1, 3], 0), lambda x: x.split([1, 3]), normal(4, 3)),
    case("concat", lambda x, y: sh.concat([x, y], 0), lambda x, y: torch.cat([x, y], 0), normal(2, 4), normal(3, 4)),
    case(
        "concat of three", lambda *xs: sh.concat(xs, 1), lambda *xs: torch.cat(xs, 1),
        normal(4, 3), normal(4, 2), normal(4, 4), inner=False,
    ),
    case("optimization_barrier", sh.optimization_barrier, lambda x, y: (x.clone(), y.clone()), normal(3), normal(4)),
    case("pad", lambda x: sh.pad(x, 0, 1, 2), lambda x: F.pad(x, [0, 0, 1, 2]), normal(3, 4)),
    case("pad of signs", lambda x: sh.pad(x, 1, 0, 1), lambda x: F.pad(x, [0, 1]), distinct(3, 5)),
]  # fmt: skip
