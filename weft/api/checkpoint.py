"""Checkpoints of a step: written by all ranks at once, whole or not at all, readable under any other plan.

State is saved as DTensors through torch's distributed checkpoint. A checkpoint is first a folder ending in `.partial`; only when every
rank has written is it given its name, so what has a name is complete. It says which model and plan it is of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from weft.core.dtensor import to_placements
from weft.core.errors import CheckpointError
from weft.core.layout import Layout

VERSION = 1
META = "weft.json"
NAME = re.compile(r"step-(\d+)$")


def model_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a model is to a checkpoint: the names and shapes of its tensors."""
    told = json.dumps({k: list(v) for k, v in sorted(shapes.items())})
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class Store:
    """The checkpoints in one folder, for one step."""

    def __init__(self, folder: str | Path, step: Any, keep: int = 2) -> None:
        self.folder, self.step, self.keep = Path(folder), step, keep
        self._pending: Any = None
        # ranks that write talk among themselves, beside those that train
        self._ranks = dist.new_group(backend="gloo") if dist.is_initialized() else None

    # -- writing ---------------------------------------------------------------------------------------------------------------

    def save(self, wait: bool = True) -> Path:
        """The state as it is now. Without `wait` it is written while training goes on; the next save waits for this one."""
        self.finish()
        final = self.folder / f"step-{self.step.steps:08d}"
        partial = final.with_name(final.name + ".partial")
        state = {name: x.clone() if not wait else x for name, x in self._tensors().items()}
        meta = {"version": VERSION, "model": self._hash(), "plan": str(self.step.plan), "steps": self.step.steps}
        meta["skipped"] = self.step.skipped
        self._together(final, lambda: self._clear(partial))
        if wait:
            self._together(final, lambda: dcp.save(self._distributed(state), checkpoint_id=partial, process_group=self._ranks))
            self._together(final, lambda: self._seal(partial, final, meta) if _rank() == 0 else None)
        else:
            writing = dcp.async_save(self._distributed(state), checkpoint_id=partial, process_group=self._ranks)
            if _rank() == 0:  # its part is done last, when it has heard from all
                writing = _then(writing, lambda: self._seal(partial, final, meta))
            self._pending = writing, final
        return final

    def finish(self) -> None:
        """Waits for a checkpoint that is still being written; fails if it could not be."""
        if self._pending is not None:
            future, final = self._pending
            self._pending = None
            self._together(final, future.result)

    def _clear(self, partial: Path) -> None:
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)

    def _seal(self, partial: Path, final: Path, meta: Mapping[str, Any]) -> None:
        """Every rank has written: the checkpoint says what it is and gets its name, and old ones go. The disk has all before the name."""
        with (partial / META).open("w") as f:
            f.write(json.dumps(meta))
            f.flush()
            os.fsync(f.fileno())
        _sync_folder(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _sync_folder(self.folder)
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _together(self, final: Path, work: Callable[[], Any]) -> None:
        """Done by every rank; if any cannot, what was written goes, every rank fails, and earlier checkpoints stay."""
        error = ""
        try:
            work()
        except (OSError, CheckpointException) as e:
            error = f"{_reason(e)} ({_room(self.folder)} free)"
        told = [error]
        if self._ranks is not None:
            told = [""] * dist.get_world_size()
            dist.all_gather_object(told, error, group=self._ranks)
        failed = {r: why for r, why in enumerate(told) if why}
        if failed:
            if _rank() == 0:
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
        """Every checkpoint that was written to its end, oldest first."""
        found = [d for d in self.folder.glob("step-*") if NAME.match(d.name) and (d / META).exists()]
        return sorted(found, key=lambda d: int(NAME.match(d.name)[1]))  # type: ignore[index]

    def restore(self) -> int | None:
        """The newest complete checkpoint loaded, whatever plan it was saved under; its step number, or None if there is none."""
        found = self.complete()
        if not found:
            return None
        self.load(found[-1])
        return int(self.step.steps)

    def load(self, path: Path) -> None:
        meta = self._meta(path)
        state = self._tensors()
        held = self._distributed(state)
        dcp.load(held, checkpoint_id=path, process_group=self._ranks)
        for name, x in held.items():
            local = x.to_local() if hasattr(x, "to_local") else x
            state[name].copy_(local)
        self.step.steps, self.step.losses.skipped = meta["steps"], meta.get("skipped", 0)

    def _meta(self, path: Path) -> dict[str, Any]:
        try:
            meta: dict[str, Any] = json.loads((path / META).read_text())
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path.name} is no complete checkpoint", needed=f"a folder with {META}", found=str(e)) from e
        if meta.get("version") != VERSION or meta.get("model") != self._hash():
            raise CheckpointError(
                f"{path.name} is of another model",
                needed=f"model {self._hash()}, version {VERSION}",
                found=f"model {meta.get('model')}, version {meta.get('version')}, saved under {meta.get('plan')}",
                try_="build the model with the settings it was trained with, or give another folder",
            )
        return meta

    # -- tensors ---------------------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """This rank's part of everything that changes."""
        return {n: x for n, x in self.step.state.items() if not n.startswith("constant.")}

    def _hash(self) -> str:
        inputs = self.step.program.input_names
        return model_hash({n: inputs[n].shape for n in self.step.state_names if not n.startswith("constant.")})

    def _distributed(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        return {n: as_dtensor(x, self.step.program.input_names[n].layout, self.step.compiled.device_mesh) for n, x in state.items()}


def as_dtensor(local: Tensor, layout: Layout, device_mesh: Any) -> Any:
    """A rank's part as the DTensor of the whole, over the ranks of its stage of a pipeline; alone, the tensor itself."""
    if device_mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    whole = torch.empty(layout.shape, device="meta")
    stage = tuple(a for a in layout.mesh.axes if a != "pp")
    mesh = device_mesh[stage] if len(stage) < len(layout.mesh.axes) else device_mesh
    bare = layout.release("pp") if "pp" in layout.mesh.axes else layout
    places = [p for a, p in zip(layout.mesh.axes, to_placements(bare), strict=True) if a in stage]
    return DTensor.from_local(local, mesh, places, run_check=False, shape=whole.shape, stride=whole.stride())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
    inner = [e for e, _ in getattr(error, "failures", {}).values()]
    return "; ".join(dict.fromkeys(str(e) or type(e).__name__ for e in inner)) or str(error)


def _room(folder: Path) -> str:
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
