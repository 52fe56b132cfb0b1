"""Layouts a user fixes by the names of parameters: `layers.*.mlp.w1=tp:S(1)`, or a plan written for `parallelize_module`.

A pattern names parameters, or modules whose weights are meant. Dims are those of the tensor as torch keeps it, so the columns
of an `nn.Linear` are dim 0. A parameter that two pins name is laid out as the later one says.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.core.errors import PlanError
from weft.core.layout import Placement, R, S
from weft.core.names import bare
from weft.plan.place import Placements

EXAMPLE = "layers.*.mlp.w1=tp:S(1)"
_PLACE = re.compile(r"(\w+):(?:(R)|S\((\d+)\))")


@dataclass(frozen=True)
class Pin:
    """How the parameters of a pattern are sharded along some axes."""

    pattern: str
    places: tuple[tuple[str, Placement], ...]

    def __str__(self) -> str:
        return f"{self.pattern}={','.join(f'{a}:{p}' for a, p in self.places)}"


def is_layout(text: str) -> bool:
    """Whether a pin speaks of a tensor's layout, not of a decision such as tp=4."""
    return ":" in text.partition("=")[2]


def parse_pin(text: str) -> Pin:
    """`PATTERN=axis:S(dim)` or `axis:R`, several axes joined by commas."""
    pattern, _, layout_text = text.partition("=")
    found = [_PLACE.fullmatch(part.strip()) for part in layout_text.split(",")]
    if not pattern.strip() or not all(found):
        raise PlanError(f"cannot pin {text!r}", needed="PATTERN=AXIS:S(DIM) or AXIS:R", found=layout_text or text, try_=f'--pin "{EXAMPLE}"')
    places = tuple((m[1], R if m[2] else S(int(m[3]))) for m in found if m is not None)
    return Pin(pattern.strip(), places)


def resolve(pins: Iterable[Pin], parameters: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> dict[str, Placements]:
    """How every pinned parameter is laid out, by the name of its input. `parameters` gives shapes, `sizes` the mesh's axes."""
    placements: dict[str, dict[str, Placement]] = {}
    for pin in pins:
        for axis, _ in pin.places:
            if axis not in sizes:
                raise PlanError(f"cannot pin {pin}", needed=f"an axis of {', '.join(sizes)}", found=axis)
        for name in _named(pin, parameters):
            for axis, place in pin.places:
                _check(pin, name, parameters[name], place, sizes[axis])
                placements.setdefault(name, {})[axis] = place
    return dict(placements)


def _named(pin: Pin, parameters: Mapping[str, tuple[int, ...]]) -> list[str]:
    named = {bare(name): name for name in parameters}
    found = [full for name, full in named.items() if fnmatch.fnmatch(name, pin.pattern) or fnmatch.fnmatch(name, f"{pin.pattern}.weight")]
    if not found:
        close = difflib.get_close_matches(pin.pattern, named, 3, 0.3)
        raise PlanError(
            f"no parameter is named {pin.pattern!r}", needed="a name or pattern of a parameter or module", found=pin.pattern, try_=close
        )
    return found


def _check(pin: Pin, name: str, shape: tuple[int, ...], place: Placement, ranks: int) -> None:
    if isinstance(place, S) and (place.dim >= len(shape) or shape[place.dim] % ranks):
        size = f"dim {place.dim} to divide by {ranks}" if place.dim < len(shape) else f"a dim below {len(shape)}"
        raise PlanError(f"{name.removeprefix('param.')} cannot have the layout {pin}", needed=size, found=str(list(shape)))


# -- plans for parallelize_module ------------------------------------------------------------------------------------------------

STYLES = {"colwise": (0, 0, 1), "rowwise": (1, None, 0)}  # dim of a linear's weight, of its bias, of an embedding's weight
REPLICATED = ("replicate", "sequence_parallel", "gather", "prepare", "norep")


def dtensor_pins(model: nn.Module, plan: Mapping[str, Any], axis: str = "tp") -> list[Pin]:
    """A user's plan for `parallelize_module`, or a `tp_plan` of words, as pins of every parameter: what it does not name is replicated."""
    modules = {name: m for name, m in model.named_modules() if name}
    shards: dict[str, Placement] = {}
    for pattern, style in plan.items():
        named = [n for n in modules if fnmatch.fnmatch(n, pattern)]
        if not named:
            close = difflib.get_close_matches(pattern, modules, 3, 0.3)
            raise PlanError(f"the plan names no module by {pattern!r}", needed="a name or pattern of a module", found=pattern, try_=close)
        for name in named:
            shards |= _style(name, modules[name], style)
    return [Pin(name, ((axis, shards.get(name, R)),)) for name, _ in model.named_parameters()]


def _style(name: str, module: nn.Module, style: Any) -> dict[str, Placement]:
    word = (style if isinstance(style, str) else type(style).__name__).lower().removesuffix("parallel").replace("_rep", "")
    if word.startswith(REPLICATED) or word == "sequence":
        return {}
    if word not in STYLES or not isinstance(module, (nn.Linear, nn.Embedding)):
        needed = f"{' or '.join(STYLES)} of a linear or an embedding"
        raise PlanError(f"cannot read the plan of {name!r}", needed=needed, found=f"{style} of {type(module).__name__}")
    weight, bias, rows = STYLES[word]
    found: dict[str, Placement] = {f"{name}.weight": S(rows if isinstance(module, nn.Embedding) else weight)}
    if getattr(module, "bias", None) is not None and bias is not None:
        found[f"{name}.bias"] = S(bias)
    return found
