"""Rule files of TASO and FlexFlow (JSON), read as weft rules.

Their tensors have a replica dim in front, then sample and channel; a partition, combine, replicate or reduce changes one degree. In weft a
degree is a mesh axis: partition is `slice`, combine `all_gather`, reduce `all_reduce`, and replicate, which weft's R already is,
stands for nothing. A rule that reads an input on the right only, or an op weft has no word for, is ill-typed and says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import RuleError
from weft.core.node import OPS
from weft.rewrite.pattern import AttrHole, Call, Hole
from weft.rewrite.schema import Schema

_UNARY = {"OP_RELU": "relu", "OP_SIGMOID": "sigmoid", "OP_TANH": "tanh", "OP_EXP": "exp"}
_BINARY = {"OP_EW_ADD": "add", "OP_EW_MUL": "mul", "OP_MATMUL": "matmul", "OP_LINEAR": "matmul"}
_PARALLEL = {"OP_PARTITION": "slice", "OP_REPARTITION": "slice", "OP_COMBINE": "all_gather", "OP_REDUCE": "all_reduce"}
AXIS = AttrHole("a")


@dataclass(frozen=True)
class Foreign:
    """A rule of another system: a weft rule, or why it is none."""

    name: str
    schema: Schema | None
    why: str = ""


def read_taso(text: str) -> list[Foreign]:
    """Every rule of a file; one that cannot be said in weft comes with its reason."""
    data = json.loads(text)
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
        source, target = ([_Op(o) for o in data[side]] for side in ("srcOp", "dstOp"))
        outs = data["mappedOutput"]
        left = tuple(_build(source, o["srcOpId"], o["srcTsId"]) for o in outs)
        right = tuple(_build(target, o["dstOpId"], o["dstTsId"]) for o in outs)
        return Foreign(name, Schema(name, left, right, {}, (), "foreign"))
    except (RuleError, KeyError) as e:
        return Foreign(name, None, getattr(e, "message", f"the rule lacks {e}"))


class _Op:
    """One op of a rule: its type, inputs and parameters."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.type = str(data["type"])
        self.inputs = [(int(i["opId"]), int(i["tsId"])) for i in data["input"]]
        self.params = {str(p["key"]): int(p["value"]) for p in data.get("para", ())}

    def dim(self, key: str) -> int:
        """Their dims count the replica dim; weft's do not."""
        at = self.params.get(key, 0) - 1
        if at < 0:
            raise RuleError(f"{self.type} along the replica dim", needed="a dim of the tensor", found=f"{key}={at + 1}")
        return at


def _build(ops: Sequence[_Op], op: int, out: int) -> Any:
    if op < 0:
        return Hole(f"x{-op}")
    here = ops[op]
    args = tuple(_build(ops, o, t) for o, t in here.inputs)
    if here.type in _PARALLEL:
        return _parallel(here, args)
    if here.type == "OP_REPLICATE":
        return args[0]
    if here.type in _UNARY:
        return Call(OPS[_UNARY[here.type]], args)
    if here.type in _BINARY and len(args) == 2:
        made = Call(OPS[_BINARY[here.type]], args)
        return Call(OPS["relu"], (made,)) if here.params.get("PM_ACTI") == 11 else made  # their code for relu inside an op
    if here.type == "OP_CONCAT":
        return Call(OPS["concat"], args, (("dim", here.dim("PM_AXIS")),))
    raise RuleError(
        f"weft has no word for {here.type} of {len(args)} inputs",
        needed=", ".join(sorted({*_UNARY, *_BINARY, *_PARALLEL, "OP_CONCAT"})),
        found=here.type,
    )


def _parallel(op: _Op, args: tuple[Any, ...]) -> Call:
    name = _PARALLEL[op.type]
    if name == "slice":
        return Call(OPS[name], args, (("axis", AXIS), ("dim", op.dim("PM_PARALLEL_DIM"))))
    return Call(OPS[name], args, (("axis", AXIS),))
