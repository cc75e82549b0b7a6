"""Pieces of one long vector, as `torch.distributed.checkpoint` (DCP) saves and loads them.

Every strategy holds the dense part as ranges of the same vectors: all dense weights one after another, in the
order of `named_parameters`, and AdamW's two moments of them. Plain DP has them whole, ZeRO-1 one range of the
moments, `fully_shard` one range of each weight (shards are along the first dimension). Saved as such, what one
strategy wrote is read by any other, on any number of ranks: DCP works out which ranges overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


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

    def size(self) -> torch.Size:
        """Returns the size of the vector, which DCP compares with the checkpoint's."""
        return torch.Size([self.length])

    def at(self, index: MetadataIndex) -> Tensor:
        """Returns the piece that DCP asks for."""
        assert index.offset is not None
        return self._by_start[index.offset[0]]

    @cached_property
    def _by_start(self) -> dict[int, Tensor]:
        """The pieces, of which a rank may have thousands."""
        return {piece.start: piece.values for piece in self.pieces}

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


class SavePlanner(DefaultSavePlanner):
    """DCP's own planner for saving, which also finds pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns what is written under this index."""
        value = self.state_dict[index.fqn]
        return value.at(index) if isinstance(value, FlatPieces) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
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
        return value.at(index) if isinstance(value, FlatPieces) else super().lookup_tensor(index)
