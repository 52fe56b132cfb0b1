"""Inputs say what they are for: in the text, through a plan, and where an old file has it in their names."""

from __future__ import annotations

import re

import torch
from torch import nn

import weft
from weft.core.mesh import Mesh
from weft.core.role import Role
from weft.core.text import parse
from weft.frontend.capture import capture
from weft.plan.named import input_layouts
from weft.plan.place import place
from weft.plan.plan import step_of
from weft.plan.spec import Spec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.table = torch.arange(4.0)  # found in Python

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.table


def step() -> weft.Program:
    model = Net()
    made = capture(model, {"x": torch.ones(8, 4)}, lambda m, b: m(b["x"]).sum(), torch.optim.Adam(model.parameters()))
    return made.program


def roles(program: weft.Program) -> dict[Role | None, set[str]]:
    return {role: set(program.inputs_for(role)) for role in Role if program.inputs_for(role)}


def test_a_captured_step_says_what_its_inputs_are_for() -> None:
    found = roles(step())
    assert found[Role.PARAMETER] == {"param.body.0.weight", "param.body.0.bias", "param.body.1.weight", "param.body.1.bias"}
    assert found[Role.BATCH] == {"batch.x"} and found[Role.SEED] == {"seed"} and found[Role.CONSTANT] == {"constant.0"}
    assert "buffer.body.1.running_mean" in found[Role.BUFFER] and found[Role.SETTING] == {"lr.0", "step"}
    assert len(found[Role.STATE]) == 8


def test_roles_are_printed_read_back_and_kept_by_a_plan() -> None:
    program = step()
    assert "%batch.x = input(batch)" in program.text and parse(program.text).text == program.text
    named = Spec.parse("dp2,zero1")
    states = {n: "param" + n[n.index(".") :] for n in program.inputs_for(Role.STATE)}
    assert roles(place(program, named.mesh, *input_layouts(program, named, states))) == roles(program)
    assert roles(parse(program.text)) == roles(program)


def test_a_program_written_by_hand_needs_none() -> None:
    program = weft.trace(lambda x: x + 1.0, Mesh(dp=2), x=weft.f32(4))
    assert "%x = input()" in program.text and not roles(program)


def test_old_files_have_roles_in_names() -> None:
    program = step()
    assert roles(step_of(re.sub(r"input\(\w+\)", "input()", program.text))) == roles(program)
