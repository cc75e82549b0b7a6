"""Tables over several ranks: small ones on every rank, all others as column shards through TorchRec.

Decay of whole tables is exact, and touches no row for it: what is held is the weights divided by a scalar that
shrinks with every step. Embeddings are multiplied by it; as gradients are those of the weights themselves, the
update is right when its learning rate is divided by it.

Tables in fp16 are rounded stochastically if they are replicated, and by FBGEMM's kernels on GPUs; its
kernels for CPUs round to the nearest.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.inputs.features import Tables, matrices
from dhen.inputs.lift import CategoricalIds
from dhen.schema import FeatureSchema, Table
from trials.optim.rowwise_adagrad import EPSILON, ROUNDING, StochasticRounding
from trials.planner.table_placement import Placement, TableShard, table_notes
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks
from trials.training.embeddings.blocks import Block, State, TableBlock, load_state, state_of, state_to_load
from trials.training.embeddings.engine import ReplicatedTables, TableEngine, leaves
from trials.training.embeddings.growing import NewRows, begin_rows
from trials.training.embeddings.requirements import missing_torchrec

# L2 decay of the rows looked up, for FBGEMM's fused optimizers on a CPU, whose fp32 kernels leave it out (1.8).
#
# Every row of a batch is looked up once more, in a bag of its own behind the batch's; the gradient of that
# embedding, which is the row's weights, is the decay times it. Kernels for GPUs, and for fp16, have L2
# themselves.


class CpuRowDecay:
    """Hooks on a lookup, which maps a KeyedJaggedTensor to the pooled embeddings of its keys (B, D)."""

    def __init__(self, lookup: nn.Module) -> None:
        self.decay = 0.0
        self._examples: int | None = None
        lookup.register_forward_pre_hook(self._add_rows)
        lookup.register_forward_hook(self._take_rows_off)

    def _add_rows(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        (features,) = inputs
        self._examples = None
        if not self.decay or not torch.is_grad_enabled() or not features.keys():
            return None
        self._examples = features.stride()
        return (_with_rows(features),)

    def _take_rows_off(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._examples is None:
            return output
        pooled: Tensor = _Decayed.apply(output, self._examples, self.decay)  # type: ignore[no-untyped-call]
        return pooled


def _with_rows(features: Any) -> Any:
    """Returns the ids with, behind the bags of each key, one bag for every id that they have; empty bags if a
    key has fewer ids."""
    ids_of = torch.split(features.values(), features.length_per_key())
    rows_of = [torch.unique(ids) for ids in ids_of]
    counts_F = torch.tensor([len(rows) for rows in rows_of])
    lengths_FB = features.lengths().view(len(ids_of), -1)
    more_FR = (torch.arange(int(counts_F.max())) < counts_F.unsqueeze(1)).to(lengths_FB.dtype)
    return type(features)(
        keys=features.keys(),
        values=torch.cat([ids for pair in zip(ids_of, rows_of, strict=True) for ids in pair]),
        lengths=torch.cat([lengths_FB, more_FR], dim=1).flatten(),
        stride=lengths_FB.shape[1] + more_FR.shape[1],
    )


class _Decayed(torch.autograd.Function):
    """Embeddings of the batch alone; the gradient of an embedding behind the batch's is `decay` times the
    embedding."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, examples: int, decay: float) -> Tensor:
        ctx.decay = decay
        ctx.save_for_backward(output[examples:])
        return output[:examples].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return torch.cat([gradient, ctx.decay * rows]), None, None


# Column shards of embedding tables through TorchRec: lookups by all-to-all, updates fused into backward.
#
# An EmbeddingBagCollection with mean pooling, cut as a placement says, with FBGEMM's row-wise Adagrad, whose
# state is one number per row of each shard. Every table is column-wise to TorchRec, also if it is whole on
# one rank, so that there is one all-to-all. TorchRec is imported here alone, when it is first needed: that takes
# seconds, and warns.

KNOWN_WARNINGS = (
    r"(?s).*Failed to import: fbgemm_gpu\.split_embedding_codegen_lookup_invokers\.",
    r"(?s).*The Python module fbgemm_gpu\.split_table_batched_embeddings_ops is now DEPRECATED",
)
"""Warnings of FBGEMM 1.8 about itself, when TorchRec 1.8 imports it."""


class TorchRecShards:
    """All sharded tables of a schema; weights are zero until they are loaded."""

    def __init__(
        self,
        schema: FeatureSchema,
        shards: tuple[TableShard, ...],
        dims: Mapping[str, int],
        ranks: Ranks,
        device: torch.device,
        config: TrainingConfig,
    ) -> None:
        """Shards the tables; a collective of all ranks of the default process group. `dims` has the length of each
        table's embeddings, by name."""
        import_torchrec()
        sharded = {shard.table for shard in shards}
        places = [place for place, table in enumerate(schema.categorical) if table.name in sharded]
        self._categorical, self._ids = len(places), CategoricalIds(schema, places).to(device)
        self._bags = [place for place, table in enumerate(schema.multi_hot) if table.name in sharded]
        tables = [table for table in schema.tables if table.name in sharded]
        self.names = {table.name: f"t{index}" for index, table in enumerate(tables)}
        """Names of the tables in TorchRec, which does not allow every column's name."""
        cuts = {name: [s for s in shards if s.table == name] for name in self.names}
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            self._sharded = self._collection(tables, cuts, dims, ranks, device, config)
        self.held = self._views(cuts)
        without_decay = device.type == "cpu" and config.table_precision == "fp32"
        self._row_decay = [CpuRowDecay(lookup) for lookup in self._sharded._lookups] if without_decay else []

    def _collection(
        self,
        tables: list[Table],
        cuts: dict[str, list[TableShard]],
        dims: Mapping[str, int],
        ranks: Ranks,
        device: torch.device,
        config: TrainingConfig,
    ) -> Any:
        """Returns the tables as a sharded collection with FBGEMM's row-wise Adagrad; its rate and decay are set
        before every update. On GPUs it rounds what goes into fp16 tables stochastically, which is its default,
        on a CPU to the nearest (1.8)."""
        torchrec, configs = import_module("torchrec"), import_module("torchrec.modules.embedding_configs")
        types, plans = (
            import_module("torchrec.distributed.types"),
            import_module("torchrec.distributed.sharding_plan"),
        )
        kernels = import_module("fbgemm_gpu.split_embedding_configs")
        bags = import_module("torchrec.distributed.embeddingbag")
        decay_modes = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        codecs = import_module("torchrec.distributed.fbgemm_qcomm_codec")
        collection = torchrec.EmbeddingBagCollection(
            tables=[
                configs.EmbeddingBagConfig(
                    name=self.names[table.name],
                    feature_names=[self.names[table.name]],
                    num_embeddings=table.rows,
                    embedding_dim=dims[table.name],
                    data_type=configs.DataType[config.table_precision.upper()],
                    pooling=configs.PoolingType.MEAN,
                    init_fn=torch.nn.init.zeros_,
                )
                for table in tables
            ],
            device=torch.device("meta"),  # shards are made where they belong
        )
        precision, scale = codecs.CommType[config.all_to_all_precision.upper()], None
        if config.all_to_all_precision != "fp32":
            # gradients of a mean over a rank's examples become about as large as an example's own, which fp16 has
            # numbers for; by a power of two, so that nothing else changes
            assert config.batch_size is not None
            scale = 2.0 ** round(math.log2(max(1.0, config.batch_size / ranks.world)))
        transfer = codecs.QCommsConfig(
            forward_precision=precision, backward_precision=precision, backward_loss_scale=scale
        )
        sharder = bags.EmbeddingBagCollectionSharder(
            fused_params={
                "optimizer": kernels.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "eps": EPSILON,
                "weight_decay_mode": decay_modes.WeightDecayMode.L2,
            },
            qcomm_codecs_registry=codecs.get_qcomm_codecs_registry(transfer, device=device),
        )
        parameters, plan = sharder.shardable_parameters(collection), {}
        for name, key in self.names.items():
            rows = parameters[key].shape[0]
            plan[key] = plans._get_parameter_sharding(
                parameters[key],
                "column_wise",
                [([rows, cut.columns], [0, cut.first_column], cut.rank) for cut in cuts[name]],
                ranks.gpus_per_host,
                device.type,
                sharder,
                compute_kernel="fused",
            )
        environment = types.ShardingEnv.from_process_group(dist.group.WORLD)
        return sharder.shard(collection, types.EmbeddingModuleShardingPlan(plan), environment, device)

    def lookup(self, features: FeatureBatch) -> dict[str, Tensor]:
        """Returns e_BD of each table for this rank's examples, by name: TorchRec's order depends on the plan."""
        by_key = self._sharded(self._jagged(features)).wait().to_dict()
        return {name: by_key[key] for name, key in self.names.items()}

    def prepare_update(self, rate: float, decay: float) -> None:
        """Sets learning rate and L2 decay of the next update, which is fused into backward; called before its
        lookup."""
        optimizer = self._sharded.fused_optimizer
        optimizer.update_hyper_parameters({"lr": rate, "weight_decay": decay})
        for row_decay in self._row_decay:
            row_decay.decay = decay

    def _jagged(self, features: FeatureBatch) -> Any:
        """Returns the ids of all sharded tables: categorical ones, one per example, then bags."""
        examples, columns = features.size, self._categorical
        ids = [self._ids(features.ids_BT).T.flatten()]
        lengths = [torch.ones(examples * columns, dtype=torch.int64, device=features.numeric_BK.device)]
        counts = [examples] * columns
        for index in self._bags:
            bag_ids, offsets_B = features.bags[index]
            ids.append(bag_ids)
            end = offsets_B.new_full((1,), len(bag_ids))
            lengths.append(offsets_B.diff(append=end).long())
            counts.append(len(bag_ids))
        return import_module("torchrec").KeyedJaggedTensor(
            keys=list(self.names.values()),
            values=torch.cat([table_ids.long() for table_ids in ids]),
            lengths=torch.cat(lengths),
            stride=examples,
            length_per_key=counts,
        )

    def _views(self, cuts: dict[str, list[TableShard]]) -> list[TableBlock]:
        """Returns views of this rank's shards, in FBGEMM's memory."""
        weights = self._sharded.state_dict()
        sums = self._sharded.fused_optimizer.state_dict()["state"]
        parts = []
        for name, key in self.names.items():
            weight = f"embedding_bags.{key}.weight"
            shards = weights[weight].local_shards()
            if not shards:
                continue
            assert len(shards) == 1, "no rank has two shards of a table"
            state = sums[weight][f"{key}.momentum1"].local_shards()[0].tensor
            first_column, columns = shards[0].metadata.shard_offsets[1], shards[0].metadata.shard_sizes[1]
            assert (first_column, columns) in [(cut.first_column, cut.columns) for cut in cuts[name]]
            parts.append(
                TableBlock(Block(name, first_column, columns), shards[0].tensor.detach(), state.flatten())
            )
        return parts


def import_torchrec() -> None:
    """Imports TorchRec and FBGEMM, for `import_module` to find.

    Raises:
        UserError: if they are missing or broken, with the command that installs them.
    """
    with warnings.catch_warnings():
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message, DeprecationWarning)
        try:
            import_module("torchrec.distributed.embeddingbag")
        except (ImportError, OSError) as error:
            raise missing_torchrec(str(error)) from None


LOG = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SMALLEST_SCALE = {"fp32": 2.0**-10, "fp16": 2.0**-1}
"""Smallest scalar of table decay: below it, the scalar is multiplied into all rows, a pass over the tables once in
many steps. What is held is larger than the weights by the scalar's inverse, and fp16 ends at 65504."""
SMALLEST_FACTOR = {"fp32": EPSILON, "fp16": 2.0**-10}
"""Smallest factor of one step of table decay: updates are divided by it, and fp16 ends at 65504."""
SENT_NUMBERS = 2**24
"""Largest count of a shard's numbers that are on their way to rank 0 at once: 64 MiB of fp32."""


class ShardedTables(TableEngine):
    """Tables on several ranks of the default process group."""

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
        super().__init__(config)
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
            table.name: (name, slice(start, start + table.rows))
            for name, matrix in matrix_of.items()
            for table, start in zip(matrix.tables, matrix.starts, strict=False)
        }
        """Of each table the name of its matrix, and its rows there."""
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
        self._held: list[TableBlock] = [part for engine in self._parts for part in engine.held]
        self._scale = 1.0
        self._next = self._next_update()
        """Fixed at the lookup: TorchRec's update is part of its backward."""
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

    def lookup(self, features: FeatureBatch, begun: NewRows | None = None) -> tuple[Tensor, ...]:
        """See `TableEngine`; a collective, also for ranks with fewer examples than others."""
        begin_rows(self._held, begun, self._scale)
        if torch.is_grad_enabled():
            self._next = self._next_update()
            if self._shards is not None:
                self._shards.prepare_update(*self._next[:2])
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
        self._backward(embeddings)  # also averages over ranks and updates the shards
        rate, decay, self._scale = self._next
        for copied in self._copied:
            copied.update(rate, decay)
        if self._scale < SMALLEST_SCALE[self._config.table_precision]:
            self._shrink(2.0 ** math.ceil(math.log2(self._scale)))  # a power of two, which rounds nothing

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
            if shard.rank == 0 or self._ranks.rank not in (0, shard.rank):
                continue
            part = Block(shard.table, shard.first_column, shard.columns)
            weight_RC = self._part_of(full, part) if self._ranks.first else mine[part]
            for rows_RC in torch.split(weight_RC, max(1, SENT_NUMBERS // weight_RC.shape[1])):
                if self._ranks.first:
                    buffer = self._like.new_empty(rows_RC.shape)
                    dist.recv(buffer, shard.rank)
                    rows_RC.copy_(buffer)
                else:
                    dist.send(rows_RC.contiguous(), 0)
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

    def _next_update(self) -> tuple[float, float, float]:
        """Returns rate and decay of the next update, and the scalar that weights are held divided by after it,
        with the table decay of the step that it ends."""
        least = SMALLEST_FACTOR[self._config.table_precision]
        scale = self._scale * max(1.0 - self._rate * self._config.table_decay, least)
        return self._rate / scale, self._config.embedding_decay * scale, scale
