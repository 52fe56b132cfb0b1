"""The tensors of a checkpoint on disk: a safetensors file from every rank, and an index in JSON with a checksum of every part.

torch's distributed checkpoint plans who writes and reads which part; what is on disk is bytes and JSON, so reading it runs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.core.errors import CheckpointError
from weft.core.files import read_json
from weft.core.layout import Layout
from weft.runtime.agree import rank

INDEX = "index.json"
INDEX_BYTES = 1 << 30
BLOCK = 16 << 20  # bytes summed and written at a time
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredPart:
    """A box of a tensor, and where its bytes are."""

    file: str
    at: int
    nbytes: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    crc: int


@dataclass(frozen=True)
class Saved:
    """One tensor as it was saved: its parts tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


Index = Mapping[str, Saved]


class Boxes(Tensor):
    """A rank's part of a tensor as torch's distributed checkpoint takes it: the boxes of the full tensor that it holds, one or, of a sharding inside a dim,
    several. Itself it is empty; torch looks for boxes in tensors only."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    complete: torch.Size
    parts: dict[torch.Size, Tensor]

    @staticmethod
    def of(local: Tensor, layout: Layout, coords: Mapping[str, int]) -> Boxes:
        made = Tensor._make_subclass(Boxes, torch.empty(0, dtype=local.dtype))
        made.complete, made.parts = torch.Size(layout.shape), {}
        for runs in itertools.product(*(_runs(layout.positions(d, coords).tolist()) for d in range(layout.rank))):
            part = local.detach()[tuple(slice(at, at + size) for _, at, size in runs)]
            made.parts[torch.Size(start for start, _, _ in runs)] = part
        return made

    def size(self, dim: int | None = None) -> Any:
        return self.complete if dim is None else self.complete[dim]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(MetadataIndex(fqn, at), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(x), self.complete))
            for chunk, (at, x) in zip(self.__create_chunk_list__(), self.parts.items(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, x.shape) for at, x in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.parts[torch.Size(index.offset or ())]


def _runs(positions: list[int]) -> list[tuple[int, int, int]]:
    """Ascending positions as runs of neighbours: where each begins in the full tensor and here, and how long it is."""
    begins = [i for i, x in enumerate(positions) if i == 0 or x != positions[i - 1] + 1]
    return [(positions[a], a, b - a) for a, b in itertools.pairwise([*begins, len(positions)])]


# --- writing


class Writer(StorageWriter):
    """Writes this rank's parts into a folder; on the first rank `index` has then the digest of the index of all."""

    should_synchronize_after_execute = _synchronize_after_execute = False

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, ""

    def stage(self, state: Any) -> Any:
        """What is written while training goes on is a copy already."""
        return state

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...

    def reset(self, checkpoint_id: Any = None) -> None:
        self.index = ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        file = f"rank-{rank():05d}.safetensors"
        done = _write(self.folder / file, plan.items, planner) if plan.items else []
        out: Future[list[WriteResult]] = Future()
        out.set_result(done)
        return out

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: dict[str, list[StoredPart]] = {}
        for result in (r for own in results for r in own):
            parts.setdefault(result.index.fqn, []).append(result.storage_data)
        known = metadata.state_dict_metadata
        index = {n: Saved(known[n].properties.dtype, tuple(known[n].size), tuple(parts[n])) for n in sorted(parts)}
        text = json.dumps({name: _saved_description(saved) for name, saved in index.items()})
        write_synced(self.folder / INDEX, text)
        self.index = digest(text)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def write_synced(path: Path, text: str) -> None:
    """A small file that is on the disk when this returns."""
    with path.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, items: Iterable[Any], planner: Any) -> list[WriteResult]:
    """The parts one after another behind a safetensors header, and where each is."""
    chunks = [(item, item.tensor_data.chunk) for item in items]
    sizes = [math.prod(chunk.sizes) * _dtype(item).itemsize for item, chunk in chunks]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    header = _header(chunks, ends, sizes)
    results = []
    with path.open("wb") as f:
        f.write(header)
        for (item, chunk), nbytes, end in zip(chunks, sizes, ends, strict=True):
            crc = _put(f, planner.resolve_data(item))
            part = StoredPart(path.name, len(header) + end - nbytes, nbytes, tuple(chunk.offsets), tuple(chunk.sizes), crc)
            results.append(WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=part))
        f.flush()
        os.fsync(f.fileno())
    return results


def _header(chunks: Iterable[tuple[Any, Any]], ends: list[int], sizes: list[int]) -> bytes:
    entry = {
        _box(item.index.fqn, item.tensor_data.size, chunk): {
            "dtype": NAMES[_dtype(item)], "shape": list(chunk.sizes), "data_offsets": [end - nbytes, end],
        }
        for (item, chunk), nbytes, end in zip(chunks, sizes, ends, strict=True)
    }  # fmt: skip
    text = json.dumps(entry).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _box(name: str, shape: Any, chunk: Any) -> str:
    """`w` for the full tensor, `w[0:4,8:16]` for a part of it."""
    if list(shape) == list(chunk.sizes):
        return name
    return f"{name}[{','.join(f'{a}:{a + n}' for a, n in zip(chunk.offsets, chunk.sizes, strict=True))}]"


def _dtype(item: Any) -> torch.dtype:
    dtype: torch.dtype = item.tensor_data.properties.dtype
    if dtype not in NAMES:
        raise CheckpointError(f"{item.index.fqn} cannot be saved", needed="a dtype that safetensors has", found=str(dtype))
    return dtype


def _put(f: BinaryIO, value: Tensor) -> int:
    raw = memoryview(_bytes(value.detach().cpu().contiguous()).numpy())
    crc = 0
    for at in range(0, len(raw), BLOCK):
        crc = zlib.crc32(raw[at : at + BLOCK], crc)
        f.write(raw[at : at + BLOCK])
    return crc


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _saved_description(saved: Saved) -> dict[str, Any]:
    parts = [{**vars(p), "start": list(p.start), "sizes": list(p.sizes)} for p in saved.parts]
    return {"dtype": NAMES[saved.dtype], "shape": list(saved.shape), "parts": parts}


# --- reading: whatever is wrong is a ValueError or an OSError


def read_index(folder: Path, wanted: str) -> Index:
    """The index of a checkpoint, if it has that digest."""
    with (folder / INDEX).open("rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != wanted:
            raise ValueError(f"{INDEX} was changed")
    return {name: _saved(entry) for name, entry in read_json(folder / INDEX, INDEX_BYTES).items()}


def _saved(entry: Any) -> Saved:
    try:
        parts = tuple(StoredPart(p["file"], p["at"], p["nbytes"], tuple(p["start"]), tuple(p["sizes"]), p["crc"]) for p in entry["parts"])
        saved = Saved(DTYPES[entry["dtype"]], tuple(entry["shape"]), parts)
        fits = all(_fits(p, saved) for p in parts) and sum(math.prod(p.sizes) for p in parts) == math.prod(saved.shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{INDEX} is not an index ({error})") from None
    if not fits:
        raise ValueError(f"{INDEX} has parts that do not make up a tensor")
    return saved


def _fits(part: StoredPart, full: Saved) -> bool:
    """Inside the tensor, as many bytes as that is, in a file of this folder."""
    inside = all(0 <= a <= a + n <= size for a, n, size in zip(part.start, part.sizes, full.shape, strict=True))
    return inside and part.nbytes == math.prod(part.sizes) * full.dtype.itemsize and part.at >= 0 and Path(part.file).name == part.file


def check_parts(folder: Path, parts: Iterable[StoredPart]) -> None:
    """Fails unless every part has the bytes that were written."""
    for part in parts:
        crc, left = 0, part.nbytes
        for block in _blocks(folder, part):
            crc, left = zlib.crc32(block, crc), left - len(block)
        _require_checksum(part, crc, left)


def _blocks(folder: Path, part: StoredPart) -> Iterator[bytes]:
    with (folder / part.file).open("rb") as f:
        f.seek(part.at)
        left = part.nbytes
        while left > 0 and (block := f.read(min(left, BLOCK))):
            left -= len(block)
            yield block


def _require_checksum(part: StoredPart, crc: int, left: int) -> None:
    if left:
        raise ValueError(f"{part.file} is truncated:  {left} bytes are missing")
    if crc != part.crc:
        raise ValueError(f"{part.file} was changed between bytes {part.at} and {part.at + part.nbytes}")


class Reader(StorageReader):
    """Reads parts of an index into tensors, checking each once more as it is read."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._at = {MetadataIndex(name, part.start): (saved, part) for name, saved in index.items() for part in saved.parts}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any) -> Metadata:
        return Metadata({name: _described(saved) for name, saved in self.index.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        for item in plan.items:
            saved, part = self._at[item.storage_index]
            box = _part(self.folder, part, saved.dtype)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                box = box.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(box)
            planner.commit_tensor(item, target)
        out: Future[None] = Future()
        out.set_result(None)
        return out

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _described(saved: Saved) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.start), torch.Size(p.sizes)) for p in saved.parts]
    return TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)


def _part(folder: Path, part: StoredPart, dtype: torch.dtype) -> Tensor:
    raw = bytearray(part.nbytes)
    with (folder / part.file).open("rb") as f:
        f.seek(part.at)
        got = f.readinto(raw)
    _require_checksum(part, zlib.crc32(raw), part.nbytes - got)
    flat = torch.frombuffer(raw, dtype=dtype) if part.nbytes else torch.empty(0, dtype=dtype)
    return flat.reshape(part.sizes)
