"""Pages, help and errors use the field's words: what a reader of PyTorch or Megatron searches for is found, and no dialect stands beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tools.pages import ROOT
from weft.cli import app

# The dialect, and what to say instead. History (CHANGELOG.md) keeps its words.
DIALECT = {
    r"fore(?:see\w*|saw|sight|tell\w*|told)": "predict, prediction, accuracy",
    r"(?:is|are|was|were|be) held|held (?:whole|as|along)|how [\w ]{0,20} held": "layout, placement, sharded",
    r"wholes?": "replicated; full (of a tensor or batch); entire",
    r"(?<!### )cuts?(?!-off)|cutting": "shard, sharded along dim; split (of stages)",
    r"pending": "partial",
    r"runs? again|ran again|run(?:ning)? (?:parts of it )?again": "recompute, activation checkpointing",
    r"beside": "overlapped with; next to",
    r"travels?|travelling": "communication, is sent",
    r"pretended": "simulated",
    r"no number(?! of)": "NaN or Inf",
    r"ends? well|ended well": "exit with 0",
    r"as (?:it|they) comes?": "default",
    r"times as (?:long|large|fast|quick|much)": "2x slower, larger",
    r"hull of": "time-memory Pareto front",
    r"what (?:the )?copies share|what is shared": "ZeRO stage",
    r"alike": "isomorphic, the same",
    r"(?<!Jacobian )(?<!ordered )(?<!inner )(?<!dot-)(?<!Cartesian )products?(?! of (?:atoms|elements|degrees|unknowns|the operands))": "matmul, GEMM",
    r"(?:is|are) told|told (?:too|as|by|apart)": "printed, reported",
    r"lanes?": "process groups, channels",
    r"tailor\w*|to measure(?= \()": "stage partitioner",
    r"utilisation": "MFU",
}  # fmt: skip
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
VARIABLES = {"heard", "judged", "lie", "lies", "mover", "said", "settled", "stray", "turned", "wholes"}
WANTED = (
    "predicted", "sharded", "replicated", "partial", "recompute", "activation checkpointing", "overlapped", "exposed communication", "pipeline", "micro-batch",
    "data-parallel", "tensor parallelism", "sequence parallel", "context parallelism", "expert parallelism", "Ulysses", "FSDP", "ZeRO", "DeviceMesh", "DTensor",
    "safetensors", "torch.distributed.checkpoint", "NaN or Inf", "matmul", "Pareto front", "global batch", "MFU", "CUDA graph",
)  # fmt: skip
CODE = ("tl.load(", "Kind.COMPOSITE")  # in strings that are code
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(text: str) -> str:
    """Without blocks of code, names in backticks, comments and the targets of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.S | re.M)
    return re.sub(r"\*[a-z][^*\n|]*\*|`[^`\n]*`|\]\([^)]*\)|^    .*$", "", text, flags=re.M)


def dialect(text: str) -> list[str]:
    hits = ((m, say) for words, say in DIALECT.items() for m in re.finditer(rf"\b(?:{words})\b", text, re.I))
    return [f"{m[0]!r} in ...{text[max(0, m.start() - 40) : m.end() + 30]!r}: say {say}" for m, say in hits]


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


ROOMS = sorted(p for p in [*(ROOT / "weft").iterdir(), ROOT / "weft_zoo", ROOT / "examples"] if p.is_dir())


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_docstrings_and_messages_speak_no_dialect(room: Path) -> None:
    found = [f"{path.name}, line {line}: {hit}" for path in sorted(room.rglob("*.py")) for line, text in texts(path) for hit in dialect(prose(text))]
    assert not found, "\n".join(found)


def texts(path: Path) -> list[tuple[int, str]]:
    """Docstrings and other strings of more than one word, with their lines; code that is written as text is left out."""
    strings = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [(n.lineno, n.value) for n in strings if " " in n.value.strip() and not any(code in n.value for code in CODE)]


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_modules_and_classes_are_named_by_the_words_of_the_field(room: Path) -> None:
    assert not [f"{path.relative_to(ROOT)}: {name}" for path in sorted(room.rglob("*.py")) for name in names(path) if parts(name) & NAMES]


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_functions_are_named_by_the_words_of_the_field(room: Path) -> None:
    functions = ((path, n.name) for path in sorted(room.rglob("*.py")) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in functions if parts(name) & FUNCTIONS]


@pytest.mark.parametrize("room", ROOMS, ids=[p.name for p in ROOMS])
def test_variables_are_named_by_the_words_of_the_field(room: Path) -> None:
    assert not [f"{path.relative_to(ROOT)}, line {line}: {name}" for path in sorted(room.rglob("*.py")) for line, name in bound(path) if name in VARIABLES]


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
    assert not [word for word in WANTED if word.lower() not in text.lower()]


def test_dialect_is_found() -> None:
    assert len(dialect("The whole tensor is cut along dim 0; its products run again beside compute, as foreseen.")) == 6
    assert not dialect("A sharded tensor; its matmuls are recomputed and overlapped with compute, as predicted. A vector-Jacobian product.")
