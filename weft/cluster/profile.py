"""A profile: what is known of one kind of device and of the node it sits in, as constants that each say their origin.

An origin begins with `datasheet`, `table`, `measured`, `fitted` or `assumed`. Seconds, bytes and flop/s throughout.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from weft.core.errors import ClusterError, UnknownName, reason

FOLDER = Path(__file__).parent / "profiles"
KINDS_OF_ORIGIN = ("datasheet", "table", "measured", "fitted", "assumed")
RATES = ("peak.", "memory.", "units", "bandwidth", "efficiency")  # beginnings and ends of what is divided by


@dataclass(frozen=True)
class Constant:
    """A number and where it comes from."""

    value: float
    origin: str


@dataclass(frozen=True)
class Device:
    """One accelerator, or the cores that one process computes on."""

    name: str
    constants: Mapping[str, Constant]

    def get(self, key: str, default: float | None = None) -> float:
        if key in self.constants:
            return self.constants[key].value
        if default is not None:
            return default
        raise _missing(f"device {self.name}", key, self.constants)

    @cached_property
    def priced(self) -> dict[Any, float]:
        """Seconds of kernels that were asked for before."""
        return {}

    @property
    def memory(self) -> float:
        return self.get("memory.bytes")

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a streaming kernel moves, both ways together."""
        return self.get("memory.bandwidth") * self.get("memory.efficiency")

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second to the host's memory, and as many back; a processor copies in its own memory."""
        return self.get("host.bandwidth", self.bandwidth / 2)

    def peak(self, dtype: str) -> float:
        """Flop/s of the datasheet in a dtype."""
        if f"peak.{dtype}" not in self.constants:
            known = ", ".join(key.removeprefix("peak.") for key in self.constants if key.startswith("peak."))
            tip = f"another dtype, or add peak.{dtype} to the profile, with its origin"
            raise ClusterError(f"{self.name} has no rate of {dtype}", needed=f"one of {known}", found=dtype, try_=tip)
        return self.get(f"peak.{dtype}")


@dataclass(frozen=True)
class Link:
    """One level of the network: what joins devices of a node, or nodes, or groups of nodes."""

    name: str
    span: int  # devices that reach one another at this level or below; 0: all of them
    constants: Mapping[str, Constant]

    def get(self, key: str, default: float | None = None) -> float:
        if key in self.constants:
            return self.constants[key].value
        if default is not None:
            return default
        raise _missing(f"link {self.name}", key, self.constants)


@dataclass(frozen=True)
class Profile:
    """A kind of device, the links inside its node, and the network its nodes usually have."""

    name: str
    device: Device
    node_size: int
    links: tuple[Link, ...]

    def constants(self) -> Iterator[tuple[str, Constant]]:
        """Every constant with its full name."""
        yield from self.device.constants.items()
        for link in self.links:
            for key, constant in link.constants.items():
                yield f"{link.name}.{key}", constant


@cache
def load(name: str) -> Profile:
    """The profile of a name or alias, or of a `.json` file."""
    path = Path(name) if name.endswith(".json") else _index().get(_spelled(name))
    if path is None:
        cased = {n.lower(): n for n in names()}
        close = [cased[n] for n in get_close_matches(name.lower(), cased, n=3, cutoff=0.4)]
        raise UnknownName(f"no device named {name!r}", needed=", ".join(names()), found=name, try_=close or "weft calibrate --out FILE.json")
    return parse(_read(path), str(path))


def is_node(name: str) -> bool:
    """Whether a name is that of an entire node, as instances of a cloud are, and not of one device."""
    path = _index().get(_spelled(name))
    return path is not None and name.lower() in (n.lower() for n in _read(path).get("instances", ()))


def names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.json"))


@cache
def _index() -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(FOLDER.glob("*.json")):
        for alias in (path.stem, *_read(path).get("aliases", ())):
            found[_spelled(alias)] = path
    return found


def _spelled(name: str) -> str:
    """A name as all its spellings are: NVIDIA H100-SXM, h100_sxm."""
    return re.sub(r"[-_ ]|nvidia|geforce|tesla|amd|instinct", "", name.lower())


@cache
def _read(path: Path) -> dict[str, Any]:
    """The file, laid over the one it extends."""
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the profile {path}", needed="a JSON file", found=reason(error), try_="check the path") from error
    except json.JSONDecodeError as error:
        raise ClusterError(f"{path} is not JSON", needed="a profile", found=str(error), try_="weft calibrate --out FILE.json") from error
    if not isinstance(data, dict):
        raise ClusterError(f"{path} is not a profile", needed="a JSON object", found=type(data).__name__)
    base = data.get("extends")
    if base is not None and base not in names():
        raise ClusterError(f"{path} extends a profile that is not shipped", needed=", ".join(names()), found=str(base))
    return data if base is None else _over(_read(FOLDER / f"{base}.json"), data)


def _over(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, "aliases": (), "instances": (), **data}
    merged["device"] = {**base["device"], **data.get("device", {})}
    merged["links"] = data.get("links", base["links"])
    return merged


def parse(data: Mapping[str, Any], where: str = "profile") -> Profile:
    """A profile of its JSON form; anything missing or without origin is refused by name."""
    for key in ("name", "device", "node_size", "links"):
        if key not in data:
            raise ClusterError(f"the profile lacks {key!r}", needed="name, device, node_size, links", found=", ".join(data), where=where)
    device = Device(data["name"], _constants(data["device"], where))
    size, links = data["node_size"], data["links"]
    if not isinstance(size, int) or size < 1:
        raise ClusterError("the node size of a profile is the number of its devices", needed="1 or more", found=repr(size), where=where)
    if not isinstance(links, list) or not links:
        raise ClusterError("the profile has no links", needed="a list, innermost first", found=repr(links), where=where)
    return Profile(data["name"], device, size, tuple(_link(item, where) for item in links))


def _link(item: Any, where: str) -> Link:
    if not isinstance(item, Mapping) or {"name", "span", "constants"} - set(item):
        found = ", ".join(item) if isinstance(item, Mapping) else repr(item)
        raise ClusterError("a link of the profile cannot be read", needed="name, span, constants", found=found, where=where)
    return Link(str(item["name"]), int(item["span"]), _constants(item["constants"], where))


def _constants(data: Any, where: str) -> dict[str, Constant]:
    if not isinstance(data, Mapping):
        raise ClusterError("the constants of a profile cannot be read", needed="{name: {value, origin}}", found=repr(data), where=where)
    return {key: _constant(key, item, where) for key, item in data.items()}


def _constant(key: str, item: Any, where: str) -> Constant:
    if not isinstance(item, Mapping) or "value" not in item or not str(item.get("origin", "")).startswith(KINDS_OF_ORIGIN):
        raise ClusterError(
            f"the constant {key!r} does not say where it comes from",
            needed='{"value": number, "origin": text beginning with ' + " or ".join(KINDS_OF_ORIGIN) + "}",
            found=json.dumps(item),
            where=where,
        )
    value, rate = item["value"], key.startswith(RATES) or key.endswith(RATES)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf or (rate and not value):
        needed = "a number above 0" if rate else "a number, 0 or more"
        raise ClusterError(f"the constant {key!r} cannot be {value!r}", needed=needed, found=repr(value), where=where)
    return Constant(float(value), str(item["origin"]))


def dump(profile: Profile) -> dict[str, Any]:
    """The JSON form of a profile."""

    def plain(constants: Mapping[str, Constant]) -> dict[str, Any]:
        return {key: {"value": c.value, "origin": c.origin} for key, c in constants.items()}

    links = [{"name": link.name, "span": link.span, "constants": plain(link.constants)} for link in profile.links]
    return {"name": profile.name, "device": plain(profile.device.constants), "node_size": profile.node_size, "links": links}


def _missing(owner: str, key: str, known: Mapping[str, Constant]) -> ClusterError:
    return ClusterError(
        f"{owner} has no constant {key!r}", needed=key, found=", ".join(known), try_="add it to the profile, with its origin"
    )
