"""`weft bench torch-ops`: torch's own test inputs through weft, forward and gradient, against torch run by itself.

Every entry of torch's `op_db`, `module_db` and `optim_db` is captured on its sample inputs, with edge values (0, ties, bounds, infinities,
NaN), permuted strides and sizes 1 and 3 put into some, and is interpreted and compiled. `samples` counts samples compared; all other integers count
entries: `equal`, all samples equal torch's; `refused`, some sample was refused in words; `wrong`, some sample differs;
`crash`, some sample raised what is no WeftError or took too long. Where a sample holds infinities or NaN and torch answers NaN, an infinity
counts as equal: which of the two comes out is a matter of the order of sums. Torch has several ways to compute attention, which differ in
NaN: all results must be those of one of them. Complex results are judged by their parts. `differentiable` holds the same counts for the
OpInfos that have a gradient.
"""

from __future__ import annotations

import contextlib
import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

STATUS = ("equal", "refused", "wrong", "crash")  # from best to worst
WITHIN = {"float64": (1e-7, 1e-9), "float32": (1e-4, 1e-5), "bfloat16": (4e-2, 2e-2), "float16": (1e-2, 5e-3)}
HALF = ("torch.bfloat16", "torch.float16")
TABLES = ("op", "module", "optim")


def register(app: typer.Typer) -> None:
    @app.command("torch-ops")
    def torch_ops(
        json: Annotated[bool, typer.Option("--json", help="one JSON object on the last line")] = False,
        only: Annotated[str, typer.Option(help="entries whose name this regular expression finds: 'op add', 'module', 'optim'")] = "",
        dtype: Annotated[str, typer.Option(help="dtypes, joined by commas; edges are put into the first")] = "float64,float32,bfloat16",
        limit: Annotated[int, typer.Option(help="samples of an entry in its first dtype, before edges")] = 20,
        part: Annotated[str, typer.Option(help="2/5: the second of five parts of the entries")] = "1/1",
        jobs: Annotated[int, typer.Option(help="processes")] = 1,
        seconds: Annotated[int, typer.Option(help="a sample that takes longer is a crash")] = 20,
        verbose: Annotated[bool, typer.Option("--verbose", help="every sample that is not equal, not only the first of an entry")] = False,
    ) -> None:
        """Compare every op, module and optimizer of torch's own tests with torch itself, edge values included."""
        from weft.cli.output import console, emit

        rows = []
        for row in judged(names(only, part), dtype.split(","), limit, jobs, seconds):
            rows.append(row)
            for miss in row["misses"] if verbose else row["misses"][:1]:
                console.print(f"{row['status']:8} {row['case']}: {miss}", markup=False, soft_wrap=True, highlight=False)
        told = summary(rows)
        console.print(", ".join(f"{k} {v}" for k, v in told.items() if isinstance(v, int)), markup=False)
        if json:
            emit({"bench": "torch-ops", **told, "rows": [{**r, "misses": r["misses"][:3]} for r in rows if r["status"] != "equal"]})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts, of all entries and of each kind."""
    kinds = {
        "differentiable": [r for r in rows if r["differentiable"]],
        **{f"{t}_db": [r for r in rows if r["case"].startswith(t)] for t in TABLES},
    }
    return {**_counts(rows), **{kind: _counts(part) for kind, part in kinds.items()}, "random": [r["case"] for r in rows if r["random"]]}


def _counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    by = Counter(r["status"] for r in rows)
    return {"ops": len(rows), "samples": sum(r["samples"] for r in rows), **{s: by[s] for s in STATUS}}


def names(only: str = "", part: str = "1/1") -> list[str]:
    """The entries that are asked for, in torch's order."""
    from bench import _torch_samples as s

    found = [n for n in (*s.op_names(), *s.module_names(), *s.optim_names()) if re.search(only, n)]
    at, parts = (int(x) for x in part.split("/"))
    return found[len(found) * (at - 1) // parts : len(found) * at // parts]


def judged(cases: list[str], dtypes: list[str], limit: int, jobs: int, seconds: int) -> Iterator[dict[str, Any]]:
    """One row per entry. A process that dies takes its entry along as a crash, and the others go on."""
    if jobs <= 1:
        for case in cases:
            yield judge(case, dtypes, limit, seconds)
        return
    from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool

    left, alone = list(cases), []
    while left or alone:
        workers, lost = (jobs, False) if left else (1, False)
        with ProcessPoolExecutor(workers) as pool:
            waiting: dict[Any, str] = {}
            while not lost and (left or alone or waiting):
                while len(waiting) < workers and (left or alone and not waiting):
                    case = left.pop(0) if left else alone.pop(0)
                    waiting[pool.submit(judge, case, dtypes, limit, seconds)] = case
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    case = waiting.pop(done)
                    try:
                        yield done.result()
                    except BrokenProcessPool:
                        lost = True
                        if workers == 1:
                            yield _row(case, [("crash", "the process died")], 0)
                        else:
                            alone.append(case)
            alone += waiting.values() if lost else []


def judge(case: str, dtypes: list[str], limit: int, seconds: int = 20) -> dict[str, Any]:
    """The row of one entry."""
    from bench import _torch_samples as s

    warnings.simplefilter("ignore")
    table = case.split()[0]
    found: list[tuple[str, str]] = []
    random = 0
    if table == "optim":
        trials: Any = ((what, lambda c=c, k=k: _optimizer(c, k)) for what, c, k in s.optim_samples(s.optim_names()[case]))
    elif table == "module":
        trials = ((x.name, lambda x=x: compare(x)) for x in s.module_samples(s.module_names()[case], dtypes, limit))
    else:
        trials = ((x.name, lambda x=x: compare(x)) for x in s.op_samples(s.op_names()[case], dtypes, limit))
    for name, trial in trials:
        status, words = _tried(trial, seconds)
        random += words == "random"
        if status:
            found.append((status, words if status == "equal" else f"{name}: {words}"))
    smooth = table != "op" or s.op_names()[case].supports_autograd
    return _row(case, found, random, smooth and table == "op")


def _row(case: str, found: list[tuple[str, str]], random: int, differentiable: bool = False) -> dict[str, Any]:
    worst = max((status for status, _ in found), key=STATUS.index, default="equal")
    misses = [f"[{status}] {words}" for status, words in sorted(found, key=lambda f: -STATUS.index(f[0])) if status != "equal"]
    counts = Counter(status for status, _ in found)
    return {"case": case, "status": worst, "differentiable": differentiable, "samples": len(found), "random": random == len(found) > 0,
            "counts": {k: counts[k] for k in STATUS if counts[k]}, "misses": misses}  # fmt: skip


def _tried(trial: Any, seconds: int) -> tuple[str, str]:
    from weft.core.errors import WeftError

    try:
        with _within(seconds):
            return trial()
    except WeftError as error:
        return "refused", " | ".join(line.strip() for line in str(error).splitlines()[:4] if line.strip())
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}".split("\n")[0][:300]


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- one sample --------------------------------------------------------------------------------------------------------------------


def compare(sample: Any) -> tuple[str, str]:
    """(status, words); no status where torch itself refuses the sample."""
    import copy

    import weft
    from weft.frontend.capture import capture_step
    from weft.interp import run_global

    module = sample.module
    try:
        want, cts = _torch(copy.deepcopy(module), 0)
        random = _differs(want, _torch(copy.deepcopy(module), 1)[0])
    except Exception:
        return "", ""
    wide = _wide(module, cts) if any(str(x.dtype) in HALF for x in want.values()) else {}
    wanted = list(module.parameters())

    def step(batch: Any) -> Any:
        outs = _tensors(module())
        floats = [x for x in outs if x.is_floating_point()]
        grads = torch_grad(floats, list(module.parameters()), batch)
        return {"out": outs, "grad": grads, "buffer": []}

    optimizer = _Nothing(wanted)
    captured = capture_step(step, module, optimizer, cts)
    values = captured.inputs(cts)
    lost = any(x.is_floating_point() and not bool(x.isfinite().all()) for x in values.values())
    random = random or "seed" in captured.program.input_names
    shape_only = random or sample.only_shape
    for how, run in (("interpreted", lambda v: run_global(captured.program, v)), ("compiled", lambda v: weft.compile(captured.program)(v))):
        got = run({k: v.clone() for k, v in values.items()})
        words = _miss(want, got, shape_only, wide, lost)
        if words and all(_miss(other, got, shape_only, wide, lost) for other in _other_ways(module, want, cts)):
            return "wrong", f"{how}: {words}"
    return "equal", "random" if random else ""


def _other_ways(module: Any, want: dict[str, Any], cts: list[Any]) -> Iterator[dict[str, Any]]:
    """What torch gives by each of its own back ends for attention, where that is something else."""
    import copy

    from torch.nn.attention import SDPBackend, sdpa_kernel

    for way in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(way):
                found = _torch(copy.deepcopy(module), 0, cts)[0]
        except RuntimeError:  # no kernel for it
            continue
        if _differs(want, found):
            yield found


def _Nothing(parameters: Any) -> Any:
    """An optimizer that is never asked."""
    import torch

    return torch.optim.SGD(parameters or [torch.zeros(1, requires_grad=True)], lr=0.0)


def torch_grad(outs: Any, params: Any, cts: Any) -> Any:
    import torch

    pairs = [(o, ct) for o, ct in zip(outs, cts, strict=True)]
    if not pairs or not params:
        return []
    return list(torch.autograd.grad([o for o, _ in pairs], params, [ct for _, ct in pairs], allow_unused=True))


def _tensors(out: Any) -> list[Any]:
    """The tensors of a result, a complex one as its parts."""
    import torch
    from torch.utils._pytree import tree_leaves

    found = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]


def _torch(module: Any, seed: int, given: Any = None) -> tuple[dict[str, Any], list[Any]]:
    """What eager torch gives, the gradients of a fixed random cotangent, what is left in the buffers, and that cotangent."""
    import torch

    torch.manual_seed(seed)
    outs = _tensors(module())
    draw = torch.Generator().manual_seed(7)
    floats = [x for x in outs if x.is_floating_point()]
    cts = given or [torch.randn(x.shape, dtype=torch.float64, generator=draw).to(x.dtype) for x in floats]
    moving = [(o, ct) for o, ct in zip(floats, cts, strict=True) if o.requires_grad]
    params = list(module.parameters())
    grads = torch_grad([o for o, _ in moving], params, [ct for _, ct in moving]) or [None] * len(params)
    want = {f"out.out.{i}": x.detach() for i, x in enumerate(outs)}
    want |= {f"out.grad.{i}": torch.zeros_like(p) if g is None else g.detach() for i, (p, g) in enumerate(zip(params, grads, strict=True))}
    want |= {f"buffer.{name}": b for name, b in module.named_buffers()}
    return want, cts


def _differs(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(_apart(a[k], b[k]) is not None for k in a)


def _wide(module: Any, cts: Any) -> dict[str, Any]:
    """What torch gives for the same numbers in float64, where it can."""
    import copy

    try:
        return _torch(copy.deepcopy(module).double(), 0, [ct.double() for ct in cts])[0]
    except Exception:
        return {}


def _miss(want: dict[str, Any], got: dict[str, Any], shape_only: bool, wide: dict[str, Any], lost: bool) -> str:
    """Words on the first result that differs. In half precision it may also lie as near to float64's as torch's does, twice."""
    import torch

    for name, x in want.items():
        y = got.get(name)
        if y is None:
            if name.startswith("out.grad"):
                y = torch.zeros_like(x)
            elif name.startswith("buffer"):
                continue  # not written
            else:
                return f"{name} is missing"
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name} is {tuple(y.shape)} {y.dtype}, torch's {tuple(x.shape)} {x.dtype}"
        words = None if shape_only else _apart(x, y, wide.get(name), lost)
        if words is not None:
            return f"{name} {words}"
    return ""


def _apart(want: Any, got: Any, truth: Any = None, lost: bool = False) -> str | None:
    """Where two tensors differ, or None."""
    import torch

    if want.layout is not torch.strided:
        want, got = want.to_dense(), got.to_dense()
    if want.is_complex():  # of a buffer
        want, got = torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj())
    rtol, atol = WITHIN.get(str(want.dtype).removeprefix("torch."), (0, 0))
    if str(want.dtype) in HALF:  # what cancels is rounded as coarsely as what it is made of
        atol *= max([1.0, *want.double()[want.isfinite()].abs().flatten().tolist()])
    if want.is_floating_point():
        want, got = want.double(), got.double()
    same = torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=want.is_floating_point())
    if lost and want.is_floating_point():
        same |= want.isnan() & got.isinf()
    if truth is not None and truth.shape == want.shape and want.is_floating_point():
        same |= (got - truth).abs() <= 2 * (want - truth).abs() + rtol * truth.abs() / 4
    if same.all():
        return None
    at = int((~same).reshape(-1).nonzero()[0])
    return f"has {got.reshape(-1)[at].item()!r} at {at}, torch {want.reshape(-1)[at].item()!r}; {int((~same).sum())} of {same.numel()} differ"


# -- optimizers --------------------------------------------------------------------------------------------------------------------


def _optimizer(kind: Any, kwargs: dict[str, Any]) -> tuple[str, str]:
    """Three steps of a small layer, every value of it after each."""
    import copy

    import torch
    from torch import nn

    from weft.frontend.capture import capture
    from weft.interp import run_global

    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64)
    mine = copy.deepcopy(model)
    batches = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]

    def loss(m: Any, x: Any) -> Any:
        return m(x).square().mean()

    try:
        theirs = kind(model.parameters(), **kwargs)
        for x in batches:
            theirs.zero_grad()
            loss(model, x).backward()
            theirs.step()
    except Exception:
        return "", ""
    captured = capture(mine, batches[0], loss, kind(mine.parameters(), **kwargs))
    values = captured.inputs(batches[0])
    for i, x in enumerate(batches):
        given = {**values, "batch.0": x, "step": torch.tensor(i)}
        out = run_global(captured.program, {k: v for k, v in given.items() if k in captured.program.input_names})
        values |= {k: v for k, v in out.items() if k in values}
    for name, p in model.named_parameters():
        words = _apart(p.detach(), values[f"param.{name}"])
        if words is not None:
            return "wrong", f"{name} {words}"
    return "equal", ""
