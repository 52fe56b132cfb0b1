"""`weft discover`: rewrite rules found from the op entries alone, proved, the fewest that account for every equal pair."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def discover(
    max_ops: Annotated[int | None, typer.Option(help="Most ops in an expression.", show_default="3; 2 with --op", min=1, max=6)] = None,
    op: Annotated[list[str] | None, typer.Option(help="FILE.py:NAME of an op made by weft.lang.define: only rules about it.")] = None,
    state: Annotated[Path | None, typer.Option(help="File of verdicts, so that an interrupted search resumes.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rules with their certificates to this file.")] = None,
    world: Annotated[list[str] | None, typer.Option(help="Only these groups of ops.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Discover rewrite rules from the ops alone: enumerate, group by fingerprint, generalise, minimise, prove."""
    import torch

    from weft.cli.output import console, emit, results, writable
    from weft.rewrite.discover.run import about, discover, forms_of

    torch.set_num_threads(1)
    for path in (out, state):
        writable(str(path or ""))
    tell = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    ops = [_op_of(text) for text in op or ()]
    extra = [form for made in ops for form in forms_of(made)]
    max_ops = max_ops or (2 if ops else 3)
    found = discover(max_ops, extra=extra, only=world or (["algebra"] if ops else ()), state=state, tell=tell)
    if ops:
        found = about(found, ops)
    if out is not None:
        out.write_text(found.as_file())
    general = sum(r.rung == 3 for r in found.rules)
    for r in found.rules:
        tell(f"rung {r.rung}  {r.schema}")
    results().print(f"{len(found.pairs)} pairs, {len(found.rules)} rules, {general} for all sizes, {found.seconds:.0f} s")
    if json:
        emit({
            "max_ops": max_ops, "ops": len(found.ops), "expressions": found.expressions, "pairs": len(found.pairs),
            "rules": len(found.rules),
            "general": general, "bounded": sum(r.rung == 2 for r in found.rules), "seconds": round(found.seconds, 1),
        })  # fmt: skip


def _op_of(text: str) -> Any:
    """The op that FILE.py:NAME names."""
    from weft.core.errors import RuleError
    from weft.core.node import Op
    from weft.frontend.source import import_file

    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise RuleError("--op names no op of a file", needed="FILE.py:NAME", found=text)
    found = getattr(import_file(Path(path)), name, None)
    if not isinstance(found, Op):
        raise RuleError(f"{path} has no op {name}", needed=f"{name} = weft.lang.define(...)", found=type(found).__name__)
    return found
