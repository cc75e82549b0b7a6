"""Embedding tables with 8 bits per value, to score with: FBGEMM's row-wise format, which torch reads on any CPU.

A row is D bytes and two fp32 numbers, its scale and its offset: value = byte * scale + offset. The offset is the
row's lowest value and the scale a 255th of its range, so no value is wrong by more than half of that. Such tables
cannot be trained.

Shapes: B examples, T tables, D dimension, R rows of all tables, N rows looked up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.inputs.features import EmbeddingTables, TableLookups

ROW_EXTRA_BYTES = 8
"""Bytes of a row beside its values: scale and offset."""


class Int8Tables(TableLookups):
    """What `EmbeddingTables` looks up, with rounded values."""

    packed: Tensor
    """uint8 (R, D + 8)."""

    def __init__(self, tables: EmbeddingTables) -> None:
        """Takes the place of tables; rows are still to be loaded if these have no memory for theirs."""
        super().__init__(tables.schema, tables.places)
        rows, dim = tables.weight.shape
        if tables.weight.is_meta:
            packed = torch.empty(rows, dim + ROW_EXTRA_BYTES, dtype=torch.uint8, device="meta")
        else:
            packed = torch.ops.quantized.embedding_bag_byte_prepack(tables.weight.detach())
        self.register_buffer("packed", packed)

    def embedded(self, rows_BT: Tensor) -> Tensor:
        """See `TableLookups`."""
        rows = rows_BT.flatten()
        places = torch.arange(rows.shape[0], device=rows.device)
        return self._sums(rows, places).view(*rows_BT.shape, self.packed.shape[1] - ROW_EXTRA_BYTES)

    def pooled(self, rows: Tensor, offsets_B: Tensor) -> Tensor:
        """See `TableLookups`."""
        ends_B = torch.cat([offsets_B[1:], offsets_B.new_full((1,), rows.shape[0])])
        counts_B1 = (ends_B - offsets_B).clamp(min=1).unsqueeze(1)
        return self._sums(rows, offsets_B) / counts_B1

    def _sums(self, rows: Tensor, offsets: Tensor) -> Tensor:
        if self.packed.device.type != "cpu":  # whose kernel wants lengths that are multiples of 4
            return sums_of_unpacked(self.packed, rows, offsets)
        sums: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(self.packed, rows, offsets)
        return sums


def sums_of_unpacked(packed: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Returns the sums of rows from each offset to the next; of a row the last 8 bytes are its scale and its least
    number, in fp32."""
    chosen_ND = packed.index_select(0, rows)
    scale_N2 = scales_of(chosen_ND)
    values_ND = chosen_ND[:, :-ROW_EXTRA_BYTES].float() * scale_N2[:, :1] + scale_N2[:, 1:]
    return F.embedding_bag(torch.arange(len(rows), device=rows.device), values_ND, offsets, mode="sum")


def scales_of(packed_ND: Tensor) -> Tensor:
    """Returns the scale and the offset of each packed row: fp32 (N, 2)."""
    return packed_ND[:, -ROW_EXTRA_BYTES:].contiguous().view(torch.float32)


def use_int8_tables(network: nn.Module) -> None:
    """Puts tables of 8 bits in the place of a network's."""
    for name, module in list(network.named_modules()):
        if isinstance(module, EmbeddingTables):
            network.set_submodule(name, Int8Tables(module))
