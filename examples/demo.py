"""What `make demo` runs: schedules that mean the same, then a small GPT trained on two local processes and compared.

The GPT learns weft's own source, byte by byte: on one process by plain torch, on two under the plan weft picks, with equal losses;
then a step is timed against DDP and FSDP2 in the same run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import weft_zoo as zoo  # noqa: E402
from bench import train  # noqa: E402 - the repository's own folder, found above
from bench._ranks import run_ranks  # noqa: E402
from weft import interp  # noqa: E402
from weft.api.parallelize import parallelize  # noqa: E402
from weft.core.program import Program  # noqa: E402
from weft.programs.catalog import example  # noqa: E402
from weft.record.progress import line, partings  # noqa: E402
from weft.record.run import load  # noqa: E402
from weft.report import report  # noqa: E402

console = Console(width=140)
STEPS, BATCH, SEQ = 30, 16, 64
RATE = 5e-4  # at twice this float32 rounding grows by hundreds within the 30 steps
LINES, LINE = 24, 136  # of a program that are shown, and how long one may be
RUN = ROOT / "build" / "demo-run"  # what training writes about itself


# -- schedules -----------------------------------------------------------------------------------------------------------------


def inputs(p: Program) -> dict[str, torch.Tensor]:
    """Random values of the program's inputs; second moments are squares, the step number is 3."""
    gen = torch.Generator().manual_seed(0)
    out = {}
    for name, node in p.input_names.items():
        draw = torch.randn(node.shape, generator=gen, dtype=torch.float64)
        draw = draw.abs() if name.startswith("v.") else draw
        out[name] = (draw if node.shape else torch.tensor(3.0 if name == "t" else 0.01)).to(node.dtype)
    return out


def shortened(p: Program) -> str:
    """The program's text; of a long one the first lines, and what makes it another one: communication and kernels."""
    lines = [line if len(line) < LINE else f"{line[: LINE - 4]} ..." for line in p.text.splitlines()]
    if len(lines) <= LINES:
        return "\n".join(lines)
    kept = [line for line in lines[LINES // 2 :] if any(f" {op}" in line for op in ("all_", "reduce_", "fuse", "overlap", "return"))]
    return "\n".join([*lines[: LINES // 2], f"  ... {len(lines) - LINES // 2 - len(kept)} more lines, among them", *kept])


def show(name: str, schedule: str) -> tuple[str, str, float]:
    """Prints the program before and after; the largest relative difference of their meanings over all ranks."""
    ex = example(name)
    before = ex.make()
    after = ex.schedules[schedule](before)
    console.rule(f"{name}, as written")
    console.print(shortened(before), highlight=False, markup=False)
    console.rule(f"{name}, after {schedule}")
    console.print(shortened(after), highlight=False, markup=False)
    values = inputs(before)
    want = interp.run_global(before, values)
    got = interp.run(after, values, tolerance=1e-4)
    error = max(((got[k] - want[k]).abs().max() / want[k].abs().max().clamp(min=1e-6)).item() for k in want)
    return name, schedule, error


def schedules() -> None:
    rows = [show("mlp", "overlap(MM,fuse(RS-C-AG))"), show("adam", "fuse(RS-C-AG)")]
    table = Table("program", "schedule", "largest difference on 4 simulated ranks", title="Before and after mean the same")
    for name, schedule, error in rows:
        table.add_row(name, schedule, f"{error:.1e}")
        if error > 1e-4:
            raise SystemExit(f"{name} after {schedule} means something else: {error}")
    console.print(table)


# -- training ------------------------------------------------------------------------------------------------------------------


def text() -> torch.Tensor:
    """weft's own source as bytes."""
    files = sorted((ROOT / "weft" / "core").glob("*.py"))
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)))


def batches(field_names: list[str]) -> list[dict[str, torch.Tensor]]:
    """Inputs and the bytes that follow them, the same on every rank."""
    data, gen, out = text(), torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        at = torch.randint(0, len(data) - SEQ - 1, (BATCH,), generator=gen)
        rows = torch.stack([data[i : i + SEQ + 1] for i in at.tolist()])
        out.append(dict(zip(field_names, (rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), strict=True)))
    return out


def gpt() -> Any:
    return zoo.get("gpt2", device="cpu", layers=4, hidden=128, heads=4, vocab=256, seq=SEQ, dropout=0.0)


def one_process() -> list[float]:
    """Plain torch."""
    w = gpt()
    opt = torch.optim.AdamW(w.model.parameters(), lr=RATE)
    losses = []
    for batch in batches(list(w.example(1))):
        opt.zero_grad()
        loss = w.loss(w.model, batch)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def two_processes(rank: int, world: int) -> dict[str, Any]:
    """The same under the plan that is predicted to be fastest here, with a bar; then step times of all ways."""
    w = gpt()
    data = batches(list(w.example(1)))
    made = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=RATE), data[0], plan="auto")
    assert made.decision is not None
    if rank == 0:
        console.print(f"chosen: {made.decision}", highlight=False)

    def step(batch: Any) -> float:
        return float(made(batch))

    losses, recorder = [], made.record(str(RUN), progress=False)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=rank != 0) as bar:
        task = bar.add_task("training", total=STEPS, rate="")
        for batch in data:
            start = time.perf_counter()
            losses.append(step(batch))
            speed = BATCH * SEQ / (time.perf_counter() - start)
            bar.update(task, advance=1, rate=f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
    recorder.close()
    made.recorder = None  # what is timed next is not watched
    ways = {f"weft {made.decision.plan}": step, "DDP": train.ddp(w, rank, world), "FSDP2": train.fsdp2(w, rank, world)}
    for way in ways.values():
        way(data[0])
    return {"losses": losses, "ms": train.time_steps(ways, data[0], 9)}


def training() -> None:
    console.rule("a GPT on two processes")
    want, got = one_process(), run_ranks(two_processes, 2)
    apart = max(abs(a - b) for a, b in zip(got["losses"], want, strict=True))
    console.print(
        f"loss {want[0]:.3f} -> {got['losses'][-1]:.3f} in {STEPS} steps; largest difference to one process by torch: {apart:.1e}"
    )
    if apart > 1e-3:
        raise SystemExit("the losses differ")
    table = Table("one step, two processes", "ms", title="weft next to what you would use instead")
    for name, ms in got["ms"].items():
        table.add_row(name, f"{ms:.1f}")
    console.print(table)


def finished() -> None:
    """What training said of itself, and where to see it."""
    run = load(RUN)
    console.rule("what training saw")
    console.print(line(run), highlight=False)
    for text in partings(run):
        console.print(f"  {text}", highlight=False)
    page, trace = report(RUN)
    console.print(f"the report is at {page}, for any browser; a trace for Perfetto at {trace}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    schedules()
    training()
    finished()
