"""`weft verify`: the audit of shipped rules, of a user's file, and of TASO's and FlexFlow's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import weft.ops  # noqa: F401
from weft.cli import app
from weft.core.errors import RuleError
from weft.rewrite.certificate import FILES, Pair, proved_rules, read, shipped, write
from weft.rewrite.degrees import ForeignRule, Tensor, check_foreign, evaluate
from weft.rewrite.prove import audit
from weft.rewrite.prove.audit import audit_foreign, certify, pair_holds
from weft.rewrite.prove.ladder import Effort
from weft.rewrite.rulefile import parse_rule
from weft.rewrite.taso import read_taso


def invoke(*args: str) -> tuple[int, dict, str]:
    done = CliRunner().invoke(app, ["verify", "--json", "--workers", "1", *args])
    return done.exit_code, json.loads(done.stdout.splitlines()[-1]), done.output


def test_a_file_of_rules_is_judged_rule_by_rule(tmp_path: Path) -> None:
    path = tmp_path / "mine.rules"
    path.write_text("good: x + y == y + x\nbad: x - y == y - x\nodd: all_gather(x, axis=a) == slice(x, axis=a, dim=0)\n")
    code, counts, said = invoke("--rules", str(path))
    assert code == 1  # one is refuted
    assert {k: counts[k] for k in ("rules", "general", "bounded", "refuted")} == {"rules": 3, "general": 1, "bounded": 0, "refuted": 1}
    assert "good: proved" in said
    assert "bad: refuted" in said
    assert "odd: ill-typed" in said
    assert "left   [" in said


def test_shipped_rules_are_told_one_by_one_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(c for c in shipped("discovered.json")[0] if c.is_complete)
    monkeypatch.setattr(audit, "builtin_rules", lambda: ())
    monkeypatch.setattr(audit, "shipped", lambda name: ([one], []))
    told = list[str]()
    found = audit.verify(seed=1, workers=1, tell=told.append)
    assert (len(found.verdicts), found.general, found.refuted) == (1, 1, 0)
    assert len(told) == 1
    assert told[0].startswith(f"{one.schema.name}: ")


def test_a_missing_file_is_an_error() -> None:
    done = CliRunner().invoke(app, ["verify", "--rules", "nowhere.rules"])
    assert done.exit_code == 1
    assert "a file of rules" in done.output


def taso(*rules: dict) -> str:
    return json.dumps({"_t": "RuleCollection", "rule": [{"_t": "Rule", "name": f"taso_rule_{k}", **r} for k, r in enumerate(rules)]})


def op(kind: str, *inputs: int, **params: int) -> dict:
    return {"type": kind, "input": [{"opId": i, "tsId": 0} for i in inputs], "para": [{"key": k, "value": v} for k, v in params.items()]}



def outs(src: int, dst: int) -> list[dict]:
    return [{"srcOpId": src, "srcTsId": 0, "dstOpId": dst, "dstTsId": 0}]


def test_flexflow_rules_are_read_and_judged() -> None:
    moved = {
        "srcOp": [op("OP_COMBINE", -1, PM_PARALLEL_DIM=1, PM_PARALLEL_DEGREE=2), op("OP_RELU", 0)],
        "dstOp": [op("OP_RELU", -1), op("OP_COMBINE", 0, PM_PARALLEL_DIM=1, PM_PARALLEL_DEGREE=2)],
        "mappedOutput": outs(1, 1),
    }
    false = {"srcOp": [op("OP_EW_ADD", -1, -2)], "dstOp": [op("OP_EW_MUL", -1, -2)], "mappedOutput": outs(0, 0)}
    unbound = {"srcOp": [op("OP_RELU", -1)], "dstOp": [op("OP_EW_ADD", -1, -2)], "mappedOutput": outs(0, 0)}
    unknown = {"srcOp": [op("OP_CONV2D", -1, -2)], "dstOp": [op("OP_RELU", -1)], "mappedOutput": outs(0, 0)}
    partial = {
        "srcOp": [op("OP_REDUCE", -1, PM_PARALLEL_DIM=0, PM_PARALLEL_DEGREE=2), op("OP_RELU", 0)],
        "dstOp": [op("OP_RELU", -1), op("OP_REDUCE", 0, PM_PARALLEL_DIM=0, PM_PARALLEL_DEGREE=2)],
        "mappedOutput": outs(1, 1),
    }
    found = read_taso(taso(moved, false, unbound, unknown, partial))
    assert [f.schema is not None for f in found] == [True, True, False, False, False]
    audit = audit_foreign(found, workers=2)
    assert audit.verdicts == audit_foreign(found, workers=1).verdicts
    first, second, third, fourth, fifth = (status for _, status, _ in audit.verdicts)
    assert first.startswith("proved")
    assert second.startswith("refuted")
    assert third.startswith("refused: the right side reads input -2, which the left never binds")
    assert fourth.startswith("refused: no meaning for OP_CONV2D")
    assert fifth.startswith("refused: OP_REDUCE does not fit its operands on one device")
    assert fifth.endswith("under sharding: unsound")
    assert "inputs -1: [2" in audit.verdicts[4][2]
    assert audit.refuted == 1
    assert audit.others["refused"] == 3
    assert audit.others["unsound_sharded"] >= 1


def one(left: list[dict], right: list[dict], *, outs: int = 1) -> ForeignRule:
    mapped = [{"srcOpId": len(left) - 1, "srcTsId": k, "dstOpId": len(right) - 1, "dstTsId": k} for k in range(outs)]
    return ForeignRule.of({"srcOp": left, "dstOp": right, "mappedOutput": mapped}, "one")


def test_an_activation_of_two_is_relu() -> None:
    fused = one([op("OP_LINEAR", -1, -4, PM_ACTI=0), op("OP_RELU", 0)], [op("OP_LINEAR", -1, -4, PM_ACTI=2)])
    dropped = one([op("OP_LINEAR", -1, -4, PM_ACTI=0)], [op("OP_LINEAR", -1, -4, PM_ACTI=2)])
    other = one([op("OP_LINEAR", -1, -4, PM_ACTI=11)], [op("OP_LINEAR", -1, -4, PM_ACTI=2)])
    assert [check_foreign(r).alone for r in (dropped, other)] == ["refuted", "refused"]
    assert "activation 11" in check_foreign(other).why
    found = check_foreign(fused)
    assert found.alone in ("proved up to size", "not refuted")  # the latter without Z3
    assert found.sharded == "sound"


def test_the_replica_dim_adds_up_what_is_joined_there() -> None:
    """a + b == reduce(concat(a, b)) along the replica dim; and a reduce doubles what a replicate repeated."""
    added = one([op("OP_EW_ADD", -1, -2)], [op("OP_CONCAT", -1, -2, PM_AXIS=0), op("OP_REDUCE", 0, PM_PARALLEL_DIM=0)])
    doubled = one([op("OP_REPLICATE", -1, PM_PARALLEL_DIM=2), op("OP_REDUCE", 0, PM_PARALLEL_DIM=2)], [op("OP_EW_ADD", -1, -1)])
    kept = one([op("OP_REPLICATE", -1, PM_PARALLEL_DIM=0), op("OP_REDUCE", 0, PM_PARALLEL_DIM=0)], [op("OP_RELU", -1)])
    assert [check_foreign(r).alone for r in (added, doubled)] != ["refuted", "refuted"]
    assert check_foreign(kept).alone == "refuted"


def test_linear_over_cut_channels_leaves_a_sum_pending() -> None:
    """Right on one device; where channels are cut, relu meets terms of a sum on one side and the sum on the other."""
    moved = one(
        [op("OP_PARTITION", -1, PM_PARALLEL_DIM=2), op("OP_PARTITION", -4, PM_PARALLEL_DIM=2), op("OP_LINEAR", 0, 1, PM_ACTI=2),
         op("OP_REDUCE", 2, PM_PARALLEL_DIM=0)],
        [op("OP_LINEAR", -1, -4, PM_ACTI=2)],
    )  # fmt: skip
    found = check_foreign(moved)
    assert found.alone == "refuted"  # the partition alone brings the terms about
    assert "left" in found.why
    shared = one([op("OP_LINEAR", -1, -4, PM_ACTI=0)], [op("OP_LINEAR", -1, -4, PM_ACTI=0), op("OP_COMBINE", 0, PM_PARALLEL_DIM=1)])
    assert check_foreign(shared).alone == "refused"


def test_verdicts_on_one_device_agree_with_numpy() -> None:
    """Every op on plain arrays, as numpy computes it."""
    rng = np.random.default_rng(0)
    x, y, w = (rng.integers(-9, 9, (1, 4, 4)) for _ in range(3))
    given = {n: Tensor(v.astype(object), (1, 1, 1)) for n, v in ((-1, x), (-2, y), (-4, w))}
    relu = np.maximum(x, 0)
    wanted = {
        ("OP_LINEAR", -1, -4): x @ w.transpose(0, 2, 1), ("OP_EW_ADD", -1, -2): x + y, ("OP_EW_MUL", -1, -2): x * y, ("OP_RELU", -1): relu,
        ("OP_PARTITION", -1): x, ("OP_REPLICATE", -1): np.concatenate([x, x], 1), ("OP_REDUCE", -1): x[:, :2] + x[:, 2:],
        ("OP_CONCAT", -1, -2): np.concatenate([x, y], 1),
    }  # fmt: skip
    for (kind, *inputs), want in wanted.items():
        side = one([op(kind, *inputs, PM_PARALLEL_DIM=1)], [op(kind, *inputs, PM_PARALLEL_DIM=1)]).left
        (got,) = evaluate(side, given, lambda v: max(v, 0))
        assert np.array_equal(got.values.astype(np.int64), want), kind


def test_another_json_is_refused() -> None:
    with pytest.raises(RuleError, match="no TASO or FlexFlow rule file"):
        read_taso('{"rules": 3}')


def test_a_certificate_is_written_and_read_back() -> None:
    made, verdict = certify(parse_rule("linear: f(x + y) == f(x) + f(y) where f linear in 0, x like y", "mine"), Effort(2, 2))
    assert verdict.rung == 3
    pair = Pair("add(x, y)", "add(y, x)", {"x": "f64[4] m:R", "y": "f64[4] m:R"}, {"m": 2})
    (again,), (same,) = read(write([made], [pair]))
    assert again.is_complete
    assert again == made
    assert same == pair
    assert "left" in made.needs["f linear in 0"]


def test_an_old_file_is_refused() -> None:
    with pytest.raises(RuleError, match="another version"):
        read('{"version": 0, "rules": [], "pairs": []}')


def test_a_false_pair_does_not_hold() -> None:
    types = {"x": "f64[4] m:P", "y": "f64[4] m:P"}
    assert pair_holds(Pair("add(x, y)", "add(y, x)", types, {"m": 2}), 3)
    assert not pair_holds(Pair("sub(x, y)", "sub(y, x)", types, {"m": 2}), 3)


def test_searches_use_only_what_is_proved() -> None:
    assert all(c.rung >= 2 for name in FILES for c in shipped(name)[0])
    assert len(proved_rules()) == sum(len(shipped(name)[0]) for name in FILES)
