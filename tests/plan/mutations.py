"""Plans that are nearly right: every place of a JSON document changed in every way that a slip, another program or malice might."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31 + 1, 2**63, 10**9, 10**30, -(10**30), 0.5, -0.0, 1e-300, 1e300, "", "x", "tp=4", "\u0000", "x" * 5000,
    "../../etc/passwd", [], {}, [[]], [{}], [5], [None], ["x"], {"x": 1}, {"x": {}}, {"": []}, {"copies": 10**9}, [[["layer", "none", 10**9]]],
)  # fmt: skip
TEXTS = (
    lambda s: s.replace(":", ": NaN,", 1), lambda s: s.replace("0", "9" * 6000, 1), lambda s: s.replace("[", "[" * 100000, 1), lambda s: s[: len(s) // 2],
    lambda s: s + s, lambda s: s.replace("1", "1e999", 1), lambda s: s.replace('"', "'"), lambda s: "\ufeff" + s, lambda s: s.replace("1", "Infinity", 1),
    lambda s: s.replace("{", '{"weft_plan": 1,', 1), lambda s: "", lambda s: "[]", lambda s: "null", lambda s: "1", lambda s: '"weft_plan"',
    lambda s: s.replace("\n", "\x00\n", 1), lambda s: s.encode("utf-16").decode("latin1"),
)  # fmt: skip


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, the longest lists sampled at their ends."""
    yield here
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*here, key))
    elif isinstance(value, list):
        for i in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from paths(value[i], (*here, i))


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def mutations(data: Any, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """(what was done, the text of the document after it): all texts first, then values drawn at places drawn."""
    text = json.dumps(data, indent=1)
    for i, change in enumerate(TEXTS):
        yield f"text {i}", change(text)
    draw, places = random.Random(seed), list(paths(data))[1:]
    for _ in range(count):
        made, path = copy.deepcopy(data), draw.choice(places)
        above, key = at(made, path[:-1]), path[-1]
        how = draw.choice(("value", "value", "value", "value", "gone", "added", "twice", "scaled"))
        if how == "gone":
            del above[key]
        elif how == "added" and isinstance(above, dict):
            above[draw.choice(("extra", "", "x" * 3000, "weft_plan", "kind"))] = draw.choice(ODD)
        elif how == "twice" and isinstance(above, list):
            above.append(copy.deepcopy(above[key]))
        elif how == "scaled" and type(above[key]) in (int, float):
            above[key] *= draw.choice((-1, 3, 1000, 10**9, 0.5))
        else:
            above[key] = draw.choice(ODD)
        yield f"{how} at {'.'.join(map(str, path))}: {str(above)[:120]}", json.dumps(made)
