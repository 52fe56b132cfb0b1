"""Measured tables of the documentation, from what benchmarks printed.

    weft bench collectives --json > collectives.json
    python -m tools.tables collectives.json          # or: make tables FROM=collectives.json

A page has a table between `<!-- bench NAME: begin -->` and `<!-- bench NAME: end -->`; nobody copies figures by hand. The tables of
foresight come from rows that are not part of the repository: `weft bench foresight --rows FILE --doc docs/foresight.md`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def read(path: Path) -> dict[str, Any]:
    """The object on the last line of what a benchmark printed."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {}
    if "bench" not in found or "rows" not in found:
        raise SystemExit(f"{path}: needed what `weft bench NAME --json` prints, found no object with bench and rows")
    return dict(found)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per case: weft's time, the limit, each peer over weft."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.get("ratios", {})))
    limits = any(row.get("limit_ms") for row in rows)
    head = ["case", "weft ms", *(["limit ms"] if limits else []), *(f"{peer} / weft" for peer in peers)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        limit = [number(row.get("limit_ms"))] if limits else []
        lines.append([row["case"], number(row.get("weft_ms")), *limit, *(times(row.get("ratios", {}).get(p)) for p in peers)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def number(x: float | None) -> str:
    return "" if x is None else f"{x:.4f}" if x < 1 else f"{x:.3f}"


def times(x: float | None) -> str:
    return "" if x is None else f"{x:.1f}x" if x < 10 else f"{x:.0f}x"


def put(page: str, name: str, text: str) -> str | None:
    """The page with the table in its place; None if it has no place for it."""
    begin, end = f"<!-- bench {name}: begin -->", f"<!-- bench {name}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page) if pattern.search(page) else None


def main(files: Sequence[str]) -> int:
    for file in files:
        found = read(Path(file))
        text, placed = table(found["rows"]), []
        for path in sorted((ROOT / "docs").glob("*.md")):
            new = put(path.read_text(), found["bench"], text)
            if new is not None:
                path.write_text(new)
                placed.append(path.name)
        print(f"{found['bench']}: " + (f"written into {', '.join(placed)}" if placed else f"no page has a place for it\n\n{text}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
