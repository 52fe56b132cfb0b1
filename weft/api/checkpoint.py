"""Checkpoints of a step: written by all ranks at once, completely or not at all, readable under any other plan.

State is saved through torch's distributed checkpoint, each rank its boxes of every tensor. A checkpoint is first a folder ending in `.partial`; only when every
rank has written is it given its name, so what has a name is complete. It says which model, plan and run it is of. What was damaged
since is found by its sums before anything is loaded, and the one before it is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from weft.api.storage import Boxes, Index, Reader, Writer, check_parts, digest, read_index, write_synced
from weft.core.dtensor import to_placements
from weft.core.errors import CheckpointError
from weft.core.files import read_json
from weft.core.layout import Layout
from weft.core.names import readable
from weft.runtime.agree import from_all, from_first, rank

VERSION = 2
META = "weft.json"
META_BYTES = 1 << 24
NAME = re.compile(r"step-(\d+)(\.\d+)?$")  # a second run in the folder adds a number


def model_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a model is to a checkpoint: the names and shapes of its tensors."""
    text = json.dumps({k: list(v) for k, v in sorted(shapes.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_RUNS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # the run that a step goes on with


class Store:
    """The checkpoints in one folder, for one step. The newest is the one that was written last, whatever its step number."""

    def __init__(self, folder: str | Path, step: Any, keep: int = 2) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise CheckpointError(
                "keep= is no number of checkpoints",
                needed="keep as a number of checkpoints, 1 or more",
                found=f"keep={keep!r}",
                try_="keep=2 keeps the last two of a run",
            )
        self.folder, self.step, self.keep = Path(folder), step, keep
        self._pending: Any = None
        self._damaged: set[str] = set()
        # ranks that write talk among themselves, next to those that train
        self._ranks = dist.new_group(backend="gloo") if dist.is_initialized() else None

    # -- writing ---------------------------------------------------------------------------------------------------------------

    def save(self, wait: bool = True) -> Path:
        """The state as it is now. Without `wait` it is written while training goes on; the next save waits for this one."""
        self.finish()
        if self.step.synced:
            self.step.take_written()
        final = self.folder / self._from_first(self._free_name)
        partial = final.with_name(final.name + ".partial")
        state = {name: x.clone() if not wait else x for name, x in self._tensors().items()}
        meta = {"version": VERSION, "model": self._hash(), "plan": str(self.step.plan), "steps": self.step.steps}
        meta |= {"skipped": self.step.skipped, "missed": {n: k for n, k in self.step.missed.items() if k}}
        self._all_ranks_do(final, lambda: self._clear(partial))
        writer = Writer(partial)
        if wait:
            self._all_ranks_do(final, lambda: dcp.save(self._distributed(state), storage_writer=writer, process_group=self._ranks))
            self._all_ranks_do(final, lambda: self._seal(writer, final, meta) if rank() == 0 else None)
        else:
            writing = dcp.async_save(self._distributed(state), storage_writer=writer, async_stager=writer, process_group=self._ranks)
            if rank() == 0:  # its part is done last, when it has heard from all
                writing = _then(writing, lambda: self._seal(writer, final, meta))
            self._pending = writing, final
        return final

    def finish(self) -> None:
        """Waits for a checkpoint that is still being written; fails if it could not be."""
        if self._pending is not None:
            future, final = self._pending
            self._pending = None
            self._all_ranks_do(final, future.result)

    def _free_name(self) -> str:
        """The name of this step, but none that something else has than a checkpoint of this run."""
        name, n = f"step-{self.step.steps:08d}", 1
        while (found := self.folder / name).exists() and (_run_of(found) or "") != _RUNS.get(self.step):
            n += 1
            name = f"step-{self.step.steps:08d}.{n}"
        return name

    def _clear(self, partial: Path) -> None:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for gone in self.folder.glob("step-*.superseded"):
                shutil.rmtree(gone, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)

    def _seal(self, writer: Writer, final: Path, meta: Mapping[str, Any]) -> None:
        """Every rank has written: the checkpoint says what it is and gets its name, and old ones go. The disk has all before the name."""
        run = _RUNS.setdefault(self.step, uuid.uuid4().hex)
        order = 1 + max((_order(d) for d in self._named() if _order(d) < math.inf), default=0)
        write_synced(writer.folder / META, sealed({**meta, "run": run, "order": int(order), "index": writer.index}))
        _sync_folder(writer.folder)
        before = final.with_name(final.name + ".replaced")
        if final.exists():
            shutil.rmtree(before, ignore_errors=True)
            os.replace(final, before)
        os.replace(writer.folder, final)
        _sync_folder(self.folder)
        shutil.rmtree(before, ignore_errors=True)
        self._damaged.discard(final.name)
        self._drop_superseded(run)

    def _drop_superseded(self, run: str) -> None:
        """Of the checkpoints of this run the last few stay; those of other runs are not ours to delete."""
        own = [d for d in self.complete() if d.name not in self._damaged and _run_of(d) == run]
        for old in own[: -self.keep]:
            gone = old.with_name(old.name + ".superseded")
            os.replace(old, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _all_ranks_do(self, final: Path, work: Callable[[], Any]) -> None:
        """Done by every rank; if any cannot, what was written goes, every rank fails, and earlier checkpoints stay."""
        error = ""
        try:
            work()
        except (OSError, CheckpointException) as e:
            error = f"{_reason(e)} ({_free_disk_bytes(self.folder)} free)"
        failed = {r: why for r, why in enumerate(from_all(error, self._ranks)) if why}
        if failed:
            if rank() == 0:
                shutil.rmtree(final.with_name(final.name + ".partial"), ignore_errors=True)
            if self._ranks is not None:
                dist.barrier(self._ranks)
            left = self.complete()
            raise CheckpointError(
                f"the checkpoint {final.name} could not be written",
                needed=f"room and leave to write in {self.folder}",
                found="; ".join(f"rank {r}: {why}" for r, why in list(failed.items())[:4]),
                try_=f"free some room; the last complete checkpoint is {left[-1].name if left else 'none'}",
            )

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def complete(self) -> list[Path]:
        """Every checkpoint that was written to its end, in the order in which they were."""
        return [d for d in self._named() if (d / META).exists()]

    def restore(self) -> int | None:
        """The newest complete checkpoint, loaded, whatever plan it was saved under; its step number, or None if there is none."""
        self.finish()
        refused: dict[str, str] = {}
        for name in reversed(self._from_first(self._found)):
            if not (why := self._take(self.folder / name)):
                self._tell(name, refused)
                return int(self.step.steps)
            refused[name] = why
        if refused:
            raise _refusal(f"{self.folder} has no complete checkpoint", refused)
        return None

    def load(self, path: str | Path) -> None:
        """One checkpoint. It is looked through before anything is changed."""
        path = Path(path)
        if why := self._take(path):
            raise _refusal(f"{path.name} is no complete checkpoint", {path.name: why})

    def _found(self) -> list[str]:
        """The names of all checkpoints, the newest last. One whose successor never got its name is given it back."""
        for before in self.folder.glob("step-*.replaced"):
            if not (final := before.with_suffix("")).exists():
                with contextlib.suppress(OSError):
                    os.replace(before, final)
        return [d.name for d in self._named()]

    def _named(self) -> list[Path]:
        found = [d for d in self.folder.glob("step-*") if NAME.match(d.name) and d.is_dir()]
        return sorted(found, key=lambda d: (_order(d), _number(d)))

    def _take(self, path: Path) -> str:
        """Loads a checkpoint if every rank finds its share of it complete; else why not."""
        opened, why = self._open(path)
        if why or opened is None:
            return why
        meta, index = opened
        if meta["model"] != self._hash():
            raise CheckpointError(
                f"{path.name} is of another model",
                needed=f"model {self._hash()}",
                found=f"model {meta['model']}, saved under {meta['plan']}",
                try_="build the model with the settings it was trained with, or give another folder",
            )
        later = {n: (saved.shape, saved.dtype) for n, saved in index.items() if n not in self.step.state_names and n not in self.step.idle()}
        state = {n: x for n, x in self._tensors().items() if n in index} | {n: self._full_tensor(*kind) for n, kind in later.items()}
        try:
            dcp.load(self._distributed(state), storage_reader=Reader(path, index), process_group=self._ranks)
        except (CheckpointException, OSError, ValueError) as error:
            return _reason(error)
        self.step.keep_for_later({n: state[n] for n in later})
        new = {p for n, p in self.step.captured.states.items() if n not in index}
        self.step.resume(meta["steps"], meta["skipped"], {**meta["missed"], **dict.fromkeys(new, meta["steps"] - meta["skipped"])})
        _RUNS[self.step] = meta["run"]
        return ""

    def _open(self, path: Path) -> tuple[tuple[dict[str, Any], Index] | None, str]:
        """What a checkpoint is and has, and why it must not be loaded. Each rank looks through a share of the bytes."""
        opened, why = None, ""
        try:
            meta = read_meta(path)
            index = read_index(path, meta["index"])
            opened = meta, index
            ranks = 1 if self._ranks is None else dist.get_world_size(self._ranks)
            check_parts(path, [p for saved in index.values() for p in saved.parts][rank() :: ranks])
        except (OSError, ValueError) as error:
            why = _reason(error)
        return opened, "; ".join(dict.fromkeys(filter(None, from_all(why, self._ranks))))

    def _tell(self, name: str, refused: Mapping[str, str]) -> None:
        """One line on what was passed over, unless that is older than the one taken."""
        self._damaged |= set(refused)
        newer = {n: why for n, why in refused.items() if _order(self.folder / n) < math.inf or _number(Path(n)) > self.step.steps}
        if newer and rank() == 0:
            text = "; ".join(f"{n}: {why}" for n, why in newer.items())
            print(f"weft: {name} is restored, the last good checkpoint in {self.folder} ({text})", file=sys.stderr)

    # -- ranks -----------------------------------------------------------------------------------------------------------------

    def _from_first(self, ask: Callable[[], Any]) -> Any:
        """What the first rank finds in the folder: the others may see it later, or see another one."""
        answer, failed = None, ""
        if rank() == 0:
            try:
                answer = ask()
            except OSError as error:
                failed = _words(error)
        answer, failed = from_first((answer, failed), self._ranks)
        if failed:
            raise CheckpointError(f"{self.folder} cannot be read", needed="a folder that may be read and written", found=failed)
        return answer

    # -- tensors ---------------------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """This rank's part of everything that changes, and what of the model no program has read yet."""
        return {n: x for n, x in self.step.local_state.items() if n not in self.step.captured.constants} | self.step.idle()

    def _own(self) -> dict[str, Tensor]:
        model = self.step.model
        return {readable(f"{kind}.{n}"): x for kind, of in (("param", model.named_parameters()), ("buffer", model.named_buffers())) for n, x in of}

    def _full_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.step.compiled.device)

    def _hash(self) -> str:
        """Of the model's tensors, whichever of them a program reads, and of the kinds of state its optimizer keeps."""
        kinds = {n.removesuffix(p.removeprefix("param")): () for n, p in self.step.captured.states.items()}
        return model_hash({n: tuple(x.shape) for n, x in self._own().items()} | kinds)

    def _distributed(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """The tensors as parts of the full ones, in place."""
        mesh, known = self.step.program.mesh, self.step.state_names
        layouts = {n: self.step.layout_of(n).layout if n in known else Layout.of(mesh, tuple(x.shape)) for n, x in state.items()}
        return {n: Boxes.of(x, layouts[n], self.step.compiled.coords) for n, x in state.items()}


# -- what a checkpoint says of itself ----------------------------------------------------------------------------------------------


def sealed(meta: Mapping[str, Any]) -> str:
    """The text of weft.json, which ends with the digest of the rest."""
    return json.dumps({**meta, "sum": _sum(meta)})


def read_meta(path: Path) -> dict[str, Any]:
    """What weft.json says, if it is as it was written."""
    if (path / ".metadata").exists():
        raise ValueError(OLD)
    meta = read_json(path / META, META_BYTES)
    if not isinstance(meta, dict):
        raise ValueError(f"{META} is not an object")
    if meta.get("version") == 1:
        raise ValueError(OLD)
    if meta.get("version") != VERSION:
        raise ValueError(f"{META} is of version {meta.get('version')!r}, not {VERSION}")
    for name, kind in {"model": str, "plan": str, "steps": int, "skipped": int, "run": str, "order": int, "index": str}.items():
        value = meta.get(name)
        if type(value) is not kind or (kind is int and not 0 <= value < 1 << 53):
            raise ValueError(f"{META} has {name} = {value!r:.60}")
    missed = meta.get("missed")
    if not isinstance(missed, dict) or any(type(x) is not int or not 0 < x < 1 << 53 for x in missed.values()):
        raise ValueError(f"{META} has missed = {missed!r:.60}")
    if meta.pop("sum", None) != _sum(meta):
        raise ValueError(f"{META} was changed")
    return meta


def reader(path: str | Path) -> Reader:
    """A checkpoint for `torch.distributed.checkpoint.load(state, storage_reader=reader(path))`, without weft's step."""
    folder = Path(path)
    try:
        return Reader(folder, read_index(folder, read_meta(folder)["index"]))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read", needed="a complete checkpoint of weft", found=_reason(error)) from error


OLD = "written by weft 0.1, whose index is a pickle and could run anything"


def _sum(meta: Mapping[str, Any]) -> str:
    return digest(json.dumps({k: meta[k] for k in sorted(meta) if k != "sum"}))


def _order(path: Path) -> float:
    """When it was written, counted in the checkpoints of the folder; infinite where it does not say."""
    try:
        return int(read_meta(path)["order"])
    except (OSError, ValueError) as error:
        return -1 if str(error) == OLD else math.inf


def _run_of(path: Path) -> str | None:
    try:
        return str(read_meta(path)["run"])
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int:
    found = NAME.match(path.name)
    return int(found[1]) if found else 0


def _refusal(headline: str, refused: Mapping[str, str]) -> CheckpointError:
    if set(refused.values()) == {OLD}:
        return CheckpointError(
            f"{headline}: weft 0.1 wrote it",
            needed="checkpoints written by weft 0.2 or later",
            found=OLD,
            try_="with weft 0.1: restore it, step.sync_model(), and keep model.state_dict(); load that into the model before parallelize",
        )
    text = [f"{name}: {why}" for name, why in list(refused.items())[:4]]
    return CheckpointError(
        headline,
        needed="one that was written to its end and not changed since",
        found="; ".join(text) + (f"; and {len(refused) - 4} more" if len(refused) > 4 else ""),
        try_="bring the folder back from a copy, or give another one to start anew",
    )


# -- tensors and files ---------------------------------------------------------------------------------------------------------------


def as_dtensor(local: Tensor, layout: Layout, device_mesh: Any) -> Any:
    """A rank's part as the DTensor of the full tensor, over the ranks of its stage of a pipeline; alone, the tensor itself."""
    if device_mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    full = torch.empty(layout.shape, device="meta")
    stage = tuple(a for a in layout.mesh.axes if a != "pp")
    mesh = device_mesh[stage] if len(stage) < len(layout.mesh.axes) else device_mesh
    bare = layout.release("pp") if "pp" in layout.mesh.axes else layout
    places = [p for a, p in zip(layout.mesh.axes, to_placements(bare), strict=True) if a in stage]
    return DTensor.from_local(local, mesh, places, run_check=False, shape=full.shape, stride=full.stride())


def _then(first: Future[Any], work: Callable[[], None]) -> Future[Any]:
    """What is done when something else has been, by whichever thread did it."""
    out: Future[Any] = Future()

    def go(done: Future[Any]) -> None:
        try:
            done.result()
            out.set_result(work())
        except BaseException as e:
            out.set_exception(e)

    first.add_done_callback(go)
    return out


def _reason(error: BaseException) -> str:
    """What went wrong, without the traceback; torch gathers the failures of all ranks into one."""
    inner = [e for e, _ in getattr(error, "failures", {}).values()] or [error]
    return "; ".join(dict.fromkeys(_words(e) for e in inner))


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else error.strerror
    return str(error).split("\n", 1)[0] or type(error).__name__


def _free_disk_bytes(folder: Path) -> str:
    """What is left on the disk: torch does not always say that it is full."""
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB"
    except OSError:
        return "nothing known"


def _sync_folder(folder: Path) -> None:
    """Names are on the disk too, where folders can be synchronised."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
