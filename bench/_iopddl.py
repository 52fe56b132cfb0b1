"""Reads assignment problems in the format of the ASPLOS'25 contest on intra-operator parallelism (JSON, plain or gzipped)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import WeftError
from weft.plan.assignment.problem import Floats, Ints, Problem

FORBIDDEN = 10**18  # the format's infinity

Table = dict[str, Any]


class ProblemError(WeftError):
    """An assignment problem that cannot be read or makes no sense."""


def load(path: str | Path) -> Problem:
    """The problem in a file; its name is the file's, up to the first dot."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return parse(json.loads(raw), path.name.split(".")[0])
    except (OSError, EOFError, ValueError, gzip.BadGzipFile) as e:
        raise ProblemError(f"cannot read {path}", needed="an assignment problem as JSON", found=str(e)) from e


def parse(document: object, name: str = "") -> Problem:
    """The problem a decoded document states, checked part by part."""
    body = _field(document, "problem", dict, "the document")
    nodes, edges = _field(body, "nodes", dict, "problem"), _field(body, "edges", dict, "problem")
    costs, usages = _rows(nodes, "nodes", "costs"), _rows(nodes, "nodes", "usages")
    intervals, pairs, tables = _rows(nodes, "nodes", "intervals"), _rows(edges, "edges", "nodes"), _rows(edges, "edges", "costs")
    _same_length("nodes", intervals=intervals, costs=costs, usages=usages)
    _same_length("edges", nodes=pairs, costs=tables)

    k = _lengths(costs)
    _expect(k > 0, "node", "at least one strategy", lambda v: "none")
    _expect(_lengths(usages) == k, "node", "one usage per strategy", lambda v: f"{k[v]} costs and {len(usages[v])} usages")
    span, ends = _pairs(intervals, "node", "an interval [start, stop]"), _pairs(pairs, "edge", "a pair of nodes [u, v]")
    _expect((0 <= span[:, 0]) & (span[:, 0] <= span[:, 1]), "node", "0 <= start <= stop", lambda v: f"{intervals[v]}")
    _expect(((0 <= ends) & (ends < len(k))).all(1), "edge", f"nodes from 0 to {len(k) - 1}", lambda e: f"{pairs[e]}")
    _expect(ends[:, 0] != ends[:, 1], "edge", "two different nodes", lambda e: f"{pairs[e]}")
    size = k[ends].prod(1)
    _expect(_lengths(tables) == size, "edge", "k_u * k_v costs", lambda e: f"{len(tables[e])}, not {size[e]}")

    live = np.flatnonzero(span[:, 1] > span[:, 0])
    return Problem(
        name,
        k,
        _costs(costs, "node costs"),
        ends[:, 0].copy(),
        ends[:, 1].copy(),
        _costs(tables, "edge costs"),
        live,
        span[live, 0],
        span[live, 1],
        _flat([usages[v] for v in live], "node usages"),
        np.full(span[:, 1].max(initial=0), _limit(body)),
    )


def _field(of: object, key: str, kind: type, where: str) -> Any:
    value = of.get(key) if isinstance(of, dict) else None
    if not isinstance(value, kind):
        found = f"{type(of).__name__}" if not isinstance(of, dict) else f"keys {sorted(of)}" if key not in of else type(value).__name__
        raise ProblemError(f"{where} has no {key!r} as it should", needed=f"{key!r}: a {kind.__name__}", found=found)
    return value


def _rows(of: Table, where: str, key: str) -> list[list[int]]:
    rows = _field(of, key, list, where)
    odd = next((i for i, row in enumerate(rows) if not isinstance(row, list)), None)
    if odd is not None:
        raise ProblemError(f"{where}.{key}[{odd}] is not a list", needed="a list of numbers", found=repr(rows[odd])[:60])
    return rows  # type: ignore[no-any-return]


def _same_length(where: str, **columns: Sequence[object]) -> None:
    if len({len(c) for c in columns.values()}) > 1:
        found = ", ".join(f"{len(c)} {key}" for key, c in columns.items())
        raise ProblemError(f"{where}: the columns differ in length", needed="one entry each", found=found)


def _expect(good: Any, what: str, needed: str, found: Any) -> None:
    bad = np.flatnonzero(~good)
    if len(bad):
        raise ProblemError(f"{what} {bad[0]} is malformed", needed=needed, found=found(bad[0]))


def _lengths(rows: Sequence[Sequence[int]]) -> Ints:
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _pairs(rows: Sequence[Sequence[int]], what: str, needed: str) -> Ints:
    _expect(_lengths(rows) == 2, what, needed, lambda i: f"{rows[i]}")
    return _flat(rows, needed).astype(np.int64).reshape(-1, 2)


def _flat(rows: Sequence[Sequence[int]], what: str) -> Floats:
    try:
        values = np.fromiter(chain.from_iterable(rows), np.float64)
    except (TypeError, ValueError) as e:
        raise ProblemError(f"{what} hold something that is not a number", needed="numbers", found=str(e)) from e
    if np.isnan(values).any() or (values < 0).any():
        raise ProblemError(f"{what} hold a negative number or none at all", needed="numbers from zero up", found=f"{values.min()}")
    return values


def _costs(rows: Sequence[Sequence[int]], what: str) -> Floats:
    values = _flat(rows, what)
    values[values >= FORBIDDEN] = np.inf
    return values


def _limit(body: Table) -> float:
    limit = body.get("usage_limit", np.inf)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ProblemError("usage_limit is not a limit", needed="a number from zero up", found=repr(limit)[:60])
    return float(limit)
