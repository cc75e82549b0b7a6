"""Tables over several ranks: small ones on every rank, all others as column shards through TorchRec.

Decay of whole tables is exact, and touches no row for it: what is held is the weights divided by a scalar that
shrinks with every step. Embeddings are multiplied by it; as gradients are those of the weights themselves, the
update is right when its learning rate is divided by it.

Tables in fp16 are rounded stochastically where they are replicated, and by FBGEMM's kernels on GPUs; its
kernels for CPUs round to the nearest.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.inputs.features import Tables, matrices
from dhen.schema import FeatureSchema, Table
from trials.embeddings.blocks import Block, HeldBlock, State, load_state, state_of, state_to_load
from trials.embeddings.engine import backward, leaves
from trials.embeddings.growing import Begun, begin_rows
from trials.embeddings.replicated import ReplicatedTables
from trials.embeddings.torchrec_backend import TorchRecShards
from trials.job import TrainingConfig
from trials.optim.rowwise_adagrad import EPSILON, ROUNDING
from trials.optim.stochastic_rounding import StochasticRounding
from trials.planner.tables.placement import Placement, table_notes
from trials.ranks import Ranks

LOG = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SMALLEST_SCALE = {"fp32": 2.0**-10, "fp16": 2.0**-1}
"""Smallest scalar of table decay: below it, the scalar is multiplied into all rows, a pass over the tables once in
many steps. What is held is larger than the weights by the scalar's inverse, and fp16 ends at 65504."""
SMALLEST_FACTOR = {"fp32": EPSILON, "fp16": 2.0**-10}
"""Smallest factor of one step of table decay: updates are divided by it, and fp16 ends at 65504."""
SENT_NUMBERS = 2**24
"""Largest count of a shard's numbers that are on their way to rank 0 at once: 64 MiB of fp32."""


class _Update(NamedTuple):
    """The settings of the next update, fixed at the lookup: TorchRec's update is part of its backward."""

    rate: float
    decay: float
    scale: float
    """The scalar that weights are held divided by after the update."""


class ShardedTables:
    """A `TableEngine` on several ranks of the default process group."""

    def __init__(
        self,
        tables: Tables,
        schema: FeatureSchema,
        config: TrainingConfig,
        ranks: Ranks,
        placement: Placement,
        device: torch.device,
    ) -> None:
        """Cuts the tables over ranks; a collective. `tables` are alike on all ranks, wherever they lie, and not
        needed any more afterwards."""
        self._config, self._ranks = config, ranks
        matrix_of = matrices(tables)
        self._groups = [matrix.tables for matrix in matrix_of.values()]
        self._shapes = {name: matrix.weight.shape for name, matrix in matrix_of.items()}
        dims = {
            table.name: matrix.weight.shape[1] for matrix in matrix_of.values() for table in matrix.tables
        }
        self._placement, stored = placement, config.table_precision
        self._like = torch.empty(0, dtype=DTYPES[stored], device=device)
        self._rounding = StochasticRounding(torch.initial_seed()) if stored == "fp16" else None
        self._rows = {
            name: rows for weight, matrix in matrix_of.items() for name, rows in _rows(weight, matrix.tables)
        }
        copied = [{t.name for t in group}.intersection(placement.replicated) for group in self._groups]
        self._copied = [
            ReplicatedTables(schema, frozenset(names), dims[min(names)], ranks.world, device, self._rounding)
            for names in copied
            if names
        ]
        self._shards = None
        if placement.shards:
            self._shards = TorchRecShards(schema, placement.shards, dims, ranks, device, config)
        self._parts: list[ReplicatedTables | TorchRecShards] = list(self._copied)
        if self._shards is not None:
            self._parts.append(self._shards)
        self._held: list[HeldBlock] = [part for engine in self._parts for part in engine.held]
        self._rate, self._scale = config.embedding_learning_rate, 1.0
        self._next = self._next_update()
        self._looked_up: list[Tensor] = []
        weights = {name: matrix.weight.detach() for name, matrix in matrix_of.items()}
        for block, weight_RC, _ in self._held:
            weight_RC.copy_(self._part_of(weights, block))
        LOG.info(
            "tables: %d on every rank, %d shards of others, %s bytes here",
            len(placement.replicated),
            len(placement.shards),
            f"{self.held_bytes:,}",
        )
        for shard in placement.shards:
            LOG.debug("%s", shard)
        for note in table_notes(config, placement, device.type):
            LOG.info(note)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return sum(part.held_bytes for part in self._held)

    def lookup(self, features: FeatureBatch, begun: Begun | None = None) -> tuple[Tensor, ...]:
        """See `TableEngine`; a collective, also for ranks with fewer examples than others."""
        begin_rows(self._held, begun, self._scale)
        if torch.is_grad_enabled():
            self._next = self._next_update()
            if self._shards is not None:
                self._shards.prepare_update(self._next.rate, self._next.decay)
        embeddings: dict[str, Tensor] = {}
        for engine in self._parts:
            embeddings |= engine.lookup(features)
        looked_up = []
        for tables in self._groups:
            categorical = [embeddings[table.name] for table in tables if not table.multi_hot]
            looked_up += [torch.stack(categorical, dim=1)] if categorical else []
            # copies: a view would keep the embeddings of all shards, as they have arrived, until the next lookup
            looked_up += [embeddings[table.name].unsqueeze(1).clone() for table in tables if table.multi_hot]
        self._looked_up = looked_up if torch.is_grad_enabled() else []
        return leaves(looked_up if self._scale == 1.0 else [e.detach() * self._scale for e in looked_up])

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """See `TableEngine`; a collective."""
        backward(self._looked_up, embeddings)  # also averages over ranks and updates the shards
        self._looked_up = []
        for copied in self._copied:
            copied.update(self._next.rate, self._next.decay)
        self._scale = self._next.scale
        if self._scale < SMALLEST_SCALE[self._config.table_precision]:
            self._shrink(2.0 ** math.ceil(math.log2(self._scale)))  # a power of two, which rounds nothing

    def scale_learning_rate(self, factor: float) -> None:
        """See `TableEngine`."""
        self._rate = self._config.embedding_learning_rate * factor

    @torch.no_grad()
    def settle(self) -> None:
        """See `TableEngine`."""
        if self._scale != 1.0 and self._rounding is not None:
            self._rounding.multiply([part.weight_RC for part in self._held], self._scale)
            self._scale = 1.0
        elif self._scale != 1.0:
            self._shrink(self._scale)

    def full_weights(self) -> dict[str, Tensor] | None:
        """See `TableEngine`; a collective."""
        self.settle()
        shapes = self._shapes.items() if self._ranks.first else ()
        full = {name: torch.empty(shape) for name, shape in shapes}
        mine = {part: weight_RC for part, weight_RC, _ in self._held}
        if self._ranks.first:
            for part, weight_RC in mine.items():
                self._part_of(full, part).copy_(weight_RC)
        for shard in self._placement.shards:
            part = Block(shard.table, shard.first_column, shard.columns)
            if self._ranks.first and shard.rank != 0:
                _receive(self._part_of(full, part), shard.rank, self._like)
            elif shard.rank == self._ranks.rank != 0:
                _send(mine[part])
        return full if self._ranks.first else None

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """See `TableEngine`."""
        self.settle()
        parts = state_of(self._held) if saved is None else state_to_load(saved, self._held)
        if self._rounding is not None and (saved is None or ROUNDING in saved):
            parts[ROUNDING] = self._rounding.state
        return parts

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `TableEngine`."""
        self.settle()
        load_state(state, self._held)

    @torch.no_grad()
    def _shrink(self, factor: float) -> None:
        """Multiplies a part of the scalar, or all of it, into all rows."""
        for part in self._held:
            part.weight_RC.mul_(factor)
        self._scale /= factor

    def _part_of(self, weights: Mapping[str, Tensor], part: Block) -> Tensor:
        """Returns a part's rows and columns of the matrix that its table lies in, as a view."""
        name, rows = self._rows[part.table]
        return weights[name][rows, part.first_column : part.first_column + part.columns]

    def _next_update(self) -> _Update:
        """Returns the next update, with the table decay of the step that it ends."""
        least = SMALLEST_FACTOR[self._config.table_precision]
        scale = self._scale * max(1.0 - self._rate * self._config.table_decay, least)
        return _Update(self._rate / scale, self._config.embedding_decay * scale, scale)


def _rows(weight: str, tables: tuple[Table, ...]) -> list[tuple[str, tuple[str, slice]]]:
    """Returns for each table of a matrix, by name: the matrix's name, and the table's rows there."""
    ends = itertools.pairwise(itertools.accumulate((table.rows for table in tables), initial=0))
    return [(table.name, (weight, slice(*rows))) for table, rows in zip(tables, ends, strict=True)]


def _send(weight_RC: Tensor) -> None:
    """Sends a matrix to rank 0, some rows at a time."""
    for rows_RC in torch.split(weight_RC, _rows_sent(weight_RC)):
        dist.send(rows_RC.contiguous(), 0)


def _receive(target_RC: Tensor, rank: int, like: Tensor) -> None:
    """Receives what `_send` sends from a rank, of the type and on the device of `like`."""
    for rows_RC in torch.split(target_RC, _rows_sent(target_RC)):
        buffer = like.new_empty(rows_RC.shape)
        dist.recv(buffer, rank)
        rows_RC.copy_(buffer)


def _rows_sent(weight_RC: Tensor) -> int:
    return max(1, SENT_NUMBERS // weight_RC.shape[1])
