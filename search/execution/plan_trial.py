"""A study's plans: the cluster that they are for, and each trial's plan before it trains.

Training happens on the machines at hand whatever the cluster is; the record says what was planned and what was
executed. A candidate that no technique makes fit ends at once, and its record says by how much it failed,
which the sampler learns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

from dashboards.names import byte_size, short_name
from dhen.config import ModelConfig
from dhen.errors import UserError
from search.samplers.context import MOST_OVER, CandidatePricer, PricedCandidate, evenly
from spaces.space import Candidate
from trials.cluster.cluster import Cluster, byte_words
from trials.cluster.this_machine import THIS, load_cluster, shared
from trials.planner.estimates import DEFAULT_OPTIONS, PlanOptions, PricedStrategy
from trials.planner.plan import Plan, plan_in_least_shape
from trials.records.job import Job
from trials.records.study_record import ClusterSummary
from trials.records.trial_record import Outcome, PlanSummary, RejectedStrategy, TrialKind, TrialRecord

# What a trial's record keeps of the strategies that its plan passed over.
#
# A ladder has dozens of them, most of which differ in nothing but the number of micro-batches. So all are kept
# by name with what they lack, and only one of each way to hold the model with its items and its reason, the
# simplest first: a record of some kilobytes would else have tens.

MOST_ITEMISED = 12
"""Largest number of strategies whose items are kept."""
NOT_ITEMS = {"activations_by_layer", "host", "margin", "peak_at", "servers"}
"""Fields of an estimate that are no items of the device's memory."""


def memory_items(priced: PricedStrategy) -> dict[str, int]:
    """Predicted bytes on the fullest rank at the peak, by item."""
    items: dict[str, int] = priced.memory.model_dump(exclude=NOT_ITEMS)
    return items


def rejected(job_plan: Plan, taken: PricedStrategy, ran_out: Collection[str]) -> tuple[RejectedStrategy, ...]:
    """Other strategies with no more techniques than the one taken, or than one if nothing fits; in the ladder's
    order.

    Args:
        job_plan: the priced ladder.
        taken: the strategy that the trial is held by.
        ran_out: names of strategies that were tried before and ran out of memory, which are not among them.
    """
    most = len(taken.strategy.techniques) if taken.fits else 1
    passed_over = [
        priced
        for priced in job_plan.up_to(most)
        if priced is not taken and priced.strategy.name not in ran_out
    ]
    # of each way to hold the model, in one batch and in several, the one that lacks least
    nearest: dict[tuple[str, bool], PricedStrategy] = {}
    for priced in passed_over:
        way = priced.strategy.held_as, priced.strategy.micro_batches > 1
        if way not in nearest or priced.lacking_bytes < nearest[way].lacking_bytes:
            nearest[way] = priced
    simplest_first = sorted(
        nearest.values(), key=lambda priced: (len(priced.strategy.techniques), priced.lacking_bytes)
    )
    itemised = {priced.strategy.name for priced in simplest_first[:MOST_ITEMISED]}
    kept = []
    for priced in passed_over:
        details = {}
        if priced.strategy.name in itemised:
            items = {name: size for name, size in memory_items(priced).items() if size}
            details = {"items": items, "reason": priced.reason, "step_seconds": priced.time.total}
        kept.append(
            RejectedStrategy(
                strategy=priced.strategy.name,
                memory_bytes=priced.memory.total,
                lacking_bytes=priced.lacking_bytes,
                **details,
            )
        )
    return tuple(kept)


LOCAL = "local"
"""Name of the cluster of a study that names none: this machine."""
NO_PLAN_EXCESS = 1.0
"""Memory excess of a candidate that cannot be priced, for the sampler: as if twice the memory were needed."""


def declared_cluster(name: str, ranks: str | None = None, hbm: int | None = None, **shares: Any) -> Cluster:
    """The cluster of this name or file, with the one shape and the memory declared; see `declared_clusters`."""
    (cluster,) = declared_clusters(name, () if ranks is None else (ranks,), hbm, **shares)
    return cluster


def declared_clusters(
    name: str,
    shapes: Sequence[str] = (),
    hbm: int | None = None,
    *,
    side_by_side: int = 1,
    threads: int | None = None,
    hosts_apart: bool = False,
) -> tuple[Cluster, ...]:
    """The cluster of this name or file in each of the shapes, the least first, or in its own; with the memory
    declared.

    This machine (`local`, `this`) is measured, which takes a second or two, and shared: by trials side by side,
    and if the CPU is the accelerator by all ranks, or those of a host if `hosts_apart`. A rank then has
    the speed of its `threads`.

    Raises:
        UserError: for an unknown name, a file that is no cluster, ranks or sizes that are not valid.
    """
    this_machine = name in (LOCAL, THIS)
    own_shape = load_cluster(THIS if this_machine else name)
    clusters = [own_shape.with_ranks(shape) for shape in shapes] or [own_shape]
    if this_machine:
        owners = side_by_side
        if own_shape.device == "cpu":
            on_a_machine = [cluster.gpus_per_host if hosts_apart else cluster.ranks for cluster in clusters]
            # a larger shape takes the places of several of the least one (`search.execution.attempts`)
            owners = max(side_by_side * on_a_machine[0], *on_a_machine)
        clusters = [shared(cluster, owners, threads) for cluster in clusters]
    return tuple(cluster.with_hbm(hbm) if hbm is not None else cluster for cluster in clusters)


def cluster_summary(clusters: Sequence[Cluster]) -> ClusterSummary:
    """The cluster, in one or several shapes, as reports describe it."""
    cluster = clusters[0]
    return ClusterSummary(
        name=cluster.name,
        hosts=cluster.hosts,
        gpus_per_host=cluster.gpus_per_host,
        hbm=cluster.hbm,
        verified=cluster.verified,
        shapes=tuple(one.shape for one in clusters) if len(clusters) > 1 else (),
    )


def planned(
    record: TrialRecord,
    job: Job,
    clusters: Cluster | Sequence[Cluster],
    options: PlanOptions = DEFAULT_OPTIONS,
) -> TrialRecord:
    """The record with its plan; one that fits nowhere has ended as infeasible.

    Raises:
        UserError: if a trial of the baseline cannot be planned at all (its batch is smaller than the ranks).
    """
    began = time.monotonic()
    try:
        job_plan = plan_of(job, clusters, options)
    except UserError as error:
        if record.kind is TrialKind.BASELINE:
            raise
        return _infeasible(record, str(error), NO_PLAN_EXCESS, began)
    record = with_plan(record, job_plan)
    if job_plan.chosen is not None or record.kind is TrialKind.BASELINE:
        return record
    return _infeasible(
        record, job_plan.remedy or "no memory technique fits.", record.plan.memory_excess, began
    )


def plan_of(job: Job, clusters: Cluster | Sequence[Cluster], options: PlanOptions = DEFAULT_OPTIONS) -> Plan:
    """A job's plan for a cluster, or for one in the least of several shapes in which a strategy fits.

    Raises:
        UserError: for a batch smaller than the number of ranks.
    """
    shapes = (clusters,) if isinstance(clusters, Cluster) else clusters
    return plan_in_least_shape(job.model, job.features, job.training, shapes, options=options)


def with_plan(
    record: TrialRecord, job_plan: Plan, taken: PricedStrategy | None = None, ran_out: Collection[str] = ()
) -> TrialRecord:
    """The record with what is kept of a plan by which it is held as `taken`, by default as the plan has chosen.

    `ran_out` are the strategies that were tried before and ran out of memory.
    """
    priced, best = taken or job_plan.closest, taken or job_plan.best
    chosen = job_plan.chosen if taken is None else taken.strategy
    lacks = taken is None and job_plan.lacking_bytes
    return record.with_plan(
        technique=chosen.name if chosen else None,
        ranks=job_plan.shape,
        peak_bytes=priced.memory.total if priced else None,
        step_seconds=priced.time.total if priced else None,
        memory_excess=(
            job_plan.lacking_bytes / job_plan.hbm
            if lacks or best is None
            else min(0, best.memory.needed - job_plan.hbm) / job_plan.hbm  # what is left over, negative
        ),
        summary=plan_summary(job_plan, priced, ran_out),
    )


def _infeasible(record: TrialRecord, error: str, excess: float | None, began: float) -> TrialRecord:
    record = record.with_plan(technique=None, memory_excess=excess)
    return record.with_result(outcome=Outcome.INFEASIBLE, error=error, seconds=time.monotonic() - began)


def plan_summary(job_plan: Plan, priced: PricedStrategy | None, ran_out: Collection[str] = ()) -> PlanSummary:
    """What a trial's record keeps of a plan by which it is held as `priced`; None if tables alone do not fit.

    `ran_out` are the strategies that were tried before and ran out of memory.
    """
    options = job_plan.options
    common = {
        "ranks": job_plan.shape,
        "other_shapes": job_plan.other_shapes,
        "fits": job_plan.chosen is not None,
        "examples_per_rank": job_plan.examples_per_rank,
        "remedy": job_plan.remedy,
        "faster": job_plan.faster,
        "notes": job_plan.notes,
        "restricted_to": options.technique.name if options.technique else None,
        "memory_margin": options.memory_margin,
        "ran_out": tuple(ran_out),
    }
    if priced is None:
        return PlanSummary(strategy=None, **common)
    return PlanSummary(
        strategy=priced.strategy.name,
        memory_bytes=memory_items(priced),
        margin_bytes=priced.memory.margin,
        host_bytes=priced.memory.host,
        peak_at=priced.memory.peak_at,
        step_seconds=priced.time.model_dump(exclude={"total"}),
        table_hit_rate=priced.table_hit_rate,
        reason=priced.reason,
        rejected=rejected(job_plan, priced, ran_out),
        **common,
    )


# Whether anything in a space fits a cluster and the limit on table bytes, and what the nearest candidate lacks
# if nothing does.

DRAWN = 200
"""Number of drawn candidates of which one must fit: many more than a study tries by training them."""
MIB = 2**20


def check_some_fit(pricer: CandidatePricer, cluster: Cluster, plan: Callable[[Candidate], Plan]) -> None:
    """Draws candidates of the space of `pricer` until one fits.

    Raises:
        UserError: if none does, naming the nearest and what would help; or why none could be planned.
    """
    nearest: tuple[Plan, ModelConfig] | None = None
    trouble: UserError | None = None
    for drawn in islice(evenly(pricer, set(), random.Random(0), {}), DRAWN):
        try:
            candidate_plan = plan(drawn.candidate)
        except UserError as error:  # a batch smaller than the ranks: this candidate alone is infeasible
            trouble = error
            continue
        if candidate_plan.chosen is not None:
            return
        if nearest is None or candidate_plan.lacking_bytes < nearest[0].lacking_bytes:
            nearest = candidate_plan, drawn.candidate.model
    if nearest is not None:
        raise too_little_memory(pricer.space.name, "nothing fits", cluster, DRAWN, *nearest)
    if trouble is not None:
        raise trouble


def check_some_tables_fit(pricer: CandidatePricer) -> None:
    """Draws candidates of the space of `pricer` until the embedding tables of one are within the study's limit.

    Raises:
        UserError: if none are, naming the smallest.
    """
    limit, rng = pricer.limits.max_table_bytes, random.Random(0)
    if limit is None:
        return
    smallest: PricedCandidate | None = None
    for _ in range(MOST_OVER):
        priced = pricer.price(pricer.space.random_point(rng))
        if priced is None:
            continue
        if priced.table_bytes <= limit:
            return
        if smallest is None or priced.table_bytes < smallest.table_bytes:
            smallest = priced
    if smallest is not None:
        raise UserError(
            f"space {pricer.space.name!r}: no candidate has embedding tables within max_table_bytes="
            f"{byte_words(limit)}, among {MOST_OVER} drawn. The smallest are those of "
            f"{short_name(smallest.candidate.model.to_dict())}, and would be with max_table_bytes="
            f"{smallest.table_bytes}. Shorter embeddings (embedding_dim, table_dim_exponent), a smaller "
            "growing.capacity or training.table_precision=fp16 make tables smaller."
        )


def too_little_memory(
    space: str, fit: str, cluster: Cluster, drawn: int, plan: Plan, model: ModelConfig
) -> UserError:
    """An error with the nearest candidate's plan and need; `fit` says how many of the drawn candidates fit."""
    needed = -(-(plan.hbm + plan.lacking_bytes) // MIB)
    return UserError(
        f"space {space!r}: {fit} {byte_size(plan.hbm)} per rank of cluster {cluster.name!r}, among {drawn} "
        f"candidates drawn at most. The nearest that does not is {short_name(model.to_dict())}, and would with "
        f"hbm={needed}MiB. {plan.remedy}"
    )
