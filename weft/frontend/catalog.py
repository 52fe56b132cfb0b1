"""Models by name: settings, a plain torch module, a loss over a batch, and a maker of example batches.

Any package may `register` its own; those of `weft_zoo` are there once one is asked for. A model may be resized by any field of its settings;
`small` holds the fields that shrink it to test size without changing what it computes. Nothing is allocated until it is built, by default on `meta`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import UnknownName, WeftError

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Field:
    """One tensor of a batch: integers below `high`, or numbers drawn from a unit normal when `high` is None.

    Without a dtype, drawn numbers have the model's.
    """

    shape: tuple[int, ...]
    high: int | None = None
    dtype: torch.dtype | None = None

    def make(self, device: torch.device, generator: torch.Generator | None, floats: torch.dtype) -> Tensor:
        kind = self.dtype or (floats if self.high is None else torch.int64)
        kind = floats if kind.is_floating_point else kind
        if generator is None:
            return torch.empty(self.shape, device=device, dtype=kind)
        if self.high is None:
            return torch.randn(self.shape, generator=generator, dtype=torch.float64).to(device, kind)
        return torch.randint(0, self.high, self.shape, generator=generator).to(device, kind)


def ids(*shape: int, high: int) -> Field:
    return Field(shape, high)


def reals(*shape: int) -> Field:
    return Field(shape)


@dataclass(frozen=True)
class Entry:
    """A named model, not yet built. `shape` tells the sizes of one that is a stack of transformer layers, whose settings have `layers` and `seq`."""

    name: str
    settings: Any
    build: Callable[[Any], nn.Module]
    loss: Loss
    fields: Callable[[Any, int], Mapping[str, Field]]
    small: Mapping[str, Any]
    batch: int
    shape: Callable[[Any], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Workload:
    """A model ready to be captured or trained: the module, `loss(model, batch)`, and example batches."""

    name: str
    settings: Any
    model: nn.Module
    loss: Loss
    fields: Callable[[int], Mapping[str, Field]]
    batch: int

    def example(self, batch: int | None = None, device: str | torch.device = "cpu", seed: int = 0) -> Batch:
        """A batch of `batch` samples; on `meta` it has shapes only."""
        place = torch.device(device)
        generator = None if place.type == "meta" else torch.Generator().manual_seed(seed)
        floats = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        size = self.batch if batch is None else batch
        return {k: f.make(place, generator, floats) for k, f in self.fields(size).items()}


ZOO = "weft_zoo"
_entries: dict[str, Entry] = {}


def register(
    name: str,
    settings: Any,
    build: Callable[[Any], nn.Module],
    loss: Loss,
    fields: Callable[[Any, int], Mapping[str, Field]],
    small: Mapping[str, Any],
    batch: int = 8,
    shape: Callable[[Any], Mapping[str, Any]] | None = None,
) -> None:
    """Make a model known by `name`."""
    if name in _entries:
        raise WeftError(f"the zoo already has a model named {name!r}", needed="a new name", found=name, try_="choose another name")
    _entries[name] = Entry(name, settings, build, loss, fields, small, batch, shape)


def names() -> list[str]:
    import_module(ZOO)
    return sorted(_entries)


def entry(name: str) -> Entry:
    if name not in _entries:
        import_module(ZOO)
    if name not in _entries:
        raise UnknownName(
            f"no model named {name!r}",
            needed="a known name such as llama3-8b, FILE.py:FUNCTION that returns (model, loss, batch), or hf:FOLDER with a Hugging Face config.json",
            found=repr(name),
            try_=_instead(name),
        )
    return _entries[name]


def _instead(name: str) -> list[str]:
    """What somebody who wrote this may have meant."""
    if name.endswith(".py"):
        return [f"{name}:make, if make is what returns (model, loss, batch)"]
    if Path(name).is_dir():
        return [f"hf:{name}"] if (Path(name) / "config.json").is_file() else [f"hf:{name}, once a config.json is in that folder"]
    close = get_close_matches(name.rpartition("/")[2].lower(), _entries, n=4, cutoff=0.6)
    if "/" in name:  # as models are named on a hub
        folder = name.rpartition("/")[2]
        close.append(f"hf download {name} config.json --local-dir {folder}, then hf:{folder}")
    return close or [", ".join(names())]


def resized(model: Entry, changes: Mapping[str, Any]) -> Any:
    """The entry's settings with some fields changed; an unknown field is refused by name."""
    known = [f.name for f in dataclasses.fields(model.settings)]
    for key in changes:
        if key not in known:
            close = get_close_matches(key, known, n=3, cutoff=0.5)
            raise UnknownName(f"{model.name} has no setting {key!r}", needed=", ".join(known), found=key, try_=close)
        now = getattr(model.settings, key)
        if isinstance(now, int) and not isinstance(now, bool) and (not isinstance(changes[key], int) or changes[key] < 0):
            raise UnknownName(
                f"{model.name} cannot have {key}={changes[key]!r}", needed="an integer, 0 or more", found=repr(changes[key]),
                try_=f"{key}={now}",
            )  # fmt: skip
    return dataclasses.replace(model.settings, **changes)


@dataclass(frozen=True)
class Few:
    """A stack of layers by name made of few of them: settings that make it so, how many of them it has, and tokens of a sample."""

    settings: Mapping[str, Any]
    layers: int
    of: int
    tokens: int


def few_layers(name: str, **changes: Any) -> Few | None:
    """A named model with as few layers as at test size and all other sizes its own; None of what is no stack of layers known by name."""
    found = entry(name) if ":" not in name else None
    if found is None or found.shape is None:
        return None
    settings = resized(found, changes)
    few = min(settings.layers, found.small["layers"])
    return Few({**changes, "layers": few}, few, settings.layers, found.shape(settings)["seq"])


@contextmanager
def _without_values():
    """Skip weight initialisation: on `meta` there is nothing to fill, and filling is most of the time of building."""
    fills = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("_")]
    kept = {n: getattr(nn.init, n) for n in fills}
    try:
        for n in fills:
            setattr(nn.init, n, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for n, f in kept.items():
            setattr(nn.init, n, f)


def assemble(
    model: Entry, settings: Any, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0
) -> Workload:
    """Build the module on a device in a dtype."""
    place, kept = torch.device(device), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or kept)
        with place:
            if place.type == "meta":
                with _without_values():
                    module = model.build(settings)
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    module = model.build(settings)
    finally:
        torch.set_default_dtype(kept)
    return Workload(model.name, settings, module, model.loss, lambda n: model.fields(settings, n), model.batch)


def get(name: str, *, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0, **settings: Any) -> Workload:
    """Build a model by name; keyword arguments change fields of its settings."""
    found = entry(name)
    return assemble(found, resized(found, settings), device, dtype, seed)
