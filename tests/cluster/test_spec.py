"""How a cluster is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cluster import collectives
from weft.cluster.collectives import Ranks
from weft.cluster.spec import Cluster, cluster
from weft.core.errors import ClusterError, UnknownName


@pytest.mark.parametrize(
    ("text", "nodes", "size", "kind"),
    [
        ("16x8xH100", 16, 8, "H100"),
        ("8xA100", 1, 8, "A100"),
        ("64xA100", 8, 8, "A100"),
        ("H200", 1, 1, "H200"),
        ("2x4xa100-80gb", 2, 4, "A100"),
        ("2xDGX-2", 2, 16, "V100-DGX2"),
        ("8xp3.16xlarge", 8, 8, "V100-p3"),
        ("2x6xSummit", 2, 6, "V100-Summit"),
    ],
)
def test_short_forms(text: str, nodes: int, size: int, kind: str) -> None:
    (group,) = cluster(text).groups
    assert (group.count, group.size, group.profile.name) == (nodes, size, kind)


def test_the_network_may_be_given() -> None:
    made = cluster("2x8xA100@100")
    assert made.links[1].get("bandwidth") == pytest.approx(12.5e9)
    assert made.links[0].get("bandwidth") == cluster("2x8xA100").links[0].get("bandwidth")
    assert "given with the cluster" in made.links[1].constants["bandwidth"].origin


def test_unequal_groups_wait_for_the_slowest_link() -> None:
    made = cluster("2x8xH100+2x8xA100")
    assert made.devices == 32
    assert not made.uniform
    assert made.device_of(15).name == "H100"
    assert made.device_of(16).name == "A100"
    assert made.links[0].get("bandwidth") == cluster("A100").links[0].get("bandwidth")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("groups:\n- {nodes: 2, devices: 4, kind: A100, network_gbps_per_device: 50}\n- {kind: H100}\n")
    made = cluster(str(path))
    assert made.devices == 9
    assert made.groups[0].profile.links[1].get("bandwidth") == pytest.approx(6.25e9)


def test_a_spine(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("groups:\n- {nodes: 8, devices: 8, kind: A100}\nspine: {devices: 32, gbps_per_device: 10}\n")
    made = cluster(str(path))
    assert [link.name for link in made.links] == ["nvlink", "network", "spine"]
    assert made.members(8, 8) == (1, 4, 8)
    inside, across = (collectives.seconds(made, "all_reduce", 2**30, Ranks(m)) for m in ((1, 4, 4), (1, 4, 8)))
    assert across > 1.2 * inside
    path.write_text("groups:\n- {kind: A100}\nspine: fast\n")
    with pytest.raises(ClusterError, match="the spine of"):
        cluster(str(path))


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    from weft.cluster.profile import dump, load

    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**dump(load("A100")), "name": "mine"}))
    assert cluster(f"{path}").device.name == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("axbxc!", "NODESxDEVICESxKIND"),
        ("0x8xA100", "1 node of 1 device"),
        ("12xA100", "try     2x8xA100"),
        ("missing.yaml", "cannot read missing.yaml"),
        ("2x8xA100@0", "Gb/s per device above 0"),
    ],
)
def test_what_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(ClusterError, match=says.replace("(", r"\(")):
        cluster(text)


def test_an_unknown_kind_offers_near_ones() -> None:
    with pytest.raises(UnknownName, match="no device named 'H1000'") as caught:
        cluster("8x8xH1000")
    assert "H100" in caught.value.repairs


def test_a_group_without_kind(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("groups:\n- {nodes: 2, kinds: A100}\n")
    with pytest.raises(ClusterError, match="kind, and any of nodes, devices, network_gbps_per_device"):
        cluster(str(path))


@pytest.mark.parametrize(
    ("group", "more", "says"),
    [
        ("nodes: -2, devices: 8", "", "nodes of .* cannot be -2"),
        ("nodes: 1.5, devices: 8", "", "an integer of 1 or more"),
        ("nodes: 2, devices: true", "", "devices of .* cannot be True"),
        ("nodes: 2, network_gbps_per_device: 0", "", "network_gbps_per_device of .* cannot be 0"),
        ("nodes: 2", "spines: {devices: 16}", "has more than a cluster"),
        ("nodes: 2", "spine: {devices: x, gbps_per_device: 50}", "devices of the spine of .* cannot be 'x'"),
        ("nodes: 2", "spine: {devices: 16, gbps_per_device: -50}", "gbps_per_device of the spine of .* cannot be -50"),
        ("nodes: 2", "spine: {devices: 12, gbps_per_device: 50}", "devices: a multiple of 8"),
    ],
)
def test_numbers_of_a_file_that_no_cluster_has(tmp_path: Path, group: str, more: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"groups:\n- {{{group}, kind: A100}}\n{more}\n")
    with pytest.raises(ClusterError, match=says):
        cluster(str(path))


def test_nodes_of_a_profile_of_ones_own(tmp_path: Path) -> None:
    import json

    from weft.cluster.profile import dump, load

    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**dump(load("A100")), "name": "mine"}))
    assert [(g.count, g.size) for g in cluster(f"4x2x{path}@100").groups] == [(4, 2)]
    assert [(g.count, g.size) for g in cluster(f"2x{path}").groups] == [(1, 2)]


@pytest.mark.parametrize(
    ("text", "counts", "more"),
    [
        ("8xp3.16xlarge", (16,), "16xp3.16xlarge"), ("2x8xA100@100", (4,), "4x8xA100@100"), ("8xA100", (2,), "2x8xA100"),
        ("2x8xA100+1x8xH100", (4, 2), "4x8xA100+2x8xH100"),
    ],
)  # fmt: skip
def test_more_nodes_are_written_so_that_they_can_be_read(text: str, counts: tuple[int, ...], more: str) -> None:
    made = cluster(text).with_nodes(*counts)
    assert made.text == more and cluster(more).groups == made.groups


@pytest.mark.parametrize(
    ("stride", "size", "members"), [(1, 8, (8, 8)), (1, 16, (8, 16)), (8, 4, (1, 4)), (2, 32, (4, 32)), (16, 2, (1, 2))]
)
def test_how_ranks_lie_in_nodes(stride: int, size: int, members: tuple[int, ...]) -> None:
    assert cluster("8x8xA100").members(stride, size) == members


def test_parts_of_a_cluster() -> None:
    whole = cluster("2x8xH100+2x8xA100")
    part = whole.slice(8, 16)
    assert isinstance(part, Cluster)
    assert [(g.count, g.size, g.profile.name) for g in part.groups] == [(1, 8, "H100"), (1, 8, "A100")]
    with pytest.raises(ClusterError, match="full nodes"):
        whole.slice(0, 12)


def test_processes_that_share_cores_share_every_rate() -> None:
    two, four = cluster("2xx86-2"), cluster("4xx86-2")
    for key in ("peak.fp32", "memory.bandwidth", "math.rate"):
        assert four.device.get(key) == pytest.approx(two.device.get(key) / 2)
    assert four.device.get("kernel.launch") == pytest.approx(2 * two.device.get("kernel.launch"))
    assert four.links[0].get("bandwidth") == pytest.approx(two.links[0].get("bandwidth") / 2)
    assert four.links[0].get("launch") == pytest.approx(2 * two.links[0].get("launch"))
    assert four.links[0].get("efficiency") == two.links[0].get("efficiency")
