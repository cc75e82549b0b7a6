"""Strategies: every way to hold a model while it trains, from plain DP upwards.

A strategy is a set of techniques: one way to hold the dense state, with or without tensor parallelism,
activation checkpointing, CPU offload and gradient accumulation. Plain DP is the empty set. Most engines are
PyTorch's own: DistributedDataParallel (dp), `fully_shard` that keeps gathered parameters after forward
(shard_grad_op, as PyTorch calls it: parameters are sharded from one step to the next) or frees them (fsdp), on
a mesh of hosts x ranks (hsdp: sharded inside a host, replicated across hosts). ZeRO's stages 1 and 2, in which
parameters stay on every rank, are built on its collectives (`trials.training.distributed.zero`), and so is
ZeRO-Offload, in which optimizer state and update are the host's (`trials.training.distributed.zero_offload`).
If one rank trains, its embedding tables may lie on a level of storage below the device, in the host's memory
or on an SSD, with the rows that are looked up most in a cache on the device
(`trials.training.embeddings.levels`). If `training.tables.synchrony` is not local, servers hold the tables,
in processes of their own (`trials.training.servers`).

A DHEN's layers may lie one after another on several ranks, the stages of a pipeline
(`trials.training.distributed.pipeline`), and wide modules may be split over the ranks of a tensor group, in a
pipeline's stages too: data parallelism, as dp or zero1, is over the ranks that are left.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field, model_validator

from dhen.values import Value, omitted
from trials.cluster.cluster import parse_bytes

Dense = Literal["dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "hsdp", "fsdp"]
Checkpointing = Literal["none", "selective", "full"]
TableLevel = Literal["device", "host", "ssd"]
ServerLevel = Literal["memory", "ssd"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]
"""Orders in which the stages of a pipeline take their micro-batches forward and backward
(`trials.planner.pipeline`)."""
FULLY_SHARDED: tuple[Dense, ...] = ("shard_grad_op", "hsdp", "fsdp")
"""Values of `dense` that `fully_shard` holds; CPU offload exists only here."""
CHUNKS_PER_RANK: dict[Schedule, int] = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 1}
"""Number of stages that a rank has, apart from each other in the model."""
MODEL_PARALLEL: tuple[Dense, ...] = ("dp", "zero1")
"""Values of `dense` that data ranks may have if other ranks have the rest of the model: parts of split modules,
or other stages of a pipeline."""
DELAYING: Dense = "zero_offload"
"""The value of `dense` whose updates can be delayed (`training.delayed_update`)."""
COMPRESSING: tuple[Dense, ...] = ("dp", "zero1")
"""Values of `dense` under which gradients can stay whole on every rank, for one-bit Adam
(`training.optimizer=onebit_adam`)."""
CHECKPOINTING, TABLES, KIB = "_checkpointing", "_tables", 1024
TENSOR, PIPELINE, SERVERS = "tensor", "pipeline", "servers"
TECHNIQUES = (
    f"{', '.join(get_args(Dense))}, with or without +selective_checkpointing or +full_checkpointing, "
    f"+cpu_offload ({', '.join(FULLY_SHARDED)} alone), +host_tables or +ssd_tables (one rank alone), "
    f"+{SERVERS}N or +{SERVERS}N=ssd (if training.tables.synchrony is not local), "
    f"+{TENSOR}N (N ranks split wide modules; {', '.join(MODEL_PARALLEL)} alone), "
    f"+{PIPELINE}N or +{PIPELINE}N=SCHEDULE ({', '.join(MODEL_PARALLEL)} alone; "
    f"{', '.join(get_args(Schedule))}) and "
    "+micro_batches=N, which +no_sync may follow"
)
"""What names of strategies are made of, for messages."""
Prefer = Literal["least", "fastest"]
"""Which of the strategies that fit is chosen: the one with the fewest techniques, or with the shortest step."""
RECOMPUTED: dict[Checkpointing, slice] = {
    "none": slice(0, 0),
    "selective": slice(0, None, 2),
    "full": slice(0, None),
}
"""Slice of a model's layers, first to last, that checkpointing recomputes."""


class Strategy(Value):
    """One way to hold a model while it trains."""

    tensor: int = omitted(1, ge=1)
    """Tensor parallel degree: number of neighbouring ranks that split wide modules among them and see one part of
    the batch (`trials.training.distributed.tensor_parallel`); `dense` says how the others, the data ranks, hold
    the rest."""
    dense: Dense = "dp"
    """How parameters, gradients and optimizer state of the dense part are held."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing by layer: every second layer (selective) or every layer (full) is recomputed."""
    offload: bool = False
    """Whether sharded parameters, gradients and optimizer state live in host memory (`CPUOffloadPolicy`)."""
    tables: TableLevel = omitted("device")
    """Level of storage on which embedding tables lie with their optimizer's state; below the device it has a
    cache of their rows."""
    table_cache: int = omitted(0, ge=0)
    """Size of that cache in KiB; 0 if there is none, or if its size follows from the memory that is left."""
    servers: int = omitted(0, ge=0)
    """Number of servers that hold the embedding tables, in processes of their own; 0 if the ranks hold them."""
    server_level: ServerLevel = omitted("memory")
    """Level of storage on which servers have the tables."""
    pipeline: int = omitted(1, ge=1)
    """Number of ranks that have the model's layers one after another; data parallelism is over the others."""
    schedule: Schedule = omitted("1f1b")
    """Order in which these ranks take micro-batches; of no meaning for one."""
    micro_batches: int = Field(default=1, gt=0)
    """Number of parts of a rank's batch that go forward and backward one after another before the update."""
    no_sync: bool = False
    """Whether `fully_shard` keeps whole gradients until the last micro-batch and reduces them there once
    (`set_requires_gradient_sync`), in place of reducing them and keeping shards after every micro-batch. It
    takes memory for less traffic, so it is a way to accumulate gradients and no technique of its own. It has no
    meaning for one micro-batch, nor for dp and zero1, which always wait, nor for zero2 and zero_offload, whose
    gradients would have to stay whole."""

    @model_validator(mode="after")
    def _check(self) -> Strategy:
        if self.table_cache and self.tables == "device":
            raise ValueError("tables on the device need no cache")
        if self.server_level != "memory" and not self.servers:
            raise ValueError(f"there are no servers whose {self.server_level} could have the tables")
        if self.servers and (self.tables != "device" or self.model_parallel):
            beside = f"{self.tables}{TABLES}" if self.tables != "device" else f"{TENSOR}N and {PIPELINE}N"
            raise ValueError(
                f"{SERVERS}{self.servers} hold the tables of ranks that have the whole dense part each, or a "
                f"shard of it; leave {beside} out, or the servers"
            )
        if self.pipeline == 1 and self.schedule != "1f1b":
            raise ValueError(f"schedule {self.schedule} is one of a pipeline; give pipeline2 or more")
        beside_stages = {
            self.dense: self.dense not in MODEL_PARALLEL,
            "cpu_offload": self.offload,
            f"{self.tables}{TABLES}": self.tables != "device",
            "no_sync": self.no_sync,
        }
        for technique, given in beside_stages.items():
            if given and self.pipeline > 1:
                raise ValueError(
                    f"{technique} does not hold the stages of a pipeline; {' and '.join(MODEL_PARALLEL)} do, with "
                    "or without activation checkpointing"
                )
        if self.tensor > 1 and self.dense not in MODEL_PARALLEL:
            raise ValueError(
                f"{TENSOR}{self.tensor} stands beside {' or '.join(MODEL_PARALLEL)} alone, not {self.dense}"
            )
        return self

    @property
    def model_parallel(self) -> bool:
        """Whether a rank has a part of the model alone, whose other parts others compute."""
        return self.tensor > 1 or self.pipeline > 1

    @property
    def ways_to_cut(self) -> int:
        """Number of ways in which the model is cut: into parts of modules, into stages."""
        return (self.tensor > 1) + (self.pipeline > 1)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that have a model together, each a part of a stage; data parallelism is over the
        others."""
        return self.tensor * self.pipeline

    @property
    def chunks_per_rank(self) -> int:
        """Number of stages that each rank of a pipeline has."""
        return CHUNKS_PER_RANK[self.schedule]

    @cached_property
    def techniques(self) -> tuple[str, ...]:
        """The techniques that the strategy consists of; plain DP is the empty set."""
        size = f"={self.table_cache}KiB" if self.table_cache else ""
        on_level = f"={self.server_level}" if self.server_level != "memory" else ""
        schedule = f"={self.schedule}" if self.schedule != "1f1b" else ""
        words = (
            f"{TENSOR}{self.tensor}" if self.tensor > 1 else "",
            f"{PIPELINE}{self.pipeline}{schedule}" if self.pipeline > 1 else "",
            self.dense if self.dense != "dp" else "",
            f"{self.checkpointing}{CHECKPOINTING}" if self.checkpointing != "none" else "",
            "cpu_offload" if self.offload else "",
            f"{SERVERS}{self.servers}{on_level}" if self.servers else "",
            f"{self.tables}{TABLES}{size}" if self.tables != "device" else "",
            f"micro_batches={self.micro_batches}" if self.micro_batches > 1 else "",
        )
        return tuple(filter(None, words))

    @cached_property
    def name(self) -> str:
        """The techniques joined by `+`, as in records and tags: `dp`, `fsdp+full_checkpointing`; `no_sync` comes
        last."""
        dense = ["dp"] if self.dense == "dp" and not self.model_parallel else []
        return "+".join([*dense, *self.techniques, *(["no_sync"] if self.no_sync else [])])

    @cached_property
    def unsized_name(self) -> str:
        """The name without the size of a cache, which is every model's own."""
        return self.replace(table_cache=0).name

    @cached_property
    def held_as(self) -> str:
        """The name without micro-batches and the size of a cache: two strategies hold the model in the same way
        if these are equal."""
        return self.replace(table_cache=0, micro_batches=1, no_sync=False).name

    @property
    def updated_on_host(self) -> bool:
        """Whether the host has the optimizer's state and takes its steps."""
        return self.offload or self.dense == "zero_offload"

    @property
    def can_compress(self) -> bool:
        """Whether every rank has whole gradients of the whole model, which one-bit Adam compresses."""
        return self.dense in COMPRESSING and not self.model_parallel

    @property
    def can_send_low_rank(self) -> bool:
        """Whether DistributedDataParallel averages whole gradients, which PowerSGD compresses."""
        return self.dense == "dp" and not self.model_parallel

    @property
    def fully_sharded(self) -> bool:
        """Whether `fully_shard` holds the dense state."""
        return self.dense in FULLY_SHARDED


@lru_cache(maxsize=4096)
def named(name: str) -> Strategy:
    """Returns the strategy with this `name`; its techniques may stand in any order.

    Raises:
        ValueError: naming the technique that is none, that stands there a second time or beside one that it cannot
            stand beside, and those there are.
    """
    fields: dict[str, object] = {}
    for technique in name.split("+"):
        found = _fields_of(technique.strip())
        for field in found.keys() & fields.keys():
            raise ValueError(f"{name!r} says {field} twice; a strategy is one of {TECHNIQUES}")
        fields |= found
    if PIPELINE in fields and fields.get("micro_batches") == 1:
        raise ValueError(
            f"{name!r}: in a pipeline with one micro-batch all ranks but one always wait; give +micro_batches="
            f"{fields[PIPELINE]} or more, or none, and the plan takes a number"
        )
    if TENSOR in fields and fields.get("dense", "dp") not in MODEL_PARALLEL:
        raise ValueError(
            f"{name!r}: modules are split beside {' or '.join(MODEL_PARALLEL)} alone; {TENSOR}{fields[TENSOR]} or "
            f"{TENSOR}{fields[TENSOR]}+zero1 would work"
        )
    return Strategy.model_validate(fields)


StrategyName = Annotated[
    str, BeforeValidator(lambda name: named(name).name if isinstance(name, str) else name)
]
"""A strategy's name as `Strategy.name` has it, from a name whose techniques stand in any order."""


def _fields_of(technique: str) -> dict[str, object]:
    """Returns the fields of `Strategy` that a technique sets, with their values."""
    word, _, count = technique.partition("=")
    checkpointing, level = word.removesuffix(CHECKPOINTING), word.removesuffix(TABLES)
    if word in get_args(Dense):
        return {"dense": word}
    if checkpointing != word and checkpointing in get_args(Checkpointing):
        return {"checkpointing": checkpointing}
    if technique == "cpu_offload":
        return {"offload": True}
    if technique == "no_sync":
        return {technique: True}
    stages = word.removeprefix(PIPELINE)
    if stages != word and stages.isdecimal() and int(stages) > 1 and count in ("", *get_args(Schedule)):
        return {PIPELINE: int(stages), "schedule": count or "1f1b"}
    servers = word.removeprefix(SERVERS)
    if servers != word and servers.isdecimal() and int(servers) > 0 and count in ("", *get_args(ServerLevel)):
        return {SERVERS: int(servers), "server_level": count or "memory"}
    if (degree := word.removeprefix(TENSOR)) != word and degree.isdecimal() and int(degree) > 1:
        return {TENSOR: int(degree)}
    if word == "micro_batches" and count.isdecimal() and int(count) > 0:
        return {word: int(count)}
    if level != word and level in ("host", "ssd"):
        if not count:
            return {"tables": level}
        with suppress(ValueError):  # what is no size is no technique
            if kib := parse_bytes(count) // KIB:
                return {"tables": level, "table_cache": kib}
    raise ValueError(f"{technique!r} is no memory technique; a strategy is one of {TECHNIQUES}")


def data_ranks(tensor: int, hosts: int, gpus_per_host: int) -> tuple[int, int]:
    """Returns on how many hosts, and how many per host, the data ranks of one place in all tensor groups are."""
    if tensor <= gpus_per_host:
        return hosts, gpus_per_host // tensor
    return hosts * gpus_per_host // tensor, 1


def shards(dense: Dense, hosts: int, gpus_per_host: int) -> int:
    """Returns over how many ranks the sharded part of the dense state is spread."""
    if dense == "dp":
        return 1
    return gpus_per_host if dense == "hsdp" else hosts * gpus_per_host


class DataPart(NamedTuple):
    """Which part of every batch a rank reads."""

    rank: int
    ranks: int
    """Number of parts."""


class Ranks(NamedTuple):
    """The place of a process among hosts that are alike; ranks of a host come one after another."""

    rank: int = 0
    """Number of this process among all, from 0."""
    hosts: int = 1
    gpus_per_host: int = 1

    @property
    def world(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.gpus_per_host

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all: events, weights, sentences."""
        return self.rank == 0

    def data_part(self, pipeline: int = 1) -> DataPart:
        """Returns which part of every batch this rank reads, if so many ranks are a pipeline: they read the
        same.

        The ranks of a stage follow one another, so that stages lie on different hosts if there are as many."""
        parts = self.world // pipeline
        return DataPart(self.rank % parts, parts)

    def stage(self, pipeline: int) -> int:
        """Returns the place of this rank in its pipeline of so many ranks."""
        return self.rank // (self.world // pipeline)


def rank_slice(size: int, rank: int, ranks: int) -> slice:
    """Returns which of `size` things in a row a rank has; the ranks' parts are equal up to one."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)
