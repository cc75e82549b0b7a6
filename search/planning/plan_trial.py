"""A study's plans: the cluster that they are for, and each trial's plan before it trains.

Training happens on the machines at hand whatever the cluster is; the record says what was planned and what was
executed. A candidate that no technique makes fit ends at once, and its record says by how much it failed,
which the sampler learns.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from dhen.errors import UserError
from search.planning.rejected import memory_items, rejected
from trials.cluster.cluster import Cluster
from trials.cluster.load import THIS, load_cluster
from trials.cluster.shared import shared
from trials.job import Job
from trials.planner.estimates import PricedStrategy
from trials.planner.options import DEFAULT_OPTIONS, PlanOptions
from trials.planner.plan import Plan, plan_in_least_shape
from trials.record import Outcome, PlanSummary, TrialKind, TrialRecord
from trials.study_record import ClusterSummary

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
    and where the CPU is the accelerator by all ranks, or those of a host where `hosts_apart`. A rank then has
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
            # a larger shape takes the places of several of the least one (`search.execution.parallelism`)
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
        UserError: where a trial of the baseline cannot be planned at all (its batch is smaller than the ranks).
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


def with_plan(record: TrialRecord, job_plan: Plan) -> TrialRecord:
    """The record with what is kept of a plan."""
    closest = job_plan.closest
    return record.with_plan(
        technique=job_plan.chosen.name if job_plan.chosen else None,
        ranks=job_plan.shape,
        peak_bytes=closest.memory.total if closest else None,
        step_seconds=closest.time.total if closest else None,
        memory_excess=_excess(job_plan),
        summary=plan_summary(job_plan, closest),
    )


def _excess(job_plan: Plan) -> float:
    """Missing bytes divided by available bytes; where the plan fits, the share left over, negative."""
    if job_plan.lacking_bytes or job_plan.best is None:
        return job_plan.lacking_bytes / job_plan.hbm
    return unused(job_plan.best, job_plan)


def unused(priced: PricedStrategy, job_plan: Plan) -> float:
    """Returns the share of the memory that a strategy which fits leaves over, as a negative number."""
    return min(0, priced.memory.needed - job_plan.hbm) / job_plan.hbm


def _infeasible(record: TrialRecord, error: str, excess: float | None, began: float) -> TrialRecord:
    record = record.with_plan(technique=None, memory_excess=excess)
    return record.with_result(outcome=Outcome.INFEASIBLE, error=error, seconds=time.monotonic() - began)


def plan_summary(job_plan: Plan, priced: PricedStrategy | None, ran_out: Collection[str] = ()) -> PlanSummary:
    """What a trial's record keeps of a plan by which it is held as `priced`; None where tables alone do not fit.

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
