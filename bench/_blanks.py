"""Cells of a row, and what is assumed where they are blank, missing or do not go together. Everything assumed is said."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.cluster.profile import Profile, load, names
from weft.core.errors import UnknownName

Cells = Mapping[str, str]


@dataclass
class Blanks:
    """Reads cells; notes what it had to assume. No default means that a row is of no use without this cell."""

    cells: Cells
    assumed: dict[str, str] = field(default_factory=dict)

    def text(self, key: str, default: str | None = None, why: str = "not stated") -> str:
        value = (self.cells.get(key) or "").strip()
        if value:
            return value
        if default is None:
            raise ValueError(f"{key} is blank")
        self.assumed[key] = f"{default} ({why})"
        return default

    def number(self, key: str, default: float | None = None, why: str = "not stated") -> float:
        value = self.text(key, None if default is None else f"{default:g}", why)
        try:
            return float(value.replace(",", "").replace("_", "").removesuffix("%"))
        except ValueError:
            raise ValueError(f"{key} is {value!r}, not a number") from None

    def integer(self, key: str, default: int | None = None, why: str = "not stated") -> int:
        found = self.number(key, default, why)
        if not math.isfinite(found) or found != int(found) or found < 1:
            raise ValueError(f"{key} is {found:g}, no whole number of at least 1")
        return int(found)

    def word(self, key: str, words: Mapping[str, str], default: str, why: str) -> str:
        """The meaning of the first of `words` that a cell contains, in whatever case; the default if it has none of them."""
        text = (self.cells.get(key) or "").strip().lower()
        for part, meaning in words.items():
            if part in text:
                return meaning
        self.assumed[key] = f"{default} ({why})" if not text else f"{default} (no meaning known of {text!r})"
        return default

    def rate(self, key: str, default: float, why: str) -> float:
        """Above 0, whatever unit stands behind it."""
        stated = re.match(r"[\d.,_]+", (self.cells.get(key) or "").strip())
        value = Blanks({key: stated.group() if stated else ""}, self.assumed).number(key, default, why)
        if not value > 0:
            self.assumed[key] = f"{default:g} ({value:g} is no rate)"
        return value if value > 0 else default

    def measured(self, key: str) -> tuple[float, str]:
        """What was measured, and why nothing can be compared with it, where that is so: the row can be predicted all the same."""
        if not (self.cells.get(key) or "").strip():
            return math.nan, f"{key} is blank, so there is nothing to compare with"
        value = self.number(key)
        return value, "" if 0 < value < math.inf else f"{key} is {value:g}, which nothing can be compared with"

    # --- what follows from other cells

    def devices(self, key: str, degrees: Sequence[str]) -> int:
        """How many there are; the product of the degrees where only these are stated."""
        stated = [(self.cells.get(d) or "").strip() for d in degrees]
        if (self.cells.get(key) or "").strip() or not any(stated):
            return self.integer(key)
        return self.integer(key, math.prod(self.integer(d) for d, text in zip(degrees, stated, strict=True) if text), "the product of the degrees")

    def copies(self, key: str, gpus: int, others: int, some: bool = False) -> int:
        """Data parallelism: what is left of the devices. `some` of them may be left over."""
        if gpus % others and not some or gpus < others:
            raise ValueError(f"{others} devices of one copy do not divide {gpus}")
        rest = gpus // others
        found = self.integer(key, rest, "what is left of the devices")
        if gpus % others:
            self.assumed["gpus"] = f"{rest * others} of {gpus} do the work"
        if found != rest:
            self.assumed[key] = f"{rest} (what is left of the devices; {found} does not fill them)"
        return rest

    def batch(self, key: str, dp: int, micro: int, pp: int) -> int:
        """Whole micro-batches; four for each stage where nothing is stated."""
        unit = dp * micro
        found = self.integer(key, unit * (4 * pp if pp > 1 else 1), "not stated: four micro-batches a stage, one where there is one stage")
        if found % unit:
            found = -(-found // unit) * unit
            self.assumed[key] = f"{found} (whole micro-batches)"
        return found

    def heads(self, key: str, hidden: int, tp: int) -> int:
        """Heads of 128, or of 64; cut evenly by tp."""
        found = self.integer(key, max(1, hidden // (128 if hidden % 128 == 0 else 64)), "heads of usual width")
        if found % tp:
            found = -(-found // tp) * tp
            self.assumed[key] = f"{found} (a multiple of tp)"
        return found

    def sizes(self, layers: str, hidden: str, source: str) -> tuple[int, int]:
        """Layers and width; one that is blank follows from the other and the size the source names, at 12 x layers x width^2."""
        size = stated_size(source)
        given = {key: self.integer(key) for key in (layers, hidden) if (self.cells.get(key) or "").strip()}
        if len(given) < 2 and size is None:
            raise ValueError(f"{layers if layers not in given else hidden} is blank and no size is named")
        if hidden not in given:
            wide = (size / 12 / given[layers]) ** 0.5 if layers in given else (size * 128 / 12) ** (1 / 3)  # type: ignore[operator]
            given[hidden] = self.integer(hidden, max(128, round(wide / 128) * 128), f"for a size of {size:.3g}")
        if layers not in given:
            given[layers] = self.integer(layers, max(1, round(size / 12 / given[hidden] ** 2)), f"for a size of {size:.3g}")  # type: ignore[operator]
        return given[layers], given[hidden]


def stated_size(source: str) -> float | None:
    """Parameters a text names, as in `Llama 8B`."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*([BT])\b", source)
    return None if found is None else float(found.group(1)) * (1e12 if found.group(2) == "T" else 1e9)


def device_kind(text: str) -> Profile:
    """The profile of the kind a text names, whatever stands around it. One that is not known is refused: it is no other device."""
    try:
        return load(text)
    except UnknownName:
        known = sorted(names(), key=len, reverse=True)
    kind = next((n for n in known if n.lower() in text.lower()), None)
    if kind is None:
        raise ValueError(f"no profile of the device {text!r}: known are {', '.join(names())}")
    return load(kind)
