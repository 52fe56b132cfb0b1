"""A cluster: groups of equal nodes, and the links between their devices by level.

Written `16x8xH100` (nodes x devices x kind), `8xA100`, `H200`, with `@400` for 400 Gb/s of network per device, and with
`+` between groups of unequal nodes; or a YAML file. Ranks count through a node first, then through the nodes in order.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.cluster.profile import Constant, Device, Link, Profile, is_node, load
from weft.core.errors import ClusterError, reason
from weft.core.schema import short

EXAMPLES = "16x8xH100, 8xA100, 2x8xA100@100, 2x8xH100+2x8xA100, cluster.yaml"
GBIT = 1e9 / 8
DEVICES, LONGEST = 1 << 20, 2000  # of a cluster, and of its short form
_PART = re.compile(r"(?:(?P<nodes>\d+)x)?(?:(?P<devices>\d+)x)?(?P<kind>[A-Za-z][\w.-]*?|.+\.json)(?:@(?P<gbps>\d+(?:\.\d+)?))?$")


@dataclass(frozen=True)
class Nodes:
    """Some equal nodes."""

    count: int
    size: int
    profile: Profile

    @property
    def devices(self) -> int:
        return self.count * self.size


@dataclass(frozen=True)
class Cluster:
    """Groups of nodes. Links are those of the first group unless the network is slower in another."""

    text: str
    groups: tuple[Nodes, ...]

    @cached_property
    def devices(self) -> int:
        return sum(g.devices for g in self.groups)

    @cached_property
    def node_size(self) -> int:
        """Devices that share the fastest links: the smallest node counts."""
        return min(g.size for g in self.groups)

    @cached_property
    def memory(self) -> float:
        """Bytes of the smallest device."""
        return min(g.profile.device.memory for g in self.groups)

    @cached_property
    def uniform(self) -> bool:
        return len({g.profile.name for g in self.groups}) == 1

    def profile_of(self, rank: int) -> Profile:
        for group in self.groups:
            if rank < group.devices:
                return group.profile
            rank -= group.devices
        raise ClusterError("no such rank", needed=f"a rank below {self.devices}", found=str(rank))

    def device_of(self, rank: int) -> Device:
        return self.profile_of(rank).device

    @property
    def device(self) -> Device:
        return self.groups[0].profile.device

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """From the innermost level out; at each level the slowest of the groups, since a collective waits for it."""
        depth = max(len(g.profile.links) for g in self.groups)
        return tuple(self._level(i) for i in range(depth))

    def _level(self, index: int) -> Link:
        here = [g.profile.links[min(index, len(g.profile.links) - 1)] for g in self.groups]
        slowest = min(here, key=lambda link: link.get("bandwidth") * link.get("efficiency"))
        return dataclasses.replace(slowest, span=self.node_size) if index == 0 else slowest

    def members(self, stride: int, size: int) -> tuple[int, ...]:
        """Of `size` ranks that lie `stride` apart, how many lie within one block of each level."""
        spans = [link.span or self.devices for link in self.links]
        return tuple(min(size, max(1, span // stride)) for span in spans[:-1]) + (size,)

    def with_nodes(self, *counts: int) -> Cluster:
        """So many nodes of each group, written as this cluster is."""
        groups = tuple(dataclasses.replace(g, count=n) for g, n in zip(self.groups, counts, strict=True))
        parts = [_PART.fullmatch(part.strip()) for part in self.text.split("+")]
        if None in parts or len(parts) != len(groups):  # a file
            return Cluster(f"{self.text} with {' and '.join(map(str, counts))} nodes", groups)
        return Cluster("+".join(_written(g, part) for g, part in zip(groups, parts, strict=True) if part), groups)

    def slice(self, first: int, count: int) -> Cluster:
        """The cluster of `count` ranks from `first` on, which must be entire nodes or lie in one."""
        kept, start = [], 0
        for group in self.groups:
            low, high = max(first, start), min(first + count, start + group.devices)
            if low < high:
                kept.append(_take_devices(group, high - low))
            start += group.devices
        return Cluster(f"{self.text}[{first}:{first + count}]", tuple(kept))


def _written(group: Nodes, found: re.Match[str]) -> str:
    """Nodes of another number than those that were read."""
    kind, gbps = found.group("kind", "gbps")
    full = is_node(kind) and group.size == load(kind).node_size
    return f"{group.count}x{'' if full else f'{group.size}x'}{kind}{f'@{gbps}' if gbps else ''}"


def _take_devices(group: Nodes, devices: int) -> Nodes:
    if devices <= group.size:
        return Nodes(1, devices, group.profile)
    if devices % group.size:
        raise ClusterError("a part of a cluster must be full nodes", needed=f"a multiple of {group.size}", found=str(devices))
    return Nodes(devices // group.size, group.size, group.profile)


def cluster(text: str | Cluster) -> Cluster:
    """Read a cluster from its short form or from a YAML (or JSON) file."""
    if isinstance(text, Cluster):
        return text
    if not isinstance(text, str):
        raise ClusterError("this is no cluster", needed="NODESxDEVICESxKIND, or a file", found=repr(text), try_=f"for example {EXAMPLES}")
    if text.endswith((".yaml", ".yml")) or (Path(text).suffix == ".json" and Path(text).is_file() and "groups" in _load_file(text)):
        return _bounded(_of_data(_load_file(text), text))
    if len(text) > LONGEST:
        raise ClusterError("this is no cluster", needed=f"at most {LONGEST:,} characters", found=f"{len(text):,}", try_=f"for example {EXAMPLES}")
    return _bounded(Cluster(text, tuple(_part(part.strip()) for part in text.split("+"))))


def _bounded(made: Cluster) -> Cluster:
    if made.devices > DEVICES:
        raise ClusterError("no cluster is that large", needed=f"at most {DEVICES:,} devices", found=f"{made.devices:,}")
    return made


def _part(text: str) -> Nodes:
    found = _PART.fullmatch(text)
    if found is None:
        raise ClusterError(f"cannot read the cluster {text!r}", needed="NODESxDEVICESxKIND", found=text, try_=f"for example {EXAMPLES}")
    nodes, devices, kind, gbps = found.group("nodes", "devices", "kind", "gbps")
    if gbps is not None and not float(gbps):
        raise ClusterError(f"the network of {text!r} has no rate", needed="Gb/s per device above 0", found=f"@{gbps}", try_="16x8xH100@400")
    if kind.endswith(".json") and devices is None:  # of a profile of one's own, so many devices of one node
        return _nodes(1, int(nodes) if nodes else None, kind, float(gbps) if gbps else None)
    if devices is None and is_node(kind):  # 8xp3.16xlarge is eight nodes
        return _nodes(int(nodes or 1), load(kind).node_size, kind, gbps and float(gbps))
    if nodes is not None and devices is None:  # 8xA100 is eight devices, entire nodes where they are more than one holds
        return _spread(int(nodes), load(kind), gbps and float(gbps))
    return _nodes(int(nodes or 1), devices and int(devices), kind, gbps and float(gbps))


def _spread(devices: int, profile: Profile, gbps: Any) -> Nodes:
    size = profile.node_size
    if devices > size and devices % size:
        raise ClusterError(
            f"{devices} x {profile.name} are not full nodes", needed=f"a multiple of {size}", found=str(devices),
            try_=f"{devices // size + 1}x{size}x{profile.name}",
        )  # fmt: skip
    return _nodes(max(1, devices // size), min(devices, size), profile.name, gbps, profile)


def _nodes(count: int, size: int | None, kind: str, gbps: float | None, profile: Profile | None = None) -> Nodes:
    profile = profile or load(kind)
    if count < 1 or (size is not None and size < 1):
        raise ClusterError("a cluster needs a device", needed="1 node of 1 device or more", found=f"{count}x{size}x{kind}")
    size = size or (profile.node_size if count > 1 else 1)
    return Nodes(count, size, crowded(_with_network(profile, gbps), size))


def crowded(profile: Profile, size: int) -> Profile:
    """Ranks on more processes than there are cores take turns, so each gets its share of every rate, and sends at its share too."""
    share = profile.device.get("cores", float(size)) / size
    if share >= 1:
        return profile

    def slower(constants: Mapping[str, Constant]) -> dict[str, Constant]:
        return {k: Constant(c.value * _crowding(k, share), c.origin) for k, c in constants.items()}

    links = tuple(dataclasses.replace(link, constants=slower(link.constants)) for link in profile.links)
    return dataclasses.replace(profile, device=Device(profile.device.name, slower(profile.device.constants)), links=links)


def _crowding(key: str, share: float) -> float:
    """Rates shrink with the share of a core, waits grow."""
    if key.startswith(("peak.", "rate.")) or key == "bandwidth" or key.endswith(("memory.bandwidth", "cache.bandwidth", "math.rate")):
        return share
    return 1 / share if key in ("launch", "low_step", "bulk", "bulk_step") or key.endswith((".launch", ".tile")) else 1.0


def _with_network(profile: Profile, gbps: float | None) -> Profile:
    """The profile with its outer levels at a given rate per device."""
    if gbps is None or len(profile.links) < 2:
        return profile
    rate = Constant(gbps * GBIT, f"datasheet: {gbps:g} Gb/s per device, given with the cluster")
    outer = tuple(dataclasses.replace(link, constants={**link.constants, "bandwidth": rate}) for link in profile.links[1:])
    return dataclasses.replace(profile, links=(profile.links[0], *outer))


def _of_data(data: Mapping[str, Any], where: str) -> Cluster:
    """`groups: [{nodes, devices, kind, network_gbps_per_device}]`, and `spine: {devices, gbps_per_device}` where the network
    is slower beyond so many devices."""
    groups = data.get("groups")
    if not isinstance(groups, list) or not groups:
        raise ClusterError(f"{where} has no groups", needed="groups: [{nodes: 2, devices: 8, kind: A100}]", found=str(list(data)))
    odd = [str(key) for key in data if key not in ("groups", "spine")]
    if odd:
        raise ClusterError(f"{where} has more than a cluster", needed="groups, and spine where there is one", found=", ".join(odd))
    made = [_group(g, where) for g in groups]
    return Cluster(where, tuple(_under_spine(g, data["spine"], where) if "spine" in data else g for g in made))


def _group(group: Any, where: str) -> Nodes:
    known = ("nodes", "devices", "network_gbps_per_device")
    if not isinstance(group, Mapping) or not isinstance(group.get("kind"), str) or set(group) - {"kind", *known}:
        raise ClusterError(f"a group of {where} cannot be read", needed=f"kind, and any of {', '.join(known)}", found=str(group))
    for key in set(group) & {"nodes", "devices"}:
        _positive(where, key, group[key], integer=True)
    if "network_gbps_per_device" in group:
        _positive(where, "network_gbps_per_device", group["network_gbps_per_device"])
    return _nodes(group.get("nodes", 1), group.get("devices"), group["kind"], group.get("network_gbps_per_device"))


def _positive(where: str, key: str, value: Any, integer: bool = False) -> None:
    kinds = (int,) if integer else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
        needed = "an integer of 1 or more" if integer else "a number above 0"
        raise ClusterError(f"{key} of {where} cannot be {value!r}", needed=needed, found=repr(value))


def _under_spine(group: Nodes, spine: Any, where: str) -> Nodes:
    """Nodes whose network reaches `devices` of them at its own rate and all others through a slower spine."""
    if not isinstance(spine, Mapping) or set(spine) != {"devices", "gbps_per_device"}:
        raise ClusterError(f"the spine of {where} cannot be read", needed="spine: {devices: 256, gbps_per_device: 100}", found=str(spine))
    _positive(where, "devices of the spine", spine["devices"], integer=True)
    _positive(where, "gbps_per_device of the spine", spine["gbps_per_device"])
    if spine["devices"] % group.size:
        raise ClusterError(f"the spine of {where} shards nodes", needed=f"devices: a multiple of {group.size}", found=str(spine["devices"]))
    *inner, network = group.profile.links
    rate = Constant(spine["gbps_per_device"] * GBIT, "datasheet: given with the cluster")
    outer = Link("spine", 0, {**network.constants, "bandwidth": rate})
    links = (*inner, dataclasses.replace(network, span=int(spine["devices"])), outer)
    return dataclasses.replace(group, profile=dataclasses.replace(group.profile, links=links))


def _load_file(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read {path}", needed="a YAML or JSON file", found=reason(error), try_=f"for example {EXAMPLES}") from error
    try:
        import yaml
    except ImportError:  # JSON is the part of YAML that needs no package
        import json

        return _mapping(_parsed(json.loads, text, path), path)
    return _mapping(_parsed(yaml.safe_load, text, path), path)


def _parsed(read: Callable[[str], Any], text: str, path: str) -> Any:
    try:
        return read(text)
    except Exception as error:  # YAML's errors have no base that is importable without it
        found = " ".join(str(error).split())
        raise ClusterError(f"{path} cannot be read", needed="groups: [{nodes: 2, devices: 8, kind: A100}]", found=found) from error


def _mapping(data: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{path} does not describe a cluster", needed="a mapping with `groups`", found=short(data))
    return data
