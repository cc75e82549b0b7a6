"""The ladder: every strategy that makes sense on so many ranks, fewer techniques first; the least one that fits.

"Least" is the DHEN paper's rule to use the minimal set of techniques that meets the need: a strategy with
fewer techniques goes before one with more; of as many, one whose ranks hold whole layers goes before one that
splits modules, whose every layer waits for other ranks, or that needs a pipeline, and these before one that
does both; among equals the lowest predicted step time counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, get_args

from dhen.errors import UserError
from trials.planner.estimates import PricedStrategy
from trials.planner.pipeline import wrong_micro_batches
from trials.records.job import TrainingConfig
from trials.records.strategy import (
    CHUNKS_PER_RANK,
    COMPRESSING,
    DELAYING,
    FULLY_SHARDED,
    MODEL_PARALLEL,
    Checkpointing,
    Dense,
    Prefer,
    Schedule,
    Strategy,
    TableLevel,
)

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Numbers of micro-batches (steps of gradient accumulation) that are considered."""
ALONE: tuple[Dense, ...] = ("dp", "zero_offload")
"""Values of `dense` that make sense on one rank."""
LONGEST = 16
"""Largest number of ranks of a pipeline: to play the passes of longer ones takes longer than a plan should."""
PER_STAGE = (1, 2, 4, 8)
"""Numbers of micro-batches per rank of a pipeline that are considered."""
TENSOR_DEGREES = (2, 4, 8, 16)
"""Tensor parallel degrees that are considered inside a host."""
BESIDE_SPLIT: tuple[tuple[Checkpointing, ...], tuple[int, ...]] = ("none", "full"), (1, 4, 16)
"""Checkpointing and numbers of micro-batches that are considered beside them, unless a degree is asked for."""
LEVELS: tuple[TableLevel, ...] = ("device", "host", "ssd")
"""Levels of storage on which one rank may have its tables."""


@cache
def ladder(
    hosts: int, gpus_per_host: int, examples_per_rank: int, layers: int = 0, schedule: Schedule = "1f1b"
) -> tuple[Strategy, ...]:
    """Returns every strategy that makes sense on so many ranks, fewer techniques first; of as many those without
    pipelines.

    One rank has nothing to shard: zero_offload is there, `fully_shard` for CPU offload alone, and tables may lie
    below the device. HSDP needs several hosts of several ranks. A micro-batch has at least one example. Whole
    gradients are kept until the last micro-batch (`no_sync`) if they are not offloaded: they would stay on
    the device, for which offload makes room.

    Modules are split over ranks of one host (`split_ladder`). Pipelines have as many ranks as divide all, for each
    at least one of the model's `layers` (or more, as the schedule has it), and micro-batches enough to keep them
    busy (`staged_ladder`). Each degree of the one is there with each of the other.
    """
    ranks = hosts * gpus_per_host
    ways: tuple[Dense, ...] = (*ALONE, "fsdp")
    if ranks > 1:
        hsdp: tuple[Dense, ...] = ("hsdp",) if min(hosts, gpus_per_host) > 1 else ()
        ways = ("dp", "zero1", "zero2", "zero_offload", "shard_grad_op", *hsdp, "fsdp")
    strategies = [
        Strategy(
            dense=dense,
            checkpointing=checkpointing,
            offload=offload,
            tables=tables,
            micro_batches=micro_batches,
            no_sync=no_sync,
        )
        for dense in ways
        for checkpointing in ("none", "selective", "full")
        for offload in ((False, True) if dense in FULLY_SHARDED else (False,))
        for tables in (LEVELS if ranks == 1 else LEVELS[:1])
        for micro_batches in MICRO_BATCHES
        for no_sync in (False, True)
        if not no_sync or (dense in FULLY_SHARDED and not offload and micro_batches > 1 < ranks)
        if micro_batches <= examples_per_rank and (ranks > 1 or dense in ALONE or offload)
    ]
    strategies += staged_ladder(ranks, examples_per_rank, layers, schedule)
    for degree in TENSOR_DEGREES:
        if gpus_per_host % degree == 0:
            strategies += split_ladder(degree, ranks, examples_per_rank, *BESIDE_SPLIT)
            strategies += staged_ladder(ranks, examples_per_rank, layers, schedule, degree, BESIDE_SPLIT[0])
    return tuple(
        sorted(strategies, key=lambda s: (len(s.techniques), s.ways_to_cut > 1, s.tensor, s.pipeline > 1))
    )


def staged_ladder(
    ranks: int,
    examples_per_rank: int,
    layers: int,
    schedule: Schedule,
    tensor: int = 1,
    ways: Sequence[Checkpointing] = get_args(Checkpointing),
) -> list[Strategy]:
    """Returns the strategies with pipelines of a schedule, in whose stages so many ranks split modules; a
    micro-batch has at least one example."""
    return [
        Strategy(
            tensor=tensor,
            dense=dense,
            checkpointing=checkpointing,
            pipeline=pipeline,
            schedule=schedule,
            micro_batches=micro_batches,
        )
        for pipeline in pipeline_degrees(ranks // tensor, layers // CHUNKS_PER_RANK[schedule])
        for dense in (MODEL_PARALLEL if pipeline * tensor < ranks else MODEL_PARALLEL[:1])
        for checkpointing in ways
        for micro_batches in (pipeline * per_stage for per_stage in PER_STAGE)
        if micro_batches <= pipeline * tensor * examples_per_rank
        and wrong_micro_batches(schedule, pipeline, micro_batches) is None
    ]


def pipeline_degrees(ranks: int, layers: int) -> list[int]:
    """Returns the numbers of ranks that can be a pipeline of so many layers."""
    return [degree for degree in range(2, min(ranks, layers, LONGEST) + 1) if ranks % degree == 0]


def split_ladder(
    degree: int,
    ranks: int,
    examples_per_rank: int,
    ways: Sequence[Checkpointing] = get_args(Checkpointing),
    counts: Sequence[int] = MICRO_BATCHES,
) -> list[Strategy]:
    """Returns every strategy with this tensor parallel degree that makes sense on so many ranks, each of which
    reads so many examples; if one tensor group has all ranks, there is nothing to shard."""
    return [
        Strategy(tensor=degree, dense=dense, checkpointing=checkpointing, micro_batches=micro_batches)
        for dense in (MODEL_PARALLEL if ranks > degree else MODEL_PARALLEL[:1])
        for checkpointing in ways
        for micro_batches in counts
        if micro_batches <= degree * examples_per_rank
    ]


def check_degree(degree: int, hosts: int, gpus_per_host: int) -> None:
    """Raises UserError if ranks cannot be tensor groups of this degree: each is in one host, or has all ranks
    of several hosts."""
    ranks = hosts * gpus_per_host
    inside = gpus_per_host % degree == 0
    if inside or (degree % gpus_per_host == 0 and ranks % degree == 0):
        return
    fitting = [n for n in range(2, ranks + 1) if gpus_per_host % n == 0]
    fitting += [n for n in range(2 * gpus_per_host, ranks + 1, gpus_per_host) if ranks % n == 0]
    would = f"would work: {', '.join(f'tensor{n}' for n in fitting)}" if fitting else "one rank has none"
    raise UserError(
        f"technique=tensor{degree}: {hosts} x {gpus_per_host} ranks are not made of groups of {degree}, each in "
        f"one host or with all ranks of several; {would}."
    )


def choose(priced: Iterable[PricedStrategy], prefer: Prefer) -> PricedStrategy | None:
    """Returns the strategy that fits with the fewest techniques, those whose ranks hold whole layers first, those
    that have parts of stages last, then with the shortest step; None if none fits."""

    def order(each: PricedStrategy) -> tuple[int, int, float]:
        strategy, seconds = each.strategy, each.time.total
        if prefer == "fastest":
            return 0, 0, seconds
        return len(strategy.techniques), strategy.ways_to_cut, seconds

    return min((each for each in priced if each.fits), key=order, default=None)


# Which training settings and techniques exclude each other, in one wording for plans and for what trains.
#
# What ranks exclude (`hsdp` on one host) is the ladder's business, and servers of tables are that of
# `trials.planner.choice`.


class Exclusion(NamedTuple):
    """A training setting that some techniques cannot have unless it has its default."""

    key: str
    goes_with: Callable[[Strategy], bool]
    alone: str
    """What the setting is planned with, and why with nothing else."""
    instead: str

    def value(self, training: TrainingConfig) -> object:
        """Returns the setting's value; None for the default."""
        value = getattr(training, self.key)
        return None if value == TrainingConfig.model_fields[self.key].default else value


EXCLUSIONS = (
    Exclusion(
        "delayed_update",
        lambda strategy: strategy.dense == DELAYING,
        f"{DELAYING} alone, whose updates are the host's",
        f"Give technique={DELAYING}",
    ),
    Exclusion(
        "optimizer",
        lambda strategy: strategy.can_compress,
        f"{' and '.join(COMPRESSING)} alone, under which every rank has whole gradients",
        f"Give technique={' or technique='.join(COMPRESSING)}",
    ),
    Exclusion(
        "power_sgd_rank",
        lambda strategy: strategy.can_send_low_rank,
        "dp alone, whose gradients DistributedDataParallel averages",
        "Give technique=dp",
    ),
    Exclusion(
        "table_decay",
        lambda strategy: strategy.tables == "device",
        "tables on the device alone, since every step reads every row",
        "Leave host_tables and ssd_tables out",
    ),
)


def exclusions_of(training: TrainingConfig) -> list[Exclusion]:
    """Returns the exclusions that the settings of a training bring."""
    return [each for each in EXCLUSIONS if each.value(training) is not None]


def check_together(training: TrainingConfig, strategy: Strategy) -> None:
    """Checks that a training can have a technique.

    Raises:
        UserError: naming the setting and the technique that exclude each other, and what would work.
    """
    for each in exclusions_of(training):
        if not each.goes_with(strategy):
            raise UserError(
                f"training.{each.key}={str(each.value(training)).lower()} is planned with {each.alone}; "
                f"technique={strategy.name} excludes that. {each.instead}, or leave training.{each.key} out."
            )
