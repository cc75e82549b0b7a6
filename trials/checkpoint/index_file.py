"""The files of a checkpoint as `torch.distributed.checkpoint` (DCP) writes and reads them, with an index in JSON.

DCP's own index, which says what a checkpoint holds and where, is a pickle: reading one that somebody else has
written runs what they like. This index holds tensors alone, so that DCP is never asked to unpickle an object
either; tensors themselves are read by `torch.load(weights_only=True)`, inside `FileSystemReader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dhen.fingerprint import file_hash
from dhen.values import Value

INDEX = "index.json"
FileName = Annotated[str, Field(pattern=r"^__\d+_\d+\.distcp$")]
"""Name of a file of tensors in a checkpoint's own folder: rank and number."""
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class SavedChunk(Value):
    """A part of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: FileName
    start: int
    """Position of the first byte in the file."""
    length: int
    """Number of bytes."""


class SavedTensor(Value):
    """A tensor; its chunks cover it."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


class CheckpointIndex(Value):
    """What a checkpoint holds, as a file."""

    tensors: dict[str, SavedTensor]
    sha256: dict[FileName, str]
    """SHA-256 of each file, from the rank that wrote it."""


class IndexedWriter(FileSystemWriter):
    """DCP's writer of files; the index that it leaves is JSON."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and hashes them: what is read back later is held against that."""
        results = super().write_data(plan, planner).wait()
        hashes = {
            name: file_hash(Path(self.path) / name)
            for name in {result.storage_data.relative_path for result in results}
        }
        hashed: Future[list[WriteResult]] = Future()
        hashed.set_result([_with_hash(result, hashes) for result in results])
        return hashed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, when all ranks have written their files."""
        places = {each.index: each.storage_data for of_rank in results for each in of_rank}
        saved = metadata.state_dict_metadata
        index = CheckpointIndex(
            tensors={name: _saved(name, saved[name], places) for name in saved},
            sha256={place.relative_path: place.sha256 for place in places.values()},
        )
        (Path(self.path) / INDEX).write_text(index.model_dump_json())


class IndexedReader(FileSystemReader):
    """DCP's reader of files; it reads the index from JSON."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, in DCP's own classes.

        Raises:
            OSError: where there is no index.
            ValueError: where the index is not one of ours.
        """
        index = CheckpointIndex.model_validate_json((Path(self.path) / INDEX).read_bytes())
        places = {
            MetadataIndex(name, chunk.offsets): _Place(chunk.file, chunk.start, chunk.length)
            for name, tensor in index.tensors.items()
            for chunk in tensor.chunks
        }
        return Metadata({name: _described(name, each) for name, each in index.tensors.items()}, None, places)


@dataclass(frozen=True)
class _Place:
    """Where a chunk's bytes are, with the names that `FileSystemReader` asks for."""

    relative_path: str
    offset: int
    length: int
    sha256: str = ""
    """Of the whole file, where it was just written."""
    transform_descriptors: None = None


def _with_hash(result: WriteResult, hashes: Mapping[str, str]) -> WriteResult:
    written = result.storage_data
    place = _Place(written.relative_path, written.offset, written.length, hashes[written.relative_path])
    return WriteResult(result.index, result.size_in_bytes, place)


def _saved(name: str, tensor: object, places: Mapping[MetadataIndex, Any]) -> SavedTensor:
    assert isinstance(tensor, TensorStorageMetadata), f"{name}: a checkpoint holds tensors alone"
    found = [(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in tensor.chunks]
    chunks = [
        SavedChunk(
            offsets=tuple(chunk.offsets),
            sizes=tuple(chunk.sizes),
            file=place.relative_path,
            start=place.offset,
            length=place.length,
        )
        for chunk, place in found
    ]
    return SavedTensor(dtype=str(tensor.properties.dtype), size=tuple(tensor.size), chunks=tuple(chunks))


def _described(name: str, tensor: SavedTensor) -> TensorStorageMetadata:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{INDEX}: {name} is of {tensor.dtype}; known are {', '.join(sorted(DTYPES))}")
    chunks = [
        ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.size), chunks
    )
