"""`weft run -n 2 SCRIPT ...`: a script on several ranks, as torchrun starts it, with one clear message when it fails."""

from __future__ import annotations

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="The Python script; what follows it goes to it."),
    ranks: int = typer.Option(2, "-n", "--nproc-per-node", "--ranks", min=1, help="Processes on this host."),
    hosts: int = typer.Option(1, "--nnodes", "--hosts", min=1, help="Number of hosts; start `weft run` on each."),
    host: int = typer.Option(0, "--node-rank", "--host", min=0, help="Number of this host, from 0."),
    meet_at: str = typer.Option("localhost:29500", "--rdzv-endpoint", "--meet-at", help="HOST:PORT of host 0, the same on every host."),
    standalone: bool = typer.Option(False, "--standalone", help="One host; accepted as torchrun does, and the default."),
    timeout: float = typer.Option(120.0, "--timeout", help="Seconds to wait for a rank before the run is stopped."),
) -> None:
    """Run SCRIPT on several processes, as torchrun does. If one fails or hangs, all are stopped and the cause is printed once."""
    import os
    from pathlib import Path

    from weft.core.errors import RuntimeFault
    from weft.runtime.launch import Ranks, Stopped, launch

    if not Path(script).is_file():
        found = "a folder" if Path(script).is_dir() else "no such file"
        raise RuntimeFault(f"no script {script}", needed="a Python file", found=found, try_="weft run -n 2 path/to/script.py")
    _check(1 if standalone else hosts, host, meet_at, timeout)
    os.environ["WEFT_TIMEOUT"] = os.environ.get("WEFT_TIMEOUT", f"{timeout:g}")
    try:
        launch([script, *context.args], Ranks(ranks, 1 if standalone else hosts, host, meet_at))
    except Stopped as stopped:
        typer.echo(f"stopped by {stopped.signal.name}: all ranks of this host were ended", err=True)
        raise typer.Exit(128 + stopped.signal) from None


def _check(hosts: int, host: int, meet_at: str, timeout: float) -> None:
    """Refuse what no rank could start with."""
    import math

    from weft.core.errors import RuntimeFault

    name, _, port = meet_at.rpartition(":")
    if hosts > 1 and not (name and port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise RuntimeFault(
            f"hosts cannot meet at {meet_at!r}",
            needed="HOST:PORT, the same on every host",
            found=meet_at,
            try_="--rdzv-endpoint 10.0.0.1:29500",
        )
    if host >= hosts:
        raise RuntimeFault(f"there is no host {host}", needed=f"a number of 0 to {hosts - 1}", found=str(host))
    if not 0 < timeout < math.inf:
        raise RuntimeFault(
            f"a rank cannot be waited for {timeout:g} seconds", needed="more than 0", found=f"{timeout:g}", try_="--timeout 120"
        )
