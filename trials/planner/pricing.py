"""Prices strategies of one model, batch and cluster: what they share is worked out once."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from math import ceil
from typing import Any

from dhen.config import ModelConfig
from dhen.cost import NUMBER_BYTES
from dhen.inputs.lift import held_schema, table_dims, table_groups
from dhen.model import taped_model
from dhen.ops.norm import POOL_WORDS
from dhen.schema import FeatureSchema
from dhen.tape import MOST_ROWS, TapedSegment, TapeSetting
from trials.cluster.cluster import CUDA_CONTEXT_BYTES, Cluster, byte_words
from trials.optim.adamw import ring_bytes
from trials.optim.one_bit_adam import low_rank_of
from trials.optim.rowwise_adagrad import AT_ONCE, WORKSPACE_BYTES
from trials.planner.collectives import (
    ALLOCATOR_RESERVE_BYTES,
    CUBLAS_WORKSPACE_BYTES,
    LEAST_RESERVE_BYTES,
    NCCL_COMMUNICATOR_BYTES,
    collectives,
)
from trials.planner.estimates import DEFAULT_OPTIONS, MemoryEstimate, PlanOptions, StepTime
from trials.planner.memory import DensePeak, dense_peak, recomputed
from trials.planner.pipeline import (
    PipelineTraffic,
    StageMemory,
    layers_per_stage,
    pipeline_peak,
    pipeline_time,
    stage_memories,
    stages_of,
)
from trials.planner.segments import ITEMSIZES, Segment, segments_at, shapes_of, taped
from trials.planner.step_time import PlannedStep, prepare, price, segment_seconds
from trials.planner.table_memory import (
    LEFT_FREE,
    Lookup,
    OffloadedTables,
    kept_bytes,
    lookup_bytes,
    saved_bytes,
    update_bytes,
)
from trials.planner.table_memory import one_rank_update_bytes as update_bytes_alone
from trials.planner.table_placement import (
    FP32_BYTES,
    ONE_PROCESS_ROW_STATE_BYTES,
    ROW_STATE_BYTES,
    TABLE_DECAY_ROW_BYTES,
    Placement,
    PlacementError,
    place,
    table_notes,
)
from trials.planner.table_servers import (
    LEFT_TO_SYSTEM,
    ServedTables,
    ServerBytes,
    ServersTime,
    kept,
    servers_time,
)
from trials.planner.zero_memory import Activations, DenseRank, Itemsizes, LiveMemory, RankInput, total
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import KIB, Checkpointing, Strategy, data_ranks

ID_BYTES = 4
"""Bytes of an id, which the loader has as int32."""
LABEL_BYTES = 4
DENSE_COPIES = 6
"""Times that dense weights' bytes go through memory on a rank that trains alone: gradients are put together and
clipped, weights copied as they come."""
BATCHES_HELD = {"cpu": 2, "cuda": 2}
"""Batches that a device holds: the one that is trained on, and the next one, by which the loop knows whether this
is the last."""
POOL_BYTES = 2 * POOL_WORDS * 8
"""Random bits that dropout draws on, on a CPU."""


class CostModel:
    """Prices the strategies of one model, batch and cluster."""

    def __init__(
        self,
        model: ModelConfig,
        schema: FeatureSchema,
        training: TrainingConfig,
        cluster: Cluster,
        *,
        options: PlanOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Takes the arguments of `plan.plan`."""
        assert training.batch_size is not None
        assert training.precision != "auto"
        self.model, self.schema, self.training, self.cluster = model, schema, training, cluster
        self.batch_size, self.precision = training.batch_size, training.precision
        self.options = options
        self._tables, self._dims = held_schema(model, schema).tables, table_dims(model, schema)
        self.on_servers = training.tables.on_servers and bool(self._tables)
        self.alone = self.on_servers and training.tables.synchrony == "async"
        """Whether each rank trains on batches of its own."""
        self._ranks_of_batch = 1 if self.alone else cluster.ranks
        self.examples_per_rank = ceil(self.batch_size / self._ranks_of_batch)
        self._taped: dict[int, tuple[TapedSegment, ...]] = {}
        self._segments: dict[tuple[int, int], tuple[Segment, ...]] = {}
        self._activations: dict[tuple[int, int, Checkpointing], Activations] = {}
        self._steps: dict[tuple[int, int, bool], PlannedStep] = {}
        self._buckets: dict[tuple[int, int], int] = {}
        self._cuts: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._stage_memories: dict[tuple[int, int, tuple[int, ...], Checkpointing], list[StageMemory]] = {}
        self._without_tables: dict[Strategy, MemoryEstimate] = {}

    def changed(
        self, *, model: ModelConfig | None = None, cluster: Cluster | None = None, **training: Any
    ) -> CostModel:
        """Returns the prices with another model, another cluster, or other settings of the training."""
        return CostModel(
            model or self.model,
            self.schema,
            self.training.replace(**training),
            cluster or self.cluster,
            options=self.options,
        )

    @cached_property
    def below(self) -> OffloadedTables:
        """The tables as they lie below the device, if one rank trains."""
        groups, stored = table_groups(self.model, self.schema), self.training.table_precision
        return OffloadedTables(groups, self._tables, self.examples_per_rank, NUMBER_BYTES[stored])

    @cached_property
    def served(self) -> ServedTables:
        """The tables as they lie on servers."""
        return ServedTables(
            self._tables,
            self._dims,
            self.examples_per_rank,
            NUMBER_BYTES[self.training.table_precision],
            NUMBER_BYTES[self.training.all_to_all_precision],
        )

    @cached_property
    def kept(self) -> ServerBytes:
        """What servers have, whatever their number."""
        dense_numbers = self.numbers if self.alone else 0
        return kept(self.served, decays=self.training.table_decay > 0, dense_numbers=dense_numbers)

    def servers_time(self, strategy: Strategy) -> ServersTime:
        """Returns the seconds of pulls and pushes in a step of a strategy with servers."""
        return servers_time(
            self.served,
            self.kept,
            self.cluster,
            strategy,
            self.training.tables,
            dense_numbers=self.numbers if self.alone else 0,
            rest=self._beside_servers(strategy).total,
        )

    def _beside_servers(self, strategy: Strategy) -> StepTime:
        """Returns a step without what servers are about: a rank looks up in rows that it has pulled, and if it
        trains alone has no collectives, and no update but copies."""
        step = self.step(self.micro_batch(strategy), below=False)
        if self.alone:
            alone = collectives(self.cluster, 1, 1)
            step = step._replace(everywhere=alone, in_host=alone, across=alone, data_hosts=1, data_per_host=1)
        time = price(step, strategy)
        found = {"lookup": self.served.lookup_bytes / step.bandwidth}
        if self.alone:
            found["optimizer"] = DENSE_COPIES * FP32_BYTES * self.numbers / step.bandwidth
        less = sum(getattr(time, name) for name in found)
        return time.replace(**found, total=time.total + sum(found.values()) - less)

    @property
    def room_for_servers(self) -> int:
        """Bytes of a host's memory that are not left to the system."""
        return int((1 - LEFT_TO_SYSTEM) * self.cluster.host_memory_bytes)

    @property
    def may_lie_below(self) -> bool:
        """Whether there are tables that may lie below the device, unless a setting excludes it: one rank has
        them."""
        return bool(self._tables) and not self.on_servers and self.cluster.ranks == 1

    def sized(self, strategy: Strategy) -> Strategy:
        """Returns a strategy whose tables lie below the device with the size of their cache: what is left of the
        device's memory, and at least the rows of a batch; any other strategy, and one that has a size, as it
        is."""
        if strategy.tables == "device" or strategy.table_cache:
            return strategy
        least = -(-self.below.least_bytes // KIB)
        memory = self.memory(strategy.replace(table_cache=least))
        beside = memory.context + memory.margin
        room = int((1 - LEFT_FREE) * self.cluster.hbm) - beside
        left = self._tensors_within(room) - (memory.needed - beside - memory.reserve)
        if self.cluster.device == "cpu":
            left = min(left, self.cluster.host_memory_bytes - self.host_bytes(memory))
        whole = -(-self.below.whole_bytes // KIB)
        return strategy.replace(table_cache=max(1, least, min(whole, least + left // KIB)))

    @cached_property
    def placement(self) -> Placement:
        """Placement of the embedding tables in the memory that a rank has for them, on the device.

        Raises:
            PlacementError: if they do not fit beside nothing.
        """
        beside = self.context_bytes
        if self.cluster.hbm <= beside:
            raise PlacementError(
                f"a rank has {byte_words(self.cluster.hbm)}, of which context and workspaces alone take "
                f"{byte_words(beside)}; give a rank more memory.",
                beside - self.cluster.hbm,
            )
        room = self.cluster.hbm - beside
        try:
            return self._placed(self._tensors_within(room))
        except PlacementError as error:
            needed = self._tensors_within(room) + error.lacking_bytes
            lacking = needed + self._reserve_bytes(needed) - room
            raise PlacementError(str(error), lacking) from None

    def _placed(self, memory_bytes: int | None) -> Placement:
        """Returns the placement in so much memory; None for tables for whose bytes the device needs no room."""
        alone = self.cluster.ranks == 1
        state = ONE_PROCESS_ROW_STATE_BYTES if alone else ROW_STATE_BYTES
        return place(
            () if self.on_servers else self._tables,
            () if self.on_servers else self._dims,
            self.cluster,
            global_batch=self.batch_size,
            memory_bytes=memory_bytes,
            row_state_bytes=state + TABLE_DECAY_ROW_BYTES * (alone and self.training.table_decay > 0),
            weight_bytes=NUMBER_BYTES[self.training.table_precision],
            sent_bytes=NUMBER_BYTES[self.training.all_to_all_precision],
        )

    @property
    def one_bit(self) -> bool:
        """Whether the optimizer is one-bit Adam."""
        return self.training.optimizer == "onebit_adam"

    @property
    def context_bytes(self) -> int:
        """Memory of a GPU's context, of libraries' workspaces, of a communicator if there are several
        ranks, and of random bits."""
        rounding = ring_bytes(self.cluster.device) if self.training.optimizer_precision == "bf16" else 0
        if self.cluster.device == "cpu":
            return rounding + (POOL_BYTES if self.model.uses_dropout else 0)
        communicator = NCCL_COMMUNICATOR_BYTES if self.cluster.ranks > 1 else 0
        return rounding + CUDA_CONTEXT_BYTES + CUBLAS_WORKSPACE_BYTES + communicator

    def _reserve_bytes(self, tensors: int) -> int:
        """Returns what a GPU's caching allocator holds beyond so many bytes of tensors."""
        if self.cluster.device == "cpu":
            return 0
        return min(ALLOCATOR_RESERVE_BYTES, max(LEAST_RESERVE_BYTES, tensors))

    def _tensors_within(self, room: int) -> int:
        """Returns bytes of tensors that fit in so many bytes with what the allocator holds beyond them."""
        return max(0, room - self._reserve_bytes(room // 2))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the prices should know."""
        segment_lists = self._segments.values()
        kinds = {kind for segments in segment_lists for segment in segments for kind in segment.undeclared}
        traced = tuple(
            f"Module {kind!r} declares no memory (`write`): its layers were traced, on the CPU's code path."
            for kind in sorted(kinds)
        )
        if self.schema.tables and not self.on_servers:
            with suppress(PlacementError):  # the plan says that they do not fit
                return traced + table_notes(self.training, self.placement, self.cluster.device)
        return traced

    def micro_batch(self, strategy: Strategy) -> int:
        """Returns the number of examples in a rank's largest micro-batch; those of a tensor group are all its
        ranks'."""
        return ceil(self.examples(strategy) / strategy.micro_batches)

    def examples(self, strategy: Strategy) -> int:
        """Returns the number of examples that go through a rank's dense part in a step; all ranks of a tensor
        group or of a pipeline have the same ones."""
        return ceil(self.batch_size * strategy.model_ranks / self._ranks_of_batch)

    def _examples_read(self, strategy: Strategy) -> int:
        """Returns the number of examples that a rank reads in a step: the same as all ranks of its pipeline."""
        return ceil(self.batch_size * strategy.pipeline / self._ranks_of_batch)

    def layers_per_stage(self, strategy: Strategy) -> tuple[int, ...]:
        """Returns where the model is cut into the stages of a pipeline, by the predicted seconds of its parts."""
        micro, stages = self.micro_batch(strategy), strategy.pipeline * strategy.chunks_per_rank
        key = micro, strategy.tensor, stages
        if key not in self._cuts:
            step = self.step(micro, below=False, tensor=strategy.tensor)
            self._cuts[key] = layers_per_stage(tuple(map(sum, segment_seconds(step))), stages)
        return self._cuts[key]

    def _sent(self, strategy: Strategy, micro: int) -> PipelineTraffic:
        """Returns what the ranks of a pipeline send each other."""
        segments = self.segments(micro, strategy.tensor)
        stages = stages_of(self.layers_per_stage(strategy))
        boundaries = tuple(segments[layers.stop].footprint.output for layers in stages[:-1])
        return PipelineTraffic(boundaries, FP32_BYTES * sum(self._dims) * self._examples_read(strategy))

    def step(self, micro: int, *, below: bool, tensor: int = 1) -> PlannedStep:
        """Returns what all strategies share whose micro-batches have so many examples."""
        key = micro, tensor, below
        if key not in self._steps:
            self._steps[key] = prepare(
                self.segments(micro, tensor),
                self.cluster,
                self._placed(None) if below else self.placement,
                examples=micro,
                training=self.training,
                tensor=tensor,
            )
        return self._steps[key]

    def time(self, strategy: Strategy) -> StepTime:
        """Returns the time of one step of the whole batch."""
        if strategy.servers:
            time, servers = self._beside_servers(strategy), self.servers_time(strategy)
            return time.replace(
                servers=servers.total,
                hidden=time.hidden + servers.hidden,
                total=time.total + servers.total - servers.hidden,
            )
        micro, below = self.micro_batch(strategy), strategy.tables != "device"
        step = self.step(micro, below=below, tensor=strategy.tensor)
        if strategy.pipeline > 1:
            return pipeline_time(step, strategy, self.layers_per_stage(strategy), self._sent(strategy, micro))
        time = price(step, strategy)
        if not below:
            return time
        cluster = self.cluster
        link = cluster.memory_bandwidth if cluster.device == "cpu" else cluster.host_link_bandwidth
        seconds = self.below.seconds(strategy, link)
        return time.replace(host_transfer=time.host_transfer + seconds, total=time.total + seconds)

    def memory(self, strategy: Strategy) -> MemoryEstimate:
        """Returns the memory of the fullest rank: at the dense part's peak, or at the moment when tables are
        read and updated."""
        if strategy.servers:
            memory, served = self._with_tables_of(strategy, 0), self.served
            on_host = self.kept.of_host(strategy.servers, strategy.server_level, self.cluster.hosts)
            pulled = 0  # rows pulled are an accelerator's host's
            if self.cluster.device != "cpu":
                pulled = (1 + self.training.tables.pulls_ahead) * served.held_bytes + served.gradient_bytes
            return memory.replace(servers=on_host, host=memory.host + pulled)
        if strategy.tables == "device":
            return self._with_tables_of(strategy, self.placement.heaviest_bytes)
        alike = strategy.replace(tables="host", table_cache=0)
        if alike not in self._without_tables:
            self._without_tables[alike] = self._with_tables_of(alike, 0)
        rest = self._without_tables[alike]
        return self._with_reserve(
            rest.replace(
                embedding_shards=self.below.cache_bytes(strategy.table_cache),
                host=rest.host + self.below.host_bytes(strategy),
                margin=self.options.margin_bytes(strategy),
            )
        )

    def _with_reserve(self, memory: MemoryEstimate) -> MemoryEstimate:
        """Returns the memory with what the allocator holds beyond its tensors."""
        tensors = memory.total - memory.context - memory.reserve
        return memory.replace(reserve=self._reserve_bytes(tensors))

    def _with_tables_of(self, strategy: Strategy, table_bytes: int) -> MemoryEstimate:
        """Returns the memory of the fullest rank whose tables take so much of it."""
        dense, moment = self._peak(strategy)
        activations = dense.by_segment if moment is dense.moment else ()
        memory = MemoryEstimate(
            parameters=dense.parameters,
            gradients=moment.gradients,
            optimizer_state=0 if self.alone else dense.optimizer_state,
            activations=sum(size for _, size in activations),
            activations_by_layer=activations,
            embedding_shards=table_bytes,
            unsharded_layer=moment.unsharded,
            communication_buffers=dense.buckets + self._kept_of_lookup + moment.buffers,
            input_batch=dense.batch,
            context=self.context_bytes + self._more_communicators(strategy),
            reserve=0,
            margin=self.options.margin_bytes(strategy),
            host=dense.host,
            peak_at=moment.at,
        )
        return self._with_reserve(memory)

    def evaluation_rows(self, strategy: Strategy) -> int:
        """Returns the rows of a rank that go forward at once in an evaluation: as many as hold no more beside
        weights and optimizer state than a training step does at its peak.

        A power of two, so that strategies that hold nearly the same have the same scores to the bit; at least a
        micro-batch, whose forward pass holds less when nothing is saved. Stages of a pipeline take one at a time
        in any case.
        """
        examples, micro = self.examples(strategy), self.micro_batch(strategy)
        if strategy.pipeline > 1:
            return min(MOST_ROWS, ceil(examples / strategy.tensor))
        dense, moment = self._peak(strategy)
        forward = [each for each in dense.moments if each.at.startswith(("forward", "all-gather"))]
        batch = self._batch(strategy, micro)
        room = moment.total + batch.embeddings - max(each.unsharded + each.buffers for each in forward)
        footprints = [segment.footprint for segment in self.segments(micro, strategy.tensor)]
        inputs = [0, *(footprint.input for footprint in footprints[1:])]  # the batch is counted apart
        running = (footprint.discarding_peak for footprint in footprints)
        activations = max(map(sum, zip(inputs, running, strict=True)))
        saved = self._saved_of_lookup
        read = (batch.other - saved) // BATCHES_HELD[self.cluster.device] + saved
        read += self._lookup_workspace + self._kept_of_lookup
        row_bytes = activations / micro + FP32_BYTES * sum(self._dims) + read / self.examples_per_rank
        fitting = max(1, int((1 - LEFT_FREE) * room / row_bytes))
        power = 1 << fitting.bit_length() - 1
        return min(MOST_ROWS, max(micro, power) // strategy.tensor or 1)

    def _peak(self, strategy: Strategy) -> tuple[DensePeak, LiveMemory]:
        """Returns the dense part of the fullest rank at its peak, and the moment of the rank's."""
        dense = self._dense_peak(strategy)
        left = dense.left
        # in the lookup no embeddings are there yet; in the tables' update no activations, but dense gradients;
        # while ranks take the model over, what is held beyond what a step has all the time
        lookup = LiveMemory("lookup in the tables", 0, 0, buffers=self._lookup_workspace)
        update = left._replace(buffers=left.buffers + self._tables_workspace - self._saved_of_lookup)
        always = dense.parameters + dense.optimizer_state + dense.buckets + dense.batch
        wrapping = LiveMemory("wrapping of the model", 0, 0, buffers=max(dense.wrapping - always, 0))
        return dense, max(dense.moment, lookup, update, wrapping, key=total)

    def _dense_peak(self, strategy: Strategy) -> DensePeak:
        """Returns the dense part of the fullest rank at its peak."""
        micro = self.micro_batch(strategy)
        hosts, per_host = data_ranks(strategy.tensor, self.cluster.hosts, self.cluster.gpus_per_host)
        if self.alone:
            hosts, per_host = 1, 1
        segments = self.segments(micro, strategy.tensor)
        if (hosts, per_host) not in self._buckets:  # one data rank has none
            several = hosts * per_host > 1
            reduced = collectives(self.cluster, hosts, per_host)
            self._buckets[hosts, per_host] = reduced.bucket_bytes() if several else 0
        bucket_bytes = self._buckets[hosts, per_host]
        if strategy.pipeline > 1:
            width = FP32_BYTES * sum(self._dims)
            layers = self.layers_per_stage(strategy)  # which dp and zero1 have alike
            stages_key = micro, strategy.tensor, layers, strategy.checkpointing
            if stages_key not in self._stage_memories:
                self._stage_memories[stages_key] = stage_memories(segments, layers, strategy)
            return pipeline_peak(
                self._stage_memories[stages_key],
                strategy,
                self._batch(strategy, micro),
                width * self.examples_per_rank,
                width * self._examples_read(strategy) if strategy.tensor > 1 else 0,
                itemsizes=self.itemsizes,
                data_ranks=self.data_ranks(strategy),
                device=self.cluster.device,
                bucket_bytes=bucket_bytes,
            )
        key = micro, strategy.tensor, strategy.checkpointing
        if key not in self._activations:
            self._activations[key] = Activations(segments, recomputed(segments, strategy))
        rank = DenseRank(
            segments,
            self._activations[key],
            strategy,
            self._batch(strategy, micro),
            self.itemsizes,
            hosts,
            per_host,
            device=self.cluster.device,
            bucket_bytes=bucket_bytes,
            delayed=self.training.delayed_update,
            one_bit=self.one_bit,
            low_rank=low_rank_of(shapes_of(segments), self.training.power_sgd_rank),
        )
        return dense_peak(rank)

    @cached_property
    def _lookup_workspace(self) -> int:
        """Bytes that a lookup in the tables of several ranks takes beside the embeddings that it puts out."""
        if self.cluster.ranks == 1 or self.on_servers:
            return 0
        looked_up = FP32_BYTES * sum(self._dims) * self.examples_per_rank
        return max(lookup_bytes(self._lookup) - looked_up, 0)

    def lacking_bytes(self, memory: MemoryEstimate) -> int:
        """Returns by how much an estimate exceeds the device's memory, or its ranks together the host's; 0
        if it fits."""
        device = memory.needed - self.cluster.hbm
        return max(device, self.host_bytes(memory) - self.host_available(memory), 0)

    def host_bytes(self, memory: MemoryEstimate) -> int:
        """Returns what the ranks of a host need of its memory if they take any for offload or tables, or if
        servers do, with these; a CPU's device memory is part of it."""
        on_host = memory.host or memory.servers
        own = memory.needed if self.cluster.device == "cpu" and on_host else 0
        return (memory.host + own) * self.cluster.gpus_per_host + memory.servers

    def host_available(self, memory: MemoryEstimate) -> int:
        """Returns what there is of a host's memory for that; beside servers some is left to the system."""
        return self.room_for_servers if memory.servers else self.cluster.host_memory_bytes

    def segments(self, micro: int, tensor: int = 1) -> tuple[Segment, ...]:
        """Returns the model's segments for a micro-batch of so many examples, as a rank of `tensor` has them that
        split modules."""
        if (micro, tensor) not in self._segments:
            self._segments[micro, tensor] = segments_at(self.taped(tensor), self.precision, micro)
        return self._segments[micro, tensor]

    def taped(self, tensor: int = 1) -> tuple[TapedSegment, ...]:
        """Returns the model's segments for any batch."""
        if tensor not in self._taped:
            device = self.cluster.device
            self._taped[tensor] = taped(self.model, self.schema, self.precision, device, tensor)
        return self._taped[tensor]

    def splits(self, tensor: int) -> bool:
        """Whether so many ranks can split any module of the model."""
        setting = TapeSetting(ITEMSIZES[self.precision], self.cluster.device, tensor)
        written = taped_model(self.model, self.schema, setting)
        return any(one.tape is not None and one.tape.flops_elsewhere > 0 for one in written)

    @cached_property
    def numbers(self) -> int:
        """Number of the dense part's parameters."""
        return sum(segment.parameters for segment in self.segments(self.micro_batch(Strategy())))

    def data_ranks(self, strategy: Strategy) -> int:
        """Returns the number of ranks that hold the same parts of the model."""
        return self.cluster.ranks // strategy.model_ranks

    def least_bytes(self, strategy: Strategy, state_bytes: int) -> int:
        """Returns what the fullest rank of a strategy that splits modules needs at least, activations left out;
        `state_bytes` are those of its weights, gradients and optimizer state."""
        beside = self.context_bytes + self._more_communicators(strategy) + self.options.margin_bytes(strategy)
        tensors = state_bytes + self.placement.heaviest_bytes + self._kept_of_lookup
        return beside + tensors + self._reserve_bytes(tensors)

    def _more_communicators(self, strategy: Strategy) -> int:
        """Returns the bytes of the communicators of tensor groups, of pipelines, and of data ranks beside them."""
        degrees = (strategy.tensor > 1) + (strategy.pipeline > 1)
        return (degrees + 1) * NCCL_COMMUNICATOR_BYTES if degrees and self.cluster.device != "cpu" else 0

    def _batch(self, strategy: Strategy, micro: int) -> RankInput:
        """Returns a rank's input. Plain DP on one rank looks embeddings up within the step, unless gradients of
        embeddings must be reached (`training.frequency_decay`) or the optimizer is one-bit Adam; other strategies
        look them up once for all micro-batches.

        Embeddings looked up within the step stay only if they are lifted in fp32, for which they are saved.
        """
        width, examples = FP32_BYTES * sum(self._dims), self.examples(strategy)
        ids = sum(table.mean_ids for table in self.schema.tables)
        bags = ID_BYTES * len(self.schema.multi_hot)  # where each one begins
        numbers = FP32_BYTES * (len(self.schema.numeric) + len(self.schema.bucketed)) + LABEL_BYTES + bags
        if self.training.frequency_decay:
            numbers += FP32_BYTES * len(self.schema.tables)  # 1 / the count of each id
        of_rank = self._examples_read(strategy)
        other_bytes = round(of_rank * (ID_BYTES * ids + numbers)) * BATCHES_HELD[self.cluster.device]
        if strategy.tensor > 1:  # what the group looked up, beside what the rank did
            other_bytes += width * of_rank if strategy.pipeline == 1 else 0
            other_bytes += FP32_BYTES * (len(self.schema.numeric) + len(self.schema.bucketed) + 1) * examples
        apart = bool(strategy.techniques or self.training.frequency_decay or self.one_bit)
        looked_up = width
        if self.cluster.ranks == 1 and not apart:  # a matrix product saves what it lifts
            shorter = [dim for dim in self._dims if dim < self.model.embedding_dim]
            looked_up = FP32_BYTES * sum(shorter) if self.precision == "fp32" else 0
        return RankInput(
            embeddings=looked_up * examples,
            micro_embeddings=width * micro,
            other=other_bytes + self._saved_of_lookup,
        )

    @cached_property
    def _saved_of_lookup(self) -> int:
        """Bytes that one rank's lookup saves for its gradient, until that is there."""
        if self.cluster.ranks > 1 and not self.on_servers:
            return 0
        return saved_bytes(self._tables, self.schema.multi_hot, self.examples_per_rank)

    @cached_property
    def itemsizes(self) -> Itemsizes:
        """Bytes per number of the dense part."""
        return Itemsizes.of(self.training)

    @cached_property
    def _lookup(self) -> Lookup:
        """What the lookups of several ranks are about."""
        training = self.training
        return Lookup(
            () if self.on_servers else self._tables,
            () if self.on_servers else self._dims,
            self.placement,
            self.cluster.ranks,
            self.examples_per_rank,
            NUMBER_BYTES[training.all_to_all_precision],
            rounding_bytes=self._rounding_bytes(self.placement.replicated_gradient_bytes // FP32_BYTES),
            repeats_rows=training.embedding_decay > 0
            and self.cluster.device == "cpu"
            and training.table_precision == "fp32",
        )

    @cached_property
    def _kept_of_lookup(self) -> int:
        """Bytes that several ranks keep of a lookup until the tables are updated; one rank's are in its batch."""
        if self.on_servers and self.cluster.device != "cpu":
            return 0
        if self.on_servers:
            return (1 + self.training.tables.pulls_ahead) * self.served.held_bytes
        return kept_bytes(self._lookup) if self.cluster.ranks > 1 else 0

    @cached_property
    def _tables_workspace(self) -> int:
        """Memory while tables are updated; no activations are alive then, but the embeddings' gradients are.

        On several ranks it is taken by gradients on their way, or by dense sums of replicated tables' gradients;
        on one rank by what the optimizer sums duplicates in, or rounds in.
        """
        if self.on_servers:
            return self.served.gradient_bytes if self.cluster.device == "cpu" else 0
        if self.cluster.ranks > 1:
            return update_bytes(self._lookup)
        groups = table_groups(self.model, self.schema)
        return update_bytes_alone(groups, self._tables, self.examples_per_rank, self._rounding_bytes)

    def _rounding_bytes(self, numbers: int) -> int:
        """Returns the workspace in which so many numbers of fp16 tables are rounded."""
        if self.training.table_precision == "fp32":
            return 0
        return WORKSPACE_BYTES * min(numbers, AT_ONCE[self.cluster.device])


def pricing_of(job: Job, cluster: Cluster) -> CostModel:
    """Returns the prices for a job whose training is resolved."""
    return CostModel(job.model, job.features, job.training, cluster)
