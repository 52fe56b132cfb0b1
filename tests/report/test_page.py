"""What a page is made of: it parses, needs no network, is small, and has every section its facts call for."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from weft.report import charts, model
from weft.report.facts import Curve, Facts, Figure, View
from weft.report.page import page
from weft.report.tags import tag
from weft.report.words import ms, size

pytestmark = pytest.mark.timeout(400)  # the pages take a while to make on a busy machine

SECTIONS = {
    "llama3-8b-plan": ["plan", "model", "steps", "time", "memory", "alternatives", "rules"],
    "own-plan": ["plan", "model", "steps", "time", "memory", "alternatives", "rules"],
    "pipeline-run": ["plan", "model", "steps", "time", "memory", "alternatives", "rules", "training"],
    "gpt-run": ["plan", "model", "steps", "time", "memory", "alternatives", "rules", "training"],
    "tree-lstm-run": ["plan", "model", "schedule", "steps", "time", "alternatives", "training"],
}
VOID = {"meta", "br", "hr", "input"}


class Reader(HTMLParser):
    """Notes ids, references and whether elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refs: list[str] = []
        self.data = ""

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.ids += [own["id"]] if own.get("id") else []
        self.refs += [own[k] for k in ("src", "href", "action") if own.get(k)]
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.startswith("{"):
            self.data = data


@pytest.mark.parametrize("name", SECTIONS)
def test_a_page_stands_alone(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert len(text.encode()) < 2_000_000
    assert all(ref.startswith("#") for ref in reader.refs)
    assert not re.search(r"https?://|@import|url\(", text)
    assert [i for i in SECTIONS[name] if i not in reader.ids] == []
    assert len(reader.ids) == len(set(reader.ids))
    assert sorted({ref[1:] for ref in reader.refs} - set(reader.ids)) == []
    data = json.loads(reader.data)
    assert data["views"][0]["lines"][0]["rows"]
    trace = json.loads(pages[name].with_suffix(".trace.json").read_text())
    assert {"X", "M"} == {e["ph"] for e in trace["traceEvents"]}


def test_a_run_has_predicted_beside_measured(pages: dict[str, Path]) -> None:
    for name in ("gpt-run", "pipeline-run", "tree-lstm-run"):
        reader = Reader()
        reader.feed(pages[name].read_text())
        assert [line["label"] for line in json.loads(reader.data)["views"][0]["lines"]] == ["predicted", "measured"]


def test_a_plan_tells_layouts_reasons_and_baselines(pages: dict[str, Path]) -> None:
    text = pages["llama3-8b-plan"].read_text()
    assert "32 identical layers" in text and "tp S(0)" in text and "tp S(1)" in text
    assert "megatron 3D" in text and "next best without it" in text and "budget" in text
    assert "by an algebraic identity; the check of the full step covers it." in text  # the vocabulary is cut


def test_verbs_of_a_run_name_their_certificates(pages: dict[str, Path]) -> None:
    text = pages["gpt-run"].read_text()
    assert "proved for all sizes and meshes" in text and "its seal holds" in text and "place on dp 2" in text


def test_text_cannot_break_out() -> None:
    bad = "</script><script>alert(1)</script>"
    made = page(Facts(bad, bad, [Figure(bad, bad)], [(bad, bad, bad)], says=[bad]))
    assert "alert(1)" in made and "<script>alert" not in made
    assert tag("p", "<b>", title='"x"') == '<p title="&quot;x&quot;">&lt;b&gt;</p>'


# --- pieces


def held(name: str, shape: list[int], **places: str) -> dict[str, object]:
    return {"name": name, "role": "param", "shape": shape, "dtype": "f32", "places": places}


def test_equal_layers_fold_and_unequal_ones_do_not() -> None:
    same = [held(f"blocks.{i}.up.weight", [8, 4], tp="S(0)") for i in range(3)]
    other = held("blocks.3.up.weight", [8, 4])
    blocks = model.fold([held("words.weight", [10, 4]), *same, other, held("head.weight", [10, 4])])
    assert [(b.title, b.layers) for b in blocks] == [("words", ()), ("blocks", (0, 1, 2)), ("blocks", (3,)), ("head", ())]
    assert list(blocks[1].parts) == ["up"]
    ends = model.fold([held("norm.weight", [4]), held("head.weight", [10, 4])])
    assert [list(b.parts) for b in ends] == [["norm", "head"]]


def test_a_glyph_shows_the_part_a_rank_holds() -> None:
    whole = model.glyph(held("w", [64, 64]), {"tp": 4}, 64)
    columns = model.glyph(held("w", [64, 64], tp="S(1)"), {"tp": 4}, 64)
    grid = model.glyph(held("w", [64, 64], dp="S(0)", tp="S(1)"), {"dp": 2, "tp": 4}, 64)
    assert whole.count("<line") == 0 and columns.count("<line") == 3 and grid.count("<line") == 4
    assert 'width="17" height="68" class="held c-tp"' in columns


def test_curves_keep_their_peaks_when_thinned() -> None:
    points = [(i / 1e4, 1.0) for i in range(10_000)]
    points[7_777] = (0.7777, 9.0)
    thinned = charts.thin(points, 1.0)
    assert len(thinned) <= charts.POINTS and max(b for _, b in thinned) == 9.0


def test_the_budget_is_drawn_where_it_is_near() -> None:
    curve = [Curve("measured", [(0.0, 1e9), (1.0, 2e9)])]
    assert "budget 4.0 GB" in charts.memory(curve, 4e9)
    assert "budget" not in charts.memory(curve, 400e9)


def test_ticks_are_round() -> None:
    assert charts.ticks(10, 5) == [0, 2, 4, 6, 8, 10]
    assert charts.ticks(0.35, 3) == pytest.approx([0, 0.2])
    assert charts.ticks(0) == [0]


def test_units_are_said() -> None:
    assert (ms(12345), ms(1234), ms(0.5)) == ("12.35 s", "1,234 ms", "0.5 ms")
    assert (size(2.5e9), size(999), size(1.5e6)) == ("2.5 GB", "999 B", "1.5 MB")


def test_a_page_without_a_step_has_no_timeline() -> None:
    made = page(Facts("t", "a", [], [("a", "b", "c")], views=[View("v", {})][:0]))
    assert 'id="timeline"' not in made and 'id="plan-table"' in made
