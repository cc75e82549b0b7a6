"""One training step under a strategy, or on several ranks: the same as `trials.training.step`, held in
other ways.

Tables by their engine (`trials.training.embeddings.engine`), the dense part by
`trials.training.distributed.parallelize`. Each rank trains on its slice of every global batch; where slices
differ by an example, losses and gradients are weighted by their share, so that the mean over ranks is the mean
over the batch. Layers are not compiled here.

Shapes: B examples, T categorical tables, K numeric inputs, N rows of a split.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig
from dhen.inputs.lift import held_schema
from dhen.tape import rows_at_once
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import this_machine
from trials.data.loader import Batch
from trials.data.prepared_log import PreparedLog, Split
from trials.optim.adamw import MOMENTS
from trials.optim.one_bit_adam import OneBitAdam
from trials.planner.collectives import BUCKET_BYTES, collectives
from trials.planner.pricing import pricing_of
from trials.records.job import Job
from trials.records.strategy import Ranks, Strategy, data_ranks
from trials.records.trial_record import Metrics
from trials.store.weights import Weights, changes
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.engine import (
    TABLES,
    DenseBatch,
    DenseInputs,
    Engine,
    take_growing,
    take_tables,
)
from trials.training.distributed.executed_strategy import executed_strategy
from trials.training.distributed.parallelize import ParallelStep, device_mesh, parallelize
from trials.training.distributed.pipeline_step import PipelineLookups, PipelineStep, pipelined
from trials.training.distributed.tensor_parallel import Shared, TensorParallel
from trials.training.distributed.zero_offload import ZeroOffload
from trials.training.embeddings.blocks import State
from trials.training.embeddings.engine import TableEngine
from trials.training.embeddings.growing import Begun, GrowingTables
from trials.training.embeddings.levels import CachedTables, CacheUse
from trials.training.embeddings.make_engine import FrequencyDecay, table_engine
from trials.training.evaluation import Keep, logits_over_ranks, metrics_over_ranks
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

LOG = logging.getLogger(__name__)
GROWING = "features.growing."
"""Beginning of the names of what a model knows of growing tables."""


class DistributedStep:
    """A model and its optimizers on this rank; every rank makes the same calls in the same order."""

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
        self._ranks, self._batch_size = ranks, config.batch_size
        self._server_level = strategy.server_level
        tables, self._rows = take_tables(model), take_growing(model)
        self._frequency_decay: FrequencyDecay | None = None
        if tables is not None and config.frequency_decay:
            categorical, decay = len(job.features.categorical), config.frequency_decay
            self._frequency_decay = FrequencyDecay(tables, categorical, decay, ranks.world)
        # these engines move one layer after another, as they hold it
        if not strategy.fully_sharded and strategy.dense != "zero_offload" and strategy.pipeline == 1:
            on_device_for_good(model, where)
        given, cluster = cluster, _cluster(cluster, ranks) if ranks.world > 1 else None
        here = tables is not None and servers is None
        placement = pricing_of(job, cluster).placement if here and cluster is not None else None
        held = held_schema(job.model, job.features)
        level, cached_rows = strategy.tables, tuple[int, ...]()
        if tables is not None and level != "device":
            pricing = pricing_of(job, given or this_machine())
            cached_rows = pricing.below.cached_rows(pricing.sized(strategy).table_cache)
        self._growing: GrowingTables | None = None
        self._served: ServerTables | None = None
        self._tables: TableEngine | None
        if servers is not None:
            assert tables is not None
            self._tables = self._served = ServerTables(tables, self._rows, config, servers, where)
            self._rows = None  # the servers know which key has which row
        else:
            self._tables = table_engine(tables, held, config, ranks, placement, where, level, cached_rows)
        if self._rows is not None:
            self._rows.build_index()  # its keys may have come from another rank
            self._growing = GrowingTables(self._rows, ranks)
        self._data = ranks.data_part(strategy.pipeline)
        self._dense: ParallelStep | PipelineStep
        self._lookups: PipelineLookups | None = None
        if strategy.pipeline > 1:
            assert cluster is not None
            assert isinstance(job.model, DhenConfig)
            cut = pricing_of(job, cluster).layers_per_stage(strategy)
            buckets = _bucket_bytes(cluster, strategy)
            self._dense = pipelined(
                model, strategy, config, job.model, cut, ranks, where=where, bucket_bytes=buckets
            )
            growing_bags = [place for place, table in enumerate(job.features.multi_hot) if table.growing]
            self._lookups = PipelineLookups(self._dense.pipeline.group, growing_bags)
            LOG.info("layers of the stages: %s; this is stage %d", cut, ranks.stage(strategy.pipeline))
        elif self._served is not None and config.tables.synchrony == "async":
            self._dense = ParallelStep(ServedDense(model, config, self._served), strategy.micro_batches)
        else:
            needs_mesh = ranks.world > 1 or strategy.fully_sharded
            mesh = (
                device_mesh(strategy.dense, ranks.hosts, ranks.gpus_per_host, where.type, strategy.tensor)
                if needs_mesh
                else None
            )
            with on_host() if strategy.offload else nullcontext():
                self._dense = parallelize(
                    model,
                    _with_examples_for_all(strategy, config.batch_size, ranks),
                    config,
                    mesh,
                    where=where,
                    bucket_bytes=_bucket_bytes(cluster, strategy),
                    total_examples=total_examples,
                )
        count_on_device([*model.buffers(), *(() if strategy.offload else model.parameters())])
        self._engine: Engine = self._dense.engine
        self._model = model
        LOG.info("model wrapped as %s on %s, %d rank(s)", strategy.name, where, ranks.world)
        most = rows_at_once(model)
        if is_counted() or where.type == "cuda":
            # those of a tensor group go through its model together, and stages take a micro-batch at a time anyway
            examples = -(-config.batch_size // self._data.ranks)
            most = min(most, -(-examples // (1 if strategy.pipeline > 1 else strategy.micro_batches)))
        self._rows_at_once = evaluation_rows or most
        self._offload = strategy.offload
        if strategy.offload:
            keep_on_host(model.parameters())
        self._rate: float = self._engine.optimizer.param_groups[0]["lr"]

    @property
    def strategy(self) -> Strategy:
        """The strategy that the model is held with, read from what wraps its dense part and holds its tables."""
        found = executed_strategy(self._dense)
        if self._served is not None:
            return found.replace(servers=self._served.servers.count, server_level=self._server_level)
        if not isinstance(self._tables, CachedTables):
            return found
        return found.replace(tables=self._tables.level, table_cache=self._tables.table_cache)

    def __call__(self, batch: Batch) -> Tensor:
        """Runs one update; returns this rank's loss, detached, whose mean over ranks is that of the global
        batch."""
        begun, looked_up = None, self._lookups.part(batch.size) if self._lookups is not None else slice(None)
        features = batch.features if self._lookups is None else self._lookups.features_of(batch.features)
        if self._growing is not None:
            features, begun = self._growing.admit(features, batch.time)
        if self._served is not None:
            features = self._served.of_batch(batch)
        embeddings = self._lookup(features, begun)
        whole = embeddings if self._lookups is None else self._lookups.gather(embeddings, batch.size)
        inputs = DenseInputs.of(whole, batch.features)
        weight = batch.size * self._data.ranks / (batch.of_step or self._batch_size)
        loss = self._forward_backward(DenseBatch(inputs, batch.label_B, batch.weight_B), weight)
        if self._lookups is not None:
            self._lookups.scatter_gradients(whole, embeddings, batch.size)
        del whole, inputs  # tables need their room
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

    def _forward_backward(self, batch: DenseBatch, weight: float) -> Tensor:
        """Runs the dense part, with the examples of all ranks of a tensor group where modules are split over
        it."""
        if not isinstance(self._engine, TensorParallel):
            return self._dense.forward_backward(batch, weight)
        group, size = self._engine.group, len(batch.label_B)
        shared = Shared(group, size, batch.label_B.device)
        whole = shared.batch(batch)
        # `weight` is the share of this rank's examples, the group's are as many ranks'
        loss = self._dense.forward_backward(whole, weight * len(whole.label_B) / (size * group.size))
        shared.pass_on_gradients(whole, batch)
        return loss

    @property
    def cache_use(self) -> CacheUse | None:
        """What the cache of tables that lie below the device has done so far; None if there is none."""
        return self._tables.cache_use if isinstance(self._tables, CachedTables) else None

    def ahead(self, batch: Batch) -> None:
        """Is told the batch that comes after the next one trained on, whose rows may be fetched meanwhile."""
        if self._served is not None:
            self._served.ahead(batch)

    @property
    def staleness(self) -> dict[int, int] | None:
        """How often the rows of a batch lacked the updates of so many steps; None if ranks hold the tables."""
        return self._served.staleness if self._served is not None else None

    def begin_pass(self) -> None:
        """Is called before the first step of each pass."""
        if self._served is not None and self._ranks.first:
            self._served.servers.begin_pass()
        if self._growing is not None:
            self._growing.begin_pass()

    def scale_learning_rates(self, dense: float, tables: float) -> float:
        """Sets learning rates to multiples of the configured ones; returns the dense part's, for the record."""
        if self._tables is not None:
            self._tables.scale_learning_rate(tables)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self._rate * dense
        return self._rate * dense

    def finish_update(self) -> None:
        """Waits for a delayed update that is under way on the host; a collective."""
        if isinstance(self._engine, ZeroOffload):
            self._engine.finish()

    def settle(self) -> None:
        """Brings all table rows up to date, and a dense part that is on servers."""
        if self._tables is not None:
            self._tables.settle()
        if isinstance(self._engine, ServedDense):
            self._engine.update()  # others have trained since this rank's last step

    def clipped_steps(self) -> int:
        """Returns the number of steps since the last call whose gradients were clipped; the same on all ranks."""
        return self._engine.clip.clipped_steps()

    def is_finite(self) -> bool:
        """Tells whether no dense weight of any rank is NaN or infinite; the same on all ranks."""
        return all_agree(self._ranks, self._engine.is_finite())

    def evaluate(self, log: PreparedLog, split_name: str, keep: Keep | None = None) -> Metrics:
        """Evaluates on a split of the log, by all ranks; the same on all. `keep` is given the logits on the
        first."""
        split = log.split(split_name)
        return metrics_over_ranks(self.logits(split), split, log, self._ranks, keep)

    def logits(self, split: Split) -> Tensor | None:
        """Returns the logits (N) of a split's rows on the first rank, in the host's memory; None on others."""
        self._model.eval()
        logit_N = logits_over_ranks(self._score, split, self._ranks, self._rows_at_once, self._data)
        self._model.train()
        return logit_N

    def weights(self) -> Weights:
        """Returns a copy of the plain model's weights on the CPU, in fp32; on rank 0, empty on others."""
        weights = self._engine.weights()
        if self._tables is not None:
            table_weights = self._tables.full_weights() or {}
            weights |= {f"{TABLES}{name}": weight for name, weight in table_weights.items()}
        if self._served is not None and self._served.has_keys and self._ranks.first:
            weights[f"{GROWING}keys"] = self._served.keys()
        if self._rows is not None and self._ranks.first:
            weights[f"{GROWING}keys"] = self._rows.keys.clone()
        return weights

    def nothing_changed(self) -> None:
        """Is told that the state which `changed` will be given next is the model's as it is now."""
        if self._served is not None:
            self._served.nothing_changed()

    def changed(self, before: Mapping[str, Tensor]) -> Weights:
        """Returns what makes of an earlier state of the plain model, which has all changes that were returned
        before, what it is; on rank 0. Servers tell of rows that have changed alone."""
        if self._served is None:
            return changes(before, self.weights())
        return changes(before, self._engine.weights()) | self._served.changed(before, TABLES)

    def dense_state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns this rank's dense state for `trials.training.checkpointer`, to save it; with `saved`, to load
        what a checkpoint has under these names into."""
        with on_host() if self._offload else nullcontext():  # moments that there are none of yet
            return self._engine.state(saved)

    def dense_moments(self, steps: int) -> dict[str, FlatPieces]:
        """Returns the dense part's two moments as AdamW would have them after so many steps, on this rank; a
        collective."""
        optimizer = self._engine.optimizer
        if isinstance(optimizer, OneBitAdam) and optimizer.second_stage is not None:
            vectors = optimizer.second_stage.moments(steps)
            return {name: FlatPieces(len(one), (Piece(0, one),)) for name, one in vectors.items()}
        state = self.dense_state()
        return {name: state[name] for name in MOMENTS}

    def table_state(self, saved: Collection[str] | None = None) -> State:
        """Returns this rank's tables, to save them; with `saved`, what it needs of a checkpoint that has these
        keys."""
        state = self._tables.state_dict(saved) if self._tables is not None else {}
        return state | (self._growing.state() if self._growing is not None else {})

    def restored(self, tables: State, steps: int) -> None:
        """Takes over what was loaded into `dense_state()` and `table_state(saved)`, as they were after so many
        steps."""
        self._engine.restored(steps)
        if self._tables is not None:
            self._tables.load_state_dict(tables)
        if self._growing is not None:
            self._growing.restored()

    def save_tables(self, folder: Path) -> None:
        """Has servers write their tables into a folder, if there are servers; a collective."""
        if self._served is not None:
            self._served.settle()
            all_agree(self._ranks, True)  # all have settled
            self._served.save(folder)

    def go_on_with_tables(self, steps: int, folder: Path | None) -> None:
        """Has servers go on after so many steps, with what they wrote into a folder or as they are; a
        collective."""
        if self._served is not None:
            self._served.go_on(steps, folder)
            all_agree(self._ranks, True)  # none pulls before

    def _lookup(self, features: FeatureBatch, begun: Begun | None = None) -> tuple[Tensor, ...]:
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
        inputs = DenseInputs.of(embeddings, whole)
        if not isinstance(self._engine, TensorParallel):
            return self._engine.predict(inputs)
        shared = Shared(self._engine.group, len(features.numeric_BK), features.numeric_BK.device)
        return shared.own(self._engine.predict(shared.inputs(inputs)))


def _with_examples_for_all(strategy: Strategy, batch_size: int, ranks: Ranks) -> Strategy:
    """Returns the strategy with no more micro-batches than the rank with the fewest has examples: all ranks need
    equally many."""
    micro_batches = min(strategy.micro_batches, batch_size * strategy.tensor // ranks.world)
    return strategy.replace(micro_batches=micro_batches, no_sync=strategy.no_sync and micro_batches > 1)


def _cluster(cluster: Cluster | None, ranks: Ranks) -> Cluster:
    """Returns the cluster with these ranks; if none is given, rank 0's of this machine, so that all place
    tables alike."""
    if cluster is None:
        measured = [this_machine() if ranks.first else None]
        dist.broadcast_object_list(measured)
        cluster = measured[0]
        assert cluster is not None
    return cluster.replace(hosts=ranks.hosts, gpus_per_host=ranks.gpus_per_host)


def _bucket_bytes(cluster: Cluster | None, strategy: Strategy) -> int:
    """Returns the size of buckets, as the plan's step time takes it to be."""
    if cluster is None:
        return BUCKET_BYTES
    hosts, per_host = data_ranks(strategy.tensor, cluster.hosts, cluster.gpus_per_host)
    return collectives(cluster, hosts, per_host).bucket_bytes()
