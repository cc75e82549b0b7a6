"""Column shards of embedding tables through TorchRec: lookups by all-to-all, updates fused into backward.

An EmbeddingBagCollection with mean pooling, cut as a placement says, with FBGEMM's row-wise Adagrad, whose
state is one number per row of each shard. Every table is column-wise to TorchRec, also where it is whole on one
rank, so that there is one all-to-all. TorchRec is imported here alone, when it is first needed: that takes
seconds, and warns.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.inputs.nodes import CategoricalIds
from dhen.schema import FeatureSchema, Table
from trials.embeddings.blocks import Block, HeldBlock
from trials.embeddings.fbgemm_cpu_decay import CpuRowDecay
from trials.embeddings.requirements import missing_torchrec
from trials.job import TrainingConfig
from trials.optim.rowwise_adagrad import EPSILON
from trials.planner.tables.placement import TableShard
from trials.ranks import Ranks

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
        places = _places(schema.categorical, sharded)
        self._categorical, self._ids = len(places), CategoricalIds(schema, places).to(device)
        self._bags = _places(schema.multi_hot, sharded)
        tables = [table for table in schema.tables if table.name in sharded]
        self.names = {table.name: f"t{index}" for index, table in enumerate(tables)}
        """Names of the tables in TorchRec, which does not allow every column's name."""
        cuts = {name: [s for s in shards if s.table == name] for name in self.names}
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            self._sharded = _shard(
                _collection(tables, self.names, dims, config), self.names, cuts, ranks, device, config
            )
        self.held = self._views(cuts)
        without_decay = device.type == "cpu" and config.table_precision == "fp32"
        self._row_decay = [CpuRowDecay(lookup) for lookup in self._sharded._lookups] if without_decay else []

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

    def _views(self, cuts: dict[str, list[TableShard]]) -> list[HeldBlock]:
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
                HeldBlock(Block(name, first_column, columns), shards[0].tensor.detach(), state.flatten())
            )
        return parts


def _places(tables: tuple[Table, ...], sharded: set[str]) -> list[int]:
    return [index for index, table in enumerate(tables) if table.name in sharded]


def _collection(
    tables: list[Table], names: dict[str, str], dims: Mapping[str, int], config: TrainingConfig
) -> Any:
    """Returns the tables as a collection on no device: shards are made where they belong."""
    torchrec, configs = import_module("torchrec"), import_module("torchrec.modules.embedding_configs")
    return torchrec.EmbeddingBagCollection(
        tables=[
            configs.EmbeddingBagConfig(
                name=names[table.name],
                feature_names=[names[table.name]],
                num_embeddings=table.rows,
                embedding_dim=dims[table.name],
                data_type=configs.DataType[config.table_precision.upper()],
                pooling=configs.PoolingType.MEAN,
                init_fn=torch.nn.init.zeros_,
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )


def _shard(
    collection: Any,
    names: dict[str, str],
    cuts: dict[str, list[TableShard]],
    ranks: Ranks,
    device: torch.device,
    config: TrainingConfig,
) -> Any:
    types, plans = (
        import_module("torchrec.distributed.types"),
        import_module("torchrec.distributed.sharding_plan"),
    )
    sharder = _sharder(device, config, ranks)
    parameters = sharder.shardable_parameters(collection)

    def plan(name: str, key: str) -> Any:
        rows = parameters[key].shape[0]
        placed_shards = [([rows, cut.columns], [0, cut.first_column], cut.rank) for cut in cuts[name]]
        return plans._get_parameter_sharding(
            parameters[key],
            "column_wise",
            placed_shards,
            ranks.gpus_per_host,
            device.type,
            sharder,
            compute_kernel="fused",
        )

    module_plan = types.EmbeddingModuleShardingPlan({key: plan(name, key) for name, key in names.items()})
    environment = types.ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(collection, module_plan, environment, device)


def _sharder(device: torch.device, config: TrainingConfig, ranks: Ranks) -> Any:
    """Returns a sharder with FBGEMM's row-wise Adagrad; its rate and decay are set before every update. On GPUs it
    rounds what goes into fp16 tables stochastically, which is its default, on a CPU to the nearest (1.8)."""
    kernels = import_module("fbgemm_gpu.split_embedding_configs")
    bags = import_module("torchrec.distributed.embeddingbag")
    decay_modes = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    codecs = import_module("torchrec.distributed.fbgemm_qcomm_codec")
    precision = codecs.CommType[config.all_to_all_precision.upper()]
    transfer = codecs.QCommsConfig(
        forward_precision=precision,
        backward_precision=precision,
        backward_loss_scale=_gradient_scale(config, ranks),
    )
    return bags.EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": kernels.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "eps": EPSILON,
            "weight_decay_mode": decay_modes.WeightDecayMode.L2,
        },
        qcomm_codecs_registry=codecs.get_qcomm_codecs_registry(transfer, device=device),
    )


def _gradient_scale(config: TrainingConfig, ranks: Ranks) -> float | None:
    """Returns what gradients are multiplied by on their way: those of a mean over a rank's examples become about
    as large as an example's own, which fp16 has numbers for. It is a power of two, so that nothing else
    changes."""
    if config.all_to_all_precision == "fp32":
        return None
    assert config.batch_size is not None
    return 2.0 ** round(math.log2(max(1.0, config.batch_size / ranks.world)))


def import_torchrec() -> None:
    """Imports TorchRec and FBGEMM, for `import_module` to find.

    Raises:
        UserError: where they are missing or broken, with the command that installs them.
    """
    with warnings.catch_warnings():
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message, DeprecationWarning)
        try:
            import_module("torchrec.distributed.embeddingbag")
        except (ImportError, OSError) as error:
            raise missing_torchrec(str(error)) from None
