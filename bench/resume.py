"""`weft bench resume`: kill -9 of a random rank at a random moment of training, relaunch, and compare with the undisturbed run.

Training saves every few steps without waiting. After each kill the launcher is started again, and must go on from the last complete
checkpoint: its losses are those of the undisturbed run, and no step before that checkpoint is done twice.
"""

from __future__ import annotations

import json as js
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.core.errors import RuntimeFault

ROOT = Path(__file__).resolve().parent.parent
EVERY = 3
SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
from weft.api.parallelize import parallelize
import weft_zoo as zoo
folder, plan, steps, every = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
w = zoo.small("gpt2", dtype=torch.float64)
step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-3), w.example(8), plan=plan, check=False)
store = step.checkpoints(folder)
start = store.restore() or 0
say = lambda **what: os.write(1, (json.dumps(what) + "\\n").encode()) if dist.get_rank() == 0 else None
pids = [None] * dist.get_world_size()
dist.all_gather_object(pids, os.getpid())
say(start=start, pids=pids)
while step.steps < steps:
    loss = step(w.example(8, seed=step.steps)).item()
    if step.steps % every == 0:
        saved = store.save(wait=step.steps == steps)
    say(step=step.steps, loss=loss)
store.finish()
dist.barrier()
say(done=True)
dist.destroy_process_group()
"""


def register(app: typer.Typer) -> None:
    @app.command()
    def resume(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        kills: Annotated[int, typer.Option(help="ranks killed")] = 20,
        ranks: Annotated[int, typer.Option(help="processes")] = 2,
        plan: Annotated[str, typer.Option(help="plan of the run")] = "dp2,zero1",
        seed: Annotated[int, typer.Option(help="of the moments and ranks chosen")] = 0,
    ) -> None:
        """Kill ranks in the middle of training; does the run end as if nothing had happened?"""
        from bench._ranks import machine
        from weft.cli.output import console, emit

        steps = EVERY * (kills + 2)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(SCRIPT)
            calm = launch(script, Path(folder, "calm"), plan, ranks, steps)
            rows, losses = disturbed(script, Path(folder, "store"), plan, ranks, steps, kills, random.Random(seed), console)
        worst = max(abs(losses[k] - calm["losses"][k]) for k in calm["losses"])
        lost = max((row["redone"] for row in rows), default=0)
        right = worst == 0.0 and lost <= 2 * EVERY and len(rows) == kills
        console.print(f"{len(rows)} kills; losses differ by at most {worst:g}; at most {lost} steps done again", markup=False)
        if json:
            emit({"bench": "resume", "machine": machine(), "plan": plan, "ranks": ranks, "steps": steps, "saved_every": EVERY,
                  "kills": len(rows), "worst": worst, "most_redone": lost, "right": right, "rows": rows})  # fmt: skip
        if not right:
            raise typer.Exit(1)


def disturbed(
    script: Path, store: Path, plan: str, ranks: int, steps: int, kills: int, rng: random.Random, console: Any
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Launches until the run is through, all but the last with a rank killed; every step's loss, the last time it was done."""
    rows: list[dict[str, Any]] = []
    losses: dict[int, float] = {}
    while True:
        after = rng.randint(1, 2 * EVERY) if len(rows) < kills else None
        wait = rng.uniform(0, 0.2)
        last = launch(script, store, plan, ranks, steps, after, rng.randrange(ranks), wait)
        if rows:
            rows[-1]["redone"] = rows[-1]["reached"] - last["start"]
        losses |= last["losses"]
        if last["done"]:
            return rows, losses
        if last["killed"] is None:
            raise RuntimeFault("a launch ended by itself", needed="a run that ends well or is killed", found=last["said"])
        rows.append({"rank": last["killed"], "reached": max(last["losses"], default=last["start"]), "resumed_at": last["start"], "redone": 0})
        console.print(f"{len(rows)}: rank {last['killed']} killed at step {rows[-1]['reached']}, started at {last['start']}", markup=False)


def launch(
    script: Path, store: Path, plan: str, ranks: int, steps: int, kill_after: int | None = None, victim: int = 0, wait: float = 0.0
) -> dict[str, Any]:
    """One launch by torchrun; a rank is killed some steps after the start."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script),
               str(store), plan, str(steps), str(EVERY)]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out: dict[str, Any] = {"start": 0, "losses": {}, "done": False, "killed": None}
    stderr = (script.parent / "stderr").open("w+")
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, start_new_session=True)
    pids: list[int] = []
    assert run.stdout is not None
    try:
        for line in run.stdout:
            said = js.loads(line) if line.startswith("{") else {}
            out["losses"] |= {said["step"]: said["loss"]} if "step" in said else {}
            out |= {k: said[k] for k in ("start", "done") if k in said}
            pids = said.get("pids", pids)
            if kill_after is not None and out["killed"] is None and len(out["losses"]) == kill_after:
                time.sleep(wait)
                os.kill(pids[victim], signal.SIGKILL)
                out["killed"] = victim
        run.wait(120)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        stderr.close()
    return {**out, "said": (script.parent / "stderr").read_text()[-2000:]}
