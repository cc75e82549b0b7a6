"""The files of a checkpoint as `torch.distributed.checkpoint` (DCP) writes and reads them, with an index in JSON.

DCP's own index, which says what a checkpoint holds and where, is a pickle: reading one that somebody else has
written runs what they like. This index holds tensors alone, so that DCP is never asked to unpickle an object
either; tensors themselves are read by `torch.load(weights_only=True)`, inside `FileSystemReader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dhen.errors import UserError
from dhen.values import PathBelow, Value, file_hash
from trials.records.places import checkpoints_in, steps_of
from trials.records.strategy import Ranks

# Pieces of one long vector, as `torch.distributed.checkpoint` (DCP) saves and loads them.
#
# Every strategy holds the dense part as ranges of the same vectors: all dense weights one after another, in the
# order of `named_parameters`, and AdamW's two moments of them. Plain DP has them whole, ZeRO-1 one range of the
# moments, `fully_shard` one range of each weight (shards are along the first dimension). Saved as such, what one
# strategy wrote is read by any other, on any number of ranks: DCP works out which ranges overlap.


class Piece(NamedTuple):
    """A range of the vector that this rank holds; several ranks may hold the same range."""

    start: int
    values: Tensor
    """The range as a one-dimensional view of what trains: loading into it changes what trains."""


@dataclass(frozen=True)
class FlatPieces:
    """This rank's pieces of a vector; the pieces of all ranks cover it."""

    length: int
    """Length of the vector."""
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, values: Tensor) -> FlatPieces:
        """Returns a vector that this rank has whole."""
        return cls(len(values), (Piece(0, values),))

    def size(self) -> torch.Size:
        """Returns the size of the vector, which DCP compares with the checkpoint's."""
        return torch.Size([self.length])

    @cached_property
    def by_offset(self) -> dict[torch.Size | None, Tensor]:
        """The pieces as DCP asks for them; a rank may have thousands."""
        return {torch.Size([start]): values for start, values in self.pieces}

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Says what there is to write (DCP's protocol)."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(values), size=self.size()
                ),
            )
            for chunk, (_, values) in zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Says what there is to read (DCP's protocol)."""
        return [
            ChunkStorageMetadata(offsets=torch.Size([start]), sizes=values.size())
            for start, values in self.pieces
        ]


class VectorSavePlanner(DefaultSavePlanner):
    """DCP's own planner for saving, which also finds pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns what is written under this index."""
        value = self.state_dict[index.fqn]
        return (
            value.by_offset[index.offset] if isinstance(value, FlatPieces) else super().lookup_object(index)
        )


class VectorLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner for loading, which also finds pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Replaces DCP's own set-up, which would search every value for tensors without memory; there are none."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the tensor to read into."""
        value = self.state_dict[index.fqn]
        return (
            value.by_offset[index.offset] if isinstance(value, FlatPieces) else super().lookup_tensor(index)
        )


INDEX = "index.json"
FileName = Annotated[str, Field(pattern=r"^__\d+_\d+\.distcp$")]
"""Name of a file of tensors in a checkpoint's own folder: rank and number."""
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class ChunkEntry(Value):
    """A part of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: FileName
    start: int
    """Position of the first byte in the file."""
    length: int
    """Number of bytes."""


class TensorEntry(Value):
    """A tensor; its chunks cover it."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]


class CheckpointIndex(Value):
    """What a checkpoint holds, as a file."""

    tensors: dict[str, TensorEntry]
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
        written = ((result, result.storage_data) for result in results)
        hashed.set_result(
            [
                WriteResult(
                    result.index,
                    result.size_in_bytes,
                    _Place(place.relative_path, place.offset, place.length, hashes[place.relative_path]),
                )
                for result, place in written
            ]
        )
        return hashed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, when all ranks have written their files."""
        places = {each.index: each.storage_data for of_rank in results for each in of_rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name}: a checkpoint holds tensors alone"
            chunks = []
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    ChunkEntry(
                        offsets=tuple(chunk.offsets),
                        sizes=tuple(chunk.sizes),
                        file=place.relative_path,
                        start=place.offset,
                        length=place.length,
                    )
                )
            dtype, size = str(tensor.properties.dtype), tuple(tensor.size)
            tensors[name] = TensorEntry(dtype=dtype, size=size, chunks=tuple(chunks))
        index = CheckpointIndex(
            tensors=tensors,
            sha256={place.relative_path: place.sha256 for place in places.values()},
        )
        (Path(self.path) / INDEX).write_text(index.model_dump_json())


class IndexedReader(FileSystemReader):
    """DCP's reader of files; it reads the index from JSON."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, in DCP's own classes.

        Raises:
            OSError: if there is no index.
            ValueError: if the index is not one of ours.
        """
        index = CheckpointIndex.model_validate_json((Path(self.path) / INDEX).read_bytes())
        places, described = dict[MetadataIndex, _Place](), dict[str, Any]()
        for name, tensor in index.tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{INDEX}: {name} is of {tensor.dtype}; known are {', '.join(sorted(DTYPES))}"
                )
            chunks = []
            for chunk in tensor.chunks:
                places[MetadataIndex(name, chunk.offsets)] = _Place(chunk.file, chunk.start, chunk.length)
                chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            described[name] = TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
        return Metadata(described, None, places)


@dataclass(frozen=True)
class _Place:
    """Where a chunk's bytes are, with the names that `FileSystemReader` asks for."""

    relative_path: str
    offset: int
    length: int
    sha256: str = ""
    """Of the whole file, if it was just written."""
    transform_descriptors: None = None


# Whether a checkpoint is as it was written: SHA-256 of its files, which its ranks look through together.
#
# `manifest.json` has those of the files that rank 0 wrote, the index among them; the index has those of the
# tensors' files, each from the rank that wrote it.

MANIFEST = "manifest.json"
_HASHES = TypeAdapter(dict[PathBelow, str])


def write_manifest(folder: Path, known: Mapping[str, str]) -> None:
    """Writes the hashes of what rank 0 wrote into a checkpoint, as its last file, less work for `known` ones."""
    names = [path.name for path in folder.iterdir() if path.suffix != ".distcp" and path.name != MANIFEST]
    hashes = {name: known.get(name) or file_hash(folder / name) for name in sorted(names)}
    (folder / MANIFEST).write_bytes(_HASHES.dump_json(hashes))


def written_hashes(folder: Path) -> dict[str, str]:
    """Hashes of the files that rank 0 wrote into a checkpoint, by name.

    Raises:
        OSError: if there is no manifest.
        ValueError: if it is damaged.
    """
    return _HASHES.validate_json((folder / MANIFEST).read_bytes(), strict=True)


def damage(folder: Path, ranks: Ranks) -> str | None:
    """Says which file of a checkpoint is not as it was written, of those that this rank looks at; None: none.

    A rank that does not see the folder finds no damage: there the disk is not shared, which `Checkpoints` says.
    """
    if not folder.is_dir():
        return None
    try:
        hashes = written_hashes(folder)
        if INDEX not in hashes:
            return f"{INDEX} is not in {MANIFEST}"
        if ranks.first and (fault := _altered(folder, hashes)):
            return fault
        index = CheckpointIndex.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())[:200]
    if (
        unlisted := {chunk.file for tensor in index.tensors.values() for chunk in tensor.chunks}
        - index.sha256.keys()
    ):
        return f"{min(unlisted)} has no hash in {INDEX}"
    own = sorted(index.sha256)[ranks.rank :: ranks.world]
    return _altered(folder, {name: index.sha256[name] for name in own})


def newest_whole(folder: Path) -> tuple[int, Path]:
    """Returns the newest checkpoint in a folder that is as it was written, and the number of steps that it is made
    after; of a process that looks by itself.

    Raises:
        UserError: if there is none.
    """
    for path in checkpoints_in(folder):
        if damage(path, Ranks()) is None:
            return steps_of(path), path
    raise UserError(f"{folder} has no checkpoint that is as it was written, to go on from")


def _altered(folder: Path, hashes: Mapping[str, str]) -> str | None:
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_hash(folder / name) != expected:
            return f"{name} is not what was written"
    return None
