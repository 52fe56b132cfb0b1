"""Every code block of every page runs; the site builds without a link that leads nowhere; references are up to date."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import traceback
from pathlib import Path

import pytest

import weft
from tools import pages, reference, refusals, site, tables

PAGES = pages.pages()


def child(path: Path, folder: Path, commands: Path) -> None:
    """A page in a process of its own: it may define ops, change folders and start ranks."""
    try:
        (folder / "done").write_text(str(pages.run_page(path, folder, commands=commands)))
    except BaseException as error:
        said = str(error) if isinstance(error, pages.PageError) else traceback.format_exc()
        (folder / "failed").write_text(said)
    os._exit(0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PAGES, ids=[p.stem for p in PAGES])
def test_the_code_of_a_page_does_what_it_says(path: Path, tmp_path: Path, commands: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=child, args=(path, tmp_path, commands))
    process.start()
    process.join(850)
    process.kill()
    assert not (tmp_path / "failed").exists(), (tmp_path / "failed").read_text()
    assert (tmp_path / "done").exists(), "the page ended by itself"


def test_a_block_that_is_left_out_says_why() -> None:
    for path in PAGES:
        for block in pages.blocks(pages.text_of(path)):
            known = block.kind in ("python", "sh", "output", *pages.SHOWN)
            assert known, f"{path.name}, line {block.line}: a block of {block.kind or 'no language'}"
            assert block.skip is None or len(block.skip) > 10, f"{path.name}, line {block.line}: why is it skipped?"


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def test_a_notebook_that_fails_is_caught(tmp_path: Path) -> None:
    cells = [{"cell_type": "markdown", "source": ["# A"]}, {"cell_type": "code", "source": ["x = 1\n", "x / 0"]}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(pages.PageError, match=r"n.ipynb, block at line 4: ZeroDivisionError"):
        pages.run_page(tmp_path / "n.ipynb", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\n1 / 0\n```\n", "page.md, block at line 2: ZeroDivisionError"),
        ("```python\nprint(3)\n```\n\n```output\n4\n```\n", "page.md, line 6: printed something else"),
        ("```python\nprint('1,200 ms, dp2')\n```\n\n```output about=10%\n1,000.5 ms, dp2\n```\n", "such as 1200"),
        ("```python\nprint('1,000 ms, dp4')\n```\n\n```output about=10%\n1,000.5 ms, dp2\n```\n", "printed something else"),
        ("```sh\nexit 3\n```\n", "page.md, line 2: status 3"),
        ("```perl\nprint 3\n```\n", "a block of perl"),
    ],
)
def test_a_page_that_lies_is_caught(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(pages.PageError, match=said):
        pages.run_page(page(tmp_path, text), tmp_path)


def test_dots_stand_for_anything_and_skipped_blocks_are_not_run(tmp_path: Path) -> None:
    text = "```python\nprint('took 3 ms'); print('end')\n```\n\n```output\ntook ... ms\nend\n```\n<!-- skip: needs a GPU -->\n```sh\nfalse\n```\n"
    assert pages.run_page(page(tmp_path, text), tmp_path) == 2
    text = "```python\nprint('1,040 ms, dp2, step 3')\n```\n\n```output about=10%\n1,000.5 ms, dp2, ...\n```\n"
    assert pages.run_page(page(tmp_path, text), tmp_path) == 2


# -- the site ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    site.build(out)
    return out


def test_the_site_builds_and_needs_no_network(built: Path) -> None:
    made = {str(p.relative_to(built)) for p in built.rglob("*.html")}
    assert {"index.html", "first-plan.html", "api.html", "errors.html", "source/examples/small_weft/__init__.py.html"} <= made
    for file in built.rglob("*.html"):
        text = file.read_text()
        assert 'src="http' not in text and not re.search(r'rel="(stylesheet|preconnect)" href="http', text), file


@pytest.mark.parametrize("words", ["activation checkpointing", "FSDP", "tensor parallel", "out of memory", "DeviceMesh", "safetensors"])
def test_search_finds_the_words_of_the_field(built: Path, words: str) -> None:
    found = json.loads((built / "search/search_index.json").read_text())["docs"]
    assert any(words.lower() in f"{d['title']} {d['text']}".lower() for d in found)


def small(root: Path) -> None:
    """Pages of every name, with little in them."""
    (root / "docs").mkdir(parents=True)
    for name in site.ROOT.glob("docs/*.md"):
        (root / "docs" / name.name).write_text(f"# {name.stem}\n")
    for name in site.ROOT.glob("docs/*.ipynb"):
        (root / "docs" / name.name).write_text(name.read_text())
    for name in site.OUTSIDE:
        (root / name).write_text("# Title\n\n[here](#title)\n")


def test_versions_lie_next_to_each_other(tmp_path: Path) -> None:
    small(tmp_path / "pages")
    for version in ("0.10", "0.9"):
        site.release(tmp_path / "site", version, tmp_path / "pages")
    listed = json.loads((tmp_path / "site/versions.json").read_text())
    assert [(v["version"], v["aliases"]) for v in listed] == [("0.10", ["latest"]), ("0.9", [])]
    assert '"provider": "mike"' in (tmp_path / "site/0.9/index.html").read_text() and "0.10/index.html" in (tmp_path / "site/index.html").read_text()


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    small(tmp_path)
    (tmp_path / "README.md").write_text("# Title\n\n[here](#title) and [there](docs/none.md) and [so](#not)\n")
    with pytest.raises(site.Broken, match=r"(?s)none.md.*#not"):
        site.build(tmp_path / "out", tmp_path)


# -- references and tables -----------------------------------------------------------------------------------------------------


def test_the_page_of_errors_is_up_to_date() -> None:
    here, want = refusals.PAGE.read_text(), {refusals.row(r) for r in refusals.refusals()}
    missing = [row for row in want if row not in here]
    assert not missing, "run `make docs`: errors.md lacks\n" + "\n".join(missing[:5])
    assert all(f"## {name}\n" in here for name in refusals.classes())


def test_every_refusal_says_what_was_needed_and_found() -> None:
    told_elsewhere = {"agree"}  # words of one rank, handed on by another
    bare = [
        f"{r.file}, line {r.line}: {r.words.get('message', '')}"
        for r in refusals.refusals()
        if r.words.get("message") and not {"needed", "found"} & set(r.words) and Path(r.file).stem not in told_elsewhere
    ]
    assert len(bare) <= 1, "\n".join(bare)  # one hands on the last word of a rank as it is


def test_every_public_name_is_described() -> None:
    text = reference.page()
    names = {*weft._HOME, *weft.lang.__all__, *weft.schedule.__all__}
    nameless = [n for n in names if f"### {n}\n" not in text and f"**`{n}`**" not in text]
    assert not nameless
    assert all(f"### {n}\n" in reference.PAGE.read_text() or f"**`{n}`**" in reference.PAGE.read_text() for n in names), "make docs"


def test_a_table_is_made_of_what_a_benchmark_printed(tmp_path: Path) -> None:
    printed = tmp_path / "b.json"
    printed.write_text('words\n{"bench": "b", "rows": [{"case": "x", "weft_ms": 0.5, "limit_ms": 0.25, "ratios": {"ddp": 2.0, "gloo": 12.3}}]}\n')
    ((name, text),) = tables.tables(tables.read(printed))
    assert name == "b"
    assert text == "| case | weft ms | limit ms | ddp / weft | gloo / weft |\n|---|---|---|---|---|\n| x | 0.5000 | 0.2500 | 2.00x | 12x |"
    page = "before\n<!-- bench b: begin -->\nold\n<!-- bench b: end -->\nafter <!-- bench c: begin -->\nkept\n<!-- bench c: end -->"
    want = f"before\n<!-- bench b: begin -->\n\n{text}\n\n<!-- bench b: end -->\nafter <!-- bench c: begin -->\nkept\n<!-- bench c: end -->"
    assert tables.put(page, {"b": text}) == (want, ["b"], ["c"])


def test_one_command_renews_every_table_of_every_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs, results = tmp_path / "docs", tmp_path / "results"
    docs.mkdir()
    results.mkdir()
    places = ["optimizer", "gpu-matmuls sums 4", "accuracy", "train"]
    (docs / "a.md").write_text("\n".join(f"<!-- bench {name}: begin -->\nold {name}\n<!-- bench {name}: end -->" for name in places))
    stages = [{"stage": "sums", "ranks": 4}, {"stage": "gather", "ranks": 4}]
    timed = {"case": "p", "weft_ms": 2.0, "ratios": {"torch": 1.5}, "way": "2 chunks", "gemm_ms": 1.5, "of_limit": 0.75}
    rows = [{**stages[0], "case": "check"}, {**stages[0], **timed}]
    predicted = {"case": "r", "measured": 10.0, "predicted": 11.0, "error": 0.1}
    told = {"count": 1, "median_error": 0.1, "p90_error": 0.1, "rank_correlation": None}
    printed = {
        "a": {"bench": "optimizer", "rows": [{"case": "adamw", "weft_ms": 150.0, "ratios": {}}]},
        "b": {"bench": "gpu-matmuls", "stages": stages, "rows": rows},
        "c": {"bench": "accuracy", "rows": [predicted], "files": {"published": 1}, "groups": {"published": told}},
        "d": {"bench": "nowhere", "rows": [{"case": "y", "weft_ms": 1.0}]},
    }
    for name, result in printed.items():
        (results / f"{name}.json").write_text(json.dumps(result) + "\n")
    assert tables.main([str(results)], docs) == 0
    text, said = (docs / "a.md").read_text(), capsys.readouterr().out
    assert "| adamw | 150.0 |" in text and "| p | 2.000 | 1.50x | 75% | 2 chunks | 1.500 |" in text
    assert "| published | 1 | 10.0% | 10.0% | - |" in text and "| r |  | 10 | 11 | +10.0% |" in text
    assert "old train" in text and text.count("old") == 1
    assert "a.md: train left as it was" in said and "nowhere: no page has a place for it" in said
    assert tables.main([str(results)], docs) == 0 and (docs / "a.md").read_text() == text


def test_tables_refuse_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("no result\n")
    with pytest.raises(SystemExit, match="needed what `weft bench NAME --json` prints"):
        tables.main([str(tmp_path / "x.json")])


def test_every_place_for_a_table_is_whole() -> None:
    for path in sorted((tables.ROOT / "docs").glob("*.md")):
        text = path.read_text()
        begun, ended = (re.findall(rf"<!-- bench ([^:]+): {word} -->", text) for word in ("begin", "end"))
        assert begun == ended == [m[1] for m in tables.PLACE.finditer(text)], path.name
