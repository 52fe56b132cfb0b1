"""Text of a configuration as flat keys with values: JSON, TOML, YAML, `--options`, and Python that is read but never run."""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weft.core.errors import PlanError


def keys_of(text: str) -> dict[str, Any]:
    """Flat keys of JSON, TOML, Python, options or YAML, whichever the text is."""
    for parse in (json.loads, tomllib.loads, _python, _options, _yaml):
        try:
            found = parse(text)
        except (ValueError, SyntaxError):
            continue
        if isinstance(found, dict) and found:
            return dict(_flat(found))
    raise PlanError("the configuration cannot be read", needed="JSON, TOML, YAML, Python or --options", found=repr(text.strip()[:60]))


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise PlanError("YAML needs PyYAML", needed="PyYAML", found="not installed", try_="pip install pyyaml, or the same as JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _options(text: str) -> dict[str, Any]:
    """`--name value`, `--name=value` and bare `--name` of a script or a line; lists are joined."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, _, value = word[2:].partition("=")
            found[name] = value or True
        elif name and word not in (")", "(") and not re.fullmatch(r"\w+=\(?", word):
            found[name] = word if found[name] is True else f"{found[name]} {word}"
        else:
            name = ""
    if not found:
        raise ValueError("no options")
    return found


def _python(text: str) -> dict[str, Any]:
    """Assignments and the keywords of calls, by their paths; nothing is run."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            path = _path(node.targets[0]).removeprefix("config.")
            if isinstance(node.value, ast.Call) and not node.value.keywords and not path.startswith("parallelism_config"):
                found |= {path: ast.unparse(node.value.func)} if path and "." in ast.unparse(node.value.func) else {}
            elif isinstance(node.value, ast.Call):
                found |= _keywords(node.value, "parallelism_config" if path == "parallelism_config" else "")
            elif path:
                found |= _value(path, node.value)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            found |= _keywords(node.value, "")
    if not found:
        raise ValueError("no assignments")
    return found


def _path(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _keywords(call: ast.Call, before: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in call.keywords:
        path = f"{before}.{word.arg}" if before else str(word.arg)
        if isinstance(word.value, ast.Call):
            inner = _keywords(word.value, path)
            found |= inner or {path: ast.unparse(word.value.func)}
        else:
            found |= _value(path, word.value)
    return found


NUMBERS: dict[type, Callable[[Any, Any], Any]] = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv}


def _value(path: str, node: ast.expr) -> dict[str, Any]:
    """A literal, or one multiplied with or added to another; what only running tells is left out."""
    try:
        return {path: ast.literal_eval(node)}
    except ValueError:
        if isinstance(node, ast.BinOp) and type(node.op) in NUMBERS:
            sides = [_value("x", side).get("x") for side in (node.left, node.right)]
            if all(isinstance(x, (int, float)) for x in sides):
                return {path: NUMBERS[type(node.op)](*sides)}
        return {}
