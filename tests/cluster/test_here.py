"""Which profile stands for the machine at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft.cluster.here import here
from weft.cluster.profile import dump, load
from weft.core.errors import ClusterError


def test_shipped_unless_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_PROFILE", raising=False)
    assert here(2, torch.device("cpu")).text == "1x2xx86-2"
    (tmp_path / "profile.json").write_text(json.dumps(dump(load("x86-2"))))
    assert here(2, torch.device("cpu")).text == "2xprofile.json"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert here(4, torch.device("cpu")).text == "2x2xx86-2"


def test_an_unknown_accelerator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_PROFILE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Strange 9000")
    with pytest.raises(ClusterError, match="no profile for Strange 9000"):
        here(1, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert here(8, torch.device("cuda")).text == "1x8xH100"
