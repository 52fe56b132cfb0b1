"""`weft run`: a script on several ranks, and one message when a rank dies, raises or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench._netns import Hosts
from tests.api.test_two_hosts import finish, namespaces

SCRIPT = """
import ctypes, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
from weft.runtime.peers import connect
from weft.api.watch import watch
peers = connect()
for turn in range(1000):
    if turn == 20 and rank == 1:
        if sys.argv[1] == "die": os.kill(os.getpid(), 9)
        if sys.argv[1] == "raise": raise ValueError("a bug of my own")
        if sys.argv[1] == "hang": time.sleep(1000)
    if turn == 20 and sys.argv[1] == "native":  # a call that keeps the interpreter to itself, on every rank
        watch()
        time.sleep(2)
        ctypes.PyDLL(None).sleep(1000)
    if turn == 40 and sys.argv[1] == "well": break
    peers.barrier("the meeting")
sys.stdout.write(f"ended {rank}\\n")  # one write: two ranks share the pipe
sys.stdout.flush()
dist.destroy_process_group()
"""


ROOT = Path(__file__).parent.parent.parent


def run(how: str, folder: Path, commands: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return weft_run("-n", "2", str(script), how, commands=commands, seconds="3" if how in ("hang", "native") else "60")


def weft_run(*words: str, commands: Path | None = None, seconds: str = "60") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; of `commands`, in a fork of one that has loaded all, as its ranks are."""
    how = [sys.executable, "-m", "weft"] if commands is None else [str(commands / "weft")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WEFT_TIMEOUT": seconds}
    return subprocess.run([*how, "run", *words], capture_output=True, text=True, timeout=100, env=env)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("die", "rank 1 ended with SIGKILL at the meeting"),
        ("raise", "rank 1 ended with status 1"),
        ("hang", "rank 1 did not reach the meeting"),
        ("native", "rank 0, 1 no longer runs"),
    ],
)
def test_a_failed_run_says_which_rank_and_where(how: str, said: str, tmp_path: Path, commands: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    done = run(how, tmp_path, commands if how == "raise" else None)  # what is left of the others would not be found among forks
    assert done.returncode == 1
    assert said in done.stderr, done.stderr
    assert done.stderr.count("RuntimeFault") == 1, done.stderr
    assert ("a bug of my own" in done.stderr) == (how == "raise")
    assert set(os.listdir("/dev/shm")) == before
    assert not subprocess.run(["pgrep", "-f", str(tmp_path / "script.py")], capture_output=True, text=True).stdout


def test_a_run_that_ends_well_is_quiet(tmp_path: Path, commands: Path) -> None:
    done = run("well", tmp_path, commands)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0", "1", "ended", "ended"]


def test_what_a_script_made_is_not_taken_down_before_its_process(tmp_path: Path, commands: Path) -> None:
    """A reducer of DDP waits, as it dies, for threads that may wait for it."""
    script = tmp_path / "script.py"
    script.write_text("class Kept:\n    def __del__(self): print('taken down', flush=True)\nkept = Kept()\nprint('made', flush=True)\n")
    done = weft_run("-n", "1", str(script), commands=commands)
    assert done.returncode == 0 and done.stdout == "made\n", done


def test_a_missing_script_is_refused(commands: Path) -> None:
    done = weft_run("no/such/script.py", commands=commands)
    assert done.returncode == 1
    assert "no script no/such/script.py" in done.stderr


ON_HOSTS = """
import os
import torch, torch.distributed as dist
from weft.runtime.board import doing
dist.init_process_group("gloo")
x = torch.ones(4)
for turn in range(20):
    if turn == 10:
        os.write(1, f"met {dist.get_rank()} {x[0].item():g}\\n".encode())
        if dist.get_rank() == 3: os.kill(os.getpid(), 9)
    with doing("the meeting"):
        dist.all_reduce(x)
"""


@pytest.mark.root
def test_on_two_hosts_each_says_what_it_knows(tmp_path: Path) -> None:
    """Ranks of two network namespaces meet; when one dies its host names it, and the other host says that it was not there."""
    why = namespaces()
    if why:
        pytest.skip(f"no network namespaces: {why}")
    script = tmp_path / "script.py"
    script.write_text(ON_HOSTS)
    with Hosts(None) as hosts:
        runs = [start_on(hosts, k, script) for k in range(2)]
        said = [finish(run) for run in runs]
    for rank in range(4):
        assert f"met {rank} {4**10:g}" in said[rank // 2], said
    assert [run.returncode for run in runs] == [1, 1]
    assert "rank 3 ended with SIGKILL" in said[1]
    assert "a rank of another host was lost at the meeting" in said[0]
    assert all(text.count("RuntimeFault") == 1 for text in said)


def start_on(hosts: Hosts, k: int, script: Path) -> subprocess.Popen[str]:
    """Two ranks on host k."""
    launch = ["weft", "run", "-n", "2", "--hosts", "2", "--host", str(k), "--meet-at", f"{hosts.addresses[0]}:29613", str(script)]
    command = ["ip", "netns", "exec", hosts.names[k], sys.executable, "-m", *launch]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": hosts.links[k], "PYTHONPATH": str(ROOT), "WEFT_TIMEOUT": "60"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def test_ranks_that_are_refused_alike_print_it_once_without_the_library_s_frames(tmp_path: Path, commands: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from weft.plan.spec import Spec\n\nSpec.parse('dp2,zerro1')\n")
    done = weft_run("-n", "2", str(script), commands=commands)
    assert done.returncode == 1 and done.stderr.count("PlanError: no plan 'dp2,zerro1'") == 1, done.stderr
    assert "Spec.parse('dp2,zerro1')" in done.stderr and "spec.py" not in done.stderr and "runpy" not in done.stderr, done.stderr
    assert "see the error above" in done.stderr
