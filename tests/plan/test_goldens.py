"""What `weft plan`, `weft simulate`, `weft explain` and the prediction of published steps say today, figure by figure.

The net under every change of the planner: a figure that moves is named with its old and new value. Where a change is meant, run
`pytest tests/plan/test_goldens.py --accept` and say in the commit why the figures moved.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench._rows import read
from bench.accuracy import predict, summary
from weft.cli import app
from weft.plan.plan import parse
from weft.plan.setting import DECISIONS

HERE = Path(__file__).parent
OWN = HERE / "golden_models.py"
EFFORT = 1e6  # work of one solution of layouts, a hundredth of the usual
Figures = Callable[[str, Mapping[str, Any]], None]

SIMULATED = {
    "gpt2 4xA100": "gpt2 --cluster 1x4xA100 --micro-batch 8 --kernels eager",
    "llama3-8b 16xA100": "llama3-8b --cluster 2x8xA100 --tp 2 --pp 2 --zero 1 --sequence-parallel --recompute selective",
    "llama3-70b 256xH100": "llama3-70b --cluster 32x8xH100 --tp 8 --zero 3 --sequence-parallel --recompute full --micro-batch 2",
    "llama3-8b long": "llama3-8b --cluster 2x8xH200 --seq 65536 --cp 8 --zero 3 --recompute full",
    "mixtral 16xH100": "mixtral-8x7b --cluster 2x8xH100 --tp 2 --ep 4 --zero 1 --overlap-tp",
    "gpt-39b classic": "gpt-39b --cluster 8x8xA100 --tp 8 --pp 4 --virtual 2 --batch 64 --recompute full --kernels classic --no-overlap",
    "bert-large zero-bubble": "bert-large --cluster 1x4xV100 --pp 4 --schedule zero-bubble --batch 64",
    "gpt-175b does not fit": "gpt-175b --cluster 2x8xA100 --tp 8",
}

PLANNED = {
    "gpt2 4xA100": "gpt2 --cluster 1x4xA100 --batch 32",
    "gpt2 16xV100": "gpt2 --cluster 2x8xV100 --batch 64",
    "gpt2 in little memory": "gpt2 --cluster 1x2xA100 --batch 8 --memory 3.4GB",
    "llama3-8b 8xH100": "llama3-8b --cluster 1x8xH100 --batch 64",
    "llama3-8b 16xA100": "llama3-8b --cluster 2x8xA100 --batch 64",
    "llama3-1b least memory": "llama3-1b --cluster 1x8xB200 --batch 64 --objective memory",
    "llama3-3b pinned": "llama3-3b --cluster 1x8xGB200 --batch 32 --pin tp=4",
    "llama3-70b 16xH200": "llama3-70b --cluster 2x8xH200 --batch 32",
    "gpt-39b 32xA100": "gpt-39b --cluster 4x8xA100 --batch 128",
    "gpt2 unequal": "gpt2 --cluster 1x1xH100+1x1xA100 --batch 16",
    "mixtral 16xH100": "mixtral-8x7b --cluster 2x8xH100 --batch 64",
    "bert-large 8xA100": "bert-large --cluster 1x8xA100 --batch 256",
    "vit-b16 8xV100": "vit-b16 --cluster 1x8xV100 --batch 256",
    "gshard-moe 8xV100": "gshard-moe-690m --cluster 1x8xV100-DGX2 --batch 128",
    "llama2-13b does not fit": "llama2-13b --cluster 1x2xV100 --batch 8",
    "xdl 2xA100": "xdl --cluster 1x2xA100",
    "dlrm 2xV100": "dlrm --cluster 1x2xV100 --batch 256",
    "perceptron 4xA100": f"{OWN}:perceptron --cluster 1x4xA100",
    "wide 4xH100": f"{OWN}:wide --cluster 1x4xH100",
    "pictures 2xV100": f"{OWN}:pictures --cluster 1x2xV100",
    "words 2xH100": f"{OWN}:words --cluster 1x2xH100",
    "table 4xA100": f"{OWN}:table --cluster 1x4xA100",
}  # fmt: skip
EXPLAINED = ("gpt2 4xA100", "llama3-8b 8xH100", "gpt2 unequal", "perceptron 4xA100", "table 4xA100")


@pytest.mark.parametrize("case", SIMULATED)
def test_simulate(case: str, golden_figures: Figures) -> None:
    golden_figures(f"simulate/{_file(case)}", _without(_said("simulate", *SIMULATED[case].split()), "seconds"))


@pytest.mark.parametrize("case", PLANNED)
def test_plan(case: str, golden_figures: Figures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.pool.EFFORT", EFFORT)
    saved = tmp_path / "plan.json"
    found = {"plan": planned(_said("plan", *PLANNED[case].split(), "--out", str(saved)))}
    if case in EXPLAINED:
        found["explain"] = explained(_said("explain", str(saved), "--run-model"))
    golden_figures(f"plan/{_file(case)}", found)


def test_accuracy(golden_figures: Figures) -> None:
    """Medians of each group of published steps, and each prediction."""
    rows = [predict(row) for row in read(HERE / "published.csv")]
    papers: dict[str, list[Any]] = {}
    for row in rows:
        papers.setdefault(re.split(r"\d+ ", row["case"], maxsplit=1)[1].rsplit(" ", 1)[0], []).append(row)
    medians = {paper: group["median_error"] for paper, group in summary(papers).items() if paper in papers}
    golden_figures("accuracy", {"median_error": medians, "predicted": {row["case"].split(" ", 1)[1]: row["predicted"] for row in rows}})


# --- the figures and decisions that matter


def _said(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code in (0, 2), result.output
    return json.loads(result.stdout.splitlines()[-1])


def _file(case: str) -> str:
    return case.replace(" ", "_")


def _without(said: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """All but these, and but the intervals, which follow from the figures (tests/cost/test_interval.py)."""
    return {k: v for k, v in said.items() if k not in (*names, "interval") and not k.endswith(("_low", "_high"))}


def planned(said: Mapping[str, Any]) -> dict[str, Any]:
    """A plan without its program, of which the collectives are counted."""
    plan = said["plan"]
    found = _without(said, "model", "cluster", "seconds", "plan")
    if plan is None:
        return found
    made = parse(json.dumps(plan))
    named = {k: made.setting.named(k) for k in DECISIONS}
    decided = {k: v for k, v in named.items() if k == "zero" or v not in (0, 1, False)}
    stages = [", ".join(f"{n} {block} {again}" for block, again, n in stage) for stage in made.setting.stages]
    found |= {"origin": plan["origin"], "setting": decided, "shares": list(made.setting.shares), "stages": stages}
    found |= {"causes_ms": plan["predicted"].get("causes_ms"), "layouts": _layouts(made.layouts)}
    return {k: v for k, v in found.items() if v not in ([], {})}


def _layouts(layouts: Mapping[str, Any]) -> dict[str, Any]:
    """The mesh, how many inputs have each layout, and how often the program communicates."""
    if "program" not in layouts:
        return dict(layouts)
    held = Counter(" ".join(f"{a}:{p}" for a, p in sorted(of.items())) for of in layouts["inputs"].values())
    moved = Counter(re.findall(r"= (all_\w+|reduce_scatter|slice)\(", layouts["program"]))
    return {**_without(layouts, "inputs", "program", "units"), "inputs": dict(held), "collectives": dict(moved)}


def explained(said: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("value", "other", "ms", "gb", "flips", "factor")
    return {d["decision"]: {k: d[k] for k in kept} for d in said["decisions"]}
