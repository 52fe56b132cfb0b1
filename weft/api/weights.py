"""Values of a module that has none (`with torch.device("meta")`): each rank reads its slices of a Hugging Face folder, or of what the module's own
initialisation gives, one tensor or one module at a time; and writes such a folder, every tensor in full in one file, from all ranks.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from weft.core.errors import CheckpointError, RuntimeFault
from weft.core.layout import Layout
from weft.core.names import readable

CHUNK = 1 << 24  # bytes read at a time
SHARD = 5 << 30  # bytes of a file
NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
         "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
INDEX, ONE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a safetensors file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file

    def read(self, at: Sequence[range | Tensor]) -> Tensor:
        """Some of it along every dim: rows that lie side by side are read at once, a few at a time."""
        if not self.shape:
            return self._bytes(0, 1).view(self.dtype).reshape(())
        rows, inner = torch.as_tensor(at[0]), math.prod(self.shape[1:])
        few = max(1, CHUNK // max(1, inner * self.dtype.itemsize))
        out = torch.empty([len(x) for x in at], dtype=self.dtype)
        done = 0
        while done < len(rows):
            first = int(rows[done])
            many = next((k for k in range(1, min(few, len(rows) - done)) if int(rows[done + k]) != first + k), min(few, len(rows) - done))
            part = self._bytes(first * inner, many * inner).view(self.dtype).reshape(many, *self.shape[1:])
            for d, want in enumerate(at[1:], 1):
                if len(want) != self.shape[d]:
                    part = part.index_select(d, torch.as_tensor(want))
            out[done : done + many] = part
            done += many
        return out

    def _bytes(self, first: int, count: int) -> Tensor:
        size = self.dtype.itemsize
        buffer = torch.empty(count * size, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as f:
            f.seek(self.start + first * size)
            view, got = memoryview(buffer.numpy()), 0
            while got < len(view):
                n = f.readinto(view[got:])
                if not n:
                    raise CheckpointError(f"{self.path} is truncated", needed=f"{len(view)} bytes of a tensor", found=str(got))
                got += n
        return buffer


def stored_in(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file."""
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 0 < length <= 100 << 20:
            raise CheckpointError(f"{path} is no safetensors file", needed="a header of at most 100 MB", found=f"{length} bytes")
        header = json.loads(f.read(length))
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] not in NAMES:
                raise CheckpointError(f"{path} has a tensor of another kind", needed=", ".join(NAMES), found=f"{name} of {entry['dtype']}")
            out[name] = Stored(path, NAMES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
    return out


def folder_of(path: str | Path) -> dict[str, Stored]:
    """Every tensor of a Hugging Face folder, or of one file."""
    where = Path(path)
    if where.is_file():
        return stored_in(where)
    if (where / INDEX).exists():
        files = sorted(set(json.loads((where / INDEX).read_text())["weight_map"].values()))
        return {name: x for file in files for name, x in stored_in(where / Path(file).name).items()}
    if (where / ONE).exists():
        return stored_in(where / ONE)
    raise CheckpointError(f"no weights in {where}", needed=f"{INDEX} or {ONE}, as save_pretrained writes them", found="neither")


@dataclass
class Weights:
    """The values of a module's tensors by the names that programs have for them, wherever they come from."""

    model: nn.Module
    stored: Mapping[str, Stored] = field(default_factory=dict)
    seed: int = 0
    given: set[str] = field(default_factory=set)  # what a rank has already: programs made later take over its state

    def __post_init__(self) -> None:
        self.names: dict[str, list[str]] = {}  # a program's name -> the names that the module has for it, tied ones too
        by_id: dict[int, str] = {}
        for kind, every in (("param", self.model.named_parameters(remove_duplicate=False)), ("buffer", self.model.named_buffers(remove_duplicate=False))):
            for name, t in every:
                self.names.setdefault(by_id.setdefault(id(t), readable(f"{kind}.{name}")), []).append(name)

    def locals(self, wanted: Mapping[str, tuple[Layout, torch.dtype]], coords: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """This rank's slices of tensors that have no values yet; of what it has had before, only the room."""
        again = {n: torch.empty(t.local_shape(coords), dtype=d, device=device) for n, (t, d) in wanted.items() if n in self.given}
        wanted = {n: x for n, x in wanted.items() if n not in self.given}
        files = {n: x for n in wanted if (x := self._file(n)) is not None}
        out = {n: self._read(n, x, *wanted[n], coords).to(device) for n, x in files.items()}
        rest = {n: x for n, x in wanted.items() if n not in files}
        if rest:
            for name, value in self._initialised(rest):
                layout, dtype = rest[name]
                out[name] = _slice(value, layout, coords).to(device, dtype, copy=True)
        missing = [n for n in wanted if n not in out]
        if missing:
            raise _without_values(missing, bool(self.stored))
        self.given |= out.keys()
        return out | again

    def _file(self, name: str) -> Stored | None:
        prefix = f"{getattr(self.model, 'base_model_prefix', '')}."
        tried = [n for own in self.names.get(name, []) for n in (own, own.removeprefix(prefix), f"{prefix}{own}")]
        return next((self.stored[n] for n in tried if n in self.stored), None)

    def _read(self, name: str, x: Stored, layout: Layout, dtype: torch.dtype, coords: Mapping[str, int]) -> Tensor:
        if x.shape != tuple(layout.shape):
            raise CheckpointError(f"{x.path} is of another model", needed=f"{self.names[name][0]} of {list(layout.shape)}", found=str(list(x.shape)))
        sharded = [any(atom.axes for atom in dim) for dim in layout.dims]
        return x.read([layout.positions(d, coords) if sharded[d] else range(n) for d, n in enumerate(layout.shape)]).to(dtype)

    def _initialised(self, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """What the module's own initialisation gives, one submodule after another, each let go before the next: every rank draws the same.
        Where there are files, submodules that lack nothing are left out, as Hugging Face's loading does."""
        program = {own: n for n, names in self.names.items() for own in names}
        rng = torch.get_rng_state()
        torch.manual_seed(self.seed)
        try:
            for path, m in self.model.named_modules():
                own = {k: t for table in (m._parameters, m._buffers) for k, t in table.items() if t is not None and t.is_meta}
                names = {k: program[f"{path}.{k}".strip(".")] for k in own}
                init = _init_of(self.model, m) if own and (not self.stored or any(n in wanted for n in names.values())) else None
                if init is None:
                    continue
                kept = dict(m._parameters), dict(m._buffers)
                try:
                    _materialise(m)
                    with torch.no_grad():
                        init(m)
                    for k, name in names.items():
                        if name in wanted:
                            yield name, (m._parameters.get(k) if k in kept[0] else m._buffers[k]).detach()  # type: ignore[union-attr]
                finally:
                    m._parameters.update(kept[0])
                    m._buffers.update(kept[1])
        finally:
            torch.set_rng_state(rng)


def _materialise(m: nn.Module) -> None:
    """Memory for a module's own tensors; what no initialisation writes would be seen, as NaN."""
    for table in (m._parameters, m._buffers):
        for k, t in table.items():
            if t is not None and t.is_meta:
                fresh = torch.empty(t.shape, dtype=t.dtype).fill_(math.nan) if t.is_floating_point() else torch.zeros(t.shape, dtype=t.dtype)
                table[k] = nn.Parameter(fresh, requires_grad=False) if isinstance(t, nn.Parameter) else fresh


def _init_of(model: nn.Module, m: nn.Module) -> Callable[[nn.Module], Any] | None:
    """How a submodule gives its own tensors values: as Hugging Face's models say, or as torch's modules do."""
    if hasattr(model, "_init_weights"):
        return model._init_weights  # type: ignore[return-value]
    return type(m).reset_parameters if hasattr(m, "reset_parameters") else None  # type: ignore[return-value]


def _slice(value: Tensor, layout: Layout, coords: Mapping[str, int]) -> Tensor:
    for d in range(layout.rank):
        if any(a.axes for a in layout.dims[d]):
            value = value.index_select(d, layout.positions(d, coords))
    return value


def _without_values(names: Sequence[str], files: bool) -> RuntimeFault:
    return RuntimeFault(
        "the module has tensors without values",
        needed="them in weights=FOLDER, or a module that initialises itself (reset_parameters, or _init_weights of the model)",
        found=f"{names[0].partition('.')[2]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}" + (" not in the folder" if files else ""),
        try_='weft.parallelize(..., weights="folder") with model.safetensors.index.json in it',
    )


_known: weakref.WeakKeyDictionary[nn.Module, Weights] = weakref.WeakKeyDictionary()


def begin_with(model: nn.Module, folder: str | Path | None, seed: int) -> None:
    """From here on, tensors of the module that have no values get them from the folder, or by its own initialisation."""
    tensors = (*model.parameters(), *model.buffers())
    if folder is not None and not any(t.is_meta for t in tensors):
        raise RuntimeFault(
            "weights= is for a module that has no values", needed='a module made in `with torch.device("meta")`', found="one with values",
            try_="model.load_state_dict(...), or leave out weights=",
        )  # fmt: skip
    _known[model] = Weights(model, folder_of(folder) if folder is not None else {}, seed)


def weights_of(model: nn.Module) -> Weights:
    return _known[model] if model in _known else Weights(model)


# -- a folder from all ranks -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """One file of a folder to be: its tensors, in order."""

    name: str
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

    def header(self) -> bytes:
        kinds, end, entry = {d: n for n, d in NAMES.items()}, 0, {}
        for name, dtype, shape in self.tensors:
            first, end = end, end + math.prod(shape) * dtype.itemsize
            entry[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [first, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **entry}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def files_for(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], size: int = SHARD) -> list[File]:
    """Tensors grouped into files of at most so many bytes, by Hugging Face's names."""
    runs: list[list[Any]] = [[]]
    room = size
    for name, (dtype, shape) in tensors.items():
        many = math.prod(shape) * dtype.itemsize
        if runs[-1] and many > room:
            runs.append([])
            room = size
        runs[-1].append((name, dtype, shape))
        room -= many
    names = [ONE] if len(runs) == 1 else [f"model-{i + 1:05}-of-{len(runs):05}.safetensors" for i in range(len(runs))]
    return [File(name, tuple(run)) for name, run in zip(names, runs, strict=True)]


def write_folder(folder: Path, files: Sequence[File], full: Callable[[str], Tensor], rank: int, world: int) -> None:
    """Every file by one rank; a tensor is gathered when its turn comes, by all ranks, and let go."""
    for k, file in enumerate(files):
        mine: BinaryIO | None = (folder / f"{file.name}.partial").open("wb") if k % world == rank else None
        try:
            if mine is not None:
                mine.write(file.header())
            for name, dtype, _ in file.tensors:
                value = full(name)
                if mine is not None:
                    mine.write(memoryview(value.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy()))
        finally:
            if mine is not None:
                mine.close()
                os.replace(folder / f"{file.name}.partial", folder / file.name)


def write_index(folder: Path, files: Sequence[File]) -> None:
    if len(files) > 1:
        total = sum(math.prod(shape) * dtype.itemsize for f in files for _, dtype, shape in f.tensors)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": {name: f.name for f in files for name, _, _ in f.tensors}}, indent=2)
        (folder / INDEX).write_text(text + "\n")
