"""AutoParallel's answer as it is kept: every matmul, parameter and attention of weft's own Llama is stated in it, and weft can place them so."""

from __future__ import annotations

import json

import pytest
import torch

import bench.autoparallel as peer
from bench._autoparallel import summary
from weft.core.role import Role
from weft.frontend.capture import capture


def _row(equation: str, ins: list[list[str]], backward: bool = False) -> dict[str, object]:
    return {"op": "aten.einsum.default", "equation": equation, "module": "L['self'].mlp.up", "backward": backward, "desc": "", "ins": ins, "out": ["R", "R"]}


def test_what_an_axis_shards_is_read_from_the_equation_of_a_matmul() -> None:
    rows = [
        _row("abk,kn->abn", [["S(0)", "R"], ["R", "S(1)"]]),
        _row("abk,kn->abn", [["S(0)", "S(2)"], ["R", "S(0)"]], backward=True),
        _row("abn,abk->kn", [["S(0)", "S(2)"], ["S(0)", "R"]], backward=True),
    ]
    found = summary(rows)["matmuls"]["mlp.up"]
    assert found == {"forward": ["batch", "out"], "input_gradient": ["batch", "out"], "weight_gradient": ["batch", "out"]}


def test_the_kept_answer_states_every_matmul_and_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "LAYERS", 1)
    model, loss, batch = peer.llama()
    captured = capture(model, batch, loss, torch.optim.AdamW(model.parameters()), precision=torch.bfloat16)
    for case in json.loads(peer.KEPT.read_text())["cases"].values():
        assert {peer._theirs(name) for name in captured.program.inputs_for(Role.PARAMETER)} <= case["parameters"].keys()
        found = [(peer._theirs(weight), role) for _, weight, role in peer.matmuls(captured)]
        assert len(set(found)) == len(found) == 3 * 8  # seven of a layer and the head, each forward and two gradients
        assert all(role in case["matmuls"][weight] for weight, role in found)


def test_stated_placements_are_those_of_the_program_that_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered weights of attention take longer than weft's own choice on the same mesh, and stated ways alone are allowed."""
    monkeypatch.setattr(peer, "LAYERS", 1)
    case = json.loads(peer.KEPT.read_text())["cases"]["free"]
    assert peer.placed(case)["ms"] >= peer.placed()["ms"]
