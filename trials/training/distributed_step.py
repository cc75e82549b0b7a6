"""One training step under a strategy, or on several ranks: the same as `trials.training.step`, held in
other ways.

Tables by their engine (`trials.training.embeddings.engine`), the dense part by
`trials.training.distributed.parallelize`. Each rank trains on its slice of every global batch; if slices
differ by an example, losses and gradients are weighted by their share, so that the mean over ranks is the mean
over the batch. Layers are not compiled here.

Shapes: B examples, T categorical tables, K numeric inputs, N rows of a split.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.nn.parallel import DistributedDataParallel

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig
from dhen.inputs.growing import part_of_tables
from dhen.inputs.lift import held_schema
from dhen.model import build_model
from dhen.tape import rows_at_once
from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.cluster.this_machine import this_machine
from trials.data.loader import LabelledBatch
from trials.optim.one_bit_adam import OneBitAdam
from trials.planner.collectives import BUCKET_BYTES, collectives
from trials.planner.ladder import check_together
from trials.planner.pricing import pricing_of
from trials.records.job import Job
from trials.records.strategy import RECOMPUTED, Checkpointing, Dense, Ranks, Strategy, data_ranks
from trials.store.weights import Weights, changes, with_own
from trials.training.checkpoint_files import FlatPieces
from trials.training.distributed.engine import (
    TABLES,
    DenseBatch,
    DenseInputs,
    take_growing,
    take_tables,
)
from trials.training.distributed.parallelize import ParallelStep, device_mesh, parallelize
from trials.training.distributed.pipeline import layer_count
from trials.training.distributed.pipeline_step import PipelineLookups, PipelineStep, pipelined
from trials.training.distributed.tensor_parallel import GroupBatch
from trials.training.distributed.zero import Zero
from trials.training.distributed.zero_offload import ZeroOffload
from trials.training.embeddings.blocks import store_tables_in_half
from trials.training.embeddings.growing import GrowingTables, NewRows
from trials.training.embeddings.levels import CachedTables, CacheUse
from trials.training.embeddings.make_engine import FrequencyDecay, table_engine
from trials.training.memory_limit import (
    count_on_device,
    is_counted,
    keep_on_host,
    on_device_for_good,
    on_host,
)
from trials.training.process_group import all_agree
from trials.training.servers.client import Servers
from trials.training.servers.server_tables import ServedDense, ServerTables
from trials.training.step import PLAIN_DP, Step, TrainStep

LOG = logging.getLogger(__name__)
GROWING = "features.growing."
"""Beginning of the names of what a model knows of growing tables."""


class DistributedStep(Step):
    """The step of ranks that hold a model together."""

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        strategy: Strategy,
        ranks: Ranks,
        cluster: Cluster | None = None,
        servers: Servers | None = None,
        *,
        where: torch.device,
        evaluation_rows: int | None = None,
        total_examples: int = 0,
    ) -> None:
        """Takes the model over, which is alike on all ranks; a collective.

        Args:
            model: in fp32, best in host memory: of its tables only this rank's part goes to the device.
            job: the model's schema, and its resolved training configuration.
            strategy: how the dense part is held; `fully_shard` needs a process group on one rank too.
            ranks: the ranks of the default process group.
            cluster: the cluster for which tables are placed and gradients cut into buckets; None for this machine.
            servers: those that hold the tables; None if ranks do.
            where: this process's device.
            evaluation_rows: rows of this rank that go forward at once in an evaluation; None: no more than a
                micro-batch if memory is limited, else `rows_at_once`.
            total_examples: those of all passes, which decide when gradients begin to be compressed.
        """
        config = job.training
        assert config.batch_size is not None
        self.model, self._batch_size = model, config.batch_size
        self._server_level = strategy.server_level
        tables, self._rows = take_tables(model), take_growing(model)
        self._frequency_decay: FrequencyDecay | None = None
        if tables is not None and config.frequency_decay:
            categorical, decay = len(job.features.categorical), config.frequency_decay
            self._frequency_decay = FrequencyDecay(tables, categorical, decay, ranks.world)
        # these engines move one layer after another, as they hold it
        if not strategy.fully_sharded and strategy.dense != "zero_offload" and strategy.pipeline == 1:
            on_device_for_good(model, where)
        given = cluster
        if ranks.world == 1:
            cluster = None
        else:
            if cluster is None:  # rank 0's of this machine, so that all place tables alike
                measured = [this_machine() if ranks.first else None]
                dist.broadcast_object_list(measured)
                cluster = measured[0]
                assert cluster is not None
            cluster = cluster.replace(hosts=ranks.hosts, gpus_per_host=ranks.gpus_per_host)
        # of buckets, as the plan's step time takes it to be
        bucket_bytes = BUCKET_BYTES
        if cluster is not None:
            hosts, per_host = data_ranks(strategy.tensor, cluster.hosts, cluster.gpus_per_host)
            bucket_bytes = collectives(cluster, hosts, per_host).bucket_bytes()
        here = tables is not None and servers is None
        placement = pricing_of(job, cluster).placement if here and cluster is not None else None
        held = held_schema(job.model, job.features)
        level, cached_rows = strategy.tables, tuple[int, ...]()
        if tables is not None and level != "device":
            pricing = pricing_of(job, given or this_machine())
            cached_rows = pricing.below.cached_rows(pricing.sized(strategy).table_cache)
        self._served: ServerTables | None = None
        if servers is not None:
            assert tables is not None
            self._tables = self._served = ServerTables(tables, self._rows, config, servers, where)
            self._rows = None  # the servers know which key has which row
        else:
            self._tables = table_engine(tables, held, config, ranks, placement, where, level, cached_rows)
        if self._rows is not None:
            self._rows.build_index()  # its keys may have come from another rank
            self._growing = GrowingTables(self._rows, ranks)
        self._dense: ParallelStep
        self._lookups: PipelineLookups | None = None
        if strategy.pipeline > 1:
            assert cluster is not None
            assert isinstance(job.model, DhenConfig)
            cut = pricing_of(job, cluster).layers_per_stage(strategy)
            self._dense = pipeline = pipelined(
                model, strategy, config, job.model, cut, ranks, where=where, bucket_bytes=bucket_bytes
            )
            growing_bags = [place for place, table in enumerate(job.features.multi_hot) if table.growing]
            self._lookups = PipelineLookups(pipeline.engine.group, growing_bags)
            LOG.info("layers of the stages: %s; this is stage %d", cut, ranks.stage(strategy.pipeline))
        elif self._served is not None and config.tables.synchrony == "async":
            self._dense = ParallelStep(ServedDense(model, config, self._served), strategy.micro_batches)
        else:
            mesh = None
            if ranks.world > 1 or strategy.fully_sharded:
                hosts, per_host = ranks.hosts, ranks.gpus_per_host
                mesh = device_mesh(strategy.dense, hosts, per_host, where.type, strategy.tensor)
            # no more micro-batches than the rank with the fewest has examples: all ranks need equally many
            micro_batches = min(strategy.micro_batches, config.batch_size * strategy.tensor // ranks.world)
            no_sync = strategy.no_sync and micro_batches > 1
            with on_host() if strategy.offload else nullcontext():
                self._dense = parallelize(
                    model,
                    strategy.replace(micro_batches=micro_batches, no_sync=no_sync),
                    config,
                    mesh,
                    where=where,
                    bucket_bytes=bucket_bytes,
                    total_examples=total_examples,
                )
        count_on_device([*model.buffers(), *(() if strategy.offload else model.parameters())])
        self._engine, self._layout, self._where = self._dense.engine, self._dense.layout, where
        LOG.info("model wrapped as %s on %s, %d rank(s)", strategy.name, where, ranks.world)
        most = rows_at_once(model)
        if is_counted() or where.type == "cuda":
            # those of a tensor group go through its model together, and stages take a micro-batch at a time anyway
            examples = -(-config.batch_size // ranks.data_part(strategy.pipeline).ranks)
            most = min(most, -(-examples // (1 if strategy.pipeline > 1 else strategy.micro_batches)))
        self._offload = strategy.offload
        if strategy.offload:
            keep_on_host(model.parameters())
        super().__init__(ranks, evaluation_rows or most, strategy.pipeline)

    @property
    def strategy(self) -> Strategy:
        """See `Step`."""
        found = executed_strategy(self._dense)
        if self._served is not None:
            return found.replace(servers=self._served.servers.count, server_level=self._server_level)
        if not isinstance(self._tables, CachedTables):
            return found
        return found.replace(tables=self._tables.level, table_cache=self._tables.table_cache)

    def __call__(self, batch: LabelledBatch) -> Tensor:
        """See `Step`."""
        begun, looked_up = None, self._lookups.part(batch.size) if self._lookups is not None else slice(None)
        features = batch.features if self._lookups is None else self._lookups.features_of(batch.features)
        if self._growing is not None:
            features, begun = self._growing.admit(features, batch.time)
        if self._served is not None:
            features = self._served.of_batch(batch)
        embeddings = self._lookup(features, begun)
        whole = embeddings if self._lookups is None else self._lookups.gather(embeddings, batch.size)
        inputs = DenseInputs(whole, batch.features.numeric_BK, batch.features.share_BN)
        weight = batch.size * self._data.ranks / (batch.of_step or self._batch_size)
        dense = DenseBatch(inputs, batch.label_B, batch.weight_B)
        if self._layout is None:
            loss = self._dense.forward_backward(dense, weight)
        else:
            # `weight` is the share of this rank's examples, the group's are as many ranks'
            group, size = self._layout.group, len(batch.label_B)
            shared = GroupBatch(group, size, batch.label_B.device)
            of_group = shared.batch(dense)
            weight = weight * len(of_group.label_B) / (size * group.size)
            loss = self._dense.forward_backward(of_group, weight)
            shared.pass_on_gradients(of_group, dense)
            del of_group
        if self._lookups is not None:
            self._lookups.scatter_gradients(whole, embeddings, batch.size)
        del whole, inputs, dense  # tables need their room
        if self._frequency_decay is not None:
            assert batch.inverse_count_BT is not None
            self._frequency_decay(embeddings, batch.inverse_count_BT[looked_up])
        if isinstance(self._engine, ServedDense):
            self._engine.collect()
        if self._tables is not None:
            self._tables.update(embeddings)
        with on_host() if self._offload else nullcontext():
            self._dense.update()
        return loss

    @property
    def cache_use(self) -> CacheUse | None:
        """See `Step`."""
        return self._tables.cache_use if isinstance(self._tables, CachedTables) else None

    def ahead(self, batch: LabelledBatch) -> None:
        """See `Step`."""
        if self._served is not None:
            self._served.ahead(batch)

    @property
    def staleness(self) -> dict[int, int] | None:
        """See `Step`."""
        return self._served.staleness if self._served is not None else None

    def begin_pass(self) -> None:
        """See `Step`."""
        if self._served is not None and self._ranks.first:
            self._served.servers.begin_pass()
        super().begin_pass()

    def finish_update(self) -> None:
        """See `Step`."""
        if isinstance(self._engine, ZeroOffload):
            self._engine.finish()

    def settle(self) -> None:
        """Brings all table rows up to date, and a dense part that is on servers."""
        super().settle()
        if isinstance(self._engine, ServedDense):
            self._engine.update()  # others have trained since this rank's last step

    def weights(self) -> Weights:
        """See `Step`."""
        weights = self._dense_weights()
        if self._tables is not None:
            table_weights = self._tables.full_weights() or {}
            weights |= {f"{TABLES}{name}": weight for name, weight in table_weights.items()}
        if self._served is not None and self._ranks.first and (keys := self._served.keys()) is not None:
            weights[f"{GROWING}keys"] = keys
        if self._rows is not None and self._ranks.first:
            weights[f"{GROWING}keys"] = self._rows.keys.clone()
        return weights

    def nothing_changed(self) -> None:
        """See `Step`."""
        if self._served is not None:
            self._served.nothing_changed()

    def changed(self, before: Mapping[str, Tensor]) -> Weights:
        """See `Step`; servers tell of rows that have changed alone."""
        if self._served is None:
            return super().changed(before)
        return changes(before, self._dense_weights()) | self._served.changed(before, TABLES)

    def dense_state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """See `Step`."""
        with on_host() if self._offload else nullcontext():  # moments that there are none of yet
            state = super().dense_state(saved)
        return state if self._layout is None else self._layout.whole_state(state)

    def _dense_weights(self) -> Weights:
        """Returns a copy of all dense weights on rank 0, empty on others; a collective."""
        own = self._engine.weights()
        return own if self._layout is None else self._layout.whole_weights(own, self._where)

    def dense_moments(self, steps: int) -> dict[str, FlatPieces]:
        """See `Step`."""
        optimizer = self._engine.optimizer
        if not isinstance(optimizer, OneBitAdam) or optimizer.second_stage is None:
            return super().dense_moments(steps)
        vectors = optimizer.second_stage.moments(steps)
        return {name: FlatPieces.whole(one) for name, one in vectors.items()}

    def save_tables(self, folder: Path) -> None:
        """See `Step`."""
        if self._served is not None:
            self._served.settle()
            all_agree(self._ranks, True)  # all have settled
            if not self._served.servers.worker:
                self._served.servers.save(folder)

    def go_on_with_tables(self, steps: int, folder: Path | None) -> None:
        """See `Step`."""
        if self._served is not None:
            self._served.go_on(steps, folder)
            all_agree(self._ranks, True)  # none pulls before

    def _lookup(self, features: FeatureBatch, begun: NewRows | None = None) -> tuple[Tensor, ...]:
        return self._tables.lookup(features, begun) if self._tables is not None else ()

    @torch.no_grad()
    def _score(self, features: FeatureBatch) -> Tensor:
        whole, of_rank = features, features if self._lookups is None else self._lookups.features_of(features)
        if self._served is not None:
            of_rank = self._served.found(of_rank)
        if self._rows is not None:
            of_rank = self._rows(of_rank)
        embeddings = self._lookup(of_rank)
        if self._lookups is not None:
            embeddings = self._lookups.gather(embeddings, whole.size)
        inputs = DenseInputs(embeddings, whole.numeric_BK, whole.share_BN)
        if self._layout is None:
            return self._engine.predict(inputs)
        shared = GroupBatch(self._layout.group, len(features.numeric_BK), features.numeric_BK.device)
        return shared.own(self._engine.predict(shared.inputs(inputs)))


def fresh_step(
    job: Job,
    start_from: Weights | None,
    ranks: Ranks,
    strategy: Strategy,
    cluster: Cluster | None,
    servers: Servers | None = None,
    evaluation_rows: int | None = None,
    total_examples: int = 0,
) -> Step:
    """Makes a step whose weights follow from the seed, alike on all ranks; what dropout draws differs from rank to
    rank. Of a rank `evaluation_rows` go forward at once in an evaluation, if a plan sets them. The
    `total_examples` of all passes decide when gradients begin to be compressed."""
    check_together(job.training, strategy)
    torch.manual_seed(job.seed)
    with on_host():
        with nullcontext() if servers is None else part_of_tables(None):
            model = build_model(job.model, job.features).train()
        if start_from is not None:
            model.load_state_dict(start_from if servers is None else with_own(model, start_from, TABLES))
        if job.training.table_precision == "fp16":
            store_tables_in_half(model)  # before a device would need room for them in fp32
    plain = not job.training.frequency_decay and job.training.optimizer == "adamw" and servers is None
    if ranks.world == 1 and strategy == PLAIN_DP and plain:
        LOG.info("model and tables on %s, in one process", device())
        model = on_device_for_good(model, device())
        return TrainStep(model, job.training, evaluation_rows=evaluation_rows)
    step = DistributedStep(
        model,
        job,
        strategy,
        ranks,
        cluster,
        servers,
        where=device(),
        evaluation_rows=evaluation_rows,
        total_examples=total_examples,
    )
    group = ranks.rank // strategy.tensor  # a tensor group draws alike what it computes alike
    if group or strategy.tensor > 1:
        torch.manual_seed(hash((job.seed, group)))
    return step


# Reads from a wrapped model which strategy it is held with: what the engines did, not what was asked of them.
#
# Names of `fully_shard` that torch does not promise to keep are used here alone. If several strategies hold
# a network alike, the first one of the ladder is read: a network without DHEN layers has nothing that fsdp
# could free between forward and backward, so that it is held as by shard_grad_op, and a single layer that is
# recomputed is every second layer as much as every layer.


def executed_strategy(step: ParallelStep) -> Strategy:
    """The strategy that a step's modules, optimizer and micro-batches are those of."""
    tensor = 1 if step.layout is None else step.layout.group.size
    engine, model = step.engine, step.engine.module
    if isinstance(step, PipelineStep):
        return Strategy(
            tensor=tensor,
            dense="zero1" if step.engine.is_zero else "dp",
            # what was asked for is looked at first: a stage of one layer looks alike under several
            checkpointing=_checkpointing(model, layer_count(model), step.engine.checkpointing),
            pipeline=step.ranks,
            schedule=step.schedule,
            micro_batches=step.micro_batches,
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    no_sync = False
    if units and step.micro_batches > 1:  # whether gradients are reduced only after the last micro-batch
        engine.accumulate_only(True)
        no_sync = not groups[0].reduce_grads
        engine.accumulate_only(False)
    dense: Dense = "dp"
    if units and isinstance(groups[0].mesh_info, HSDPMeshInfo):
        dense = "hsdp"
    elif units:
        # the first unit, which has what lies around the layers, keeps its parameters after forward in any case
        layers = [unit._get_fsdp_state()._fsdp_param_groups[0] for unit in units[1:]]
        dense = "fsdp" if any(layer.post_forward_mesh_info for layer in layers) else "shard_grad_op"
    elif isinstance(engine, ZeroOffload):  # masters are in the host's memory
        dense = "zero_offload"
    elif isinstance(engine, Zero):  # whole gradients stay in the buckets, or go
        dense = "zero2" if engine.buckets[0].gradients is None else "zero1"
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    return Strategy(
        tensor=tensor,
        dense=dense,
        checkpointing=_checkpointing(plain, len(getattr(plain, "layers", ()))),
        offload=any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
        micro_batches=step.micro_batches,
        no_sync=no_sync,
    )


def _checkpointing(model: nn.Module, count: int, *asked: Checkpointing) -> Checkpointing:
    """Which of so many layers are recomputed, by those that are held here."""
    layers = getattr(model, "layers", nn.ModuleList()).named_children()
    held = {int(name): isinstance(layer, CheckpointWrapper) for name, layer in layers}
    recomputed = {index for index, is_wrapped in held.items() if is_wrapped}
    names: tuple[Checkpointing, ...] = (*asked, *get_args(Checkpointing))
    return next(name for name in names if held.keys() & {*range(count)[RECOMPUTED[name]]} == recomputed)
