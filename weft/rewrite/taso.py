"""Rule files of TASO and FlexFlow (JSON): in their own meaning (`degrees`), and as rules of weft where these can say the same.

Their tensors have a replica dim in front, then sample and channel. In weft a degree is a mesh axis: partition is `slice`, combine `all_gather`;
replicate and reduce, which change sizes there, and whatever else touches the replica dim have no counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import RuleError, reason
from weft.core.node import OPS
from weft.rewrite.degrees import RELU, ForeignOp, ForeignRule
from weft.rewrite.pattern import AttrHole, Call, Hole
from weft.rewrite.schema import Schema

_UNARY = {"OP_RELU": "relu", "OP_SIGMOID": "sigmoid", "OP_TANH": "tanh", "OP_EXP": "exp"}
_BINARY = {"OP_EW_ADD": "add", "OP_EW_MUL": "mul"}
_PRODUCT = {"OP_MATMUL": "ik,kj->ij", "OP_LINEAR": "ik,jk->ij"}
_PARALLEL = {"OP_PARTITION": "slice", "OP_REPARTITION": "slice", "OP_COMBINE": "all_gather"}
AXIS = AttrHole("a")


@dataclass(frozen=True)
class Foreign:
    """A rule of another system: a weft rule, or why it is none; and as it stands there."""

    name: str
    schema: Schema | None
    why: str = ""
    rule: ForeignRule | None = None


def read_taso(text: str) -> list[Foreign]:
    """Every rule of a file; one that cannot be said in weft comes with its reason."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RuleError("the rule file is not JSON", needed="JSON of TASO or FlexFlow, as it begins with {", found=reason(error)) from error
    rules = data.get("rule") if isinstance(data, Mapping) else None
    if not isinstance(rules, list):
        raise RuleError(
            "this is no TASO or FlexFlow rule file",
            needed='{"rule": [{"srcOp": ..., "dstOp": ..., "mappedOutput": ...}]}',
            found=str(data)[:80],
        )
    return [_rule(r, k) for k, r in enumerate(rules)]


def _rule(data: Mapping[str, Any], k: int) -> Foreign:
    name = str(data.get("name", f"rule_{k}")).replace(" ", "_")
    try:
        rule = ForeignRule.of(data, name)
    except KeyError as e:
        return Foreign(name, None, f"the rule lacks {e}")
    try:
        left, right = (tuple(_build(ops, op, out) for op, out in outs) for ops, outs in (rule.left, rule.right))
        return Foreign(name, Schema(name, left, right, {}, (), "foreign"), rule=rule)
    except RuleError as e:
        return Foreign(name, None, e.message, rule)


def _build(ops: Sequence[ForeignOp], op: int, out: int) -> Any:
    if op < 0:
        return Hole(f"x{-op}")
    here = ops[op]
    args = tuple(_build(ops, o, t) for o, t in here.inputs)
    if here.type in _PARALLEL:
        return _parallel(here, args)
    if here.type in _UNARY:
        return Call(OPS[_UNARY[here.type]], args)
    if here.type in (*_BINARY, *_PRODUCT) and len(args) == 2:
        return _computed(here, args)
    if here.type == "OP_CONCAT":
        return Call(OPS["concat"], args, (("dim", _dim(here)),))
    raise RuleError(
        f"weft has no op for {here.type} of {len(args)} inputs",
        needed=", ".join(sorted({*_UNARY, *_BINARY, *_PRODUCT, *_PARALLEL, "OP_CONCAT"})),
        found=here.type,
    )


def _computed(op: ForeignOp, args: tuple[Any, ...]) -> Call:
    if op.activation not in (0, RELU):
        raise RuleError(f"{op.type} with activation {op.activation}", needed=f"0 for none or {RELU} for relu", found=str(op.activation))
    if op.type in _BINARY:
        made = Call(OPS[_BINARY[op.type]], args)
    else:
        made = Call(OPS["einsum"], args, (("equation", _PRODUCT[op.type]),))
    return Call(OPS["relu"], (made,)) if op.activation == RELU else made


def _dim(op: ForeignOp) -> int:
    """Their dims count the replica dim; weft's do not."""
    if op.dim < 1:
        raise RuleError(f"{op.type} along the replica dim", needed="a dim of the tensor", found=str(op.dim))
    return op.dim - 1


def _parallel(op: ForeignOp, args: tuple[Any, ...]) -> Call:
    name = _PARALLEL[op.type]
    return Call(OPS[name], args, (("axis", AXIS), *([("dim", _dim(op))] if name == "slice" else [])))
