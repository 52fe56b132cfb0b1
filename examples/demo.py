"""What `make demo` runs: two programs before and after scheduling, and that both mean the same on pretended ranks."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from weft import interp
from weft.core.program import Program
from weft.programs.catalog import example

console = Console(width=140)


def inputs(p: Program) -> dict[str, torch.Tensor]:
    """Random values of the program's inputs; second moments are squares, the step number is 3."""
    gen = torch.Generator().manual_seed(0)
    out = {}
    for name, node in p.input_names.items():
        draw = torch.randn(node.shape, generator=gen, dtype=torch.float64)
        draw = draw.abs() if name.startswith("v.") else draw
        out[name] = (draw if node.shape else torch.tensor(3.0 if name == "t" else 0.01)).to(node.dtype)
    return out


def show(name: str, schedule: str) -> tuple[str, str, float]:
    """Prints the program before and after; the largest relative difference of their meanings over all ranks."""
    ex = example(name)
    before = ex.make()
    after = ex.schedules[schedule](before)
    console.rule(f"{name}, as written")
    console.print(before.text, highlight=False, markup=False)
    console.rule(f"{name}, after {schedule}")
    console.print(after.text, highlight=False, markup=False)
    values = inputs(before)
    want = interp.run_global(before, values)
    got = interp.run(after, values, tolerance=1e-4)
    error = max(((got[k] - want[k]).abs().max() / want[k].abs().max().clamp(min=1e-6)).item() for k in want)
    return name, schedule, error


def main() -> None:
    rows = [show("adam", "fuse(RS-C-AG)"), show("mlp", "overlap(MM,fuse(RS-C-AG))")]
    table = Table("program", "schedule", "largest difference on 4 pretended ranks", title="Before and after mean the same")
    for name, schedule, error in rows:
        table.add_row(name, schedule, f"{error:.1e}")
        if error > 1e-4:
            raise SystemExit(f"{name} after {schedule} means something else: {error}")
    console.print(table)


if __name__ == "__main__":
    main()
