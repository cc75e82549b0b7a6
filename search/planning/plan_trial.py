"""A study's plans: the cluster they are for, and each trial's plan before it trains.

Training happens on what is here whatever the cluster is; the record says what was planned and what was
executed. A candidate that no technique makes fit ends at once, and its record says by how much it failed,
which the sampler learns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from dhen.errors import UserError
from trials.cluster.cluster import Cluster
from trials.cluster.load import THIS, load_cluster
from trials.cluster.shared import shared
from trials.job import Job
from trials.planner.estimates import PricedStrategy
from trials.planner.plan import Plan, Prefer, plan
from trials.record import Outcome, PlanSummary, RejectedStrategy, TrialKind, TrialRecord
from trials.study_record import ClusterSummary

LOCAL = "local"
"""The cluster of a study that names none: this machine."""
NO_PLAN_EXCESS = 1.0
"""What the sampler is told of a candidate that cannot be priced at all: as if twice the memory were needed."""


def declared_cluster(
    name: str,
    ranks: str | None = None,
    hbm: int | None = None,
    *,
    side_by_side: int = 1,
    threads: int | None = None,
    hosts_apart: bool = False,
) -> Cluster:
    """The cluster of this name or file, with the ranks and the memory declared.

    This machine (`local`, `this`) is measured, which takes a second or two, and shared: by trials side by side,
    and where the CPU is the accelerator by all ranks, or those of a host where `hosts_apart`. A rank then has
    the speed of its `threads`.

    Raises:
        UserError: for an unknown name, a file that is none, ranks or sizes that are none.
    """
    here = name in (LOCAL, THIS)
    cluster = load_cluster(THIS if here else name)
    cluster = cluster.with_ranks(ranks) if ranks is not None else cluster
    if here:
        owners = side_by_side
        if cluster.device == "cpu":
            owners *= cluster.gpus_per_host if hosts_apart else cluster.ranks
        cluster = shared(cluster, owners, threads)
    return cluster.with_hbm(hbm) if hbm is not None else cluster


def cluster_summary(cluster: Cluster) -> ClusterSummary:
    """What reports say of the cluster."""
    return ClusterSummary(
        name=cluster.name,
        hosts=cluster.hosts,
        gpus_per_host=cluster.gpus_per_host,
        hbm=cluster.hbm,
        verified=cluster.verified,
    )


def planned(
    record: TrialRecord, job: Job, cluster: Cluster, prefer: Prefer, *, margin_bytes: int = 0
) -> TrialRecord:
    """The record with its plan, which leaves `margin_bytes` free; what fits nowhere has ended as infeasible.

    Raises:
        UserError: where a trial of the baseline cannot be planned at all (its batch is smaller than the ranks).
    """
    began = time.monotonic()
    try:
        found = plan_of(job, cluster, prefer, margin_bytes)
    except UserError as error:
        if record.kind is TrialKind.BASELINE:
            raise
        return _infeasible(record, str(error), NO_PLAN_EXCESS, began)
    record = with_plan(record, found)
    if found.chosen is not None or record.kind is TrialKind.BASELINE:
        return record
    return _infeasible(record, found.remedy or "no memory technique fits.", record.plan.memory_excess, began)


def plan_of(job: Job, cluster: Cluster, prefer: Prefer, margin_bytes: int) -> Plan:
    """A job's plan.

    Raises:
        UserError: for a batch smaller than the number of ranks.
    """
    return plan(job.model, job.features, job.training, cluster, prefer=prefer, margin_bytes=margin_bytes)


def with_plan(record: TrialRecord, found: Plan) -> TrialRecord:
    """The record with what is kept of a plan."""
    shown = found.closest
    return record.with_plan(
        technique=found.chosen.name if found.chosen else None,
        peak_bytes=shown.memory.total if shown else None,
        step_seconds=shown.time.total if shown else None,
        memory_excess=_excess(found),
        summary=_summary(found, shown),
    )


def _excess(found: Plan) -> float:
    """Bytes that are missing over the bytes there are; the share left over, negative, where it fits."""
    best = found.best
    spare = min(0, best.memory.total - found.hbm) if best else 0
    return (found.lacking_bytes or spare) / found.hbm


def _infeasible(record: TrialRecord, error: str, excess: float | None, began: float) -> TrialRecord:
    record = record.with_plan(technique=None, memory_excess=excess)
    return record.with_result(outcome=Outcome.INFEASIBLE, error=error, seconds=time.monotonic() - began)


def _summary(found: Plan, shown: PricedStrategy | None) -> PlanSummary:
    whole = {
        "fits": found.chosen is not None,
        "examples_per_rank": found.examples_per_rank,
        "remedy": found.remedy,
        "faster": found.faster,
        "notes": found.notes,
    }
    if shown is None:
        return PlanSummary(strategy=None, **whole)
    return PlanSummary(
        strategy=shown.strategy.name,
        memory_bytes=shown.memory.model_dump(exclude={"activations_by_layer", "host", "peak_at"}),
        host_bytes=shown.memory.host,
        peak_at=shown.memory.peak_at,
        step_seconds=shown.time.model_dump(exclude={"total"}),
        reason=shown.reason,
        rejected=tuple(_rejected(found, shown)),
        **whole,
    )


def _rejected(found: Plan, shown: PricedStrategy) -> Iterator[RejectedStrategy]:
    """Others with no more techniques than the chosen one, or one where nothing fits."""
    most = len(shown.strategy.techniques) if shown.fits else 1
    for priced in found.strategies:
        if priced is not shown and len(priced.strategy.techniques) <= most:
            yield RejectedStrategy(
                strategy=priced.strategy.name,
                memory_bytes=priced.memory.total,
                lacking_bytes=priced.lacking_bytes,
            )
