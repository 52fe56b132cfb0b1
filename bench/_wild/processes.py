"""Processes of `weft bench wild`: a case in one of its own, which asks torch, then forks the ranks of every plan from what it has imported.

A rank that dies, hangs or raises ends its run and no other; every process ends with the one that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bench._wild.judge import Case, Run, Truth, build, judged, miss, state_of, told_nothing, train

Row = dict[str, Any]
FORK = multiprocessing.get_context("fork")
GRACE = 3.0  # seconds that a rank has to say what it saw after another has failed
HUNG = ("did not reach", "no rank goes on")
DIED = ("died before", "ended with")


def rows_of(cases: Mapping[str, Callable[[], Any]], wanted: Mapping[str, Sequence[str]], jobs: int, timeout: float) -> Iterator[Row]:
    """A row for every case and the plans wanted of it, as they come; `jobs` cases at a time."""
    waiting, running = list(wanted), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[name] = Running(name, cases[name], wanted[name], timeout)
            for name, case in list(running.items()):
                yield from case.rows()
                if case.done:
                    case.end()
                    del running[name]
            time.sleep(0.02)
    finally:
        for case in running.values():
            case.end()


class Running:
    """One case in a process of its own, and the rows it has not told yet."""

    def __init__(self, name: str, make: Callable[[], Any], plans: Sequence[str], timeout: float) -> None:
        self.name, self.left, self.done = name, list(plans), False
        self.timeout, self.start = timeout, time.monotonic()
        self.pipe, theirs = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_case, args=(name, make, plans, timeout, theirs))
        self.process.start()
        theirs.close()

    def rows(self) -> Iterator[Row]:
        """What has been told since; where the process ends early or says nothing, so says a row of every plan left."""
        ended = False
        while self.left and not ended and self.pipe.poll():
            try:
                row = self.pipe.recv()
            except EOFError:
                ended = True
            else:
                self.left.remove(row["plan"])
                self.start = time.monotonic()
                yield row
        if self.left and ended:
            self.process.join()
            yield from self._give_up("torch", f"the process that ran torch ended with {self.process.exitcode}")
        elif self.left and time.monotonic() - self.start > 2 * self.timeout + 60:
            yield from self._give_up("timeout", f"no word for {2 * self.timeout + 60:g} s")
        self.done = not self.left

    def _give_up(self, status: str, words: str) -> Iterator[Row]:
        for plan in self.left:
            yield {"case": self.name, "plan": plan, "status": status, "error": words, "words": ""}
        self.left = []

    def end(self) -> None:
        if self.left:
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _case(name: str, make: Callable[[], Any], plans: Sequence[str], timeout: float, pipe: Any) -> None:
    """In the case's own process: torch first, then every plan."""
    _die_with_parent()
    with tempfile.TemporaryDirectory() as folder:
        _quietly(Path(folder) / "said")
        try:
            truth = judged(make)
        except BaseException as e:
            for plan in plans:
                pipe.send({"case": name, "plan": plan, "status": "torch", "error": told(e), "words": ""})
        else:
            for plan in plans:
                pipe.send({"case": name, "plan": plan, **_row(truth, plan, timeout)})
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


def _row(truth: Truth, plan: str, timeout: float) -> Row:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = _run(truth, plan, timeout, Path(folder))
    return {**verdict(truth, found), "seconds": round(time.monotonic() - start, 1)}


def verdict(truth: Truth, found: Row) -> Row:
    """The row of a run. What a rank did before it was refused is compared as well: a wrong loss is no refusal."""
    wrong = next((w for run in found["runs"] if (w := miss(truth, run))), None) if found["status"] in ("ok", "refused") else None
    note = truth.note
    if silent := told_nothing(truth):
        wrong, note = None, silent
    if wrong:
        return {"status": "wrong", "error": wrong, "words": note}
    return {"status": found["status"], "error": found.get("error", ""), "words": found.get("words") or note}


# -- the ranks of one run -----------------------------------------------------------------------------------------------------------


def world_of(plan: str) -> int:
    """Processes that a plan is for: as many as its degrees say, two for `auto`."""
    from weft.plan.spec import Spec

    return 2 if plan == "auto" else Spec.parse(plan).mesh.ranks


def _run(truth: Truth, plan: str, timeout: float, folder: Path) -> Row:
    """One training under a plan: what its ranks told, or how they failed. The first failure is the cause of the others."""
    world = world_of(plan)
    ranks = [FORK.Process(target=_rank, args=(truth, plan, r, world, timeout, folder), daemon=True) for r in range(world)]
    for process in ranks:
        process.start()
    end, failed = time.monotonic() + timeout, 0.0
    while any(p.is_alive() for p in ranks) and time.monotonic() < (min(end, failed + GRACE) if failed else end):
        if not failed and (any(folder.glob("failed*")) or any(p.exitcode for p in ranks)):
            failed = time.monotonic()
        time.sleep(0.01)
    ran_out = any(p.is_alive() for p in ranks)
    codes = [p.exitcode for p in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return _outcome(folder, world, ran_out, codes, timeout)


def _outcome(folder: Path, world: int, ran_out: bool, codes: list[int | None], timeout: float) -> Row:
    failures = sorted((torch.load(f, weights_only=False) for f in folder.glob("failed*")), key=lambda f: f["at"])
    runs = [Run(f["losses"], {}) for f in failures]
    died = [(r, code) for r, code in enumerate(codes) if code and not (folder / f"failed{r}").exists()]
    if died and not (failures and failures[0]["status"] != "refused"):
        rank, code = died[0]
        said = " ".join((folder / f"said{rank}").read_text(errors="replace").split())[-300:]
        return {"status": "crash", "error": f"rank {rank} ended with {_signal(code)}: {said}", "runs": runs}
    if failures:
        return {**failures[0], "runs": runs}
    if ran_out:
        return {"status": "timeout", "error": f"no answer in {timeout:g} s", "runs": []}
    return {"status": "ok", "runs": [torch.load(folder / f"run{r}", weights_only=False) for r in range(world)]}


def _signal(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def _rank(truth: Truth, plan: str, rank: int, world: int, timeout: float, folder: Path) -> None:
    """In a rank's process: the same training through weft, and what came of it in a file."""
    _die_with_parent()
    _quietly(folder / f"said{rank}")
    losses: list[float] = []
    try:
        if world > 1:
            import torch.distributed as dist

            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
        case = build(truth.make, truth.double)
        _trained(case, plan, losses)
        _write(Run(losses, state_of(case.model)), folder / f"run{rank}")
        if world > 1:
            dist.barrier()
    except BaseException as e:
        _write({**failure(e), "losses": losses, "at": time.monotonic()}, folder / f"failed{rank}")
    os._exit(0)


def _trained(case: Case, plan: str, losses: list[float]) -> None:
    from weft.api.parallelize import parallelize

    step = parallelize(case.model, case.loss, case.optimizer, case.batches[0], plan=plan, on_nan="ignore")
    train(case, step, losses)
    step.sync_model()


def failure(e: BaseException) -> Row:
    """A WeftError is a refusal in words, unless it tells of ranks that hang or died; all else is a crash."""
    from weft.core.errors import RuntimeFault, WeftError

    first = str(e).splitlines()[0] if str(e) else ""
    if not isinstance(e, WeftError):
        return {"status": "crash", "error": told(e)}
    if isinstance(e, RuntimeFault) and any(word in first for word in HUNG + DIED):
        return {"status": "timeout" if any(word in first for word in HUNG) else "crash", "error": told(e)}
    found = f" (found: {e.found.splitlines()[0]})" if e.found else ""
    return {"status": "refused", "error": "", "words": f"{type(e).__name__}: {first}{found}"[:400]}


def told(e: BaseException) -> str:
    """An exception on one line, with the last places it came through."""
    first = next((line for line in str(e).splitlines() if line.strip()), "")
    frames = traceback.extract_tb(e.__traceback__)[-3:]
    return f"{type(e).__name__}: {first[:300]} ({' < '.join(f'{Path(f.filename).name}:{f.lineno} {f.name}' for f in reversed(frames))})"


def _write(value: Any, path: Path) -> None:
    torch.save(value, path.with_name(f"part-{path.name}"))
    os.replace(path.with_name(f"part-{path.name}"), path)


def _quietly(path: Path) -> None:
    """What a process prints goes to a file: rows alone are shown."""
    with path.open("w") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)


def _die_with_parent() -> None:
    """End when the process that forked this one ends, however it does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# -- imports, once ------------------------------------------------------------------------------------------------------------------


def warm(imports: Iterable[str]) -> None:
    """Import here what a first training imports, so that no process does it again. A child finds out what that is."""
    torch.set_num_threads(1)
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_imports, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    try:
        names = ours.recv()
    except EOFError:
        names = []
    child.join()
    for name in (*imports, *names):
        with suppress(Exception):  # a module that was made by hand, not found by name
            __import__(name)


def _imports(pipe: Any) -> None:
    _die_with_parent()
    before = set(sys.modules)

    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        return model, lambda m, b: m(b).square().mean(), [torch.ones(4, 4)]

    with tempfile.TemporaryDirectory() as folder:
        _quietly(Path(folder) / "said")
        _trained(build(make, double=True), "dp1", [])
    pipe.send(sorted(set(sys.modules) - before))
    os._exit(0)
