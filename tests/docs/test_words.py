"""Pages, help and errors use the field's words: what a reader of PyTorch or Megatron searches for is found, and no dialect stands beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tools.pages import ROOT
from tools.words import FIELD, PAGES, ROOMS, dialect, modules, prose, texts
from weft.cli import app

# Words that no name of a module or class is made of.
NAMES = {
    "held", "whole", "wholes", "cut", "cuts", "again", "way", "ways", "wish", "beside", "travel", "travels", "laid", "told", "says", "said", "heard", "hear",
    "lane", "lanes", "near", "carry", "mover", "apart", "together", "touch", "alike", "trust", "quick", "lie", "tailor", "dealt", "teach", "judge", "judged",
    "stray", "ruled", "room", "product", "foresee", "foreseen", "foresight", "foretell", "pretended", "turned", "asked",
}  # fmt: skip
# Words that no name of a function is made of either; what is missing from here is also plain English or a solver's own.
FUNCTIONS = {
    "alike", "apart", "deal", "foresaw", "foresee", "foreseen", "foresight", "foretell", "heard", "judged", "laid", "lay", "lie", "mover", "near",
    "pretended", "quick", "ruled", "says", "stray", "tailor", "teach", "told", "travel", "travels", "trust", "turned", "turns", "wholes", "wish",
}  # fmt: skip
# Nor a variable or a parameter.
VARIABLES = {"heard", "judged", "laid", "lie", "lies", "mover", "said", "settled", "stray", "told", "turned", "wholes"}
# Nor an attribute, or the name of an argument at a call.
ATTRIBUTES = {"alike", "heard", "judged", "laid", "mover", "quick", "said", "told", "together", "turned", "turns", "uncut", "whole", "wholes", "WHOLE"}


@pytest.mark.parametrize("path", PAGES, ids=[p.stem for p in PAGES])
def test_pages_leave_to_the_machine_where_packages_come_from(path: Path) -> None:
    assert not re.search(r"index-url|--find-links", path.read_text())


@pytest.mark.parametrize("path", PAGES, ids=[p.stem for p in PAGES])
def test_pages_speak_no_dialect(path: Path) -> None:
    found = dialect(prose(path.read_text()))
    assert not found, "\n".join(found)


def test_help_speaks_no_dialect() -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        found = dialect(" ".join([command.help or "", *(getattr(p, "help", "") or "" for p in command.params)]))
        assert not found, f"weft {name}: " + "\n".join(found)


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_docstrings_and_messages_speak_no_dialect(room: Path) -> None:
    found = [
        f"{path.name}, line {line}: {hit}"
        for path in modules(room)
        for line, text in texts(path)
        for hit in dialect(prose(text))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_modules_and_classes_are_named_by_the_words_of_the_field(room: Path) -> None:
    assert not [f"{path.relative_to(ROOT)}: {name}" for path in modules(room) for name in names(path) if parts(name) & NAMES]


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_functions_are_named_by_the_words_of_the_field(room: Path) -> None:
    functions = (
        (path, n.name)
        for path in modules(room)
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.FunctionDef)
    )
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in functions if parts(name) & FUNCTIONS]


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_variables_are_named_by_the_words_of_the_field(room: Path) -> None:
    assert not [
        f"{path.relative_to(ROOT)}, line {line}: {name}"
        for path in modules(room)
        for line, name in bound(path)
        if name in VARIABLES
    ]


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_attributes_are_named_by_the_words_of_the_field(room: Path) -> None:
    nodes = ((path, n) for path in modules(room) for n in ast.walk(ast.parse(path.read_text())))
    found = ((path, n, n.attr if isinstance(n, ast.Attribute) else n.arg) for path, n in nodes if isinstance(n, (ast.Attribute, ast.keyword)))
    assert not [f"{path.relative_to(ROOT)}, line {n.lineno}: {name}" for path, n, name in found if name in ATTRIBUTES]


def bound(path: Path) -> Iterator[tuple[int, str]]:
    """Variables that are written and parameters, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def names(path: Path) -> list[str]:
    return [path.stem, *(n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef))]


def parts(name: str) -> set[str]:
    """The words a name is made of: `CutBlock` and `cut_blocks` of cut and block(s)."""
    return {word.lower() for word in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name) if word}


def test_names_are_taken_apart() -> None:
    assert parts("CutBlock") & NAMES and parts("own_lanes") & NAMES and not parts("cutoff") & NAMES


def test_the_words_of_the_field_are_there() -> None:
    text = "\n".join(p.read_text() for p in PAGES)
    assert not [word for word in FIELD if word.lower() not in text.lower()]


def test_dialect_is_found() -> None:
    assert len(dialect("The whole tensor is cut along dim 0; its products run again beside compute, as foreseen.")) == 6
    assert not dialect("A sharded tensor; its matmuls are recomputed and overlapped with compute, as predicted. A vector-Jacobian product.")
