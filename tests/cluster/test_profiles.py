"""Every shipped number says where it comes from, and few of them are fitted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from weft.cluster.profile import KINDS_OF_ORIGIN, dump, load, names, parse
from weft.core.errors import ClusterError

WANTED = {"V100-DGX2", "V100-p3", "V100-Summit", "A100", "H100", "H200", "B200", "x86-2"}


def test_the_promised_profiles_are_there() -> None:
    assert set(names()) >= WANTED


@pytest.mark.parametrize(
    ("said", "name"),
    [("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"), ("h100_sxm", "H100"), ("NVIDIA GeForce RTX 4090", "RTX4090"),
     ("rtx_3090", "RTX3090"), ("AMD Instinct MI300X", "MI300X"), ("gb200-nvl72", "GB200")],
)  # fmt: skip
def test_a_device_has_many_spellings(said: str, name: str) -> None:
    assert load(said).name == name


@pytest.mark.parametrize("name", names())
def test_origins(name: str) -> None:
    constants = list(load(name).constants())
    assert all(c.origin.startswith(KINDS_OF_ORIGIN) for _, c in constants)
    fitted = [key for key, c in constants if c.origin.startswith("fitted")]
    kinds = Counter(key.split(".")[0] + (f".{last}" if (last := key.split(".")[-1]).startswith("fp8") else "") for key in fitted)
    assert max(kinds.values(), default=0) <= 20, kinds


@pytest.mark.parametrize("name", names())
def test_values_make_sense(name: str) -> None:
    for key, constant in load(name).constants():
        assert constant.value >= 0, key
        if key.endswith(("efficiency", "sustained", "misaligned", "small", "low_share")):
            assert constant.value <= 1, key


@pytest.mark.parametrize("name", names())
def test_the_json_form_comes_back(name: str) -> None:
    profile = load(name)
    assert parse(json.loads(json.dumps(dump(profile)))) == profile


def test_a_variant_differs_where_it_says() -> None:
    base, variant = load("H100"), load("H200")
    assert variant.device.memory > base.device.memory
    assert variant.device.peak("bf16") == base.device.peak("bf16")


def test_a_number_without_origin_is_refused() -> None:
    data = dump(load("A100"))
    data["device"]["units"] = {"value": 108, "origin": "somewhere"}
    with pytest.raises(ClusterError, match="'units' does not say where it comes from"):
        parse(data)


def test_a_missing_constant_is_named() -> None:
    with pytest.raises(ClusterError, match=r"device A100 has no constant 'units\.odd'"):
        load("A100").device.get("units.odd")


def test_a_rate_that_a_device_lacks() -> None:
    with pytest.raises(ClusterError, match="A100 has no rate of fp8") as caught:
        load("A100").device.peak("fp8")
    assert "one of fp16, bf16, tf32, fp32" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"links": []}, "the profile has no links"), ({"links": [{"name": "x"}]}, "needed +name, span, constants"),
        ({"node_size": 0}, "the node size"), ({"device": [1]}, "the constants of a profile cannot be read"),
        ({"device": {"peak.bf16": {"value": 0, "origin": "datasheet"}}}, "'peak.bf16' cannot be 0"),
        ({"device": {"memory.bytes": {"value": "big", "origin": "datasheet"}}}, "'memory.bytes' cannot be 'big'"),
        ({"device": {"kernel.launch": {"value": -1, "origin": "datasheet"}}}, "a number, 0 or more"),
    ],
)  # fmt: skip
def test_what_no_device_is(change: dict, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        parse({**dump(load("A100")), **change})


def test_a_profile_that_extends_nothing_shipped(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"extends": "H101", "name": "mine"}')
    with pytest.raises(ClusterError, match="extends a profile that is not shipped"):
        load(str(path))


def test_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ClusterError, match="is not JSON"):
        load(str(path))
