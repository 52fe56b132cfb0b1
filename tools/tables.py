"""Measured tables of the documentation, from what benchmarks printed: nobody copies figures by hand.

    weft bench collectives --json > build/bench/collectives.json       # and others as they are wanted
    make tables                                                        # or: make tables FROM='a.json folder'

A table stands between `<!-- bench NAME: begin -->` and `<!-- bench NAME: end -->` on any page. NAME is that of the benchmark; where it
runs in stages, `BENCH STAGE RANKS`, where ranks share a GPU `BENCH RANKS`. Places without a result keep what they have, and are told.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench"
EXTRA = {"of_limit": "of limit", "times_limit": "times limit", "way": "way", "gemm_ms": "GEMM alone ms", "hidden": "hidden"}
PLACE = re.compile(r"<!-- bench ([^:]+): begin -->\n(.*?)<!-- bench \1: end -->", re.S)


def found_in(paths: Sequence[Path]) -> dict[str, str]:
    """Tables by name, from files or folders of what benchmarks printed."""
    files = [f for path in paths for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not any(f.is_file() for f in files):
        where = ", ".join(map(str, paths))
        raise SystemExit(f"{where}: needed files of what `weft bench NAME --json` prints, found none; or say where: make tables FROM='a.json folder'")
    return {name: text for file in files for name, text in tables(read(file))}


def read(path: Path) -> dict[str, Any]:
    """The object on the last line of what a benchmark printed."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
        found = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot be read: {error}") from error
    if not {"bench", "rows"} <= set(found):
        raise SystemExit(f"{path}: needed what `weft bench NAME --json` prints, found no object with bench and rows")
    return dict(found)


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The tables of one result by name."""
    if found["bench"] == "accuracy":
        yield "accuracy", accuracy(found)
        if found.get("classes"):  # results of earlier versions have none
            yield "accuracy classes", classes(found["classes"], ("file", "model", "dtype", "device"))
    elif found["bench"] == "kernels":
        yield "kernels", classes(found["rows"], ("kind", "device", "dtype", "class"))
    elif found["bench"] in ("gpu-accuracy", "cpu-accuracy"):
        from bench import _accuracy_tables

        yield from _accuracy_tables.tables(found)
    elif "stages" in found:
        for stage in found["stages"]:
            rows = [row for row in found["rows"] if (row["stage"], row["ranks"]) == (stage["stage"], stage["ranks"]) and row.get("weft_ms")]
            if rows:
                yield " ".join([found["bench"], *stage["stage"].split(), str(stage["ranks"])]), table(rows)
    else:
        yield found["bench"], table(found["rows"])


def accuracy(found: Mapping[str, Any]) -> str:
    from bench import accuracy as bench

    rows, files, at = found["rows"], {}, 0
    for name, count in found["files"].items():
        files[name], at = rows[at : at + count], at + count
    return bench.tables(files, found["groups"])


def classes(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Count, median, 90th percentile and bias of each class of what was measured."""
    lines = [[*keys, "count", "median", "90th percentile", "bias"], ["---"] * (len(keys) + 4)]
    for row in rows:
        if row["median"] is not None:
            lines.append([*(str(row[k]) for k in keys), str(row["count"]), f"{row['median']:.1%}", f"{row['p90']:.1%}", f"{row['bias']:+.1%}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per case: weft's time, the limit, each peer over weft, and what else the rows say of it."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.get("ratios", {})))
    limits = any(row.get("limit_ms") for row in rows)
    extra = [key for key in EXTRA if any(row.get(key) is not None for row in rows)]
    head = ["case", "weft ms", *(["limit ms"] if limits else []), *(f"{peer} / weft" for peer in peers), *(EXTRA[k] for k in extra)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        limit = [number(row.get("limit_ms"))] if limits else []
        ratios = [times(row.get("ratios", {}).get(p)) for p in peers]
        lines.append([row["case"], number(row.get("weft_ms")), *limit, *ratios, *(said(k, row.get(k)) for k in extra)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def number(x: float | None) -> str:
    return "" if x is None else f"{x:.4f}" if x < 1 else f"{x:.3f}" if x < 100 else f"{x:,.1f}"


def times(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}x" if x < 10 else f"{x:.0f}x"


def said(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("of_limit", "hidden"):
        return f"{value:.0%}"
    return number(value) if isinstance(value, int | float) else str(value)


def put(page: str, found: Mapping[str, str]) -> tuple[str, list[str], list[str]]:
    """The page with its tables in their places, the names that were put in, and those for which there is none."""
    there, lacking = list[str](), list[str]()

    def one(match: re.Match[str]) -> str:
        name = match[1]
        (there if name in found else lacking).append(name)
        return f"<!-- bench {name}: begin -->\n\n{found[name]}\n\n<!-- bench {name}: end -->" if name in found else match[0]

    return PLACE.sub(one, page), there, lacking


def main(arguments: Sequence[str], docs: Path = ROOT / "docs") -> int:
    found, used = found_in([Path(a) for a in arguments] or [RESULTS]), set[str]()
    for path in sorted(docs.glob("*.md")):
        text, there, lacking = put(path.read_text(), found)
        if there:
            path.write_text(text)
        used |= set(there)
        print("".join([*(f"{path.name}: {name} written anew\n" for name in there), *(f"{path.name}: {name} left as it was\n" for name in lacking)]), end="")
    for name in found:
        if name not in used:
            print(f"{name}: no page has a place for it\n\n{found[name]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
