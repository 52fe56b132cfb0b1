"""Hosts that are network namespaces, joined by a link of a given rate. Needs root and `ip`, `tc`; leaves nothing behind.

with Hosts(2, "1gbit") as hosts:
    answer = hosts.run("bench.overlap", "slow_link", ranks_per_host=1)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.core.errors import RuntimeFault

ROOT = Path(__file__).resolve().parent.parent


def possible() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid():
        return "not root"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"no {', '.join(missing)}" if missing else ""


class Hosts:
    """Two namespaces with one veth pair between them, each end limited to `rate` by a token bucket."""

    def __init__(self, rate: str | None) -> None:
        self.rate = rate
        tag = secrets.token_hex(3)
        self.names = [f"weft{tag}{k}" for k in range(2)]
        self.links = [f"v{tag}{k}" for k in range(2)]
        self.addresses = ["10.77.13.1", "10.77.13.2"]

    def __enter__(self) -> Hosts:
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # one who is told to end tidies up first
        try:
            for name in self.names:
                _do("ip", "netns", "add", name)
            first, second = zip(self.links, self.names, strict=True)
            _do("ip", "link", "add", first[0], "netns", first[1], "type", "veth", "peer", "name", second[0], "netns", second[1])
            for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
                _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
                _do("ip", "-n", name, "link", "set", "lo", "up")
                _do("ip", "-n", name, "link", "set", link, "up")
                if self.rate:
                    _do(
                        "tc",
                        "-n",
                        name,
                        "qdisc",
                        "add",
                        "dev",
                        link,
                        "root",
                        "tbf",
                        "rate",
                        self.rate,
                        "burst",
                        "256kb",
                        "latency",
                        "200ms",
                    )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def sent(self, host: int) -> int:
        """Bytes a host has put on the link, headers and acknowledgements included."""
        text = _do("ip", "netns", "exec", self.names[host], "cat", f"/sys/class/net/{self.links[host]}/statistics/tx_bytes")
        return int(text)

    def run(self, module: str, function: str, *args: Any, ranks_per_host: int = 1, timeout: float = 300) -> Any:
        """`module.function(rank, world, *args)` on every rank of both hosts; what rank 0 returns, as JSON."""
        world = 2 * ranks_per_host
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "answer")
            ranks = [self._start(r, world, ranks_per_host, module, function, args, out) for r in range(world)]
            try:
                codes = [p.wait(timeout=timeout) for p in ranks]
            except subprocess.TimeoutExpired:
                raise RuntimeFault(f"ranks on two hosts did not end within {timeout:g} s", found=f"{module}.{function}") from None
            finally:
                for process in ranks:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            if any(codes):
                raise RuntimeFault(f"rank {next(r for r, c in enumerate(codes) if c)} of {module}.{function} failed", found=str(codes))
            return json.loads(out.read_text())

    def _start(self, rank: int, world: int, per_host: int, module: str, function: str, args: tuple[Any, ...], out: Path) -> Any:
        host = rank // per_host
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % per_host), "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": self.links[host], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        code = (
            "import importlib, json, os, sys, warnings; warnings.simplefilter('ignore'); import torch, torch.distributed as dist; "
            "torch.set_num_threads(1); dist.init_process_group('gloo'); "
            "answer = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(dist.get_rank(), dist.get_world_size(), "
            "*json.loads(sys.argv[3])); "
            "dist.barrier(); dist.get_rank() or open(sys.argv[4], 'w').write(json.dumps(answer))"
        )
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-c", code, module, function, json.dumps(args), str(out)]
        return subprocess.Popen(command, env=env, start_new_session=True, cwd=ROOT)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeFault(f"`{' '.join(command)}` failed", found=done.stderr.strip(), try_="run as root on Linux with iproute2")
    return done.stdout
