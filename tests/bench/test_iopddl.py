"""The contest's format: what it says, and what is refused."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import _iopddl as iopddl
from bench._iopddl import ProblemError

GOOD: dict[str, Any] = {
    "problem": {
        "name": "two",
        "nodes": {"intervals": [[0, 3], [2, 2]], "costs": [[1, 2], [3, 10**18]], "usages": [[5, 6], [7, 8]]},
        "edges": {"nodes": [[1, 0]], "costs": [[1, 2, 3, 10**18]]},
        "usage_limit": 9,
    }
}


def test_a_problem_is_read() -> None:
    p = iopddl.parse(GOOD, "two")
    assert p.cost([1, 0]) == 2 + 3 + 2
    assert p.cost([1, 1]) == np.inf
    assert p.profile([0, 0]).tolist() == [5, 5, 5]  # an interval of no length claims nothing
    assert p.limit.tolist() == [9, 9, 9]


def test_no_limit_is_none() -> None:
    document = copy.deepcopy(GOOD)
    del document["problem"]["usage_limit"]
    assert np.isinf(iopddl.parse(document).limit).all()


@pytest.mark.parametrize("packed", [False, True])
def test_files_are_read_plain_and_packed(tmp_path: Path, packed: bool) -> None:
    raw = json.dumps(GOOD).encode()
    file = tmp_path / ("small.json.gz" if packed else "small.json")
    file.write_bytes(gzip.compress(raw) if packed else raw)
    p = iopddl.load(file)
    assert (p.name, p.nodes) == ("small", 2)


def edited(path: str, value: object) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place: Any = document
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[int(last) if last.isdigit() else last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("problem", 3, "the document has no 'problem' as it should"),
        ("problem/nodes", [], "problem has no 'nodes' as it should"),
        ("problem/nodes/costs", None, "nodes has no 'costs' as it should"),
        ("problem/nodes/costs/1", 7, r"nodes.costs\[1\] is not a list"),
        ("problem/nodes/costs/1", [], "node 1 is malformed(.|\n)*at least one strategy"),
        ("problem/nodes/usages/0", [5], "node 0 is malformed(.|\n)*2 costs and 1 usages"),
        ("problem/nodes/usages", [[5, 6]], "nodes: the columns differ in length(.|\n)*2 intervals, 2 costs, 1 usages"),
        ("problem/nodes/intervals/0", [3], r"node 0 is malformed(.|\n)*an interval \[start, stop\]"),
        ("problem/nodes/intervals/0", [3, 1], "node 0 is malformed(.|\n)*0 <= start <= stop"),
        ("problem/edges/nodes/0", [0, 2], "edge 0 is malformed(.|\n)*nodes from 0 to 1"),
        ("problem/edges/nodes/0", [1, 1], "edge 0 is malformed(.|\n)*two different nodes"),
        ("problem/edges/costs/0", [1, 2, 3], r"edge 0 is malformed(.|\n)*3, not 4"),
        ("problem/edges/costs/0", [1, 2, 3, "x"], "edge costs hold something that is not a number"),
        ("problem/nodes/costs/0", [1, -2], "node costs hold a negative number"),
        ("problem/usage_limit", "much", "usage_limit is not a limit"),
    ],
)
def test_what_is_wrong_is_said(path: str, value: object, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        iopddl.parse(edited(path, value))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"cannot read .*nowhere\.json"):
        iopddl.load(tmp_path / "nowhere.json")


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{")
    with pytest.raises(ProblemError, match=r"cannot read .*odd\.json(.|\n)*an assignment problem as JSON"):
        iopddl.load(tmp_path / "odd.json")


def test_the_bench_prints_one_object_on_the_last_line(tmp_path: Path) -> None:
    good, bad = tmp_path / "two.json", tmp_path / "none.json"
    good.write_text(json.dumps(GOOD))
    bad.write_text(json.dumps(edited("problem/usage_limit", 4)))
    command = [sys.executable, "-m", "weft", "bench", "iopddl", str(good), str(bad), "--limit", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(r["case"], r["cost"], r["bound"], r["feasible"]) for r in rows] == [("two", 5, 5, True), ("none", None, None, False)]
    assert rows[1]["reason"] == "at time 0 the least that can be in use is 5, beyond the limit 4"
