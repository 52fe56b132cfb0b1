"""Kill a rank with signal 9 at a random moment, many times: does each run end soon, with the right words, leaving nothing?"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import typer

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
from weft import optim
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
step = optim.AdamW(net.parameters())
os.write(1, f"ready {dist.get_rank()} {os.getpid()}\\n".encode())  # in one piece, whoever else writes
while True:
    step.zero_grad()
    net(torch.randn(16, 64)).square().mean().backward()
    step.step()
"""


def register(app: typer.Typer) -> None:
    app.command("faults")(faults)


def faults(
    json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    times: int = typer.Option(50, help="Runs, each with one rank killed."),
    ranks: int = typer.Option(2, help="Ranks of each run."),
    seed: int = typer.Option(0, help="Of the moments and the ranks chosen."),
) -> None:
    """`kill -9` of a rank: every run must end within 30 s, name the rank, and leave no process or shared memory."""
    from weft.cli.output import console, emit

    rng = random.Random(seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        for k in range(times):
            rows.append(one(script, ranks, rng))
            last = rows[-1]
            how = "right" if last["right"] else f"WRONG: {last['said']}"
            when = f"killed after {last['after_s']:.2f} s, over in {last['seconds']:.2f} s"
            console.print(f"{k + 1}/{times}: rank {last['killed']} {when}, {how}", markup=False)
    good = sum(row["right"] for row in rows)
    if json:
        worst = max(row["seconds"] for row in rows)
        emit({"bench": "faults", "runs": times, "right": good, "longest_s": worst, "rows": rows})
    if good < times:
        raise typer.Exit(1)


def one(script: Path, ranks: int, rng: random.Random) -> dict[str, Any]:
    """Start, wait until all train, kill one at a random moment, and look at what is left."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    command = [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--timeout", "20", str(script)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    pids: dict[int, int] = {}
    assert run.stdout is not None
    while len(pids) < ranks:
        words = run.stdout.readline().split()
        if not words:
            break
        if words[0] == "ready":
            pids[int(words[1])] = int(words[2])
    after, rank = rng.uniform(0, 1.0), rng.randrange(ranks)
    time.sleep(after)
    start = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    try:
        _, said = run.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        _, said = run.communicate()
        said = "did not end: " + said
    seconds = time.monotonic() - start
    left = [pid for pid in pids.values() if os.path.exists(f"/proc/{pid}")]
    shared = (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) - before
    named = re.search(rf"rank {rank} ended with SIGKILL at (adamw step|adopt parameters)", said) is not None
    right = named and said.count("RuntimeFault") == 1 and seconds < 30 and not left and not shared and run.returncode == 1
    return {
        "killed": rank,
        "after_s": after,
        "seconds": seconds,
        "right": right,
        "left": left,
        "shared": sorted(shared),
        "said": said.strip()[-600:],
    }
