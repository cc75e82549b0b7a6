"""How trials are trained: as planned, on this machine or on hosts of a launcher; else by one process.

A trial that ran out of memory although it was planned moves on to the next strategy that is predicted to need
less by what was missing, each strategy once, and later plans leave as much room as the prediction was short
of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dhen.config import DhenConfig
from dhen.errors import UserError
from search.config import StudyConfig
from search.execution.plan_trial import plan_of, with_plan
from search.execution.step_correction import StepCorrections
from trials.cluster.cluster import Cluster, byte_words
from trials.cluster.machine import cores, device, fastest_threads
from trials.planner.estimates import DEFAULT_OPTIONS, PlanOptions, PricedStrategy
from trials.planner.ladder import choose, pipeline_degrees
from trials.planner.plan import Plan
from trials.planner.pricing import pricing_of
from trials.records.job import Job
from trials.records.places import LOCAL as LAUNCHED_HERE
from trials.records.strategy import DELAYING, Ranks, Strategy, named
from trials.records.trial_record import Attempt, Outcome, Result, TrialRecord
from trials.runtime.hosts.hosts import Node
from trials.runtime.hosts.placement import most_at_once, room_for, shape
from trials.runtime.hosts.ray_connection import devices_here
from trials.training.embeddings.requirements import check_tables

DEADLINE_SECONDS = 900.0
"""Silence after which several ranks are taken to hang; an evaluation may take as long without a word."""
DP = Strategy()
"""The strategy of one process, with nothing sharded: the empty set of memory techniques."""


class Execution(NamedTuple):
    """How the trials of one study are executed, and what follows an attempt that ended badly."""

    cluster: Cluster | None = None
    """The cluster that plans are executed on, in its least shape; None if one process trains whatever was
    planned."""
    hbm: int | None = None
    """Memory that ranks are held to; None if they may take more than was planned."""
    options: PlanOptions = DEFAULT_OPTIONS
    """What the study asks of plans."""
    larger: tuple[Cluster, ...] = ()
    """The same cluster in the other shapes that trials may have, the least first."""
    corrections: StepCorrections | None = None
    """What trainings on this machine have taken, by which predicted seconds are corrected; None elsewhere."""

    def step_seconds(self, record: TrialRecord) -> float | None:
        """Seconds of a step of a trial's plan, corrected by what is known now; None if it has none."""
        return record.plan.step_seconds if self.corrections is None else self.corrections.seconds(record)

    def corrected(self, record: TrialRecord) -> TrialRecord:
        """The record of a trial that was planned, with the seconds that a step is expected to take."""
        return record.with_plan(step_seconds=self.step_seconds(record))

    def cluster_of(self, record: TrialRecord) -> Cluster | None:
        """The cluster in the shape of a trial's plan; None if one process trains whatever was planned."""
        shapes = (self.cluster, *self.larger)
        return next(
            (one for one in shapes if one is not None and one.shape == record.plan.ranks), self.cluster
        )

    def ranks(self, record: TrialRecord) -> int:
        """Number of processes that train a trial."""
        cluster = self.cluster_of(record)
        return cluster.ranks if cluster is not None else 1

    @property
    def counted(self) -> bool:
        """Whether peaks are of tensors, as plans predict them: under an enforced memory, or on an accelerator."""
        return self.hbm is not None or (self.cluster is not None and device().type != "cpu")

    def strategy(self, record: TrialRecord) -> Strategy:
        """The strategy of a trial's next attempt: as planned, if plans are executed; else plain DP, or what
        can delay updates if they are, or a server if tables are to be on servers. A trial of the baseline
        that fits nowhere has the strategy that lacks least."""
        summary = record.plan.summary
        planned = record.plan.technique or (summary.strategy if summary is not None else None)
        if self.cluster is not None and planned is not None:
            return named(planned)
        job = record.job
        if job.training.get("tables") and job.embedding_parameters:  # servers are wanted, and have something
            return Strategy(servers=1)
        return Strategy(dense=DELAYING) if job.training.get("delayed_update") else DP

    def held_as(self, trial: TrialRecord, job: Job) -> str | None:
        """The technique by which a trial's network, or a part of it, is trained once more: that of the trial, in a
        pipeline of as many stages as the part has layers for, or in none."""
        technique, cluster = trial.result.technique or trial.plan.technique, self.cluster_of(trial)
        if trial.origin.reused_from_study is not None:  # trained there in a shape that is none here
            technique = trial.plan.technique or technique
        if technique is None or cluster is None:
            return technique
        strategy = named(technique)
        layers = len(job.model.layers) if isinstance(job.model, DhenConfig) else 0
        if strategy.pipeline * strategy.chunks_per_rank <= layers or strategy.pipeline == 1:
            return technique
        fitting = pipeline_degrees(cluster.ranks, layers // strategy.chunks_per_rank)
        if not fitting:
            return strategy.replace(pipeline=1, schedule="1f1b").name
        return strategy.replace(pipeline=fitting[-1]).name

    def check(self, record: TrialRecord, job: Job) -> None:
        """Checks that a trial's ranks can hold the job's tables, before any rank starts.

        Raises:
            UserError: without TorchRec, or for shards that its kernels do not take.
        """
        cluster = self.cluster_of(record)
        if cluster is not None and cluster.ranks > 1 and job.features.tables:
            ranks = Ranks(0, cluster.hosts, cluster.gpus_per_host)
            check_tables(pricing_of(job, cluster).placement, ranks)

    def next_attempt(self, record: TrialRecord, job: Job) -> TrialRecord | None:
        """A trial as it begins its next attempt; None if the last one ended otherwise, or none is left.

        A trial that was killed goes on under the same strategy, one that ran out of memory
        under the next one up the ladder of its shape, and after the last one in the next shape in which a strategy
        fits. If a technique is forced, that one keeps it, and recomputes more or has more micro-batches.
        """
        last = record.attempts[-1].outcome
        anew = record.replace(result=Result())
        if last is Outcome.INTERRUPTED:
            return anew
        if self.cluster is None or last is not Outcome.OUT_OF_MEMORY:
            return None
        cluster = self.cluster_of(record)
        assert cluster is not None
        job_plan = self._plan_of_climb(job, cluster)
        # those that were planned by an older version, or not at all, count
        in_shape = tuple(
            attempt
            for attempt in record.attempts
            if attempt.plan is None or attempt.plan.ranks in (None, cluster.shape)
        )
        priced = next_strategy(job_plan, in_shape)
        if priced is None:
            larger_plan = self._plan_in_larger_shape(record, job, cluster)
            if larger_plan is None or larger_plan.best is None:
                return None
            job_plan, priced, in_shape = larger_plan, larger_plan.best, ()
        ran_out = dict.fromkeys(
            attempt.strategy for attempt in in_shape if attempt.outcome is Outcome.OUT_OF_MEMORY
        )
        return self.corrected(with_plan(anew, job_plan, priced, tuple(ran_out)))

    def ended(self, record: TrialRecord, job: Job) -> TrialRecord:
        """A trial that no attempt follows, as it ends: one that ran out of memory says why none does."""
        if self.cluster is None or record.result.outcome is not Outcome.OUT_OF_MEMORY:
            return record
        cluster = self.cluster_of(record)
        assert cluster is not None
        why_none = self._why_none(job, cluster)
        if self.larger:
            why_none = f"{cluster.shape}: {why_none}"
            if self._larger_than(cluster):
                why_none += "; nor does one fit in a larger shape"
        return record.with_result(error=f"{record.result.error}; {why_none}")

    def _larger_than(self, cluster: Cluster) -> tuple[Cluster, ...]:
        """The shapes after this one."""
        shapes = [one.shape for one in (self.cluster, *self.larger) if one is not None]
        return self.larger[shapes.index(cluster.shape) :]

    def _plan_in_larger_shape(self, record: TrialRecord, job: Job, cluster: Cluster) -> Plan | None:
        """The plan in the least shape after this one in which a strategy fits, for a trial that ran out of memory
        under all that fits in this one; None if there is no such shape."""
        larger = self._larger_than(cluster)
        if not larger:
            return None
        # how much its attempts needed beyond their plans counts in place of what is asked for or learnt of others
        options = self.options.replace(memory_margin=0, learnt=learnt_margins([record]))
        try:
            larger_plan = plan_of(job, larger, options)
        except UserError:  # the batch is smaller than the ranks, or the ladder has no such technique
            return None
        ran_out = f"{cluster.shape}: ran out of memory under all that was predicted to fit."
        earlier = record.plan.summary.other_shapes if record.plan.summary is not None else ()
        return larger_plan.replace(other_shapes=(*earlier, ran_out, *larger_plan.other_shapes))

    def _why_none(self, job: Job, cluster: Cluster) -> str:
        """Says why no attempt follows one that ran out of memory, and what would be allowed without a forced
        technique."""
        asked = self.options.technique
        if asked is None:
            return "no other technique fits that is predicted to need less by as much"
        kept = self._plan_of_climb(job, cluster)
        least = min(kept.strategies, key=lambda priced: priced.memory.total, default=None)
        needs = (
            f", of which {least.strategy.name} needs least ({byte_words(least.memory.total)} by prediction)"
            if least is not None
            else ""
        )
        free = self._replace(options=self.options.replace(technique=None))._plan_of_climb(job, cluster)
        other = choose((one for one in free.strategies if one not in kept.strategies), "least")
        would = (
            f"without technique= {other.strategy.name} would fit by prediction"
            if other is not None
            else "no other technique would fit by prediction"
        )
        return f"technique={asked.name} is kept, with more recomputation or micro-batches{needs}; {would}"

    def _plan_of_climb(self, job: Job, cluster: Cluster) -> Plan:
        """The plan in which an attempt that ran out of memory looks for the next one: without margins, since what
        ran out of memory has said more than they do."""
        return plan_of(job, cluster, self.options.replace(memory_margin=0, learnt={}, climbing=True))

    def task_fields(self, record: TrialRecord, job: Job) -> dict[str, Any]:
        """Fields of a task for the processes of a trial that train or score its job, by its strategy and its
        shape."""
        strategy, cluster = self.strategy(record), self.cluster_of(record)
        if cluster is None:
            return {"strategy": strategy}
        fits = record.plan.technique is not None
        return {
            "evaluation_rows": pricing_of(job, cluster).evaluation_rows(strategy) if fits else None,
            "strategy": strategy,
            "hosts": cluster.hosts,
            "gpus_per_host": cluster.gpus_per_host,
            "cluster": cluster,
            "hbm": self.hbm,
            "deadline_seconds": DEADLINE_SECONDS if cluster.ranks > 1 or strategy.servers else None,
        }


def execution(
    config: StudyConfig, cluster: Cluster, *larger: Cluster, threads: int | None = None
) -> Execution:
    """How trials are executed: as planned on this machine or on a launcher's hosts, else by one rank; `larger` is
    the cluster in its other shapes, and `threads` are those of a rank."""
    options = plan_options(config)
    if not config.executes_plans:
        return Execution(options=options)
    here = config.launcher == LAUNCHED_HERE
    corrections = StepCorrections.here((cluster, *larger), threads) if here else None
    enforced = config.hbm is not None if config.enforce_memory == "auto" else config.enforce_memory
    return Execution(cluster, cluster.hbm if enforced else None, options, larger, corrections)


def plan_options(config: StudyConfig) -> PlanOptions:
    """What a study's settings ask of its plans."""
    return PlanOptions(
        prefer=config.prefer,
        technique=named(config.technique) if config.technique is not None else None,
        servers=config.servers,
        memory_margin=config.memory_margin,
    )


def ranks_here(config: StudyConfig) -> int:
    """Largest number of processes that a trial takes on this machine."""
    return max(shapes_here(config))


def most_ranks(config: StudyConfig) -> int:
    """Largest number of ranks of a trial, on all machines together."""
    shapes = config.declared_ranks if config.executes_plans else ()
    return max((hosts * ranks for hosts, ranks in shapes), default=ranks_here(config))


def shapes_here(config: StudyConfig) -> tuple[int, ...]:
    """Number of processes that a trial takes on this machine in each shape, the least first; if none is
    declared, one for each accelerator, or 1."""
    together = config.launcher == LAUNCHED_HERE
    if not config.executes_plans:
        return (1,)
    if not config.declared_ranks:
        return ((devices_here() or 1) if together else 1,)
    return tuple(hosts * ranks if together else ranks for hosts, ranks in config.declared_ranks)


def next_strategy(plan: Plan, attempts: tuple[Attempt, ...]) -> PricedStrategy | None:
    """The next strategy up the ladder after the last attempt ran out of memory; None if none is left.

    Strategies count that fit, were not tried, and need less than the last one by what it lacked: fewest
    techniques first, then the shortest step.
    """
    last, tried = attempts[-1], {attempt.strategy for attempt in attempts}
    lacking = max((last.needed_bytes or 0) - (last.limit_bytes or 0), 1)
    held = named(last.strategy).unsized_name
    before = next((priced for priced in plan.strategies if priced.strategy.unsized_name == held), None)
    if before is None:
        return None
    # a cache of tables is as large as the plan leaves room for, and this plan leaves another room
    same = before.strategy.name == last.strategy
    total = before.memory.total if same else (last.predicted_bytes or before.memory.total)
    remaining = [
        priced
        for priced in plan.strategies
        if priced.strategy.name not in tried and priced.memory.total <= total - lacking
    ]
    return choose(remaining, "least")


def learnt_margins(trials: Iterable[TrialRecord]) -> dict[str, int]:
    """Bytes by which the worst prediction so far was too low, by how the model was held (`Strategy.held_as`).

    Attempts that ran out of memory count: how far off plans are depends on the engine that holds the model.
    """
    margins: dict[str, int] = {}
    for attempt in (attempt for trial in trials for attempt in trial.attempts):
        if attempt.outcome is Outcome.OUT_OF_MEMORY and attempt.needed_bytes and attempt.predicted_bytes:
            held_as, missing = named(attempt.strategy).held_as, attempt.needed_bytes - attempt.predicted_bytes
            if missing > margins.get(held_as, 0):
                margins[held_as] = missing
    return margins


# How many trials go on side by side, here or on the nodes of a cluster, and with how many threads each.

MOST_ON_DEVICE = 16
"""Largest number of trials on an accelerator of a cluster's node: each has a CUDA context of 0.7 GiB there."""
MOST = 4
"""Largest number of trials side by side if the study does not say
(docs/decisions/0007-candidates-side-by-side.md)."""


@dataclass(frozen=True)
class Parallelism:
    """The shares that trials have of this machine, or of the nodes of a cluster."""

    side_by_side: int
    """Number of trials at the same time."""
    threads: int
    """Number of CPU threads per rank."""
    sharing: int
    """Largest number of trials that share a machine, or an accelerator of it, each in the least shape."""
    ranks: int | None = None
    """Largest number of ranks of all trials at the same time, if there are several shapes: a trial in a larger
    one takes the places of several in the least."""
    on_device: int = 1
    """Number of trials that share an accelerator of a cluster's node."""


def parallelism(
    parallel: int | None, threads: int | None, ranks: int = 1, larger: Sequence[int] = ()
) -> Parallelism:
    """Trials side by side and threads per rank; what is not given follows from the other.

    A trial has so many `ranks`, processes that share this machine, or one of the `larger` numbers.

    If neither is given: as many trials as have accelerators of their own, else as many as there are cores, four
    at most; then of each trial's share of the cores as many threads as are found to gain (`fastest_threads`).
    """
    devices = devices_here()
    if parallel is None:
        most = devices // ranks if devices is not None else min(MOST, cores() // (ranks * (threads or 1)))
        parallel = max(1, most)
    at_once = max(ranks * parallel, *larger, 1)
    threads = threads or fastest_threads(max(1, cores() // at_once))
    sharing = parallel if devices is None else max(1, math.ceil(ranks * parallel / devices))
    return Parallelism(parallel, threads, sharing, ranks=at_once if larger else None)


def cluster_parallelism(
    nodes: Sequence[Node],
    ranks: tuple[int, int],
    parallel: int | None,
    threads: int | None,
    larger: Sequence[tuple[int, int]] = (),
    servers: int | None = 0,
) -> Parallelism:
    """Trials side by side and threads per rank on nodes of a cluster; what is not given follows from them.

    Args:
        nodes: the cluster's nodes.
        ranks: number of hosts of a trial, and of ranks per host.
        parallel: number of trials at the same time; None: as many as the nodes can hold at once, if nobody else
            has anything of them. If that is more than there are accelerators for, trials with one rank per host
            share them.
        threads: number of threads per rank; None: as on one machine, of each trial's share of a node's CPUs as
            many as are found to gain.
        larger: the same numbers as `ranks` in other shapes that trials may have.
        servers: number of servers of tables of a trial, each with as many threads as a rank; None: see `shape`.
    """
    hosts, ranks_per_host = ranks
    on_host = [
        per_host + (1 if servers is None else -(-servers // count)) for count, per_host in (ranks, *larger)
    ]
    processes, widest = on_host[0], max(on_host)
    if threads is None:
        cpus = int(min((node.cpus for node in nodes if node.cpus >= widest), default=1))
        beside = MOST if parallel is None else math.ceil(parallel * hosts / max(1, len(nodes)))
        on_a_node = max(1, min(beside, cpus // processes))
        threads = fastest_threads(max(1, cpus // max(widest, processes * on_a_node)))
    on_device = _on_device(nodes, ranks, parallel or 1, threads, servers)
    wanted = shape(hosts, ranks_per_host, threads, servers, on_device)
    rooms = [room_for(wanted, node.cpus, node.gpus) for node in nodes]
    parallel = parallel or max(1, most_at_once(hosts, rooms))  # if none has room, a later check reports it
    at_once = max(parallel * hosts * ranks_per_host, *map(math.prod, larger), 1)
    # devices are shared by those that are on one, a node's CPUs and memory by all that are on the node
    sharing = on_device if wanted.gpus else max(1, min(parallel, max(rooms, default=1)))
    return Parallelism(parallel, threads, sharing, at_once if larger else None, on_device)


def _on_device(
    nodes: Sequence[Node], ranks: tuple[int, int], parallel: int, threads: int, servers: int | None
) -> int:
    """Returns the least number of trials on an accelerator with which so many are at once on the nodes; 1 if
    trials have several ranks on a host, or none has room."""
    hosts, ranks_per_host = ranks
    rooms = dict[int, int]()
    for on_device in range(1, MOST_ON_DEVICE + 1 if ranks_per_host == 1 else 2):
        wanted = shape(hosts, ranks_per_host, threads, servers, on_device)
        rooms[on_device] = most_at_once(hosts, [room_for(wanted, node.cpus, node.gpus) for node in nodes])
    enough = [on_device for on_device, room in rooms.items() if room >= parallel]
    return min(enough, default=max(rooms, key=lambda on_device: (rooms[on_device], -on_device)))


def most_servers(config: StudyConfig) -> int | None:
    """Returns the most servers of tables that a trial has; None for as many as hosts, if none are asked for."""
    if not config.training.tables.on_servers:
        return 0
    return config.servers or (named(config.technique).servers if config.technique else 0) or None


def study_parallelism(config: StudyConfig, nodes: Sequence[Node] | None = None) -> Parallelism:
    """The shares of a study's trials; one trial at a time if only then the wall clock tells a forward time.

    Args:
        config: the study's settings.
        nodes: nodes of the cluster that it trains on; None if that is this machine.

    Raises:
        UserError: if the study says several all the same.
    """
    disturbed = config.serving.threads > 1 or device().type != "cpu"
    alone = config.serving.max_ms is not None and disturbed
    if alone and config.parallel is not None and config.parallel > 1:
        raise UserError(
            f"parallel={config.parallel} and serving.max_ms: a forward time with several threads, or on an "
            "accelerator, is measured while nothing else trains; give parallel=1, or serving.threads=1 on a CPU."
        )
    parallel = 1 if alone else config.parallel
    if nodes is not None:
        least, *more = config.declared_ranks or ((1, 1),)
        return cluster_parallelism(nodes, least, parallel, config.threads, more, most_servers(config))
    least_here, *more_here = shapes_here(config)
    return parallelism(parallel, config.threads, least_here, more_here)
