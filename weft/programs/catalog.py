"""The programs by name, each with its schedules by name, as `weft show` and the demo know them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from weft.core.errors import UnknownName
from weft.core.layout import Mesh
from weft.core.program import Program
from weft.ops.comm import send
from weft.ops.registry import Kind
from weft.programs import blocks
from weft.programs.optimizers import Hyper, optimizer
from weft.schedule import fuse, overlap, sink, split
from weft.schedule import recipes as r

Schedule = Callable[[Program], Program]
SHAPES = [(512, 128), (128,), (130, 7)]  # a matrix, a vector, and one that four ranks cannot share evenly


@dataclass(frozen=True)
class Example:
    """How to write a program, and how to schedule it."""

    make: Callable[[], Program]
    schedules: dict[str, Schedule]
    source: Callable[..., object]  # the function in the language


# -- schedules of the CoCoNet paper --------------------------------------------------------------------------------------------


def rs_c_ag(p: Program) -> Program:
    """Sum slices, update slices, gather the parameters; optimizer state stored in slices."""
    return r.zero1(p)


def fused_rs_c_ag(p: Program) -> Program:
    return r.one_kernel(rs_c_ag(p))


def mm_rs_c_ag(p: Program) -> Program:
    """The sum of a matmul split along the sequence, the gather after all that is elementwise."""
    p = split(p, p.find("all_reduce"), dim=1)
    return r.slice_early(sink(p, p.find("all_gather")))


def overlapped_mm(p: Program) -> Program:
    """The matmul pipelined with one kernel of sum, compute and gather; a norm, which needs full rows, stays after it."""
    p = mm_rs_c_ag(p)
    gemm = p.find("reduce_scatter").args[0]
    full = p.find_all(where=lambda n: n.op.kind is Kind.COMPOSITE)
    members = [n for n in p.between("reduce_scatter", "all_gather") if not p.needs(n) & set(full) - p.needs(gemm)]
    p = fuse(p, members, name="rs_c_ag")
    return overlap(p, gemm, "rs_c_ag", dim=1, chunks=4)


def boundary_slices(p: Program) -> Program:
    return r.sliced_send(p)


def boundary_overlapped(p: Program) -> Program:
    """reduce_scatter with its compute, the send, and the gather on the far side, in chunks at once."""
    p = r.sliced_send(p)
    compute = [n for n in p.between("reduce_scatter", "send") if n.op is not send]
    p = fuse(p, compute, name="rs_c")
    return overlap(p, "rs_c", p.find("send"), p.find("all_gather"), dim=1, chunks=4)


OPTIMIZER = {"AR-C": r.fuse_compute, "RS-C-AG": rs_c_ag, "fuse(RS-C-AG)": fused_rs_c_ag, "zero3": r.zero3}
PRODUCT = {"MM-AR-C": r.fuse_compute, "MM-RS-C-AG": mm_rs_c_ag, "overlap(MM,fuse(RS-C-AG))": overlapped_mm}
BOUNDARY = {"AR-C-P2P": r.fuse_compute, "RS-C-P2P-AG": boundary_slices, "overlap(RS,P2P,AG)": boundary_overlapped}


def _optimizer(name: str, hyper: Hyper) -> Example:
    from weft.programs import optimizers

    return Example(lambda: optimizer(name, Mesh(dp=4), SHAPES, hyper=hyper), OPTIMIZER, optimizers.UPDATES[name])


EXAMPLES: dict[str, Example] = {
    "sgd": _optimizer("sgd", Hyper(weight_decay=0.01)),
    "adam": _optimizer("adam", Hyper()),
    "adamw": _optimizer("adamw", Hyper(weight_decay=0.01)),
    "adamw-clipped": _optimizer("adamw", Hyper(weight_decay=0.01, clip=1.0, scaled=True)),
    "lamb": _optimizer("lamb", Hyper(weight_decay=0.01)),
    "projection": Example(lambda: blocks.projection(Mesh(tp=4), 2, 16, 32), PRODUCT, blocks.projection),
    "mlp": Example(lambda: blocks.mlp(Mesh(tp=4), 2, 16, 32), PRODUCT, blocks.mlp),
    "attention": Example(lambda: blocks.self_attention(Mesh(tp=4), 2, 16, 32), PRODUCT, blocks.self_attention),
    "boundary": Example(lambda: blocks.boundary(Mesh(pp=2, tp=2), 2, 16, 32), BOUNDARY, blocks.boundary),
}


def example(name: str) -> Example:
    if name not in EXAMPLES:
        close = get_close_matches(name, EXAMPLES, 3) or list(EXAMPLES)
        raise UnknownName(f"no example {name!r}", needed=f"one of {', '.join(EXAMPLES)}", found=name, try_=[f"weft show {n}" for n in close[:3]])
    return EXAMPLES[name]


def scheduled(name: str, schedule: str | None) -> Program:
    """The example's program, as written or after one of its schedules."""
    ex = example(name)
    if schedule is None:
        return ex.make()
    if schedule not in ex.schedules:
        raise UnknownName(f"{name} has no schedule {schedule!r}", needed=f"one of {', '.join(ex.schedules)}", found=schedule)
    return ex.schedules[schedule](ex.make())


def line_count(fn: Callable[..., object]) -> int:
    """Lines of code of a function and of the functions of its module that it calls: no blank lines, comments or docstrings."""
    home, seen, todo = inspect.getmodule(fn), set[Callable[..., object]](), [fn]
    while todo:
        f = todo.pop()
        if f not in seen:
            seen.add(f)
            names = {n.id for n in ast.walk(_parsed(f)) if isinstance(n, ast.Name)}
            todo += [g for n in sorted(names) if inspect.isfunction(g := getattr(home, n, None)) and inspect.getmodule(g) is home]
    return sum(_lines(f) for f in seen)


def _parsed(fn: Callable[..., object]) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0]


def _lines(fn: Callable[..., object]) -> int:
    node = _parsed(fn)
    assert isinstance(node, ast.FunctionDef)
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return len([line for line in ast.unparse(node).splitlines() if line.strip()])


def line_counts() -> list[tuple[str, int, str, int, int]]:
    """(example, lines of its program, schedule, lines of the schedule, steps it took), for every pair."""
    rows = []
    for name, ex in EXAMPLES.items():
        for schedule, fn in ex.schedules.items():
            rows.append((name, line_count(ex.source), schedule, line_count(fn), len(fn(ex.make()).history)))
    return rows
