"""`weft run -n 2 SCRIPT ...`: a script on several ranks, as torchrun starts it, with one clear message when it fails."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(run)


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="The Python script; what follows it goes to it."),
    ranks: int = typer.Option(2, "-n", "--ranks", min=1, help="Ranks on this host."),
    hosts: int = typer.Option(1, "--hosts", min=1, help="Hosts in all; start `weft run` on each."),
    host: int = typer.Option(0, "--host", min=0, help="This host's number."),
    meet_at: str = typer.Option("localhost:29500", "--meet-at", help="HOST:PORT of host 0, where there are several."),
    timeout: float = typer.Option(120.0, "--timeout", help="Seconds a rank may be waited for."),
) -> None:
    """Run SCRIPT on several ranks. A rank that dies, hangs or disagrees ends the run on all of them."""
    import os
    from pathlib import Path

    from weft.core.errors import RuntimeFault
    from weft.runtime.launch import Ranks, launch

    if not Path(script).is_file():
        raise RuntimeFault(f"no script {script}", needed="a Python file", found="no such file", try_="weft run -n 2 path/to/script.py")
    os.environ["WEFT_TIMEOUT"] = os.environ.get("WEFT_TIMEOUT", f"{timeout:g}")
    launch([script, *context.args], Ranks(ranks, hosts, host, meet_at))
