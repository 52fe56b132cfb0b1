"""`weft bench layout-rules`: every way to hold the operands of every op on two ranks, true or not by torch's own validator.

torch.distributed.tensor._ops.strategy_validation (torch 2.13) cuts, copies or splits operands into pending terms, runs the plain function on what
each rank holds, and looks which layouts of the results make them the whole result. What weft accepts must be true; what is true must be
accepted, or its reason stands in `REASONS`. Samples are those of tests/ops, which cover every op.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

FILES = ("pointwise", "linalg", "norm", "shape", "embed", "attention", "conv", "moe", "capture", "by_rows")
MOST = 400  # combinations of one sample; a sample with more is drawn from, evenly

ORDER = (
    "a pending max or min passes where the op keeps the order of that operand for all values, the others whole; an op that turns it round, or"
    " keeps it for some signs only, is refused"
)


@dataclass
class Tally:
    """What was found of one sample."""

    case: str
    ops: list[str]
    combinations: int = 0
    agree: int = 0
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def register(app: typer.Typer) -> None:
    app.command("layout-rules")(layout_rules)


def layout_rules(
    json: Annotated[bool, typer.Option("--json", help="one JSON object on the last line")] = False,
    only: Annotated[str, typer.Option(help="samples whose name has this")] = "",
    most: Annotated[int, typer.Option(help="combinations of one sample")] = MOST,
) -> None:
    """Run torch's validator over weft's ops: what weft accepts must be true, what it refuses though true is listed with its reason."""
    from weft.cli.output import console, emit

    start, rows = time.monotonic(), []
    with validator():
        for c in cases():
            if only in c.name:
                rows.append(tally(c, most))
                odd = [f"WRONG {x}" for x in rows[-1].wrong] + [f"missing {x}" for x in rows[-1].missing]
                for line in odd[:6]:
                    console.print(f"{c.name}: {line}", markup=False, soft_wrap=True)
    told = summary(rows)
    if json:
        emit({"bench": "layout-rules", **told, "seconds": round(time.monotonic() - start, 1)})
    else:
        console.print(str({k: v for k, v in told.items() if k != "rows"}), markup=False)
    if told["wrong"] or told["without_reason"]:
        raise typer.Exit(1)


def summary(rows: Sequence[Tally]) -> dict[str, Any]:
    listed = [{"case": r.case, "missing": r.missing, "reason": reason(r)} for r in rows if r.missing]
    return {
        "ops": len({op for r in rows for op in r.ops}), "samples": len(rows), "combinations": sum(r.combinations for r in rows),
        "agree": sum(r.agree for r in rows), "wrong": sum(len(r.wrong) for r in rows), "missing": sum(len(r.missing) for r in rows),
        "without_reason": sum(not row["reason"] for row in listed), "rows": listed,
    }  # fmt: skip


def reason(found: Tally) -> str:
    """Why weft refuses what holds here: the sample says, or it is a matter of order."""
    own = next(c.refused for c in cases() if c.name == found.case)
    return str(own) or (ORDER if all("P(max)" in x or "P(min)" in x for x in (m.split(" -> ")[0] for m in found.missing)) else "")


def cases() -> list[Any]:
    """The samples of tests/ops, communication left out: it has no operands to be held otherwise."""
    root = Path(__file__).parent.parent
    with contextlib.suppress(ValueError):
        import sys

        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    return [c for name in FILES for c in importlib.import_module(f"tests.ops.cases_{name}").CASES]


@contextlib.contextmanager
def validator() -> Iterator[None]:
    """Inside, two ranks are pretended, as torch's validator needs them."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        if mine:
            dist.destroy_process_group()


def tally(c: Any, most: int = MOST) -> Tally:
    """One sample: every combination, or some of them drawn evenly."""
    from tests.ops.harness import typed
    from weft.core.layout import Layout, Mesh, P, R, S

    mesh = Mesh(a=2)
    choices = [[R, *(S(d) for d, n in enumerate(x.shape) if n and n % 2 == 0), *([P("sum"), P("max"), P("min")] if _sums(x, c) else [])]
               for x in c.inputs]  # fmt: skip
    every = list(itertools.product(*choices))
    found = Tally(c.name, [])
    ops: set[str] = set()
    for places in every[:: -(-len(every) // most)]:
        combo = tuple(Layout.of(mesh, x.shape, {"a": p}) for x, p in zip(c.inputs, places, strict=True))
        program = typed(c, combo)
        found.combinations += 1
        shown = ", ".join(map(str, places))
        if program is not None:
            ops |= {n.op.name for n in program.nodes} - {"input", "item", "const"}
            outs = [str(n.type.on("a")) for _, n in program.outputs]
            right = _accepted_is_true(c, program)
            found.agree += right
            found.wrong += [] if right else [f"{shown} -> {', '.join(outs)}"]
        elif c.local or refuted(c, combo) or not (outs := true_outputs(c, places)):
            found.agree += 1
        else:
            found.missing.append(f"{shown} -> {' or '.join(outs)}")
    found.ops = sorted(ops)
    return found


def _sums(x: Any, c: Any) -> bool:
    return bool(c.partial and x.value(0).dtype.is_floating_point)


def _accepted_is_true(c: Any, program: Any) -> bool:
    """Whether the ranks together compute torch's value, for pending terms as torch's validator splits them and of two kinds of its masks."""
    import torch

    from weft import interp
    from weft.core.errors import InvalidProgram

    for seed, shift in ((0, 0), (1, 1)):
        values = c.values(seed)
        spread = {f"x{k}": split(v, n.type, k, shift) for k, (v, n) in enumerate(zip(values, program.inputs, strict=True))}
        ranks = interp.run_ranks(program, spread)
        for (name, n), y in zip(program.outputs, c.expected(values), strict=True):
            try:
                whole = interp.denote(ranks[name], n.type, tolerance=1e-8)
            except InvalidProgram:
                return False
            if whole.shape != y.shape or not torch.allclose(whole.double(), y.double(), rtol=1e-7, atol=1e-7, equal_nan=True):
                return False
    return True


def split(value: Any, type_: Any, index: int, shift: int) -> list[Any]:
    """What each rank holds, pending terms as torch's validator makes them."""
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._ops.strategy_validation import _create_partial_input

    from weft import interp
    from weft.core.layout import P

    place = type_.on("a")
    if not isinstance(place, P):
        return interp.distribute(value, type_)
    made: Any = _create_partial_input(value, Partial(place.op), 2, index, shift)
    return [made._local_tensors[0], made._local_tensors[1]]


def refuted(c: Any, combo: Sequence[Any]) -> bool:
    """Whether random values and pending terms already show that no layout of the results holds; the validator's terms are not random."""
    from tests.ops.harness import on_slices

    left: list[set[str]] | None = None
    for seed in range(3):
        values = c.values(seed)
        ranks = on_slices(c, values, combo, seed)
        if ranks is None:
            return True
        fits = [_held_as(outs, y) for outs, y in zip(ranks, c.expected(values), strict=True)]
        left = fits if left is None else [a & b for a, b in zip(left, fits, strict=True)]
        if not all(left):
            return True
    return False


def _held_as(parts: Sequence[Any], whole: Any) -> set[str]:
    """The ways in which two ranks' results are the whole one."""
    import torch

    a, b = parts
    ways = {f"S({d})": lambda d=d: torch.cat([a, b], d) for d in range(whole.ndim)}
    if a.shape == b.shape == whole.shape and whole.dtype != torch.bool:
        ways |= {"sum": lambda: a + b, "avg": lambda: (a + b) / 2, "max": lambda: torch.maximum(a, b), "min": lambda: torch.minimum(a, b)}
    found = {"R"} if all(_equal(x, whole) for x in parts) else set()
    return found | {name for name, put in ways.items() if _fitting(parts, whole, name) and _equal(put(), whole)}


def _fitting(parts: Sequence[Any], whole: Any, way: str) -> bool:
    if not way.startswith("S"):
        return True
    d = int(way[2:-1])
    return all(x.ndim == whole.ndim and (*x.shape[:d], *x.shape[d + 1 :]) == (*whole.shape[:d], *whole.shape[d + 1 :]) for x in parts)


def _equal(x: Any, y: Any) -> bool:
    import torch

    return x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-8, atol=1e-8, equal_nan=True)


def true_outputs(c: Any, places: Sequence[Any]) -> list[str]:
    """The layouts of the results that torch's validator finds true of the plain function on what the ranks hold; one choice per result."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._ops import strategy_validation as torchs

    mesh = init_device_mesh("cpu", (2,))
    left: list[set[str]] | None = None
    for seed, shift, sign in ((0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, -1)):
        values = c.values(seed)
        values = [-v if sign < 0 and v.is_floating_point() and bool((v < 0).any()) else v for v in values]
        fits = _fits(torchs, c, values, [_placement(p) for p in places], mesh, shift)
        if not fits:
            return []
        left = fits if left is None else [a & b for a, b in zip(left, fits, strict=True)]
        if not all(left):
            return []
    return [" ".join(sorted(x)) for x in left or []]


def _fits(torchs: Any, c: Any, values: Sequence[Any], held: Sequence[Any], mesh: Any, shift: int) -> list[set[str]]:
    """Of each result, the layouts in which what the ranks make is the whole result; none where the function fails on what they hold."""
    from torch.distributed._local_tensor import LocalTensorMode

    want = c.expected(values)
    with LocalTensorMode(frozenset(range(2))):
        try:
            made = c.ref(*torchs._shard_tensors([(f"x{k}", v) for k, v in enumerate(values)], tuple(held), 2, mesh, shift))
        except Exception:  # of shapes that do not fit, mostly, and of whatever a tensor of several ranks cannot do
            return []
        got = list(made) if isinstance(made, (tuple, list)) else [made]
        every = [torchs.get_1d_output_placements_for_tensor(y) for y in want]
        return [{str(p) for p in some if _true(torchs, x, y, p, mesh)} for x, y, some in zip(got, want, every, strict=True)]


def _true(torchs: Any, local: Any, want: Any, place: Any, mesh: Any) -> bool:
    try:
        return bool(torchs._compare_outputs(local, want, (place,), mesh, 2)[0])
    except Exception:
        return False


def _placement(p: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    from weft.core.layout import P, S

    return Partial(p.op) if isinstance(p, P) else Shard(p.dim) if isinstance(p, S) else Replicate()
