"""How many trials go on side by side on this machine, and with how many threads each."""

from __future__ import annotations

from dataclasses import dataclass

from dhen.errors import UserError
from search.config import StudyConfig
from search.planning.attempts import ranks_here
from trials.cluster.machine import cores, device, fastest_threads

MOST = 4
"""Largest number of trials side by side where the study does not say
(docs/decisions/0007-candidates-side-by-side.md)."""


@dataclass(frozen=True)
class Parallelism:
    """The shares of this machine that trials have."""

    side_by_side: int
    """Number of trials at the same time."""
    threads: int
    """Number of CPU threads per rank."""


def parallelism(parallel: int | None, threads: int | None, ranks: int = 1) -> Parallelism:
    """Trials side by side and threads per rank; what is not given follows from the other.

    A trial has so many `ranks`, processes that share this machine.

    Where neither is given: one trial on an accelerator, else as many as there are cores, four at most; then of
    each trial's share of the cores as many threads as are found to gain (`fastest_threads`).
    """
    if parallel is None:
        parallel = 1 if device().type != "cpu" else max(1, min(MOST, cores() // (ranks * (threads or 1))))
    return Parallelism(parallel, threads or fastest_threads(max(1, cores() // (ranks * parallel))))


def study_parallelism(config: StudyConfig) -> Parallelism:
    """The shares of a study's trials; one trial at a time where only then the wall clock tells a forward time.

    Raises:
        UserError: where the study says several all the same.
    """
    disturbed = config.serving.threads > 1 or device().type != "cpu"
    alone = config.serving.max_ms is not None and disturbed
    if alone and config.parallel is not None and config.parallel > 1:
        raise UserError(
            f"parallel={config.parallel} and serving.max_ms: a forward time with several threads, or on an "
            "accelerator, is measured while nothing else trains; give parallel=1, or serving.threads=1 on a CPU."
        )
    return parallelism(1 if alone else config.parallel, config.threads, ranks_here(config))
