"""Pieces of one long vector, as `torch.distributed.checkpoint` (DCP) saves and loads them.

Every way to hold the dense part holds ranges of the same vectors: all dense weights one after another, in the
order of `named_parameters`, and AdamW's two moments of them. Plain DP has them whole, ZeRO-1 one range of the
moments, `fully_shard` one range of each weight (shards are along the first dimension). Saved as such, what one
way wrote is read by any other, on any number of ranks: DCP works out which ranges overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """A range that this rank holds; ranks may hold the same."""

    start: int
    values: Tensor
    """One dimension, a view of what trains: loading into it is loading."""


@dataclass(frozen=True)
class FlatPieces:
    """This rank's pieces of a vector; those of all ranks cover it."""

    length: int
    """Of the vector."""
    pieces: tuple[Piece, ...]

    def size(self) -> torch.Size:
        """Of the vector; what DCP compares with the checkpoint's."""
        return torch.Size([self.length])

    def at(self, index: MetadataIndex) -> Tensor:
        """The piece that DCP asks for."""
        assert index.offset is not None
        return next(values for start, values in self.pieces if start == index.offset[0])

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """DCP's protocol: what there is to write."""
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
        """DCP's protocol: what there is to read."""
        return [
            ChunkStorageMetadata(offsets=torch.Size([start]), sizes=values.size())
            for start, values in self.pieces
        ]


class SavePlanner(DefaultSavePlanner):
    """DCP's own, which also finds pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written under this index."""
        held = self.state_dict[index.fqn]
        return held.at(index) if isinstance(held, FlatPieces) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own, which also finds pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """DCP's own would look into every value for tensors that have no memory yet; there are none."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What is read into."""
        held = self.state_dict[index.fqn]
        return held.at(index) if isinstance(held, FlatPieces) else super().lookup_tensor(index)
