"""`weft verify`: are the rewrite rules right? All built-in and discovered ones, or those of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.output import console, emit, read_text, results


def verify(
    rules: Annotated[
        Path | None, typer.Option(help="File of rules: weft text, or TASO/FlexFlow JSON.", show_default="the built-in rules")
    ] = None,
    full: Annotated[bool, typer.Option(help="Prove all rules from scratch instead of checking certificates.")] = False,
    write: Annotated[bool, typer.Option(help="With --full, rewrite the certificates of the built-in rules.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the test values, printed.", show_default="random; 0 for rules of a file")] = None,
    workers: Annotated[int, typer.Option(help="Number of processes.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Verify rewrite rules: each is proved, proved up to a size, refuted with a counterexample, or ill-typed; then Z3 verifies it once more."""
    import torch

    torch.set_num_threads(1)
    if write:
        _write(workers, console)
        return
    found = _of_file(rules, seed or 0, workers) if rules is not None else _of_weft(full, seed, workers, console)
    for name, status, example in found.verdicts:
        if example or rules is not None:
            results().print(f"[bold]{name}[/]: {status}", highlight=False)
            results().print(example, highlight=False, markup=False, soft_wrap=True)
    counts = {k: getattr(found, k) for k in ("rules", "pairs", "general", "bounded", "second", "disputed", "refuted")}
    counts |= found.others
    results().print(", ".join(f"{v} {k}" for k, v in counts.items()) + f", {found.seconds:.1f} s, seed {found.seed}")
    if not found.judge:
        results().print("Z3 is not installed, so no rule was verified a second time: pip install z3-solver", markup=False)
    if json:
        emit({**counts, "judge": found.judge or None, "seconds": round(found.seconds, 2)})
    if found.refuted or found.disputed:
        raise typer.Exit(1)


def _of_weft(full: bool, seed: int | None, workers: int, console: Any) -> Any:
    from weft.rewrite.prove.audit import verify

    return verify(full=full, seed=seed, workers=workers)


def _of_file(path: Path, seed: int, workers: int) -> Any:
    from weft.core.errors import RuleError
    from weft.rewrite.prove.audit import audit_foreign, audit_schemas
    from weft.rewrite.rulefile import parse_rules
    from weft.rewrite.taso import read_taso

    if not path.exists():
        raise RuleError(f"no file {path}", needed="a file of rules", found=str(path))
    text = read_text(path, "a file of rules: weft text, or TASO/FlexFlow JSON")
    foreign = text.lstrip().startswith("{")
    rules = read_taso(text) if foreign else parse_rules(text)
    if not rules:
        raise RuleError(f"no rules in {path}", needed="NAME: LEFT == RIGHT, or TASO/FlexFlow JSON", found="none")
    return (audit_foreign if foreign else audit_schemas)(rules, workers, seed)


def _write(workers: int, console: Any) -> None:
    """The certificates that ship with weft, made anew."""
    import weft.rewrite
    from weft.rewrite.certificate import write
    from weft.rewrite.prove.audit import builtin_rules, certify_all

    made = certify_all(builtin_rules(), workers, lambda s: console.print(s, highlight=False))
    path = Path(next(iter(weft.rewrite.__path__))) / "rules" / "builtin.json"
    path.write_text(write(made))
    console.print(f"{len(made)} certificates written to {path.name}")
