"""torchrun over two hosts, which are network namespaces: the losses of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from bench._netns import Hosts, possible
from weft.api.parallelize import parallelize

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
from tests.api.test_two_hosts import losses
told = losses(os.environ["PLAN"])
os.write(1, f"losses {dist.get_rank()} {' '.join(map(repr, told))}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""


def losses(plan: str) -> list[float]:
    w = zoo.small("gpt2", dtype=torch.float64, dropout=0.0)
    step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan=plan)
    return [step(w.example(8, seed=i)).item() for i in range(3)]


def namespaces() -> str:
    """Why two hosts cannot be had here; empty if they can."""
    if possible():
        return possible()
    try:
        with Hosts(None):
            return ""
    except Exception as e:
        return str(e).splitlines()[0]


@pytest.mark.root
@pytest.mark.timeout(300)
def test_two_hosts_train_as_one_process(tmp_path: Path) -> None:
    why = namespaces()
    if why:
        pytest.skip(f"no network namespaces: {why}")
    want = losses("dp1")
    (tmp_path / "train.py").write_text(SCRIPT)
    with Hosts(None) as hosts:
        runs = [start(hosts, k, tmp_path / "train.py") for k in range(2)]
        said = [finish(run) for run in runs]
    lines = [line.split()[1:] for text in said for line in text.splitlines() if line.startswith("losses")]
    assert sorted(int(rank) for rank, *_ in lines) == [0, 1, 2, 3], said
    for _, *told in lines:
        assert [float(x) for x in told] == pytest.approx(want, abs=1e-8)


def start(hosts: Any, k: int, script: Path) -> Any:
    """Two ranks on host k."""
    at = hosts.addresses[0]
    torchrun = ["torch.distributed.run", "--nnodes=2", f"--node-rank={k}", "--nproc-per-node=2", f"--master-addr={at}", "--master-port=29611"]
    command = ["ip", "netns", "exec", hosts.names[k], sys.executable, "-m", *torchrun, str(script)]
    env = {**os.environ, "PLAN": "dp2,tp2,zero1", "GLOO_SOCKET_IFNAME": hosts.links[k], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(run: Any) -> str:
    try:
        return str(run.communicate(timeout=240)[0])
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
