"""A class name says one thing: in the rooms that price, plan and run, none stands twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import weft

ROOMS = ("plan", "cost", "transform", "api")


def test_class_names_are_unique() -> None:
    homes = defaultdict(list)
    for room in ROOMS:
        for path in sorted((Path(weft.__file__).parent / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes[node.name.lstrip("_")].append(f"{path.name}:{node.lineno}")
    assert not {name: at for name, at in homes.items() if len(at) > 1}
