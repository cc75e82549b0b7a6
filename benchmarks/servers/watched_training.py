"""A training against servers in processes as a study starts them, and somebody who looks at them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.models.one_network import parsed, stacked
from trials.cluster.machine import preferred_precision
from trials.data.prepared_log import PreparedLog
from trials.records.events import Event, FailureEvent
from trials.records.job import Job, TablesConfig, TrainingConfig
from trials.records.strategy import Strategy
from trials.records.task import Task
from trials.runtime.launcher import POLL_SECONDS, Launcher, Run, wait_for

DENSE = {"light": stacked("linear", layers=1), "heavy": stacked("dcn_v2", "dlrm", "mlp", layers=3)}
"""Networks by the weight of their dense part."""
Look = Callable[[Run, list[Event]], bool]
"""A function that is given the processes and the events since its last look; it tells whether that is enough."""


def served_job(
    log: PreparedLog, dense: str, tables: TablesConfig, training: TrainingConfig, seed: int = 0
) -> Job:
    """A job of one of these networks, resolved for a log."""
    settings = training.replace(tables=tables)
    return Job(
        model=parsed(DENSE[dense]),
        features=log.features,
        log=log.fingerprint,
        training=settings.resolved(log.manifest.rows["train"], preferred_precision()),
        seed=seed,
    )


def served_task(log: PreparedLog, job: Job, strategy: Strategy, ranks: int) -> Task:
    """A training of a job, with a thread for each rank and server."""
    return Task(job=job, log_directory=str(log.directory), threads=1, strategy=strategy, gpus_per_host=ranks)


def watched(
    launcher: Launcher, task: Task, folder: Path, look: Look | None = None, seconds: float = POLL_SECONDS
) -> list[Event]:
    """Runs a task to its end, or until `look` has seen enough, which is called at least every so many seconds.

    Raises:
        RuntimeError: if it fails by itself.
    """
    run, events = launcher.start(task, folder), list[Event]()
    while not run.ended:
        wait_for([run], seconds)
        said = run.new_events()
        events += said
        if look is not None and look(run, said):
            run.kill()
            return events
    for event in events:
        if isinstance(event, FailureEvent) and not event.killed:
            raise RuntimeError(event.error)
    return events
