"""One Python that has loaded torch, weft and transformers, and commands as forks of it: pages and examples start many, and each would load them again.

`started(folder)` gives a folder with a `weft` and a `python` to put first in PATH. Whoever runs them is told what the command printed and how it ended
as by a process of its own; ranks that `weft run` starts are forks too. Any other use of `python` is the real one.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import pages
from weft import cli

ROOT = Path(__file__).parents[1]
WORKER = "weft.runtime.worker"  # what `weft run` starts on every rank, by `python -u -m`
CLIENT = """#!{python} -IS
import array, json, os, socket, sys
argv = ["weft", *sys.argv[1:]]
if {name!r} == "python":
    argv = sys.argv[3:]
    if sys.argv[1:4] != ["-u", "-m", {worker!r}]:
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
s = socket.socket(socket.AF_UNIX)
s.connect({where!r})
told = json.dumps([argv, os.getcwd(), dict(os.environ)]).encode()
s.sendmsg([len(told).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
s.sendall(told)
code = int(s.recv(8) or b"1")
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Path]:
    where, bin_ = folder / "socket", folder / "bin"
    bin_.mkdir()
    for name in ("weft", "python"):
        (bin_ / name).write_text(CLIENT.format(python=sys.executable, name=name, worker=WORKER, where=str(where)))
        (bin_ / name).chmod(0o755)
    env = {**os.environ, **pages.SURROUNDINGS}
    server = subprocess.Popen([sys.executable, "-m", "tests.forks", str(where), str(bin_ / "python")], env=env, cwd=ROOT)
    try:
        while not where.exists():
            assert server.poll() is None, "the process to fork from ended"
            time.sleep(0.02)
        yield bin_
    finally:
        server.terminate()
        server.wait()


def serve(where: str, python: str) -> None:
    for name in ("transformers.models.llama.modeling_llama", "torch._dynamo", "weft.api.parallelize", "weft.plan.ask", "weft_zoo"):
        importlib.import_module(name)
    sys.executable = python
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{where}.new")
        door.listen(64)
        os.rename(f"{where}.new", where)
        while True:
            line, _ = door.accept()
            if os.fork() == 0:
                door.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                attend(line)
            line.close()


def attend(line: socket.socket) -> None:
    """Run one command in a fork, and tell the client how it ended; where the client is killed, so is the fork."""
    head, passed, _, _ = line.recvmsg(8, socket.CMSG_SPACE(12))
    fds = array.array("i", passed[0][2][:12])
    size, told = int.from_bytes(head, "big"), b""
    while len(told) < size:
        told += line.recv(1 << 16)
    child = os.fork()
    if child == 0:
        line.close()
        run(*json.loads(told), fds)
    for fd in fds:
        os.close(fd)
    line.settimeout(0.02)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        with contextlib.suppress(TimeoutError):
            if not line.recv(1):
                os.kill(child, signal.SIGTERM)
                line.close()
                line = socket.socketpair()[0]
                line.settimeout(0.02)
    with contextlib.suppress(OSError):
        line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def run(argv: list[str], folder: str, env: dict[str, str], fds: Any) -> None:
    """As a Python that has just begun."""
    for k, fd in enumerate(fds):
        os.dup2(fd, k)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path[0] = list(argv), folder
    status: Any = 0
    try:
        if argv[0] == WORKER:
            sys.stdout.reconfigure(write_through=True)
            runpy.run_module(WORKER, run_name="__main__", alter_sys=True)
        else:
            cli.main()
    except SystemExit as done:
        status = done.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1 if status else 0)


if __name__ == "__main__":
    serve(*sys.argv[1:])
