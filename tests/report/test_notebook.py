"""Plans, programs, runs and schedules as pictures, drawn only when a notebook asks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import weft
from tests.report.conftest import llama
from weft import dynamic
from weft.programs.catalog import example, scheduled


def test_a_plan_is_a_picture() -> None:
    text = llama()._repr_html_()
    assert text.startswith('<div class="weft-picture">') and "llama3-8b on 8xA100" in text and "micro-batch" in text


def test_a_program_is_a_picture() -> None:
    program = scheduled("adam", "fuse(RS-C-AG)")
    text = program._repr_html_()
    assert "program adam" in text and "reduce_scatter along" in text and "class=\"band\"" in text
    assert text.count('class="arc"') > len(program.nodes) / 2


def test_a_long_program_leaves_its_middle_out() -> None:
    def long(x: Any) -> Any:
        for _ in range(120):
            x = weft.relu(x) + 1.0
        return x

    text = weft.trace(long, weft.Mesh(dp=2), x=weft.f32(4, 4))._repr_html_()
    assert "more …" in text and len(text) < 200_000


def test_a_schedule_is_a_picture() -> None:
    schedule = dynamic.Schedule(dynamic.trees([((0, 1), 2), (3, 4)]), {"vertex": dynamic.Reads(rest=True)})
    assert "5 more" not in schedule._repr_html_() and "2 samples in" in schedule._repr_html_()


def test_drawing_loads_nothing_until_asked() -> None:
    script = "import sys, weft.core.program, weft.plan.plan; print([m for m in sys.modules if m.startswith('weft.report')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_example_programs_all_draw() -> None:
    assert "<svg" in example("mlp").make()._repr_html_()
